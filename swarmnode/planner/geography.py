"""Locations of nodes, their distances, possible connections, and current network cuts."""

from __future__ import annotations

import enum
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass

RTT_MS_PLACES: Mapping[str, tuple[float, float]] = {
    "local": (0.0, 0.0),
    "eu": (0.0, 0.0),
    "us-east": (85.0, 0.0),
    "us-west": (145.0, 10.0),
    "sa": (150.0, -125.0),
    "asia": (190.0, 105.0),
    "oceania": (250.0, 130.0),
    "africa": (30.0, 110.0),
}
"""Regions on a plane whose distances are round trips in milliseconds: rounded from public cloud latency tables
[guess]."""

RELAY_RTT_S = 0.06  # measured: 143 ms through a relay on a path of 80 ms
RELAY_RATE = 2.5e6  # guess: bytes per second through a volunteer's relay


class Nat(enum.StrEnum):
    """From where connections to a node can be opened."""

    OPEN = "open"  # from everywhere
    RELAYED = "relayed"  # from everywhere, through a relay: longer and slower
    UNREACHABLE = "unreachable"  # only from nodes that it called first


@dataclass(frozen=True, slots=True)
class Address:
    """A node's location. `access_s` is its share of every round trip: the last mile."""

    region: str
    access_s: float
    nat: Nat = Nat.OPEN


def rtt_s(a: Address, b: Address) -> float:
    """Round trip between two places on an idle network."""
    (ax, ay), (bx, by) = RTT_MS_PLACES[a.region], RTT_MS_PLACES[b.region]
    relayed = RELAY_RTT_S if Nat.RELAYED in (a.nat, b.nat) else 0.0
    return math.hypot(ax - bx, ay - by) / 1000.0 + a.access_s + b.access_s + relayed


@dataclass(frozen=True, slots=True)
class NetworkCut:
    """No message passes from a node of `senders` to one of `receivers`. A node in both is a bridge and never cut
    off."""

    senders: frozenset[str]
    receivers: frozenset[str]
    both_ways: bool = True

    def blocks(self, sender: str, receiver: str) -> bool:
        if self._one_way(sender, receiver):
            return True
        return self.both_ways and self._one_way(receiver, sender)

    def _one_way(self, sender: str, receiver: str) -> bool:
        a = sender in self.senders and sender not in self.receivers
        return a and receiver in self.receivers and receiver not in self.senders


class ReachabilityMap:
    """Which nodes can reach each other now."""

    def __init__(self) -> None:
        self.cuts: list[NetworkCut] = []
        self._called: dict[str, set[str]] = {}  # by nodes that cannot be dialled: the nodes they called

    def blocked(self, sender: str, receiver: str) -> bool:
        """Whether a message between the two gets lost now."""
        return any(cut.blocks(sender, receiver) for cut in self.cuts) if self.cuts else False

    def can_dial(self, sender: str, sender_nat: Nat, receiver: str, receiver_nat: Nat) -> bool:
        """Whether `sender` can open a stream to `receiver`; remembers the calls of unreachable nodes."""
        if receiver_nat is Nat.UNREACHABLE and sender not in self._called.get(receiver, ()):
            return False
        if sender_nat is Nat.UNREACHABLE:
            self._called.setdefault(sender, set()).add(receiver)
        return True

    def forget(self, label: str) -> None:
        """Drop the connections of `label`, which died."""
        self._called.pop(label, None)
        for called in self._called.values():
            called.discard(label)

    def heal(self, cut: NetworkCut) -> None:
        if cut in self.cuts:
            self.cuts.remove(cut)


def parts(labels: Collection[str], chosen: Collection[str]) -> tuple[frozenset[str], frozenset[str]]:
    """(`chosen`, all the others)."""
    return frozenset(chosen), frozenset(labels) - frozenset(chosen)
