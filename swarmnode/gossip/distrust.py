"""Replicas that a whole stage leaves out: those whose packets broke the rules of their codec at most of the others.

Every refusal is signed by the replica that refused (receipt.py) and told to the stage, and so is the first packet of
the same giver that it took again. Of a stage with n members beside the giver

    left out   when at least n // 2 + 1 of them, each by its last word, of at most AGE_S ago, refused it,
               and each of them got, since it last took a packet of it, one that breaks the rules of its codec:
               malformed, out of range, not finite; in at least ROUNDS_PROVEN different rounds among them

and a replica that is left out has no voice about others. Then no rounds are lost by meeting it, and all count the same
members. Fewer than half cannot shut out anybody, whatever they sign. No honest replica sends packets that break rules,
however far behind it is. All other refusals are judgements and may be wrong: they cost the giver that one packet, and
decide whom replicas without a partner ask last (standin.py). A replica that is broken for a while is met again after
AGE_S, as a liar is, by a few, who tell.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

from swarmnode.ids import PeerId

AGE_S = 900.0  # guess: with rounds of a minute a liar is met again every quarter of an hour
REFUSERS_LEAST = 2  # one voice never shuts out anybody
ROUNDS_PROVEN = 3  # guess: a machine that hiccups in a round or two is not shut out where a whole stage meets at once
PROVEN = ("misshapen",)  # verdicts' steps (robust.py) that no honest packet comes to, wherever its receiver stands
GIVERS_MAX = 4096  # guess: remembered at once; those refused longest ago are forgotten first


@dataclass(slots=True)
class Voice:
    """One receiver's refusals since it last took a packet of the giver: when the last was, and the latest rounds in
    which the packet broke rules."""

    last_s: float
    proven: tuple[int, ...] = ()

    def more(self, round_index: int, step: str, now_s: float) -> Voice:
        """With one more refusal."""
        proven = {*self.proven, round_index} if step in PROVEN else self.proven
        return Voice(now_s, tuple(sorted(proven))[-ROUNDS_PROVEN:])


@dataclass(slots=True)
class Distrust:
    """What this replica heard, its own verdicts included, by the event loop's seconds."""

    _refused: dict[PeerId, dict[PeerId, Voice]] = field(default_factory=dict)  # giver -> receiver -> what it refused

    def __bool__(self) -> bool:
        """Whether anything was refused."""
        return bool(self._refused)

    def heard(
        self, giver: PeerId, receiver: PeerId, round_index: int, accepted: bool, now_s: float, step: str = ""
    ) -> None:
        """`receiver` took or refused the packet of `giver` in a round, by `step` of acceptance."""
        if giver == receiver:
            return
        voices = self._refused.setdefault(giver, {})
        if accepted:
            voices.pop(receiver, None)
        else:
            voices[receiver] = voices.get(receiver, Voice(now_s)).more(round_index, step, now_s)
        if not voices:
            del self._refused[giver]
        if len(self._refused) > GIVERS_MAX:
            del self._refused[
                min(self._refused, key=lambda one: (max(v.last_s for v in self._refused[one].values()), one))
            ]

    def refused_by(self, giver: PeerId, receiver: PeerId) -> bool:
        """Whether `receiver`'s last word on `giver` was a refusal."""
        return receiver in self._refused.get(giver, {})

    def against(self, giver: PeerId) -> int:
        """By how many receivers' last words its packet was refused."""
        return len(self._refused.get(giver, {}))

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
                proven = [v for one, v in voices.items() if one in voters and v.proven and now_s - v.last_s <= AGE_S]
                needed = max(REFUSERS_LEAST, (len(voters) - 1) // 2 + 1)
                rounds = len({index for voice in proven for index in voice.proven})
                if len(proven) >= needed and rounds >= ROUNDS_PROVEN:
                    who = f"{len(proven)} of {len(voters) - 1}"
                    more[giver] = f"{who} got packets that break the rules, {needed} suffice, in {rounds} rounds"
            if not more:
                return found
            found |= more
