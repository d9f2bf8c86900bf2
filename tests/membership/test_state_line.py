"""Which state counts where a stage went on without a replica that is back: the one that lacks less of the run."""

from hypothesis import given
from hypothesis import strategies as st

from swarmnode.net.membership.state_line import UNBROKEN, StateLine, WorkWatch, judge_return, yields

FAR = 1 << 40
TAKEN = StateLine(1118, 2906)  # a stage that was taken over at 2,906 samples from a copy 1,118 older


def test_a_restored_state_lacks_what_was_trained_after_it_was_copied() -> None:
    assert UNBROKEN.behind(1788, 2906) == TAKEN
    assert TAKEN.behind(3000, 3100) == StateLine(1218, 3100)
    assert TAKEN.behind(3100, 3100) == TAKEN, "a state that lacks nothing more is of the same line"


def test_the_one_that_is_back_soon_keeps_its_state_and_the_one_in_its_place_yields() -> None:
    verdict = judge_return(UNBROKEN, TAKEN, 3200, FAR)
    assert not verdict.take and verdict.line == StateLine(294, 3200)
    assert yields(TAKEN, verdict.line)


def test_the_one_that_is_back_late_takes_the_state_that_went_on() -> None:
    verdict = judge_return(UNBROKEN, TAKEN, 2906 + 1118, FAR)
    assert verdict.take and verdict.line == TAKEN
    assert judge_return(UNBROKEN, TAKEN, 3200, away_max=100).take, "away for too long to go back"


@given(st.integers(0, 4000), st.integers(0, 4000))
def test_never_do_both_give_way_nor_both_stay(lost: int, later: int) -> None:
    """Whatever the two know of the run's count: the one that took the place decides after the one that is back."""
    taken = StateLine(lost, 2906)
    verdict = judge_return(UNBROKEN, taken, 2906 + later, FAR)
    assert verdict.take or yields(taken, verdict.line)


@given(st.integers(0, 4000), st.integers(0, 10_000), st.integers(0, 10_000))
def test_a_line_that_lacks_less_than_it_can_displaces_nobody(lost: int, claimed: int, at: int) -> None:
    mine = StateLine(lost, 5000)
    if yields(mine, StateLine(claimed, at)):
        assert at >= mine.at and at - mine.at <= claimed < lost
    assert not yields(UNBROKEN, StateLine(claimed, at)), "who took nobody's place gives way to nobody"


def test_a_frozen_process_knows_when_it_was_away() -> None:
    watch = WorkWatch(6.0, 0.0, 100)
    for second in range(1, 20):
        watch.tick(float(second), 100 + 10 * second, second)
    assert not watch.slept and not watch.away_at(200, 16, 290)
    watch.tick(45.0, 800, 19)
    assert watch.slept and watch.away_at(400, 16, 800)
    watch.tick(46.0, 820, 20)
    assert watch.away_at(400, 16, 820) and not watch.away_at(150, 16, 820), "it remembers, also when it works again"


def test_a_process_that_is_cut_off_was_away_without_having_slept() -> None:
    watch = WorkWatch(6.0, 0.0, 0)
    watch.tick(1.0, 50, 5)
    for second in range(2, 30):
        watch.tick(float(second), 50, 5)
    assert not watch.slept and watch.away_at(50, 0, 50)
    watch.tick(30.0, 300, 5)
    assert watch.away_at(200, 0, 300)
