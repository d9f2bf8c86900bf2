"""Which answers are checked, when a peer is excluded, and that statements cannot be forged."""

import random

import pytest
import torch
from torch import Tensor

from swarmnode.base.ema import ENOUGH
from swarmnode.base.errors import RemoteFault
from swarmnode.base.identity import Identity
from swarmnode.base.ids import PeerId
from swarmnode.base.wire import call_pb2 as wire
from swarmnode.model.inner_optimizer import FACTOR, IncomingNorms
from swarmnode.net.membership.judge import TensorFingerprints
from swarmnode.trust import statement
from swarmnode.trust.audit import (
    BUDGET_FIRST,
    DOUBTED_RIGHT,
    EXAMINED_MOST,
    EXAMINED_S,
    FORGIVEN_RIGHT,
    UNSHOWN_MAX,
    Audits,
)
from swarmnode.trust.verdict import APART_S, LIES, UNEXPLAINED_MAX, Judgement

A, B, C = (PeerId(letter * 52) for letter in "abc")
SHARE = 0.03


def right(audits: Audits, peer: PeerId, times: int = 1) -> None:
    for _ in range(times):
        audits.record(peer, Judgement.RIGHT, b"", 0.0)


def test_the_share_falls_for_who_is_right_and_rises_for_who_is_not() -> None:
    audits = Audits(SHARE)
    assert audits.share(A) == 1.0
    right(audits, A)
    assert audits.share(A) == SHARE
    assert not audits.record(A, Judgement.FALSE, b"one", 0.0) and audits.share(A) == 1.0
    right(audits, A, DOUBTED_RIGHT)
    assert audits.share(A) == SHARE and audits.share(B) == 1.0


def test_two_lies_exclude_and_one_is_forgiven_in_time() -> None:
    audits = Audits(SHARE)
    assert not any(audits.record(A, Judgement.FALSE, b"one", 0.0) for _ in range(2)), "one microbatch counts once"
    assert audits.record(A, Judgement.FALSE, b"two", 0.0) and LIES == 2
    assert not audits.record(B, Judgement.FALSE, b"one", 0.0)
    right(audits, B, FORGIVEN_RIGHT)
    assert not audits.record(B, Judgement.FALSE, b"two", 0.0)


def test_answers_that_one_change_of_weights_explains_count_as_one() -> None:
    audits = Audits(SHARE)
    for number in range(UNEXPLAINED_MAX):
        assert not audits.convicted(A)
        for within in (1.0, APART_S / 2.0):
            audits.record(A, Judgement.UNEXPLAINED, bytes([number]), number * 2.0 * APART_S + within)
    assert audits.convicted(A)


def test_a_replica_that_never_shows_its_evidence_is_excluded() -> None:
    audits = Audits(SHARE)
    assert [audits.unshown(A) for _ in range(UNSHOWN_MAX)] == [False] * (UNSHOWN_MAX - 1) + [True]
    audits.unshown(B)
    assert audits.share(B) == 1.0, "once is no reason for doubt"
    right(audits, B)
    assert not any(audits.unshown(B) for _ in range(UNSHOWN_MAX - 1))


def test_checks_stay_within_their_budget() -> None:
    """The manifest's share in the long run, whoever is doubted."""
    audits = Audits(SHARE)
    rng = random.Random(1)

    def checks(peer: PeerId) -> int:
        """Checks of `peer` among 2,000 answers; none finds it right."""
        count = 0
        for _ in range(2000):
            if audits.chosen(peer, rng.random()):
                audits.spent()
                count += 1
        return count

    assert checks(A) <= BUDGET_FIRST + SHARE * 2000 + 1
    assert not Audits(0.0).chosen(A, 0.0), "no share, no checks"
    right(audits, B)
    audits.doubt(B)
    assert checks(B) <= BUDGET_FIRST + SHARE * 2000 + 1


@pytest.mark.parametrize(("callers", "first"), [(1, 8), (2, 4), (3, 2), (4, 2), (8, 1), (100, 1)])
def test_callers_share_the_first_checks_of_newcomers(callers: int, first: int) -> None:
    """Newcomers that are never found right, however many keys they are, leave the other checks to those known."""
    audits = Audits(SHARE)
    checked = 0
    for number in range(20):
        if audits.share(PeerId(f"{number:052}"), callers) == 1.0:
            audits.spent()
            checked += 1
    assert checked == first
    right(audits, A)
    assert audits.share(A, callers) == SHARE


def test_weights_are_fetched_again_when_donors_may_have_newer_ones() -> None:
    audits = Audits(SHARE)
    for peer, took_s, times in ((A, 0.1, (0.1, EXAMINED_S)), (B, 10.0, (EXAMINED_S, 30.0))):
        audits.weighed(peer, 1, took_s, now_s=0.0)
        assert [audits.weighable(peer, at) for at in times] == [False, True]
    right(audits, A, 3)
    audits.weighed(A, 1, 0.1, now_s=0.0)
    assert not audits.weighable(A, 3 * EXAMINED_S) and audits.weighable(A, EXAMINED_MOST * EXAMINED_S)
    audits.means(1).put_aside(A, 0.0)
    audits.weighed(A, 1, 0.1, now_s=0.0)
    assert audits.weighable(A, EXAMINED_S), "as often as ever while it stands aside"


def test_gradients_are_clipped_to_what_is_usual() -> None:
    norms = IncomingNorms()
    g = torch.ones(4)

    def clipped(gradient: Tensor, weight: float, *, learn: bool = True) -> Tensor:
        return gradient * norms.factor(gradient, weight, learn=learn)

    for _ in range(ENOUGH):
        assert torch.equal(clipped(g, 4), g)
    assert torch.allclose(clipped(1e4 * g, 4), FACTOR * g)
    assert torch.equal(clipped(1.3 * g, 4), 1.3 * g) and norms.clips == 1
    assert torch.allclose(clipped(1e4 * g, 16), 2 * FACTOR * g), "by the root of the samples"
    for _ in range(3):
        clipped(torch.full((4,), 1e30), 4)
    assert torch.allclose(clipped(1e30 * g, 4, learn=False), FACTOR * g), "lies do not raise the median"


def stated(identity: Identity) -> wire.Statement:
    process = wire.Process(microbatch_id=b"m" * 16, samples=2, itinerary=[0, 1, 2], position=1)
    prints = TensorFingerprints(*(bytes([n]) * 32 for n in range(6)))
    found = statement.stated("ab" * 32, process, identity.peer_id, A, prints, wire.Processed(loss_sum=3.5))
    statement.sign(found, identity)
    return found


FIELDS = ("run_id", "microbatch_id", "client", "x", "tokens", "gradient", "sent", "got", "mark")


@pytest.mark.parametrize("field", FIELDS)
def test_a_statement_that_was_changed_does_not_verify(field: str) -> None:
    found = stated(Identity.of_seed(b"1" * 32))
    statement.check(found)
    value = getattr(found, field)
    setattr(found, field, B if isinstance(value, str) else b"y" * len(value))
    with pytest.raises(RemoteFault, match="forged"):
        statement.check(found)


def test_a_statement_of_another_key_or_shape_is_refused() -> None:
    found = stated(Identity.of_seed(b"1" * 32))
    found.server = Identity.of_seed(b"2" * 32).peer_id
    with pytest.raises(RemoteFault, match="forged"):
        statement.check(found)
    found = stated(Identity.of_seed(b"1" * 32))
    found.x = b"short"
    with pytest.raises(RemoteFault, match="32 bytes"):
        statement.check(found)
