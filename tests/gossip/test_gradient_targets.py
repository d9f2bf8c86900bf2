"""Gradients of masked samples: a step divides by the targets that count, in one replica and over all members."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from swarmnode.app.machine.replica import TorchReplica
from swarmnode.app.planner.plan_search import together
from swarmnode.base.errors import RemoteFault
from swarmnode.base.ports import Packet, WireTensor
from swarmnode.base.work import TargetCount, Work
from swarmnode.run.gossip_rules import methods
from swarmnode.run.manifest import Manifest
from swarmnode.run.manifest.recipe import PRESETS
from swarmnode.train.gossip.round import SPEEDS_MAX
from swarmnode_methods.gradient import GradientOf, ReplicaGradient
from swarmnode_methods.packet_work import check_work, read_work, write_work
from swarmnode_methods.share import CLIP, shares_by_length

TINY = PRESETS["tiny"]
MODEL = replace(TINY.model, layers=2, width=32, heads=4, kv_heads=2, ffn=64, context=24, vocabulary=60)
INNER = replace(
    TINY.inner,
    optimizer="adamw",
    microbatch=2,
    inner_batch=4,
    warmup_samples=0,
    decay="constant",
    clip_norm=1e6,
    average_share=0.0,
)
PLAIN = replace(
    TINY,
    model=MODEL,
    inner=INNER,
    pipeline=replace(TINY.pipeline, stages=1),
    gossip=replace(TINY.gossip, method="none"),
)

Microbatch = tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]


def microbatch(seed: int, *counted: int) -> Microbatch:
    """A sample [T + 1] for each of `counted`, of which so many targets count."""
    rng = np.random.default_rng(seed)
    ids = rng.integers(0, MODEL.vocabulary, (len(counted), MODEL.context + 1))
    keep = np.zeros(ids.shape, bool)
    for row, count in zip(keep, counted, strict=True):
        row[1 : 1 + count] = True
    return ids, keep


def wire(one: Microbatch) -> WireTensor:
    ids, keep = one
    packed = np.where(keep, ids, ids | (1 << 31)).astype("<u4")
    return WireTensor("u32", packed.shape, packed.tobytes())


def train(replica: TorchReplica, given: Sequence[Microbatch]) -> None:
    for one in given:
        replica.loss(wire(one), wire(one), len(one[0]), train=True)


def gradient(**inner: Any) -> Manifest:
    made = together(replace(PLAIN, inner=replace(INNER, **inner)))
    return replace(made, gossip=replace(made.gossip, codec="fp32"))


def mean_loss(replica: TorchReplica, given: Sequence[Microbatch]) -> float:
    """Nats over the targets that count."""
    results = [replica.loss(wire(one), wire(one), len(one[0]), train=False) for one in given]
    assert sum(result.tokens for result in results) == sum(int(keep[:, 1:].sum()) for _, keep in given)
    return sum(result.loss_sum for result in results) / sum(result.tokens for result in results)


METHODS = sorted(methods())
UNEQUAL = [microbatch(1, 1, 2), microbatch(2, 20, 24), microbatch(3, 0, 0)]


@pytest.mark.parametrize("method", METHODS)
def test_the_reported_norm_is_the_slope_of_the_mean_over_counted_targets(method: str) -> None:
    """Three microbatches of 3, 44 and 0 targets. The slope along the gradient is its length."""
    run = gradient()
    codec = methods()[method].codecs[-1]
    if method != "gradient":
        run = replace(PLAIN, gossip=replace(PLAIN.gossip, method=method, codec=codec))
    replica = TorchReplica(run, 0, sender="a", dtype=torch.float64)
    train(replica, UNEQUAL)
    start = replica.stage.theta.clone()
    along = replica.stage.grad / replica.stage.grad.norm()
    losses = []
    for side in (1e-5, -1e-5):
        replica.stage.theta.data.copy_(start + side * along)
        losses.append(mean_loss(replica, UNEQUAL))
    replica.stage.theta.data.copy_(start)
    if method == "gradient":
        replica.message(1)
        report = replica.apply(1, 1.0, []).inner
    else:
        report = replica.step(4)
    assert report is not None
    assert report.gradient_norm == pytest.approx((losses[0] - losses[1]) / 2e-5, rel=1e-5)


MEMBERS: dict[str, list[list[Microbatch]]] = {
    "two": [[microbatch(1, 1, 2)], [microbatch(2, 20, 24)]],
    "three": [[microbatch(1, 5)], [microbatch(2, 20), microbatch(3, 1, 1)], [microbatch(4, 24, 7)]],
    "one-counts-nothing": [[microbatch(1, 0, 0)], [microbatch(2, 3), microbatch(3, 24)], [microbatch(4, 9)]],
    "nobody-counts": [[microbatch(1, 0)], [microbatch(2, 0, 0)]],
    "many-microbatches": [[microbatch(n, n % 3) for n in range(6)], [microbatch(9 + n, 24 - n) for n in range(6)]],
}


@pytest.mark.parametrize("eps", [1e-8, 1.0], ids=["usual-eps", "long-eps"])
@pytest.mark.parametrize("case", MEMBERS)
def test_members_take_the_step_of_one_process_that_has_all_samples(case: str, eps: float) -> None:
    """With an eps as long as the gradient AdamW keeps its length: a wrong divisor shows in the weights."""
    run = gradient(eps=eps, weight_decay=0.0)
    given = MEMBERS[case]
    plain = TorchReplica(replace(run, gossip=replace(PLAIN.gossip)), 0, dtype=torch.float64)
    found = [TorchReplica(run, 0, sender=f"m{at}", dtype=torch.float64) for at in range(len(given))]
    for step in range(1, 4):
        for one, mine in zip(found, given, strict=True):
            train(one, mine)
            train(plain, mine)
        whole = plain.step(step * run.gossip.round_samples)
        messages = [one.message(step) for one in found]
        for at, one in enumerate(found):
            packets = [Packet(1.0, 8, said, sender=f"m{n}") for n, said in enumerate(messages) if n != at]
            report = one.apply(step, 1.0, packets).inner
            assert report is not None and report.gradient_norm == pytest.approx(whole.gradient_norm, rel=1e-5, abs=1e-9)
            torch.testing.assert_close(one.stage.theta, plain.stage.theta, rtol=0, atol=1e-6)
            assert torch.equal(one.stage.theta, found[0].stage.theta)


def test_a_gradient_that_waits_for_a_missed_round_keeps_its_targets() -> None:
    """A member that met nobody in a step has the gradients of both in its next packet, and the targets of both."""
    run = gradient(eps=1.0, weight_decay=0.0)
    plain, late = (TorchReplica(one, 0, dtype=torch.float64) for one in (replace(run, gossip=PLAIN.gossip), run))
    train(late, [microbatch(1, 2, 3)])
    late.message(1)
    assert late.apply(1, 0.0, []).members == 0 and late.stage.gathered == Work.of(2, 24, 5)
    train(late, [microbatch(2, 24)])
    late.message(2)
    late.message(3)  # a boundary that was never applied
    assert late.apply(3, 1.0, []).members == 1 and late.stage.gathered == Work()
    train(plain, [microbatch(1, 2, 3), microbatch(2, 24)])
    plain.step(3 * run.gossip.round_samples)
    torch.testing.assert_close(late.stage.theta, plain.stage.theta, rtol=0, atol=1e-6)


def test_a_leavers_gradient_counts_by_its_targets_in_the_heirs_next_packet() -> None:
    run = gradient(eps=1.0, weight_decay=0.0)
    leaver, heir, plain = (TorchReplica(run, 0, sender=name, dtype=torch.float64) for name in ("a", "b", "c"))
    train(leaver, [microbatch(1, 8, 9)])
    train(heir, [microbatch(2, 8, 8)])
    left = Packet(1.0, 2, leaver.final_delta(1), final_delta=True, sender="a")
    heir.message(1)
    heir.apply(1, 1.0, [left])
    assert heir.stage.gathered == Work.of(2, 24, 17)
    heir.message(2)
    heir.apply(2, 1.0, [])
    for at, one in ((1, microbatch(2, 8, 8)), (2, microbatch(1, 8, 9))):
        train(plain, [one])
        plain.message(at)
        plain.apply(at, 1.0, [])
    gap = float((heir.stage.theta - plain.stage.theta).norm() / (plain.stage.theta.norm()))
    assert gap < 1e-3, "beside that the second gradient is of the weights before the first step"


def test_stated_targets_are_bounded_by_the_samples_and_by_the_others() -> None:
    honest = write_work(Work.of(4, 24, 96))
    check_work(honest, 24)
    assert read_work(honest).targets == 96
    for lie in (write_work(Work.of(4, 24, 97)), write_work(Work.of(2**60, 24, 5)), replace(honest, shape=(15,))):
        with pytest.raises(RemoteFault):
            check_work(lie, 24)
    with pytest.raises(RemoteFault):
        check_work(replace(honest, data=honest.data[:-1]), 24)
    counts = [TargetCount(count) for count in (40, 50, 45, 10**12)]
    *others, liar = shares_by_length([1.0, 1.1, 1.0, 1.0], counts)
    assert others == [1.0] * 3 and liar * counts[-1] <= SPEEDS_MAX * 50


def test_a_packet_of_no_targets_is_no_longer_than_a_usual_one() -> None:
    share = shares_by_length([1.0, 1.0, 1.0, 100.0], [TargetCount(count) for count in (40, 50, 45, 0)])[-1]
    assert 100.0 * share <= 1.1 * CLIP / SPEEDS_MAX**0.5
    assert shares_by_length([0.0, 0.0], [TargetCount(0)] * 2) == [1.0, 1.0]


def test_a_misstated_packet_is_refused_and_the_others_count() -> None:
    run = gradient()
    found = [TorchReplica(run, 0, sender=name) for name in ("a", "b", "c")]
    for at, one in enumerate(found):
        train(one, [microbatch(at, 4, 4)])
    one = found[0]
    messages = [each.message(1) for each in found]
    lies = [*messages[2][:-1], write_work(Work.of(2, 24, 2 * 24 + 1))]
    report = one.apply(1, 1.0, [Packet(1.0, 2, messages[1], sender="b"), Packet(1.0, 2, lies, sender="c")])
    assert [verdict.step for verdict in report.verdicts] == ["accepted", "misshapen"]
    assert "targets" in report.verdicts[1].reason and report.members == 2


def test_a_replica_that_gathers_nothing_states_one_whole_step() -> None:
    assert GradientOf().take_work().targets == GradientOf.targets_whole
    replica = TorchReplica(gradient(), 0)
    train(replica, [microbatch(1, 3, 4)])
    of = ReplicaGradient(replica)
    assert of.take_work() == Work.of(2, 24, 7) and of.targets_whole == 4 * 24
    of.give_work(Work.of(1, 24, 2))
    assert replica.stage.gathered == Work.of(1, 24, 2)
