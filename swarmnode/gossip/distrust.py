"""Replicas that this one leaves out because their packets broke the rules of their codec, here and at others.

Every refusal is signed by the replica that refused (receipt.py) and told to the stage, and so is the first packet of
the same giver that it took again. Such words cost a key only, and no word proves itself: so a word counts from a
replica whose packet this one has taken itself ("met"), and never without a packet that this one saw. Of n replicas met,
this one included and the giver not,

    left out   when this replica got, since it last took a packet of the giver, one that breaks the rules of its codec
               (malformed, out of range, not finite),
               and so did at least n // 2 + 1 of the n, by their last words, of at most AGE_S ago;
               in at least ROUNDS_PROVEN different rounds among them

and a replica that is left out has no voice about others. What others say thus spares a replica five of the six packets
after which it leaves a sender out by itself (standing.py); no number of keys can shut out a replica whose packets are
whole, since no honest replica sends packets that break rules, however far behind it is. All other refusals are
judgements and may be wrong: they cost the giver that one packet, and decide whom replicas without a partner ask last
(standin.py). A replica that is broken for a while is met again after AGE_S, as a liar is.
"""

from __future__ import annotations

from collections.abc import Container
from collections.abc import Set as AbstractSet
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

    def left_out(
        self, members: AbstractSet[PeerId], now_s: float, judge: PeerId, met: Container[PeerId]
    ) -> dict[PeerId, str]:
        """Of `members`, a stage's replicas: those that `judge` leaves out, and why. `met`: whose word it hears."""
        found: dict[PeerId, str] = {}
        if not self._refused:
            return found
        here = {peer for peer in members if peer == judge or peer in met} | {judge}
        while True:
            voters = here - found.keys()
            more = {}
            for giver in sorted((members & self._refused.keys()) - found.keys()):
                voices = self._refused[giver]
                proven = {
                    one: voice
                    for one, voice in voices.items()
                    if one in voters and voice.proven and now_s - voice.last_s <= AGE_S
                }
                others = len(voters - {giver})
                needed = max(REFUSERS_LEAST, others // 2 + 1)
                rounds = len({index for voice in proven.values() for index in voice.proven})
                if judge in proven and len(proven) >= needed and rounds >= ROUNDS_PROVEN:
                    who = f"{len(proven)} of {others}"
                    more[giver] = f"{who} got packets that break the rules, {needed} suffice, in {rounds} rounds"
            if not more:
                return found
            found |= more
