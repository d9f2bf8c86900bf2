"""Warm streams: opening a stream costs two round trips, so a used one is kept for the next call to that peer."""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Awaitable, Callable

from swarmnode.errors import Busy
from swarmnode.ids import PeerId, short
from swarmnode.transport.stream import P2pdStream

IDLE_S = 30.0  # guess: a few announce periods
IDLE_PER_PEER_MAX = 8  # guess: overlapping calls to one peer in a steady pipeline
IDLE_MAX = 256  # guess: 256 sockets and 4 MiB of look-ahead
IN_USE_MAX = 64  # guess: calls in flight to one peer; four times the feeder's window


class StreamPool:
    """Streams by peer; a stream carries one call at a time. `opener` opens a new one."""

    def __init__(self, opener: Callable[[PeerId], Awaitable[P2pdStream]]) -> None:
        self._opener = opener
        self._idle: dict[PeerId, deque[tuple[float, P2pdStream]]] = {}
        self._in_use: Counter[PeerId] = Counter()
        self._idle_count = 0

    async def take(self, peer: PeerId) -> P2pdStream:
        """A stream to `peer`: the most recently used open one, else a new one. Return it by `give`, `drop` or `end`.

        Raises Busy if IN_USE_MAX calls to `peer` are in flight, and the errors of `opener`.
        """
        if self._in_use[peer] >= IN_USE_MAX:
            raise Busy(f"{IN_USE_MAX} calls to {short(peer)} are in flight already", 0.1)
        self._in_use[peer] += 1
        try:
            return self._warm(peer) or await self._opener(peer)
        except BaseException:
            self._release(peer)
            raise

    def _warm(self, peer: PeerId) -> P2pdStream | None:
        """The most recently used stream that is still open, or None. Nothing has been written yet, so a stale one costs
        nothing."""
        idle = self._idle.get(peer)
        while idle:
            _, stream = idle.pop()
            self._idle_count -= 1
            if not stream.lost and not stream.buffered:
                return stream
            stream.abort()
        self._idle.pop(peer, None)
        return None

    def give(self, peer: PeerId, stream: P2pdStream) -> None:
        """Keep `stream`, whose call is complete, for the next one."""
        self._release(peer)
        idle = self._idle.setdefault(peer, deque())
        if stream.lost or len(idle) >= IDLE_PER_PEER_MAX or self._idle_count >= IDLE_MAX:
            stream.close()
            return
        idle.append((asyncio.get_running_loop().time(), stream))
        self._idle_count += 1

    def drop(self, peer: PeerId, stream: P2pdStream, *, suspect: bool) -> None:
        """Abort `stream`, whose state is unknown. `suspect`: distrust the other streams to `peer`, too."""
        self._release(peer)
        stream.abort()
        if suspect:
            self.forget(peer)

    def end(self, peer: PeerId, stream: P2pdStream) -> None:
        """Close `stream` in order: the call is complete, and the peer reads no further one."""
        self._release(peer)
        stream.close()

    def forget(self, peer: PeerId) -> None:
        """Close the idle streams to `peer`."""
        for _, stream in self._idle.pop(peer, ()):
            self._idle_count -= 1
            stream.abort()

    def sweep(self) -> None:
        """Close streams idle for IDLE_S, and drop those closed by peers."""
        oldest = asyncio.get_running_loop().time() - IDLE_S
        for peer, idle in list(self._idle.items()):
            kept = deque(entry for entry in idle if entry[0] > oldest and not entry[1].lost)
            for entry in idle:
                if entry not in kept:
                    entry[1].close()
            self._idle_count -= len(idle) - len(kept)
            if kept:
                self._idle[peer] = kept
            else:
                del self._idle[peer]

    def close(self) -> None:
        """Close every idle stream."""
        for peer in list(self._idle):
            self.forget(peer)

    def _release(self, peer: PeerId) -> None:
        self._in_use[peer] -= 1
        if not self._in_use[peer]:
            del self._in_use[peer]
