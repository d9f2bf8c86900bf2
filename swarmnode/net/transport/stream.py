"""A libp2p stream, piped by p2pd through a unix socket: ordered bytes without lengths, deadlines, or proof of an end.

asyncio's StreamReader makes an additional copy and wakes a coroutine for each 32 KiB that p2pd writes. Here the kernel
writes directly into a tensor's memory, and the reader wakes once, when it is full.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import cast

from swarmnode.base.errors import cause_of
from swarmnode.base.header import VERSION
from swarmnode.base.uplink_scheduler import BULK_BYTES
from swarmnode.base.wire_tensor import ReadyWatermark
from swarmnode.net.transport.throttle import RateThrottle

LOOKAHEAD_BYTES = BULK_BYTES  # bytes that may arrive before a read; small calls fit, big ones copy little
FRAME_BYTES = 512 << 10  # frames of 256 KiB to 1 MiB are fastest (measured)
# A transfer without a byte for so long ends; above a frozen peer's hiccup, below p2pd's own 39.9 s.
STALL_S = 30.0  # curl's --speed-time, by default
LEAST_BYTES_PER_S = 8 << 10  # guess: a sixteenth of a home's 1 Mbit/s: eight concurrent calls pass on such a line
LEAST_SPAN_S = 10.0  # guess: a transfer may be slower, or stall, for so long


class P2pdStream(asyncio.BufferedProtocol):
    """A stream with at most one reader and one writer at a time. Both get ConnectionResetError once it is lost.

    `accepted` is called once if the other side opened the stream.
    """

    __slots__ = (
        "_accepted",
        "_awaited",
        "_comer",
        "_end",
        "_filled",
        "_lookahead",
        "_loop",
        "_lost",
        "_on_lost",
        "_paused",
        "_reader",
        "_start",
        "_target",
        "_transport",
        "_writer",
        "_writing_paused",
        "bytes_in",
        "bytes_out",
        "slowest",
        "throttle",
        "version",
    )

    def __init__(self, accepted: Callable[[P2pdStream], None] | None = None) -> None:
        self._accepted = accepted
        self.version = VERSION  # of the wire, as both sides agreed when the stream was opened
        self._loop = asyncio.get_running_loop()
        self._lookahead = memoryview(bytearray(LOOKAHEAD_BYTES))
        self._start = self._end = 0
        self._target: memoryview | None = None
        self._filled = 0
        self._paused = False
        self._writing_paused = False
        self._lost: str | None = None
        self._on_lost: Callable[[], object] | None = None
        self._reader: asyncio.Future[None] | None = None
        self._writer: asyncio.Future[None] | None = None
        self._comer: asyncio.Future[None] | None = None
        self._awaited = 0  # `bytes_in` that it waits for
        self._transport: asyncio.Transport | None = None
        self.bytes_in = 0
        self.bytes_out = 0
        self.slowest = (STALL_S, 1)  # (seconds, least bytes in them); a slower transfer ends
        self.throttle: RateThrottle | None = None  # for calls; control requests to our own p2pd are not counted

    # Callbacks from asyncio.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is not a subclass
        self._transport.set_write_buffer_limits(high=2 * FRAME_BYTES, low=FRAME_BYTES)
        if self._accepted is not None:
            self._accepted(self)

    def get_buffer(self, sizehint: int) -> memoryview:
        if self._target is not None:
            return self._target[self._filled :]
        return self._lookahead[self._end :]

    def buffer_updated(self, nbytes: int) -> None:
        self.bytes_in += nbytes
        if self.throttle is not None:
            self.throttle.down.total_nbytes += nbytes
        if self.bytes_in >= self._awaited:
            _wake(self._comer)
        if self._target is not None:
            self._filled += nbytes
            if self._filled == len(self._target):
                self._target = None
                _wake(self._reader)
            return
        self._end += nbytes
        if self._end == LOOKAHEAD_BYTES:
            self._pause()
        _wake(self._reader)
        _wake(self._writer)  # an answer before the request was complete: stop writing

    def eof_received(self) -> bool:
        self._lose("the stream ended")
        return False

    def connection_lost(self, error: Exception | None) -> None:
        self._lose(cause_of(error) if error else "the stream ended")

    def pause_writing(self) -> None:
        self._writing_paused = True

    def resume_writing(self) -> None:
        self._writing_paused = False
        _wake(self._writer)

    # Interface.

    @property
    def lost(self) -> bool:
        return self._lost is not None

    @property
    def buffered(self) -> int:
        """Bytes that have arrived unread."""
        return self._end - self._start

    @property
    def consumed(self) -> int:
        """Bytes read so far."""
        return self.bytes_in - self.buffered

    def when_lost(self, callback: Callable[[], object] | None) -> None:
        """Call `callback` once if the stream is lost later. Raises ConnectionResetError if it is lost already."""
        if callback is not None:
            self._check()
        self._on_lost = callback

    async def read(self, nbytes: int) -> bytes:
        """Exactly `nbytes`, which the caller has bounded. Raises ConnectionResetError."""
        if nbytes > LOOKAHEAD_BYTES:
            whole = bytearray(nbytes)
            await self.read_into(memoryview(whole))
            return bytes(whole)
        while self.buffered < nbytes:
            self._check()
            if LOOKAHEAD_BYTES - self._start < nbytes:
                self._compact()
            self._resume()
            await self._wait_readable()
        taken = bytes(self._lookahead[self._start : self._start + nbytes])
        self._skip(nbytes)
        return taken

    async def read_into(self, target: memoryview) -> None:
        """Fill `target` (flat bytes). Raises ConnectionResetError if the stream is lost or slower than `slowest`, not
        counting our own throttle's waits."""
        if self.throttle is not None and self.throttle.down.bps is not None:
            while len(target) > (nbytes := self.throttle.down.piece_nbytes):
                await self.throttle.down.spend(nbytes)
                await self._fill(target[:nbytes])
                target = target[nbytes:]
            await self.throttle.down.spend(len(target))
        await self._fill(target)

    async def _fill(self, target: memoryview) -> None:
        ready = min(self.buffered, len(target))
        target[:ready] = self._lookahead[self._start : self._start + ready]
        self._skip(ready)
        if ready == len(target):
            return
        self._target = target[ready:]
        self._filled = 0
        within_s, nbytes = self.slowest
        try:
            while self._target is not None:
                self._check()
                self._resume()
                before = self._filled
                try:
                    async with asyncio.timeout(within_s):
                        await self._wait_readable()
                except TimeoutError:
                    if self._target is not None and (came := self._filled - before) < nbytes:
                        raise ConnectionResetError(f"only {came} bytes arrived in {within_s:.0f} s") from None
        finally:
            if self._target is not None:  # half a tensor: the rest of the stream cannot be parsed
                self._target = None
                self.abort()

    async def discard(self) -> None:
        """Read and drop data until the other side ends the stream. The caller bounds the time."""
        while not self.lost:
            self._skip(self.buffered)
            self._resume()
            await self._wait_readable()

    async def until_in(self, bytes_in: int) -> None:
        """Return once so many bytes have ever come in; one at a time may wait. Raises ConnectionResetError."""
        assert self._comer is None, "two wait for what comes in on one stream"
        while self.bytes_in < bytes_in:
            self._check()
            self._awaited = bytes_in
            self._comer = self._loop.create_future()
            try:
                await self._comer
            finally:
                self._comer = None

    async def write(
        self, part: bytes | memoryview, watermark: ReadyWatermark | None = None, *, beside: bool = False
    ) -> bool:
        """Hand `part` to p2pd, frame by frame; with `watermark`, each frame once its bytes are final. Returns False if
        the peer sent anything before all was handed over, unless both sides send `beside` each other.

        Raises ConnectionResetError, and LocalFault if the writer of `part` failed. Final bytes must not change until
        the answer has come, because they are not copied.
        """
        view = memoryview(part)
        offset = 0
        while offset < len(view):
            frame = view[offset : offset + (FRAME_BYTES if self.throttle is None else self.throttle.up.piece_nbytes)]
            offset += len(frame)
            if watermark is not None and not await self._until_filled(watermark, offset, beside=beside):
                return False
            if self.throttle is not None and self.throttle.up.bps is not None:
                await self.throttle.up.spend(len(frame))
            while self._writing_paused:
                self._check()
                if self.buffered and not beside:
                    return False
                await self._wait_writable(self._loop.create_future())
            self._check()
            assert self._transport is not None
            self._transport.write(frame)
            self.bytes_out += len(frame)
            if self.throttle is not None:
                self.throttle.up.total_nbytes += len(frame)
        return True

    async def _until_filled(self, watermark: ReadyWatermark, nbytes: int, *, beside: bool) -> bool:
        """Wait for the first `nbytes` to be final; False if the peer sent anything before that, unless `beside`."""
        while watermark.ready_nbytes < nbytes:
            self._check()
            watermark.check()
            if self.buffered and not beside:
                return False
            waiter = self._loop.create_future()
            watermark.wake(waiter, nbytes)
            try:
                await self._wait_writable(waiter)
            finally:
                watermark.forget(waiter)
        return True

    async def _wait_writable(self, waiter: asyncio.Future[None]) -> None:
        """Wait until writing may be possible again; `waiter` may be resolved by others, too."""
        assert self._writer is None, "two writers on one stream"
        self._writer = waiter
        try:
            await waiter
        finally:
            self._writer = None

    def close(self) -> None:
        """Close the stream after written data has left. The other side may lose data unless it confirmed receipt."""
        if self._transport is not None:
            self._transport.close()

    def abort(self) -> None:
        """Close the stream now, and drop unwritten data."""
        self._lose("the stream was aborted here")
        if self._transport is not None:
            self._transport.abort()

    # Internals.

    def _check(self) -> None:
        if self._lost is not None:
            raise ConnectionResetError(self._lost)

    def _lose(self, why: str) -> None:
        if self._lost is not None:
            return
        self._lost = why
        _wake(self._reader)
        _wake(self._writer)
        _wake(self._comer)
        if self._on_lost is not None:
            callback = self._on_lost
            self._on_lost = None
            callback()

    def _skip(self, nbytes: int) -> None:
        self._start += nbytes
        if self._start == self._end:
            self._start = self._end = 0

    def _compact(self) -> None:
        kept = bytes(self._lookahead[self._start : self._end])
        self._lookahead[: len(kept)] = kept
        self._start = 0
        self._end = len(kept)

    def _pause(self) -> None:
        if not self._paused and self._transport is not None and self._lost is None:
            self._paused = True
            self._transport.pause_reading()

    def _resume(self) -> None:
        if self._paused and self._transport is not None and (self._target is not None or self._end < LOOKAHEAD_BYTES):
            self._paused = False
            if self._lost is None:
                self._transport.resume_reading()

    async def _wait_readable(self) -> None:
        assert self._reader is None, "two readers on one stream"
        self._reader = self._loop.create_future()
        try:
            await self._reader
        finally:
            self._reader = None


def _wake(waiter: asyncio.Future[None] | None) -> None:
    if waiter is not None and not waiter.done():
        waiter.set_result(None)
