"""Who is left out by all: a giver whose packets most of a stage's replicas refused when they last met it.

Every refusal is signed by who refused (receipt.py) and told to the stage, and so is the first packet that the same
receiver took again. Of a stage with n members beside the giver

    left out   when at least n // 2 + 1 of them, each by its last word, of at most AGE_S ago, refused it,
               in at least ROUNDS_LEAST different rounds among them since each took its last packet
    or         when as many, in at least ROUNDS_PROVEN different rounds, got one that breaks the rules of its codec:
               malformed, out of range, not finite

and who is left out has no voice about others. Then nobody loses rounds by meeting it, and all count the same members.
Fewer than half cannot shut out anybody, whatever they sign; an honest replica that one or two misjudge stays. So does
one that fell behind and is refused by all in the same rounds: what it sends points back to where they come from, but
it takes what they send and catches up. Shut out at once it never would. Packets that break rules are another thing: no
honest replica sends them, however far behind it is, and who is broken for a while is met again after AGE_S, as a liar
is, by a few, who tell.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

from swarmnode.ids import PeerId

AGE_S = 900.0  # guess: with rounds of a minute a liar is met again every quarter of an hour
REFUSERS_LEAST = 2  # one voice never shuts out anybody
ROUNDS_LEAST = 12  # measured (five replicas, rounds of 3 inner steps): who fell behind was refused in up to ten rounds
ROUNDS_PROVEN = 3  # guess: a machine that hiccups in a round or two is not shut out where a whole stage meets at once
PROVEN = ("misshapen",)  # verdicts' steps (robust.py) that no honest packet comes to, wherever its receiver stands
GIVERS_MAX = 4096  # guess: remembered at once; those refused longest ago are forgotten first


@dataclass(slots=True)
class Voice:
    """One receiver's refusals since it last took a packet of the giver: when the last was, the latest rounds, and of
    those the latest in which the packet broke rules."""

    last_s: float
    rounds: tuple[int, ...] = ()
    proven: tuple[int, ...] = ()

    def more(self, round_index: int, step: str, now_s: float) -> Voice:
        """With one more refusal."""
        rounds = tuple(sorted({*self.rounds, round_index}))[-ROUNDS_LEAST:]
        proven = {*self.proven, round_index} if step in PROVEN else self.proven
        return Voice(now_s, rounds, tuple(sorted(proven))[-ROUNDS_PROVEN:])


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
                against = [v for one, v in voices.items() if one in voters and now_s - v.last_s <= AGE_S]
                needed = max(REFUSERS_LEAST, (len(voters) - 1) // 2 + 1)
                rounds = len({index for voice in against for index in voice.rounds})
                proven = [voice for voice in against if voice.proven]
                broken = len({index for voice in proven for index in voice.proven})
                many, few = f"of {len(voters) - 1}", f"{needed} suffice, in"
                if len(proven) >= needed and broken >= ROUNDS_PROVEN:
                    more[giver] = f"{len(proven)} {many} got packets that break the rules, {few} {broken} rounds"
                elif len(against) >= needed and rounds >= ROUNDS_LEAST:
                    more[giver] = f"{len(against)} {many} refused its packets, {few} {rounds} rounds"
            if not more:
                return found
            found |= more
