"""How many bytes of tensors may be on their way in at once, in all and from one peer. Taken before memory is."""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from swarmnode.ids import PeerId


class Budget:
    """Bytes announced and not yet arrived. One message alone always fits, whatever its size: its method has a cap."""

    def __init__(self, total_bytes_max: int, peer_bytes_max: int) -> None:
        assert 0 < peer_bytes_max <= total_bytes_max
        self._total_bytes_max = total_bytes_max
        self._peer_bytes_max = peer_bytes_max
        self._used = 0
        self._used_by: Counter[PeerId] = Counter()
        self._waiters: deque[asyncio.Future[None]] = deque()

    @property
    def used_bytes(self) -> int:
        return self._used

    def try_take(self, peer: PeerId, nbytes: int) -> bool:
        """Take `nbytes` for `peer` if they fit now."""
        if self._used and self._used + nbytes > self._total_bytes_max:
            return False
        if self._used_by[peer] and self._used_by[peer] + nbytes > self._peer_bytes_max:
            return False
        self._used += nbytes
        self._used_by[peer] += nbytes
        return True

    def give(self, peer: PeerId, nbytes: int) -> None:
        """Give back what was taken."""
        self._used -= nbytes
        self._used_by[peer] -= nbytes
        assert self._used >= 0 and self._used_by[peer] >= 0, "more given back than taken"
        if not self._used_by[peer]:
            del self._used_by[peer]
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)

    @asynccontextmanager
    async def taken(self, peer: PeerId, nbytes: int) -> AsyncIterator[None]:
        """Wait until `nbytes` fit, and hold them. The caller bounds the wait."""
        while not self.try_take(peer, nbytes):
            waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiters.append(waiter)
            try:
                await waiter
            finally:
                self._waiters.remove(waiter)
        try:
            yield
        finally:
            self.give(peer, nbytes)
