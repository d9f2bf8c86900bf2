"""Rate limits of the DHT's own calls, which p2pd hands to hivemind without our transport in between.

A call costs as much as the keys it names, because each stored value is verified. Honest nodes store one record and look
up a few stages in each announce period. A node that comes close to a key is given at once what others hold for it.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from typing import Any

from swarmnode.errors import Busy
from swarmnode.token_bucket import TokenBucket

KEYS_PER_S, KEYS_BURST = 50.0, 2048.0  # guess: of one peer; it can hand over the records of 2,000 nodes
ALL_PER_S, ALL_BURST = 500.0, 16384.0  # guess: of all peers: a thousand nodes announce and look up 200 times a second
PEERS_MAX = 4096  # guess: buckets remembered, 200 bytes each

RpcHandler = Callable[[Any, Any], Awaitable[Any]]


class DhtLimit:
    """The buckets of one node."""

    def __init__(self) -> None:
        self._of: OrderedDict[object, TokenBucket] = OrderedDict()
        self._all = TokenBucket(ALL_PER_S, ALL_BURST, ALL_BURST, 0.0)

    def take(self, peer: object, keys: int, now_s: float) -> bool:
        """Whether `peer` may make one more call that names `keys` keys."""
        bucket = self._of.pop(peer, None) or TokenBucket(KEYS_PER_S, KEYS_BURST, KEYS_BURST, now_s)
        self._of[peer] = bucket
        if len(self._of) > PEERS_MAX:
            self._of.popitem(last=False)
        cost = float(max(1, keys))
        return bucket.take(now_s, cost) and self._all.take(now_s, cost)

    def limited(self, handler: RpcHandler) -> RpcHandler:
        """`handler`, within the limit. Beyond it the caller gets Busy, and nothing is verified or stored."""

        async def serve(request: Any, context: Any) -> Any:
            keys = len(getattr(request, "keys", ()))
            if not self.take(context.remote_id, keys, asyncio.get_running_loop().time()):
                raise Busy("more calls of the DHT than one peer may make", 1.0)
            return await handler(request, context)

        return serve
