"""Bound the microbatches a replica holds at one time, in total and per caller.

Slots are counted per position in the itinerary. A call that waits onward holds its slot and waits only for slots of
the next position, so swapped routes cannot deadlock.

One caller cannot take all slots while others work with this replica. Callers that have not worked with it yet cannot
take more than half of them together. Only local observation counts: a caller has worked with this replica once
WORKED_MIN of its microbatches went through, forward and back.
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass

from swarmnode.ids import PeerId

WORKED_MIN = 4  # guess: microbatches; honest callers reach it within seconds
ACTIVE_S = 60.0  # guess: a caller counts as active so long after its last microbatch
SHARE = 2.0  # guess: one caller's limit over an even share of the slots: callers come in bursts
CALLERS_MAX = 1024  # guess: callers remembered; the least recently heard are forgotten first


@dataclass(frozen=True, slots=True)
class Slot:
    """The slot of one microbatch. `fresh`: its caller had not worked with us when it took the slot."""

    position: int
    caller: PeerId
    fresh: bool


class Slots:
    """A replica's slots: `slots` per position."""

    def __init__(self, slots: int) -> None:
        self._slots = slots
        self._taken: Counter[int] = Counter()
        self._taken_by: Counter[tuple[int, PeerId]] = Counter()
        self._fresh: Counter[int] = Counter()  # slots held by callers that have not worked with us
        self._worked: OrderedDict[PeerId, tuple[int, float]] = OrderedDict()  # microbatches, loop time of the last

    def __len__(self) -> int:
        return self._taken.total()

    @property
    def taken(self) -> Mapping[int, int]:
        """Places taken at each position."""
        return self._taken

    def refusal(self, position: int, caller: PeerId, now_s: float) -> str | None:
        """Why `caller` gets no slot at `position` now; None if it may take one."""
        if self._taken[position] >= self._slots:
            return f"all {self._slots} slots of position {position} are taken"
        others = self._others(caller, now_s)
        if not others:
            return None
        most = max(1, min(self._slots - 1, math.ceil(SHARE * self._slots / (1 + others))))
        if (mine := self._taken_by[position, caller]) >= most:
            return f"{mine} slots of position {position} are yours; {others} others call here"
        if not self._known(caller) and self._fresh[position] >= max(1, self._slots // 2):
            return f"{self._fresh[position]} slots of position {position} are held by callers as new as you"
        return None

    def take(self, position: int, caller: PeerId) -> Slot:
        """Take a slot, to be given back once."""
        slot = Slot(position, caller, not self._known(caller))
        self._taken[position] += 1
        self._taken_by[position, caller] += 1
        self._fresh[position] += slot.fresh
        return slot

    def give(self, slot: Slot) -> None:
        """Give `slot` back."""
        self._taken[slot.position] -= 1
        self._taken_by[slot.position, slot.caller] -= 1
        self._fresh[slot.position] -= slot.fresh
        if not self._taken_by[slot.position, slot.caller]:
            del self._taken_by[slot.position, slot.caller]

    def worked(self, caller: PeerId, now_s: float) -> None:
        """Record a completed microbatch of `caller`."""
        self._worked[caller] = (self._worked.get(caller, (0, 0.0))[0] + 1, now_s)
        self._worked.move_to_end(caller)
        if len(self._worked) > CALLERS_MAX:
            self._worked.popitem(last=False)

    def _others(self, caller: PeerId, now_s: float) -> int:
        """Number of other callers that have worked with us and did so recently."""
        others = 0
        for peer, (count, last_s) in reversed(self._worked.items()):
            if now_s - last_s > ACTIVE_S:
                break
            others += peer != caller and count >= WORKED_MIN
        return others

    def _known(self, caller: PeerId) -> bool:
        return self._worked.get(caller, (0, 0.0))[0] >= WORKED_MIN
