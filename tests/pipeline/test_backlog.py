"""A replica counts no microbatch twice, and holds no more than its places."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest

from swarmnode.base.errors import Busy, LocalFault, MicrobatchLost, RemoteFault, Unavailable
from swarmnode.base.ids import MicrobatchId, PeerId, microbatch_id
from swarmnode.base.ports import Answer, WireTensor
from swarmnode.base.wire import call_pb2 as wire
from swarmnode.data.microbatch_shape import check_way
from swarmnode.run.manifest import Manifest
from swarmnode.train.pipeline.backlog import Backlog, InFlight, Key
from tests.support.fake_telemetry import Quiet

CALLER = PeerId("caller")


def key(serial: int, position: int = 1) -> Key:
    return MicrobatchId(microbatch_id(PeerId("feeder"), 0, serial)), position


class Counting:
    """Work that commits, waits for `gate`, and counts how often it was done."""

    def __init__(self, commit: bool = True) -> None:
        self.gate = asyncio.Event()
        self.begun = 0
        self.done = 0
        self.commit = commit

    async def __call__(self, held: InFlight) -> Answer:
        self.begun += 1
        if self.commit:
            held.commit()
        await self.gate.wait()
        self.done += 1
        return Answer(wire.Reply(), [WireTensor("u8", (4,), bytes(4))])


@contextlib.asynccontextmanager
async def running(cache_bytes_max: int = 1 << 20) -> AsyncIterator[tuple[Backlog, Quiet]]:
    quiet = Quiet()
    async with asyncio.TaskGroup() as tasks:
        yield Backlog(tasks, 2, quiet, cache_bytes_max), quiet


@pytest.mark.parametrize("error", [ValueError("Value out of range: -1"), KeyError("way")])
async def test_a_mistake_before_anything_is_added_ends_the_microbatch_and_not_the_node(error: Exception) -> None:
    async with running() as (backlog, _):

        async def fails(held: InFlight) -> Answer:
            raise error

        with pytest.raises(LocalFault, match=type(error).__name__):
            await backlog.once(key(1), fails, CALLER)
        work = Counting()
        work.gate.set()
        await backlog.once(key(1), work, CALLER)
        assert work.done == 1, "it may be tried again"


@pytest.mark.parametrize(("error", "commits"), [(ValueError("half added"), True), (RuntimeError("the device"), False)])
async def test_a_mistake_of_the_device_or_after_something_was_added_ends_the_node(
    error: Exception, commits: bool
) -> None:
    async def fails(held: InFlight) -> Answer:
        if commits:
            held.commit()
        raise error

    with pytest.raises(ExceptionGroup) as group:
        async with running() as (backlog, _):
            with contextlib.suppress(Unavailable):
                await backlog.once(key(1), fails, CALLER)
    assert group.value.subgroup(type(error)) is not None


async def test_a_repeat_joins_the_work_in_flight_and_later_gets_the_kept_answer() -> None:
    async with running() as (backlog, quiet):
        work = Counting()
        async with asyncio.TaskGroup() as callers:
            first = callers.create_task(backlog.once(key(1), work, CALLER))
            second = callers.create_task(backlog.once(key(1), work, CALLER))
            await asyncio.sleep(0)
            work.gate.set()
        assert first.result() is second.result()
        assert await backlog.once(key(1), work, CALLER) is first.result()
        assert (work.begun, work.done) == (1, 1)
        assert quiet.total("swarmnode_microbatches_total", outcome="duplicate") == 2


async def test_work_whose_callers_all_left_is_cancelled_before_commit_and_completed_after() -> None:
    async with running() as (backlog, _):
        for commit, completed in ((False, 0), (True, 1)):
            work = Counting(commit)
            caller = asyncio.ensure_future(backlog.once(key(int(commit)), work, CALLER))
            while not work.begun:
                await asyncio.sleep(0)
            caller.cancel()
            await asyncio.gather(caller, return_exceptions=True)
            work.gate.set()
            await backlog.empty()
            assert work.done == completed


async def test_a_repeat_of_uncommitted_work_that_was_cancelled_begins_anew() -> None:
    async with running() as (backlog, _):
        work = Counting(commit=False)
        caller = asyncio.ensure_future(backlog.once(key(1), work, CALLER))
        while not work.begun:
            await asyncio.sleep(0)
        caller.cancel()
        await asyncio.gather(caller, return_exceptions=True)
        again = asyncio.ensure_future(backlog.once(key(1), work, CALLER))
        work.gate.set()
        await again
        assert (work.begun, work.done) == (2, 1)


async def test_places_are_counted_per_position_and_given_back() -> None:
    async with running() as (backlog, _):
        work = Counting()
        callers = [asyncio.ensure_future(backlog.once(key(i), work, CALLER)) for i in range(2)]
        while work.begun < 2:
            await asyncio.sleep(0)
        with pytest.raises(Busy) as busy:
            await backlog.once(key(9), work, CALLER)
        assert busy.value.retry_after_s > 0
        other = asyncio.ensure_future(backlog.once(key(9, position=2), work, CALLER))
        work.gate.set()
        await asyncio.gather(*callers, other)
        await backlog.empty()
        assert len(backlog) == 0
        await backlog.once(key(9), work, CALLER)


async def test_an_evicted_answer_is_refused_rather_than_counted_again() -> None:
    async with running(cache_bytes_max=300) as (backlog, _):
        work = Counting()
        work.gate.set()
        await backlog.once(key(1), work, CALLER)
        await backlog.once(key(2), work, CALLER)
        with pytest.raises(Unavailable, match="counted here already"):
            await backlog.once(key(1), work, CALLER)
        assert work.done == 2


async def test_validation_may_be_repeated() -> None:
    async with running() as (backlog, _):
        work = Counting(commit=False)
        work.gate.set()
        await backlog.once(key(1), work, CALLER)
        await backlog.once(key(1), work, CALLER)
        assert work.done == 2


async def test_errors_reach_every_caller_and_free_the_place() -> None:
    async with running() as (backlog, _):

        async def lost(held: InFlight) -> Answer:
            await asyncio.sleep(0)
            raise MicrobatchLost("no way")

        results = await asyncio.gather(*(backlog.once(key(1), lost, CALLER) for _ in range(3)), return_exceptions=True)
        assert all(isinstance(result, MicrobatchLost) for result in results)
        await backlog.empty()


async def test_a_draining_replica_takes_nothing_new_but_finishes() -> None:
    async with running() as (backlog, _):
        work = Counting()
        caller = asyncio.ensure_future(backlog.once(key(1), work, CALLER))
        while not work.begun:
            await asyncio.sleep(0)
        backlog.refuse("this node is leaving")
        with pytest.raises(Unavailable, match="leaving"):
            await backlog.once(key(2), work, CALLER)
        repeat = asyncio.ensure_future(backlog.once(key(1), work, CALLER))
        work.gate.set()
        assert await caller is await repeat


class _Moved(Exception):
    pass


async def test_waiting_work_is_refused_when_the_stay_ends() -> None:
    """A node that moves leaves what it could not finish: the caller asks another replica at once."""
    async with asyncio.timeout(10):
        with contextlib.suppress(ExceptionGroup):
            async with asyncio.TaskGroup() as stay:
                caller = asyncio.create_task(Backlog(stay, 2, Quiet(), 1 << 20).once(key(1), Counting(), CALLER))
                await asyncio.sleep(0.01)
                raise _Moved
        with pytest.raises(Unavailable, match="left the stage"):
            await caller


async def test_a_request_while_the_stay_ends_is_refused_at_once() -> None:
    """A node that crashes ends its tasks while its transport still serves: no work begins, and no place is taken."""
    async with asyncio.timeout(10):
        asked: list[BaseException] = []
        with contextlib.suppress(ExceptionGroup):
            async with asyncio.TaskGroup() as stay:
                backlog = Backlog(stay, 2, Quiet(), 1 << 20)

                async def last() -> None:
                    try:
                        await asyncio.Event().wait()
                    finally:
                        asked.extend(
                            await asyncio.gather(backlog.once(key(1), Counting(), CALLER), return_exceptions=True)  # type: ignore[arg-type]
                        )  # type: ignore[arg-type]

                stay.create_task(last())
                await asyncio.sleep(0)
                raise _Moved
        assert [type(error) for error in asked] == [Unavailable] and not len(backlog)
        await backlog.empty()


async def test_work_that_is_ended_before_its_first_turn_is_told_and_keeps_no_place() -> None:
    """As when a node leaves its stage in the very moment in which a microbatch comes."""
    async with running() as (backlog, _):
        work = Counting()
        caller = asyncio.create_task(backlog.once(key(1), work, CALLER))
        await asyncio.sleep(0)  # the caller's turn; the work's is next
        task = backlog._held[key(1)].task
        assert task is not None
        task.cancel()
        with pytest.raises(Unavailable, match="unfinished"):
            await caller
        assert work.begun == 0 and len(backlog) == 0
        await backlog.empty()


@pytest.mark.parametrize("way", [(), (1, 2), (0, 1), (0, 1, 1), (0, 7, 2), (2, 1, 0), (0, 1, 2, 3)])
def test_a_microbatch_visits_all_stages_in_order(way: tuple[int, ...]) -> None:
    good = wire.Process(microbatch_id=b"m" * 16, itinerary=range(3), position=1, purpose=wire.PURPOSE_TRAIN)
    check_way(Manifest(), 1, good)
    bad = wire.Process(microbatch_id=b"m" * 16, itinerary=way, position=1, purpose=wire.PURPOSE_TRAIN)
    with pytest.raises(RemoteFault, match="in order"):
        check_way(Manifest(), 1, bad)
    with pytest.raises(RemoteFault, match="position 1 sent to a replica of stage 3"):
        check_way(Manifest(), 2, good)
