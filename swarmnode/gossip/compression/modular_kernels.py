"""The arithmetic of modular.py on pieces of a packet: torch operations on any device, or kernel.c, equal to the bit.

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

from swarmnode.gossip.compression import dither, kernel
from swarmnode.gossip.compression.codec import BLOCK_ELEMENTS, CHUNK, TILE, Bytes
from swarmnode.gossip.compression.tiles import Scratch, blocks, chunks, head, wire_steps

WIDTHS = (3, 4, 6)

_PLACES = np.array([[64], [16], [4]], np.uint8)  # positions of two bits of d in planes of 6 bits
_TOP = np.uint8(0xC0)


def packed_nbytes(count: int, bits: int) -> int:
    """Bytes of `count` codes; `count` is a multiple of 8."""
    return count // 8 * bits


class ChunkPacker:
    """Packs and unpacks up to `capacity` codes at a time, in its own buffer."""

    def __init__(self, capacity: int, bits: int) -> None:
        assert bits in WIDTHS, f"codes of {bits} bits"
        self.bits = bits
        self._spare = np.empty(capacity, np.uint8)
        self._pairs = np.empty(capacity // 2, np.uint8)

    def pack(self, codes: Bytes, out: Bytes) -> None:
        """Pack the low `bits` of `codes` [n] into `out` [n / 8 * bits]. May overwrite `codes`."""
        if self.bits == 6:
            self._pack_six(codes, out)
            return
        half = codes.size // 2
        low, high, moved = codes[:half], codes[half:], self._spare[:half]
        into = out if self.bits == 4 else self._pairs[:half]
        np.bitwise_and(low, np.uint8((1 << self.bits) - 1), out=into)
        np.multiply(high, np.uint8(1 << self.bits), out=moved)
        np.bitwise_or(into, moved, out=into)
        if self.bits == 3:
            self._pack_six(into, out)

    def unpack(self, packed: Bytes, out: Bytes) -> None:
        """The inverse: `packed` [n / 8 * bits] into `out` [n]."""
        if self.bits == 6:
            self._unpack_six(packed, out)
            return
        half = out.size // 2
        if self.bits == 3:
            self._unpack_six(packed, self._pairs[:half])
            packed = self._pairs[:half]
        np.bitwise_and(packed, np.uint8((1 << self.bits) - 1), out=out[:half])
        np.right_shift(packed, np.uint8(self.bits), out=out[half:])

    def _pack_six(self, codes: Bytes, out: Bytes) -> None:
        part = codes.size // 4
        moved = self._spare[: 3 * part]
        np.multiply(codes[3 * part :], _PLACES, out=moved.reshape(3, part))
        np.bitwise_and(moved, _TOP, out=moved)
        np.bitwise_and(codes[: 3 * part], np.uint8(63), out=out)
        np.bitwise_or(out, moved, out=out)

    def _unpack_six(self, packed: Bytes, out: Bytes) -> None:
        part = out.size // 4
        np.bitwise_and(packed, np.uint8(63), out=out[: 3 * part])
        moved, last = self._spare[: 3 * part], out[3 * part :]
        np.right_shift(packed, np.uint8(6), out=moved)
        for plane, shift in ((1, 4), (2, 16)):
            more = moved[plane * part : (plane + 1) * part]
            np.multiply(more, np.uint8(shift), out=more)
        np.bitwise_or(moved[:part], moved[part : 2 * part], out=last)
        np.bitwise_or(last, moved[2 * part :], out=last)


SHARES = 65536  # whole numbers, whose sum does not depend on the order
CENTRE = (
    1.5 * 2.0**16
)  # is added to theta / s, which is seldom below -2^15 (STEP_RATIO): so truncation rounds down. And
DITHER = 0xFE  # float32 rounds to 128ths there, which is to add 1 / 256 and round down: that makes these bytes odd
VIEWS_MOST = 64  # guess; a message has two to four kinds of pieces
NEAR = 2.0**-64  # huber_loss beyond it is |difference| NEAR exactly: one pass instead of two


_distance = torch.ops.aten.huber_loss.out  # takes a buffer for its result, which torch.nn.functional does not

Floats = np.ndarray[tuple[int], np.dtype[np.float32]]
Words = np.ndarray[tuple[int], np.dtype[np.uint16]]
Signed = np.ndarray[tuple[int], np.dtype[np.int16]]


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

    def tile_nbytes(self, elements: int) -> int:
        return blocks(elements) * (3 + 8 * self.bits)

    def tile_at(self, start: int) -> int:
        """The byte offset of the tile that begins at element `start`."""
        return start // TILE * self.tile_nbytes(TILE)

    def tile(self, start: int, rows: int) -> tuple[Bytes, Bytes, Bytes]:
        """The (steps, checksums, codes) of the tile of `rows` blocks that begins at element `start`."""
        at = self.tile_at(start)
        end = at + rows * (3 + 8 * self.bits)
        return self.data[at : at + 2 * rows], self.data[at + 2 * rows : at + 3 * rows], self.data[at + 3 * rows : end]

    def pieces(self, start: int, end: int) -> list[ChunkSpan]:
        """The positions of elements [start, end), by chunk."""
        spans, data = [], self.data
        for first, last in chunks(start, end):
            base, chunk = first // TILE * TILE, first // CHUNK * CHUNK
            tile = self.tile_at(base)
            tile_rows = blocks(min(TILE, self.parameters - base))
            row, rows = (first - base) // BLOCK_ELEMENTS, blocks(last - first)
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


TileWriter = Callable[[int, int, torch.Tensor], None]
"""Called with (start, end, own): writes the tile of these elements; `own` holds the steps of its blocks."""


class ModularEngine(Protocol):
    """The common interface of TorchEngine and KernelEngine."""

    scratch: Scratch

    def draw_back(self, seed: int) -> None:
        """Prepare the dither of `seed` for `decode`."""

    def encoder(
        self, flat: torch.Tensor, reference: torch.Tensor, layout: PacketLayout, seed: int, scale: float
    ) -> TileWriter:
        """A writer for the tiles of the message of `flat`, one after the other. Steps are scale max|flat - reference|
        by block, at least the value in `own`, which is set to them. `scratch.pool` then holds the dither of `seed`."""

    def decode(
        self,
        layout: PacketLayout,
        start: int,
        ours: torch.Tensor,
        out: torch.Tensor,
        steps: torch.Tensor,
        wrapped: torch.Tensor,
        far: torch.Tensor,
    ) -> None:
        """Decode elements from `start` on into `out`, given our own values `ours`. By block: their `steps`, whether the
        checksum is wrong, and how far the farthest element lies from ours (if wrong, the whole range, of which it is at
        least half)."""

    def note(
        self, far: torch.Tensor, wrapped: torch.Tensor, own: torch.Tensor, memory: torch.Tensor
    ) -> tuple[int, int]:
        """(blocks `wrapped`, the sum over blocks of `far` over the range of our step `own`, in SHARES); `memory`
        becomes at least `far`."""


def engine(bits: int, device: torch.device) -> ModularEngine:
    """The fastest engine for `device`."""
    library = kernel.load() if device.type == "cpu" else None
    return TorchEngine(bits, device) if library is None else KernelEngine(bits, library)


class KernelEngine:
    """The engine in C (kernel.c)."""

    def __init__(self, bits: int, library: ctypes.CDLL) -> None:
        self.bits = bits
        self.scratch = Scratch(torch.device("cpu"))
        self._library = library
        self._seed, self._back = -1, torch.empty(0, dtype=torch.uint8)

    def draw_back(self, seed: int) -> None:
        if seed != self._seed:
            self._seed, self._back = seed, dither.pool(seed)

    def encoder(
        self, flat: torch.Tensor, reference: torch.Tensor, layout: PacketLayout, seed: int, scale: float
    ) -> TileWriter:
        self.scratch.draw_pool(seed)
        tiles, pool, turn = layout.data.ctypes.data, self.scratch.pool, dither.turn(seed)

        def write(start: int, end: int, own: torch.Tensor) -> None:
            x, phi = (whole[start:end].float().contiguous() for whole in (flat, reference))  # usually no copy
            self._library.modular_encode(
                *(x.data_ptr(), phi.data_ptr(), end - start, pool.data_ptr(), turn, start // CHUNK),
                *(scale, self.bits, tiles + layout.tile_at(start), own.data_ptr()),
            )

        return write

    def decode(
        self,
        layout: PacketLayout,
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
        counts = (ctypes.c_int64 * 2)()
        pointers = (flat.data_ptr() for flat in (far, wrapped, own))
        self._library.modular_note(*pointers, len(far), self.bits, memory.data_ptr(), counts)
        return counts[0], counts[1]


def _wraps() -> bool:
    """Whether numpy truncates floats mod 2^16, as on all processors that were tried; the language leaves it open."""
    sums = np.empty(64, np.int16)
    for number in (70000, -70000):
        with np.errstate(invalid="ignore"):
            np.copyto(sums, np.full(64, number * 1.00001, np.float32), casting="unsafe")
        if not (sums == np.int32(number).astype(np.int16)).all():
            return False
    return True


class BlockViews(NamedTuple):
    """Cached views for the operations on a chunk's blocks: making them takes as long as some of the operations."""

    y: torch.Tensor  # float32 [rows, 64], ...
    bits: torch.Tensor  # ... as int32, ...
    values: Floats  # ... and flat on the CPU
    words: torch.Tensor  # int16 [rows, 64], ...
    numbers: Words  # ... and flat on the CPU
    signed: Signed  # ... as whole numbers of either sign
    low: Bytes  # [rows * 64]
    sums: torch.Tensor  # int16 [rows]
    steps: torch.Tensor  # float32 [rows], ...
    most: torch.Tensor  # ... as int32
    inverse: torch.Tensor  # float32 [rows, 1]


class TorchEngine:
    """Torch and numpy operations on whole chunks, in its own buffers. Codes are packed on the CPU."""

    def __init__(self, bits: int, device: torch.device) -> None:
        self.bits = bits
        self.scratch = Scratch(device)
        self._on_cpu = device.type == "cpu"
        self._at_once = self._on_cpu and _wraps()
        self._codes = ChunkPacker(CHUNK, bits)
        self._low = np.empty(CHUNK, np.uint8)
        self._words = torch.empty(CHUNK, dtype=torch.int16, device=device)
        self._steps = torch.empty(TILE // BLOCK_ELEMENTS, device=device)
        self._sums = torch.empty(TILE // BLOCK_ELEMENTS, dtype=torch.int16, device=device)
        self._sum_numbers: Words = self._sums.numpy(force=True).view(np.uint16)
        self._weights = torch.arange(1, 2 * BLOCK_ELEMENTS, 2, device=device, dtype=torch.int16)
        self._weights[-1] += 2  # 1, 3 … 125, 129
        self._float_weights = self._weights.float()
        self._seed, self._back = -1, torch.empty(dither.POOL, device=device)
        self._views: dict[tuple[int, int], BlockViews] = {}

    def _view(self, row: int, rows: int) -> BlockViews:
        """Views of the blocks from `row` of a tile on."""
        if (row, rows) not in self._views:
            if len(self._views) >= VIEWS_MOST:
                self._views.clear()
            s, count = self.scratch, rows * BLOCK_ELEMENTS
            words, steps = self._words[:count], self._steps[row : row + rows]
            self._views[row, rows] = BlockViews(
                s.rows[:rows],
                s.words[:rows],
                s.floats[0][:count].numpy(force=True),
                words.view(-1, BLOCK_ELEMENTS),
                words.numpy(force=True).view(np.uint16),
                words.numpy(force=True),
                self._low[:count],
                self._sums[row : row + rows],
                steps,
                steps.view(torch.int32),
                s.inverse_of(row, rows),
            )
        return self._views[row, rows]

    def draw_back(self, seed: int) -> None:
        """See Engine. Minus 1/2, in ranges."""
        if seed != self._seed:
            self._seed = seed
            self._back.copy_(dither.pool(seed) & DITHER).add_(1 - 128).mul_(1 / (256 << self.bits))

    def encoder(
        self, flat: torch.Tensor, reference: torch.Tensor, layout: PacketLayout, seed: int, scale: float
    ) -> TileWriter:
        s = self.scratch
        s.draw(seed, 1 / 256, CENTRE, DITHER)
        new, before = s.parts(flat, 0), s.parts(reference, 1)

        def write(start: int, end: int, own: torch.Tensor) -> None:
            rows, parts = own.numel(), []
            step_bytes, sum_bytes, packed = layout.tile(start, rows)
            for first, last in chunks(start, end):
                x = new(first, last)
                v = self._view((first - start) // BLOCK_ELEMENTS, len(x))
                _distance(x, before(first, last), 0, NEAR, out=v.y)
                torch.amax(v.bits, dim=1, out=v.most)  # positive floats, and NaN, are ordered like their bits
                parts.append((first, x, v))
            torch.maximum(head(self._steps, rows).mul_(scale / NEAR), own, out=own)
            wire_steps(own, step_bytes)
            torch.reciprocal(own, out=head(s.inverse, rows))
            for first, x, v in parts:
                torch.addcmul(s.drawn(seed, first, x.numel()), x, v.inverse, out=v.y)
                self._truncate(v, v.y)
                np.copyto(v.low, v.numbers, casting="unsafe")
                at = packed_nbytes(first - start, self.bits)
                self._codes.pack(v.low, packed[at : at + packed_nbytes(v.low.size, self.bits)])
                self._weigh(v, v.sums)
            self._checksums(rows, sum_bytes)

        return write

    def _truncate(self, v: BlockViews, y: torch.Tensor) -> None:
        """Write `y` truncated to integers, mod 2^16, to `words` and `numbers`."""
        if self._at_once:  # one pass where torch needs two
            np.copyto(v.signed, (v.values if y is v.y else y.view(-1).numpy()), casting="unsafe")
            return
        v.words.copy_(y.to(torch.int32))
        if not self._on_cpu:
            v.numbers[:] = v.words.view(-1).numpy(force=True).view(np.uint16)

    def _weigh(self, v: BlockViews, out: torch.Tensor) -> None:
        """Write the sum of w Q mod 2^16 of each block of `words` to `out` int16."""
        if self._on_cpu:
            torch.mv(v.words, self._weights, out=out)
        else:
            out.copy_((v.words.to(torch.int32) * self._weights).sum(1))

    def _checksums(self, rows: int, out: Bytes) -> None:
        """Write (sum >> b) mod 256 of each of the first `rows` of `sums` to `out`."""
        numbers = self._sum_numbers[:rows]
        if not self._on_cpu:
            numbers[:] = self._sums[:rows].numpy(force=True).view(np.uint16)
        np.right_shift(numbers, self.bits, out=numbers)
        np.copyto(out, numbers, casting="unsafe")

    def decode(
        self,
        layout: PacketLayout,
        start: int,
        ours: torch.Tensor,
        out: torch.Tensor,
        steps: torch.Tensor,
        wrapped: torch.Tensor,
        far: torch.Tensor,
    ) -> None:
        pieces, rows, share = layout.pieces(start, start + out.numel()), steps.numel(), 1 / (1 << self.bits)
        words = np.empty(rows, np.uint32)
        sums = np.empty(rows, np.uint8)
        for piece in pieces:
            row, some = (piece.start - start) // BLOCK_ELEMENTS, piece.sums.size
            words[row : row + some] = piece.steps.view("<u2")
            sums[row : row + some] = piece.sums
        words <<= 16
        steps.copy_(torch.from_numpy(words.view(np.float32)))
        inverse, minus_range = torch.reciprocal(steps).mul_(share), steps * -(1 << self.bits)
        turns = torch.empty(rows, dtype=torch.int16, device=out.device)
        sent = torch.empty(rows, device=out.device)
        with np.errstate(invalid="ignore"):  # a value this large comes from a malformed packet
            for piece in pieces:
                row, some = (piece.start - start) // BLOCK_ELEMENTS, piece.sums.size
                mine, part = (flat[piece.start - start : piece.end - start] for flat in (ours, out))
                by_block = (flat[row : row + some] for flat in (inverse, minus_range, turns, sent, far))
                self._decode_piece(piece, mine, part, *by_block)
        decoded = turns.bitwise_left_shift_(self.bits).add_(sent.int().short()).numpy(force=True).view(np.uint16)
        wrapped.copy_(torch.from_numpy((decoded >> self.bits).astype(np.uint8) != sums))
        torch.mul(far, minus_range, out=far).neg_()
        torch.where(wrapped > 0, minus_range.neg_(), far, out=far)

    def _decode_piece(
        self,
        piece: ChunkSpan,
        ours: torch.Tensor,
        out: torch.Tensor,
        inverse: torch.Tensor,
        minus_range: torch.Tensor,
        turns: torch.Tensor,
        sent_sums: torch.Tensor,
        far: torch.Tensor,
    ) -> None:
        """By block: the sums of w (Q' >> b) to `turns` and of w code to `sent_sums`; `far` in ranges."""
        s, bits, rows = self.scratch, self.bits, far.numel()
        mine, v = s.whole(ours).view(rows, BLOCK_ELEMENTS), self._view(0, rows)
        count, y, sent = mine.numel(), v.y, s.floats[1][: mine.numel()].view(rows, BLOCK_ELEMENTS)
        self._codes.unpack(piece.codes, self._low[: piece.codes.size * 8 // bits])
        sent.view(-1).copy_(torch.from_numpy(self._low[piece.inside : piece.inside + count]))
        torch.mv(sent, self._float_weights, out=sent_sums)
        # In ranges: the distance of our theta above the value that Q = code represents, ...
        shift = dither.offset(self._seed, piece.start)
        torch.sub(self._back[shift : shift + count].view(rows, -1), sent, alpha=1 / (1 << bits), out=sent)
        torch.addcmul(sent, mine, inverse.unsqueeze(1), out=y)
        torch.round(y, out=sent)  # ... Q' >> b, ...
        self._truncate(v, sent)
        self._weigh(v, turns)
        y.sub_(sent)  # ... and above the decoded value
        torch.amax(torch.abs(y, out=sent).view(torch.int32), dim=1, out=far.view(torch.int32))
        straight = out.dtype == torch.float32 and out.numel() == count and out.is_contiguous()
        target = out.view(rows, -1) if straight else sent
        torch.addcmul(mine, y, minus_range.unsqueeze(1), out=target)
        if not straight:
            out.copy_(target.view(-1)[: out.numel()])

    def note(
        self, far: torch.Tensor, wrapped: torch.Tensor, own: torch.Tensor, memory: torch.Tensor
    ) -> tuple[int, int]:
        torch.maximum(memory, far, out=memory)
        share = (far / own).mul_(1 / (1 << self.bits)).clamp_(max=1.0).mul_(SHARES)
        return int(wrapped.sum()), int(share.to(torch.int32).sum())
