"""Honest answers of old weights, near a run's start where a dozen steps are a nat, are told from lies."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest

from swarmnode.errors import Unavailable
from swarmnode.ids import PeerId
from swarmnode.machine.replica import TorchReplica
from swarmnode.pipeline.audit import UNKNOWN_DRIFT, AnswerSimilarity, middle, wrong
from swarmnode.pipeline.contradiction import ContradictionJudge, Judgement
from swarmnode.pipeline.hop_claim import HopAnswer, HopClaim
from swarmnode.pipeline.recompute import HopEvidence, hop_again
from swarmnode.ports import Packet, WireTensor
from swarmnode.wire import call_pb2 as wire
from tests.support.village import Numbers, manifest

ACCUSED, FIRST, SECOND = (PeerId(letter * 52) for letter in "abc")
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
    return HopAnswer.of(tensors, loss_sum, wire.Statement(inner_steps=replica.inner_steps))


def meet(replicas: Sequence[TorchReplica], round_index: int) -> None:
    messages, share = [replica.message(round_index) for replica in replicas], 1.0 / len(replicas)
    for at, replica in enumerate(replicas):
        others = [Packet(share, 16, said, sender=str(n)) for n, said in enumerate(messages) if n != at]
        replica.apply(round_index, share, others)


@functools.cache
def life(steps: int) -> Life:
    first, last = TorchReplica(RUN, 0), [TorchReplica(RUN, 1, sender=name) for name in "abc"]
    text, each, weights, total = Numbers(RUN), RUN.inner.microbatch, {}, 0
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
    tokens, samples = RUN.inner.microbatch * RUN.model.context, RUN.inner.microbatch
    cosine = life.judge.cosine(one.gradient, other.gradient, samples)
    return AnswerSimilarity(cosine, abs(one.loss_sum - other.loss_sum) / tokens)


async def judged(
    life: Life,
    answer: HopAnswer,
    own: HopAnswer | None,
    drift: AnswerSimilarity = UNKNOWN_DRIFT,
    voters: int = 3,
    known: bool = True,
) -> Judgement:
    """The judgement of `answer`, whose server gives weights that make `own` of the hop (None: it gives none), and was
    right before if it is `known`."""

    async def alike(_: HopClaim, one: HopAnswer, other: HopAnswer) -> AnswerSimilarity:
        return like(life, one, other)

    async def weigh(peer: PeerId, claim: HopClaim, _: HopEvidence | None) -> HopAnswer:
        made = own if peer == ACCUSED else life.now[1]
        if made is None:
            raise Unavailable("no weights")
        assert made.statement is not None
        return replace(made, apart=abs(made.statement.inner_steps - claim.statement.inner_steps))

    async def drifted(_: int, others: Sequence[PeerId]) -> AnswerSimilarity:
        assert ACCUSED not in others
        return drift

    others = [(FIRST, life.now[1]), (SECOND, life.now[2])][: voters - 1]
    judge = ContradictionJudge(weigh, alike, drifted, lambda peer: known or peer != ACCUSED)
    found = await judge.judge(life.claim, None, [(ACCUSED, answer), *others])
    assert not any(one.false or one.hides for one in found[1:])
    return found[0]


def by_votes_alone(life: Life, answer: HopAnswer) -> bool:
    voters = [answer, *life.now[1:]]
    return wrong([middle([like(life, one, other) for other in voters if other is not one]) for one in voters])[0]


def twisted(answer: HopAnswer, factor: float, noise: float = 0.0) -> HopAnswer:
    found = np.frombuffer(answer.gradient.data, np.float32)
    drawn = np.random.default_rng(1).standard_normal(found.size, np.float32) * found.std()
    data = (factor * found + noise * drawn).astype(np.float32).tobytes()
    return replace(answer, gradient=replace(answer.gradient, data=data))


@pytest.mark.parametrize(("steps", "lag"), [(18, 16), (22, 16), (50, 48)])
async def test_an_honest_answer_of_old_weights_is_not_false(steps: int, lag: int) -> None:
    """Two others that are up to date agree with each other, and have learned one or two nats more."""
    here = life(steps)
    old = here.before[lag]
    assert like(here, here.now[1], here.now[2]).close and by_votes_alone(here, old)
    stood_still = await judged(here, old, old)
    assert not stood_still.false and not stood_still.hides
    none = await judged(here, old, None)
    assert not none.false and (none.hides or like(here, old, here.now[1]).cosine >= 0.5)
    met_since = await judged(here, old, here.now[0])
    assert not met_since.false or met_since.aged, "it counts half"


@pytest.mark.parametrize("voters", [2, 3])
@pytest.mark.parametrize(("factor", "noise"), [(-1.0, 0.0), (-1e4, 0.0), (0.0, 1.0), (0.0, 0.0)])
async def test_a_lie_of_new_weights_counts_whole(factor: float, noise: float, voters: int) -> None:
    here = life(22)
    found = await judged(here, twisted(here.now[0], factor, noise), here.now[0], voters=voters)
    assert found.false and not found.aged


@pytest.mark.parametrize("voters", [2, 3])
async def test_stating_old_weights_helps_a_liar_little(voters: int) -> None:
    here = life(22)

    def stating_old(answer: HopAnswer) -> HopAnswer:
        return replace(answer, statement=wire.Statement(inner_steps=here.steps - 16))

    flipped, noise = (stating_old(twisted(here.now[0], *how)) for how in ((-1.0, 0.0), (0.0, 1.0)))
    found = await judged(here, flipped, here.now[0], voters=voters)
    assert found.false and not found.aged, "no honest answer is the opposite"
    found = await judged(here, noise, here.now[0], voters=voters)
    assert found.false and found.aged
    settled = AnswerSimilarity(0.9, 0.1)
    found = await judged(here, noise, here.now[0], settled, voters=voters)
    assert found.false and not found.aged, "where weights moved little, age explains nothing"
    assert (await judged(here, noise, None, voters=voters)).hides, "weights that it does not give count"


async def test_a_newcomer_may_state_more_steps_than_its_weights_have() -> None:
    """It begins with the weights after the last round, and the steps of who gave them."""
    here = life(22)
    old = replace(here.before[16], statement=here.now[0].statement)
    assert by_votes_alone(here, old)
    assert not (await judged(here, old, old, known=False)).false
    found = await judged(here, twisted(here.now[0], -1.0), here.now[0], known=False)
    assert found.false and not found.aged, "no honest answer is the opposite"


async def test_of_two_a_loss_alone_decides_nothing() -> None:
    here = life(22)
    found = await judged(here, here.before[16], None, voters=2)
    assert not found.false and not found.hides
