"""Tensors in wire form, and messages whose tensors are still being written."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Self

from swarmnode.base.errors import LocalFault
from swarmnode.base.wire import call_pb2 as wire

DTYPE_BYTES = {"f64": 8, "i64": 8, "f32": 4, "i32": 4, "u32": 4, "bf16": 2, "f16": 2, "u16": 2, "i8": 1, "u8": 1}


class ReadyWatermark:
    """Watermark of `nbytes` that are written in order. It only rises, and stops for good when writing fails. One thread
    writes; any number of coroutines, in any event loops, wait."""

    __slots__ = ("_lock", "_waiters", "error", "nbytes", "ready_nbytes")

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.ready_nbytes = 0  # the number of leading bytes that are final
        self.error: BaseException | None = None  # the error that stopped the writer, or None
        self._lock = threading.Lock()
        self._waiters: dict[asyncio.Future[None], int] = {}

    @property
    def complete(self) -> bool:
        return self.ready_nbytes == self.nbytes

    # The writer.

    def reach(self, nbytes: int) -> None:
        """Mark the first `nbytes` as final and wake exactly the waiters that need no more."""
        assert self.ready_nbytes <= nbytes <= self.nbytes, f"{nbytes} bytes after {self.ready_nbytes}"
        with self._lock:
            self.ready_nbytes = nbytes
            self._wake([waiter for waiter, wanted in self._waiters.items() if wanted <= nbytes])

    def fail(self, error: BaseException) -> None:
        """Stop the watermark with `error`; the remaining bytes will never be final. Does nothing if all are."""
        with self._lock:
            if not self.complete and self.error is None:
                self.error = error
                self._wake(list(self._waiters))

    def _wake(self, waiters: list[asyncio.Future[None]]) -> None:
        for waiter in waiters:
            del self._waiters[waiter]
            loop = waiter.get_loop()
            if not loop.is_closed():
                loop.call_soon_threadsafe(_resolve, waiter)

    # The readers.

    def check(self) -> None:
        """Raises LocalFault if the writer failed."""
        if self.error is not None:
            raise LocalFault(f"the message to send could not be produced: {self.error!r}") from self.error

    def wake(self, waiter: asyncio.Future[None], nbytes: int) -> None:
        """Resolve `waiter` once the first `nbytes` are final or the writer failed. Call `forget` afterwards."""
        with self._lock:
            self._waiters[waiter] = nbytes
            if self.ready_nbytes >= nbytes or self.error is not None:
                self._wake([waiter])

    def forget(self, waiter: asyncio.Future[None]) -> None:
        """Undo `wake` for `waiter`."""
        with self._lock:
            self._waiters.pop(waiter, None)

    async def until(self, nbytes: int) -> None:
        """Return once the first `nbytes` are final. Raises LocalFault if the writer failed."""
        while self.ready_nbytes < nbytes:
            self.check()
            waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self.wake(waiter, nbytes)
            try:
                await waiter
            finally:
                self.forget(waiter)


def finish(fillings: Sequence[ReadyWatermark], write: Callable[[], None] | None) -> None:
    """Complete the watermarks by calling `write`. Its error is raised here, and as a LocalFault at all waiters."""
    try:
        if write is not None:
            write()
        assert all(watermark.complete for watermark in fillings), "not written to the end, or being written"
    except BaseException as error:
        for watermark in fillings:
            watermark.fail(error)
        raise


def _resolve(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)


@dataclass(frozen=True, slots=True)
class WireTensor:
    """A tensor in wire form: `data` holds the elements (little endian, row major) or a codec's bytes of them. With a
    `watermark`, the last elements may not be written yet: a transport sends the final prefix and waits for the rest."""

    dtype: str
    shape: tuple[int, ...]
    data: memoryview | bytes | bytearray
    codec: str = "raw"
    watermark: ReadyWatermark | None = field(default=None, compare=False, repr=False)
    nbytes: int = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "nbytes", memoryview(self.data).nbytes)

    @property
    def complete(self) -> bool:
        return self.watermark is None or self.watermark.complete

    def spec(self) -> wire.TensorSpec:
        return wire.TensorSpec(dtype=self.dtype, shape=self.shape, nbytes=self.nbytes, codec=self.codec)


class StreamingMessage:
    """A message whose tensors have memory and sizes: sending can begin while `finish` writes the rest."""

    __slots__ = ("_write", "beside", "tensors")

    def __init__(self, tensors: Sequence[WireTensor], write: Callable[[], None] | None = None) -> None:
        """`write` completes `tensors` in order; None if they are complete."""
        self.tensors = tensors
        self._write = write
        self.beside = False

    def written_beside(self) -> Self:
        """The same message: its `finish` needs no device, and may run beside the device's other work."""
        self.beside = True
        return self

    @property
    def complete(self) -> bool:
        return all(tensor.complete for tensor in self.tensors)

    def finish(self) -> Sequence[WireTensor]:
        """Complete the tensors and return them. Runs in the thread that made the message, or `beside` it. An error is
        raised here and at all waiters."""
        write = self._write
        self._write = None
        finish([tensor.watermark for tensor in self.tensors if tensor.watermark is not None], write)
        return self.tensors

    async def finished(self) -> None:
        """Return once all tensors are complete. Raises LocalFault if the writer failed."""
        for tensor in self.tensors:
            if tensor.watermark is not None:
                await tensor.watermark.until(tensor.nbytes)
