"""Cost of an event in virtual time relative to common event loops: CPU time of one thread, the best of several rounds
in which all loops alternate.

There are three workloads: tasks that yield to each other (`sleep(0)`), timers that are set and cancelled as by a call
with a timely answer, and timers that fire. The last has no comparison, since other loops would have to wait.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import random
import time
from collections.abc import Callable, Coroutine
from typing import Any

import uvloop

from swarmnode.simulation import event_queue
from swarmnode.simulation.virtual_time import VirtualLoop

TASKS = 1000
EVENTS = 200_000
ROUNDS = 5
KINDS = ("give way", "set and cancel", "fire")


async def _give_way(events: int) -> None:
    async def one() -> None:
        for _ in range(events // TASKS):
            await asyncio.sleep(0)

    await asyncio.gather(*(one() for _ in range(TASKS)))


async def _set_and_cancel(events: int) -> None:
    loop = asyncio.get_running_loop()
    for _ in range(events // TASKS):
        for timer in [loop.call_later(60.0 + i, print) for i in range(TASKS)]:
            timer.cancel()
        await asyncio.sleep(0)


async def _fire(events: int) -> None:
    draw = random.Random(0).random

    async def one() -> None:
        for _ in range(events // TASKS):
            await asyncio.sleep(draw())

    await asyncio.gather(*(one() for _ in range(TASKS)))


WORK = dict(zip(KINDS, (_give_way, _set_and_cancel, _fire), strict=True))


def _live(loop: asyncio.AbstractEventLoop, main: Coroutine[Any, Any, None]) -> None:
    try:
        loop.run_until_complete(main)
    finally:
        loop.close()


def run(events: int = EVENTS, rounds: int = ROUNDS) -> dict[str, Any]:
    """{"compiled", "events", "loops": [{"loop", "give way us", ..., "to asyncio"}]}: microseconds an event, and all
    that asyncio can do too together, in times of what it takes there."""
    compiled = event_queue.build()
    loops: dict[str, Callable[[], asyncio.AbstractEventLoop]] = {
        "asyncio": asyncio.new_event_loop,
        "uvloop": uvloop.new_event_loop,
        "virtual, Python": VirtualLoop,
    }
    if compiled:
        loops["virtual, C"] = VirtualLoop
    best = {(name, kind): float("inf") for name in loops for kind in KINDS}
    for _ in range(rounds):
        for name, loop in loops.items():
            with event_queue.unused() if name == "virtual, Python" else contextlib.nullcontext():
                for kind, work in WORK.items():
                    if kind != "fire" or loop is VirtualLoop:
                        begun = time.process_time()
                        _live(loop(), work(events))
                        best[name, kind] = min(best[name, kind], time.process_time() - begun)
    peer_s = sum(best["asyncio", kind] for kind in KINDS if kind != "fire")
    rows = []
    for name, loop in loops.items():
        row: dict[str, object] = {"loop": name}
        row |= {
            f"{kind} us": best[name, kind] / events * 1e6 if kind != "fire" or loop is VirtualLoop else math.nan
            for kind in KINDS
        }
        row["to asyncio"] = sum(best[name, kind] for kind in KINDS if kind != "fire") / peer_s
        rows.append(row)
    return {"compiled": compiled, "events": events, "loops": rows}
