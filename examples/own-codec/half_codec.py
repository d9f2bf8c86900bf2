"""A codec of one's own for swarmnode: each parameter is rounded to IEEE 754 half precision (float16).

Error: at most 2^-11 of a number from 2^-14 on, 2^-25 below; numbers above 65,504 are refused by the receiver.
Packet: 2 P bytes, little endian, in the order of the parameters.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import numpy as np
import torch

from swarmnode.base.errors import RemoteFault
from swarmnode.train.gossip.compression.codec import BLOCK, TILE, Bytes, Codec, Done
from swarmnode.base.ports import WireTensor

ITEM_BYTES = 2


class Half(Codec):
    """Half the bytes of fp32, as bf16, with three more bits of precision and a smaller range."""

    name: ClassVar[str] = "half"
    tensors: ClassVar[int] = 1

    def nbytes(self, parameters: int) -> int:
        return ITEM_BYTES * parameters

    def write(self, wire: Bytes, flat: torch.Tensor, reference: torch.Tensor | None, seed: int, done: Done) -> None:
        halves = torch.from_numpy(wire).view(torch.float16)
        for start in range(0, flat.numel(), TILE):
            end = min(start + TILE, flat.numel())
            halves[start:end].copy_(flat[start:end])
            done(ITEM_BYTES * end)  # these bytes are final: they may be sent while the next tile is coded

    def check(self, tensors: Sequence[WireTensor], parameters: int) -> None:
        form = [(tensor.codec, tensor.dtype, tuple(tensor.shape), tensor.nbytes) for tensor in tensors]
        expected = [(self.name, "f32", (parameters,), self.nbytes(parameters))]
        if form != expected:
            raise RemoteFault(f"half packet of (codec, dtype, shape, bytes) {form}; expected {expected}")
        for start in range(0, parameters, BLOCK):
            if not np.isfinite(self._halves(tensors, start, min(BLOCK, parameters - start))).all():
                raise RemoteFault(f"half packet with a number that is not finite, from element {start} on")

    def read(
        self, tensors: Sequence[WireTensor], start: int, out: torch.Tensor, reference: torch.Tensor | None = None
    ) -> None:
        for offset in range(0, out.numel(), BLOCK):
            part = out[offset : offset + BLOCK]
            part.copy_(torch.from_numpy(self._halves(tensors, start + offset, part.numel())))

    @staticmethod
    def _halves(tensors: Sequence[WireTensor], start: int, count: int) -> np.ndarray:
        """Elements [start, start + count) as float16, in memory of their own: a frame may lie at an odd address."""
        data = np.frombuffer(tensors[0].data, np.uint8, ITEM_BYTES * count, ITEM_BYTES * start)
        return data.copy().view("<f2")
