"""How many microbatches a replica holds at one time, and of whom.

Places are counted per position in the itinerary: a call that waits onward holds its place, and it waits only for places
of the next position, so swapped routes cannot wait in a circle (design section 3).

One caller cannot take all places while others work with this replica, and callers that have not worked with it yet
cannot take more than half of them together. What counts is what was observed here: a caller has worked with this
replica once WORKED_MIN of its microbatches went through, forward and back.
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass

from swarmnode.ids import PeerId

WORKED_MIN = 4  # guess: microbatches; honest callers come to it within seconds
ACTIVE_S = 60.0  # guess: a caller that worked with us counts so long after its last microbatch
SHARE = 2.0  # guess: of an even share of the places, for one caller: callers come in bursts
CALLERS_MAX = 1024  # guess: remembered at once; those heard of longest ago are forgotten first


@dataclass(frozen=True, slots=True)
class Place:
    """Of one microbatch. `fresh`: its caller had not worked with us when it took it."""

    position: int
    caller: PeerId
    fresh: bool


class Places:
    """Of one replica: `places` for each position."""

    def __init__(self, places: int) -> None:
        self._places = places
        self._taken: Counter[int] = Counter()
        self._taken_by: Counter[tuple[int, PeerId]] = Counter()
        self._fresh: Counter[int] = Counter()  # places that callers hold who have not worked with us
        self._worked: OrderedDict[PeerId, tuple[int, float]] = OrderedDict()  # microbatches, loop time of the last

    def __len__(self) -> int:
        return self._taken.total()

    @property
    def taken(self) -> Mapping[int, int]:
        """Places taken at each position."""
        return self._taken

    def refusal(self, position: int, caller: PeerId, now_s: float) -> str | None:
        """Why `caller` gets no place at `position` now; None when it may take one."""
        if self._taken[position] >= self._places:
            return f"all {self._places} places of position {position} are taken"
        others = self._others(caller, now_s)
        if not others:
            return None
        most = max(1, min(self._places - 1, math.ceil(SHARE * self._places / (1 + others))))
        if (mine := self._taken_by[position, caller]) >= most:
            return f"{mine} places of position {position} are yours; {others} others call here"
        if not self._known(caller) and self._fresh[position] >= max(1, self._places // 2):
            return f"{self._fresh[position]} places of position {position} are held by callers as new as you"
        return None

    def take(self, position: int, caller: PeerId) -> Place:
        """One place; the one who holds it gives it back once."""
        place = Place(position, caller, not self._known(caller))
        self._taken[position] += 1
        self._taken_by[position, caller] += 1
        self._fresh[position] += place.fresh
        return place

    def give(self, place: Place) -> None:
        """Give `place` back."""
        self._taken[place.position] -= 1
        self._taken_by[place.position, place.caller] -= 1
        self._fresh[place.position] -= place.fresh
        if not self._taken_by[place.position, place.caller]:
            del self._taken_by[place.position, place.caller]

    def worked(self, caller: PeerId, now_s: float) -> None:
        """A microbatch of `caller` went through."""
        self._worked[caller] = (self._worked.get(caller, (0, 0.0))[0] + 1, now_s)
        self._worked.move_to_end(caller)
        if len(self._worked) > CALLERS_MAX:
            self._worked.popitem(last=False)

    def _others(self, caller: PeerId, now_s: float) -> int:
        """Callers that have worked with us, and did a moment ago; `caller` is not counted."""
        others = 0
        for peer, (count, last_s) in reversed(self._worked.items()):
            if now_s - last_s > ACTIVE_S:
                break
            others += peer != caller and count >= WORKED_MIN
        return others

    def _known(self, caller: PeerId) -> bool:
        return self._worked.get(caller, (0, 0.0))[0] >= WORKED_MIN
