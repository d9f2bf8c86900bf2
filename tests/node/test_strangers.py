"""A key without a stage, or of a stage whose business it is not: nothing is computed, kept or signed for it."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import pytest

from swarmnode.errors import RemoteFault, Unavailable
from swarmnode.gossip.receipt import receipt, sent_to
from swarmnode.identity import Identity
from swarmnode.ids import MicrobatchId, PeerId, microbatch_id
from swarmnode.manifest import Manifest
from swarmnode.membership.record import sign_record
from swarmnode.node.greeting import Greeting
from swarmnode.node.thanks import Thanks
from swarmnode.ports import Answer, Call, Packet, Verdict, WireTensor
from swarmnode.transport.memory import MemoryDirectory, MemoryTransport
from swarmnode.wire import call_pb2 as wire
from swarmnode.wire import record_pb2
from tests.node.village import RUN, LoopClock, Village, Villager, manifest, village

SEQUENCE = itertools.count(1)


def garbage(run: Manifest, hop: bytes, feeder: PeerId, serial: int, way: Sequence[int] = (0, 1, 2)) -> Call:
    """A well-formed training microbatch of noise for stage 1, `hop` being its subspace."""
    noise = np.random.default_rng(serial)
    shape = (run.inner.microbatch, run.model.context, run.model.width)
    x = WireTensor("f32", shape, (100.0 * noise.standard_normal(shape)).astype("<f4").tobytes())
    tokens = noise.integers(0, run.model.vocabulary, (run.inner.microbatch, run.model.context + 1)).astype("<u2")
    process = wire.Process(
        microbatch_id=MicrobatchId(microbatch_id(feeder, 0, serial)),
        feeder=feeder,
        samples=run.inner.microbatch,
        purpose=wire.PURPOSE_TRAIN,
        itinerary=way,
        position=1,
        deadline_ms=5000,
        boundary_digest=hop,
    )
    return Call(wire.Request(process=process), [x, WireTensor("u16", tokens.shape, tokens.tobytes())])


def record(identity: Identity, stage: int, speed: float = 10.0) -> record_pb2.SignedRecord:
    """What a key says of itself: nobody has seen it work."""
    return sign_record(
        record_pb2.Record(
            run_id=RUN,
            peer_id=identity.peer_id,
            sequence=next(SEQUENCE),
            expires_unix_ms=int((LoopClock().unix_s() + 4.0) * 1000),
            stage=stage,
            state=record_pb2.NODE_STATE_TRAINING,
            addresses=["/dns/nowhere/tcp/1"],
            samples_per_second=speed,
            round_stride=1,
            joined_unix_ms=int(LoopClock().unix_s() * 1000),
            version="0.1.0",
        ),
        identity,
    )


async def outcome(transport: MemoryTransport, peer: PeerId, call: Call) -> Answer | str:
    """The answer, or the class of the refusal."""
    try:
        return await transport.call(peer, call, timeout_s=10.0, reply_bytes_max=1 << 20)
    except (Unavailable, RemoteFault) as refusal:
        return type(refusal).__name__


async def training(v: Village) -> None:
    for stage in (0, 1, 2):
        v.add(stage)
    await v.until(lambda: v.total() >= 64, "the swarm trains")


@pytest.mark.parametrize("claims", [None, 1, 2], ids=["no stage", "stage 1", "stage 2"])
def test_garbage_of_a_stranger_is_neither_trained_nor_thanked(claims: int | None) -> None:
    """A peer that announces no stage, or one that sends nothing to stage 1, calls `process` there twenty times."""

    async def body() -> None:
        async with village(manifest()) as v:
            await training(v)
            stranger, victim = Identity.of_seed(bytes([99]) * 32), v.people[1]
            transport = MemoryTransport(v.network, stranger.peer_id, RUN)
            digest = victim.node.hop.boundary_digest if victim.node.hop is not None else b""
            thanks = Thanks(RUN, victim.node._world.identity, victim.node.line.work, LoopClock(), victim.quiet, print)
            thanks.serve(victim.transport)
            done = 0
            for serial in range(20):
                call = garbage(v.run, digest, stranger.peer_id, serial)
                if claims is not None:
                    call.header.record.CopyFrom(record(stranger, claims))
                done += isinstance(await outcome(transport, victim.node.me, call), Answer)
            assert done == 0, f"{done} of 20 microbatches of garbage were trained"
            assert stranger.peer_id not in victim.node.line.work.done, "nothing is signed for it"
            receipt = await outcome(transport, victim.node.me, Call(wire.Request(receipt=wire.ReceiptRequest())))
            assert receipt == "Unavailable"
            await v.until(lambda: v.total() >= 192, "the swarm goes on")
            await v.leave()

    asyncio.run(asyncio.wait_for(body(), 120))


def test_a_member_feeds_only_as_itself_and_from_the_stage_before() -> None:
    async def body() -> None:
        async with village(manifest()) as v:
            await training(v)
            feeder, victim = v.people[0], v.people[1]
            assert victim.node.hop is not None
            make = partial(garbage, v.run, victim.node.hop.boundary_digest)
            other = PeerId("somebody else")
            assert await outcome(feeder.transport, victim.node.me, make(other, 1)) == "Refused"
            assert await outcome(feeder.transport, victim.node.me, make(feeder.node.me, 2, (2, 1, 0))) == "Unavailable"
            call = make(feeder.node.me, 3)
            call.header.process.position = 0
            assert await outcome(feeder.transport, victim.node.me, call) == "Refused"
            await v.leave()

    asyncio.run(asyncio.wait_for(body(), 120))


CALLS: dict[str, Callable[[], wire.Request]] = {
    "exchange": lambda: wire.Request(exchange=wire.Exchange(round=1, stage=1)),
    "commit": lambda: wire.Request(commit=wire.Commit(round=1, apply=True)),
    "standin": lambda: wire.Request(standin=wire.StandIn(round=1, stage=1)),
    "packet_receipt": lambda: wire.Request(packet_receipt=wire.PacketReceipt(stage=1)),
    "bequest": lambda: wire.Request(bequest=wire.Bequest(round=1, stage=1, codec="int8")),
    "handover": lambda: wire.Request(handover=wire.Handover(stage=2)),
    "snapshot": lambda: wire.Request(snapshot=wire.SnapshotRequest(stage=1)),
    "chunk": lambda: wire.Request(chunk=wire.ChunkRequest(stage=1)),
    "reserve": lambda: wire.Request(reserve=wire.Reserve(hold_ms=60_000)),
}


def test_what_belongs_to_a_stage_is_served_to_its_members_alone() -> None:
    """Of each method: a bare key is refused, and so is a member of a stage whose business it is not, both before a
    handler sees the call."""

    async def body() -> None:
        async with village(manifest()) as v:
            await training(v)
            victim = v.people[1]
            bare = Identity.of_seed(bytes([98]) * 32)
            transport = MemoryTransport(v.network, bare.peer_id, RUN)
            for method, request in CALLS.items():
                assert await outcome(transport, victim.node.me, Call(request())) == "Unavailable", method
            foreign = {"exchange", "commit", "standin", "packet_receipt", "bequest", "handover"}
            for method in foreign:
                answered = await outcome(v.people[0].transport, victim.node.me, Call(CALLS[method]()))
                assert answered == "Unavailable", method
            assert await outcome(v.people[2].transport, victim.node.me, Call(CALLS["reserve"]())) == "Unavailable"
            assert isinstance(await outcome(v.people[0].transport, victim.node.me, Call(CALLS["reserve"]())), Answer)
            await v.leave()

    asyncio.run(asyncio.wait_for(body(), 120))


async def slander(v: Village, sybils: Sequence[Identity], victim: PeerId, hearers: Sequence[PeerId]) -> int:
    """Each of `sybils` signs, as a replica of stage 2, that `victim` sent it rubbish in five rounds; how many of these
    words were taken in."""
    packet, verdict = Packet(1.0, 8, ()), Verdict(0.0, "misshapen", "not finite")
    taken = 0
    for sybil in sybils:
        transport = v.network.nodes[sybil.peer_id]
        for round_index in range(1, 6):
            given = receipt(sybil, RUN, 2, round_index, victim, packet, verdict)
            for hearer in hearers:
                call = Call(wire.Request(packet_receipt=sent_to(hearer, given)))
                call.header.record.CopyFrom(record(sybil, 2))
                taken += isinstance(await outcome(transport, hearer, call), Answer)
    return taken


def test_four_sybil_votes_shut_no_honest_replica_out() -> None:
    """Three honest replicas of stage 2, and four keys that announce the same stage and sign invented refusals of one of
    the three. It is met as before."""

    async def body() -> None:
        async with village(manifest(codec="fp32", round_samples=32)) as v:
            for stage in (0, 1, 2, 2, 2):
                v.add(stage)
            honest = v.people[2:]

            def met(person: Villager) -> int:
                """Rounds in which `person` and another one of the three met."""
                return sum(event == "exchange.paired" for event, _ in person.quiet.events)

            await v.until(lambda: all(met(person) >= 2 for person in honest), "all three meet")
            sybils = [Identity.of_seed(bytes([200 + i]) * 32) for i in range(4)]
            directory = MemoryDirectory(v.network, RUN, LoopClock())
            for sybil in sybils:  # they answer pings as any other
                Greeting(record_pb2.SignedManifest()).serve(MemoryTransport(v.network, sybil.peer_id, RUN))
                assert await directory.announce(record(sybil, 2))
            victim = honest[2].node
            hearers = [person.node for person in honest[:2]]
            known = [hearer.presence.book.member for hearer in hearers]
            await v.until(lambda: all(member(s.peer_id) for s in sybils for member in known), "all know the keys")
            assert await slander(v, sybils, victim.me, [hearer.me for hearer in hearers]) == 40, "the calls are served"
            for hearer in hearers:
                assert hearer.gossip is not None
                assert victim.me not in hearer.gossip.acceptance.left_out(), "shut out by invented refusals"
                assert hearer.gossip.acceptance.against(victim.me) == 0
            before = met(honest[2])
            await v.until(lambda: met(honest[2]) >= before + 2, "the victim is met again")
            assert not [1 for person in honest for event, _ in person.quiet.events if event == "peer.left_out"]
            await v.leave()

    asyncio.run(asyncio.wait_for(body(), 120))
