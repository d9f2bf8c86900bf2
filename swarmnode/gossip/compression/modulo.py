"""The arithmetic of modular.py on pieces of a packet: torch operations on any device, or kernel.c; alike to the bit."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple, Protocol

import torch

from swarmnode.gossip.compression import dither, kernel
from swarmnode.gossip.compression.bits import PLANES, Packer, Step, packed_nbytes
from swarmnode.gossip.compression.codec import BLOCK_ELEMENTS, CHUNK, TILE
from swarmnode.gossip.compression.tiles import Bytes, Scratch, blocks, chunks, head, read_steps, wire_steps

SHARES = 65536  # whole numbers add up alike in any order


class Piece(NamedTuple):
    """Elements [start, end) of one chunk and where they lie in a packet: whole blocks, the last one filled up."""

    start: int
    end: int
    steps: Bytes
    sums: Bytes
    planes: Sequence[Bytes]


class Layout(NamedTuple):
    """The bytes of a packet from its first tile on."""

    data: Bytes
    parameters: int
    bits: int

    def tile_nbytes(self, elements: int) -> int:
        return blocks(elements) * (3 + 8 * self.bits)

    def tile_at(self, start: int) -> int:
        """The byte at which the tile that begins at element `start` does."""
        return start // TILE * self.tile_nbytes(TILE)

    def pieces(self, start: int, end: int) -> list[Piece]:
        """Where elements [start, end) lie, by chunk."""
        found, data = [], self.data
        for first, last in chunks(start, end):
            base, chunk = first // TILE * TILE, first // CHUNK * CHUNK
            tile = self.tile_at(base)
            tile_rows = blocks(min(TILE, self.parameters - base))
            row, rows = (first - base) // BLOCK_ELEMENTS, blocks(last - first)
            whole = min(CHUNK, blocks(self.parameters - chunk) * BLOCK_ELEMENTS)
            sums = tile + 2 * tile_rows
            plane, planes = sums + tile_rows + packed_nbytes(chunk - base, self.bits), []
            for width in PLANES[self.bits]:
                begin = plane + packed_nbytes(first - chunk, width)
                planes.append(data[begin : begin + packed_nbytes(rows * BLOCK_ELEMENTS, width)])
                plane += packed_nbytes(whole, width)
            steps = data[tile + 2 * row : tile + 2 * (row + rows)]
            found.append(Piece(first, last, steps, data[sums + row : sums + row + rows], planes))
        return found


class Engine(Protocol):
    """What TorchEngine and KernelEngine do alike."""

    scratch: Scratch

    def draw(self, seed: int) -> None:
        """Have the dither of `seed` ready for `encode`; `scratch.dither` then holds it in steps."""

    def draw_back(self, seed: int) -> None:
        """Have the dither of `seed` ready for `decode`."""

    def encode(
        self,
        flat: torch.Tensor,
        reference: torch.Tensor,
        layout: Layout,
        start: int,
        scale: float,
        least: torch.Tensor,
        own: torch.Tensor,
    ) -> None:
        """Write the tile that begins at element `start`, whose weights are `flat`; steps are
        scale max|flat - reference|, at least `least` by block, and go to `own`."""

    def decode(
        self,
        layout: Layout,
        start: int,
        ours: torch.Tensor,
        out: torch.Tensor,
        steps: torch.Tensor,
        wrapped: torch.Tensor,
        far: torch.Tensor,
    ) -> None:
        """Elements from `start` on into `out`, given our own values `ours`; by block their `steps`, whether the
        checksum is wrong, and how far the farthest element lies from ours: where it is wrong, the whole range, at least
        half of which that is."""

    def note(
        self, far: torch.Tensor, wrapped: torch.Tensor, own: torch.Tensor, memory: torch.Tensor
    ) -> tuple[int, int]:
        """(blocks `wrapped`, the sum over blocks of the share of the range of our step `own` that they are `far` off,
        in SHARES); `memory` becomes at least `far`."""


def engine(bits: int, device: torch.device) -> Engine:
    """The faster of those that work on `device`."""
    library = kernel.load() if device.type == "cpu" else None
    return TorchEngine(bits, device) if library is None else KernelEngine(bits, library)


class KernelEngine:
    """kernel.c."""

    def __init__(self, bits: int, library: ctypes.CDLL) -> None:
        self.bits = bits
        self.scratch = Scratch(torch.device("cpu"))
        self._library = library
        self._seed, self._back = -1, torch.empty(0, dtype=torch.uint8)

    def draw(self, seed: int) -> None:
        self.scratch.draw(seed, 1 / 256, 0.0)

    def draw_back(self, seed: int) -> None:
        if seed != self._seed:
            self._seed, self._back = seed, dither.pool(seed)

    def encode(
        self,
        flat: torch.Tensor,
        reference: torch.Tensor,
        layout: Layout,
        start: int,
        scale: float,
        least: torch.Tensor,
        own: torch.Tensor,
    ) -> None:
        x, phi, s = flat.float().contiguous(), reference.float().contiguous(), self.scratch  # mostly themselves
        self._library.modular_encode(
            *(x.data_ptr(), phi.data_ptr(), x.numel(), s.pool.data_ptr(), dither.turn(s.seed), start // CHUNK),
            *(scale, least.data_ptr(), self.bits, layout.data.ctypes.data + layout.tile_at(start), own.data_ptr()),
        )

    def decode(
        self,
        layout: Layout,
        start: int,
        ours: torch.Tensor,
        out: torch.Tensor,
        steps: torch.Tensor,
        wrapped: torch.Tensor,
        far: torch.Tensor,
    ) -> None:
        mine = ours.float().contiguous()
        target = out if out.dtype == torch.float32 and out.is_contiguous() else torch.empty(out.numel())
        self._library.modular_decode(
            *(layout.data.ctypes.data, layout.parameters, start, start + out.numel(), mine.data_ptr()),
            *(self._back.data_ptr(), dither.turn(self._seed), self.bits, target.data_ptr()),
            *(steps.data_ptr(), wrapped.data_ptr(), far.data_ptr()),
        )
        if target is not out:
            out.copy_(target)

    def note(
        self, far: torch.Tensor, wrapped: torch.Tensor, own: torch.Tensor, memory: torch.Tensor
    ) -> tuple[int, int]:
        told = (ctypes.c_int64 * 2)()
        given = (flat.data_ptr() for flat in (far, wrapped, own))
        self._library.modular_note(*given, len(far), self.bits, memory.data_ptr(), told)
        return told[0], told[1]


def _int8_products(weights: torch.Tensor) -> torch.Tensor | None:
    """`weights` [64] as int8 [64, 1], alike mod 256, where torch multiplies int8 matrices with one column: a quarter of
    the time of floats (measured). None elsewhere."""
    found = weights.to(torch.int32).to(torch.int8).view(-1, 1)
    if weights.device.type != "cpu":
        return None
    try:
        tried = torch._int_mm(torch.full((2, BLOCK_ELEMENTS), -1, dtype=torch.int8), found)
    except (AttributeError, RuntimeError):
        return None
    return found if tried.tolist() == [[-int(found.sum())]] * 2 else None


class TorchEngine:
    """Torch operations on whole chunks, in buffers of its own."""

    def __init__(self, bits: int, device: torch.device) -> None:
        self.bits = bits
        self.scratch = Scratch(device)
        self._packer = Packer(CHUNK, device)
        self._words = [torch.empty(CHUNK, dtype=torch.int32, device=device) for _ in range(2)]
        self._seed, self._back = -1, torch.empty(0, dtype=torch.int32, device=device)
        self._packed = torch.empty(packed_nbytes(CHUNK, bits), dtype=torch.uint8, device=device)
        self._high = torch.empty(CHUNK, device=device)
        self._high_bytes = torch.empty(CHUNK, dtype=torch.uint8, device=device)
        self._sums = torch.empty(CHUNK // BLOCK_ELEMENTS, device=device)
        self._int_sums = torch.empty(CHUNK // BLOCK_ELEMENTS, 1, dtype=torch.int32, device=device)
        self._sum_bytes = torch.empty(CHUNK // BLOCK_ELEMENTS, dtype=torch.uint8, device=device)
        self._weights = torch.arange(1, 2 * BLOCK_ELEMENTS, 2, device=device, dtype=torch.float32)
        self._weights[-1] += 2  # 1, 3 … 125, 129
        self._products = _int8_products(self._weights)
        self._whole = self._quantising(CHUNK // BLOCK_ELEMENTS)

    def draw(self, seed: int) -> None:
        self.scratch.draw(seed, 1 / 256, 0.0)

    def draw_back(self, seed: int) -> None:
        """Less 1/2 and plus half the range, in 256ths of a step."""
        if seed != self._seed:
            pool = dither.pool(seed).to(self.scratch.device, torch.int32)
            self._seed, self._back = seed, pool.add_((1 << (self.bits + 7)) - 128)

    def encode(
        self,
        flat: torch.Tensor,
        reference: torch.Tensor,
        layout: Layout,
        start: int,
        scale: float,
        least: torch.Tensor,
        own: torch.Tensor,
    ) -> None:
        s, rows, pieces = self.scratch, len(own), layout.pieces(start, start + flat.numel())
        new, before = s.parts(flat, 0), s.parts(reference, 1)
        for piece in pieces:
            x, phi = (part(piece.start - start, piece.end - start) for part in (new, before))
            row = (piece.start - start) // BLOCK_ELEMENTS
            s.largest(torch.sub(x, phi, out=head(s.rows, len(x))), own[row : row + len(x)])
        torch.maximum(own.mul_(scale), least, out=own)
        wire_steps(own, s.step_bits[:rows], s.wire_steps[: 2 * rows])
        torch.reciprocal(own, out=s.inverse[:rows])
        for piece in pieces:
            x = new(piece.start - start, piece.end - start)
            row, count = (piece.start - start) // BLOCK_ELEMENTS, x.numel()
            y = torch.mul(x, s.inverse_of(row, len(x)), out=head(s.rows, len(x)))
            y.add_(s.drawn(s.seed, piece.start, count))
            for step in self._whole if count == CHUNK else self._quantising(len(x)):
                step()
            at = 0
            for plane in piece.planes:
                torch.from_numpy(plane).copy_(self._packed[at : at + plane.size])
                at += plane.size
            torch.from_numpy(piece.steps).copy_(s.wire_steps[2 * row : 2 * (row + len(x))])
            torch.from_numpy(piece.sums).copy_(head(self._sum_bytes, len(x)))

    def _quantising(self, rows: int) -> list[Step]:
        """Steps from theta / s + d / 256, in the first `rows` of the scratch, to codes in `_packed` and checksums in
        `_sum_bytes`."""
        s, count = self.scratch, rows * BLOCK_ELEMENTS
        y, indices, codes = head(s.rows, rows), head(s.words, rows), head(s.bytes, count)
        return [
            y.floor_,
            partial(indices.copy_, y),
            partial(codes.view(indices.shape).copy_, indices),
            *self._packer.packing(codes, self.bits, self._packed[: packed_nbytes(count, self.bits)]),
            partial(indices.bitwise_right_shift_, self.bits),
            *self._summing(indices),
        ]

    def _summing(self, high: torch.Tensor) -> list[Step]:
        """Steps from Q >> b by block and element, int32, to `_sum_bytes`: the sum of w (Q >> b) mod 256 by block."""
        count, rows, out = high.numel(), len(high), head(self._sum_bytes, len(high))
        low = head(self._high_bytes, count)
        first = partial(low.view(high.shape).copy_, high)
        if self._products is not None:
            found, low = head(self._int_sums, rows), low.view(torch.int8).view(high.shape)
            product = partial(torch._int_mm, low, self._products, out=found)
            return [first, product, partial(out.copy_, found.view(-1))]  # a byte holds the sum mod 256
        floats, sums = head(self._high, count), head(self._sums, rows)
        product = partial(torch.mv, floats.view(high.shape), self._weights, out=sums)
        return [first, partial(floats.copy_, low), product, partial(sums.remainder_, 256), partial(out.copy_, sums)]

    def decode(
        self,
        layout: Layout,
        start: int,
        ours: torch.Tensor,
        out: torch.Tensor,
        steps: torch.Tensor,
        wrapped: torch.Tensor,
        far: torch.Tensor,
    ) -> None:
        for piece in layout.pieces(start, start + out.numel()):
            mine, part = (flat[piece.start - start : piece.end - start] for flat in (ours, out))
            row, count = (piece.start - start) // BLOCK_ELEMENTS, blocks(piece.end - piece.start)
            by_block = (flat[row : row + count] for flat in (steps, wrapped, far))
            self._decode_piece(piece, mine, part, *by_block)

    def _decode_piece(
        self,
        piece: Piece,
        ours: torch.Tensor,
        out: torch.Tensor,
        steps: torch.Tensor,
        wrapped: torch.Tensor,
        far: torch.Tensor,
    ) -> None:
        s, bits, mine, rows = self.scratch, self.bits, self.scratch.whole(ours), len(steps)
        count, at = mine.numel(), 0
        for plane in piece.planes:
            self._packed[at : at + plane.size].copy_(torch.frombuffer(plane, dtype=torch.uint8))
            at += plane.size
        codes = s.bytes[:count]
        self._packer.unpack(self._packed[:at], bits, codes)
        steps.copy_(read_steps(piece.steps))
        # In 256ths of a step: own theta + dither - 1/2 - q + half the range.
        y, words, moved = s.floats[0][:count], self._words[0][:count], self._words[1][:count]
        inverse = torch.reciprocal(steps, out=s.inverse[:rows]).mul_(256)
        torch.mul(mine.view(rows, -1), inverse.unsqueeze(1), out=y.view(rows, -1))
        words.copy_(y.round_())
        shift = dither.offset(self._seed, piece.start)
        words.sub_(moved.copy_(codes).bitwise_left_shift_(8)).add_(self._back[shift : shift + count])
        # From bit b + 8 up: Q' >> b. Below: how far own theta lies from the value meant, plus half the range.
        torch.bitwise_right_shift(words, bits + 8, out=moved)
        for step in self._summing(moved.view(rows, -1)):
            step()
        wrapped.copy_(torch.frombuffer(piece.sums, dtype=torch.uint8).to(s.device).ne(head(self._sum_bytes, rows)))
        words.bitwise_and_((1 << (bits + 8)) - 1).sub_(1 << (bits + 7))
        y.copy_(words)
        torch.amax(torch.abs(y, out=self._high[:count]).view(rows, -1), dim=1, out=far)
        far.mul_(steps).mul_(1 / 256)
        torch.where(wrapped > 0, steps * (1 << bits), far, out=far)
        y.view(rows, -1).mul_(torch.mul(steps, -1 / 256, out=s.inverse[:rows]).unsqueeze(1))
        out.copy_(y.add_(mine)[: out.numel()])

    def note(
        self, far: torch.Tensor, wrapped: torch.Tensor, own: torch.Tensor, memory: torch.Tensor
    ) -> tuple[int, int]:
        torch.maximum(memory, far, out=memory)
        share = (far / own).mul_(1 / (1 << self.bits)).clamp_(max=1.0).mul_(SHARES)
        return int(wrapped.sum()), int(share.to(torch.int32).sum())
