"""Randomness for rounding: bytes determined by a 64-bit seed, the same on every machine, device and version.

Numpy promises not to change Philox's raw stream (NEP 19). A message draws one pool and each chunk reads it from another
offset: fresh numbers for every element would cost three times the rest of the encoding (measured: 2.8 ns an element).
So two elements of a message may share a number, but never within one sum.
"""

from __future__ import annotations

import numpy as np
import torch

from swarmnode.gossip.compression.codec import BLOCK_ELEMENTS, CHUNK

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
