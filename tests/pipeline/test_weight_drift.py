"""An old, confirmed answer of each stage is kept, and made again to see how far weights moved."""

from __future__ import annotations

from collections.abc import Sequence

from swarmnode.errors import Unavailable
from swarmnode.ids import PeerId
from swarmnode.pipeline.audit import UNKNOWN_DRIFT, AnswerSimilarity
from swarmnode.pipeline.hop_claim import HopAnswer, HopClaim
from swarmnode.pipeline.recompute import HopEvidence
from swarmnode.pipeline.weight_drift import OLD_ROUNDS, OLD_STEPS, ConfirmedAnswer, OldAnswers
from swarmnode.ports import WireTensor
from swarmnode.wire import call_pb2 as wire
from tests.support.village import manifest

RUN = manifest(stages=3)
AGE = max(OLD_STEPS * RUN.inner.inner_batch, OLD_ROUNDS * RUN.gossip.round_samples)
SERVER, A, B, C = (PeerId(letter * 52) for letter in "sabc")


def confirmed(samples: int, stage: int = 1, nbytes: int = 64) -> ConfirmedAnswer:
    tensor = WireTensor("f32", (1,), bytes(nbytes))
    stated = wire.Statement(server=SERVER, stage=stage, inner_steps=samples)
    return ConfirmedAnswer(HopClaim(stated, 1, tensor, tensor, tensor), None, samples)


def kept(answers: OldAnswers, samples: int, stage: int = 1) -> int | None:
    old = answers.of(stage, samples)
    return None if old is None else old.samples


def test_an_old_answer_is_kept_while_the_next_grows_old() -> None:
    answers = OldAnswers(RUN)
    assert kept(answers, 10**6) is None
    for samples in range(0, 4 * AGE + 1, AGE // 4):
        answers.confirmed(confirmed(samples))
        old = kept(answers, samples)
        assert (old is None) == (samples < AGE)
        assert old is None or AGE <= samples - old < 2 * AGE
    assert kept(answers, 4 * AGE, stage=2) is None


def test_answers_kept_fit_their_share_of_memory() -> None:
    answers, most = OldAnswers(RUN), RUN.limits.tape_bytes_max
    answers.confirmed(confirmed(0, nbytes=most // 3 // 4 + 64))
    assert kept(answers, AGE) is None
    answers.confirmed(confirmed(0, nbytes=most // 3 // 4 - 64))
    answers.confirmed(confirmed(0, stage=2))
    assert kept(answers, AGE) == 0 and kept(answers, AGE, stage=2) == 0
    answers.confirmed(confirmed(AGE, stage=2, nbytes=1024))
    assert kept(answers, 2 * AGE, stage=2) == 0


async def test_the_least_alike_of_those_that_make_it_again_counts() -> None:
    likeness = {A: AnswerSimilarity(0.9, 0.2), B: AnswerSimilarity(0.7, 0.1), C: AnswerSimilarity(0.1, 3.0)}
    asked, by = list[PeerId](), dict[int, PeerId]()

    async def again(peer: PeerId, claim: HopClaim, _: HopEvidence | None) -> HopAnswer:
        asked.append(peer)
        if peer not in likeness:
            raise Unavailable("gone")
        found = HopAnswer(claim.gradient, None, 0.0)
        by[id(found)] = peer
        found_by.append(found)
        return found

    async def like(_: HopClaim, __: HopAnswer, other: HopAnswer) -> AnswerSimilarity:
        return likeness[by[id(other)]]

    found_by, answers = list[HopAnswer](), OldAnswers(RUN)

    async def drift(samples: int, peers: Sequence[PeerId]) -> AnswerSimilarity:
        return await answers.drift(1, samples, peers, again, like)

    answers.confirmed(confirmed(0))
    assert await drift(AGE - 1, [A]) == UNKNOWN_DRIFT and not asked, "none is old"
    assert await drift(AGE, [SERVER, PeerId("d" * 52)]) == UNKNOWN_DRIFT
    assert await drift(AGE, [SERVER, A, B, C]) == AnswerSimilarity(0.7, 0.2)
    assert SERVER not in asked and C not in asked
