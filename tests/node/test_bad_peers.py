"""Peers that send what cannot be believed: dropped and routed around; the honest go on."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import numpy as np
import pytest

from swarmnode.errors import LocalFault
from swarmnode.ports import LossResult, StreamingMessage, WireTensor
from tests.support.village import Recording, Villager, manifest, village


def poisoned(tensor: WireTensor, value: float) -> WireTensor:
    """`tensor` (float32) with one element replaced."""
    values = np.frombuffer(tensor.data, dtype="<f4").copy()
    values[len(values) // 2] = value
    return WireTensor(tensor.dtype, tensor.shape, values.tobytes(), tensor.codec)


class NanGradient(Recording):
    """A last stage whose gradients are not numbers."""

    def loss(
        self, x: WireTensor, tokens: WireTensor, samples: int, *, train: bool, accumulate: bool = True
    ) -> LossResult:
        result = super().loss(x, tokens, samples, train=train, accumulate=accumulate)
        if result.gradient is not None:
            result.gradient = poisoned(result.gradient, float("nan"))
        return result


class WrongShape(Recording):
    """A last stage that answers with a gradient of half the samples."""

    def loss(
        self, x: WireTensor, tokens: WireTensor, samples: int, *, train: bool, accumulate: bool = True
    ) -> LossResult:
        result = super().loss(x, tokens, samples, train=train, accumulate=accumulate)
        if (g := result.gradient) is not None:
            half = (g.shape[0] // 2, *g.shape[1:])
            result.gradient = WireTensor(g.dtype, half, bytes(memoryview(g.data).cast("B")[: g.nbytes // 2]))
        return result


class NanPacket(Recording):
    """Meets its partner with a packet of infinity."""

    def draft(self, round_index: int) -> StreamingMessage:
        return StreamingMessage([poisoned(tensor, float("inf")) for tensor in super().draft(round_index).finish()])


async def test_bad_gradients_ban_their_senders_and_training_goes_on() -> None:
    async with village(manifest(), stages=(0, 1, 2)) as v:
        liars = [v.add(2, kind) for kind in (NanGradient, WrongShape)]

        def banned() -> set[object]:
            return {fields["peer"] for event, fields in v.people[1].quiet.events if event == "peer.banned"}

        await v.until(lambda: banned() == {liar.node.me for liar in liars}, "both liars are banned, and nobody else")
        await v.trains(256, "progress beside liars")
        assert banned() == {liar.node.me for liar in liars}
        assert all(np.isfinite(p.replica.stage.theta.numpy()).all() for p in v.people[:3] if p.replica)


async def test_a_bad_packet_makes_a_lone_step() -> None:
    async with village(manifest(codec="fp32", round_samples=48), stages=(0, 1, 2)) as v:
        v.add(2, NanPacket)
        honest = v.people[2]

        def refused() -> Sequence[str]:
            return [str(f["reason"]) for event, f in honest.quiet.events if event == "exchange.refused"]

        await v.until(lambda: len(refused()) >= 2, "two packets were refused")
        assert all("finite" in reason or "inf" in reason.lower() for reason in refused()), refused()
        assert honest.replica is not None
        assert np.isfinite(honest.replica.stage.theta.numpy()).all()
        assert np.isfinite(honest.replica.outer.phi.numpy()).all()


class OutOfMemory(Recording):
    """Runs out of memory in the middle of its third packet."""

    def draft(self, round_index: int) -> StreamingMessage:
        draft = super().draft(round_index)
        if round_index < 3:
            return draft

        def write() -> None:
            watermark = draft.tensors[0].watermark
            assert watermark is not None
            watermark.reach(watermark.nbytes // 2)
            raise MemoryError("no room for a packet")

        return StreamingMessage(draft.tensors, write)


async def test_a_replica_that_fails_to_send_leaves_its_partner_running() -> None:
    async with village(manifest(round_samples=48), stages=(0, 1, 2)) as v:
        broken, honest = v.add(2, OutOfMemory), v.people[2]
        assert broken.task is not None
        with pytest.raises(ExceptionGroup) as caught:
            await asyncio.wait_for(asyncio.shield(broken.task), 100)
        assert caught.value.subgroup(LocalFault) is not None
        broken.task = None

        def rounds() -> list[dict[str, object]]:
            kinds = ("exchange.paired", "exchange.lone")
            return [fields for event, fields in honest.quiet.events if event in kinds]

        before = len(rounds())
        await v.until(lambda: len(rounds()) >= before + 2, "the partner's rounds go on")
        assert honest.replica is not None
        assert np.isfinite(honest.replica.stage.theta.numpy()).all()


class Flipped(Recording):
    """Tells its partner the opposite of what it learned."""

    def draft(self, round_index: int) -> StreamingMessage:
        outer = self.outer
        outer.message(round_index)
        return outer.codec.draft(2 * outer.phi - outer.theta, reference=outer.phi, seed=round_index)


async def test_a_liar_is_told_what_is_made_of_its_packets_and_left_out_by_nobody_for_its_direction() -> None:
    """Of two replicas one turns its packets round. The packets are taken up to the usual distance, and training
    goes on."""
    async with village(manifest(codec="modular4", acceptance="clipped", round_samples=48), stages=(0, 1, 2)) as v:
        liar, honest = v.add(2, Flipped), v.people[2]

        def told(event: str, who: int) -> list[dict[str, object]]:
            return [fields for said, fields in v.people[who].quiet.events if said == event]

        await v.until(lambda: len(told("receipt.got", 3)) >= 4, "the liar has four receipts")
        got = told("receipt.got", 3)
        assert {f["step"] for f in got} <= {"accepted", "clipped", "newcomer"}
        assert {f["peer"] for f in got} == {honest.node.me}
        assert not told("exchange.refused", 2)
        gossip = honest.served.gossip
        assert gossip is not None and not gossip.acceptance.left_out([liar.node.me])
        await v.trains(256, "progress without the liar")


@pytest.mark.nightly  # tests/gossip has refusals that add up, and a third one's packet
async def test_a_replica_whose_packets_break_the_rules_is_left_out_by_all() -> None:
    """Four replicas of the last stage, one of which sends what nobody can take: all leave it out in time, and until
    then another one's packet stands in for the liar's."""
    async with village(manifest(codec="fp32", round_samples=24), stages=(0, 1, 2, 2, 2)) as v:
        liar, honest = v.add(2, NanPacket), v.people[2:5]

        def out(person: Villager) -> dict[str, str]:
            return {str(f["peer"]): str(f["reason"]) for event, f in person.quiet.events if event == "peer.left_out"}

        await v.until(
            lambda: all(liar.node.me in out(person) for person in honest), "all honest leave the liar out", 120
        )
        rounds = {
            (person.node.me, fields["round"]): fields
            for person in honest
            for event, fields in person.quiet.events
            if event in ("exchange.paired", "exchange.lone")
        }
        refused = {
            (person.node.me, fields["round"])
            for person in honest
            for event, fields in person.quiet.events
            if event == "exchange.refused"
        }
        helped = [rounds[met] for met in refused if met in rounds and rounds[met]["peer"] is not None]
        assert helped and all(fields.get("fallback") for fields in helped), rounds
        assert liar.node.me not in {fields["peer"] for fields in helped}
