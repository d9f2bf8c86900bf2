"""A slow peer is waited for, a dead one is not."""

import asyncio

import pytest

from benchmarks.memory_network import MemoryNetwork, MemoryTransport
from swarmnode.base.errors import PeerTimeout
from swarmnode.base.identity import Identity
from swarmnode.base.ids import PeerId, RunId
from swarmnode.base.ports import Answer, Call
from swarmnode.base.wire import record_pb2
from swarmnode.net.membership.liveness import LivenessWatch, patiently
from swarmnode.train.node.membership_handlers import MembershipHandlers

RUN = RunId("ab" * 32)


def pair(*, answering: bool = True) -> tuple[MemoryTransport, MemoryTransport]:
    network = MemoryNetwork()
    ours, theirs = (MemoryTransport(network, Identity.of_seed(bytes([n]) * 32).peer_id, RUN) for n in (1, 2))
    if answering:
        MembershipHandlers(record_pb2.SignedManifest()).serve(theirs)
    return ours, theirs


async def test_a_late_answer_of_a_living_peer_is_waited_for() -> None:
    ours, theirs = pair()
    async with asyncio.timeout(20):
        assert await patiently(ours, RUN, theirs.peer_id, asyncio.sleep(0.2, "late"), 0.01) == "late"


async def test_a_peer_that_answers_no_ping_is_given_up_and_the_wait_cancelled() -> None:
    ours, theirs = pair()
    cancelled = asyncio.Event()

    async def forever() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    await theirs.close()
    async with asyncio.timeout(20):
        with pytest.raises(PeerTimeout, match="answers no ping"):
            await patiently(ours, RUN, theirs.peer_id, forever(), 0.01)
    assert cancelled.is_set()


async def test_a_peer_that_others_found_silent_is_asked_at_once() -> None:
    ours, theirs = pair()
    watch = LivenessWatch(ours, RUN, theirs.peer_id, 1000.0)
    async with asyncio.timeout(20):
        task = asyncio.create_task(watch.over(asyncio.Event().wait()))
        await asyncio.sleep(0.05)
        watch.doubt()
        await asyncio.sleep(0.05)
        assert not task.done(), "it answered, and is waited for"
        await theirs.close()
        watch.doubt()
        with pytest.raises(PeerTimeout, match="answers no ping"):
            await task


async def test_after_so_long_the_work_is_given_up_although_its_peer_lives() -> None:
    ours, theirs = pair()
    async with asyncio.timeout(20):
        with pytest.raises(TimeoutError):
            await LivenessWatch(ours, RUN, theirs.peer_id, 0.01).over(asyncio.Event().wait(), give_up_s=0.1)
        task = asyncio.current_task()
        assert task is not None and not task.cancelling(), "its own cancellation is taken back"


async def test_a_cancelled_check_leaves_no_ping_behind() -> None:
    ours, theirs = pair(answering=False)
    asked = asyncio.Event()
    answered = asyncio.Event()

    async def ping(peer: PeerId, call: Call) -> Answer:
        asked.set()
        await answered.wait()
        raise AssertionError("it was cancelled")

    theirs.serve("ping", ping, tensor_bytes_max=0)
    task = asyncio.create_task(LivenessWatch(ours, RUN, theirs.peer_id, 0.01).over(asyncio.Event().wait()))
    async with asyncio.timeout(20):
        await asked.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert asyncio.all_tasks() - {asyncio.current_task()} == set()
