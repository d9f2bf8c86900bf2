"""Honest answers of old weights, near a run's start where a dozen steps are a nat, are told from lies."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest

from swarmnode.app.machine.replica import TorchReplica
from swarmnode.base.ids import PeerId
from swarmnode.base.ports import Packet, WireTensor
from swarmnode.base.wire import call_pb2 as wire
from swarmnode.trust.recompute import hop_again
from swarmnode.trust.statement import HopAnswer, HopClaim
from swarmnode.trust.verdict import AnswerSimilarity, Evidence, Judgement, by_own_weights, verdict
from tests.support.village import Numbers, manifest

ACCUSED = PeerId("a" * 52)
RUN = manifest(stages=2, method="average", codec="fp32", group=4)
ROUND = 4  # microbatches of each replica
LAGS = (16, 48)


@dataclass(frozen=True)
class Life:
    """Three replicas of the last stage, trained together from step 0: what each of them makes of one microbatch, what
    one of them made of it with its weights of some steps before, and the steps of all."""

    judge: TorchReplica
    claim: HopClaim
    now: Sequence[HopAnswer]
    before: dict[int, HopAnswer]
    steps: int


def made_by(replica: TorchReplica, x: WireTensor, tokens: WireTensor) -> HopAnswer:
    loss_sum, tensors = hop_again(replica, x, tokens, RUN.inner.microbatch, None)
    stated = wire.Statement(inner_steps=replica.inner_steps)
    return replace(HopAnswer.of(tensors, loss_sum), statement=stated, marked=True)


def meet(replicas: Sequence[TorchReplica], round_index: int) -> None:
    messages = [replica.message(round_index) for replica in replicas]
    share = 1.0 / len(replicas)
    for at, replica in enumerate(replicas):
        others = [Packet(share, 16, said, sender=str(n)) for n, said in enumerate(messages) if n != at]
        replica.apply(round_index, share, others)


def test_a_mark_changes_with_rounds_and_not_with_steps() -> None:
    """So it says whether a round lies between an answer and the weights that are given for it."""
    replicas = [TorchReplica(RUN, 1, sender=name) for name in "ab"]
    text = Numbers(RUN)
    first = TorchReplica(RUN, 0)
    each = RUN.inner.microbatch
    before = replicas[0].mark()
    assert before and before == replicas[1].mark(replicas[0].snapshot(packed=True))
    tokens = text.train(range(each))
    x, _ = first.forward(tokens, keep=True, tokens=tokens)
    replicas[0].loss(x, tokens, each, train=True)
    replicas[0].step(each, averaged=2)
    assert replicas[0].mark() == before
    packet = Packet(0.5, 16, replicas[1].message(0), sender="b")
    replicas[0].message(0)
    assert replicas[0].mark() == replicas[0].mark(replicas[0].snapshot(packed=True)) == before, "in a round"
    replicas[0].apply(0, 0.5, [packet])
    assert replicas[0].mark() not in (b"", before)


@functools.cache
def life(steps: int) -> Life:
    first = TorchReplica(RUN, 0)
    last = [TorchReplica(RUN, 1, sender=name) for name in "abc"]
    text = Numbers(RUN)
    each = RUN.inner.microbatch
    weights = {}
    total = 0
    for step in range(steps):
        weights[last[0].inner_steps] = last[0].stage.theta.clone()
        for replica in last:
            tokens = text.train(range(total, total + each))
            x, tape = first.forward(tokens, keep=True, tokens=tokens)
            result = replica.loss(x, tokens, each, train=True)
            assert tape is not None and result.gradient is not None
            first.backward(tape, result.gradient, each)
            total += each
            replica.step(total, averaged=3)
        first.step(total)
        if step % ROUND == ROUND - 1:
            meet(last, step // ROUND)
    tokens = text.train(range(5000, 5000 + each))
    x, _ = first.forward(tokens, keep=True, tokens=tokens)
    before = {}
    for lag in LAGS:
        if lag <= steps:
            with last[0].stage.instead(weights[steps - lag]):
                old = made_by(last[0], x, tokens)
            before[lag] = replace(old, statement=wire.Statement(inner_steps=steps - lag))
    now = [made_by(replica, x, tokens) for replica in last]
    stated = wire.Statement(server=ACCUSED, stage=1, inner_steps=steps)
    return Life(last[0], HopClaim(stated, each, x, tokens, now[0].gradient), now, before, steps)


def like(life: Life, one: HopAnswer, other: HopAnswer) -> AnswerSimilarity:
    tokens = RUN.inner.microbatch * RUN.model.context
    samples = RUN.inner.microbatch
    cosine = life.judge.cosine(one.gradient, other.gradient, samples)
    return AnswerSimilarity(cosine, abs(one.loss_sum - other.loss_sum) / tokens)


def judged(life: Life, answer: HopAnswer, own: HopAnswer) -> tuple[Evidence, bool]:
    """The evidence on `answer` of its server's weights, which make `own` of the hop."""
    steps = [0 if one.statement is None else one.statement.inner_steps for one in (answer, own)]
    return by_own_weights(like(life, answer, own), abs(steps[1] - steps[0]), marked=own.marked)


def test_products_in_bfloat16_give_an_answer_of_the_same_weights_again() -> None:
    """Losses of 64 tokens differ by a thousandth of a nat, for which an honest server was called a liar."""
    first = TorchReplica(RUN, 0)
    half, full = (TorchReplica(RUN, 1, autocast=halved) for halved in (True, False))
    text = Numbers(RUN)
    each = RUN.inner.microbatch
    for step in range(12):
        tokens = text.train(range(step * each, (step + 1) * each))
        x, _ = first.forward(tokens, keep=False, tokens=tokens)
        full.load(half.snapshot(packed=True))
        one, other = (made_by(replica, x, tokens) for replica in (half, full))
        loss_apart = abs(one.loss_sum - other.loss_sum) / (each * RUN.model.context)
        found = AnswerSimilarity(full.cosine(one.gradient, other.gradient, each), loss_apart)
        assert found.same, f"{found.distance} and {loss_apart} nats after {step} steps"
        half.loss(x, tokens, each, train=True)
        half.step((step + 1) * each, averaged=1)


def twisted(answer: HopAnswer, factor: float, noise: float = 0.0) -> HopAnswer:
    found = np.frombuffer(answer.gradient.data, np.float32)
    drawn = np.random.default_rng(1).standard_normal(found.size, np.float32) * found.std()
    data = (factor * found + noise * drawn).astype(np.float32).tobytes()
    return replace(answer, gradient=replace(answer.gradient, data=data))


@pytest.mark.parametrize(("steps", "lag"), [(18, 16), (22, 16), (50, 48)])
def test_an_honest_answer_of_old_weights_is_not_false(steps: int, lag: int) -> None:
    """Two others that are up to date agree with each other, and have learned one or two nats more."""
    here = life(steps)
    old = here.before[lag]
    assert like(here, here.now[1], here.now[2]).close and not like(here, old, here.now[1]).close
    assert judged(here, old, old) == (Evidence.OWN_SAME, True), "it stood still"
    met = replace(here.now[0], statement=wire.Statement(inner_steps=here.steps - lag + 3), marked=False)
    found, comparable = judged(here, old, met)
    assert not comparable, "it met the others in a round since"
    assert verdict(found, 3, comparable=comparable) in (Judgement.RIGHT, Judgement.UNEXPLAINED)


@pytest.mark.parametrize(("factor", "noise"), [(-1.0, 0.0), (-1e4, 0.0), (0.0, 1.0), (0.0, 0.0)])
@pytest.mark.parametrize("stated", [0, 16])
def test_a_lie_is_false_whatever_age_its_server_states(factor: float, noise: float, stated: int) -> None:
    here = life(22)
    lie = replace(twisted(here.now[0], factor, noise), statement=wire.Statement(inner_steps=here.steps - stated))
    found, comparable = judged(here, lie, here.now[0])
    assert (found, comparable) == (Evidence.OWN_OTHER, stated == 0)
