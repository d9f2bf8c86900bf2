"""An optimizer's moments, kept on the device in float32, on the device in 8 bits, or in main memory.

`--optimizer-state` chooses. The optimizer reads and writes them part by part, so it needs the same arithmetic for all:

    device   float32 where the weights are: 4 bytes an element
    8bit     a code of 8 bits an element and a float32 scale for every 256: 1.02 bytes
    host     float32 in main memory: none on the device; each step moves 8 bytes an element over the bus

Codes are those of dynamic block-wise quantisation [arXiv 2110.02861, sections 1.3 and 2.1; blocks of 256 as in its
published code]: x / max|x| of its block, to the nearest of 256 values that are dense around zero.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

BLOCK = 256  # elements that share a scale: bitsandbytes' own for optimizers
PART = 1 << 22
"""Elements at a time: 16 MiB of float32, several of which exist during a step [measured on a thread of a CPU: 2^24
elements in 8 bits are read and written in 0.34 s by parts of 2^16 to 2^22, in 0.46 s at once]."""
EXPONENTS = 7  # paper: of a code's bits so many may be exponent


class Moments:
    """Moments [N] in float32 on the device, in one tensor that may be written in place."""

    def __init__(self, count: int, like: Tensor) -> None:
        """Zeros for `count` elements, of the dtype and on the device of `like`."""
        self.flat = like.new_zeros(count)

    @staticmethod
    def of(flat: Tensor) -> Moments:
        """The moments in `flat` [N], shared."""
        moments = Moments(0, flat)
        moments.flat = flat
        return moments

    def __len__(self) -> int:
        return self.flat.numel()

    def read(self, first: int, last: int) -> Tensor:
        """Elements [first, last), multiples of BLOCK or the end, on the device: in place or a copy."""
        return self.flat[first:last]

    def write(self, first: int, values: Tensor) -> None:
        """Store `values` from element `first` on."""
        self.flat[first : first + values.numel()].copy_(values)

    def like(self, values: Tensor) -> Tensor:
        """`values` with the dtype and on the device that `write` needs."""
        return values.to(self.flat)

    def zero_(self) -> None:
        """Set all to zero."""
        self.flat.zero_()

    def put(self, first: int, values: Tensor) -> None:
        """Store `values`, which `read` returned and an optimizer changed: here they are in place already."""

    def cuts(self) -> Iterator[tuple[int, int]]:
        """[first, last) of the parts to read one after the other: here all at once."""
        yield 0, len(self)


class _CopiedMoments(Moments):
    """Moments of which `read` returns a copy."""

    def put(self, first: int, values: Tensor) -> None:
        self.write(first, values)

    def cuts(self) -> Iterator[tuple[int, int]]:
        for start in range(0, len(self), PART):
            yield start, min(start + PART, len(self))


class HostMoments(_CopiedMoments):
    """Moments in main memory; `read` and `write` copy them over the bus."""

    def __init__(self, count: int, like: Tensor) -> None:
        super().__init__(count, torch.empty(0, dtype=like.dtype, device="cpu"))
        self._device = like.device

    def read(self, first: int, last: int) -> Tensor:
        return self.flat[first:last].to(self._device, copy=True)


class QuantisedMoments(_CopiedMoments):
    """Moments in 8 bits. `signed`: first moments; second ones are not negative."""

    def __init__(self, count: int, like: Tensor, *, signed: bool) -> None:
        super().__init__(0, like)
        blocks = -(-count // BLOCK)
        self._count = count
        values = codes(signed=signed)
        self._zero = int(values.abs().argmin())
        self._values = values.to(like.device)
        self._bounds = ((values[1:] + values[:-1]) / 2).to(like.device)
        if not signed:
            self._bounds[0] = 0.0  # none but 0 becomes 0: steps divided by eps alone were 135 rates long (measured)
        self._codes = torch.full((blocks * BLOCK,), self._zero, dtype=torch.uint8, device=like.device)
        self._scales = like.new_zeros(blocks)

    def __len__(self) -> int:
        return self._count

    def read(self, first: int, last: int) -> Tensor:
        blocks = slice(first // BLOCK, -(-last // BLOCK))
        values = self._values[self._codes[blocks.start * BLOCK : blocks.stop * BLOCK].int()].view(-1, BLOCK)
        return values.mul_(self._scales[blocks].unsqueeze(1)).view(-1)[first - blocks.start * BLOCK :][: last - first]

    def write(self, first: int, values: Tensor) -> None:
        last = first + values.numel()
        assert first % BLOCK == 0 and (last % BLOCK == 0 or last == self._count), f"elements {first} to {last}"
        for start in range(first, last, PART):
            self._write(start, values[start - first : start - first + PART])

    def _write(self, first: int, values: Tensor) -> None:
        blocks = slice(first // BLOCK, first // BLOCK - (-values.numel() // BLOCK))
        room = blocks.stop * BLOCK - first - values.numel()
        rows = (torch.nn.functional.pad(values, (0, room)) if room else values).view(-1, BLOCK)
        scales = rows.abs().amax(1)
        self._scales[blocks] = scales
        unit = rows / scales.clamp(min=torch.finfo(scales.dtype).tiny).unsqueeze(1)
        codes = torch.bucketize(unit, self._bounds, out_int32=True)
        self._codes[blocks.start * BLOCK : blocks.stop * BLOCK] = codes.to(torch.uint8).view(-1)

    def zero_(self) -> None:
        self._codes.fill_(self._zero)
        self._scales.zero_()


class MomentSection:
    """The moments [N] of a flat buffer, in consecutive pieces: each begins its own blocks."""

    def __init__(self, pieces: Sequence[tuple[int, Moments | None]], count: int) -> None:
        """`pieces`: first element and moments, ascending and without a gap; None: of frozen parameters, zeros without
        memory. `count`: N."""
        ends = [*(first for first, _ in pieces[1:]), count] if pieces else []
        self._pieces = [(first, end, kept) for (first, kept), end in zip(pieces, ends, strict=True)]
        self._count = count

    def __len__(self) -> int:
        return self._count

    def spans(self) -> Iterator[tuple[int, int]]:
        """Spans [first, last) of PART elements at most, for `read` and `write` in order."""
        for first, end, _ in self._pieces:
            for start in range(first, end, PART):
                yield start, min(start + PART, end)

    def read(self, first: int, last: int) -> Tensor | None:
        """Elements [first, last) of one piece, float32 on the device: in place or a copy. None: zeros."""
        begin, kept = self._piece(first, last)
        return None if kept is None else kept.read(first - begin, last - begin)

    def write(self, first: int, values: Tensor) -> None:
        """Store `values` from element `first` on, which begins a block of its piece. Those of frozen parameters are
        dropped."""
        begin, kept = self._piece(first, first + values.numel())
        if kept is not None:
            kept.write(first - begin, values)

    def load(self, first: int, values: Tensor) -> None:
        """Like `write`, for values of any dtype on any device."""
        begin, kept = self._piece(first, first + values.numel())
        if kept is not None:
            kept.write(first - begin, kept.like(values))

    def zero_(self) -> None:
        """Set all to zero."""
        for _, _, kept in self._pieces:
            if kept is not None:
                kept.zero_()

    def _piece(self, first: int, last: int) -> tuple[int, Moments | None]:
        for begin, end, kept in self._pieces:
            if begin <= first and last <= end:
                return begin, kept
        raise AssertionError(f"elements {first} to {last} are not of one piece")


@functools.cache
def codes(*, signed: bool) -> Tensor:
    """The 256 values of the codes, ascending, float32 on the CPU: in [-1, 1], or in [0, 1] if not `signed`.

    A code has an exponent of base 10, and a fraction of the bits that it leaves [arXiv 2110.02861, section 1.3].
    """
    bits = 7 if signed else 8
    values = [0.0, 1.0]
    for exponent in range(EXPONENTS):
        steps = 2 ** (exponent + bits - EXPONENTS)
        middles = [0.1 + 0.9 * (i + 0.5) / steps for i in range(steps)]
        positive = [10.0 ** (exponent - EXPONENTS + 1) * middle for middle in middles]
        values += positive + ([-value for value in positive] if signed else [])
    return torch.tensor(sorted(values)[:256])


def made(state: str, count: int, like: Tensor, *, signed: bool, flat: Tensor | None = None) -> Moments:
    """Zeros for `count` elements, kept as `state` says, for weights like `like`; on the device in `flat` if given."""
    match state:
        case "8bit":
            return QuantisedMoments(count, like, signed=signed)
        case "host":
            return HostMoments(count, like)
    assert state == "device", state
    return Moments(count, like) if flat is None else Moments.of(flat)
