"""Rate limits of streams and calls: excess ones are dropped before any of their bytes are read.

Pure counting. There is one bucket per peer and one for all strangers together, so neither one peer nor many fresh keys
cost more than a bound.

DhtLimit bounds the DHT's own calls, which p2pd hands to hivemind without our transport in between. A call costs as much
as the keys it names, and as one for each KEY_NBYTES of its answer: 2,000 records under one key are 794 kB, and a bare
key took 187 MB in 6 s (measured). Nobody may store a record but the peer that it is of: else one connection could store
as many keys as it can sign with. A node that comes close to a key gets its records from their writers soon.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from hivemind.proto import dht_pb2
from hivemind.utils import MSGPackSerializer

from swarmnode.base.errors import Busy
from swarmnode.base.ids import PeerId
from swarmnode.base.token_bucket import PeerBudget

# Guess, of one peer: it looks up a few places in an announce period.
KEYS_PER_S = 50.0
KEYS_BURST = 512.0
# Guess, of all peers: a thousand nodes announce and look up 200 times a second.
ALL_PER_S = 500.0
ALL_BURST = 16384.0

KEY_NBYTES = 1024  # derived: 500 kB/s for all in the long run; a place of a thousand records is two thirds of a burst

RpcHandler = Callable[[Any, Any], Awaitable[Any]]


class DhtLimit:
    """The budget of one node, in keys."""

    def __init__(self) -> None:
        self._budget = PeerBudget(KEYS_PER_S, KEYS_BURST, ALL_PER_S, ALL_BURST)

    def take(self, peer: object, keys: int, now_s: float) -> bool:
        """Whether `peer` may make one more call that names `keys` keys."""
        return self._budget.take(peer, now_s, max(1, keys))

    def limited(self, handler: RpcHandler) -> RpcHandler:
        """`handler`, within the limit. Beyond it the caller gets Busy, and nothing is verified or stored. Of what a
        call stores only the caller's own records reach it."""

        async def serve(request: Any, context: Any) -> Any:
            keys = len(getattr(request, "keys", ()))
            stores = isinstance(request, dht_pb2.StoreRequest)
            own = MSGPackSerializer.dumps(str(context.remote_id)) if stores else b""
            mine = [at for at, subkey in enumerate(request.subkeys) if subkey == own] if stores else []
            now_s = asyncio.get_running_loop().time()
            if not self.take(context.remote_id, len(mine) if stores else keys, now_s):
                raise Busy("more calls of the DHT than one peer may make", 1.0)
            if not stores:
                answer = await handler(request, context)
                self._budget.spend(context.remote_id, now_s, answer.ByteSize() / KEY_NBYTES)
                return answer
            for entries in (request.keys, request.subkeys, request.values, request.expiration_time, request.in_cache):
                entries[:] = [entries[at] for at in mine]
            answer = await handler(request, context)
            stored = dict(zip(mine, answer.store_ok, strict=True))
            answer.store_ok[:] = [stored.get(at, False) for at in range(keys)]
            return answer

        return serve


# Guess: the tiny preset makes 100 calls a second to a peer.
CALLS_PER_S = 1000.0
CALLS_BURST = 4000.0
# Of one admitted peer that was not seen at work here yet, and of all of those together. A call costs about 1 ms, and so
# does a new stream, p2pd and the check of a record included (estimated on a loaded machine by `bench attack
# --resources`), so any number of keys costs a tenth of a core. Joiners fetch chunks of 1 MiB, and a thousand nodes look
# after each other by 60 pings a second.
IDLE_CALLS_PER_S = 40.0  # guess
IDLE_CALLS_BURST = 100.0  # guess
ALL_IDLE_CALLS_PER_S = 100.0  # derived: a tenth of a core
ALL_IDLE_CALLS_BURST = 1000.0  # derived: of ten seconds at once
# Guess: requests that break the protocol, of one peer that was not seen at work here, which are answered with a reason.
# Its streams are dropped unread meanwhile: who speaks another version is told why, and a flood of noise is not read.
BROKEN_PER_S = 0.2
BROKEN_BURST = 8.0
# Guess, of one peer that is not admitted: refusals with a reason.
REFUSALS_PER_S = 1.0
REFUSALS_BURST = 8.0
# guess: streams of one stranger dropped unread, a handshake's cost 30 times, before it is disconnected
DROPPED_MAX = 64
# guess: of all peers that are not admitted, together; their connections cost p2pd 1 to 2 % of a core
STRANGERS_PER_S = 20.0
STRANGERS_BURST = 64.0


class StrangerRateLimiter:
    """The budgets of one server. A peer that was seen at work has one of its own; those that were not, and those that
    are not admitted, share one, so that many keys cost no more than a few."""

    def __init__(self) -> None:
        self._working = PeerBudget(CALLS_PER_S, CALLS_BURST)
        self._idle = PeerBudget(IDLE_CALLS_PER_S, IDLE_CALLS_BURST, ALL_IDLE_CALLS_PER_S, ALL_IDLE_CALLS_BURST)
        self._refusals = PeerBudget(REFUSALS_PER_S, REFUSALS_BURST, STRANGERS_PER_S, STRANGERS_BURST)
        self._broken = PeerBudget(BROKEN_PER_S, BROKEN_BURST)

    def stream(self, peer: PeerId, now_s: float, *, works: bool = True) -> bool:
        """Whether the admitted `peer`, which was seen at work or not, may open one more stream."""
        broken = self._broken.of(peer)
        if not works and broken.fill(now_s) < 1.0:
            return broken.take(now_s)
        return self.call(peer, now_s, works=works)

    def call(self, peer: PeerId, now_s: float, *, works: bool = True) -> bool:
        """Whether `peer`, which was seen at work or not, may make one more call."""
        return (self._working if works else self._idle).take(peer, now_s)

    def broke(self, peer: PeerId, now_s: float) -> None:
        """Note that a request of `peer` broke the protocol."""
        self._broken.take(peer, now_s)

    def stranger(self, peer: PeerId, now_s: float) -> bool:
        """Whether to answer a stranger this time."""
        return self._refusals.take(peer, now_s)

    def is_nuisance(self, peer: PeerId) -> bool:
        """Whether DROPPED_MAX more streams of `peer`, a stranger or one that keeps sending noise, were dropped since
        this was last true."""
        return any(budget.of(peer).overrun(DROPPED_MAX) for budget in (self._refusals, self._broken))
