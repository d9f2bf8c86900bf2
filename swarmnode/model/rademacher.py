"""Random directions of +1 and -1 that every machine draws alike, bit for bit, from a 64-bit seed.

Bits are Philox4x64-10's [Salmon et al., SC 2011], keyed with (seed, number of the chunk): a counter-based generator of
integers alone, whose stream numpy promises not to change (NEP 19). Bit 0 of a word, little-endian, is the chunk's first
sign. Signs instead of normal numbers: SPSA asks for a bounded inverse moment, which normal numbers lack and signs have
[Spall, IEEE Trans. Autom. Control 37(3), 1992, section III], and no logarithm or cosine can differ between machines.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

CHUNK = 1 << 18  # elements; part of the protocol: another size draws other signs
WORD = 64  # bits


def signs(seed: int, chunk: int, count: int) -> Tensor:
    """The first `count` signs, +1.0 or -1.0, of chunk number `chunk`: float32 [count] on the CPU."""
    assert 0 < count <= CHUNK, count
    key = np.array([seed, chunk], np.uint64)
    words = np.random.Philox(key=key).random_raw(-(-count // WORD)).astype("<u8")
    bits = np.unpackbits(words.view(np.uint8), count=count, bitorder="little")
    return torch.from_numpy(bits.astype(np.float32) * np.float32(2.0) - np.float32(1.0))


def chunks(elements: int) -> Iterator[tuple[int, int, int]]:
    """(number, first, last) of each chunk of a flat buffer."""
    for number, first in enumerate(range(0, elements, CHUNK)):
        yield number, first, min(first + CHUNK, elements)


@torch.no_grad()
def write_moved(flat: Tensor, steps: Sequence[tuple[int, float]], out: Tensor) -> None:
    """Set `out` [N] to `flat` [N] plus the sum of `length` times the signs of `seed` for the (seed, length) in `steps`,
    added one after the other in this order; `out` may be `flat`. Takes a chunk of memory, whatever N is."""
    for number, first, last in chunks(flat.numel()):
        here = out[first:last]
        if out is not flat:
            here.copy_(flat[first:last])
        for seed, length in steps:
            here.add_(signs(seed, number, last - first).to(here.device, here.dtype), alpha=length)
