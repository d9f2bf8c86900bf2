"""The place of a node among this machine's programs: behind those that a person uses, unless told otherwise."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import psutil

LOWEST = 19  # of nice(2): on a busy core 15 parts of 1024 + 15 (Linux, sched_prio_to_weight)
_TASKS = Path("/proc/self/task")
_GROUP = Path("/proc/self/autogroup")


def take_priority(choice: str) -> None:
    """Go behind other programs for processor and disk, with all threads and what is started from now on. "normal"
    changes nothing. A system that refuses, or knows no such thing, leaves it as it is."""
    if choice == "normal":
        return
    # On Linux a niceness is a thread's, and what was imported may have begun some.
    threads = [int(task.name) for task in _TASKS.iterdir()] if _TASKS.is_dir() else [0]
    for thread in threads:
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, thread, LOWEST)
    with contextlib.suppress(OSError, AttributeError, ValueError):
        psutil.Process().ionice(psutil.IOPRIO_CLASS_IDLE)
    # Where the kernel groups a session's processes (CONFIG_SCHED_AUTOGROUP), niceness counts inside the group alone. A
    # service's session is its own; a terminal's also has its owner's shell, and stays.
    if os.getsid(0) == os.getpid():
        with contextlib.suppress(OSError):
            _GROUP.write_text(str(LOWEST))
