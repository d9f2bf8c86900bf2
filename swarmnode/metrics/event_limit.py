"""Rate limits for events that peers cause, so that one peer cannot push a node's history out of its log.

There is a bucket for each kind of event from each peer, one for all kinds from a peer, and one for all peers, so that
many keys gain little. Excess events are counted and reported in one line per minute: "N more of EVENT from PEER".
Events of a node's own rhythm, such as the end of a round, are never limited.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from swarmnode.token_bucket import TokenBucket

PROVOKED: Final = frozenset(
    {
        "audit.suspicion",
        "final_delta.merged",
        "final_delta.stale",
        "call.failed",
        "exchange.onesided",
        "exchange.refused",
        "exchange.fallback",
        "gate.changed",
        "microbatch.moved",
        "microbatch.refused",
        "peer.banned",
        "peer.excluded",
        "peer.gone",
        "peer.left_out",
        "peer.unbanned",
        "progress.doubted",
        "receipt.failed",
        "receipt.given",
        "receipt.got",
        "receipt.heard",
        "record.refused",
        "recovery.kept",
        "state.failed",
        "state.served",
    }
)
"""Events that a peer can cause as often as it likes, or as often as we call it."""

KIND_PER_S, KIND_BURST = 1.0, 64.0  # guess: of one kind from one peer; honest receipts of rounds a second apart pass
PEER_PER_S, PEER_BURST = 2.0, 128.0  # guess: of all kinds from one peer: 1 KB/s, and a log of 32 MiB lasts nine hours
ALL_PER_S, ALL_BURST = 8.0, 1024.0  # guess: of all peers: 4 KB/s, more than two hours
SUMMARY_S = 60.0  # guess: between two lines about the same peer and kind
KEPT_MAX = 4096  # guess: buckets and counts kept, 200 bytes each


@dataclass(frozen=True, slots=True)
class HeldBack:
    """`count` events of one kind from one peer ("": unnamed) were not written within `seconds`."""

    event: str
    peer: str
    count: int
    seconds: float


@dataclass(slots=True)
class _Held:
    """Events not written since `since_s`."""

    since_s: float
    count: int = 0


class EventLimiter:
    """The buckets of one log. Pure: time is an argument, in seconds that may also jump back."""

    def __init__(self) -> None:
        self._buckets: OrderedDict[tuple[str, str], TokenBucket] = OrderedDict()
        self._held: OrderedDict[tuple[str, str], _Held] = OrderedDict()  # oldest first

    def admit(self, event: str, fields: Mapping[str, object], now_s: float) -> bool:
        """Whether to write the event; otherwise it is counted."""
        if event not in PROVOKED:
            return True
        peer = str(fields.get("peer", ""))
        wanted = [(("", ""), ALL_PER_S, ALL_BURST)]
        if peer:
            wanted.append((("", peer), PEER_PER_S, PEER_BURST))
        wanted.append(((event, peer), KIND_PER_S, KIND_BURST))
        buckets = [self._bucket(key, rate, burst, now_s) for key, rate, burst in wanted]
        if min(bucket.fill(now_s) for bucket in buckets) >= 1.0:
            for bucket in buckets:
                bucket.take(now_s)
            return True
        held = self._held.setdefault((event, peer), _Held(now_s))
        held.count += 1
        if len(self._held) > KEPT_MAX:  # too many keys to report each: count it as unnamed
            (other, _), lost = self._held.popitem(last=False)
            self._held.setdefault((other, ""), _Held(lost.since_s)).count += lost.count
        return False

    def due(self, now_s: float) -> list[HeldBack]:
        """The suppressed events that are due to be reported."""
        told = []
        while self._held:
            (event, peer), held = next(iter(self._held.items()))
            seconds = now_s - held.since_s
            if 0.0 <= seconds < SUMMARY_S:
                break
            del self._held[event, peer]
            told.append(HeldBack(event, peer, held.count, max(0.0, seconds)))
        return told

    def _bucket(self, key: tuple[str, str], rate: float, burst: float, now_s: float) -> TokenBucket:
        bucket = self._buckets.get(key)
        if bucket is None:
            bucket = self._buckets[key] = TokenBucket.full(rate, burst, now_s)
            if len(self._buckets) > KEPT_MAX:
                self._buckets.popitem(last=False)
        self._buckets.move_to_end(key)
        return bucket
