"""How far the run's clock, its count of samples, is believed to have come.

Two things bound what others say: what the machines that this node saw at work can have trained since (ceiling.py), and,
for who was away while others went on, what most of those machines say. Keys have no voice: a record costs nothing. What
most say is believed up to what as many machines can have trained since this node last agreed with them, so that a node
that slept or was cut off for days catches up, and no number of liars moves a clock faster than machines do.

A joiner has seen nobody at work yet. Until it holds a state it believes nobody, and supposes what the lower third of
those say that serve and answer it: enough to choose a way to a state by, and held down by a third of honest ones. Its
clock begins with what came with the state. Until it has seen CONFIRMED machines at work, those that answered it have a
voice beside them; then it agrees once with most of those it has seen, whatever it began with.

Pure: times, members and speeds come as arguments.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass

from swarmnode.ids import PeerId
from swarmnode.membership.ceiling import FACTOR, OUTLIER, Ceiling
from swarmnode.membership.observed import Observed, machines
from swarmnode.membership.swarm import JOINING, SERVING, Member, Swarm
from swarmnode.wire import record_pb2

LEFT = record_pb2.NODE_STATE_LEFT
CONFIRMED = 3  # guess: machines seen at work before a node goes by them alone; fewer where there are no more


@dataclass(frozen=True, slots=True)
class Belief:
    """Others are believed up to `top` samples. `raised`: what most say, above what was believed until now."""

    top: float
    raised: int | None = None
    reason: str = ""


def lower_third(totals: Collection[int]) -> int:
    """The largest count that two thirds of `totals` reach; 0 of none. A third of them, honest, hold it down."""
    return sorted(totals)[(len(totals) - 1) // 3] if totals else 0


def capacity(stages: Iterable[Iterable[tuple[float, int]]], most: float) -> float:
    """Samples a second that a run does at most, of whose machines some were seen: (announced speed, times) of each, by
    stage. No machine counts for more than `most`. Every sample passes through every stage, so the fullest view of one
    counts."""
    found = 0.0
    for stage in stages:
        seen = [(min(speed, most), times) for speed, times in stage if speed > 0.0]
        if seen:
            mean = math.fsum(speed for speed, _ in seen) / len(seen)
            found = max(found, mean * machines(times for _, times in seen))
    return FACTOR * found


class RunClock:
    """One node's judgement of what others say. `slack` samples are never doubted, and it looks again within `ahead_s`
    seconds."""

    def __init__(self, slack: int, ahead_s: float) -> None:
        self.observed = Observed()
        self.answered = frozenset[PeerId]()  # who answered when this node joined
        self._slack = slack
        self._ahead_s = ahead_s
        self._ceiling = Ceiling(slack, ahead_s)
        self._since: tuple[float, int] | None = None  # Unix time and samples that went by no word of others since
        self._confirmed = False
        self._fastest = 0.0  # samples a second that were possible at most, since then

    def suppose(self, swarm: Swarm, answered: Collection[PeerId]) -> int:
        """The run's samples as a joiner supposes them, whom `answered` answered; nobody did: as all records tell."""
        self.answered |= frozenset(answered)
        heard = [m.total for m in swarm.members() if m.state == SERVING and m.peer in self.answered]
        return lower_third(heard or swarm.totals())

    def margin(self, swarm: Swarm) -> float:
        """Samples that the run may be ahead of what is supposed of it: records are as old as a look."""
        answered = [m for m in swarm.members() if m.peer in self.answered]
        return self._slack + self._rate(answered, len(swarm.stages), None) * self._ahead_s

    def look(
        self, now_unix_s: float, total: int, member: Callable[[PeerId], Member | None], stages: int, me: PeerId
    ) -> Belief:
        """How far others are believed until the next look, now that `total` samples are. `member`: any peer, this node
        too, as its newest record tells it. Costs as much as there are machines seen, however large the swarm."""
        times = self.observed.times
        seen = [m for peer in times if peer != me and (m := member(peer)) is not None and m.stage < stages]
        known = [m for m in seen if m.state not in (JOINING, LEFT)]
        voices = known
        if len(known) < CONFIRMED:
            answered = [member(peer) for peer in sorted(self.answered) if peer not in times]
            voices = known + [m for m in answered if m is not None and m.stage < stages and m.state != LEFT]
        rate = self._rate(voices, stages, member(me))
        self._fastest = max(self._fastest, rate)
        top = self._ceiling.look(now_unix_s, total, rate)
        if self._since is None:
            self._since = now_unix_s, total
        told = [m.total for m in voices if m.state != JOINING]  # who joins knows nothing yet
        first = not self._confirmed and len(known) >= CONFIRMED
        most = statistics.median_low(told) if first else self._possible(now_unix_s, _majority(told, top))
        if first:  # what this node began with may have been too little
            self._confirmed, self._since = True, (now_unix_s, max(total, most))
        if most <= top:
            return Belief(top)
        self._ceiling.lift()
        top = self._ceiling.look(now_unix_s, most, rate)
        return Belief(
            top, most, f"most of {len(told)} {'machines seen at work' if self._confirmed else 'that answered'}"
        )

    def _possible(self, now_unix_s: float, said: int) -> int:
        """`said`, as far as it can have been trained since others were last believed without a bound."""
        assert self._since is not None
        at_s, samples = self._since
        return min(said, int(samples + self._slack + self._fastest * (max(0.0, now_unix_s - at_s) + self._ahead_s)))

    def _rate(self, voices: Sequence[Member], stages: int, own: Member | None) -> float:
        """Samples a second that are possible; 0: nobody's speed is known, and it is as it was."""
        mine = [own] if own is not None and own.samples_per_second > 0.0 else []
        speeds = [m.samples_per_second for m in (*voices, *mine) if m.samples_per_second > 0.0]
        if not speeds:
            return 0.0
        found: list[list[tuple[float, int]]] = [[] for _ in range(stages)]
        for member in voices:
            found[member.stage].append((member.samples_per_second, self.observed.times.get(member.peer, 1)))
        for member in mine:
            found[member.stage].append((member.samples_per_second, CONFIRMED))
        return capacity(found, OUTLIER * statistics.median_low(speeds))


def _majority(told: Sequence[int], top: float) -> int:
    """What most of those say who tell of more than `top`, when they are most of all, this node among these; else 0."""
    above = [samples for samples in told if samples > top]
    return statistics.median_low(above) if 2 * len(above) > len(told) + 1 else 0


__all__ = ["CONFIRMED", "Belief", "RunClock", "capacity", "lower_third"]
