"""Our trust in peers as partners: it falls with packets that break the rules and comes back with time.

    trust <- FALL trust                                        a packet malformed, out of range or not finite
    1 - trust <- RISE (1 - trust)                              a packet taken
    1 - trust <- (1 - trust) 2^(-t / HALF_LIFE_S)              t seconds later

A peer below LEAST is left out of our pairs until it is above again. It takes six such packets in a row. Packets that
are refused for what they say do not count: honest ones may be. This is our own view alone: a replica that leaves a peer
out by it mostly has no partner in the rounds in which it would have met it, a lone step either way. What most replicas
think is refusals.py.
"""

from __future__ import annotations

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
