"""A tensor as it travels, and a message of tensors that are still being written."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from swarmnode.filling import Filling, finish
from swarmnode.wire import call_pb2 as wire

DTYPE_BYTES = {"f64": 8, "i64": 8, "f32": 4, "i32": 4, "u32": 4, "bf16": 2, "f16": 2, "u16": 2, "i8": 1, "u8": 1}


@dataclass(frozen=True, slots=True)
class WireTensor:
    """A tensor as it travels: `data` holds the elements (little endian, row major) or a codec's bytes of them. Where it
    has a `filling`, some may not be written yet: a transport sends what is, and waits for the rest."""

    dtype: str
    shape: tuple[int, ...]
    data: memoryview | bytes | bytearray
    codec: str = "raw"
    filling: Filling | None = field(default=None, compare=False, repr=False)

    @property
    def nbytes(self) -> int:
        return memoryview(self.data).nbytes

    @property
    def complete(self) -> bool:
        return self.filling is None or self.filling.complete

    def spec(self) -> wire.TensorSpec:
        return wire.TensorSpec(dtype=self.dtype, shape=self.shape, nbytes=self.nbytes, codec=self.codec)


class Draft:
    """A message whose tensors have memory and sizes: enough to begin to send it while `finish` writes the rest."""

    __slots__ = ("_write", "tensors")

    def __init__(self, tensors: Sequence[WireTensor], write: Callable[[], None] | None = None) -> None:
        """`write` completes `tensors`, in their order; None: they are."""
        self.tensors, self._write = tensors, write

    @property
    def complete(self) -> bool:
        return all(tensor.complete for tensor in self.tensors)

    def finish(self) -> Sequence[WireTensor]:
        """The tensors, complete; in the thread that made the draft. What stops it is told to all who wait, too."""
        write, self._write = self._write, None
        finish([tensor.filling for tensor in self.tensors if tensor.filling is not None], write)
        return self.tensors

    async def finished(self) -> None:
        """Returns when all is written. Raises LocalFault when it never will be."""
        for tensor in self.tensors:
            if tensor.filling is not None:
                await tensor.filling.until(tensor.nbytes)
