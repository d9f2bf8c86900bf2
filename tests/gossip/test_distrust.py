"""Whom a stage leaves out: senders of what breaks rules, by the word of most, and nobody for what was refused."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from swarmnode.gossip.distrust import AGE_S, GIVERS_MAX, REFUSERS_LEAST, ROUNDS_PROVEN, Distrust
from swarmnode.ids import PeerId

NAMES = [PeerId(f"peer{i}") for i in range(8)]


def told(*words: tuple[int, int, bool], rounds: int = ROUNDS_PROVEN, at_s: float = 0.0) -> Distrust:
    """`words`: (giver, receiver, accepted or broken), each said in every one of so many rounds."""
    found = Distrust()
    for giver, receiver, accepted in words:
        for round_index in range(1, rounds + 1):
            found.heard(NAMES[giver], NAMES[receiver], round_index, accepted, at_s, "" if accepted else "misshapen")
    return found


def test_half_and_one_suffice_and_less_does_not() -> None:
    three = [(0, receiver, False) for receiver in (1, 2, 3)]
    assert not told(*three).left_out(NAMES, 0.0)
    out = told(*three, (0, 4, False)).left_out(NAMES, 0.0)
    assert out == {NAMES[0]: "4 of 7 got packets that break the rules, 4 suffice, in 3 rounds"}


def test_refusals_by_judgement_cost_nobody_its_place() -> None:
    """All refuse all that replica 0 says, for ever."""
    heard = Distrust()
    for round_index in range(500):
        for receiver in NAMES[1:]:
            heard.heard(NAMES[0], receiver, round_index, False, 0.0, ("direction", "loss", "norm")[round_index % 3])
    assert heard.against(NAMES[0]) == 7 and not heard.left_out(NAMES, 0.0)


def told_of_broken(*receivers: int, rounds: int = ROUNDS_PROVEN) -> Distrust:
    """Each in a round of its own, over and over, got something of replica 0 that breaks the rules."""
    found = Distrust()
    for round_index in range(rounds):
        found.heard(NAMES[0], NAMES[receivers[round_index % len(receivers)]], round_index, False, 0.0, "misshapen")
    return found


def test_packets_that_break_rules_cost_a_place_as_soon_as_most_got_one() -> None:
    out = told_of_broken(1, 2, 3, 4, rounds=4).left_out(NAMES, 0.0)
    assert out == {NAMES[0]: "4 of 7 got packets that break the rules, 4 suffice, in 4 rounds"}
    assert not told_of_broken(1, 2, 3, rounds=40).left_out(NAMES, 0.0), "whatever fewer than half say"


def test_a_hiccup_costs_nobody_its_place() -> None:
    """A whole stage got it at once, in fewer rounds than it takes."""
    heard = Distrust()
    for round_index in range(ROUNDS_PROVEN):
        assert not heard.left_out(NAMES, 0.0)
        for receiver in NAMES[1:]:
            heard.heard(NAMES[0], receiver, round_index, False, 0.0, "misshapen")
    assert heard.left_out(NAMES, 0.0).keys() == {NAMES[0]}
    for receiver in NAMES[1:5]:
        heard.heard(NAMES[0], receiver, ROUNDS_PROVEN, True, 0.0)
    assert not heard.left_out(NAMES, 0.0)


def test_slanderers_hurry_nobody_out() -> None:
    """What honest ones refused for its direction does not add to what a minority says of broken rules."""
    heard = told_of_broken(6, 7, rounds=40)
    for receiver in (1, 2):
        heard.heard(NAMES[0], NAMES[receiver], receiver, False, 0.0, "direction")
    assert heard.against(NAMES[0]) == 4 and heard.against(NAMES[1]) == 0
    heard = told_of_broken(6, 7, rounds=ROUNDS_PROVEN)
    for receiver in (1, 2, 3, 4):
        heard.heard(NAMES[0], NAMES[receiver], receiver, False, 0.0, "direction")
    assert not heard.left_out(NAMES, 0.0)


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
    heard.heard(NAMES[0], PeerId("stranger"), 1, False, 0.0, "misshapen")
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


# (giver, receiver, first round of the ten it is said in, accepted, when, whether in the first it broke rules)
words = st.tuples(
    *(st.integers(0, 7), st.integers(0, 7), st.integers(0, 9)),
    *(st.booleans(), st.sampled_from([0.0, 500.0, 1000.0]), st.booleans()),
)


@given(st.lists(words, max_size=60), st.integers(1, 8))
def test_twin(said: list[tuple[int, int, int, bool, float, bool]], count: int) -> None:
    """A list of all words, read again for each question."""
    said = sorted(said, key=lambda word: word[4])
    heard = Distrust()
    for giver, receiver, first, accepted, when, broken in said:
        for round_index in range(first, first + 10):
            step = "misshapen" if broken and round_index == first else "direction"
            heard.heard(NAMES[giver], NAMES[receiver], round_index, accepted, when, step)
    members, now_s, out = NAMES[:count], 1000.0, set[PeerId]()
    while True:
        voters = [m for m in range(count) if NAMES[m] not in out]
        more = set()
        for giver in voters:
            proven, broken_in = 0, set[int]()
            for receiver in voters:
                mine = [word for word in said if word[:2] == (giver, receiver) and giver != receiver]
                last = max((i for i, word in enumerate(mine) if word[3]), default=-1)
                if mine[last + 1 :] and now_s - mine[-1][4] <= AGE_S:
                    firsts = {word[2] for word in mine[last + 1 :] if word[5]}
                    proven += bool(firsts)
                    broken_in |= set(sorted(firsts)[-ROUNDS_PROVEN:])
            needed = max(REFUSERS_LEAST, (len(voters) - 1) // 2 + 1)
            if proven >= needed and len(broken_in) >= ROUNDS_PROVEN:
                more.add(NAMES[giver])
        if not more:
            break
        out |= more
    assert heard.left_out(members, now_s).keys() == out


def test_memory_is_bounded() -> None:
    heard = Distrust()
    for i in range(GIVERS_MAX + 10):
        heard.heard(PeerId(f"giver{i}"), NAMES[0], 1, False, float(i))
    assert not heard.refused_by(PeerId("giver0"), NAMES[0])
    assert heard.refused_by(PeerId(f"giver{GIVERS_MAX + 9}"), NAMES[0])
