"""Who is left out by all: a giver whose packets most of a stage's replicas refused when they last met it.

Every refusal is signed by who refused (receipt.py) and told to the stage, and so is the first packet that the same
receiver took again. Of a stage with n members beside the giver

    left out   when at least n // 2 + 1 of them, each by its last word, of at most AGE_S ago, refused it

and who is left out has no voice about others. Then nobody loses rounds by meeting it, and all count the same members.
Fewer than half cannot shut out anybody, whatever they sign; an honest replica that one or two misjudge stays. After
AGE_S a liar is met again by a few, who tell.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

from swarmnode.ids import PeerId

AGE_S = 900.0  # guess: with rounds of a minute a liar is met again every quarter of an hour
REFUSERS_LEAST = 2  # one voice never shuts out anybody
GIVERS_MAX = 4096  # guess: remembered at once; those refused longest ago are forgotten first


@dataclass(slots=True)
class Distrust:
    """What this replica heard, its own verdicts included, by the event loop's seconds."""

    _refused: dict[PeerId, dict[PeerId, float]] = field(default_factory=dict)  # giver -> receiver -> when

    def heard(self, giver: PeerId, receiver: PeerId, accepted: bool, now_s: float) -> None:
        """`receiver` took or refused a packet of `giver`."""
        if giver == receiver:
            return
        voices = self._refused.setdefault(giver, {})
        if accepted:
            voices.pop(receiver, None)
        else:
            voices[receiver] = now_s
        if not voices:
            del self._refused[giver]
        if len(self._refused) > GIVERS_MAX:
            del self._refused[min(self._refused, key=lambda one: (max(self._refused[one].values()), one))]

    def refused_by(self, giver: PeerId, receiver: PeerId) -> bool:
        """Whether `receiver`'s last word on `giver` was a refusal."""
        return receiver in self._refused.get(giver, {})

    def left_out(self, members: Collection[PeerId], now_s: float) -> dict[PeerId, str]:
        """Of `members`, a stage's replicas: those to leave out, and why."""
        found: dict[PeerId, str] = {}
        if not self._refused:
            return found
        here = set(members)
        while True:
            voters = here - found.keys()
            more = {}
            for giver in sorted(voters & self._refused.keys()):
                voices = self._refused[giver]
                against = sum(1 for one, when in voices.items() if one in voters and now_s - when <= AGE_S)
                needed = max(REFUSERS_LEAST, (len(voters) - 1) // 2 + 1)
                if against >= needed:
                    more[giver] = f"{against} of {len(voters) - 1} refused its packets, {needed} suffice"
            if not more:
                return found
            found |= more
