"""Whole nodes train by forward passes alone: what they send in a round is bytes, and their weights are equal."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from swarmnode.identity import Identity
from swarmnode.manifest import Manifest
from swarmnode.ports import LossResult, OuterReport, Packet, WireTensor
from swarmnode_methods.one_byte import HEADER, ROUNDS_KEPT, OneByte
from tests.support.one_byte_run import by_bytes
from tests.support.village import TINY, Recording, Village, Villager, losses, manifest, told, village


class Remembering(Recording):
    """Draws by its peer id, as nodes of a swarm do, and remembers its weights after each round."""

    number = 0

    def __init__(self, run: Manifest, stage: int) -> None:
        super().__init__(run, stage, sender=Identity.of_seed(bytes([self.number]) * 32).peer_id)
        self.after: dict[int, Tensor] = {}
        self.measured = 0  # steps

    def loss(
        self, x: WireTensor, tokens: WireTensor, samples: int, *, train: bool, accumulate: bool = True
    ) -> LossResult:
        self.measured += train and accumulate
        return super().loss(x, tokens, samples, train=train, accumulate=accumulate)

    def apply(
        self, round_index: int, own_weight: float, packets: Sequence[Packet], *, lone: bool = True
    ) -> OuterReport:
        report = super().apply(round_index, own_weight, packets, lone=lone)
        self.after[round_index] = self.outer.phi.clone()
        return report


def add(v: Village) -> Villager:
    number = len(v.people) + 1
    return v.add(0, type("Member", (Remembering,), {"number": number}))


def gaps(one: Recording, other: Recording) -> list[float]:
    """The distances of their weights after each round that both had, ascending."""
    assert isinstance(one, Remembering) and isinstance(other, Remembering)
    return sorted(float((one.after[i] - other.after[i]).norm()) for i in one.after.keys() & other.after.keys())


async def test_replicas_share_bytes_and_a_joiner_has_their_weights() -> None:
    start = replace(manifest(stages=1, round_samples=256), model=replace(TINY, layers=1))
    run = by_bytes(start, 1e-3, clip_norm=4.0, warmup_samples=0)
    async with village(run) as v:
        pair = [add(v), add(v)]
        # After fewer rounds a joiner that has not heard of them may begin from the seed: packets repeat them all.
        await v.until(lambda: all(len(told(p, "exchange.paired")) > ROUNDS_KEPT for p in pair), "rounds of both")
        joiner = add(v)
        await v.until(lambda: bool(told(joiner, "recovery.done")), "a joiner has the weights")
        await v.until(lambda: len(told(joiner, "exchange.paired")) >= 4, "it meets the others")
        await v.until(lambda: losses(v)[-1] < losses(v)[0] - 0.05, "they learn")
        await v.leave()
    for replica in v.made:
        assert isinstance(replica.outer, OneByte) and replica.inner_steps > 0
        # A byte for each step; how many steps a round has depends on how busy the machine is.
        assert isinstance(replica, Remembering)
        assert replica.message(1 << 20)[0].nbytes <= ROUNDS_KEPT * HEADER.size + replica.measured
    one, other, late = v.made
    for found in (gaps(one, other), gaps(one, late)):
        # A packet that comes too late is applied a round later: most rounds end with equal weights, not all.
        assert found[len(found) // 2] < 1e-4, found
