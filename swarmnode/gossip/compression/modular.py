"""Modular low-bit pairs (ours): send only the low bits of a weight; the partner's own weight supplies the high ones.

The partner knows theta to within the replicas' spread, so per block of 64, with d a byte of dither (dither.py):

    s = kappa max|theta - phi| / 2^b, rounded up to bfloat16            phi: the sender's slow weights
    Q = floor(theta / s + d / 256)         what is sent: Q mod 2^b
    x = s (Q' + 1/2 - d / 256),  Q' = the value congruent to Q mod 2^b for which x is nearest to the receiver's theta

|x - theta| <= s / 2 and the error is uniform whatever theta is (subtractive dither, Schuchman 1964) as long as the
two thetas are less than 2^b s / 2 - s apart. Beyond, Q' is off by a multiple of 2^b: a wrap. Each block carries a
checksum of what is not sent, the sum of w_i (Q_i >> b) mod 256 with distinct odd weights whose sum is 2 mod 256: wraps
of one or two elements show, wraps of all alike too, others with chance 127/128. A block that fails decodes to the
receiver's own theta (for it, the round is a lone one), and whoever saw it fail sends it in int8 in its next message,
which cannot wrap (an escape).

kappa follows the spread seen: times the root mean square of (x - theta) / (2^b s), s being the receiver's own step,
over its target; up at once and down by a fifth of the way, and a quarter more when over 1/2 % of blocks failed. Nearest
kin: Moniqua [arXiv 2002.11787, section 4], modulo quantisation for decentralised SGD with a bound from theory.

No residual, no anchor, no memory but a bit a block. On the wire, little endian:

    header 32 bytes: parameters u64, seed of the dither u64, kappa f32, escapes u32, b u8, 7 zeros
    each tile of 2^19 elements, filled up with zeros to whole blocks:
        steps bfloat16 by block | checksums u8 by block | planes of codes (bits.py), chunk of 2^17 by chunk
    escapes: block numbers u32, ascending | steps bfloat16 | v + 128 u8, 64 a block (as int8.py)

32 + (3 + 8 b) ceil(P / 64) + 70 escapes bytes: 0.547 a parameter at b = 4.
"""

from __future__ import annotations

import ctypes
import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch

from swarmnode.errors import RemoteFault
from swarmnode.gossip.compression import dither, kernel
from swarmnode.gossip.compression.bits import PLANES, Packer, packed_nbytes
from swarmnode.gossip.compression.codec import BLOCK_ELEMENTS, CHUNK, TILE, Codec
from swarmnode.gossip.compression.tiles import (
    STEP_LEAST,
    Bytes,
    Scratch,
    blocks,
    check_range,
    check_steps,
    chunks,
    one_tensor,
    packet,
    read_steps,
    tiles,
    wire_steps,
)
from swarmnode.model.tensor import MAGNITUDE_MAX
from swarmnode.ports import WireTensor

HEADER = struct.Struct("<QQfIB7x")
ESCAPE_NBYTES = 4 + 2 + BLOCK_ELEMENTS
ESCAPES_SHARE = 1 / 8  # guess: of all blocks; keeps a message at 4 bits below 0.69 byte a parameter in the worst case

KAPPA = 12.0  # measured (design section 5): 12 loses nothing at 3 to 6 bits, 4 wraps on 19 % of coordinates
KAPPA_LEAST, KAPPA_MOST = 10.0, 64.0  # measured: with 4, kappa fell to 6 while replicas were close, and 15 % wrapped
SPREAD_TARGET = 0.116  # of the range, root mean square: half the range is 4.3 deviations, as kappa = 12 had it
KAPPA_FALL = 0.2  # guess: down slowly, up at once, since a step too wide costs less than a wrap
WRAPPED_MOST, KAPPA_RAISE = 0.005, 1.25  # guess
SAMPLE = 16  # each 16th element is looked at for the spread; guess

STEP_RATIO = 2.0**-15  # of the tile's largest weight, at least: float32 keeps the dither's 8 bits beside theta / s


@dataclass(slots=True)
class Seen:
    """What the packets read since the last message told about the spread."""

    squares: float = 0.0
    samples: int = 0
    blocks: int = 0
    wrapped: int = 0

    def wanted(self, kappa: float) -> float:
        """The kappa to use from now on, after `kappa`."""
        if not self.samples:
            return kappa
        aim = kappa * math.sqrt(self.squares / self.samples) / SPREAD_TARGET
        if self.wrapped > WRAPPED_MOST * self.blocks:
            aim = max(aim, kappa * KAPPA_RAISE)
        return min(max(aim, kappa + KAPPA_FALL * (aim - kappa), KAPPA_LEAST), KAPPA_MOST)


@dataclass(frozen=True, slots=True)
class _Head:
    parameters: int
    seed: int
    kappa: float
    escapes: int


class Modular(Codec):
    """`bits` bits a parameter and 3 bytes a block, of theta only."""

    lossy: ClassVar[bool] = True
    tensors: ClassVar[int] = 1
    relative: ClassVar[bool] = True

    bits: ClassVar[int]
    """3, 4 or 6 (2 was measured to lose 0.035 nat: design section 5)."""

    def __init__(self, kappa: float = KAPPA, *, adapt: bool = True) -> None:
        self.kappa, self.adapt = kappa, adapt
        self._kernel = kernel.load()
        self.seen = Seen()
        self._suspects: torch.Tensor | None = None  # bool by block: wrapped when last read
        self._steps: torch.Tensor | None = None  # float32 by block: of the last message
        self._use(torch.device("cpu"))

    def _use(self, device: torch.device) -> None:
        self._scratch = Scratch(device)
        self._packer = Packer(CHUNK, device)
        self._words = [torch.empty(CHUNK, dtype=torch.int32, device=device) for _ in range(2)]
        self._pool = torch.empty(0, dtype=torch.int32, device=device)
        self._pool_seed = -1
        self._drawn = torch.empty(0, dtype=torch.uint8)  # the bytes behind `_pool`, on the CPU
        self._packed = torch.empty(packed_nbytes(CHUNK, self.bits), dtype=torch.uint8, device=device)
        self._high = torch.empty(CHUNK, device=device)
        self._sums = torch.empty(CHUNK // BLOCK_ELEMENTS, device=device)
        self._high_bytes = torch.empty(CHUNK, dtype=torch.uint8, device=device)
        self._weights = torch.arange(1, 2 * BLOCK_ELEMENTS, 2, device=device, dtype=torch.float32)
        self._weights[-1] += 2  # 1, 3 … 125, 129

    def _tile_nbytes(self, elements: int) -> int:
        return blocks(elements) * (3 + 8 * self.bits)

    def _escapes_most(self, parameters: int) -> int:
        return int(blocks(parameters) * ESCAPES_SHARE) + 1

    def nbytes(self, parameters: int) -> int:
        """At most; 70 bytes less for each escape not taken."""
        return self._plain_nbytes(parameters) + ESCAPE_NBYTES * self._escapes_most(parameters)

    def _plain_nbytes(self, parameters: int) -> int:
        return HEADER.size + self._tile_nbytes(parameters)

    # Sending

    @torch.no_grad()
    def encode(self, flat: torch.Tensor, *, reference: torch.Tensor | None = None, seed: int = 0) -> list[WireTensor]:
        assert reference is not None and reference.shape == flat.shape, "steps are measured by flat - reference"
        flat = flat.detach()
        if flat.device != self._scratch.device:
            self._use(flat.device)
        if self.adapt:
            self.kappa = self.seen.wanted(self.kappa)
        self.seen = Seen()
        escapes = self._escaping(flat.numel())
        plain = self._plain_nbytes(flat.numel())
        wire = np.empty(plain + ESCAPE_NBYTES * escapes.size, np.uint8)
        wire[: HEADER.size] = np.frombuffer(
            HEADER.pack(flat.numel(), seed, self.kappa, escapes.size, self.bits), np.uint8
        )
        out, at = torch.from_numpy(wire), HEADER.size
        self._scratch.draw(seed, 1 / 256, 0.0)
        if self._steps is None or len(self._steps) != blocks(flat.numel()):
            self._steps = torch.empty(blocks(flat.numel()), device=flat.device)
        for start, end in tiles(0, flat.numel()):
            size = self._tile_nbytes(end - start)
            self._encode_tile(flat[start:end], reference[start:end], start, seed, out[at : at + size])
            at += size
        if escapes.size:
            self._encode_escapes(flat, escapes, seed, wire[plain:])
        return packet(self.name, flat.numel(), wire)

    def _escaping(self, parameters: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        if self._suspects is None:
            return np.empty(0, np.int64)
        found = torch.nonzero(self._suspects).view(-1)[: self._escapes_most(parameters)].cpu().numpy()
        self._suspects = None
        return found

    def _encode_tile(
        self, flat: torch.Tensor, reference: torch.Tensor, start: int, seed: int, out: torch.Tensor
    ) -> None:
        s, rows = self._scratch, blocks(flat.numel())
        least = max(float(flat[::SAMPLE].abs().max()) * STEP_RATIO, STEP_LEAST)
        assert self._steps is not None
        own = self._steps[start // BLOCK_ELEMENTS :][:rows]
        if self._kernel is not None and flat.device.type == "cpu":
            self._encode_tile_in_c(self._kernel, flat, reference, start, seed, least, own, out)
            return
        steps, inverse = s.steps[:rows], s.inverse[:rows]
        for first, last in chunks(0, flat.numel()):
            x, phi = s.whole(flat[first:last], 0), s.whole(reference[first:last], 1)
            delta = torch.sub(x, phi, out=s.floats[0][: x.numel()]).abs_()
            row = first // BLOCK_ELEMENTS
            torch.amax(delta.view(-1, BLOCK_ELEMENTS), dim=1, out=steps[row : row + blocks(last - first)])
        steps.mul_(self.kappa / (1 << self.bits)).clamp_(min=least)
        wire_steps(steps, s.step_bits[:rows], s.wire_steps[: 2 * rows])
        out[: 2 * rows].copy_(s.wire_steps[: 2 * rows])
        own.copy_(steps)
        torch.reciprocal(steps, out=inverse)
        at = 3 * rows
        for first, last in chunks(0, flat.numel()):
            x = s.whole(flat[first:last], 0)
            row, count = first // BLOCK_ELEMENTS, x.numel()
            y, drawn = s.floats[0][:count], s.drawn(seed, start + first, count)
            by_block = inverse[row : row + len(drawn)].unsqueeze(1)
            torch.mul(x.view(drawn.shape), by_block, out=y.view(drawn.shape)).add_(drawn)
            indices = y.view(torch.int32).copy_(y.floor_())
            nbytes = packed_nbytes(count, self.bits)
            self._packer.pack(s.bytes[:count].copy_(indices), self.bits, out[at : at + nbytes])
            at += nbytes
            high = indices.bitwise_right_shift_(self.bits)
            out[2 * rows + row : 2 * rows + row + len(drawn)].copy_(self._checksum(high))

    def _encode_tile_in_c(
        self,
        library: ctypes.CDLL,
        flat: torch.Tensor,
        reference: torch.Tensor,
        start: int,
        seed: int,
        least: float,
        own: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        s, rows, address = self._scratch, blocks(flat.numel()), out.data_ptr()
        at = address + 3 * rows
        for first, last in chunks(0, flat.numel()):
            x, phi, row = s.whole(flat[first:last], 0), s.whole(reference[first:last], 1), first // BLOCK_ELEMENTS
            library.modular_encode(
                x.data_ptr(),
                phi.data_ptr(),
                x.numel() // BLOCK_ELEMENTS,
                s.pool_at(seed, start + first),
                self.kappa / (1 << self.bits),
                least,
                self.bits,
                address + 2 * row,
                address + 2 * rows + row,
                at,
                at + packed_nbytes(x.numel(), PLANES[self.bits][0]),
                own.data_ptr() + 4 * row,
            )
            at += packed_nbytes(x.numel(), self.bits)

    def _checksum(self, high: torch.Tensor) -> torch.Tensor:
        """Of Q >> b by element, int32: sum of w (Q >> b) mod 256 by block, float32, exact."""
        high = self._high[: high.numel()].copy_(self._high_bytes[: high.numel()].copy_(high))
        sums = self._sums[: high.numel() // BLOCK_ELEMENTS]
        torch.mv(high.view(-1, BLOCK_ELEMENTS), self._weights, out=sums)
        return sums.remainder_(256)

    def _encode_escapes(
        self, flat: torch.Tensor, escapes: np.ndarray[tuple[int], np.dtype[np.int64]], seed: int, out: Bytes
    ) -> None:
        count = escapes.size
        padded = torch.zeros(count, BLOCK_ELEMENTS, device=flat.device)
        index = torch.from_numpy(escapes).to(flat.device).unsqueeze(1) * BLOCK_ELEMENTS
        index = index + torch.arange(BLOCK_ELEMENTS, device=flat.device)
        inside = index < flat.numel()
        padded[inside] = flat[index[inside]].float()
        steps = (padded.abs().amax(1) / 127).clamp_(min=STEP_LEAST)
        words = torch.empty(2 * count, dtype=torch.uint8, device=flat.device)
        wire_steps(steps, torch.empty(count, dtype=torch.int32, device=flat.device), words)
        drawn = self._scratch.dither[index % CHUNK]  # which numbers does not matter, only that they are chance
        codes = (padded / steps.unsqueeze(1) + drawn + (128 + 1 / 512)).to(torch.uint8)
        out[: 4 * count] = escapes.astype("<u4").view(np.uint8)
        out[4 * count : 6 * count] = words.cpu().numpy()
        out[6 * count :] = codes.cpu().numpy().reshape(-1)

    # Receiving

    def _head(self, data: Bytes) -> _Head:
        parameters, seed, kappa, escapes, _ = HEADER.unpack(data[: HEADER.size].tobytes())
        return _Head(parameters, seed, kappa, escapes)

    def check(self, tensors: Sequence[WireTensor], parameters: int) -> None:
        what, plain = f"{self.name} packet", self._plain_nbytes(parameters)
        data = one_tensor(tensors, self.name, parameters, plain, self.nbytes(parameters))
        head = self._head(data)
        again = HEADER.pack(parameters, head.seed, head.kappa, (data.size - plain) // ESCAPE_NBYTES, self.bits)
        if not KAPPA_LEAST <= head.kappa <= KAPPA_MOST or data[: HEADER.size].tobytes() != again:
            raise RemoteFault(f"{what} with the header {data[: HEADER.size].tobytes().hex()}")
        if data.size != plain + head.escapes * ESCAPE_NBYTES:
            raise RemoteFault(f"{what} of {data.size} bytes with {head.escapes} escapes")
        at = HEADER.size
        for start, end in tiles(0, parameters):
            check_steps(data[at : at + 2 * blocks(end - start)], MAGNITUDE_MAX / (1 << self.bits), what)
            at += self._tile_nbytes(end - start)
        numbers, steps, _ = self._escapes(data, parameters)
        check_steps(steps, MAGNITUDE_MAX / 128, what)
        if numbers.size and (int(numbers[-1]) >= blocks(parameters) or bool((np.diff(numbers) <= 0).any())):
            raise RemoteFault(f"{what} whose escapes are not ascending blocks")

    def _escapes(self, data: Bytes, parameters: int) -> tuple[np.ndarray[tuple[int], np.dtype[np.int64]], Bytes, Bytes]:
        """(block numbers, bytes of steps, codes)."""
        tail = data[self._plain_nbytes(parameters) :]
        count = tail.size // ESCAPE_NBYTES
        numbers = np.frombuffer(tail[: 4 * count].tobytes(), "<u4").astype(np.int64)
        return numbers, tail[4 * count : 6 * count], tail[6 * count :]

    @torch.no_grad()
    def read(
        self, tensors: Sequence[WireTensor], start: int, out: torch.Tensor, reference: torch.Tensor | None = None
    ) -> None:
        assert reference is not None and reference.shape == out.shape, "decoded to the value nearest to the reference"
        data, parameters = np.frombuffer(tensors[0].data, np.uint8), tensors[0].shape[0]
        check_range(start, out.numel(), parameters)
        if out.device != self._scratch.device:
            self._use(out.device)
        head = self._head(data)
        self._draw(head.seed)
        numbers, steps, codes = self._escapes(data, parameters)
        for first, end in chunks(start, start + out.numel()):
            mine, part = reference[first - start : end - start], out[first - start : end - start]
            ours = self._scratch.whole(mine)
            whole = part.dtype == torch.float32 and part.numel() == ours.numel()
            target = part if whole else self._scratch.floats[1][: ours.numel()]
            row = first // BLOCK_ELEMENTS
            low, high = np.searchsorted(numbers, (row, row + blocks(end - first)))
            escaped = torch.from_numpy(numbers[low:high] - row).to(out.device)
            self._read_chunk(data, parameters, head.seed, first, ours, target, escaped)
            if high > low:
                found = torch.from_numpy(codes.reshape(-1, BLOCK_ELEMENTS)[low:high].astype(np.float32) - 128)
                found *= read_steps(steps[2 * low : 2 * high]).unsqueeze(1)
                target.view(-1, BLOCK_ELEMENTS)[escaped] = found.to(out.device)
            if not whole:
                part.copy_(target[: part.numel()])

    def _draw(self, seed: int) -> None:
        """The dither of the packet, less 1/2 and plus half the range, in 256ths of a step."""
        if seed != self._pool_seed:
            self._scratch.draw(seed, 1.0, float((1 << (self.bits + 7)) - 128))
            self._pool, self._pool_seed = self._scratch.dither.to(torch.int32), seed
            self._drawn = self._scratch.pool

    def _read_chunk(
        self,
        data: Bytes,
        parameters: int,
        seed: int,
        start: int,
        ours: torch.Tensor,
        out: torch.Tensor,
        escaped: torch.Tensor,
    ) -> None:
        """Decode whole blocks `start` … of one chunk into `out` [n], given our own values `ours` [n]."""
        s, bits, count, rows = self._scratch, self.bits, ours.numel(), ours.numel() // BLOCK_ELEMENTS
        base = start // TILE * TILE
        chunk = start // CHUNK * CHUNK
        tile_rows = blocks(min(TILE, parameters - base))
        at = HEADER.size + base // TILE * self._tile_nbytes(TILE)
        row = (start - base) // BLOCK_ELEMENTS
        steps = s.steps[:rows]
        steps.copy_(read_steps(data[at + 2 * row : at + 2 * (row + rows)]))
        whole = min(CHUNK, blocks(parameters - chunk) * BLOCK_ELEMENTS)
        if self._kernel is not None and ours.device.type == "cpu":
            address = data.ctypes.data + at
            planes = address + 3 * tile_rows + packed_nbytes(chunk - base, bits)
            first, second = PLANES[bits][0], sum(PLANES[bits][1:])
            wrapped, sample = s.bytes[:rows], s.inverse[: 4 * rows]
            self._kernel.modular_decode(
                address + 2 * row,
                address + 2 * tile_rows + row,
                planes + packed_nbytes(start - chunk, first),
                planes + packed_nbytes(whole, first) + packed_nbytes(start - chunk, second),
                ours.data_ptr(),
                rows,
                self._drawn.data_ptr() + dither.offset(seed, start),
                bits,
                out.data_ptr(),
                wrapped.data_ptr(),
                sample.data_ptr(),
            )
            self._note(start, parameters, wrapped, steps, sample, ours, out, escaped)
            return
        sums = torch.from_numpy(data[at + 2 * tile_rows + row : at + 2 * tile_rows + row + rows].astype(np.float32))
        at += 3 * tile_rows + packed_nbytes(chunk - base, bits)
        codes = s.bytes[:count]
        self._unpack(data, at, start - chunk, whole, codes)
        # In 256ths of a step: own theta + dither - 1/2 - q + half the range.
        y, words, moved = s.floats[0][:count], self._words[0][:count], self._words[1][:count]
        inverse = torch.reciprocal(steps, out=s.inverse[:rows]).mul_(256)
        torch.mul(ours.view(rows, -1), inverse.unsqueeze(1), out=y.view(rows, -1))
        words.copy_(y.round_())
        words.sub_(moved.copy_(codes).bitwise_left_shift_(8)).add_(self._dither(seed, start, count))
        # From bit b + 8 up: Q' >> b. Below: how far own theta lies from the value meant, plus half the range.
        torch.bitwise_right_shift(words, bits + 8, out=moved)
        wrapped = sums.to(out.device).ne_(self._checksum(moved))
        words.bitwise_and_((1 << (bits + 8)) - 1).sub_(1 << (bits + 7))
        y.copy_(words)
        y.view(rows, -1).mul_(torch.mul(steps, -1 / 256, out=s.inverse[:rows]).unsqueeze(1))
        torch.add(ours, y, out=out)
        self._note(start, parameters, wrapped, steps, words[::SAMPLE].float(), ours, out, escaped)

    def _dither(self, seed: int, start: int, count: int) -> torch.Tensor:
        at = dither.offset(seed, start)
        return self._pool[at : at + count]

    def _unpack(self, data: Bytes, at: int, skip: int, whole: int, out: torch.Tensor) -> None:
        """Codes `skip` … of a chunk of `whole` elements whose planes begin at byte `at`, into `out`."""
        if skip == 0 and out.numel() == whole:
            packed = self._packed[: packed_nbytes(whole, self.bits)]
            packed.copy_(torch.frombuffer(data[at : at + packed.numel()], dtype=torch.uint8))
            self._packer.unpack(packed, self.bits, out)
            return
        pieces = []  # a part of a chunk: the same part of each of its planes
        for width in PLANES[self.bits]:
            first = at + skip // 8 * width
            pieces.append(data[first : first + out.numel() // 8 * width])
            at += whole // 8 * width
        joined = np.concatenate(pieces)
        packed = self._packed[: joined.size]
        packed.copy_(torch.from_numpy(joined))
        self._packer.unpack(packed, self.bits, out)

    def _note(
        self,
        start: int,
        parameters: int,
        wrapped: torch.Tensor,
        steps: torch.Tensor,
        sample: torch.Tensor,
        ours: torch.Tensor,
        out: torch.Tensor,
        escaped: torch.Tensor,
    ) -> None:
        """Blocks whose checksum is wrong keep our values; the spread and the wraps are counted.

        `sample`: how far each 16th element lies from ours, in 256ths of the sender's `steps`."""
        if escaped.numel():
            wrapped[escaped] = 0
            sample.view(len(steps), -1)[escaped] = 0.0
        sample.mul_(1 / (1 << (self.bits + 8)))
        if self._steps is not None:
            first = start // BLOCK_ELEMENTS
            ratio = steps / self._steps[first : first + len(steps)]
            sample.view(len(steps), -1).mul_(ratio.unsqueeze(1)).clamp_(-1.0, 1.0)  # a still block is no measure
        self.seen.squares += float(torch.dot(sample, sample))
        self.seen.samples += sample.numel()
        self.seen.blocks += wrapped.numel()
        bad = torch.nonzero(wrapped).view(-1)
        if not bad.numel():
            return
        self.seen.wrapped += bad.numel()
        out.view(-1, BLOCK_ELEMENTS)[bad] = ours.view(-1, BLOCK_ELEMENTS)[bad]
        if self._suspects is None:
            self._suspects = torch.zeros(blocks(parameters), dtype=torch.bool)
        self._suspects[bad.cpu() + start // BLOCK_ELEMENTS] = True


class Modular3(Modular):
    """0.42 bytes a parameter."""

    name = "modular3"
    bits = 3


class Modular4(Modular):
    """0.55 bytes a parameter."""

    name = "modular4"
    bits = 4


class Modular6(Modular):
    """0.80 bytes a parameter."""

    name = "modular6"
    bits = 6
