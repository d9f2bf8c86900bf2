"""Rates hold: the pacer on a virtual clock, and bytes between two real transports."""

import asyncio

import pytest

from swarmnode.base.errors import Busy, RemoteFault
from swarmnode.base.ids import PeerId
from swarmnode.base.ports import Answer, Call
from swarmnode.base.uplink_scheduler import UplinkScheduler
from swarmnode.base.wire import call_pb2 as wire
from swarmnode.base.wire import record_pb2
from swarmnode.net.transport.libp2p import Libp2pTransport
from swarmnode.net.transport.throttle import OVERHEAD, Pacer
from swarmnode.train.node.membership_handlers import MembershipHandlers
from tests.support.libp2p_node import node, until
from tests.support.transport_contract import MIB, echo, process, tensor

pytestmark = pytest.mark.node  # real processes of p2pd

RATE = 40e6  # bits a second


@pytest.mark.parametrize("tasks", [1, 7])
@pytest.mark.loop("virtual")
async def test_a_pacer_keeps_its_rate_whoever_asks(tasks: int) -> None:
    pacer = Pacer()
    pacer.bps = 20e6
    loop = asyncio.get_running_loop()
    passed = 0

    async def stream() -> None:
        nonlocal passed
        while loop.time() < 30:
            await pacer.spend(pacer.piece_nbytes)
            passed += pacer.piece_nbytes

    async with asyncio.TaskGroup() as group:
        for _ in range(tasks):
            group.create_task(stream())
    assert passed * 8 * OVERHEAD / loop.time() == pytest.approx(20e6, rel=0.01)
    pacer.bps = None
    before = loop.time()
    await pacer.spend(1 << 40)
    assert loop.time() == before


@pytest.mark.live
@pytest.mark.parametrize("way", ["up", pytest.param("down", marks=pytest.mark.nightly)])
@pytest.mark.loop("uvloop")
async def test_bytes_take_as_long_as_the_rate_allows(way: str) -> None:
    """4 MiB at 40 Mbit/s take no less than their time; how much more depends on the machine's load."""

    async with asyncio.timeout(120), node() as (there, _), node() as (here, _):
        coming_in: list[float] = []

        async def handler(peer: PeerId, call: Call) -> Answer:
            coming_in.append(call.received_s)
            return await echo(peer, call)

        there.serve("process", handler, tensor_bytes_max=64 << 20)
        there.start()
        here.start()
        await here.connect(there.peer_id, await there.addresses())
        await here.call(there.peer_id, process(tensor(1024)), timeout_s=60, reply_bytes_max=MIB)
        (here.throttle.up if way == "up" else here.throttle.down).bps = RATE
        loop = asyncio.get_running_loop()
        begun = loop.time()
        sent = here.throttle.up.total_nbytes
        request = Call(wire.Request(process=wire.Process(samples=1)), [tensor(4 * MIB)])
        answer = await here.call(there.peer_id, request, timeout_s=100, reply_bytes_max=4 * MIB)
        assert answer.tensors[0].nbytes == 4 * MIB
        assert loop.time() - begun >= 0.95 * 4 * MIB * 8 / RATE
        if way == "up":  # what buffers hold is on its way when the header is read
            assert coming_in[-1] >= 0.5 * 4 * MIB * 8 / RATE, "the sender's line, as the receiver saw it"
        assert here.throttle.up.total_nbytes - sent >= 4 * MIB
        assert here.throttle.down.total_nbytes >= 4 * MIB


async def swallow(peer: PeerId, call: Call) -> Answer:
    return Answer(wire.Reply(processed=wire.Processed()))


@pytest.mark.live
@pytest.mark.loop("uvloop")
async def test_bulk_is_sent_in_turns() -> None:
    """Nothing of a call is on the line before its turn."""
    async with asyncio.timeout(120), node() as (there, _), node() as (here, _):
        there.serve("process", swallow, tensor_bytes_max=64 << 20)
        there.start()
        here.start()
        await here.connect(there.peer_id, await there.addresses())
        here._calls._scheduler = scheduler = UplinkScheduler()  # one call fills the line
        calls = list[asyncio.Task[Answer]]()
        async with asyncio.TaskGroup() as group:
            await scheduler.take(2 * MIB, 60.0)
            for count in range(1, 4):
                call = here.call(there.peer_id, process(tensor(2 * MIB)), timeout_s=60, reply_bytes_max=0)
                calls.append(group.create_task(call))
                await until(lambda count=count: scheduler.waiting == count)
            assert here.throttle.up.total_nbytes < MIB
            scheduler.give(2 * MIB)
        assert all(call.result().waited_s > 0.0 for call in calls)
        assert here.throttle.up.total_nbytes > len(calls) * 2 * MIB


@pytest.mark.live
@pytest.mark.loop("uvloop")
async def test_strangers_have_a_twentieth_of_a_quota_and_who_works_the_rest() -> None:
    async with node() as (feeder, me), node() as (worker, honest), node() as (first, _), node() as (second, _):
        feeder.serve("ping", MembershipHandlers(record_pb2.SignedManifest()).ping, tensor_bytes_max=0)
        feeder.prefer(lambda peer: peer == honest.peer_id)
        feeder.throttle.share_quota(400_000)
        feeder.start()
        where = await feeder.addresses()
        for one in (worker, first, second):
            await one.connect(me.peer_id, where)

        feeder.serve("data_chunk", echo, tensor_bytes_max=MIB)
        ping = Call(wire.Request(ping=wire.Ping(payload=bytes(1000))))

        async def served(one: Libp2pTransport, asked: Call = ping) -> bool:
            try:
                await one.call(me.peer_id, asked, timeout_s=60, reply_bytes_max=MIB)
            except (Busy, RemoteFault):
                return False
            return True

        for _ in range(40):
            await asyncio.gather(served(first), served(second))
        assert feeder.throttle.moved_nbytes <= 0.05 * 400_000
        assert not await served(first) and await served(worker)
        wanted = Call(wire.Request(data_chunk=wire.DataChunkRequest()), [tensor(MIB // 64)])
        assert [await served(worker, wanted) for _ in range(5)] == [True, *[False] * 4], "nor does a member take it all"
        assert await served(worker)
