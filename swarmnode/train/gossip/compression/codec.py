"""The interface of all codecs: encode a flat buffer of parameters as wire tensors and decode them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import ClassVar, Protocol, Self

import numpy as np
import numpy.typing as npt
import torch

from swarmnode.base.ports import StreamingMessage, WireTensor
from swarmnode.base.wire_tensor import ReadyWatermark

BLOCK = 1 << 18  # elements per pass, 1 MiB of float32; measured: 2^18 is the best of 2^12 .. 2^19
TILE = 1 << 19  # elements whose steps are sent together; measured: work on steps 0.08 ns an element, 0.27 at 2^17
CHUNK = 1 << 18  # elements per quantising pass; measured: 2^17 costs up to a tenth more, 2^16 up to a third
BLOCK_ELEMENTS = 64  # elements that share a step

Bytes = npt.NDArray[np.uint8]
Done = Callable[[int], None]
"""Called with the number of leading bytes of a packet that are final."""


class InnerLoops(Protocol):
    """A codec's code in C."""

    def build(self) -> bool:
        """Compile it, unless already done. False if this machine cannot: then torch codes packets, slower."""

    def unused(self) -> AbstractContextManager[None]:
        """Codecs made within this context use torch alone."""


class Codec(ABC):
    """Encodes flat buffers of P parameters. An instance belongs to one replica and is used only on its compute thread.

    A packet is one wire tensor, whose size `draft` knows before it reads a weight. Data from a peer passes `check`
    first, which validates everything, and then `read`, which trusts it. Both work block by block in a fixed scratch
    buffer, so a packet costs no memory beyond its own bytes.
    """

    name: ClassVar[str]
    """The name in manifest and handshake."""

    tensors: ClassVar[int]
    """Number of wire tensors per flat buffer."""

    relative: ClassVar[bool] = False
    """True if reading needs the receiver's own weights, which must be near the sender's; then `encode` needs the
    sender's weights of the last round."""

    library: ClassVar[InnerLoops | None] = None
    """Its inner loops in C, which a node builds as it starts."""

    of_delta: ClassVar[bool] = False
    """True for codecs of pseudo-gradients, which may keep a residual at the sender."""

    whitened: ClassVar[bool] = False
    """True for codecs of gradients that are best whitened first (swarmnode_methods/whitening.py)."""

    at_once: ClassVar[bool] = False
    """True where a packet is of all parameters at once: no byte is final before all are, and any part is read as
    slowly as the whole."""

    def another(self) -> Self:
        """A codec of the same kind and settings for another part of the weights. It has its own state but shares the
        work buffers."""
        return type(self)()

    @abstractmethod
    def nbytes(self, parameters: int) -> int:
        """Most bytes of the wire tensors of `parameters` elements."""

    def least_nbytes(self, parameters: int) -> int:
        """Fewest bytes: those of a message without earlier faults."""
        return self.nbytes(parameters)

    def at(self, round_index: int) -> None:  # noqa: B027 (most codecs are the same in every round)
        """Packets from now on are of this round: a schedule may change their coding, alike at all members."""

    def draft(self, flat: torch.Tensor, *, reference: torch.Tensor | None = None, seed: int = 0) -> StreamingMessage:
        """`flat` [P] as wire tensors with their own memory: once it is finished, `flat` may change.

        `reference` [P] sets the steps of a relative codec: the slow weights, so that flat - reference is the
        pseudo-gradient. `seed` (64 bits) determines all randomness in the rounding: give each message its own.
        """
        wire = np.empty(self.begin(flat), np.uint8)  # numpy requests huge pages: 0.8 to 6.6 GB/s, measured
        watermark = ReadyWatermark(wire.size)

        def write() -> None:
            with torch.no_grad():
                self.write(wire, flat.detach(), reference, seed, watermark.reach)
            watermark.reach(wire.size)

        return StreamingMessage([self.tensor(flat.numel(), wire.data.toreadonly(), watermark)], write)

    def encode(self, flat: torch.Tensor, *, reference: torch.Tensor | None = None, seed: int = 0) -> list[WireTensor]:
        """The finished result of `draft`."""
        return list(self.draft(flat, reference=reference, seed=seed).finish())

    def begin(self, flat: torch.Tensor) -> int:
        """The size of the packet of `flat`, which `write` will fill; fixes the codec's state for it."""
        return self.nbytes(flat.numel())

    def tensor(self, parameters: int, data: memoryview, watermark: ReadyWatermark) -> WireTensor:
        """`data` as the packet's single wire tensor."""
        return WireTensor("f32", (parameters,), data, self.name, watermark)

    @abstractmethod
    def write(self, wire: Bytes, flat: torch.Tensor, reference: torch.Tensor | None, seed: int, done: Done) -> None:
        """Fill `wire` with the packet of `flat`. Unless the codec is `at_once`, `done` must be called with the number
        of final bytes after each TILE elements: these are sent while the rest is coded. Works in the codec's own
        buffers and allocates nothing per tile."""

    def take_back(self, tensors: Sequence[WireTensor], flat: torch.Tensor) -> None:  # noqa: B027 (most keep nothing)
        """The last message, `tensors` made of `flat`, is not sent: restore the state kept for the next."""

    @abstractmethod
    def check(self, tensors: Sequence[WireTensor], parameters: int) -> None:
        """Raises RemoteFault unless `tensors` can be an encoding of `parameters` finite elements."""

    @abstractmethod
    def read(
        self, tensors: Sequence[WireTensor], start: int, out: torch.Tensor, reference: torch.Tensor | None = None
    ) -> None:
        """Write elements [start, start + len(out)) of checked `tensors` into `out`, of any float dtype and device.

        `reference`, of the shape of `out` but in other memory, holds the receiver's own values of these elements; a
        relative codec needs it. `start` is a multiple of BLOCK_ELEMENTS unless the codec says otherwise.
        """

    @torch.no_grad()
    def products(self, packets: Sequence[Sequence[WireTensor]], like: torch.Tensor, block: int) -> torch.Tensor:
        """The inner product of each two of checked `packets` of pseudo-gradients, [R, R] float64. They are decoded in
        blocks of `block` elements on the device of `like` [P]."""
        products = torch.zeros(len(packets), len(packets), dtype=torch.float64)
        rows = like.new_empty(len(packets), block)
        for start in range(0, like.numel(), block):
            part = rows[:, : min(block, like.numel() - start)]
            for row, tensors in zip(part, packets, strict=True):
                self.read(tensors, start, row)
            products += (part @ part.T).to("cpu", torch.float64)
        return products

    @torch.no_grad()
    def add_up(
        self, packets: Sequence[Sequence[WireTensor]], shares: Sequence[float], out: torch.Tensor, theirs: torch.Tensor
    ) -> None:
        """Set `out` [P] to the sum of checked `packets` of pseudo-gradients, each times its share. They are added one
        after the other, each product rounded before: the same bits at all members. `theirs` [block] is scratch."""
        out.zero_()
        for start in range(0, out.numel(), theirs.numel()):
            part = out[start : start + theirs.numel()]
            read = theirs[: part.numel()]
            for tensors, share in zip(packets, shares, strict=True):
                self.read(tensors, start, read)
                part.add_(read.mul_(share))

    def decode(self, tensors: Sequence[WireTensor], out: torch.Tensor, reference: torch.Tensor | None = None) -> None:
        """Write all of `tensors` into `out` [P]. Raises RemoteFault, and changes nothing, if they are malformed."""
        self.check(tensors, out.numel())
        self.read(tensors, 0, out, reference)
