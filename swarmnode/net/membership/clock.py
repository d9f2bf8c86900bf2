"""Bounds on the run's clock, its count of samples: how far others' claims are believed.

Two bounds limit a claim. The first is the work that the machines which this node saw can have done since
(`ProgressBound`). The second is for a node that was away: the claim of most machines whose work it checked. Keys alone
have no vote, because a record costs nothing. A majority is believed up to the work that as many machines can have done
since this node last agreed with them. So a node that slept for days catches up, and liars, however many, advance a
clock no faster than machines can.

A joiner has seen no machine at work.

* Until it holds a state it believes no claim. It chooses a source of state by the median claim of the serving peers
  that answer.
* It goes on from the lower third of their claims, which a third of honest peers holds down; or from the median of that,
  the donor's claim and a confirming peer's, but from no more than the median of all.
* Until it has seen CONFIRMED machines at work, the peers that answered it and those that asked it for work vote, too,
  if they are CONFIRMED or more together.
* Then it agrees once with the majority of the machines that it has seen: at once if more than three quarters of them
  are on one side of its count, else a minute later, when it has seen more. So neither two liars among its first three
  machines nor a stale replica decide alone.

Pure: times, members and speeds are arguments.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass

from swarmnode.base.ids import PeerId
from swarmnode.base.wire import record_pb2
from swarmnode.net.membership.swarm import JOINING, SERVING, Member, Swarm
from swarmnode.net.membership.trust import PeerHistory, machines

FACTOR = 4.0  # guess: the most that machines do over their announced speed, which is measured late or on busy machines
OUTLIER = 4.0  # guess: the most that a machine counts, in medians
WINDOW_S = 1800.0  # guess: covers the work of two parts of a swarm that were separated for hours
HEARD_S = WINDOW_S / 30  # others are heard within it; the distance of two marks in a window


class ProgressBound:
    """The most samples that others are believed to have, by the count and the possible rate at each look.

    The counter only grows, and two nodes merge theirs by maximum (progress.py). One false claim would stay for ever,
    and rounds, learning rates and the end of the run depend on it (simulated: liars; a claim of 10^12 was believed by
    all 24 nodes a minute later). So a claim counts up to the count known a while ago, plus the work that the feeding
    machines can have done since. Below that a liar can speed up the clock to FACTOR times the work of machines.
    """

    def __init__(self, slack: int, ahead_s: float) -> None:
        """`slack` samples are never doubted; the next look comes within `ahead_s` seconds."""
        self._slack = slack
        self._ahead_s = ahead_s
        # (Unix time, samples believed, samples possible) at that time
        self._marks: deque[tuple[float, int, float]] = deque()
        self._rate = 0.0
        self._at = 0.0  # Unix time of the last look
        self._possible = 0.0  # samples possible since the first look

    def look(self, now_unix_s: float, total: int, rate: float) -> float:
        """Most samples that others are believed to have until the next look, at `total` samples and `rate` possible
        samples a second (0: unknown, as before)."""
        self._rate = rate or self._rate
        if self._marks:
            self._possible += self._rate * max(0.0, now_unix_s - self._at)
        self._at = now_unix_s
        if not self._marks or now_unix_s >= self._marks[-1][0] + HEARD_S:
            self._marks.append((now_unix_s, total, self._possible))
        while len(self._marks) > 1 and self._marks[1][0] <= now_unix_s - WINDOW_S:
            self._marks.popleft()
        _, known, before = self._marks[0]
        return known + self._possible - before + self._rate * self._ahead_s + self._slack

    def lift(self) -> None:
        """Restart the bound from what is believed at the next look."""
        self._marks.clear()


LEFT = record_pb2.NODE_STATE_LEFT
CONFIRMED = 3  # machines seen at work before a node relies on them alone; derived: one liar has no majority


@dataclass(frozen=True, slots=True)
class ClockVerdict:
    """Claims are believed up to `top` samples. `raised`: the majority's claim, if above what was believed until now."""

    top: float
    raised: int | None = None
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Supposed:
    """The run's samples as a joiner assumes them, by the claims of peers that answer. It goes on from `least`, which a
    third of honest ones holds down, and chooses by `middle`, the median: a third of liars that say little would make it
    refuse every honest donor, or begin its stage again."""

    least: int = 0
    middle: int = 0


@dataclass(frozen=True, slots=True)
class Sighting:
    """A machine seen `times` times, by the speed that it announces, in samples/s."""

    speed: float
    times: int


def capacity(stages: Iterable[Iterable[Sighting]], median: float) -> float:
    """Upper bound of the run's samples per second, from a partial view of its machines by stage. No machine counts for
    more than OUTLIER times the `median` speed, and none that was seen once for more than the median.

    Every sample passes through every stage, so the stage with the largest estimate counts.
    """
    largest = 0.0
    for stage in stages:
        seen = [one for one in stage if one.speed > 0.0]
        most = [median * (OUTLIER if one.times > 1 else 1.0) for one in seen]
        total = math.fsum(min(one.speed, limit) for one, limit in zip(seen, most, strict=True))
        if seen:
            largest = max(largest, total / len(seen) * machines(one.times for one in seen))
    return FACTOR * largest


class RunClock:
    """A node's judgement of others' claims. `slack` samples are never doubted; the next look comes within `ahead_s`
    seconds."""

    def __init__(self, slack: int, ahead_s: float) -> None:
        self.history = PeerHistory()
        self.answered = frozenset[PeerId]()  # peers that answered when this node joined
        self._slack = slack
        self._ahead_s = ahead_s
        self._progress_bound = ProgressBound(slack, ahead_s)
        # Unix time and samples when others' claims last counted without a bound
        self._since: tuple[float, int] | None = None
        self._confirmed = False
        self._asked_s = math.inf  # Unix time of the first look with CONFIRMED machines
        self._fastest = 0.0  # highest possible samples a second since then

    def suppose(self, swarm: Swarm, answered: Collection[PeerId]) -> Supposed:
        """The run's samples as a joiner assumes them from the peers that `answered`; from all records if none did."""
        self.answered |= frozenset(answered)
        heard = [m.total for m in swarm.members() if m.state == SERVING and m.peer in self.answered]
        totals = heard or swarm.totals()
        # `least`: what two thirds of them reach, so that a third of honest ones holds it down.
        return Supposed(sorted(totals)[(len(totals) - 1) // 3], statistics.median_low(totals)) if totals else Supposed()

    def margin(self, swarm: Swarm) -> float:
        """Samples that the run may be ahead of the assumed total, because records are as old as one look."""
        answered = [m for m in swarm.members() if m.peer in self.answered]
        return self._slack + self._rate(answered, len(swarm.stages), None) * self._ahead_s

    def look(
        self, now_unix_s: float, total: int, member: Callable[[PeerId], Member | None], stages: int, me: PeerId
    ) -> ClockVerdict:
        """The belief in others until the next look, at `total` samples. `member` returns any peer's newest record, this
        node's included. The cost grows with the machines seen, not with the swarm."""
        times = self.history.times
        at_work = self.history.at_work
        seen = [m for peer in times if peer != me and (m := member(peer)) is not None and m.stage < stages]
        seen = [m for m in seen if m.state not in (JOINING, LEFT)]
        known = [m for m in seen if m.peer in at_work]
        voices = known
        if len(known) < CONFIRMED:
            others = sorted(peer for peer in {*self.answered, *times} if peer not in at_work and peer != me)
            answered = [member(peer) for peer in others]
            voices = known + [m for m in answered if m is not None and m.stage < stages and m.state != LEFT]
        rate = self._rate({m.peer: m for m in (*seen, *voices)}.values(), stages, member(me))
        self._fastest = max(self._fastest, rate)
        top = self._progress_bound.look(now_unix_s, total, rate)
        if self._since is None:
            self._since = now_unix_s, total
        voices = [m for m in voices if m.state != JOINING]  # joiners know nothing yet
        # Two that only answered may be two liars (simulated: everything, seed 102).
        totals = [m.total for m in (voices if len(voices) >= CONFIRMED else known)]
        first = not self._confirmed and len(known) >= CONFIRMED and self._decided(now_unix_s, totals, top)
        most = statistics.median_low(totals) if first else self._possible(now_unix_s, _majority(totals, top))
        if first:  # this node may have started with too little
            self._confirmed = True
            self._since = (now_unix_s, max(total, most))
        if most <= top:
            return ClockVerdict(top)
        self._progress_bound.lift()
        top = self._progress_bound.look(now_unix_s, most, rate)
        return ClockVerdict(
            top, most, f"most of {len(totals)} {'machines seen at work' if self._confirmed else 'that answered'}"
        )

    def _decided(self, now_unix_s: float, totals: Sequence[int], top: float) -> bool:
        """Whether the machines seen agree on one side of `top`, or had time to."""
        self._asked_s = min(self._asked_s, now_unix_s)
        above = sum(total > top for total in totals)
        return 4 * max(above, len(totals) - above) > 3 * len(totals) or now_unix_s >= self._asked_s + HEARD_S

    def _possible(self, now_unix_s: float, said: int) -> int:
        """`said`, limited to what can have been trained since others were last believed without a bound."""
        assert self._since is not None
        at_s, samples = self._since
        return min(said, int(samples + self._slack + self._fastest * (max(0.0, now_unix_s - at_s) + self._ahead_s)))

    def _rate(self, seen: Collection[Member], stages: int, own: Member | None) -> float:
        """Possible samples a second; 0 if no speed is known, which leaves the rate unchanged."""
        mine = [own] if own is not None and own.samples_per_second > 0.0 else []
        times = self.history.times
        announced = [m for m in seen if m.samples_per_second > 0.0]
        again = [m for m in announced if times.get(m.peer, 1) > 1]
        known = again if len(again) >= CONFIRMED else announced  # keys that came once do not set the pace of others
        speeds = [m.samples_per_second for m in (*known, *mine)]
        if not speeds:
            return 0.0
        sightings: list[list[Sighting]] = [[] for _ in range(stages)]
        for member in announced:
            sightings[member.stage].append(Sighting(member.samples_per_second, times.get(member.peer, 1)))
        for member in mine:
            sightings[member.stage].append(Sighting(member.samples_per_second, CONFIRMED))
        return capacity(sightings, statistics.median_low(speeds))


def _majority(told: Sequence[int], top: float) -> int:
    """The lower median of the claims above `top`, if most voters, this node included, make such claims; else 0."""
    above = [samples for samples in told if samples > top]
    return statistics.median_low(above) if 2 * len(above) > len(told) + 1 else 0
