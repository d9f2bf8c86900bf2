"""How often a peer may knock: what is over the rate is dropped before anything is read of it.

Pure counting. A bucket a peer and one for all strangers together, so that neither one peer nor many fresh keys cost
more than a bound; the memory is bounded by PEERS_MAX buckets.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from swarmnode.ids import PeerId

PEERS_MAX = 4096  # guess: 200 bytes each
STREAMS_PER_S, STREAMS_BURST = 50.0, 256.0  # guess: of one peer that may take part; twice pool.IN_USE_MAX at once fits
CALLS_PER_S, CALLS_BURST = 1000.0, 4000.0  # guess: the tiny preset makes 100 calls a second to a peer
REFUSALS_PER_S, REFUSALS_BURST = 1.0, 8.0  # guess: of one peer that may not: it is told why so often
DROPPED_MAX = 64  # guess: streams of one stranger dropped unread, a handshake's cost 30 times, before it is cut off
STRANGERS_PER_S, STRANGERS_BURST = 20.0, 64.0  # guess: of all peers that may not, together


@dataclass(slots=True)
class Bucket:
    """Tokens that fill up by `rate` a second to at most `burst`."""

    rate: float
    burst: float
    tokens: float
    at_s: float
    refused: int = 0

    def take(self, now_s: float, tokens: float = 1.0) -> bool:
        """Whether so many tokens were there; they are gone then."""
        self.tokens = min(self.burst, self.tokens + (now_s - self.at_s) * self.rate)
        self.at_s = now_s
        if self.tokens < tokens:
            self.refused += 1
            return False
        self.tokens -= tokens
        return True


class Knocking:
    """The buckets of one server."""

    def __init__(self) -> None:
        self._buckets: OrderedDict[tuple[str, PeerId], Bucket] = OrderedDict()
        self._strangers = Bucket(STRANGERS_PER_S, STRANGERS_BURST, STRANGERS_BURST, 0.0)
        self.dropped = 0

    def stream(self, peer: PeerId, now_s: float) -> bool:
        """Whether `peer`, which may take part, may open one more stream."""
        return self._take("stream", peer, now_s, STREAMS_PER_S, STREAMS_BURST)

    def call(self, peer: PeerId, now_s: float) -> bool:
        """Whether `peer` may make one more call."""
        return self._take("call", peer, now_s, CALLS_PER_S, CALLS_BURST)

    def stranger(self, peer: PeerId, now_s: float) -> bool:
        """Whether a peer that may not take part is listened to at all, this time."""
        return self._take("refusal", peer, now_s, REFUSALS_PER_S, REFUSALS_BURST) and self._count(
            self._strangers.take(now_s)
        )

    def is_nuisance(self, peer: PeerId) -> bool:
        """Whether DROPPED_MAX more streams of the stranger `peer` were dropped since this was last true."""
        bucket = self._buckets.get(("refusal", peer))
        if bucket is None or bucket.refused < DROPPED_MAX:
            return False
        bucket.refused = 0
        return True

    def _take(self, kind: str, peer: PeerId, now_s: float, rate: float, burst: float) -> bool:
        bucket = self._buckets.get((kind, peer))
        if bucket is None:
            bucket = self._buckets[kind, peer] = Bucket(rate, burst, burst, now_s)
            if len(self._buckets) > PEERS_MAX:
                self._buckets.popitem(last=False)
        return self._count(bucket.take(now_s))

    def _count(self, taken: bool) -> bool:
        self.dropped += not taken
        return taken
