"""Common parts of block-scaled codecs: iteration over tiles, steps in bfloat16, and the first checks of a packet."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch

from swarmnode.base.errors import RemoteFault
from swarmnode.base.ports import WireTensor
from swarmnode.train.gossip.compression.codec import BLOCK_ELEMENTS, CHUNK, TILE, Bytes

STEP_LEAST = 2.0**-100  # of a block of zeros; no weight is smaller


# Randomness for rounding: bytes determined by a 64-bit seed, the same on every machine, device and version.
#
# Numpy promises not to change Philox's raw stream (NEP 19). A message draws one pool and each chunk reads it from
# another offset: fresh numbers for every element would cost three times the rest of the encoding (measured: 2.8 ns an
# element). So two elements of a message may share a number, but never within one sum.

OFFSETS = 64  # guess: start positions in the pool, BLOCK_ELEMENTS apart
POOL = CHUNK + OFFSETS * BLOCK_ELEMENTS


def pool(seed: int) -> torch.Tensor:
    """uint8 [POOL], uniform."""
    raw = np.random.Philox(key=seed).random_raw((POOL + 7) // 8).astype("<u8")
    return torch.from_numpy(raw.view(np.uint8)[:POOL])


def offset(seed: int, start: int) -> int:
    """The position in the pool of the dither for element `start`; the rest of its chunk follows."""
    chunk, inside = divmod(start, CHUNK)
    # 37 is coprime to OFFSETS, so all offsets occur
    return (turn(seed) + chunk * 37) % OFFSETS * BLOCK_ELEMENTS + inside


def turn(seed: int) -> int:
    """The index in OFFSETS of the first chunk."""
    return (seed >> 7) % OFFSETS


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


def by_block(flat: torch.Tensor, begin: int, end: int) -> torch.Tensor:
    """Elements [begin, end) of `flat` as float32 [rows, 64], the last row filled up with zeros."""
    part = flat[begin:end].float()
    if missing := -part.numel() % BLOCK_ELEMENTS:
        part = torch.nn.functional.pad(part, (0, missing))
    return part.reshape(-1, BLOCK_ELEMENTS)


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


class DitherPool:
    """The dither of one message on one device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.scaled = torch.empty(POOL, device=device)
        self.pool = torch.empty(0, dtype=torch.uint8)  # the bytes behind `scaled`, on the CPU
        self.seed = -1
        self._scaled_by: tuple[int, float, float, int] | None = None  # what `scaled` was filled with

    def draw_pool(self, seed: int) -> None:
        """Put the bytes of `seed` into `pool`."""
        self.pool = pool(seed)
        self.seed = seed

    def draw(self, seed: int, scale: float, shift: float, mask: int = 0xFF) -> None:
        """Fill `scaled` with scale · (byte & mask) + shift, of the bytes of `seed`."""
        if self.seed == seed and self._scaled_by == (
            seed,
            scale,
            shift,
            mask,
        ):  # the pieces of one packet share their dither
            return
        self.draw_pool(seed)
        self.scaled.copy_(self.pool & mask).mul_(scale).add_(shift)
        self._scaled_by = (seed, scale, shift, mask)

    def pool_at(self, seed: int, start: int) -> int:
        """The address of the bytes of dither for the element `start`."""
        return self.pool.data_ptr() + offset(seed, start)

    def drawn(self, seed: int, start: int, count: int) -> torch.Tensor:
        """The dither of `count` elements from `start`, within a chunk, by block."""
        at = offset(seed, start)
        return self.scaled[at : at + count].view(-1, BLOCK_ELEMENTS)
