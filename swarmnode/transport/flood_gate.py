"""Decide which strangers may connect to p2pd while its port is flooded.

A libp2p handshake costs p2pd 0.5 to 1 ms of CPU and an unwanted stream 0.5 ms, whatever the answer. So the kernel must
turn floods away. Pure: takes one period's counts, returns the next state and a reason; `syn_filter.py` counts and acts.
Without a flood no filter is active and no socket is open for it.

1. Many TCP connections are opened on this machine: for LOOK_S a tenth of strangers' SYNs at our port is dropped (their
   kernels resend after a second), which shows how many there are. If they are few, they belong to another program.
2. A flood: only ADMIT_PER_S strangers get through. A sample of the rest shows their addresses.
3. Addresses that alone make HITS_PER_S are denied. If the rest is no flood, it is admitted again.

The address of a peer that may take part is never denied and always gets through.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

FLOOD_PER_S = 20.0  # guess: strangers' connections that cost p2pd 1 to 2 % of a core
ADMIT_PER_S = 20.0  # guess
# guess: after the last second of a flood; a client that dials one by one stops at the first loss and returns later
HOLD_S = 30.0
HITS_PER_S = 10.0  # guess: per address; a household that joins with ten machines makes ten in all
LOOK_SHARE, LOOK_S = 0.9, 3.0  # guess: the smallest flood loses 6 connections, enough to tell it from none
SHARE_MIN = 1 / 64
SAMPLE_SHARE = 1 / 8  # guess: share of rejected connections that is reset instead of dropped, to see their addresses
HITS_MIN = 4  # guess: fewer hits of one address in a sample may be chance
DENIED_S = 120.0  # guess: after the last attempt
DENIED_MAX = 256


@dataclass(frozen=True, slots=True)
class FloodSample:
    """Counts of one period. `opened`: TCP connections accepted by any program on this machine. `sunk`: attempts
    rejected at our port; `sampled`: source addresses of some of them."""

    now_s: float
    took_s: float
    opened: int
    sunk: int = 0
    sampled: tuple[str, ...] = ()
    friends: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class FloodGate:
    """State of the gate: `share` of strangers' connections reach p2pd, and none from `denied` (address -> until
    when)."""

    share: float = 1.0
    denied: Mapping[str, float] = field(default_factory=dict)
    elsewhere_per_s: float = 0.0  # connections that other programs of this machine accept
    looked_s: float = 0.0
    looked_sunk: float = 0.0
    flood_until_s: float = 0.0

    @property
    def is_open(self) -> bool:
        """Whether all connections pass."""
        return self.share >= 1.0 and not self.denied

    @property
    def sample(self) -> float:
        """Share of rejected connections to sample: none while it is unknown whether there is a flood."""
        return 0.0 if self.share == LOOK_SHARE and not self.denied else SAMPLE_SHARE


def deny(gate: FloodGate, address: str, now_s: float) -> FloodGate:
    """`gate` that also denies `address`, from which a stranger opens stream after stream."""
    denied = {**gate.denied, address: now_s + DENIED_S}
    while len(denied) > DENIED_MAX:
        del denied[min(denied, key=lambda one: denied[one])]
    return replace(gate, denied=denied)


def step(gate: FloodGate, sight: FloodSample) -> tuple[FloodGate, str]:
    """The gate after `sight`, and what changed ("" for nothing)."""
    counts = Counter(sight.sampled)
    kept = {
        address: sight.now_s + DENIED_S if counts[address] else until
        for address, until in gate.denied.items()
        if (until > sight.now_s or counts[address]) and address not in sight.friends
    }
    gate = replace(gate, denied=kept)
    per_sample = sight.sunk / max(1, len(sight.sampled))
    others = per_sample * sum(count for address, count in counts.items() if address not in kept)
    if not counts and not kept:
        others = sight.sunk
    opened_per_s = max(0, sight.opened - len(sight.sampled)) / sight.took_s
    if gate.share >= 1.0:
        gate = replace(gate, elsewhere_per_s=min(gate.elsewhere_per_s, opened_per_s))
        if opened_per_s - gate.elsewhere_per_s <= FLOOD_PER_S:
            return gate, ""
        return replace(gate, share=LOOK_SHARE, looked_s=0.0, looked_sunk=0.0), "many connections: looking"
    gate = replace(gate, looked_s=gate.looked_s + sight.took_s, looked_sunk=gate.looked_sunk + others)
    if gate.share == LOOK_SHARE and gate.looked_s < LOOK_S:
        return gate, ""
    return _looked(gate, sight, counts, per_sample, opened_per_s)


def _looked(
    gate: FloodGate, sight: FloodSample, counts: Counter[str], per_sample: float, opened_per_s: float
) -> tuple[FloodGate, str]:
    scale = 1.0 / (1.0 - gate.share)
    strangers_per_s = gate.looked_sunk / gate.looked_s * scale
    found = 0
    for address, count in counts.items():
        per_s = count * per_sample / sight.took_s * scale
        is_stranger = address not in gate.denied and address not in sight.friends
        if is_stranger and per_s > HITS_PER_S and count >= HITS_MIN:
            gate, found = deny(gate, address, sight.now_s), found + 1
            strangers_per_s -= per_s
    gate = replace(gate, looked_s=0.0, looked_sunk=0.0)
    if strangers_per_s > FLOOD_PER_S:
        share = max(SHARE_MIN, min(0.5, ADMIT_PER_S / strangers_per_s))
        is_new = gate.share == LOOK_SHARE
        gate = replace(gate, share=share, flood_until_s=sight.now_s + HOLD_S)
        return gate, f"a flood of {strangers_per_s:.0f} connections a second" if is_new else ""
    if not found and sight.now_s < gate.flood_until_s:
        return gate, ""
    elsewhere = max(0.0, opened_per_s - strangers_per_s * gate.share)
    reason = f"{found} addresses denied" if found else "no flood of strangers (or it ended)"
    return replace(gate, share=1.0, elsewhere_per_s=elsewhere), reason
