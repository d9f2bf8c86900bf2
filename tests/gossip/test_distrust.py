"""Whom a stage leaves out: what most refused, and nobody by the word of fewer than half."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from swarmnode.gossip.distrust import AGE_S, GIVERS_MAX, REFUSERS_LEAST, Distrust
from swarmnode.ids import PeerId

NAMES = [PeerId(f"peer{i}") for i in range(8)]


def told(*words: tuple[int, int, bool], at_s: float = 0.0) -> Distrust:
    """`words`: (giver, receiver, accepted)."""
    found = Distrust()
    for giver, receiver, accepted in words:
        found.heard(NAMES[giver], NAMES[receiver], accepted, at_s)
    return found


def test_half_and_one_suffice_and_less_does_not() -> None:
    three = [(0, receiver, False) for receiver in (1, 2, 3)]
    assert not told(*three).left_out(NAMES, 0.0)
    out = told(*three, (0, 4, False)).left_out(NAMES, 0.0)
    assert out == {NAMES[0]: "4 of 7 refused its packets, 4 suffice"}


def test_one_voice_shuts_out_nobody_however_small_the_stage() -> None:
    assert not told((0, 1, False)).left_out(NAMES[:2], 0.0)
    assert not told((0, 1, False)).left_out(NAMES[:3], 0.0)
    assert told((0, 1, False), (0, 2, False)).left_out(NAMES[:3], 0.0).keys() == {NAMES[0]}


def test_the_last_word_counts_and_words_age() -> None:
    four = [(0, receiver, False) for receiver in (1, 2, 3, 4)]
    assert not told(*four, (0, 4, True)).left_out(NAMES, 0.0), "the fourth took a packet again"
    assert told(*four).left_out(NAMES, AGE_S)
    assert not told(*four).left_out(NAMES, AGE_S + 1)
    assert not told(*four, (0, 4, True)).refused_by(NAMES[0], NAMES[4])


def test_strangers_and_the_giver_itself_have_no_voice() -> None:
    heard = told(*[(0, receiver, False) for receiver in (0, 1, 2, 3)])
    heard.heard(NAMES[0], PeerId("stranger"), False, 0.0)
    assert not heard.left_out(NAMES, 0.0)


def test_a_minority_of_slanderers_shuts_out_nobody_and_is_silenced_when_left_out() -> None:
    liars, honest = (6, 7), range(6)
    slander = [(giver, liar, False) for liar in liars for giver in honest]
    assert not told(*slander).left_out(NAMES, 0.0)
    refused = [(liar, receiver, False) for liar in liars for receiver in honest]
    assert told(*slander, *refused).left_out(NAMES, 0.0).keys() == {NAMES[liar] for liar in liars}
    # Two honest misjudge replica 0 besides: with the liars' voices it would be four of seven.
    misjudged = [(0, 1, False), (0, 2, False)]
    assert told(*slander, *misjudged).left_out(NAMES, 0.0).keys() == {NAMES[0]}
    assert NAMES[1] not in told(*slander, *refused, *misjudged).left_out(NAMES, 0.0)


words = st.tuples(st.integers(0, 7), st.integers(0, 7), st.booleans(), st.sampled_from([0.0, 500.0, 1000.0]))


@given(st.lists(words, max_size=60), st.integers(1, 8))
def test_twin(said: list[tuple[int, int, bool, float]], count: int) -> None:
    """A list of all words, read again for each question."""
    said = sorted(said, key=lambda word: word[3])
    heard = Distrust()
    for giver, receiver, accepted, when in said:
        heard.heard(NAMES[giver], NAMES[receiver], accepted, when)
    members, now_s, out = NAMES[:count], 1000.0, set[PeerId]()
    while True:
        voters = [m for m in range(count) if NAMES[m] not in out]
        more = set()
        for giver in voters:
            against = 0
            for receiver in voters:
                mine = [word for word in said if word[:2] == (giver, receiver) and giver != receiver]
                against += bool(mine) and not mine[-1][2] and now_s - mine[-1][3] <= AGE_S
            if against >= max(REFUSERS_LEAST, (len(voters) - 1) // 2 + 1):
                more.add(NAMES[giver])
        if not more:
            break
        out |= more
    assert heard.left_out(members, now_s).keys() == out


def test_memory_is_bounded() -> None:
    heard = Distrust()
    for i in range(GIVERS_MAX + 10):
        heard.heard(PeerId(f"giver{i}"), NAMES[0], False, float(i))
    assert not heard.refused_by(PeerId("giver0"), NAMES[0])
    assert heard.refused_by(PeerId(f"giver{GIVERS_MAX + 9}"), NAMES[0])
