"""Modular low-bit pairs (ours): send only the low bits of a weight; the partner's own weight supplies the high ones.

The partner knows theta to within the replicas' spread, so per block of 64, with d an odd byte of dither (tiles.py):

    s = kappa max(max|D|, mean of max|D|) / 2^b, rounded up to bfloat16     D = theta - phi, the sender's own
    Q = floor(theta / s + d / 256)         sent: Q mod 2^b
    x = s (Q' + 1/2 - d / 256),  Q' = the value congruent to Q mod 2^b for which x is nearest to the receiver's theta

|x - theta| <= s / 2 and the error is uniform for any theta (subtractive dither, Schuchman 1964) as long as the two
thetas are less than 2^b s / 2 - s apart. Beyond, Q' is off by a multiple of 2^b: a wrap. Each block carries a checksum
of the unsent bits, ((sum of w_i Q_i mod 2^16) >> b) mod 256 with distinct odd weights whose sum is 2 mod 256: it
detects wraps of one or two elements and equal wraps of all, others with probability 127/128. A block that fails decodes
to the receiver's own theta (for it, the round is a lone one), and the receiver sends it in int8 in its next message,
which cannot wrap (an escape).

Steps follow the observed spread, in three ways. A block's step is at least that of the mean block, because a block that
stood still here may have moved elsewhere (measured: four in five of the blocks that fail without this). Its range is at
least FAR_MARGIN / 2 times the recent distance of the block's partners: a block that drifted off needs partners whose
steps let it come back. And kappa is multiplied by the mean of max|x - theta| / (2^b s), s being the receiver's own
step, over its target: up at once, down by half of the way, a quarter more when over 3 % of blocks failed. STEP_MOST
limits it, whatever partners say, so that rounding never drowns what was learned. Nearest relative: Moniqua [arXiv
2002.11787], modulo quantisation with a bound from theory.

It needs no residual and no anchor, only a float and a bit of memory per block. On the wire, little endian:

    header 32 bytes: parameters u64, seed of the dither u64, kappa f32, escapes u32, b u8, 7 zeros
    each tile of 2^19 elements, padded with zeros to whole blocks:
        steps bfloat16 by block | checksums u8 by block | codes, chunk of 2^18 by chunk (modular_kernels.py)
    escapes: block numbers u32, ascending | steps bfloat16 | v + 128 u8, 64 a block (as int8.py)

32 + (3 + 8 b) ceil(P / 64) + 70 escapes bytes: 0.547 a parameter at b = 4.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Self

import numpy as np
import torch

from swarmnode.base.errors import RemoteFault
from swarmnode.base.ports import WireTensor
from swarmnode.model.tensor import MAGNITUDE_MAX
from swarmnode.train.gossip.compression.codec import BLOCK_ELEMENTS, CHUNK, TILE, Bytes, Codec, Done
from swarmnode_methods.modular_kernels import KERNELS, SHARES, Decoded, ModularEngine, PacketLayout, engine, tile_nbytes
from swarmnode_methods.tiles import (
    STEP_LEAST,
    blocks,
    check_range,
    check_steps,
    one_tensor,
    read_steps,
    tiles,
    wire_steps,
)

Numbers = np.ndarray[tuple[int], np.dtype[np.int64]]

HEADER = struct.Struct("<QQfIB7x")
ESCAPE_NBYTES = 4 + 2 + BLOCK_ELEMENTS
ESCAPES_SHARE = 1 / 8  # guess: of all blocks; keeps a message at 4 bits below 0.69 byte a parameter in the worst case

KAPPA = 8.0  # measured: least squared error after decoding, rounds 6 to 40: 7 % of the replicas' distance
KAPPA_LEAST = 6.0  # measured: at 5, 2 % of blocks fail even in the first rounds
KAPPA_MOST = 32.0  # guess
STEP_MOST = 1.5  # times max|D|, whatever the spread: rounding noise stays below half of it; guess
SHARE_TARGET = 0.2  # mean share of the range used by a block's farthest element: measured, some 0.5 % of blocks fail
KAPPA_FALL = 0.5  # measured: at 0.2 and a raise from 0.5 % on, kappa crept up to 50 within 40 rounds
WRAPPED_MOST = 0.03  # guess; fewer are blocks that moved elsewhere, and escapes repair them
KAPPA_RAISE = 1.25  # guess

FAR_MARGIN = 2.5  # guess: the range over the farthest element seen; twice would just reach it
FAR_KEEP = 0.7  # guess, per round: a block that was far once meets a few more partners before it is forgotten

# Blocks in a row that are looked at, of `SAMPLED_OF`: guesses. Each 16th block by itself, a page of memory apart, took
# a tenth of the encoding in torch and a third of that in C (measured).
SAMPLE = 16
SAMPLED_OF = 512
SAMPLED_TILES = 8  # at once: the first calls after megabytes of other work take several times as long (measured)
# Least step relative to the tile's largest weight: float32 keeps 7 bits of dither beside theta / s, and a weight three
# times as large, which the sample missed, is still rounded down (beyond, x may be a step further off).
STEP_RATIO = 2.0**-15


@dataclass(slots=True)
class SpreadObservation:
    """The spread seen in the packets read since the last message."""

    shares: float = 0.0  # share of the range at which a block's farthest element lay from ours, summed over blocks
    blocks: int = 0
    wrapped: int = 0

    def wanted(self, kappa: float, most: float) -> float:
        """The kappa to use from now on, after `kappa`."""
        if not self.blocks:
            return kappa
        aim = kappa * self.shares / self.blocks / SHARE_TARGET
        if self.wrapped > WRAPPED_MOST * self.blocks:
            aim = max(aim, kappa * KAPPA_RAISE)
        return min(max(aim, kappa + KAPPA_FALL * (aim - kappa), KAPPA_LEAST), most)


class Modular(Codec):
    """`bits` bits per parameter and 3 bytes per block, for theta only."""

    tensors: ClassVar[int] = 1
    library = KERNELS
    relative: ClassVar[bool] = True

    bits: ClassVar[int]
    """3, 4 or 6 (2 bits lose 0.035 nat, measured)."""

    def __init__(self, kappa: float = KAPPA, *, adapt: bool = True) -> None:
        self.kappa = kappa
        self.adapt = adapt
        self.seen = SpreadObservation()
        self._suspects: torch.Tensor | None = None  # bool by block: wrapped when last read
        self._steps: torch.Tensor | None = None  # float32 by block: of the last message
        self._far: torch.Tensor | None = None  # float32 by block: distance of the farthest partner, fading
        self._escapes_due: Numbers = np.empty(0, np.int64)  # of the message begun
        self._engines: dict[torch.device, ModularEngine] = {}

    def another(self) -> Self:
        codec = type(self)(self.kappa, adapt=self.adapt)
        codec._engines = self._engines
        return codec

    def _on(self, device: torch.device) -> ModularEngine:
        if device not in self._engines:
            self._engines[device] = engine(self.bits, device)
        return self._engines[device]

    def _escapes_most(self, parameters: int) -> int:
        return int(blocks(parameters) * ESCAPES_SHARE) + 1

    def nbytes(self, parameters: int) -> int:
        """Most bytes; each unused escape saves 70."""
        return self.least_nbytes(parameters) + ESCAPE_NBYTES * self._escapes_most(parameters)

    def least_nbytes(self, parameters: int) -> int:
        """Bytes without escapes."""
        return HEADER.size + tile_nbytes(parameters, self.bits)

    def _layout(self, data: Bytes, parameters: int) -> PacketLayout:
        return PacketLayout(data[HEADER.size : self.least_nbytes(parameters)], parameters, self.bits)

    # Sending

    def begin(self, flat: torch.Tensor) -> int:
        parameters = flat.numel()
        device = flat.device
        if self.adapt:
            self.kappa = self.seen.wanted(self.kappa, self.kappa_most)
        self.seen = SpreadObservation()
        self._escapes_due = self._escaping(parameters)
        if self._steps is None or len(self._steps) != blocks(parameters) or self._steps.device != device:
            self._steps = torch.empty(blocks(parameters), device=device)
        return self.least_nbytes(parameters) + ESCAPE_NBYTES * self._escapes_due.size

    def write(self, wire: Bytes, flat: torch.Tensor, reference: torch.Tensor | None, seed: int, done: Done) -> None:
        assert reference is not None and reference.shape == flat.shape, "steps are measured by flat - reference"
        parameters = flat.numel()
        code = self._on(flat.device)
        escapes = self._escapes_due
        header = HEADER.pack(parameters, seed, self.kappa, escapes.size, self.bits)
        wire[: HEADER.size] = np.frombuffer(header, np.uint8)
        assert self._steps is not None
        self._far = self._remembered(parameters, flat.device)
        scale = self.kappa / (1 << self.bits)
        encode = code.encoder(flat, reference, self._layout(wire, parameters), seed, scale)
        sampled: list[tuple[float, float]] = []
        torch.mul(self._far, FAR_MARGIN / (1 << self.bits), out=self._steps)
        with np.errstate(invalid="ignore"):  # the receiver refuses a step that is not finite
            for start, end in tiles(0, parameters):
                sampled = sampled or _sampled(flat, reference, start)
                usual, least = sampled.pop(0)
                least = max(least, scale * usual, STEP_LEAST)
                most = max(least, usual * self.kappa_most / (1 << self.bits))  # whatever partners say
                own = self._steps[start // BLOCK_ELEMENTS : blocks(end)]
                encode(start, end, own.clamp_(least, most))
                done(HEADER.size + tile_nbytes(end, self.bits))
        self._far.mul_(FAR_KEEP)
        if escapes.size:
            self._encode_escapes(flat, escapes, seed, wire[self.least_nbytes(parameters) :])

    @property
    def kappa_most(self) -> float:
        return min(KAPPA_MOST, STEP_MOST * (1 << self.bits))

    def _remembered(self, parameters: int, device: torch.device) -> torch.Tensor:
        far = self._far
        if far is None or len(far) != blocks(parameters) or far.device != device:
            far = torch.zeros(blocks(parameters), device=device)
        return far

    def _escaping(self, parameters: int) -> Numbers:
        if self._suspects is None:
            return np.empty(0, np.int64)
        positions: Numbers = torch.nonzero(self._suspects).view(-1)[: self._escapes_most(parameters)].cpu().numpy()
        self._suspects = None
        return positions

    def _encode_escapes(self, flat: torch.Tensor, escapes: Numbers, seed: int, out: Bytes) -> None:
        count = escapes.size
        padded = torch.zeros(count, BLOCK_ELEMENTS, device=flat.device)
        index, inside = _elements(torch.from_numpy(escapes).to(flat.device), flat.numel())
        padded[inside] = flat[index[inside]].float()
        steps = (padded.abs().amax(1) / 127).clamp_(min=STEP_LEAST)
        wire_steps(steps, out[4 * count : 6 * count])
        # which dither does not matter, only that it is random
        drawn = self._on(flat.device).dither.pool.to(flat.device)[index % CHUNK]
        codes = (padded / steps.unsqueeze(1) + drawn * (1 / 256) + (128 + 1 / 512)).to(torch.uint8)
        out[: 4 * count] = escapes.astype("<u4").view(np.uint8)
        out[6 * count :] = codes.cpu().numpy().reshape(-1)

    # Receiving

    def _head(self, data: Bytes) -> tuple[int, float, int]:
        """(seed, kappa, escapes)."""
        _, seed, kappa, escapes, _ = HEADER.unpack(data[: HEADER.size].tobytes())
        return seed, kappa, escapes

    def check(self, tensors: Sequence[WireTensor], parameters: int) -> None:
        what = f"{self.name} packet"
        plain = self.least_nbytes(parameters)
        data = one_tensor(tensors, self.name, parameters, plain, self.nbytes(parameters))
        seed, kappa, escapes = self._head(data)
        again = HEADER.pack(parameters, seed, kappa, (data.size - plain) // ESCAPE_NBYTES, self.bits)
        if not KAPPA_LEAST <= kappa <= KAPPA_MOST or data[: HEADER.size].tobytes() != again:
            raise RemoteFault(f"{what} with an invalid header {data[: HEADER.size].tobytes().hex()}")
        if data.size != plain + escapes * ESCAPE_NBYTES:
            raise RemoteFault(f"{what} of {data.size} bytes with {escapes} escapes")
        at = HEADER.size
        for start, end in tiles(0, parameters):
            check_steps(data[at : at + 2 * blocks(end - start)], MAGNITUDE_MAX / (1 << self.bits), what)
            at += tile_nbytes(end - start, self.bits)
        numbers, steps, _ = self._escapes(data, parameters)
        check_steps(steps, MAGNITUDE_MAX / 128, what)
        if numbers.size and (int(numbers[-1]) >= blocks(parameters) or bool((np.diff(numbers) <= 0).any())):
            raise RemoteFault(f"{what} whose escapes are not ascending blocks")

    def _escapes(self, data: Bytes, parameters: int) -> tuple[Numbers, Bytes, Bytes]:
        """(block numbers, bytes of steps, codes)."""
        tail = data[self.least_nbytes(parameters) :]
        count = tail.size // ESCAPE_NBYTES
        numbers = np.frombuffer(tail[: 4 * count].tobytes(), "<u4").astype(np.int64)
        return numbers, tail[4 * count : 6 * count], tail[6 * count :]

    @torch.no_grad()
    def read(
        self, tensors: Sequence[WireTensor], start: int, out: torch.Tensor, reference: torch.Tensor | None = None
    ) -> None:
        assert reference is not None and reference.shape == out.shape, "decoded to the value nearest to the reference"
        data = np.frombuffer(tensors[0].data, np.uint8)
        parameters = tensors[0].shape[0]
        check_range(start, out.numel(), parameters)
        code = self._on(out.device)
        rows = blocks(out.numel())
        code.draw_back(self._head(data)[0])
        steps = torch.empty(rows, device=out.device)
        wrapped = torch.empty(rows, dtype=torch.uint8, device=out.device)
        far = torch.empty(rows, device=out.device)
        code.decode(self._layout(data, parameters), start, reference, out, Decoded(steps, wrapped, far))
        numbers, step_bytes, codes = self._escapes(data, parameters)
        low, high = np.searchsorted(numbers, (start // BLOCK_ELEMENTS, start // BLOCK_ELEMENTS + rows))
        if high > low:
            escaped = torch.from_numpy(numbers[low:high] - start // BLOCK_ELEMENTS).to(out.device)
            residues = torch.from_numpy(codes.reshape(-1, BLOCK_ELEMENTS)[low:high].astype(np.float32) - 128)
            residues *= read_steps(step_bytes[2 * low : 2 * high]).unsqueeze(1)
            far[escaped] = put_blocks(out, escaped, residues.to(out.device), reference)
            wrapped[escaped] = 0
        if self._note(start, parameters, far, wrapped):
            keep_blocks(out, torch.nonzero(wrapped).view(-1), reference)

    def _note(self, start: int, parameters: int, far: torch.Tensor, wrapped: torch.Tensor) -> int:
        """Record by block how `far` the farthest element lay from ours and whether it `wrapped`; return the number of
        wrapped blocks."""
        rows = slice(start // BLOCK_ELEMENTS, start // BLOCK_ELEMENTS + len(far))
        self._far = self._remembered(parameters, far.device)
        known = self._steps is not None and self._steps.device == far.device
        own = self._steps[rows] if known and self._steps is not None else torch.ones_like(far)
        count, shares = self._on(far.device).note(far, wrapped, own, self._far[rows])
        if known:
            self.seen.shares += shares / SHARES
            self.seen.blocks += wrapped.numel()
        if count:
            self.seen.wrapped += count
            if self._suspects is None:
                self._suspects = torch.zeros(blocks(parameters), dtype=torch.bool)
            self._suspects[rows] |= wrapped.cpu() > 0
        return count


def _sampled(flat: torch.Tensor, reference: torch.Tensor, start: int) -> list[tuple[float, float]]:
    """By tile from `start` on, several at a time: (the mean over blocks of max|D|; the least step for which float32
    keeps the dither, by the largest weight), from a sample of its blocks. 0 if not finite."""
    left = flat.numel() - start
    tiled = max(min(left // TILE, SAMPLED_TILES), 1)
    block = min(BLOCK_ELEMENTS, left)
    apart = SAMPLED_OF * block
    length = SAMPLE * block
    runs = min(left, tiled * TILE) // apart
    if not runs:
        runs = 1
        length = left // block * block
    new, old = (x[start:].as_strided((runs, length), (apart, 1)).float() for x in (flat, reference))
    means: list[float] = (new - old).abs().reshape(-1, block).amax(1).view(tiled, -1).mean(1).tolist()
    mosts: list[float] = new.abs().reshape(tiled, -1).amax(1).tolist()
    return [
        (mean if math.isfinite(mean) else 0.0, most * STEP_RATIO if math.isfinite(most) else 0.0)
        for mean, most in zip(means, mosts, strict=True)
    ]


def _elements(rows: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(element numbers of the blocks `rows`, [n, 64]; whether each is below `count`)."""
    index = rows.unsqueeze(1) * BLOCK_ELEMENTS + torch.arange(BLOCK_ELEMENTS, device=rows.device)
    return index, index < count


def put_blocks(out: torch.Tensor, rows: torch.Tensor, values: torch.Tensor, ours: torch.Tensor) -> torch.Tensor:
    """Write `values` [n, 64] over the blocks `rows` of `out`, the last of which may be partial; return the distance of
    each block's farthest element from `ours`."""
    index, inside = _elements(rows, out.numel())
    out[index[inside]] = values[inside].to(out.dtype)
    apart = torch.zeros_like(values)
    apart[inside] = values[inside] - ours[index[inside]].float()
    return apart.abs().amax(1)


def keep_blocks(out: torch.Tensor, rows: torch.Tensor, ours: torch.Tensor) -> None:
    """Write our values over the blocks `rows` of `out`."""
    index, inside = _elements(rows, out.numel())
    out[index[inside]] = ours[index[inside]].to(out.dtype)


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
