"""A key without a stage, or of a stage whose business it is not: nothing is computed, kept or signed for it."""

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import pytest

from benchmarks.memory_network import MemoryDirectory, MemoryTransport
from swarmnode.base.errors import RemoteFault, Unavailable
from swarmnode.base.identity import Identity
from swarmnode.base.ids import MicrobatchId, PeerId, microbatch_id
from swarmnode.base.ports import Answer, Call, Packet, Verdict, WireTensor
from swarmnode.base.wire import call_pb2 as wire
from swarmnode.base.wire import record_pb2
from swarmnode.run.manifest import Manifest
from swarmnode.train.gossip.acceptance import receipt
from swarmnode.train.node.membership_handlers import MembershipHandlers
from swarmnode.train.node.report import ReceiptExchange
from tests.support.records import record
from tests.support.village import RUN, LoopClock, Village, Villager, manifest, village


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


async def outcome(transport: MemoryTransport, peer: PeerId, call: Call) -> Answer | str:
    """The answer, or the class of the refusal."""
    try:
        return await transport.call(peer, call, timeout_s=60.0, reply_bytes_max=1 << 20)
    except (Unavailable, RemoteFault) as refusal:
        return type(refusal).__name__


async def training(v: Village) -> None:
    for stage in (0, 1, 2):
        v.add(stage)
    await v.fed(64)


@pytest.mark.parametrize("claims", [None, 1, 2], ids=["no stage", "stage 1", "stage 2"])
async def test_garbage_of_a_stranger_is_neither_trained_nor_thanked(claims: int | None) -> None:
    """A peer that announces no stage, or one that sends nothing to stage 1, calls `process` there twenty times."""
    async with village(manifest()) as v:
        await training(v)
        stranger = Identity.of_seed(bytes([99]) * 32)
        victim = v.people[1]
        transport = MemoryTransport(v.network, stranger.peer_id, RUN)
        digest = victim.served.hop.boundary_digest

        async def keep(receipt: wire.Receipt) -> None:
            raise AssertionError("it asks for none")

        thanks = ReceiptExchange(
            RUN, victim.node.ports.identity, victim.node.transport.work, LoopClock(), victim.quiet, keep
        )
        thanks.serve(victim.transport)
        done = 0
        for serial in range(20):
            call = garbage(v.run, digest, stranger.peer_id, serial)
            if claims is not None:
                call.header.record.CopyFrom(record(stranger, claims))
            done += isinstance(await outcome(transport, victim.node.me, call), Answer)
        assert done == 0, f"{done} of 20 microbatches of garbage were trained"
        assert stranger.peer_id not in victim.node.transport.work.done, "nothing is signed for it"
        receipt = await outcome(transport, victim.node.me, Call(wire.Request(receipt=wire.ReceiptRequest())))
        assert receipt == "Unavailable"
        await v.fed(192)


async def test_a_member_feeds_only_as_itself_and_from_the_stage_before() -> None:
    async with village(manifest()) as v:
        await training(v)
        feeder = v.people[0]
        victim = v.people[1]
        make = partial(garbage, v.run, victim.served.hop.boundary_digest)
        other = PeerId("somebody else")
        assert await outcome(feeder.transport, victim.node.me, make(other, 1)) == "Unavailable"
        assert await outcome(feeder.transport, victim.node.me, make(feeder.node.me, 2, (2, 1, 0))) == "Unavailable"
        call = make(feeder.node.me, 3)
        call.header.process.position = 0  # as to a replica of the first stage
        assert await outcome(feeder.transport, victim.node.me, call) == "Unavailable"


CALLS: dict[str, Callable[[], wire.Request]] = {
    "exchange": lambda: wire.Request(exchange=wire.Exchange(round=1, stage=1)),
    "commit": lambda: wire.Request(commit=wire.Commit(round=1, apply=True)),
    "fallback": lambda: wire.Request(fallback=wire.FallbackRequest(round=1, stage=1)),
    "packet_receipt": lambda: wire.Request(packet_receipt=wire.PacketReceipt(stage=1)),
    "final_delta": lambda: wire.Request(final_delta=wire.FinalDelta(round=1, stage=1, codec="int8")),
    "handover": lambda: wire.Request(handover=wire.Handover(stage=2)),
    "snapshot": lambda: wire.Request(snapshot=wire.SnapshotRequest(stage=1)),
    "chunk": lambda: wire.Request(chunk=wire.ChunkRequest(stage=1)),
    "reserve": lambda: wire.Request(reserve=wire.Reserve(hold_ms=60_000)),
}


async def test_stage_messages_are_served_to_members_alone() -> None:
    """Of each method: a bare key is refused, and so is a member of a stage whose business it is not, both before a
    handler sees the call."""
    async with village(manifest()) as v:
        await training(v)
        victim = v.people[1]
        bare = Identity.of_seed(bytes([98]) * 32)
        transport = MemoryTransport(v.network, bare.peer_id, RUN)
        for method, request in CALLS.items():
            assert await outcome(transport, victim.node.me, Call(request())) == "Unavailable", method
        foreign = {"exchange", "commit", "fallback", "packet_receipt", "final_delta", "handover"}
        for method in foreign:
            answered = await outcome(v.people[0].transport, victim.node.me, Call(CALLS[method]()))
            assert answered == "Unavailable", method
        other = v.add(1)  # a replica of the same stage, which stays
        await v.until(lambda: other.node.state == record_pb2.NODE_STATE_TRAINING, "it trains")
        final_delta = Call(CALLS["final_delta"]())
        assert await outcome(other.transport, victim.node.me, final_delta) == "Unavailable", "it does not leave"
        assert await outcome(v.people[2].transport, victim.node.me, Call(CALLS["reserve"]())) == "Unavailable"
        assert isinstance(await outcome(v.people[0].transport, victim.node.me, Call(CALLS["reserve"]())), Answer)


async def slander(v: Village, sybils: Sequence[Identity], victim: PeerId, hearers: Sequence[PeerId]) -> int:
    """Each of `sybils` signs, as a replica of stage 2, that `victim` sent it rubbish in five rounds; how many of these
    words were taken in."""
    packet = Packet(1.0, 8, ())
    verdict = Verdict(0.0, "misshapen", "not finite")
    taken = 0
    for sybil in sybils:
        transport = v.network.nodes[sybil.peer_id]
        for round_index in range(1, 6):
            given = receipt(sybil, RUN, 2, round_index, victim, packet, verdict)
            for hearer in hearers:
                given.ClearField("run_id")
                given.ClearField("receiver")
                call = Call(wire.Request(packet_receipt=given))
                call.header.record.CopyFrom(record(sybil, 2))
                taken += isinstance(await outcome(transport, hearer, call), Answer)
    return taken


async def test_four_sybil_votes_shut_no_honest_replica_out() -> None:
    """Three honest replicas of stage 2, and four keys that announce the same stage and sign invented refusals of one of
    the three. It is met as before."""
    async with village(manifest(codec="fp32", round_samples=32), stages=(0, 1, 2, 2, 2)) as v:
        honest = v.people[2:]

        def met(person: Villager) -> int:
            """Rounds in which `person` and another one of the three met."""
            return sum(event == "exchange.paired" for event, _ in person.quiet.events)

        await v.until(lambda: all(met(person) >= 2 for person in honest), "all three meet")
        sybils = [Identity.of_seed(bytes([200 + i]) * 32) for i in range(4)]
        directory = MemoryDirectory(v.network, RUN, LoopClock())
        for sybil in sybils:  # they answer pings as any other
            MembershipHandlers(record_pb2.SignedManifest()).serve(MemoryTransport(v.network, sybil.peer_id, RUN))
            assert (await directory.announce(record(sybil, 2))).stored
        victim = honest[2].node
        hearers = honest[:2]
        known = [hearer.node.presence.peer_table.member for hearer in hearers]
        await v.until(lambda: all(member(s.peer_id) for s in sybils for member in known), "all know the keys")
        assert await slander(v, sybils, victim.me, [hearer.node.me for hearer in hearers]) == 40, "the calls are served"
        for hearer in hearers:
            assert victim.me not in hearer.served.gossip.acceptance.left_out(), "shut out by invented refusals"
        before = met(honest[2])
        await v.until(lambda: met(honest[2]) >= before + 2, "the victim is met again")
        assert not [1 for person in honest for event, _ in person.quiet.events if event == "peer.left_out"]
