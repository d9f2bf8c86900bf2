"""The place of a node among this machine's programs: behind those that a person uses, unless told otherwise.

A program may slow those of a person by a fiftieth only if it gets no more than that of a busy core. So a node of the
lowest priority hardly works while others take all cores, and its owner has to hear of it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Mapping
from pathlib import Path

import psutil

from swarmnode.base.ports import Telemetry

LOWEST = 19  # of nice(2): on a busy core 15 parts of 1024 + 15 (Linux, sched_prio_to_weight)
LOOK_S = 10.0  # guess: some pieces of work, and well within the half minute in which a wait is told
ASKED_SHARE = 0.25  # guess: who asks for less of a core is at rest, or waits for others' work
TAKEN_SHARE = 0.75  # guess: threads of its own on few cores wait for each other half the time at most
GIVEN_SHARE = 0.5
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


async def watch_processor(telemetry: Telemetry, period_s: float = LOOK_S) -> None:
    """Tell when other programs take the processor and when they give it back, until cancelled. Only Linux says how long
    a thread waits for a processor (`schedstat` in proc(5))."""
    taken = False
    before = _thread_times()
    while before:
        await asyncio.sleep(period_s)
        now = _thread_times()
        share = waiting_share(before, now, period_s)
        before = now
        if not taken and share >= TAKEN_SHARE:
            telemetry.event("processor.taken", share=int(100.0 * share))
        elif taken and share < GIVEN_SHARE:
            telemetry.event("processor.given")
        taken = share >= (GIVEN_SHARE if taken else TAKEN_SHARE)


ThreadTimes = Mapping[int, tuple[int, int]]
"""By thread: nanoseconds on a processor, and waiting for one."""


def waiting_share(before: ThreadTimes, now: ThreadTimes, period_s: float) -> float:
    """The share of the time in which threads could run that they waited for a processor, 0 to 1; 0 where they asked for
    little."""
    spans = [(ran - before[thread][0], waited - before[thread][1]) for thread, (ran, waited) in now.items()
             if thread in before]  # fmt: skip
    asked_ns = sum(ran + waited for ran, waited in spans)
    return sum(waited for _, waited in spans) / asked_ns if asked_ns > ASKED_SHARE * period_s * 1e9 else 0.0


def _thread_times() -> dict[int, tuple[int, int]]:
    """The times of this process's threads; empty where the system does not tell."""
    times = dict[int, tuple[int, int]]()
    with contextlib.suppress(OSError):
        for task in _TASKS.iterdir():
            with contextlib.suppress(OSError, ValueError):  # it has ended meanwhile
                ran, waited, _ = (task / "schedstat").read_text().split()
                times[int(task.name)] = (int(ran), int(waited))
    return times
