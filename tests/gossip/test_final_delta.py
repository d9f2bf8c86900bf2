"""A leaver's last message finds a round to count in, whatever the strides of those who stay."""

import random
from collections.abc import Sequence

import pytest

from benchmarks.memory_network import MemoryNetwork, MemoryTransport
from swarmnode.base.errors import RemoteFault, Unavailable
from swarmnode.base.identity import Identity
from swarmnode.base.ids import PeerId, RunId
from swarmnode.base.ports import Call, Packet, Verdict, WireTensor
from swarmnode.base.wire import call_pb2 as wire
from swarmnode.net.membership.liveness import TRIES
from swarmnode.net.membership.swarm import SERVING, Member, Swarm
from swarmnode.train.gossip.acceptance import Acceptance
from swarmnode.train.gossip.final_delta import FinalDeltas, send_final_delta
from tests.support.fake_telemetry import Quiet
from tests.support.stage_context import stage_context
from tests.support.village import manifest

RUN = RunId("ab" * 32)


class Leaver:
    """Counts the rounds its message was made for."""

    def __init__(self) -> None:
        self.made: list[int] = []

    async def make(self, round_index: int | None) -> tuple[wire.FinalDelta, Sequence[WireTensor]]:
        due = 6 if round_index is None else round_index
        self.made.append(due)
        said = wire.FinalDelta(round=due, stage=1, codec=manifest().gossip.codec, samples=40)
        return said, [WireTensor("f32", (1,), float(due).hex().encode()[:4])]


MEMBERS = [Member(PeerId("liar"), 1, SERVING, 1, 1e12, 1.0, 0, 0)]
HERE = stage_context(
    manifest(), 1, RUN, identity=Identity.of_seed(b"9" * 32), telemetry=Quiet(), swarm=lambda: Swarm.of(MEMBERS, 3)
)


def acceptance(*met: PeerId) -> Acceptance:
    """Of a replica that has met these peers in a round."""
    made = Acceptance(HERE)
    for peer in met:
        meet(made, peer)
    return made


def meet(acceptance: Acceptance, peer: PeerId) -> None:
    acceptance._weigh(1, peer, Verdict(1.0, "accepted", "well-formed"))


async def ask(final_deltas: FinalDeltas, peer: PeerId, round_index: int, samples: int = 40) -> str:
    """What becomes of a final delta of `peer`."""
    said = wire.FinalDelta(round=round_index, stage=1, codec=manifest().gossip.codec, samples=samples)
    call = Call(wire.Request(final_delta=said), [WireTensor("f32", (1,), bytes(4))])
    try:
        answer = await final_deltas.serve(peer, call)
    except (RemoteFault, Unavailable) as error:
        return type(error).__name__
    return "again" if answer.header.final_delta_taken.again else "taken"


async def test_a_key_counts_once_until_it_is_met_again() -> None:
    """Who stays and gives a final delta in every round, at every replica, would weigh more than any partner does."""
    liar = PeerId("liar")
    due = 1
    made = acceptance(PeerId("liar"))
    final_deltas = FinalDeltas(HERE, lambda: due, made)
    assert await ask(final_deltas, liar, 1, samples=2**53) == "taken"
    (packet,) = final_deltas.take(1, 80)
    assert packet.sender == liar and packet.weight == 1.0, "the guard knows whose it is"
    assert await ask(final_deltas, liar, 1) == "taken", "its answer was lost: acknowledged"
    due = 2
    assert await ask(final_deltas, liar, due) == "Unavailable"
    assert final_deltas.take(due, 80) == []
    meet(made, liar)
    assert await ask(final_deltas, liar, due) == "taken"
    assert len(final_deltas.take(due, 80)) == 1


async def test_keys_that_were_never_met_count_nothing_and_two_leavers_of_a_round_do() -> None:
    replicas = [PeerId(f"replica{n}") for n in range(3)]
    final_deltas = FinalDeltas(HERE, lambda: 1, acceptance(*replicas))
    assert await ask(final_deltas, PeerId("key"), 1, 2**53) == "Unavailable"
    assert [await ask(final_deltas, replica, 1) for replica in replicas] == ["taken", "taken", "Busy"]
    assert [(packet.sender, packet.weight) for packet in final_deltas.take(1, 80)] == [
        (replica, 0.5) for replica in replicas[:2]
    ]
    alone = FinalDeltas(HERE, lambda: 1, acceptance())
    assert await ask(alone, PeerId("last of its stage"), 1) == "taken", "nobody was met here yet"


async def test_an_excluded_replica_gives_no_final_delta() -> None:
    liar = PeerId("liar")
    made = acceptance(PeerId("liar"))
    final_deltas = FinalDeltas(HERE, lambda: 1, made)
    rubbish = Packet(1.0, 8, (), final_delta=True, sender=liar)
    for _ in range(TRIES):
        made.record_final_deltas([rubbish], [Verdict(0.0, "misshapen", "not finite")], 1)
    assert await ask(final_deltas, liar, 1) == "Unavailable"


@pytest.mark.parametrize("begins", [False, True])
async def test_a_final_delta_is_made_for_the_round_that_comes_next_there(begins: bool) -> None:
    """Also when that round begins just between the answer and the final delta made for it."""
    network = MemoryNetwork()
    quiet = Quiet()
    leaver = Leaver()
    peers = [Identity.of_seed(bytes([n]) * 32).peer_id for n in (1, 2)]
    us, successor = (MemoryTransport(network, peer, RUN, telemetry=quiet) for peer in peers)
    rounds = iter([28, 32, 32, 32] if begins else [28] * 4)
    due = next(rounds)

    def next_round() -> int:
        nonlocal due
        now = due
        due = next(rounds)
        return now

    final_deltas = FinalDeltas(HERE, next_round, acceptance(us.peer_id))
    successor.serve("final_delta", final_deltas.serve, tensor_bytes_max=100)
    peer = await send_final_delta(us, RUN, [successor.peer_id], leaver.make, quiet, random.Random(0), 20.0)
    assert peer == successor.peer_id
    assert leaver.made == ([6, 28, 32] if begins else [6, 28])
    taken = final_deltas.take(leaver.made[-1], 80)
    assert [(packet.weight, packet.samples) for packet in taken] == [(0.5, 40)]


@pytest.mark.parametrize("merged", [False, True])
async def test_it_is_given_once_though_its_answer_was_lost(merged: bool) -> None:
    """Also when its round has been meanwhile; another replica stands by and does not get it."""
    lost = 0

    async def link(sender: PeerId, receiver: PeerId, nbytes: int) -> None:
        nonlocal lost
        if receiver == peers[0] and not lost:
            lost += 1
            if merged:
                (giver,) = (one for one in (first, second) if one._kept)
                packets.extend(giver.take(6, 80))
            raise RemoteFault("the stream broke before the answer")

    peers = [Identity.of_seed(bytes([n]) * 32).peer_id for n in (1, 2, 3)]
    network = MemoryNetwork(link)
    quiet = Quiet()
    leaver = Leaver()
    packets = list[Packet]()
    us, *successors = (MemoryTransport(network, peer, RUN, telemetry=quiet) for peer in peers)
    met = acceptance(us.peer_id)
    first, second = (FinalDeltas(HERE, lambda: 10 if packets else 6, met) for _ in successors)
    for successor, final_deltas in zip(successors, (first, second), strict=True):
        successor.serve("final_delta", final_deltas.serve, tensor_bytes_max=100)
    await send_final_delta(us, RUN, peers[1:], leaver.make, quiet, random.Random(0), 20.0)
    assert lost == 1 and leaver.made == [6]
    packets += [*first.take(6, 80), *second.take(6, 80)]
    assert [packet.samples for packet in packets] == [40]


async def test_a_replica_that_was_met_is_asked_first() -> None:
    """Whatever the draw: only such a one takes it."""
    network = MemoryNetwork()
    quiet = Quiet()
    leaver = Leaver()
    peers = [Identity.of_seed(bytes([n]) * 32).peer_id for n in range(1, 10)]
    us, *successors = (MemoryTransport(network, peer, RUN, telemetry=quiet) for peer in peers)
    for successor in successors:
        taken = FinalDeltas(HERE, lambda: 6, acceptance(us.peer_id))
        successor.serve("final_delta", taken.serve, tensor_bytes_max=100)
    for seed, known in enumerate(peers[1:]):
        given = await send_final_delta(
            us, RUN, peers[1:], leaver.make, quiet, random.Random(seed), 20.0, lambda peer, known=known: peer == known
        )
        assert given == known


@pytest.mark.loop("virtual")
async def test_a_final_delta_that_no_replica_takes_is_reported() -> None:
    quiet = Quiet()
    us = MemoryTransport(MemoryNetwork(), Identity.of_seed(b"1" * 32).peer_id, RUN, telemetry=quiet)
    with pytest.raises(Unavailable, match="no other replica"):
        await send_final_delta(us, RUN, [], Leaver().make, quiet, random.Random(0), 20.0)
