"""Tensors in wire form, and messages whose tensors are still being written."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Self

from swarmnode.ready_watermark import ReadyWatermark, finish
from swarmnode.wire import call_pb2 as wire

DTYPE_BYTES = {"f64": 8, "i64": 8, "f32": 4, "i32": 4, "u32": 4, "bf16": 2, "f16": 2, "u16": 2, "i8": 1, "u8": 1}


@dataclass(frozen=True, slots=True)
class WireTensor:
    """A tensor in wire form: `data` holds the elements (little endian, row major) or a codec's bytes of them. With a
    `watermark`, the last elements may not be written yet: a transport sends the final prefix and waits for the rest."""

    dtype: str
    shape: tuple[int, ...]
    data: memoryview | bytes | bytearray
    codec: str = "raw"
    watermark: ReadyWatermark | None = field(default=None, compare=False, repr=False)

    @property
    def nbytes(self) -> int:
        return memoryview(self.data).nbytes

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
        self.tensors, self._write = tensors, write
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
        write, self._write = self._write, None
        finish([tensor.watermark for tensor in self.tensors if tensor.watermark is not None], write)
        return self.tensors

    async def finished(self) -> None:
        """Return once all tensors are complete. Raises LocalFault if the writer failed."""
        for tensor in self.tensors:
            if tensor.watermark is not None:
                await tensor.watermark.until(tensor.nbytes)
