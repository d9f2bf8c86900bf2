"""How a flat buffer of parameters becomes wire tensors and back: the interface of all codecs (design section 5)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

import torch

from swarmnode.ports import WireTensor

BLOCK = 1 << 18  # elements a pass takes at once, 1 MiB of float32; measured: 2^18 is the best of 2^12 .. 2^19


class Codec(ABC):
    """Encodes flat buffers of P parameters. One instance belongs to one replica and is used on its compute thread only.

    What comes from a peer goes through `check` first, which believes nothing, and then `read`, which trusts. Both work
    block by block in a fixed scratch buffer, so that a packet costs no memory beyond its own bytes.
    """

    name: ClassVar[str]
    """As the manifest and the handshake say it."""

    lossy: ClassVar[bool]
    """False when decoding gives back every float32 bit."""

    tensors: ClassVar[int]
    """Wire tensors a flat buffer becomes."""

    @abstractmethod
    def nbytes(self, parameters: int) -> int:
        """Bytes of the wire tensors of `parameters` elements, at most."""

    @abstractmethod
    def encode(self, flat: torch.Tensor) -> list[WireTensor]:
        """`flat` [P] as wire tensors with memory of their own: `flat` may change while they travel."""

    @abstractmethod
    def check(self, tensors: Sequence[WireTensor], parameters: int) -> None:
        """Raises RemoteFault unless `tensors` are what `encode` makes of `parameters` finite elements."""

    @abstractmethod
    def read(self, tensors: Sequence[WireTensor], start: int, out: torch.Tensor) -> None:
        """Write elements [start, start + len(out)) of checked `tensors` into `out`, of any float dtype and device."""

    def decode(self, tensors: Sequence[WireTensor], out: torch.Tensor) -> None:
        """Write all of `tensors` into `out` [P]. Raises RemoteFault, and changes nothing, when they are bad."""
        self.check(tensors, out.numel())
        self.read(tensors, 0, out)
