"""A node goes behind this machine's other programs, in all its threads and children, unless told otherwise."""

import json
import subprocess
import sys

import psutil
import pytest

from swarmnode.app.cli.join import command
from swarmnode.app.daemon.priority import LOWEST

PROBE = """
import json, os, subprocess, sys, threading
from pathlib import Path
from swarmnode.app.daemon.priority import take_priority

begun = threading.Event()
over = threading.Event()
threading.Thread(target=lambda: (begun.set(), over.wait())).start()
begun.wait()
take_priority(sys.argv[1])
nices = [os.getpriority(os.PRIO_PROCESS, int(task.name)) for task in Path("/proc/self/task").iterdir()]
child = subprocess.run([sys.executable, "-c", "import os; print(os.nice(0))"], capture_output=True, text=True)
over.set()
import psutil
print(json.dumps([nices, int(child.stdout), int(psutil.Process().ionice().ioclass)]))
"""


def told(choice: str) -> list[object]:
    done = subprocess.run([sys.executable, "-c", PROBE, choice], capture_output=True, text=True, check=True)
    found = json.loads(done.stdout)
    assert isinstance(found, list)
    return found


@pytest.mark.skipif(sys.platform != "linux", reason="a thread's niceness is Linux's")
def test_every_thread_and_child_is_as_nice_as_can_be() -> None:
    nices, child, disk = told("lowest")
    assert nices == [LOWEST, LOWEST] and child == LOWEST
    assert disk == int(psutil.IOPRIO_CLASS_IDLE)


@pytest.mark.skipif(sys.platform != "linux", reason="a thread's niceness is Linux's")
def test_normal_changes_nothing() -> None:
    nices, child, _ = told("normal")
    here = psutil.Process().nice()
    assert nices == [here, here] and child == here


def test_a_volunteer_joins_with_the_lowest() -> None:
    (option,) = (one for one in command.params if one.name == "priority")
    assert option.default == "lowest"
