"""Pairing: the same answer at every member, mutual and of a frozen order. Replicas that were never met are
partners like others while they come; a flood of keys gets one round in four."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from swarmnode.base.ids import PeerId, RunId
from swarmnode.net.membership.trust import FLOOD
from swarmnode.train.gossip.pairing import groups, pairs, partners, shuffled
from swarmnode.train.gossip.strangers import OPEN_EVERY, Strangers

RUN = RunId("ab" * 32)
members_of = st.lists(st.text("abcdefgh", min_size=1, max_size=4).map(PeerId), max_size=17)


def one_partner(stage: int, round_index: int, members: list[PeerId], me: PeerId) -> tuple[PeerId | None, str]:
    """(the one `me` meets in a round of pairs, the reason)."""
    others, reason = partners(RUN, stage, round_index, members, me, 2)
    return (others[0] if others else None), reason


@given(members_of, st.integers(0, 9), st.integers(0, 10**9))
def test_pairs_are_mutual_whatever_the_order(members: list[PeerId], stage: int, round_index: int) -> None:
    alone = 0
    for me in set(members):
        answer, reason = one_partner(stage, round_index, list(reversed(members)), me)
        assert reason.startswith(f"round {round_index}: ")
        if answer is None:
            alone += 1
        else:
            assert one_partner(stage, round_index, members, answer)[0] == me != answer
    assert alone == len(set(members)) % 2
    assert one_partner(stage, round_index, members, PeerId("stranger"))[0] is None


@given(members_of, st.one_of(st.none(), st.integers(1, 6)), st.integers(0, 1000))
def test_groups_partition_the_members(members: list[PeerId], size: int | None, round_index: int) -> None:
    found = groups(RUN, 1, round_index, members, size)
    assert Counter(member for group in found for member in group) == Counter(set(members))
    if size is None:
        assert len(found) == (1 if members else 0)
    else:
        assert all(len(group) == size for group in found[:-1])
    for group in found:
        for me in group:
            assert set(partners(RUN, 1, round_index, members, me, size)[0]) == set(group) - {me}


def test_order_is_frozen() -> None:
    """A change here would pair nodes of two versions differently: it needs a new protocol version."""
    members = [PeerId(name) for name in "abcdefg"]
    assert "".join(shuffled(RUN, 0, 1, members)) == FROZEN[0]
    assert [" ".join("".join(pair) for pair in pairs(RUN, 0, index, members)) for index in (1, 2)] == list(FROZEN[1:])


FROZEN = ("gacfdbe", "ag be cd f", "ag bd cf e")


def test_a_member_that_only_some_see_disturbs_few() -> None:
    members = [PeerId(f"peer{i}") for i in range(40)]
    moved = 0
    for round_index in range(50):
        unseen = members[round_index % 40]
        whole = {pair for pair in pairs(RUN, 0, round_index, members) if unseen not in pair}
        without = set(pairs(RUN, 0, round_index, [m for m in members if m != unseen]))
        moved += len(whole - without)
    assert moved / 50 < 2.0, "of 19 pairs; a shuffle moves nearly all"


@given(st.integers(129, 700), st.integers(0, 99))
def test_large_stages_are_cut_into_parts(count: int, round_index: int) -> None:
    members = [PeerId(f"peer{i}") for i in range(count)]
    found = pairs(RUN, 0, round_index, members)
    assert Counter(member for pair in found for member in pair) == Counter(members)
    assert sum(len(pair) == 1 for pair in found) <= 8, "at most one a part"


def test_everybody_meets_everybody() -> None:
    members = [PeerId(f"peer{i}") for i in range(6)]
    met = Counter(
        frozenset((member, other))
        for round_index in range(1500)
        for member, other in ((m, one_partner(0, round_index, members, m)[0]) for m in members[:3])
        if other is not None
    )
    pairs = {frozenset((a, b)) for a in members[:3] for b in members if a != b}
    assert set(met) == pairs
    # Each pair meets with chance 1/5 a round; pairs inside the first three are seen from both sides.
    for pair, count in met.items():
        sides = sum(member in members[:3] for member in pair)
        assert abs(count / sides - 300) < 5 * (1500 * 0.2 * 0.8) ** 0.5


ME = PeerId("me")
MATE = PeerId("mate")
KEYS = tuple(PeerId(f"key {number:03}") for number in range(100))


def test_strangers_meet_in_all_rounds_while_most_of_them_come() -> None:
    strangers = Strangers(RUN, 1, lambda peer: int(peer == MATE))
    assert strangers.come and not strangers.kept_out((ME, MATE, *KEYS), ME)
    for came in (False, True, True, False) * (FLOOD // 4):
        strangers.record_try(came)
    assert strangers.come and not strangers.kept_out((ME, MATE, *KEYS), ME)


def test_beside_a_flood_of_keys_those_who_have_met_meet() -> None:
    """Of two replicas beside a hundred keys one in a hundred rounds was with each other."""
    met = 0
    rounds = 2000
    strangers = Strangers(RUN, 1, lambda peer: int(peer == MATE))
    members = tuple(sorted((ME, MATE, *KEYS)))
    for round_index in range(rounds):
        out = strangers.kept_out(members, ME)
        here = members if strangers.is_open(round_index) else tuple(peer for peer in members if peer not in out)
        others, _ = partners(RUN, 1, round_index, here, ME)
        met += others == (MATE,)
        for other in others:
            if other != MATE:
                strangers.record_try(False)
    assert abs(met / rounds - (1 - 1 / OPEN_EVERY)) < 0.05


def test_a_replica_among_strangers_excludes_none() -> None:
    strangers = Strangers(RUN, 1, lambda peer: 0)
    for _ in range(FLOOD):
        assert strangers.come, "a few that do not come are no flood"
        strangers.record_try(False)
    assert not strangers.come and not strangers.kept_out((ME, *KEYS), ME)


def test_all_replicas_name_the_same_open_rounds_of_each_stride() -> None:
    for stride in (1, 2, 8, 64):
        found = [
            Strangers(RUN, 0, lambda peer: 0).is_open(round_index) for round_index in range(0, 400 * stride, stride)
        ]
        assert 0.15 < sum(found) / len(found) < 0.35
