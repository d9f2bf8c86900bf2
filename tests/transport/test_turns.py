"""Turns on a line: one after the other where one transfer fills it, side by side where none does; nobody waits for one
that hangs. A line here is a fluid, shared evenly by its flows, of which each has a limit of its own."""

import asyncio
import math
from dataclasses import dataclass, field

import pytest

from swarmnode.base.errors import Unavailable
from swarmnode.base.uplink_scheduler import BULK_BYTES, MEASURED_BYTES, WAIT_SHARE, UplinkScheduler

pytestmark = pytest.mark.loop("virtual")

MBIT = 1e6 / 8
MESSAGE = 8_000_000
STEP_S = 0.01


@dataclass(eq=False)
class Flow:
    left: float
    limit: float  # bytes a second
    gone: asyncio.Future[None]


@dataclass
class Line:
    rate: float
    flows: list[Flow] = field(default_factory=list)
    moved: float = 0.0

    async def send(self, nbytes: int, limit: float) -> None:
        flow = Flow(nbytes, limit, asyncio.get_running_loop().create_future())
        self.flows.append(flow)
        await flow.gone

    async def run(self) -> None:
        while True:
            await asyncio.sleep(STEP_S)
            room = self.rate * STEP_S
            flows = sorted(self.flows, key=lambda flow: flow.limit)
            for index, flow in enumerate(flows):
                passes = min(flow.left, flow.limit * STEP_S, room / (len(flows) - index))
                flow.left -= passes
                room -= passes
                self.moved += passes
                if flow.left < 1.0:
                    self.flows.remove(flow)
                    flow.gone.set_result(None)


async def use(line: Line, limits: list[float], seconds: float = 300.0) -> tuple[float, float]:
    """Who sends MESSAGE after MESSAGE, a task for each of `limits`: (share of the line used, flows at a time) after a
    minute."""
    scheduler = UplinkScheduler(lambda: int(line.moved))

    async def send(limit: float) -> None:
        while True:
            async with scheduler.turn(MESSAGE, math.inf):
                await line.send(MESSAGE, limit)

    tasks = [asyncio.ensure_future(line.run()), *(asyncio.ensure_future(send(limit)) for limit in limits)]
    await asyncio.sleep(60.0)
    before = line.moved
    counts = []
    for _ in range(int(seconds)):
        await asyncio.sleep(1.0)
        counts.append(len(line.flows))
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    return (line.moved - before) / (line.rate * seconds), sum(counts) / len(counts)


async def test_messages_that_fill_the_line_go_one_after_the_other() -> None:
    used, flows = await use(Line(50 * MBIT), [math.inf] * 16)
    assert used > 0.99
    assert flows < 1.2


async def test_small_messages_go_together_until_they_fill_the_line() -> None:
    used, flows = await use(Line(1000 * MBIT), [50 * MBIT] * 40)
    assert used > 0.88
    assert 17.0 < flows < 26.0


async def test_a_hanging_receiver_delays_no_other() -> None:
    used, flows = await use(Line(50 * MBIT), [0.0] * 6 + [math.inf] * 6)
    assert used > 0.9
    assert flows < 6 + 2.0


@pytest.mark.parametrize("was", [20.0, 200.0])
async def test_a_line_that_gets_faster_or_slower_stays_full(was: float) -> None:
    line = Line(was * MBIT)

    async def change() -> None:
        await asyncio.sleep(30.0)
        line.rate = 50 * MBIT

    run = line.run

    async def runs() -> None:
        await asyncio.gather(run(), change())

    line.run = runs  # type: ignore[method-assign]
    used, _ = await use(line, [math.inf] * 16)
    assert used > 0.99


async def test_the_order_is_that_of_coming_and_what_is_urgent_goes_first() -> None:
    scheduler = UplinkScheduler()
    order = list[str]()

    async def send(label: str, urgent: bool) -> None:
        await scheduler.take(MESSAGE, 100.0, urgent=urgent)
        order.append(label)
        await asyncio.sleep(1.0)
        scheduler.give(MESSAGE)

    async with asyncio.TaskGroup() as group:
        for label in ("first", "request", "request", "urgent", "urgent"):
            group.create_task(send(label, label == "urgent"))
    assert order == ["first", "urgent", "urgent", "request", "request"]
    assert asyncio.get_running_loop().time() == pytest.approx(5.0)


async def test_small_messages_take_no_turn() -> None:
    scheduler = UplinkScheduler()
    await scheduler.take(MESSAGE, 1.0)
    assert await scheduler.take(BULK_BYTES, 1.0) == 0.0
    scheduler.give(BULK_BYTES)
    with pytest.raises(Unavailable, match="our own uplink was busy"):
        await scheduler.take(BULK_BYTES + 1, 1.0)
    assert asyncio.get_running_loop().time() == pytest.approx(WAIT_SHARE)


async def test_a_cancelled_sender_keeps_no_turn() -> None:
    """Cancelled while it waits, or in the very moment its turn comes."""
    scheduler = UplinkScheduler()
    await scheduler.take(MESSAGE, 10.0)
    waiting, granted, after = (asyncio.ensure_future(scheduler.take(MESSAGE, 10.0)) for _ in range(3))
    await asyncio.sleep(1.0)
    waiting.cancel()
    await asyncio.sleep(1.0)
    scheduler.give(MESSAGE)
    granted.cancel()  # it has its turn, and has not run since
    assert await after == pytest.approx(2.0)
    assert granted.cancelled()
    scheduler.give(MESSAGE)
    assert await scheduler.take(MESSAGE, 10.0) == 0.0


async def test_the_line_is_measured_while_it_is_busy_and_not_while_a_message_waits() -> None:
    """Seconds of an exchange hold waits for a partner and a device: by them a line of 20 Mbit/s seemed one of 3.5."""
    line = Line(20 * MBIT)
    scheduler = UplinkScheduler(lambda: int(line.moved))
    running = asyncio.ensure_future(line.run())
    for _ in range(3):
        async with scheduler.turn(MEASURED_BYTES, math.inf):
            await line.send(MEASURED_BYTES, math.inf)
        await asyncio.sleep(60.0)
    assert scheduler.line_bytes_per_s == pytest.approx(20 * MBIT, rel=0.02)
    async with scheduler.turn(MESSAGE, math.inf):
        await line.send(MESSAGE, 5 * MBIT)
    assert scheduler.line_bytes_per_s == pytest.approx(20 * MBIT, rel=0.02), "few bytes are no measure"
    running.cancel()
