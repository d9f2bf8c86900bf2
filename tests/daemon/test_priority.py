"""A node goes behind this machine's other programs, in all its threads and children, unless told otherwise."""

import json
import subprocess
import sys

import psutil
import pytest

from swarmnode.app.cli.join import command
from swarmnode.app.daemon.priority import LOWEST, waiting_share

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


CROWDED = """
import asyncio, os, sys, threading
from swarmnode.app.daemon.priority import take_priority, watch_processor

class Said(Exception):
    pass

class Telemetry:
    def event(self, event, **fields):
        raise Said(f"{event} {fields['share']}")

def spin():
    while True:
        pass

os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
take_priority("lowest")
threading.Thread(target=spin, daemon=True).start()
try:
    asyncio.run(watch_processor(Telemetry(), 0.5))
except Said as said:
    print(said)
"""
SPIN = "import os\nos.sched_setaffinity(0, {min(os.sched_getaffinity(0))})\nwhile True: pass"


@pytest.mark.node  # some seconds of a core
@pytest.mark.skipif(sys.platform != "linux", reason="schedstat is Linux's")
def test_a_node_tells_that_other_programs_have_the_processor() -> None:
    others = [subprocess.Popen([sys.executable, "-c", SPIN]) for _ in range(2)]
    try:
        done = subprocess.run([sys.executable, "-c", CROWDED], capture_output=True, text=True, timeout=300, check=True)
    finally:
        for other in others:
            other.kill()
            other.wait()
    event, share = done.stdout.split()
    assert event == "processor.taken" and 75 <= int(share) <= 100


def test_threads_at_rest_and_new_ones_wait_for_nothing() -> None:
    second = 1_000_000_000
    before = {1: (second, second), 2: (0, 0)}
    assert waiting_share(before, {1: (2 * second, 4 * second), 2: (0, 0)}, 4.0) == 0.75
    assert waiting_share(before, {1: (second, second + second // 10), 2: (0, 0)}, 4.0) == 0.0, "it asked for little"
    assert waiting_share(before, {3: (second, 9 * second)}, 4.0) == 0.0, "begun, or ended, meanwhile"
