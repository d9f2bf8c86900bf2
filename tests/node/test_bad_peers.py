"""Peers that send what cannot be believed: dropped and routed around; the honest go on."""

import asyncio
from collections.abc import Sequence

import numpy as np
import pytest

from swarmnode.base.errors import LocalFault
from swarmnode.base.ports import LossResult, StreamingMessage, WireTensor
from tests.support.village import Recording, Villager, manifest, told, village


def poisoned(tensor: WireTensor, value: float) -> WireTensor:
    """`tensor` (float32) with one element replaced."""
    values = np.frombuffer(tensor.data, dtype="<f4").copy()
    values[len(values) // 2] = value
    return WireTensor(tensor.dtype, tensor.shape, values.tobytes(), tensor.codec)


class FalseGradients(Recording):
    """A last stage that answers something else than the gradients it computes."""

    def false(self, gradient: WireTensor) -> WireTensor:
        raise NotImplementedError

    def loss(
        self, x: WireTensor, tokens: WireTensor, samples: int, *, train: bool, accumulate: bool = True
    ) -> LossResult:
        result = super().loss(x, tokens, samples, train=train, accumulate=accumulate)
        if result.gradient is not None:
            result.gradient = self.false(result.gradient)
        return result


class NanGradient(FalseGradients):
    def false(self, gradient: WireTensor) -> WireTensor:
        return poisoned(gradient, float("nan"))


class WrongShape(FalseGradients):
    """Of half the samples."""

    def false(self, gradient: WireTensor) -> WireTensor:
        half = (gradient.shape[0] // 2, *gradient.shape[1:])
        return WireTensor(gradient.dtype, half, bytes(memoryview(gradient.data).cast("B")[: gradient.nbytes // 2]))


class NanPacket(Recording):
    """Meets its partner with a packet of infinity."""

    def draft(self, round_index: int) -> StreamingMessage:
        return StreamingMessage([poisoned(tensor, float("inf")) for tensor in super().draft(round_index).finish()])


def rounds(person: Villager) -> list[dict[str, object]]:
    return told(person, "exchange.paired") + told(person, "exchange.lone")


async def test_bad_gradients_ban_their_senders_and_training_goes_on() -> None:
    async with village(manifest(), stages=(0, 1, 2)) as v:
        liars = [v.add(2, kind) for kind in (NanGradient, WrongShape)]

        def banned() -> set[object]:
            return {fields["peer"] for fields in told(v.people[1], "peer.banned")}

        await v.until(lambda: banned() == {liar.node.me for liar in liars}, "both liars are banned, and nobody else")
        await v.trains(256, "progress beside liars")
        assert banned() == {liar.node.me for liar in liars}
        assert all(np.isfinite(p.replica.stage.theta.numpy()).all() for p in v.people[:3] if p.replica)


async def test_a_bad_packet_makes_a_lone_step() -> None:
    async with village(manifest(codec="fp32", round_samples=48), stages=(0, 1, 2)) as v:
        v.add(2, NanPacket)
        honest = v.people[2]

        def refused() -> Sequence[str]:
            return [str(fields["reason"]) for fields in told(honest, "exchange.refused")]

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
        broken = v.add(2, OutOfMemory)
        honest = v.people[2]
        assert broken.task is not None
        with pytest.raises(ExceptionGroup) as caught:
            await asyncio.wait_for(asyncio.shield(broken.task), 100)
        assert caught.value.subgroup(LocalFault) is not None
        broken.task = None

        before = len(rounds(honest))
        await v.until(lambda: len(rounds(honest)) >= before + 2, "the partner's rounds go on")
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
        liar = v.add(2, Flipped)
        honest = v.people[2]

        await v.until(lambda: len(told(liar, "receipt.got")) >= 4, "the liar has four receipts")
        got = told(liar, "receipt.got")
        assert {f["step"] for f in got} <= {"accepted", "clipped", "newcomer"}
        assert {f["peer"] for f in got} == {honest.node.me}
        assert not told(honest, "exchange.refused")
        gossip = honest.served.gossip
        assert gossip is not None and not gossip.acceptance.left_out([liar.node.me])
        await v.trains(256, "progress without the liar")


@pytest.mark.nightly  # tests/gossip has refusals that add up, and a third one's packet
async def test_a_replica_whose_packets_break_the_rules_is_left_out_by_all() -> None:
    """Four replicas of the last stage, one of which sends what nobody can take: all leave it out in time, and until
    then another one's packet stands in for the liar's."""
    async with village(manifest(codec="fp32", round_samples=24), stages=(0, 1, 2, 2, 2)) as v:
        liar = v.add(2, NanPacket)
        honest = v.people[2:5]

        def out(person: Villager) -> dict[str, str]:
            return {str(f["peer"]): str(f["reason"]) for f in told(person, "peer.left_out")}

        await v.until(
            lambda: all(liar.node.me in out(person) for person in honest), "all honest leave the liar out", 120
        )
        had = {(p.node.me, fields["round"]): fields for p in honest for fields in rounds(p)}
        refused = {(p.node.me, fields["round"]) for p in honest for fields in told(p, "exchange.refused")}
        helped = [had[met] for met in refused if met in had and had[met]["peer"] is not None]
        assert helped and all(fields.get("fallback") for fields in helped), had
        assert liar.node.me not in {fields["peer"] for fields in helped}
