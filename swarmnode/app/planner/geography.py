"""Locations of nodes, their distances, possible connections, and current network cuts."""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping
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
    ax, ay = RTT_MS_PLACES[a.region]
    bx, by = RTT_MS_PLACES[b.region]
    relayed = RELAY_RTT_S if Nat.RELAYED in (a.nat, b.nat) else 0.0
    return math.hypot(ax - bx, ay - by) / 1000.0 + a.access_s + b.access_s + relayed
