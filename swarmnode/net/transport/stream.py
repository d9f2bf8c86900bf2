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


class Lookahead:
    """Bytes that arrive before they are read, at most LOOKAHEAD_BYTES."""

    def __init__(self) -> None:
        self._bytes = memoryview(bytearray(LOOKAHEAD_BYTES))
        self._start = 0
        self._end = 0

    def __len__(self) -> int:
        return self._end - self._start

    @property
    def full(self) -> bool:
        """Whether nothing more may arrive behind what is unread."""
        return self._end == LOOKAHEAD_BYTES

    @property
    def room(self) -> memoryview:
        """The memory for the next bytes; `grow` says how many were put there."""
        return self._bytes[self._end :]

    def grow(self, nbytes: int) -> None:
        """Add the first `nbytes` of `room`."""
        self._end += nbytes

    def fit(self, nbytes: int) -> None:
        """Make room for `nbytes` from the first unread one on."""
        if LOOKAHEAD_BYTES - self._start >= nbytes:
            return
        kept = bytes(self._bytes[self._start : self._end])
        self._bytes[: len(kept)] = kept
        self._start = 0
        self._end = len(kept)

    def take(self, nbytes: int) -> memoryview:
        """The first `nbytes` unread ones, valid until more arrive."""
        taken = self._bytes[self._start : self._start + nbytes]
        self._start += nbytes
        if self._start == self._end:
            self._start = 0
            self._end = 0
        return taken


class Waiter:
    """The wait of one coroutine at a time."""

    def __init__(self) -> None:
        self._future: asyncio.Future[None] | None = None

    async def wait(self, future: asyncio.Future[None] | None = None) -> None:
        """Return once `wake` is called, or `future` is done."""
        assert self._future is None, "two wait for the same of one stream"
        self._future = asyncio.get_running_loop().create_future() if future is None else future
        try:
            await self._future
        finally:
            self._future = None

    def wake(self) -> None:
        """End the wait, if there is one."""
        if self._future is not None and not self._future.done():
            self._future.set_result(None)


class P2pdStream(asyncio.BufferedProtocol):
    """A stream with at most one reader and one writer at a time. Both get ConnectionResetError once it is lost.

    `accepted` is called once if the other side opened the stream.
    """

    def __init__(self, accepted: Callable[[P2pdStream], None] | None = None) -> None:
        self._accepted = accepted
        self.version = VERSION  # of the wire, as both sides agreed when the stream was opened
        self._lookahead = Lookahead()
        self._target: memoryview | None = None
        self._filled = 0
        self._paused = False
        self._writing_paused = False
        self._lost: str | None = None
        self._on_lost: Callable[[], object] | None = None
        self._reader = Waiter()
        self._writer = Waiter()
        self._comer = Waiter()
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
        return self._lookahead.room

    def buffer_updated(self, nbytes: int) -> None:
        self.bytes_in += nbytes
        if self.throttle is not None:
            self.throttle.down.total_nbytes += nbytes
        if self.bytes_in >= self._awaited:
            self._comer.wake()
        if self._target is not None:
            self._filled += nbytes
            if self._filled == len(self._target):
                self._target = None
                self._reader.wake()
            return
        self._lookahead.grow(nbytes)
        if self._lookahead.full:
            self._pause()
        self._reader.wake()
        self._writer.wake()  # an answer before the request was complete: stop writing

    def eof_received(self) -> bool:
        self._lose("the stream ended")
        return False

    def connection_lost(self, error: Exception | None) -> None:
        self._lose(cause_of(error) if error else "the stream ended")

    def pause_writing(self) -> None:
        self._writing_paused = True

    def resume_writing(self) -> None:
        self._writing_paused = False
        self._writer.wake()

    # Interface.

    @property
    def lost(self) -> bool:
        return self._lost is not None

    @property
    def buffered(self) -> int:
        """Bytes that have arrived unread."""
        return len(self._lookahead)

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
            self._lookahead.fit(nbytes)
            self._resume()
            await self._reader.wait()
        return bytes(self._lookahead.take(nbytes))

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
        target[:ready] = self._lookahead.take(ready)
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
                        await self._reader.wait()
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
            self._lookahead.take(self.buffered)
            self._resume()
            await self._reader.wait()

    async def until_in(self, bytes_in: int) -> None:
        """Return once so many bytes have ever come in; one at a time may wait. Raises ConnectionResetError."""
        while self.bytes_in < bytes_in:
            self._check()
            self._awaited = bytes_in
            await self._comer.wait()

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
                await self._writer.wait()
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
            waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            watermark.wake(waiter, nbytes)
            try:
                await self._writer.wait(waiter)
            finally:
                watermark.forget(waiter)
        return True

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
        self._reader.wake()
        self._writer.wake()
        self._comer.wake()
        if self._on_lost is not None:
            callback = self._on_lost
            self._on_lost = None
            callback()

    def _pause(self) -> None:
        if not self._paused and self._transport is not None and self._lost is None:
            self._paused = True
            self._transport.pause_reading()

    def _resume(self) -> None:
        if self._paused and self._transport is not None and (self._target is not None or not self._lookahead.full):
            self._paused = False
            if self._lost is None:
                self._transport.resume_reading()
