"""Who met nobody it believes asks another replica, and that one gives its packet once."""

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.memory_network import MemoryNetwork, MemoryTransport
from swarmnode.app.machine.compute import ThreadCompute
from swarmnode.base.errors import Refused, RemoteFault, Unavailable
from swarmnode.base.identity import Identity
from swarmnode.base.ids import PeerId, RunId
from swarmnode.base.ports import Packet, WireTensor
from swarmnode.net.membership.liveness import TRIES
from swarmnode.run.manifest import GossipSpec, Manifest
from swarmnode.train.gossip import fallback_partner
from swarmnode.train.gossip.acceptance import Acceptance
from swarmnode.train.gossip.fallback_partner import FallbackPartner, allows_fallback, fallback_order
from swarmnode.train.gossip.outer import Outer, outer
from swarmnode.train.gossip.outer_step import OuterStep, OuterStepResult
from swarmnode.train.gossip.outgoing_packet import OutgoingPacket
from swarmnode_methods.desloc import DesLoc
from swarmnode_methods.noloco import Average, NoLoCo
from tests.support.fake_telemetry import Quiet
from tests.support.method_tables import FALLBACK as STANDING_IN
from tests.support.method_tables import METHODS
from tests.support.stage_context import stage_context

RUN = RunId("ab" * 32)
NAMES = [PeerId(f"peer{i}") for i in range(8)]
WHO = [Identity.of_seed(bytes([n]) * 32) for n in range(1, 6)]
SIZE = 640


@given(st.sets(st.sampled_from(NAMES)), st.integers(1, 99))
def test_the_order(candidates: set[PeerId], round_index: int) -> None:
    order, reason = fallback_order(RUN, 1, round_index, NAMES[0], candidates)
    assert (order, reason) == fallback_order(RUN, 1, round_index, NAMES[0], sorted(candidates))
    others = candidates - {NAMES[0]}
    assert len(set(order)) == len(order) == min(len(others), TRIES) and set(order) <= others


def test_two_who_ask_in_one_round_seldom_ask_the_same_first() -> None:
    firsts = [[fallback_order(RUN, 0, index, me, NAMES[2:])[0][0] for me in NAMES[:2]] for index in range(600)]
    assert 60 < sum(one == other for one, other in firsts) < 140  # of six: a sixth
    assert {one for one, _ in firsts} == set(NAMES[2:])


def test_only_where_slow_weights_may_differ() -> None:
    assert {NoLoCo.name, Average.name} == set(STANDING_IN) and DesLoc.name not in STANDING_IN
    for method in METHODS:
        spec = GossipSpec(method=method, codec="fp32", group=2)
        assert allows_fallback(spec) == (method in STANDING_IN)
        assert not allows_fallback(GossipSpec(method=method, codec="fp32", group=0))


def weights(seed: int) -> torch.Tensor:
    return torch.randn(SIZE, generator=torch.Generator().manual_seed(seed))


def optimizer(seed: int, method: str = "noloco") -> Outer:
    """Somebody who learnt something of their own since the common start, and something that all learn."""
    group = {} if method in STANDING_IN else {"group": 0}
    theta = weights(0)
    found = outer(GossipSpec(method=method, codec="fp32", acceptance="clipped", **group), theta, f"sender {seed}")  # type: ignore[arg-type]
    found.theta.add_(weights(99) + weights(seed), alpha=0.01)
    return found


PATIENT = dataclasses.replace(Manifest(), limits=dataclasses.replace(Manifest().limits, exchange_timeout_s=5.0))


def misshapen() -> list[WireTensor]:
    """What no honest replica sends, and what is refused at once."""
    return [WireTensor("f32", (3,), bytes(12))]


def state(one: Outer) -> list[torch.Tensor]:
    return [one.theta.clone(), one.phi.clone(), one.momentum.clone()]


class Replica:
    """What of ports.Replica an outer step needs."""

    def __init__(self, of: Outer) -> None:
        self.outer = of
        self.apply = of.apply
        self.apply_in_parts = of.apply


class Node:
    """One replica's own half of a round: its packet of round 3 is made, and it can be asked for it."""

    def __init__(self, network: MemoryNetwork, number: int, compute: ThreadCompute | None = None) -> None:
        self.me = WHO[number].peer_id
        self.quiet = Quiet()
        self.optimizer = optimizer(number)
        self.transport = MemoryTransport(network, self.me, RUN, telemetry=self.quiet)
        here = stage_context(
            PATIENT,
            1,
            RUN,
            replica=Replica(self.optimizer),
            transport=self.transport,
            compute=compute,
            identity=WHO[number],
            telemetry=self.quiet,
        )
        self.fallback = FallbackPartner(here, lambda: [WHO[4].peer_id], lambda: 4)
        acceptance = Acceptance(here)
        self.taking = OuterStep(here, acceptance, self.fallback)
        self.transport.serve("fallback", self.fallback.serve, tensor_bytes_max=0)
        self.transport.serve("packet_receipt", acceptance.serve_receipt, tensor_bytes_max=0)
        self.ours = OutgoingPacket(3, 1.0, 77, self.optimizer.message(3))

    async def take(self, came: dict[PeerId, Packet], to_ask: list[PeerId]) -> OuterStepResult:
        able = (lambda: to_ask) if to_ask else None
        async with asyncio.TaskGroup() as tasks:
            return await self.taking.take(tasks, self.ours, came, [], able, 5.0, "the partner failed", others_here=True)

    def events(self, which: str) -> list[dict[str, object]]:
        return [fields for event, fields in self.quiet.events if event == which]


@contextlib.asynccontextmanager
async def village(count: int = 4) -> AsyncIterator[list[Node]]:
    compute = ThreadCompute(Quiet())
    try:
        network = MemoryNetwork()
        yield [Node(network, number, compute) for number in range(count)]
    finally:
        compute.close()


@pytest.mark.parametrize("came", [True, False])
async def test_a_replica_that_met_a_liar_averages_with_a_third(came: bool) -> None:
    async with village() as (honest, liar, third, other):
        await third.fallback.offer(third.ours)
        said = {liar.me: Packet(1.0, 8, misshapen())} if came else {}
        twin = optimizer(0)
        twin.message(3)
        before = state(third.optimizer)
        took = await honest.take(said, [third.me, other.me])
        assert took.fallback and took.met == [third.me] and took.report.members == 2
        twin.apply(3, 1.0, [Packet(1.0, 77, third.ours.tensors)])
        assert all(torch.equal(a, b) for a, b in zip(state(twin), state(honest.optimizer), strict=True))
        assert all(torch.equal(a, b) for a, b in zip(before, state(third.optimizer), strict=True)), "it took nothing"
        assert honest.quiet.total("swarmnode_fallback_packets_total", outcome="taken") == 1
        assert [f["peer"] for f in honest.events("exchange.refused")] == list(said)
        assert [f["accepted"] for f in third.events("receipt.got")] == [True], "it is thanked as a partner is"
        assert [f["accepted"] for f in liar.events("receipt.got")] == [False] * len(said)


async def test_without_a_fallback_the_step_is_lone() -> None:
    """One has given its packet, one is of an old version and does not know the call, one gives a lie again."""
    async with village() as (honest, spent, old, liar):
        await spent.fallback.offer(spent.ours)
        await honest.fallback.ask(spent.me, 3, SIZE * 4, 5.0)
        del old.transport._served["fallback"]
        with pytest.raises(Refused):
            await honest.fallback.ask(old.me, 3, SIZE * 4, 5.0)
        await liar.fallback.offer(OutgoingPacket(3, 1.0, 8, misshapen()))
        twin = optimizer(0)
        twin.message(3)
        took = await honest.take({}, [spent.me, old.me, liar.me])
        assert took.met == [] and not took.fallback and took.report.members == 1
        twin.apply(3, 1.0, [])
        assert all(torch.equal(a, b) for a, b in zip(state(twin), state(honest.optimizer), strict=True))
        assert honest.quiet.total("swarmnode_fallback_packets_total", outcome="none") == 2
        assert honest.quiet.total("swarmnode_fallback_packets_total", outcome="refused") == 1
        assert [f["given"] for f in honest.events("exchange.fallback")] == [False, False, True]


@pytest.mark.loop("virtual")
async def test_a_fallback_request_ends_with_the_round() -> None:
    """Of one whose own meeting goes on. The clock is virtual."""
    network = MemoryNetwork()
    asker, busy = (Node(network, number) for number in range(2))
    start_s = asyncio.get_running_loop().time()
    assert await asker.taking._asked(busy.me, asker.ours, start_s + 2.5, "the partner failed") is None
    assert asyncio.get_running_loop().time() - start_s == pytest.approx(2.5)
    (told,) = asker.events("exchange.fallback")
    assert told["given"] is False and told["reason"] == "no answer within 2.5 s"
    assert asker.quiet.total("swarmnode_fallback_packets_total", outcome="none") == 1


async def test_a_packet_is_given_once_and_to_nobody_left_out() -> None:
    async with village(5) as (asker, second, giver, _, liar):

        async def refused(who: Node, round_index: int, what: str, kind: type[Exception] = Unavailable) -> None:
            with pytest.raises(kind, match=what):
                await who.fallback.ask(giver.me, round_index, SIZE * 4, 5.0)

        await refused(asker, 5, "beyond 4")
        asking = asyncio.get_running_loop().create_task(asker.fallback.ask(giver.me, 3, SIZE * 4, 5.0))
        while not giver.transport._working:
            await asyncio.sleep(0)
        assert not asking.done(), "its own meeting comes first"
        await giver.fallback.offer(giver.ours)
        packet = await asking
        assert packet.fallback and packet.samples == 77
        assert [bytes(t.data) for t in packet.tensors] == [bytes(t.data) for t in giver.ours.tensors]
        await refused(second, 3, "given away")
        await giver.fallback.offer(giver.ours)
        await refused(second, 2, "given away, or there is none")
        await refused(liar, 3, "is left out here")
        giver.fallback.drop()
        await refused(second, 3, "given away, or there is none")
        await giver.fallback.offer(OutgoingPacket(4, 0.0, 0, giver.ours.tensors))
        await refused(second, 4, "there is none")
        giver.fallback._here = dataclasses.replace(giver.fallback._here, stage=2)
        await refused(second, 4, "of stage 2 asked of a replica of stage 3", RemoteFault)


async def test_a_packet_beyond_memory_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fallback_partner, "KEPT_BYTES_MAX", 4 * SIZE - 1)
    async with village() as (asker, giver, *_):
        await giver.fallback.offer(giver.ours)
        with pytest.raises(Unavailable, match="there is none"):
            await asker.fallback.ask(giver.me, 3, SIZE * 4, 5.0)


async def test_a_partner_that_is_new_needs_no_stand_in() -> None:
    async with village() as (ours, newcomer, third, _):
        await third.fallback.offer(third.ours)
        took = await ours.take({newcomer.me: Packet(0.0, 0, newcomer.ours.tensors)}, [third.me])
        assert took.met == [newcomer.me] and not took.fallback and took.report.members == 1
        assert not ours.events("exchange.fallback")
