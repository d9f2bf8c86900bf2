"""int8: a byte a parameter, a step for each block of 64, rounded by chance so that the mean is exact.

    s = max|x| / 127 over the block, rounded up to bfloat16
    v = floor(x / s + u), u uniform in (0, 1)            E[v s] = x        |v s - x| < s

8-bit blockwise quantisation is that of arXiv 2110.02861 (linear instead of dynamic codes); stochastic
rounding as QSGD [arXiv 1610.02132]. Measured (`bench gossip`): no loss against fp32 in pairs.

On the wire, tile by tile of 2^19 elements: bfloat16 steps of its blocks, then v + 128 of its elements, one byte each.
P + 2 ceil(P / 64) bytes: 1.03 a parameter.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import ClassVar

import numpy as np
import torch

from swarmnode.gossip.compression import kernel
from swarmnode.gossip.compression.codec import BLOCK_ELEMENTS, TILE, Bytes, Codec, Done
from swarmnode.gossip.compression.tiles import (
    STEP_LEAST,
    Scratch,
    blocks,
    check_range,
    check_steps,
    chunks,
    head,
    one_tensor,
    read_steps,
    tiles,
    wire_steps,
)
from swarmnode.model.tensor import MAGNITUDE_MAX
from swarmnode.ports import WireTensor

LEVELS = 127
ZERO = 128  # the code of 0


class Int8(Codec):
    """1.03 bytes a parameter."""

    name: ClassVar[str] = "int8"
    lossy: ClassVar[bool] = True
    tensors: ClassVar[int] = 1

    def __init__(self) -> None:
        self._scratch = Scratch(torch.device("cpu"))
        self._kernel = kernel.load()

    def nbytes(self, parameters: int) -> int:
        return parameters + 2 * blocks(parameters)

    def write(self, wire: Bytes, flat: torch.Tensor, reference: torch.Tensor | None, seed: int, done: Done) -> None:
        s = self._scratch = self._scratch if flat.device == self._scratch.device else Scratch(flat.device)
        s.draw(seed, 1 / 256, ZERO + 1 / 512)
        codes, at, part = torch.from_numpy(wire), 0, s.parts(flat)
        for start, end in tiles(0, flat.numel()):
            rows = blocks(end - start)
            steps, inverse = s.steps[:rows], s.inverse[:rows]
            if self._kernel is not None and flat.device.type == "cpu":
                self._encode_tile(self._kernel, flat, start, end, seed, wire[at:])
                at += 2 * rows + end - start
                done(at)
                continue
            for begin, last in chunks(start, end):
                x, row = part(begin, last), (begin - start) // BLOCK_ELEMENTS
                s.largest(x, steps[row : row + len(x)])
            steps.mul_(1 / LEVELS).clamp_(min=STEP_LEAST)
            wire_steps(steps, s.wire_steps[: 2 * rows])
            codes[at : at + 2 * rows].copy_(s.wire_steps[: 2 * rows])
            torch.reciprocal(steps, out=inverse)
            at += 2 * rows
            for begin, last in chunks(start, end):
                x, row = part(begin, last), (begin - start) // BLOCK_ELEMENTS
                drawn, inverse = s.drawn(seed, begin, x.numel()), s.inverse_of(row, len(x))
                torch.addcmul(drawn, x, inverse, out=head(s.rows, len(x)))  # positive: truncation is floor
                s.truncate(wire[at : at + last - begin])
                at += last - begin
            done(at)

    def _encode_tile(
        self, library: ctypes.CDLL, flat: torch.Tensor, start: int, end: int, seed: int, out: Bytes
    ) -> None:
        """What the torch operations of `write` do with a tile, in C."""
        at, codes_at = out.ctypes.data, out.ctypes.data + 2 * blocks(end - start) - start
        for first, last in chunks(start, end):
            x, row = self._scratch.whole(flat[first:last]), (first - start) // BLOCK_ELEMENTS
            library.int8_encode(
                x.data_ptr(),
                x.numel() // BLOCK_ELEMENTS,
                last - first,
                self._scratch.pool_at(seed, first),
                STEP_LEAST,
                at + 2 * row,
                codes_at + first,
            )

    def check(self, tensors: Sequence[WireTensor], parameters: int) -> None:
        nbytes = self.nbytes(parameters)
        data = one_tensor(tensors, self.name, parameters, nbytes, nbytes)
        for start, end in tiles(0, parameters):
            at = self._at(start)
            check_steps(data[at : at + 2 * blocks(end - start)], MAGNITUDE_MAX / ZERO, f"{self.name} packet")

    @staticmethod
    def _at(start: int) -> int:
        """The byte at which the tile that begins at element `start` does."""
        return start + 2 * (start // BLOCK_ELEMENTS)

    @torch.no_grad()
    def read(
        self, tensors: Sequence[WireTensor], start: int, out: torch.Tensor, reference: torch.Tensor | None = None
    ) -> None:
        data, parameters = np.frombuffer(tensors[0].data, np.uint8), tensors[0].shape[0]
        codes = torch.frombuffer(tensors[0].data, dtype=torch.uint8)
        check_range(start, out.numel(), parameters)
        s = self._scratch = self._scratch if out.device == self._scratch.device else Scratch(out.device)
        for first, end in chunks(start, start + out.numel()):
            base = first // TILE * TILE
            at, skip, rows = self._at(base), (first - base) // BLOCK_ELEMENTS, blocks(end - first)
            part, code = out[first - start : end - start], s.bytes[: end - first]
            codes_at = at + 2 * blocks(min(TILE, parameters - base)) + first - base
            if self._kernel is not None and part.dtype == torch.float32 and part.device.type == "cpu":
                address = data.ctypes.data
                self._kernel.int8_decode(address + at + 2 * skip, address + codes_at, end - first, part.data_ptr())
                continue
            s.steps[:rows].copy_(read_steps(data[at + 2 * skip : at + 2 * (skip + rows)]))
            code.copy_(codes[codes_at : codes_at + end - first]).bitwise_xor_(ZERO)  # as int8: the code less 128
            whole = part.dtype == torch.float32 and part.numel() == rows * BLOCK_ELEMENTS
            target = part if whole else s.floats[0][: rows * BLOCK_ELEMENTS]
            target[: end - first].copy_(code.view(torch.int8))
            target.view(rows, -1).mul_(s.steps[:rows].unsqueeze(1))
            if not whole:
                part.copy_(target[: end - first])
