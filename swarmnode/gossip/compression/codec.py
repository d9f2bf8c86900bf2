"""How a flat buffer of parameters becomes wire tensors and back: the interface of all codecs (design section 5)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import ClassVar, Self

import numpy as np
import numpy.typing as npt
import torch

from swarmnode.filling import Filling
from swarmnode.ports import Draft, WireTensor

BLOCK = 1 << 18  # elements a pass takes at once, 1 MiB of float32; measured: 2^18 is the best of 2^12 .. 2^19
TILE = 1 << 19  # elements whose steps travel together; measured: work on steps 0.08 ns an element, 0.27 at 2^17
CHUNK = 1 << 18  # elements a quantising pass takes at once; measured: 2^17 costs up to a tenth more, 2^16 up to a third
BLOCK_ELEMENTS = 64  # elements that share a step, as in the measurements of design section 5

Bytes = npt.NDArray[np.uint8]
Done = Callable[[int], None]
"""Told that the first so many bytes of a packet are final."""


class Codec(ABC):
    """Encodes flat buffers of P parameters. One instance belongs to one replica and is used on its compute thread only.

    A packet is one wire tensor, whose size `draft` knows before it reads a weight. What comes from a peer goes through
    `check` first, which believes nothing, and then `read`, which trusts. Both work block by block in a fixed scratch
    buffer, so that a packet costs no memory beyond its own bytes.
    """

    name: ClassVar[str]
    """As the manifest and the handshake say it."""

    lossy: ClassVar[bool]
    """False when decoding gives back every float32 bit."""

    tensors: ClassVar[int]
    """Wire tensors a flat buffer becomes."""

    relative: ClassVar[bool] = False
    """True when reading needs the receiver's own weights, which the sender's are close to; then `encode` needs the
    sender's weights of the last round."""

    of_delta: ClassVar[bool] = False
    """True for codecs of pseudo-gradients, which may keep a residual at the sender."""

    def another(self) -> Self:
        """A codec of the same kind and settings for another part of the weights, in a state of its own; the buffers it
        works in are shared."""
        return type(self)()

    @abstractmethod
    def nbytes(self, parameters: int) -> int:
        """Bytes of the wire tensors of `parameters` elements, at most."""

    def least_nbytes(self, parameters: int) -> int:
        """At least: what a message has when nothing went wrong before."""
        return self.nbytes(parameters)

    def at(self, round_index: int) -> None:  # noqa: B027 (most codecs are the same in every round)
        """Packets from now on are of this round: a schedule may change how they are coded, alike at all members."""

    def draft(self, flat: torch.Tensor, *, reference: torch.Tensor | None = None, seed: int = 0) -> Draft:
        """`flat` [P] as wire tensors with memory of their own: once it is finished, `flat` may change.

        `reference` [P] is what a relative codec measures its steps by: the slow weights, so that flat - reference is
        the pseudo-gradient. `seed` (64 bits) decides all that is random in the rounding: give each message its own.
        """
        wire = np.empty(self.begin(flat), np.uint8)  # numpy asks for huge pages: 0.8 to 6.6 GB/s, measured
        filling = Filling(wire.size)

        def write() -> None:
            with torch.no_grad():
                self.write(wire, flat.detach(), reference, seed, filling.reach)
            filling.reach(wire.size)

        return Draft([self.tensor(flat.numel(), wire.data.toreadonly(), filling)], write)

    def encode(self, flat: torch.Tensor, *, reference: torch.Tensor | None = None, seed: int = 0) -> list[WireTensor]:
        """What `draft` makes, finished."""
        return list(self.draft(flat, reference=reference, seed=seed).finish())

    def begin(self, flat: torch.Tensor) -> int:
        """The bytes of the packet of `flat`, which `write` will fill: the codec's state is what that takes."""
        return self.nbytes(flat.numel())

    def tensor(self, parameters: int, data: memoryview, filling: Filling) -> WireTensor:
        """`data` as the one wire tensor of a packet."""
        return WireTensor("f32", (parameters,), data, self.name, filling)

    @abstractmethod
    def write(self, wire: Bytes, flat: torch.Tensor, reference: torch.Tensor | None, seed: int, done: Done) -> None:
        """Fill `wire` with the packet of `flat`; `done` hears after each tile what is final, where the rest can wait.
        Works in buffers that the codec has: no memory is taken for a tile."""

    def take_back(self, tensors: Sequence[WireTensor], flat: torch.Tensor) -> None:  # noqa: B027 (most keep nothing)
        """The last message, `tensors` made of `flat`, goes nowhere: what the codec keeps for the next is as before."""

    @abstractmethod
    def check(self, tensors: Sequence[WireTensor], parameters: int) -> None:
        """Raises RemoteFault unless `tensors` are what `encode` makes of `parameters` finite elements."""

    @abstractmethod
    def read(
        self, tensors: Sequence[WireTensor], start: int, out: torch.Tensor, reference: torch.Tensor | None = None
    ) -> None:
        """Write elements [start, start + len(out)) of checked `tensors` into `out`, of any float dtype and device.

        `reference`, alike in shape to `out` and not the same memory, holds the receiver's own values of these elements;
        a relative codec needs it. `start` is a multiple of BLOCK_ELEMENTS unless the codec says otherwise.
        """

    def decode(self, tensors: Sequence[WireTensor], out: torch.Tensor, reference: torch.Tensor | None = None) -> None:
        """Write all of `tensors` into `out` [P]. Raises RemoteFault, and changes nothing, when they are bad."""
        self.check(tensors, out.numel())
        self.read(tensors, 0, out, reference)
