"""The line of a replica's state: how many samples the run counts that the state lacks, and since when.

The run's count only grows. A stage that comes back from a snapshot lacks what was trained after it: all replicas that
descend from that snapshot are of one line, and those of the stage that were away meanwhile are of another one. Replicas
of two lines never average: one of them takes the other's state, and with it its line. Pure.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

LAPSES_MAX = 16  # guess: times away that are remembered; the last one decides


@dataclass(frozen=True, slots=True)
class StateLine:
    """`lost`: samples that the run counts and the state lacks; `at`: the run's samples when it last lost some."""

    lost: int = 0
    at: int = 0

    def behind(self, samples: int, total: int) -> StateLine:
        """The line of a state of `samples` of the run that goes on at `total`."""
        return self if samples >= total else StateLine(self.lost + total - samples, total)


UNBROKEN = StateLine()


def lost_text(lost: object) -> str:
    """The samples that a state lacks, as people read it."""
    return {"0": "no sample is lost", "1": "1 sample is lost"}.get(str(lost), f"{lost} samples are lost")


@dataclass(frozen=True, slots=True)
class LineVerdict:
    """A replica's answer to another line. `take`: it takes that line's state; else its own line is `line`."""

    take: bool
    line: StateLine
    reason: str


def judge_return(mine: StateLine, theirs: StateLine, total: int, away_max: int) -> LineVerdict:
    """The answer of one of `mine` that was away when the stage went on without it, as `theirs`. At `total` samples
    it lacks all that was trained since, and keeps its state if the others lack more. Above `away_max` samples it gives
    way in any case: the other stages have learned to work with theirs."""
    missed = max(0, total - theirs.at)
    own = StateLine(mine.lost + missed, total)
    if missed > away_max or theirs.lost <= own.lost:
        return LineVerdict(True, theirs, f"{missed} samples were trained while this machine was away")
    kept = theirs.lost - own.lost
    return LineVerdict(False, own, f"its own state has {kept} samples more than the one that took its place")


def yields(mine: StateLine, theirs: StateLine) -> bool:
    """Whether a replica that took a stage over gives way to one that is back with more: its line is no earlier one, and
    lacks less. What it lacks cannot be less than what was trained between the two."""
    return theirs.at >= mine.at and theirs.at - mine.at <= theirs.lost < mine.lost


class WorkWatch:
    """Told now and then how much a replica has worked. Knows at which counts of the run it did nothing for `least_s`
    seconds or longer, because its machine slept or was cut off."""

    def __init__(self, least_s: float, now_s: float, total: int) -> None:
        self._least_s = least_s
        self._told_s = self._worked_s = now_s
        self._total = total
        self._worked = 0
        self._lapses = deque[tuple[int, int]](maxlen=LAPSES_MAX)  # the run's samples before and after each
        self._woke_s = now_s
        self.slept = False
        """Whether this process stood still for so long, since this was last cleared."""

    def tick(self, now_s: float, total: int, worked: int) -> None:
        """Note at `total` samples of the run that this replica has done `worked` pieces of work. To be called several
        times within `least_s`: only a process that stands still does not."""
        if now_s - self._told_s >= self._least_s:
            self.slept = True
            self._woke_s = now_s
        self._told_s = now_s
        if worked == self._worked:
            return
        if now_s - self._worked_s >= self._least_s:
            self._lapses.append((self._total, total))
        self._worked_s = now_s
        self._total = total
        self._worked = worked

    def awake_s(self, now_s: float) -> float:
        """Seconds since this process stood still last, or since it began."""
        return now_s - self._woke_s

    def away_at(self, samples: int, slack: int, total: int) -> bool:
        """Whether it did nothing when the run had `samples`, give or take `slack`; it has `total` now."""
        lapses = [*self._lapses, *([(self._total, total)] if self._told_s - self._worked_s >= self._least_s else [])]
        return any(before - slack <= samples <= after + slack for before, after in lapses)
