"""Dense codecs: every parameter is sent as float32 or rounded to bfloat16 (nearest, ties to even)."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import ClassVar

import numpy as np
import torch

from swarmnode.base.errors import RemoteFault
from swarmnode.base.ports import WireTensor
from swarmnode.base.wire_tensor import ReadyWatermark
from swarmnode.model.tensor import check_finite
from swarmnode.train.gossip.compression.codec import BLOCK, TILE, Bytes, Codec, Done

assert sys.byteorder == "little", "wire tensors are little endian and are read here without swapping"


class Dense(Codec):
    """A wire tensor, with one element per parameter."""

    tensors: ClassVar[int] = 1
    dtype: ClassVar[torch.dtype]
    dtype_name: ClassVar[str]
    itemsize: ClassVar[int]

    def __init__(self) -> None:
        self._stage = torch.empty(BLOCK, dtype=self.dtype)  # aligned copy of a peer's bytes
        self._stage_bytes = self._stage.view(torch.uint8).numpy()
        self._block = torch.empty(BLOCK, dtype=torch.float32)

    def nbytes(self, parameters: int) -> int:
        return parameters * self.itemsize

    def tensor(self, parameters: int, data: memoryview, watermark: ReadyWatermark) -> WireTensor:
        return WireTensor(self.dtype_name, (parameters,), data, watermark=watermark)

    def write(self, wire: Bytes, flat: torch.Tensor, reference: torch.Tensor | None, seed: int, done: Done) -> None:
        out = torch.from_numpy(wire).view(self.dtype)
        for start in range(0, flat.numel(), TILE):
            end = min(start + TILE, flat.numel())
            out[start:end].copy_(flat[start:end])
            done(end * self.itemsize)

    def check(self, tensors: Sequence[WireTensor], parameters: int) -> None:
        if len(tensors) != 1:
            raise RemoteFault(f"{self.name} packet of {len(tensors)} tensors; it has 1")
        tensor = tensors[0]
        form = (tensor.codec or "raw", tensor.dtype, tuple(tensor.shape), tensor.nbytes)
        expected = ("raw", self.dtype_name, (parameters,), self.nbytes(parameters))
        if form != expected:
            raise RemoteFault(f"{self.name} packet of (codec, dtype, shape, bytes) {form}; expected {expected}")
        for start in range(0, parameters, BLOCK):
            block = self._block[: min(BLOCK, parameters - start)]
            self.read(tensors, start, block)
            check_finite(block, f"{self.name} packet, elements {start} to {start + block.numel()}")

    def read(
        self, tensors: Sequence[WireTensor], start: int, out: torch.Tensor, reference: torch.Tensor | None = None
    ) -> None:
        data = np.frombuffer(tensors[0].data, dtype=np.uint8)
        for offset in range(0, out.numel(), BLOCK):
            part = out[offset : offset + BLOCK]
            first = (start + offset) * self.itemsize
            count = part.numel()
            self._stage_bytes[: count * self.itemsize] = data[first : first + count * self.itemsize]
            part.copy_(self._stage[:count])


class Fp32(Dense):
    """4 bytes a parameter, every bit kept."""

    name = "fp32"
    dtype = torch.float32
    dtype_name = "f32"
    itemsize = 4


class Bf16(Dense):
    """2 bytes a parameter, relative error at most 2^-8 (half a unit in the last of 8 bits)."""

    name = "bf16"
    dtype = torch.bfloat16
    dtype_name = "bf16"
    itemsize = 2
