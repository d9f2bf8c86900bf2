"""Replicas that this one leaves out because their packets broke the rules of their codec, here and at others.

The refusing replica signs every refusal (acceptance.py) and tells the stage; it does the same for the first
packet of that giver that it takes again. A receipt costs its signer only a key, and proves nothing about the packet.
A receipt therefore counts only from a replica whose packet this one has taken itself ("met"), and never without a
bad packet seen here. Of n replicas met, including this one and excluding the giver,

    left out   when this replica got, since it last took a packet of the giver, one that breaks the rules of its codec
               (malformed, out of range, not finite),
               and so did at least n // 2 + 1 of the n, by their last receipts, of at most AGE_S ago;
               in at least ROUNDS_PROVEN different rounds among them

and a replica that is left out has no vote about others. Alone, a replica leaves a sender out after six such packets
(Reputation); the receipts of others spare it five of them. No number of keys can shut out a replica whose packets
are whole: honest replicas never send packets that break the rules, however far behind they are. All other refusals
are judgements and may be wrong. Such a refusal costs the giver that one packet, and replicas without a partner ask
it later (fallback_partner.py). A replica that was broken for a while is met again after AGE_S, as a liar is.

Reputation is our own trust in peers as partners: it falls with packets that break the rules and comes back with time.

    trust <- FALL trust                                        a packet malformed, out of range or not finite
    1 - trust <- RISE (1 - trust)                              a packet taken
    1 - trust <- (1 - trust) 2^(-t / HALF_LIFE_S)              t seconds later

A peer below LEAST is left out of our pairs until it is above again. It takes six such packets in a row. Packets that
are refused for what they say do not count: honest ones may be. This is our own view alone: a replica that leaves a peer
out by it mostly has no partner in the rounds in which it would have met it, a lone step either way.
"""

from __future__ import annotations

from collections.abc import Container
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field

from swarmnode.ids import PeerId, short

FALL = 0.7  # guess
RISE = 0.5  # guess: two packets taken make up for most of what was held against a peer
LEAST = 0.15  # guess: six in a row; a machine that hiccups for a few rounds stays
HALF_LIFE_S = 600.0  # guess: of what a peer is still short of full trust
PEERS_MAX = 4096  # guess: remembered at once; those trusted most are forgotten first


@dataclass(slots=True)
class Reputation:
    """One replica's view of its partners, by the event loop's seconds."""

    _trust: dict[PeerId, tuple[float, float]] = field(default_factory=dict)  # trust, as of when

    def __bool__(self) -> bool:
        """Whether anything is held against anybody."""
        return bool(self._trust)

    def trust(self, peer: PeerId, now_s: float) -> float:
        """1: nothing is held against `peer`; towards 0 with each packet refused."""
        value, since_s = self._trust.get(peer, (1.0, now_s))
        return float(1.0 - (1.0 - value) * 2.0 ** ((since_s - now_s) / HALF_LIFE_S))

    def refused(self, peer: PeerId, now_s: float) -> float:
        """A packet of `peer` broke the rules; returns what trust is left."""
        left = FALL * self.trust(peer, now_s)
        self._trust[peer] = (left, now_s)
        if len(self._trust) > PEERS_MAX:
            del self._trust[max(self._trust, key=lambda known: (self.trust(known, now_s), known))]
        return left

    def taken(self, peer: PeerId, now_s: float) -> None:
        """A packet of `peer` was believed."""
        if peer in self._trust:
            self._trust[peer] = (1.0 - RISE * (1.0 - self.trust(peer, now_s)), now_s)

    def excluded(self, now_s: float) -> set[PeerId]:
        """Peers not to be met."""
        return {peer for peer in self._trust if not self.meets(peer, now_s)[0]}

    def meets(self, peer: PeerId, now_s: float) -> tuple[bool, str]:
        """(whether to meet `peer`, the reason)."""
        trust = self.trust(peer, now_s)
        return trust >= LEAST, f"trust in {short(peer)} is {trust:.2f}, {LEAST:g} is least"


AGE_S = 900.0  # guess: with rounds of a minute a liar is met again every quarter of an hour
REFUSERS_LEAST = 2  # one vote never shuts out a replica
ROUNDS_PROVEN = 3  # guess: a machine that hiccups in a round or two is not shut out where a whole stage meets at once
PROVEN = ("misshapen",)  # verdicts' steps (robust.py) that no honest packet gets, whatever its receiver's state
GIVERS_MAX = 4096  # guess: givers remembered at once; the one refused longest ago is forgotten first


@dataclass(slots=True)
class RefusalVote:
    """One receiver's refusals since it last took a packet of the giver: the time of the last, and the latest rounds
    in which the packet broke rules."""

    last_s: float
    proven: tuple[int, ...] = ()

    def more(self, round_index: int, step: str, now_s: float) -> RefusalVote:
        """Return this vote with one more refusal."""
        proven = {*self.proven, round_index} if step in PROVEN else self.proven
        return RefusalVote(now_s, tuple(sorted(proven))[-ROUNDS_PROVEN:])


@dataclass(slots=True)
class RefusalTally:
    """The verdicts that this replica heard of, including its own. Times are seconds of the event loop."""

    _refused: dict[PeerId, dict[PeerId, RefusalVote]] = field(default_factory=dict)  # giver -> receiver -> its refusals

    def __bool__(self) -> bool:
        """Return whether any refusal stands."""
        return bool(self._refused)

    def heard(
        self, giver: PeerId, receiver: PeerId, round_index: int, accepted: bool, now_s: float, step: str = ""
    ) -> None:
        """Record that `receiver` took or refused the packet of `giver` in a round, at `step` of acceptance."""
        if giver == receiver:
            return
        voices = self._refused.setdefault(giver, {})
        if accepted:
            voices.pop(receiver, None)
        else:
            voices[receiver] = voices.get(receiver, RefusalVote(now_s)).more(round_index, step, now_s)
        if not voices:
            del self._refused[giver]
        if len(self._refused) > GIVERS_MAX:
            del self._refused[
                min(self._refused, key=lambda one: (max(v.last_s for v in self._refused[one].values()), one))
            ]

    def refused_by(self, giver: PeerId, receiver: PeerId) -> bool:
        """Return whether `receiver` refused the last packet of `giver` that it judged."""
        return receiver in self._refused.get(giver, {})

    def against(self, giver: PeerId) -> int:
        """Return how many receivers refused the last packet of `giver` that they judged."""
        return len(self._refused.get(giver, {}))

    def left_out(
        self, members: AbstractSet[PeerId], now_s: float, judge: PeerId, met: Container[PeerId]
    ) -> dict[PeerId, str]:
        """Return the replicas of the stage's `members` that `judge` leaves out, with the reasons. `met`: the
        replicas whose receipts count."""
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
