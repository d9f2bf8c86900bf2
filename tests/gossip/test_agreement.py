"""Members whose gradients lead elsewhere than most are refused, and never half of them."""

from swarmnode.train.gossip.agreement import Agreement

ROUNDS = 40


def refused(values: dict[str, float]) -> set[str]:
    """The members refused after rounds with these agreements."""
    agreement = Agreement()
    found = set[str]()
    for k in range(ROUNDS):
        found = agreement.refused({peer: value + 0.01 * (-1) ** k for peer, value in values.items()})
    return found


def test_one_of_four_that_leads_elsewhere_is_refused() -> None:
    assert refused({"a": 1.0, "b": 1.1, "c": 0.9, "d": -1.0}) == {"d"}


def test_half_of_the_members_are_not_refused() -> None:
    assert refused({"a": 1.0, "b": 1.0, "c": 1.0, "d": -1.0, "e": -1.0, "f": -1.0}) == set()


def test_two_members_refuse_nobody() -> None:
    assert refused({"a": 1.0, "b": -1.0}) == set()
