"""Whom a replica leaves out: senders of what breaks rules, by what came here and by the word of most whom it has met;
nobody for what was refused for another reason, or is only said."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from swarmnode.gossip.refusals import AGE_S, GIVERS_MAX, REFUSERS_LEAST, ROUNDS_PROVEN, RefusalTally
from swarmnode.ids import PeerId

NAMES = [PeerId(f"peer{i}") for i in range(8)]


def out(
    heard: RefusalTally,
    now_s: float = 0.0,
    *,
    judge: int = 1,
    met: Sequence[PeerId] = NAMES,
    members: Sequence[PeerId] = NAMES,
) -> dict[PeerId, str]:
    """Whom replica `judge` leaves out, having met those of `met`."""
    return heard.left_out({*members}, now_s, NAMES[judge], {*met})


def told(*words: tuple[int, int, bool], rounds: int = ROUNDS_PROVEN, at_s: float = 0.0) -> RefusalTally:
    """`words`: (giver, receiver, accepted or broken), each said in every one of so many rounds."""
    found = RefusalTally()
    for giver, receiver, accepted in words:
        for round_index in range(1, rounds + 1):
            found.heard(NAMES[giver], NAMES[receiver], round_index, accepted, at_s, "" if accepted else "misshapen")
    return found


def test_half_and_one_suffice_and_less_does_not() -> None:
    three = [(0, receiver, False) for receiver in (1, 2, 3)]
    assert not out(told(*three), 0.0)
    found = out(told(*three, (0, 4, False)))
    assert found == {NAMES[0]: "4 of 7 got packets that break the rules, 4 suffice, in 3 rounds"}


def test_refusals_by_judgement_cost_nobody_its_place() -> None:
    """All refuse all that replica 0 says, for ever."""
    heard = RefusalTally()
    for round_index in range(500):
        for receiver in NAMES[1:]:
            heard.heard(NAMES[0], receiver, round_index, False, 0.0, ("direction", "loss", "norm")[round_index % 3])
    assert heard.against(NAMES[0]) == 7 and not out(heard, 0.0)


def told_of_broken(*receivers: int, rounds: int = ROUNDS_PROVEN) -> RefusalTally:
    """Each in a round of its own, over and over, got something of replica 0 that breaks the rules."""
    found = RefusalTally()
    for round_index in range(rounds):
        found.heard(NAMES[0], NAMES[receivers[round_index % len(receivers)]], round_index, False, 0.0, "misshapen")
    return found


def test_packets_that_break_rules_cost_a_place_as_soon_as_most_got_one() -> None:
    found = out(told_of_broken(1, 2, 3, 4, rounds=4))
    assert found == {NAMES[0]: "4 of 7 got packets that break the rules, 4 suffice, in 4 rounds"}
    assert not out(told_of_broken(1, 2, 3, rounds=40), 0.0), "whatever fewer than half say"


def test_a_hiccup_costs_nobody_its_place() -> None:
    """A whole stage got it at once, in fewer rounds than it takes."""
    heard = RefusalTally()
    for round_index in range(ROUNDS_PROVEN):
        assert not out(heard, 0.0)
        for receiver in NAMES[1:]:
            heard.heard(NAMES[0], receiver, round_index, False, 0.0, "misshapen")
    assert out(heard, 0.0).keys() == {NAMES[0]}
    for receiver in NAMES[1:5]:
        heard.heard(NAMES[0], receiver, ROUNDS_PROVEN, True, 0.0)
    assert not out(heard, 0.0)


def test_slanderers_hurry_nobody_out() -> None:
    """What honest ones refused for its direction does not add to what a minority says of broken rules."""
    heard = told_of_broken(6, 7, rounds=40)
    for receiver in (1, 2):
        heard.heard(NAMES[0], NAMES[receiver], receiver, False, 0.0, "direction")
    assert heard.against(NAMES[0]) == 4 and heard.against(NAMES[1]) == 0
    heard = told_of_broken(6, 7, rounds=ROUNDS_PROVEN)
    for receiver in (1, 2, 3, 4):
        heard.heard(NAMES[0], NAMES[receiver], receiver, False, 0.0, "direction")
    assert not out(heard, 0.0)


def test_one_voice_shuts_out_nobody_however_small_the_stage() -> None:
    assert not out(told((0, 1, False)), members=NAMES[:2])
    assert not out(told((0, 1, False)), members=NAMES[:3])
    assert out(told((0, 1, False), (0, 2, False)), members=NAMES[:3]).keys() == {NAMES[0]}


def test_the_last_word_counts_and_words_age() -> None:
    four = [(0, receiver, False) for receiver in (1, 2, 3, 4)]
    assert not out(told(*four, (0, 4, True)), 0.0), "the fourth took a packet again"
    assert out(told(*four), AGE_S)
    assert not out(told(*four), AGE_S + 1)
    assert not told(*four, (0, 4, True)).refused_by(NAMES[0], NAMES[4])


def test_strangers_and_the_giver_itself_have_no_voice() -> None:
    heard = told(*[(0, receiver, False) for receiver in (0, 1, 2, 3)])
    heard.heard(NAMES[0], PeerId("stranger"), 1, False, 0.0, "misshapen")
    assert not out(heard, 0.0)


def test_a_minority_of_slanderers_shuts_out_nobody_and_is_silenced_when_left_out() -> None:
    liars, honest = (6, 7), range(6)
    slander = [(giver, liar, False) for liar in liars for giver in honest]
    assert not out(told(*slander), 0.0)
    refused = [(liar, receiver, False) for liar in liars for receiver in honest]
    assert out(told(*slander, *refused), 0.0).keys() == {NAMES[liar] for liar in liars}
    # Two honest misjudge replica 0 besides: with the liars' voices it would be four of seven.
    misjudged = [(0, 1, False), (0, 2, False)]
    assert out(told(*slander, *misjudged), 0.0).keys() == {NAMES[0]}
    assert NAMES[1] not in out(told(*slander, *refused, *misjudged), 0.0)


# (giver, receiver, first round of the ten it is said in, accepted, when, whether in the first it broke rules)
words = st.tuples(
    *(st.integers(0, 7), st.integers(0, 7), st.integers(0, 9)),
    *(st.booleans(), st.sampled_from([0.0, 500.0, 1000.0]), st.booleans()),
)


@given(st.lists(words, max_size=60), st.integers(1, 8), st.integers(0, 7), st.sets(st.integers(0, 7)))
def test_twin(said: list[tuple[int, int, int, bool, float, bool]], count: int, judge: int, met: set[int]) -> None:
    """A list of all words, read again for each question."""
    said = sorted(said, key=lambda word: word[4])
    heard = RefusalTally()
    for giver, receiver, first, accepted, when, broken in said:
        for round_index in range(first, first + 10):
            step = "misshapen" if broken and round_index == first else "direction"
            heard.heard(NAMES[giver], NAMES[receiver], round_index, accepted, when, step)
    now_s, left_out = 1000.0, set[int]()
    while True:
        voters = [m for m in range(8) if ((m < count and m in met) or m == judge) and m not in left_out]
        more = set()
        for giver in [m for m in range(count) if m not in left_out]:
            proven, broken_in = set[int](), set[int]()
            for receiver in voters:
                mine = [word for word in said if word[:2] == (giver, receiver) and giver != receiver]
                last = max((i for i, word in enumerate(mine) if word[3]), default=-1)
                if mine[last + 1 :] and now_s - mine[-1][4] <= AGE_S:
                    firsts = {word[2] for word in mine[last + 1 :] if word[5]}
                    proven |= {receiver} if firsts else set()
                    broken_in |= set(sorted(firsts)[-ROUNDS_PROVEN:])
            needed = max(REFUSERS_LEAST, len([m for m in voters if m != giver]) // 2 + 1)
            if judge in proven and len(proven) >= needed and len(broken_in) >= ROUNDS_PROVEN:
                more.add(giver)
        if not more:
            break
        left_out |= more
    found = out(heard, now_s, judge=judge, met=[NAMES[m] for m in met], members=NAMES[:count])
    assert found.keys() == {NAMES[m] for m in left_out}


def test_no_number_of_invented_refusals_shuts_out_a_replica_whose_packets_are_whole() -> None:
    """A thousand keys, met or not, sign that replica 0 sent them rubbish; the judge never had any."""
    sybils = [PeerId(f"sybil{i}") for i in range(1000)]
    heard = RefusalTally()
    for sybil in sybils:
        for round_index in range(10):
            heard.heard(NAMES[0], sybil, round_index, False, 0.0, "misshapen")
    everybody = [*NAMES, *sybils]
    assert not out(heard, met=everybody, members=everybody)


def test_keys_that_nobody_met_neither_add_to_what_most_say_nor_take_from_it() -> None:
    """Two honest replicas protect a third from a sender of rubbish, however many keys stand in the stage: it leaves the
    sender out after the first packet that it got itself."""
    sybils = [PeerId(f"sybil{i}") for i in range(100)]
    everybody, honest = [*NAMES[:4], *sybils], NAMES[1:4]
    heard = told_of_broken(1, 2, rounds=4)
    assert not out(heard, judge=3, met=honest, members=everybody), "it got none of it"
    heard.heard(NAMES[0], NAMES[3], 4, False, 0.0, "misshapen")
    assert out(heard, judge=3, met=honest, members=everybody).keys() == {NAMES[0]}
    alone = told_of_broken(3, rounds=4)
    for sybil in sybils:
        alone.heard(NAMES[0], sybil, 1, False, 0.0, "misshapen")
    assert not out(alone, judge=3, met=honest, members=everybody), "only keys say the same"


def test_memory_is_bounded() -> None:
    heard = RefusalTally()
    for i in range(GIVERS_MAX + 10):
        heard.heard(PeerId(f"giver{i}"), NAMES[0], 1, False, float(i))
    assert not heard.refused_by(PeerId("giver0"), NAMES[0])
    assert heard.refused_by(PeerId(f"giver{GIVERS_MAX + 9}"), NAMES[0])
