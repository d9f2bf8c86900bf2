"""Events that peers cause, as many as a log can bear: one peer cannot push the history of a node out of its log.

Each peer has a bucket for each kind of event, each peer one for all kinds, and all peers together have one, so that
many keys gain little. What is over is counted, and told in one line each minute: "N more of EVENT from PEER". An
event of a node's own rhythm, such as the end of a round, is never held back.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

PROVOKED: Final = frozenset(
    {
        "audit.suspicion",
        "bequest.merged",
        "bequest.stale",
        "call.failed",
        "exchange.onesided",
        "exchange.refused",
        "exchange.standin",
        "gate.changed",
        "microbatch.moved",
        "microbatch.refused",
        "peer.banned",
        "peer.excluded",
        "peer.fault",
        "peer.found",
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
KEPT_MAX = 4096  # guess: buckets and counts remembered, 200 bytes each


@dataclass(frozen=True, slots=True)
class More:
    """`count` events of one kind from one peer ("": of nobody by name) were not written within `seconds`."""

    event: str
    peer: str
    count: int
    seconds: float


@dataclass(slots=True)
class _Bucket:
    tokens: float
    at_s: float


@dataclass(slots=True)
class _Held:
    """Not written since `since_s`."""

    since_s: float
    count: int = 0


class Flood:
    """The buckets of one log. Pure: time comes as an argument, in seconds that may also jump back."""

    def __init__(self) -> None:
        self._buckets: OrderedDict[tuple[str, str], _Bucket] = OrderedDict()
        self._held: OrderedDict[tuple[str, str], _Held] = OrderedDict()  # oldest first

    def admit(self, event: str, fields: Mapping[str, object], now_s: float) -> bool:
        """Whether the event is written; else it is counted."""
        if event not in PROVOKED:
            return True
        peer = str(fields.get("peer", ""))
        wanted = [(("", ""), ALL_PER_S, ALL_BURST)]
        if peer:
            wanted.append((("", peer), PEER_PER_S, PEER_BURST))
        wanted.append(((event, peer), KIND_PER_S, KIND_BURST))
        buckets = [self._filled(key, rate, burst, now_s) for key, rate, burst in wanted]
        if all(bucket.tokens >= 1.0 for bucket in buckets):
            for bucket in buckets:
                bucket.tokens -= 1.0
            return True
        held = self._held.setdefault((event, peer), _Held(now_s))
        held.count += 1
        if len(self._held) > KEPT_MAX:  # more keys than can be told of: as of nobody by name
            (other, _), lost = self._held.popitem(last=False)
            self._held.setdefault((other, ""), _Held(lost.since_s)).count += lost.count
        return False

    def due(self, now_s: float) -> list[More]:
        """What was held back and is to be told now."""
        told = []
        while self._held:
            (event, peer), held = next(iter(self._held.items()))
            seconds = now_s - held.since_s
            if 0.0 <= seconds < SUMMARY_S:
                break
            del self._held[event, peer]
            told.append(More(event, peer, held.count, max(0.0, seconds)))
        return told

    def _filled(self, key: tuple[str, str], rate: float, burst: float, now_s: float) -> _Bucket:
        bucket = self._buckets.get(key)
        if bucket is None:
            bucket = self._buckets[key] = _Bucket(burst, now_s)
            if len(self._buckets) > KEPT_MAX:
                self._buckets.popitem(last=False)
        bucket.tokens = min(burst, bucket.tokens + rate * max(0.0, now_s - bucket.at_s))
        bucket.at_s = now_s
        self._buckets.move_to_end(key)
        return bucket
