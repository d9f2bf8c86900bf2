"""Who may connect to p2pd at all while strangers flood its port.

A libp2p handshake costs p2pd 0.5 to 1 ms of CPU and an unwanted stream 0.5 ms, whatever we answer, so what floods has
to be turned away by the kernel. Pure: the counts of one period in, the next state and its reason out; `sink.py` counts
and carries it out. In calm nothing is in anybody's way, and no socket is open for it.

1. Many TCP connections are opened on this machine: LOOK_S long a tenth of strangers' SYNs at our port is dropped (their
   kernel sends it again after a second), which tells how many there are. Not many: they are another program's.
2. A flood: only ADMIT_PER_S of strangers get through, a sample of the rest shows where they come from.
3. Addresses that alone make HITS_PER_S are denied, and when the rest is no flood, it is let in again.

An address of a peer that may take part is never denied, and always gets through.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

FLOOD_PER_S = 20.0  # guess: strangers' connections that cost p2pd 1 to 2 % of a core
ADMIT_PER_S = 20.0  # guess
HOLD_S = 30.0  # guess: after the last second of a flood; who dials one by one stops at the first loss, and comes back
HITS_PER_S = 10.0  # guess: of one address; a household that joins with ten machines makes ten in all
LOOK_SHARE, LOOK_S = 0.9, 3.0  # guess: in the least flood that drops 6 connections, enough to tell it from none
SHARE_MIN = 1 / 64
SAMPLE_SHARE = 1 / 8  # guess: of what is turned away, so much is reset instead of dropped, to see where it is from
HITS_MIN = 4  # guess: fewer of one address in a sample may be chance
DENIED_S = 120.0  # guess: after the last attempt
DENIED_MAX = 256


@dataclass(frozen=True, slots=True)
class Sight:
    """One period: `opened` TCP connections were accepted on this machine by anybody; `sunk` attempts at our port were
    turned away, and `sampled` are where some of them came from."""

    now_s: float
    took_s: float
    opened: int
    sunk: int = 0
    sampled: tuple[str, ...] = ()
    friends: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Gate:
    """`share` of strangers' connections reach p2pd, and none of `denied` (address: until when)."""

    share: float = 1.0
    denied: Mapping[str, float] = field(default_factory=dict)
    elsewhere_per_s: float = 0.0  # what other programs of this machine accept
    looked_s: float = 0.0
    looked_sunk: float = 0.0
    flood_until_s: float = 0.0

    @property
    def is_open(self) -> bool:
        """Nothing is in anybody's way."""
        return self.share >= 1.0 and not self.denied

    @property
    def sample(self) -> float:
        """Of what is turned away, the share that is looked at: none while there may be no flood at all."""
        return 0.0 if self.share == LOOK_SHARE and not self.denied else SAMPLE_SHARE


def deny(gate: Gate, address: str, now_s: float) -> Gate:
    """`gate` without `address`, from which a stranger opens stream after stream."""
    denied = {**gate.denied, address: now_s + DENIED_S}
    while len(denied) > DENIED_MAX:
        del denied[min(denied, key=lambda one: denied[one])]
    return replace(gate, denied=denied)


def step(gate: Gate, sight: Sight) -> tuple[Gate, str]:
    """The gate after `sight`, and what is new about it ("" for nothing)."""
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


def _looked(gate: Gate, sight: Sight, counts: Counter[str], per_sample: float, opened_per_s: float) -> tuple[Gate, str]:
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
    reason = f"{found} addresses denied" if found else "no flood of strangers (any more)"
    return replace(gate, share=1.0, elsewhere_per_s=elsewhere), reason
