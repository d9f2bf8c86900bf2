"""Common parts of block-scaled codecs: iteration over tiles, steps in bfloat16, and the first checks of a packet."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch

from swarmnode.errors import RemoteFault
from swarmnode.gossip.compression import dither
from swarmnode.gossip.compression.codec import BLOCK_ELEMENTS, CHUNK, TILE, Bytes
from swarmnode.ports import WireTensor

Part = Callable[[int, int], torch.Tensor]
STEP_LEAST = 2.0**-100  # of a block of zeros; no weight is smaller


def blocks(elements: int) -> int:
    """Blocks of BLOCK_ELEMENTS that hold `elements`."""
    return -(-elements // BLOCK_ELEMENTS)


def pieces(start: int, end: int, size: int) -> Iterator[tuple[int, int]]:
    """(start, end) of the pieces of [start, end) that each lie in one multiple of `size`."""
    while start < end:
        stop = min((start // size + 1) * size, end)
        yield start, stop
        start = stop


def tiles(start: int, end: int) -> Iterator[tuple[int, int]]:
    return pieces(start, end, TILE)


def chunks(start: int, end: int) -> Iterator[tuple[int, int]]:
    return pieces(start, end, CHUNK)


def check_range(start: int, count: int, parameters: int) -> None:
    """Assert that a read covers whole blocks (the last one may be partial)."""
    assert start % BLOCK_ELEMENTS == 0, f"read from element {start}, inside a block"
    assert count % BLOCK_ELEMENTS == 0 or start + count == parameters, f"read of {count} from {start} of {parameters}"


def head(buffer: torch.Tensor, rows: int) -> torch.Tensor:
    """`buffer[:rows]`; the buffer itself, at no cost, if that is all of it."""
    return buffer if buffer.size(0) == rows else buffer[:rows]


def wire_steps(steps: torch.Tensor, out: Bytes) -> None:
    """Round positive `steps` float32 [n] up to bfloat16, in place, and write their two bytes to `out` [2n]. Numpy's
    calls cost half of torch's, which matters with a few thousand steps (measured)."""
    if steps.device.type == "cpu":
        words = steps.numpy().view(np.uint32)
        np.add(words, np.uint32(0xFFFF), out=words)
        np.bitwise_and(words, np.uint32(0xFFFF0000), out=words)
    else:
        steps.view(torch.int32).add_(0xFFFF).bitwise_and_(-0x10000)
        words = steps.cpu().numpy().view(np.uint32)
    out.view(np.uint16)[:] = words.view(np.uint16)[1::2]


def read_steps(data: Bytes) -> torch.Tensor:
    """The inverse, from bytes of a packet at any address: float32 [n] on the CPU."""
    words = np.frombuffer(data.tobytes(), dtype="<u2").astype(np.uint32)
    words <<= 16
    return torch.from_numpy(words.view(np.float32))


def check_steps(data: Bytes, bound: float, what: str) -> None:
    """Raises RemoteFault unless all bfloat16 in `data` are at least STEP_LEAST and at most `bound`."""
    words = np.frombuffer(data.tobytes(), dtype="<u2")  # positive bfloat16 are ordered like their bits
    least, most = (int(np.float32(step).view(np.uint32)) >> 16 for step in (STEP_LEAST, bound))
    if words.size and not least <= int(words.min()) <= int(words.max()) <= most:
        raise RemoteFault(f"{what}: a step below {STEP_LEAST:g} or above {bound:g}")


def one_tensor(tensors: Sequence[WireTensor], name: str, parameters: int, least: int, most: int) -> Bytes:
    """The bytes of a packet of one wire tensor, checked. Raises RemoteFault."""
    if len(tensors) != 1:
        raise RemoteFault(f"{name} packet of {len(tensors)} tensors; it has 1")
    tensor = tensors[0]
    form = (tensor.codec, tensor.dtype, tuple(tensor.shape))
    expected = (name, "f32", (parameters,))
    if form != expected:
        raise RemoteFault(f"{name} packet of (codec, dtype, shape) {form}; expected {expected}")
    if not least <= tensor.nbytes <= most:
        raise RemoteFault(
            f"{name} packet of {tensor.nbytes} bytes for {parameters} parameters; expected {least}"
            + (f" to {most}" if most != least else "")
        )
    return np.frombuffer(tensor.data, dtype=np.uint8)


class Scratch:
    """Buffers for a chunk, and for a tile's steps, on one device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.floats = [torch.empty(CHUNK, dtype=torch.float32, device=device) for _ in range(2)]
        self.rows = self.floats[0].view(-1, BLOCK_ELEMENTS)  # the same memory, by block, ...
        self.words = self.rows.view(torch.int32)  # ... as whole numbers, ...
        self.numbers = self.floats[0].numpy() if device.type == "cpu" else None  # ... and as numpy sees it
        self.bytes = torch.empty(CHUNK, dtype=torch.uint8, device=device)
        self.steps, self.inverse = (torch.empty(TILE // BLOCK_ELEMENTS, device=device) for _ in range(2))
        self.dither = torch.empty(dither.POOL, device=device)
        self.pool = torch.empty(0, dtype=torch.uint8)  # the bytes behind `dither`, on the CPU
        self.seed = -1
        self._drawn: dict[int, torch.Tensor] = {}  # whole chunks of `dither`, by start
        self._inverse = self.inverse.view(TILE // CHUNK, -1, 1).unbind()
        self._most = self.steps.view(torch.int32).view(TILE // CHUNK, -1).unbind()
        self._whole: list[torch.Tensor] = []

    def whole(self, flat: torch.Tensor, keep: int = 0) -> torch.Tensor:
        """`flat` [n], of a chunk, as float32 of whole blocks: itself, or buffer `keep` padded with zeros."""
        count = blocks(flat.numel()) * BLOCK_ELEMENTS
        if count == flat.numel() and flat.dtype == torch.float32:
            return flat
        while len(self._whole) <= keep:
            self._whole.append(torch.empty(CHUNK, device=self.device))
        tile = self._whole[keep][:count]
        tile[: flat.numel()].copy_(flat)
        tile[flat.numel() :].zero_()
        return tile

    def parts(self, flat: torch.Tensor, keep: int = 0) -> Part:
        """A function (begin, end of a chunk) -> those elements of `flat` as float32 [rows, 64], valid until its next
        call. Whole chunks are cut all at once: slicing each costs as much as a twentieth of its encoding (measured)."""
        count = flat.numel() // CHUNK if flat.dtype == torch.float32 else 0
        cut = flat[: count * CHUNK].view(count, -1, BLOCK_ELEMENTS).unbind() if count else ()

        def part(begin: int, end: int) -> torch.Tensor:
            number = begin // CHUNK
            if number < count and end - begin == CHUNK:
                return cut[number]
            return self.whole(flat[begin:end], keep).view(-1, BLOCK_ELEMENTS)

        return part

    def inverse_of(self, row: int, rows: int) -> torch.Tensor:
        """The part of `inverse` for a chunk's blocks from `row` on, [rows, 1]."""
        if rows * BLOCK_ELEMENTS == CHUNK:
            return self._inverse[row * BLOCK_ELEMENTS // CHUNK]
        return self.inverse[row : row + rows].unsqueeze(1)

    def most_of(self, row: int, rows: int) -> torch.Tensor:
        """The part of `steps` for a chunk's blocks from `row` on, as int32 [rows]."""
        if rows * BLOCK_ELEMENTS == CHUNK:
            return self._most[row * BLOCK_ELEMENTS // CHUNK]
        return self.steps[row : row + rows].view(torch.int32)

    def largest(self, x: torch.Tensor, out: torch.Tensor) -> None:
        """Write the bits of max|x| by block of `x` [rows, 64] to `out` int32 [rows]: positive floats are ordered like
        their bits, and whole numbers are compared in a third of the time (measured)."""
        torch.abs(x, out=head(self.rows, len(x)))
        torch.amax(head(self.words, len(x)), dim=1, out=out)

    def truncate(self, out: Bytes) -> None:
        """Write the first elements of `rows`, 0 to 255, truncated to integers, to `out`. Numpy does in one pass what
        torch does in two (measured: 0.08 and 0.21 ns an element), and warns of non-finite values."""
        if self.numbers is not None:
            np.copyto(out, self.numbers if out.size == CHUNK else self.numbers[: out.size], casting="unsafe")
        else:
            torch.from_numpy(out).copy_(self.words.copy_(self.rows).view(-1)[: out.size])

    def draw_pool(self, seed: int) -> None:
        """Put the bytes of `seed` into `pool`."""
        self.pool, self.seed = dither.pool(seed), seed

    def draw(self, seed: int, scale: float, shift: float, mask: int = 0xFF) -> None:
        """Fill `dither` with scale · (byte & mask) + shift, of the bytes of `seed`."""
        self.draw_pool(seed)
        self.dither.copy_(self.pool & mask).mul_(scale).add_(shift)

    def pool_at(self, seed: int, start: int) -> int:
        """The address of the bytes of dither for the element `start`."""
        return self.pool.data_ptr() + dither.offset(seed, start)

    def drawn(self, seed: int, start: int, count: int) -> torch.Tensor:
        """The dither of `count` elements from `start`, within a chunk, by block."""
        at = dither.offset(seed, start)
        if count != CHUNK:
            return self.dither[at : at + count].view(-1, BLOCK_ELEMENTS)
        if at not in self._drawn:
            self._drawn[at] = self.dither[at : at + count].view(-1, BLOCK_ELEMENTS)
        return self._drawn[at]
