"""Pseudo-gradients in 4 and 2 bits, unbiased, with a step for each block of 64: E3M0 and ternary.

    E3M0      sign and three bits of exponent: 0 and max|x| 2^-6 … 2^0, by chance between the two neighbours so that the
              mean is exact. Less than 0.003 nat lost in DiLoCo (design section 5, measured); Streaming DiLoCo
              [arXiv 2501.18512] uses it.
    ternary   0 or max|x| with the sign of x, with chance |x| / max|x| (TernGrad, arXiv 1705.07878)

On the wire: bfloat16 steps of all blocks, then the codes, 8 / bits of them in a byte, lowest bits first; the last block
is filled up with zeros. Codes: E3M0 sign · 8 + level; ternary 0, 1 (positive), 2 (negative).
"""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar

import numpy as np
import torch

from swarmnode.errors import RemoteFault
from swarmnode.gossip.compression import dither
from swarmnode.gossip.compression.bits import Packer
from swarmnode.gossip.compression.codec import BLOCK_ELEMENTS, CHUNK
from swarmnode.gossip.compression.delta import DeltaCodec
from swarmnode.gossip.compression.tiles import STEP_LEAST, Bytes, blocks, check_steps, chunks, read_steps, wire_steps
from swarmnode.model.tensor import MAGNITUDE_MAX


class FewBits(DeltaCodec):
    """Codes of `bits` bits of |x| / step, which is at most 1."""

    feedback: ClassVar[bool] = False
    unit: ClassVar[int] = BLOCK_ELEMENTS
    bits: ClassVar[int]

    def __init__(self) -> None:
        super().__init__()
        self._packer = Packer(CHUNK, torch.device("cpu"))

    def nbytes(self, parameters: int) -> int:
        return blocks(parameters) * (2 + BLOCK_ELEMENTS * self.bits // 8)

    @abstractmethod
    def codes(self, share: torch.Tensor, negative: torch.Tensor, chance: torch.Tensor) -> torch.Tensor:
        """uint8 codes of magnitudes `share` in [0, 1]; `chance` is uniform in (0, 1)."""

    @abstractmethod
    def values(self, codes: torch.Tensor) -> torch.Tensor:
        """The signed shares that `codes` stand for, float32."""

    def code(self, flat: torch.Tensor, seed: int) -> Bytes:
        rows = blocks(flat.numel())
        wire = np.empty(self.nbytes(flat.numel()), np.uint8)
        out, pool = torch.from_numpy(wire), dither.pool(seed).float().add_(0.5).mul_(1 / 256)
        at = 2 * rows
        for start, end in chunks(0, flat.numel()):
            x = torch.zeros(blocks(end - start) * BLOCK_ELEMENTS)
            x[: end - start] = flat[start:end]
            view = x.view(-1, BLOCK_ELEMENTS)
            steps = view.abs().amax(1).clamp_(min=STEP_LEAST)
            row = start // BLOCK_ELEMENTS
            wire_steps(steps, out[2 * row : 2 * (row + len(steps))])
            shift = dither.offset(seed, start)
            share = (view.abs() / steps.unsqueeze(1)).view(-1)
            codes = self.codes(share, x < 0, pool[shift : shift + x.numel()])
            size = x.numel() // 8 * self.bits
            self._packer.pack(codes, self.bits, out[at : at + size])
            at += size
        return wire

    def inspect(self, data: Bytes, parameters: int) -> None:
        check_steps(data[: 2 * blocks(parameters)], MAGNITUDE_MAX, f"{self.name} packet")

    def uncode(self, data: Bytes, parameters: int, start: int, end: int) -> torch.Tensor:
        row, rows = start // BLOCK_ELEMENTS, blocks(end - start)
        out = torch.empty(rows * BLOCK_ELEMENTS)
        base = 2 * blocks(parameters)
        steps = read_steps(data[2 * row : 2 * (row + rows)])
        for first in range(0, out.numel(), CHUNK):
            codes = torch.empty(min(CHUNK, out.numel() - first), dtype=torch.uint8)
            at = base + (start + first) // 8 * self.bits
            packed = torch.frombuffer(data[at : at + codes.numel() // 8 * self.bits], dtype=torch.uint8)
            self._packer.unpack(packed, self.bits, codes)
            out[first : first + codes.numel()] = self.values(codes)
        out.view(rows, -1).mul_(steps.unsqueeze(1))
        return out[: end - start]


class E3M0(FewBits):
    """0.53 bytes a parameter."""

    name = "e3m0"
    bits = 4

    def codes(self, share: torch.Tensor, negative: torch.Tensor, chance: torch.Tensor) -> torch.Tensor:
        below = (
            torch.frexp(share.clamp(max=1.0)).exponent.add_(6).clamp_(0, 7)
        )  # share in [2^(below - 7), 2^(below - 6))
        low = torch.where(below > 0, torch.ldexp(torch.ones_like(share), below - 7), 0.0)
        gap = torch.where(below > 0, low, 2.0**-6)
        level = below + ((share - low) / gap > chance)
        return (level.clamp_(max=7) + 8 * negative).to(torch.uint8)

    def values(self, codes: torch.Tensor) -> torch.Tensor:
        table = torch.tensor([0.0, *(2.0**e for e in range(-6, 1))])
        return torch.cat([table, -table])[codes.long()]


class Ternary(FewBits):
    """0.28 bytes a parameter."""

    name = "ternary"
    bits = 2

    def codes(self, share: torch.Tensor, negative: torch.Tensor, chance: torch.Tensor) -> torch.Tensor:
        return ((share > chance) * (1 + negative.to(torch.uint8))).to(torch.uint8)

    def values(self, codes: torch.Tensor) -> torch.Tensor:
        return torch.tensor([0.0, 1.0, -1.0, 0.0])[codes.long()]

    def inspect(self, data: Bytes, parameters: int) -> None:
        super().inspect(data, parameters)
        codes = data[2 * blocks(parameters) :]
        if (codes & codes >> 1 & 0x55).any():
            raise RemoteFault(f"{self.name} packet with a code of 3")
