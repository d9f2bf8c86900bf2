"""Unbiased 4-bit and 2-bit pseudo-gradients with a step for each block of 64: E3M0 and ternary.

    E3M0      sign and three bits of exponent: 0 and max|x| 2^-6 … 2^0, rounded randomly to one of the two neighbours so
              that the mean is exact. Less than 0.003 nat lost in DiLoCo (measured). Streaming DiLoCo [arXiv
              2501.18512] uses it.
    ternary   0 or max|x| with the sign of x, with probability |x| / max|x| (TernGrad, arXiv 1705.07878)

On the wire: bfloat16 steps of all blocks, then the codes, 8 / bits of them in a byte, lowest bits first (of 3
bits: planes of 2 and of 1); the last block is padded with zeros. Codes: E3M0 sign · 8 + level; ternary 0, 1
(positive), 2 (negative).

Whole tiles are packed at once: no loop over elements, no allocation per tile. Element 0 is in the lowest bits of byte
0. Two neighbours become one byte by adding a shifted int16 view. If alignment allows, four such pairs are shifted in
one int64 (measured: half the time), as bits that move into a pair from its neighbour land in positions that are not
read.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch

from swarmnode.base.errors import RemoteFault
from swarmnode.model.tensor import MAGNITUDE_MAX
from swarmnode.train.gossip.compression.codec import BLOCK_ELEMENTS, CHUNK, Bytes, Done
from swarmnode_methods.delta import DeltaCodec
from swarmnode_methods.tiles import (
    STEP_LEAST,
    DitherPool,
    blocks,
    by_block,
    check_steps,
    chunks,
    read_steps,
    tiles,
    wire_steps,
)


class TilePacker:
    """Packs and unpacks up to `capacity` codes at a time on `device`, in its own buffers."""

    def __init__(self, capacity: int, device: torch.device) -> None:
        self._bytes = [torch.empty(capacity, dtype=torch.uint8, device=device) for _ in range(2)]
        self._pairs = [torch.empty(capacity // 2, dtype=torch.int16, device=device) for _ in range(2)]

    def pack(self, codes: torch.Tensor, width: int, out: torch.Tensor) -> None:
        """Pack `codes` uint8 [n], below 2^`width`, into `out` uint8 [n / 8 * width] (any device)."""
        plane = self._bytes[0][: codes.numel()]
        source = 0
        plane.copy_(codes)
        while width < 8:
            pairs = plane.view(torch.int16)
            wide = _wide(plane, pairs)
            moved = self._pairs[0].view(wide.dtype)[: wide.numel()]
            torch.bitwise_right_shift(wide, 8 - width, out=moved)
            wide.bitwise_or_(moved)
            width *= 2
            source = 1 - source
            plane = out if width == 8 else self._bytes[source][: pairs.numel()]
            plane.copy_(pairs)  # the low byte of each pair

    def unpack(self, packed: torch.Tensor, width: int, out: torch.Tensor) -> None:
        """The inverse: `packed` uint8 [n / 8 * width] on this device into `out` uint8 [n]."""
        held = 8
        source = 0
        while held > width:
            held //= 2
            pairs = self._pairs[0][: packed.numel()]
            pairs.copy_(packed)
            last = held == width
            packed = out if last else self._bytes[source][: 2 * pairs.numel()]
            wide = pairs if _wide(packed) is packed else _wide(pairs)
            moved = torch.bitwise_left_shift(wide, 8 - held, out=self._pairs[1].view(wide.dtype)[: wide.numel()])
            wide.bitwise_or_(moved)
            mask = (1 << held) - 1
            mask = mask * 0x0101010101010101 if wide.dtype == torch.int64 else mask | mask << 8
            torch.bitwise_and(wide, mask, out=packed.view(wide.dtype))
            source = 1 - source


def _wide(plane: torch.Tensor, otherwise: torch.Tensor | None = None) -> torch.Tensor:
    """`plane` as int64 if its memory is aligned for that, else `otherwise` (None: itself)."""
    nbytes = plane.numel() * plane.element_size()
    size = plane.element_size()
    if nbytes % 8 == 0 and plane.storage_offset() * size % 8 == 0 and plane.data_ptr() % 8 == 0:
        return plane.view(torch.int64)
    return plane if otherwise is None else otherwise


@dataclass(frozen=True, slots=True)
class Plane:
    """Bits [shift, shift + width) of all codes of a packet, packed one code after the other. `width`: 1, 2 or 4."""

    shift: int
    width: int

    def at(self, rows: int, element: int) -> int:
        """The first byte of `element`'s code in a packet of `rows` blocks; `element` is a multiple of 8."""
        before = 2 * rows + rows * BLOCK_ELEMENTS // 8 * self.shift
        return before + element // 8 * self.width

    def of(self, codes: torch.Tensor) -> torch.Tensor:
        """These bits of `codes` uint8."""
        return (codes >> self.shift) & ((1 << self.width) - 1)


def planes_of(bits: int) -> list[Plane]:
    """The planes of codes of `bits` bits, 1 to 4: a byte holds 8, 4 or 2 whole codes."""
    return [Plane(0, 2), Plane(2, 1)] if bits == 3 else [Plane(0, bits)]


class LowBit(DeltaCodec):
    """Codes of `bits` bits of |x| / step, which is at most 1."""

    feedback: ClassVar[bool] = False
    unit: ClassVar[int] = BLOCK_ELEMENTS
    bits: ClassVar[int]

    def __init__(self) -> None:
        super().__init__()
        self._packer = TilePacker(CHUNK, torch.device("cpu"))
        self._dither = DitherPool(torch.device("cpu"))
        self._steps = torch.empty(0)  # by block, of the message being written
        self._flags = [torch.empty(CHUNK, dtype=torch.bool) for _ in range(2)]
        self._levels = [torch.empty(CHUNK, dtype=torch.int32) for _ in range(2)]

    def nbytes(self, parameters: int) -> int:
        return blocks(parameters) * (2 + BLOCK_ELEMENTS * self.bits // 8)

    @abstractmethod
    def codes(self, share: torch.Tensor, negative: torch.Tensor, chance: torch.Tensor, out: torch.Tensor) -> None:
        """Write the codes of magnitudes `share` in [0, 1], which may be overwritten, to `out` uint8. `negative` is
        uint8, 1 or 0; `chance` is uniform in (0, 1). All [n], of one chunk."""

    @abstractmethod
    def values(self, codes: torch.Tensor) -> torch.Tensor:
        """The signed shares that `codes` represent, float32."""

    def code(self, wire: Bytes, flat: torch.Tensor, seed: int, done: Done) -> None:
        """Write the packet in two passes: all steps come before the first code."""
        rows = blocks(flat.numel())
        s = self._dither
        if len(self._steps) != rows:
            self._steps = torch.empty(rows)
        out = torch.from_numpy(wire)
        for start, end in tiles(0, flat.numel()):
            first = start // BLOCK_ELEMENTS
            steps = self._steps[first : first + blocks(end - start)]
            torch.amax(by_block(flat, start, end).abs(), dim=1, out=steps)
            steps.clamp_(min=STEP_LEAST)
            wire_steps(steps, wire[2 * first : 2 * (first + len(steps))])
            done(2 * (first + len(steps)))
        planes = planes_of(self.bits)
        s.draw(seed, 1 / 256, 1 / 512)
        for start, end in tiles(0, flat.numel()):
            for begin, last in chunks(start, end):
                x = by_block(flat, begin, last)
                row = begin // BLOCK_ELEMENTS
                count = x.numel()
                negative = torch.lt(x.view(-1), 0, out=self._flags[0][:count]).view(torch.uint8)
                share = x.abs().div_(self._steps[row : row + len(x)].unsqueeze(1))
                codes = torch.empty(count, dtype=torch.uint8)
                self.codes(share.view(-1), negative, s.drawn(seed, begin, count).view(-1), codes)
                for plane in planes:
                    at = plane.at(rows, begin)
                    self._packer.pack(plane.of(codes), plane.width, out[at : at + count // 8 * plane.width])
            if len(planes) == 1:
                done(planes[0].at(rows, end))

    def inspect(self, data: Bytes, parameters: int) -> None:
        check_steps(data[: 2 * blocks(parameters)], MAGNITUDE_MAX, f"{self.name} packet")

    def uncode(self, data: Bytes, parameters: int, start: int, end: int) -> torch.Tensor:
        row = start // BLOCK_ELEMENTS
        rows = blocks(end - start)
        out = torch.empty(rows * BLOCK_ELEMENTS)
        steps = read_steps(data[2 * row : 2 * (row + rows)])
        for first in range(0, out.numel(), CHUNK):
            count = min(CHUNK, out.numel() - first)
            codes = torch.zeros(count, dtype=torch.uint8)
            for plane in planes_of(self.bits):
                at = plane.at(blocks(parameters), start + first)
                packed = torch.frombuffer(data[at : at + count // 8 * plane.width], dtype=torch.uint8)
                part = torch.empty_like(codes)
                self._packer.unpack(packed, plane.width, part)
                codes.bitwise_or_(part.bitwise_left_shift_(plane.shift))
            out[first : first + count] = self.values(codes)
        out.view(rows, -1).mul_(steps.unsqueeze(1))
        return out[: end - start]


class E3M0(LowBit):
    """0.53 bytes a parameter."""

    name = "e3m0"
    bits = 4

    def codes(self, share: torch.Tensor, negative: torch.Tensor, chance: torch.Tensor, out: torch.Tensor) -> None:
        level, above = (buffer[: share.numel()] for buffer in self._levels)
        torch.bitwise_right_shift(share.view(torch.int32), 23, out=level)  # the exponent, 127 for 1
        level.sub_(120).clamp_(0, 7)  # share in [2^(level - 7), 2^(level - 6)), or below 2^-6
        # What share lies above 2^(level - 7), or 0, over the gap to the next: both steps are exact.
        torch.clamp(level, min=1, out=above).neg_().add_(127 + 7).bitwise_left_shift_(23)
        share.mul_(above.view(torch.float32))
        share.sub_(torch.clamp(level, max=1, out=above).mul_(0x3F800000).view(torch.float32))  # the bits of 1 or 0
        up = torch.gt(share, chance, out=self._flags[1][: share.numel()]).view(torch.uint8)
        out.copy_(level)
        out.add_(up).clamp_(max=7).add_(negative, alpha=8)

    def values(self, codes: torch.Tensor) -> torch.Tensor:
        table = torch.tensor([0.0, *(2.0**e for e in range(-6, 1))])
        return torch.cat([table, -table])[codes.long()]


class Ternary(LowBit):
    """0.28 bytes a parameter."""

    name = "ternary"
    bits = 2

    def codes(self, share: torch.Tensor, negative: torch.Tensor, chance: torch.Tensor, out: torch.Tensor) -> None:
        taken = torch.gt(share, chance, out=self._flags[1][: share.numel()]).view(torch.uint8)
        torch.bitwise_left_shift(taken, negative, out=out)

    def values(self, codes: torch.Tensor) -> torch.Tensor:
        return torch.tensor([0.0, 1.0, -1.0, 0.0])[codes.long()]

    def inspect(self, data: Bytes, parameters: int) -> None:
        super().inspect(data, parameters)
        codes = data[2 * blocks(parameters) :]
        if (codes & codes >> 1 & 0x55).any():
            raise RemoteFault(f"{self.name} packet with a code of 3")
