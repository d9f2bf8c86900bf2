"""The compute thread: one piece at a time, the most urgent first, and rests as its volunteer wants."""

import asyncio
import threading
import time

import pytest

from swarmnode.app.machine.compute import ThreadCompute
from swarmnode.base.errors import LocalFault
from swarmnode.base.parted_work import Parts
from swarmnode.base.ports import Priority, StreamingMessage, WireTensor
from swarmnode.base.wire_tensor import ReadyWatermark
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


async def test_an_outer_step_does_not_wait_for_a_rest() -> None:
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


async def test_a_paced_device_takes_its_time_whatever_this_machine_takes() -> None:
    compute = ThreadCompute(Quiet())
    compute.pace = lambda priority, samples: samples * PIECE_S
    begun = time.perf_counter()
    try:
        await compute.run(Priority.FORWARD, 3, lambda: None)
        assert time.perf_counter() - begun >= 3 * PIECE_S and compute.worked_s == 3 * PIECE_S
        # The first of these is late by two pieces' time; the device was done with it in one, and had three more to do.
        works = [compute.run(Priority.FORWARD, 1, lambda: time.sleep(3 * PIECE_S))]
        works += [compute.run(Priority.FORWARD, 1, lambda: None) for _ in range(3)]
        asked = time.perf_counter()
        await asyncio.gather(*works)
        assert time.perf_counter() - asked >= 4 * PIECE_S and compute.worked_s == pytest.approx(7 * PIECE_S)
        await compute.run(Priority.OUTER, 0, lambda: None)
        assert compute.worked_s < 8 * PIECE_S, "an outer step takes what it takes here"
    finally:
        compute.close()


async def test_a_paced_device_ends_at_once() -> None:
    compute = ThreadCompute(Quiet())
    compute.pace = lambda priority, samples: 3600.0
    under_way = asyncio.ensure_future(compute.run(Priority.FORWARD, 1, lambda: 5))
    while not compute.waiting:
        await asyncio.sleep(0)
    await asyncio.wait_for(asyncio.to_thread(compute.close), 60)
    if not under_way.cancelled():
        under_way.cancel()


class Aside:
    """Work in parts, of which the one beside the device ends when it is told to."""

    def __init__(self, error: Exception | None = None) -> None:
        self.begun = threading.Event()
        self.may_end = threading.Event()
        self.threads = list[str]()
        self.error = error

    def beside(self) -> int:
        self.threads.append(threading.current_thread().name)
        self.begun.set()
        assert self.may_end.wait(60)
        if self.error is not None:
            raise self.error
        return 20

    def begin(self) -> int | Parts[int]:
        return self.parts()

    def parts(self) -> Parts[int]:
        self.threads.append(threading.current_thread().name)
        found = yield self.beside
        self.threads.append(threading.current_thread().name)
        return found + 1


async def test_microbatches_go_on_beside_a_part_and_all_else_waits() -> None:
    compute = ThreadCompute(Quiet())
    work = Aside()
    try:
        outer = asyncio.ensure_future(compute.run(Priority.OUTER, 0, work.begin))
        assert await asyncio.to_thread(work.begun.wait, 60)
        other = asyncio.ensure_future(compute.run(Priority.OUTER, 0, lambda: 0))
        for priority in (Priority.FORWARD, Priority.BACKWARD):
            assert await asyncio.wait_for(compute.run(priority, 1, lambda: 1), 60) == 1
        assert not outer.done() and not other.done()
        work.may_end.set()
        assert await asyncio.wait_for(outer, 60) == 21
        assert await asyncio.wait_for(other, 60) == 0
        first, aside, last = work.threads
        assert first == last == "compute" != aside
    finally:
        work.may_end.set()
        compute.close()


async def test_an_error_beside_reaches_the_work_and_its_waiter() -> None:
    compute = ThreadCompute(Quiet())
    work = Aside(LocalFault("disk full"))
    work.may_end.set()
    try:
        with pytest.raises(LocalFault, match="disk full"):
            await asyncio.wait_for(compute.run(Priority.OUTER, 0, work.begin), 60)
        assert await asyncio.wait_for(compute.run(Priority.OUTER, 0, lambda: 1), 60) == 1
    finally:
        compute.close()


async def test_begun_work_ends_whether_or_not_it_is_awaited() -> None:
    """An outer step whose slow half is done must not lose its fast half."""
    compute = ThreadCompute(Quiet())
    work = Aside()
    try:
        outer = asyncio.ensure_future(compute.run(Priority.OUTER, 0, work.begin))
        assert await asyncio.to_thread(work.begun.wait, 60)
        outer.cancel()
        never = asyncio.ensure_future(compute.run(Priority.OUTER, 0, lambda: 1))
        await asyncio.sleep(0)
        threading.Timer(0.05, work.may_end.set).start()
        compute.close()
        assert len(work.threads) == 3
        with pytest.raises(asyncio.CancelledError):
            await asyncio.wait_for(never, 60)
    finally:
        work.may_end.set()


async def test_a_message_may_be_written_beside() -> None:
    compute = ThreadCompute(Quiet())
    work = Aside()
    mark = ReadyWatermark(8)

    def write() -> None:
        work.beside()
        mark.reach(8)

    tensor = WireTensor("u8", (8,), memoryview(bytes(8)), watermark=mark)
    message = StreamingMessage([tensor], write).written_beside()
    try:
        assert await asyncio.wait_for(compute.run(Priority.OUTER, 0, lambda: message), 60) is message
        assert await asyncio.to_thread(work.begun.wait, 60)
        after = asyncio.ensure_future(compute.run(Priority.OUTER, 0, lambda: 2))
        assert await asyncio.wait_for(compute.run(Priority.FORWARD, 1, lambda: 1), 60) == 1
        assert not message.complete and not after.done()
        work.may_end.set()
        await asyncio.wait_for(message.finished(), 60)
        assert await asyncio.wait_for(after, 60) == 2
    finally:
        work.may_end.set()
        compute.close()
