"""int8: a byte per parameter, a step for each block of 64, stochastically rounded so that the mean is exact.

    s = max|x| / 127 over the block, rounded up to bfloat16
    v = floor(x / s + u), u uniform in (0, 1)            E[v s] = x        |v s - x| < s

8-bit blockwise quantisation is that of arXiv 2110.02861 (linear instead of dynamic codes); stochastic rounding as in
QSGD [arXiv 1610.02132]. Measured (`bench gossip`): no loss against fp32 in pairs.

On the wire, tile by tile of 2^19 elements: bfloat16 steps of its blocks, then v + 128 of its elements, one byte each. P
+ 2 ceil(P / 64) bytes: 1.03 a parameter.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import ClassVar

import numpy as np
import torch

from swarmnode.base.ports import WireTensor
from swarmnode.model.tensor import MAGNITUDE_MAX
from swarmnode.train.gossip.compression.codec import BLOCK_ELEMENTS, TILE, Bytes, Codec, Done
from swarmnode_methods.kernel import kernels
from swarmnode_methods.tiles import (
    STEP_LEAST,
    DitherPool,
    blocks,
    by_block,
    check_range,
    check_steps,
    chunks,
    one_tensor,
    read_steps,
    tiles,
    wire_steps,
)

Numbers32 = np.ndarray[tuple[int, int], np.dtype[np.float32]]
Numbers64 = np.ndarray[tuple[int], np.dtype[np.float64]]
Addresses = np.ndarray[tuple[int], np.dtype[np.uint64]]

LEVELS = 127
ZERO = 128  # the code of 0
KERNELS = kernels(
    __file__,
    "int8.c",
    int8_encode="pllpfpp",
    int8_decode="pplp",
    int8_products="pllp",
    int8_sum="ppllp",
)


class Int8(Codec):
    """1.03 bytes a parameter."""

    name: ClassVar[str] = "int8"
    tensors: ClassVar[int] = 1
    library = KERNELS

    def __init__(self) -> None:
        self._dither = DitherPool(torch.device("cpu"))
        self._kernel = KERNELS.best()

    def nbytes(self, parameters: int) -> int:
        return parameters + 2 * blocks(parameters)

    def write(self, wire: Bytes, flat: torch.Tensor, reference: torch.Tensor | None, seed: int, done: Done) -> None:
        s = self._dither = self._dither if flat.device == self._dither.device else DitherPool(flat.device)
        s.draw(seed, 1 / 256, ZERO + 1 / 512)
        at = 0
        with np.errstate(invalid="ignore"):  # the receiver refuses a step that is not finite
            for start, end in tiles(0, flat.numel()):
                out = wire[at : self._at(start) + 2 * blocks(end - start) + end - start]
                if self._kernel is not None and flat.device.type == "cpu":
                    self._encode_tile(self._kernel, flat, start, end, seed, out)
                else:
                    self._write_tile(flat, start, end, seed, out)
                at += out.size
                done(at)

    def _write_tile(self, flat: torch.Tensor, start: int, end: int, seed: int, out: Bytes) -> None:
        rows = blocks(end - start)
        x = by_block(flat, start, end)
        steps = x.abs().amax(1).mul_(1 / LEVELS).clamp_(min=STEP_LEAST)
        wire_steps(steps, out[: 2 * rows])
        inverse = torch.reciprocal(steps).unsqueeze(1)
        for first, last in chunks(start, end):
            part = slice((first - start) // BLOCK_ELEMENTS, blocks(last - start))
            drawn = self._dither.drawn(seed, first, x[part].numel())
            codes = torch.addcmul(drawn, x[part], inverse[part]).to(torch.int32).to(torch.uint8)  # positive: floor
            at = 2 * rows + first - start
            out[at : at + last - first] = codes.cpu().numpy().reshape(-1)[: last - first]

    def _encode_tile(
        self, library: ctypes.CDLL, flat: torch.Tensor, start: int, end: int, seed: int, out: Bytes
    ) -> None:
        """`_write_tile` in C."""
        at = out.ctypes.data
        codes_at = out.ctypes.data + 2 * blocks(end - start) - start
        for first, last in chunks(start, end):
            x = by_block(flat, first, last)
            row = (first - start) // BLOCK_ELEMENTS
            library.int8_encode(
                x.data_ptr(),
                x.numel() // BLOCK_ELEMENTS,
                last - first,
                self._dither.pool_at(seed, first),
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
        """The byte offset of the tile that begins at element `start`."""
        return start + 2 * (start // BLOCK_ELEMENTS)

    @torch.no_grad()
    def read(
        self, tensors: Sequence[WireTensor], start: int, out: torch.Tensor, reference: torch.Tensor | None = None
    ) -> None:
        data = np.frombuffer(tensors[0].data, np.uint8)
        parameters = tensors[0].shape[0]
        check_range(start, out.numel(), parameters)
        for first, end in chunks(start, start + out.numel()):
            base = first // TILE * TILE
            at = self._at(base)
            skip = (first - base) // BLOCK_ELEMENTS
            rows = blocks(end - first)
            part = out[first - start : end - start]
            codes_at = at + 2 * blocks(min(TILE, parameters - base)) + first - base
            if self._kernel is not None and part.dtype == torch.float32 and part.device.type == "cpu":
                address = data.ctypes.data
                self._kernel.int8_decode(address + at + 2 * skip, address + codes_at, end - first, part.data_ptr())
                continue
            steps = read_steps(data[at + 2 * skip : at + 2 * (skip + rows)]).to(out.device)
            signed = (data[codes_at : codes_at + end - first] ^ np.uint8(ZERO)).view(np.int8)
            codes = by_block(torch.from_numpy(signed).to(out.device), 0, end - first)
            part.copy_((codes * steps.unsqueeze(1)).view(-1)[: end - first])

    def products(self, packets: Sequence[Sequence[WireTensor]], like: torch.Tensor, block: int) -> torch.Tensor:
        many = len(packets)
        parameters = like.numel()
        found = torch.zeros(many, many, dtype=torch.float64)
        if self._kernel is not None:
            addresses, _held = _addresses(packets)
            self._kernel.int8_products(addresses.ctypes.data, many, parameters, found.data_ptr())
            return found
        for start, end in tiles(0, parameters):
            read = [self._tile(tensors, start, end - start) for tensors in packets]
            for i, (steps, codes) in enumerate(read):
                for j in range(i, many):
                    each = (codes * read[j][1]).sum(1).astype(np.float64) * (steps * read[j][0])
                    found[i, j] = found[j, i] = float(np.cumsum([float(found[i, j]), *each])[-1])  # in order, as in C
        return found

    def _tile(self, tensors: Sequence[WireTensor], start: int, count: int) -> tuple[Numbers64, Numbers32]:
        """(the steps [rows], the codes by block [rows, 64], zeros after the last) of the tile from `start` on."""
        data = np.frombuffer(tensors[0].data, np.uint8)
        at = self._at(start)
        rows = blocks(count)
        steps = read_steps(data[at : at + 2 * rows]).numpy().astype(np.float64)
        codes = np.zeros(rows * BLOCK_ELEMENTS, np.float32)
        codes[:count] = data[at + 2 * rows : at + 2 * rows + count].astype(np.float32) - ZERO
        return steps, codes.reshape(rows, BLOCK_ELEMENTS)

    def add_up(
        self, packets: Sequence[Sequence[WireTensor]], shares: Sequence[float], out: torch.Tensor, theirs: torch.Tensor
    ) -> None:
        if self._kernel is None or out.dtype != torch.float32 or out.device.type != "cpu":
            super().add_up(packets, shares, out, theirs)
            return
        addresses, _held = _addresses(packets)
        weights = np.array(shares, np.float32)
        self._kernel.int8_sum(addresses.ctypes.data, weights.ctypes.data, len(packets), out.numel(), out.data_ptr())


def _addresses(packets: Sequence[Sequence[WireTensor]]) -> tuple[Addresses, list[Bytes]]:
    """(the address of each packet's bytes, the bytes, which must live as long)."""
    held = [np.frombuffer(tensors[0].data, np.uint8) for tensors in packets]
    return np.array([data.ctypes.data for data in held], np.uint64), held
