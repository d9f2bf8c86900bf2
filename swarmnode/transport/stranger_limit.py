"""Rate limits of streams and calls: excess ones are dropped before any of their bytes are read.

Pure counting. There is one bucket per peer and one for all strangers together, so neither one peer nor many fresh keys
cost more than a bound. The number of buckets bounds the memory.

DhtLimit bounds the DHT's own calls, which p2pd hands to hivemind without our transport in between. A call costs as much
as the keys it names. Nobody may store a record but the peer that it is of: else one connection could store as many keys
as it can sign with. A node that comes close to a key gets its records from their writers within an announce period.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from hivemind.proto import dht_pb2
from hivemind.utils import MSGPackSerializer

from swarmnode.errors import Busy
from swarmnode.ids import PeerId
from swarmnode.token_bucket import TokenBucket, TokenBuckets

KEYS_PER_S, KEYS_BURST = 50.0, 512.0  # guess: of one peer, which looks up a few places in an announce period
ALL_PER_S, ALL_BURST = 500.0, 16384.0  # guess: of all peers: a thousand nodes announce and look up 200 times a second

RpcHandler = Callable[[Any, Any], Awaitable[Any]]


class DhtLimit:
    """The buckets of one node."""

    def __init__(self) -> None:
        self._peers = TokenBuckets()
        self._all = TokenBucket(ALL_PER_S, ALL_BURST, ALL_BURST, 0.0)

    def take(self, peer: object, keys: int, now_s: float) -> bool:
        """Whether `peer` may make one more call that names `keys` keys."""
        cost = float(max(1, keys))
        return self._peers.of(peer, KEYS_PER_S, KEYS_BURST, now_s).take(now_s, cost) and self._all.take(now_s, cost)

    def limited(self, handler: RpcHandler) -> RpcHandler:
        """`handler`, within the limit. Beyond it the caller gets Busy, and nothing is verified or stored. Of what a
        call stores only the caller's own records reach it."""

        async def serve(request: Any, context: Any) -> Any:
            keys, stores = len(getattr(request, "keys", ())), isinstance(request, dht_pb2.StoreRequest)
            own = MSGPackSerializer.dumps(str(context.remote_id)) if stores else b""
            mine = [at for at, subkey in enumerate(request.subkeys) if subkey == own] if stores else []
            if not self.take(context.remote_id, len(mine) if stores else keys, asyncio.get_running_loop().time()):
                raise Busy("more calls of the DHT than one peer may make", 1.0)
            if not stores:
                return await handler(request, context)
            for entries in (request.keys, request.subkeys, request.values, request.expiration_time, request.in_cache):
                entries[:] = [entries[at] for at in mine]
            answer = await handler(request, context)
            stored = dict(zip(mine, answer.store_ok, strict=True))
            answer.store_ok[:] = [stored.get(at, False) for at in range(keys)]
            return answer

        return serve


STREAMS_PER_S, STREAMS_BURST = 50.0, 256.0  # guess: of one admitted peer; twice pool.IN_USE_MAX at once fits
CALLS_PER_S, CALLS_BURST = 1000.0, 4000.0  # guess: the tiny preset makes 100 calls a second to a peer
# Of one admitted peer that was not seen at work here yet, and of all of those together. A call costs about 1 ms, p2pd
# and the check of a record included (estimated on a loaded machine by `bench attack --resources`), so any number of
# keys costs a tenth of a core. Joiners fetch chunks of 1 MiB, and a thousand nodes look after each other by 60 pings a
# second.
IDLE_CALLS_PER_S, IDLE_CALLS_BURST = 40.0, 100.0  # guess
ALL_IDLE_CALLS_PER_S, ALL_IDLE_CALLS_BURST = 80.0, 400.0
ALL_IDLE_STREAMS_PER_S, ALL_IDLE_STREAMS_BURST = 50.0, 512.0  # guess: a stream costs 1 ms
# Guess: requests that break the protocol, of one peer that was not seen at work here, which are answered with a reason.
# Its streams are dropped unread meanwhile: who speaks another version is told why, and a flood of noise is not read.
BROKEN_PER_S, BROKEN_BURST = 0.2, 8.0
REFUSALS_PER_S, REFUSALS_BURST = 1.0, 8.0  # guess: of one peer that is not admitted: refusals with a reason
# guess: streams of one stranger dropped unread, a handshake's cost 30 times, before it is disconnected
DROPPED_MAX = 64
STRANGERS_PER_S, STRANGERS_BURST = 20.0, 64.0  # guess: of all peers that are not admitted, together


class StrangerRateLimiter:
    """The buckets of one server."""

    def __init__(self) -> None:
        self._buckets = TokenBuckets()
        self._strangers = TokenBucket(STRANGERS_PER_S, STRANGERS_BURST, STRANGERS_BURST, 0.0)
        self._idle = TokenBucket(ALL_IDLE_CALLS_PER_S, ALL_IDLE_CALLS_BURST, ALL_IDLE_CALLS_BURST, 0.0)
        self._idle_streams = TokenBucket(ALL_IDLE_STREAMS_PER_S, ALL_IDLE_STREAMS_BURST, ALL_IDLE_STREAMS_BURST, 0.0)
        self.dropped = 0

    def stream(self, peer: PeerId, now_s: float, *, works: bool = True) -> bool:
        """Whether the admitted `peer`, which was seen at work or not, may open one more stream."""
        broken = None if works else self._buckets.get(("broken", peer))
        if broken is not None and broken.fill(now_s) < 1.0:
            broken.take(now_s)
            return self._count(False)
        taken = self._take("stream", peer, now_s, STREAMS_PER_S, STREAMS_BURST)
        return taken and (works or self._count(self._idle_streams.take(now_s)))

    def call(self, peer: PeerId, now_s: float, *, works: bool = True) -> bool:
        """Whether `peer` may make one more call. `works`: it was seen at work; keys that were not share a limit, so
        that many of them cost no more than a few."""
        if works:
            return self._take("call", peer, now_s, CALLS_PER_S, CALLS_BURST)
        return self._take("idle", peer, now_s, IDLE_CALLS_PER_S, IDLE_CALLS_BURST) and self._count(
            self._idle.take(now_s)
        )

    def broke(self, peer: PeerId, now_s: float) -> None:
        """Note that a request of `peer` broke the protocol."""
        self._buckets.of(("broken", peer), BROKEN_PER_S, BROKEN_BURST, now_s).take(now_s)

    def stranger(self, peer: PeerId, now_s: float) -> bool:
        """Whether to answer a stranger this time."""
        return self._take("refusal", peer, now_s, REFUSALS_PER_S, REFUSALS_BURST) and self._count(
            self._strangers.take(now_s)
        )

    def is_nuisance(self, peer: PeerId) -> bool:
        """Whether DROPPED_MAX more streams of `peer`, a stranger or one that keeps sending noise, were dropped since
        this was last true."""
        buckets = [self._buckets.get((kind, peer)) for kind in ("refusal", "broken")]
        return any(bucket is not None and bucket.overrun(DROPPED_MAX) for bucket in buckets)

    def _take(self, kind: str, peer: PeerId, now_s: float, rate: float, burst: float) -> bool:
        return self._count(self._buckets.of((kind, peer), rate, burst, now_s).take(now_s))

    def _count(self, taken: bool) -> bool:
        self.dropped += not taken
        return taken
