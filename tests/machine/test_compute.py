"""The compute thread: one piece at a time, the most urgent first, and rests as its volunteer wants."""

from __future__ import annotations

import asyncio
import time

import pytest

from swarmnode.errors import LocalFault
from swarmnode.machine.compute import ThreadCompute
from swarmnode.ports import Priority
from tests.support.fake_telemetry import Quiet

PIECE_S = 0.02


def piece() -> None:
    time.sleep(PIECE_S)


async def test_a_share_of_the_time_is_rested() -> None:
    compute = ThreadCompute(Quiet())
    compute.load = 0.25
    try:
        begun = time.perf_counter()
        for _ in range(4):
            await compute.run(Priority.FORWARD, 1, piece)
        took = time.perf_counter() - begun
        assert took >= 3 * PIECE_S * 4 + PIECE_S, "three rests of three pieces' time, and the pieces"
        assert compute.worked_s >= 4 * PIECE_S * 4, "who tells its speed by it tells a quarter"
    finally:
        compute.close()


async def test_who_waits_for_an_outer_step_does_not_wait_for_a_rest() -> None:
    compute = ThreadCompute(Quiet())
    compute.load = PIECE_S / 600.0  # ten minutes of rest
    try:
        await compute.run(Priority.FORWARD, 1, piece)
        later = asyncio.ensure_future(compute.run(Priority.FORWARD, 1, lambda: None))
        await asyncio.wait_for(compute.run(Priority.OUTER, 0, lambda: None), 60)
        assert not later.done()
    finally:
        compute.close()
    with pytest.raises(asyncio.CancelledError):
        await later
    with pytest.raises(LocalFault, match="closed"):
        await compute.run(Priority.OUTER, 0, lambda: None)
