"""The arithmetic of modular.py on pieces of a packet: torch operations on any device, or modular.c, equal to the bit.

Codes of 3, 4 or 6 bits are packed by whole chunks: distant parts of a chunk share bytes, so that a few calls suffice.

n codes (n a multiple of 64) are cut into parts of equal length, and byte i of the result holds code i of several parts:

    4 bits   parts a b        n / 2 bytes      a | b << 4
    6 bits   parts a b c d    3 n / 4 bytes    a | d << 6, then b | d >> 2 << 6, then c | d >> 4 << 6 (of 8 bits)
    3 bits   parts a b        3 n / 8 bytes    a | b << 3, which are n / 2 codes of 6 bits

Packing neighbours, as in low_bit.py, takes twice the time (measured), mostly to combine two bytes into one.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import NamedTuple, Protocol

import numpy as np
import torch

from swarmnode.train.gossip.compression.codec import BLOCK_ELEMENTS, CHUNK, TILE, Bytes
from swarmnode_methods import tiles
from swarmnode_methods.kernel import kernels
from swarmnode_methods.tiles import DitherPool, blocks, by_block, chunks, read_steps, wire_steps

WIDTHS = (3, 4, 6)
KERNELS = kernels(
    __file__, "modular.c", modular_encode="pplpllfipp", modular_decode="plllpplipppp", modular_note="ppplipp"
)

_PLACES = np.array([[64], [16], [4]], np.uint8)  # positions of two bits of d in planes of 6 bits
_UNPLACES = np.array([[0], [2], [4]], np.uint8)


def packed_nbytes(count: int, bits: int) -> int:
    """Bytes of `count` codes; `count` is a multiple of 8."""
    return count // 8 * bits


def tile_nbytes(elements: int, bits: int) -> int:
    return blocks(elements) * (3 + 8 * bits)


def pack(codes: Bytes, bits: int) -> Bytes:
    """The low `bits` of `codes` [n], packed: [n / 8 * bits]."""
    assert bits in WIDTHS, f"codes of {bits} bits"
    codes = codes & np.uint8((1 << bits) - 1)
    if bits != 6:
        low, high = codes.reshape(2, -1)
        codes = low | high << np.uint8(bits)
    if bits == 4:
        return codes
    parts = codes.reshape(4, -1)
    packed: Bytes = np.bitwise_or(parts[:3], (parts[3] * _PLACES) & np.uint8(0xC0)).reshape(-1)
    return packed


def unpack(packed: Bytes, bits: int) -> Bytes:
    """The inverse: the codes [n] in `packed` [n / 8 * bits]."""
    if bits != 4:
        planes = packed.reshape(3, -1)
        last = np.bitwise_or.reduce(planes >> np.uint8(6) << _UNPLACES, axis=0)
        packed = np.concatenate([planes & np.uint8(63), last[np.newaxis]]).reshape(-1)
    if bits == 6:
        return packed
    return np.concatenate([packed & np.uint8((1 << bits) - 1), packed >> np.uint8(bits)])


SHARES = 65536  # whole numbers, whose sum does not depend on the order
# CENTRE is added to theta / s, which is seldom below -2^15 (STEP_RATIO): so truncation rounds down. And float32 rounds
# to 128ths there, which is to add 1 / 256 and round down: that makes bytes & DITHER odd.
CENTRE = 1.5 * 2.0**16
DITHER = 0xFE
NEAR = 2.0**-64  # huber_loss beyond it is |difference| NEAR exactly: one pass instead of two


class ChunkSpan(NamedTuple):
    """Elements [start, end) of one chunk and their positions in a packet: whole blocks, the last one padded."""

    start: int
    end: int
    steps: Bytes
    sums: Bytes
    codes: Bytes  # of the whole chunk, ...
    inside: int  # ... the element of it that `start` is


class PacketLayout(NamedTuple):
    """The bytes of a packet from its first tile on."""

    data: Bytes
    parameters: int
    bits: int

    def tile_at(self, start: int) -> int:
        """The byte offset of the tile that begins at element `start`."""
        return start // TILE * tile_nbytes(TILE, self.bits)

    def tile(self, start: int, rows: int) -> tuple[Bytes, Bytes, Bytes]:
        """The (steps, checksums, codes) of the tile of `rows` blocks that begins at element `start`."""
        at = self.tile_at(start)
        end = at + rows * (3 + 8 * self.bits)
        return self.data[at : at + 2 * rows], self.data[at + 2 * rows : at + 3 * rows], self.data[at + 3 * rows : end]

    def pieces(self, start: int, end: int) -> list[ChunkSpan]:
        """The positions of elements [start, end), by chunk."""
        spans = []
        data = self.data
        for first, last in chunks(start, end):
            base = first // TILE * TILE
            chunk = first // CHUNK * CHUNK
            tile = self.tile_at(base)
            tile_rows = blocks(min(TILE, self.parameters - base))
            row = (first - base) // BLOCK_ELEMENTS
            rows = blocks(last - first)
            whole = min(CHUNK, blocks(self.parameters - chunk) * BLOCK_ELEMENTS)
            sums = tile + 2 * tile_rows
            at = sums + tile_rows + packed_nbytes(chunk - base, self.bits)
            spans.append(
                ChunkSpan(
                    first,
                    last,
                    data[tile + 2 * row : tile + 2 * (row + rows)],
                    data[sums + row : sums + row + rows],
                    data[at : at + packed_nbytes(whole, self.bits)],
                    first - chunk,
                )
            )
        return spans


class Decoded(NamedTuple):
    """Results of decoding by block: the sender's steps, whether the checksum is wrong, and how far the farthest element
    lies from ours (if wrong, the whole range, of which it is at least half)."""

    steps: torch.Tensor
    wrapped: torch.Tensor
    far: torch.Tensor


TileWriter = Callable[[int, int, torch.Tensor], None]
"""Called with (start, end, own): writes the tile of these elements; `own` holds the steps of its blocks."""


class ModularEngine(Protocol):
    """The common interface of TorchEngine and KernelEngine."""

    dither: DitherPool

    def draw_back(self, seed: int) -> None:
        """Prepare the dither of `seed` for `decode`."""

    def encoder(
        self, flat: torch.Tensor, reference: torch.Tensor, layout: PacketLayout, seed: int, scale: float
    ) -> TileWriter:
        """A writer for the tiles of the message of `flat`, one after the other. Steps are scale max|flat - reference|
        by block, at least the value in `own`, which is set to them. `dither.pool` then holds the dither of `seed`."""

    def decode(self, layout: PacketLayout, start: int, ours: torch.Tensor, out: torch.Tensor, of: Decoded) -> None:
        """Decode elements from `start` on into `out`, given our own values `ours`, and fill `of`."""

    def note(
        self, far: torch.Tensor, wrapped: torch.Tensor, own: torch.Tensor, memory: torch.Tensor
    ) -> tuple[int, int]:
        """(blocks `wrapped`, the sum over blocks of `far` over the range of our step `own`, in SHARES); `memory`
        becomes at least `far`."""


def engine(bits: int, device: torch.device) -> ModularEngine:
    """The fastest engine for `device`."""
    library = KERNELS.best() if device.type == "cpu" else None
    return TorchEngine(bits, device) if library is None else KernelEngine(bits, library)


class KernelEngine:
    """The engine in C (modular.c)."""

    def __init__(self, bits: int, library: ctypes.CDLL) -> None:
        self.bits = bits
        self.dither = DitherPool(torch.device("cpu"))
        self._library = library
        self._seed = -1
        self._back = torch.empty(0, dtype=torch.uint8)

    def draw_back(self, seed: int) -> None:
        if seed != self._seed:
            self._seed = seed
            self._back = tiles.pool(seed)

    def encoder(
        self, flat: torch.Tensor, reference: torch.Tensor, layout: PacketLayout, seed: int, scale: float
    ) -> TileWriter:
        self.dither.draw_pool(seed)
        out = layout.data.ctypes.data
        pool = self.dither.pool
        turn = tiles.turn(seed)

        def write(start: int, end: int, own: torch.Tensor) -> None:
            x, phi = (whole[start:end].float().contiguous() for whole in (flat, reference))  # usually no copy
            self._library.modular_encode(
                *(x.data_ptr(), phi.data_ptr(), end - start, pool.data_ptr(), turn, start // CHUNK),
                *(scale, self.bits, out + layout.tile_at(start), own.data_ptr()),
            )

        return write

    def decode(self, layout: PacketLayout, start: int, ours: torch.Tensor, out: torch.Tensor, of: Decoded) -> None:
        mine = ours.float().contiguous()
        target = out if out.dtype == torch.float32 and out.is_contiguous() else torch.empty(out.numel())
        self._library.modular_decode(
            *(layout.data.ctypes.data, layout.parameters, start, start + out.numel(), mine.data_ptr()),
            *(self._back.data_ptr(), tiles.turn(self._seed), self.bits, target.data_ptr()),
            *(flat.data_ptr() for flat in of),
        )
        if target is not out:
            out.copy_(target)

    def note(
        self, far: torch.Tensor, wrapped: torch.Tensor, own: torch.Tensor, memory: torch.Tensor
    ) -> tuple[int, int]:
        counts = (ctypes.c_int64 * 2)()
        pointers = (flat.data_ptr() for flat in (far, wrapped, own))
        self._library.modular_note(*pointers, len(far), self.bits, memory.data_ptr(), counts)
        return counts[0], counts[1]


class TorchEngine:
    """Torch operations on whole chunks, for other devices and machines without a compiler. Codes are packed on the
    CPU."""

    def __init__(self, bits: int, device: torch.device) -> None:
        self.bits = bits
        self.dither = DitherPool(device)
        self._weights = torch.arange(1, 2 * BLOCK_ELEMENTS, 2, device=device, dtype=torch.int16)
        self._weights[-1] += 2  # 1, 3 … 125, 129
        self._seed = -1
        self._back = torch.empty(tiles.POOL, device=device)

    def draw_back(self, seed: int) -> None:
        """See Engine. Minus 1/2, in ranges."""
        if seed != self._seed:
            self._seed = seed
            self._back.copy_(tiles.pool(seed) & DITHER).add_(1 - 128).mul_(1 / (256 << self.bits))

    def _sums(self, words: torch.Tensor) -> torch.Tensor:
        """The sum of w Q of each block of `words` [rows, 64], whole numbers: mod 2^16, of which a checksum is made."""
        if words.device.type == "cpu":
            return torch.mv(words.to(torch.int16), self._weights)  # measured: six times as fast
        return (words.to(torch.int32) * self._weights).sum(1).to(torch.int16)

    def _checksums(self, sums: torch.Tensor) -> Bytes:
        """(sum >> b) mod 256 of each of `sums` int16, which count mod 2^16."""
        return (sums.cpu().numpy().view(np.uint16) >> self.bits).astype(np.uint8)

    def encoder(
        self, flat: torch.Tensor, reference: torch.Tensor, layout: PacketLayout, seed: int, scale: float
    ) -> TileWriter:
        s = self.dither
        s.draw(seed, 1 / 256, CENTRE, DITHER)

        def write(start: int, end: int, own: torch.Tensor) -> None:
            step_bytes, sum_bytes, packed = layout.tile(start, own.numel())
            spans = list(chunks(start, end))
            rows_of = {first: slice((first - start) // BLOCK_ELEMENTS, blocks(last - start)) for first, last in spans}
            for first, last in spans:
                distance = torch.nn.functional.huber_loss(
                    by_block(flat, first, last), by_block(reference, first, last), reduction="none", delta=NEAR
                )
                least = own[rows_of[first]]
                torch.maximum(distance.amax(1).mul_(scale / NEAR), least, out=least)
            wire_steps(own, step_bytes)
            inverse = torch.reciprocal(own).unsqueeze(1)
            for first, last in spans:
                x = by_block(flat, first, last)
                rows = rows_of[first]
                words = torch.addcmul(s.drawn(seed, first, x.numel()), x, inverse[rows]).to(torch.int32)
                sum_bytes[rows] = self._checksums(self._sums(words))
                at = packed_nbytes(first - start, self.bits)
                codes = (words & 0xFF).to(torch.uint8).cpu().numpy().reshape(-1)
                packed[at : at + packed_nbytes(codes.size, self.bits)] = pack(codes, self.bits)

        return write

    def decode(self, layout: PacketLayout, start: int, ours: torch.Tensor, out: torch.Tensor, of: Decoded) -> None:
        share = 1 / (1 << self.bits)
        device = out.device
        steps, wrapped, far = of
        for piece in layout.pieces(start, start + out.numel()):
            rows = slice((piece.start - start) // BLOCK_ELEMENTS, blocks(piece.end - start))
            within = slice(piece.start - start, piece.end - start)
            steps[rows].copy_(read_steps(piece.steps))
            step = steps[rows].unsqueeze(1)
            mine = by_block(ours, within.start, within.stop)
            count = mine.numel()
            codes = torch.from_numpy(unpack(piece.codes, self.bits)[piece.inside : piece.inside + count])
            sent = codes.to(device).view(-1, BLOCK_ELEMENTS)
            # In ranges: the distance of our theta above the value that Q = code represents, ...
            shift = tiles.offset(self._seed, piece.start)
            offset = torch.sub(self._back[shift : shift + count].view(-1, BLOCK_ELEMENTS), sent.float(), alpha=share)
            above = torch.addcmul(offset, mine, torch.reciprocal(step).mul_(share))
            turns = torch.round(above)  # ... Q' >> b, ...
            above.sub_(turns)  # ... and above the decoded value
            sums = (self._sums(turns.to(torch.int32)) << self.bits) + self._sums(sent)
            wrapped[rows] = torch.from_numpy((self._checksums(sums) != piece.sums).view(np.uint8)).to(device)
            ranges = step * (1 << self.bits)
            far[rows] = torch.where(wrapped[rows] > 0, 1.0, above.abs().amax(1)) * ranges.squeeze(1)
            out[within].copy_(torch.addcmul(mine, above, -ranges).view(-1)[: piece.end - piece.start])

    def note(
        self, far: torch.Tensor, wrapped: torch.Tensor, own: torch.Tensor, memory: torch.Tensor
    ) -> tuple[int, int]:
        torch.maximum(memory, far, out=memory)
        share = (far / own).mul_(1 / (1 << self.bits)).clamp_(max=1.0).mul_(SHARES)
        return int(wrapped.sum()), int(share.to(torch.int32).sum())
