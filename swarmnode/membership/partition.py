"""Parts of one swarm that trained apart: which one has less progress, and what its feeders trained in vain.

The run's counter has an entry for each feeder and only grows (progress.py). While a network is cut, entries of the
other part's feeders stand still; once it heals, they jump. What jumps is what the others trained; what all the other
entries grew by since then is what this part did. The part that did less takes the other one's state, and what it did is
in no weights any more. It stays counted, as no node can take back what others may have merged: each of its feeders, or
its heir, trains as many samples again that it does not count. So the count is what the weights have learned, and nodes
of earlier versions need not know of it.

Pure: times and entries are arguments.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from swarmnode.ids import PeerId

PERIOD_S = 5.0  # guess: between two looks; what is trained meanwhile is what two parts may err by about each other
WINDOW_S = 60.0  # guess: entries of the other part arrive within it, with a few feeders' in each call
MARKS_MAX = 1024  # guess: looks remembered, an hour and a half; others are believed for half an hour (clock.py)


@dataclass(frozen=True, slots=True)
class TrainedApart:
    """Samples that two parts of the swarm trained apart: `here` and `there`, and of those here the ones that this
    node's feeder counted."""

    here: int
    there: int
    own: int

    @property
    def reason(self) -> str:
        return f"{self.here} samples were trained here and {self.there} by others, apart from each other"


class PartitionWatch:
    """Told at each look what each feeder counted and who is present. `least`: samples that parts may differ by that
    merge by rounds alone; `apart_s`: seconds that an entry stands still, or a record is missing, in a partition."""

    def __init__(self, me: PeerId, least: int, apart_s: float) -> None:
        self._me = me
        self._least = least
        self._apart_s = apart_s
        self._entries: dict[str, int] = {}
        self._still: dict[str, float] = {}  # entries that do not grow, since when
        self._marks: deque[tuple[float, int, int]] = deque(maxlen=MARKS_MAX)  # when, sum of entries, own entry
        self._present = frozenset[PeerId]()
        self._total = 0  # of the run, at the last look
        self._came: dict[PeerId, float] = {}  # peers that came, or came back, when
        self._jumped: dict[str, tuple[int, float, float]] = {}  # entry before, since when, when it jumped
        self.back: Collection[PeerId] = ()
        """Peers that came within WINDOW_S: those of another part are among them."""
        self.merging = False
        """Whether more than `least` samples of another part came within WINDOW_S."""

    def due(self, now_s: float, total: int) -> bool:
        """Whether to `look` now, at `total` samples of the run: it is time, or they jumped."""
        if not self._marks:
            return True
        return now_s - self._marks[-1][0] >= PERIOD_S or total - self._total > self._least

    def look(
        self, now_s: float, total: int, entries: Mapping[str, int], present: Collection[PeerId]
    ) -> TrainedApart | None:
        """The work that this part of the swarm did in vain, if it now turns out to have trained less than another."""
        summed, own, first = sum(entries.values()), entries.get(self._me, 0), not self._marks
        self._see(now_s, frozenset(present), first)
        self._total = total
        grown = {feeder for feeder, _ in entries.items() - self._entries.items()} - {self._me}
        before_s = now_s if first else self._marks[-1][0]
        for feeder in grown & self._still.keys():
            since_s = self._still.pop(feeder)
            if now_s - since_s >= self._apart_s:
                self._jumped.setdefault(feeder, (self._entries[feeder], since_s, now_s))
        if self._jumped and not first:  # feeders that came to the other part meanwhile
            for feeder in grown - self._entries.keys():
                self._jumped.setdefault(feeder, (0, now_s, now_s))
        for feeder in entries.keys() - grown - self._still.keys():
            self._still[feeder] = before_s
        self._entries = dict(entries)
        self._marks.append((now_s, summed, own))
        self._jumped = {feeder: jump for feeder, jump in self._jumped.items() if now_s - jump[2] <= WINDOW_S}
        return self._compare(summed, own)

    def _compare(self, summed: int, own: int) -> TrainedApart | None:
        others = [f for f in self._jumped if f in self._came or f not in self._present]
        sizes = {feeder: self._entries[feeder] - self._jumped[feeder][0] for feeder in others}
        there = sum(sizes.values())
        self.merging = there > self._least
        if not self.merging:
            return None
        _, since_s, _ = self._jumped[max(others, key=lambda feeder: (sizes[feeder], feeder))]
        _, summed_then, own_then = next((m for m in reversed(self._marks) if m[0] <= since_s), self._marks[0])
        here = max(0, summed - summed_then - there)
        if not self._gives_way(here, there, others):
            return None
        self._jumped.clear()
        return TrainedApart(here, there, own - own_then)

    def _gives_way(self, here: int, there: int, others: Collection[str]) -> bool:
        """Whether this part trained less. Each part knows its own work sooner than the other's, so that parts that
        differ by `least` or less go by the name of their first feeder, in which both see the same."""
        ours = (feeder for feeder in self._entries.keys() & {*self._present, self._me} if feeder not in others)
        if abs(here - there) > self._least:
            return here < there
        return min(ours, default="") > min(others)

    def _see(self, now_s: float, present: frozenset[PeerId], first: bool) -> None:
        if not first:
            self._came.update(dict.fromkeys(present - self._present, now_s))
        self._came = {peer: at_s for peer, at_s in self._came.items() if now_s - at_s <= WINDOW_S and peer in present}
        self.back = self._came.keys()
        self._present = present
