"""Chance for rounding: bytes that a 64-bit seed decides, the same on every machine, device and version.

Philox's raw stream is one numpy promises not to change (NEP 19). A message draws one pool and each chunk reads it from
another offset: fresh numbers for every element would cost three times the rest of the encoding (measured: 2.8 ns
an element). So two elements of a message may share a number, and never meet in a sum of their own.
"""

from __future__ import annotations

import numpy as np
import torch

from swarmnode.gossip.compression.codec import BLOCK_ELEMENTS, CHUNK

OFFSETS = 64  # guess: beginnings in the pool, BLOCK_ELEMENTS apart
POOL = CHUNK + OFFSETS * BLOCK_ELEMENTS


def pool(seed: int) -> torch.Tensor:
    """uint8 [POOL], uniform."""
    raw = np.random.Philox(key=seed).random_raw((POOL + 7) // 8).astype("<u8")
    return torch.from_numpy(raw.view(np.uint8)[:POOL])


def offset(seed: int, start: int) -> int:
    """Where in the pool the dither of the element `start` lies; that of the rest of its chunk follows."""
    chunk, inside = divmod(start, CHUNK)
    return (turn(seed) + chunk * 37) % OFFSETS * BLOCK_ELEMENTS + inside  # 37: coprime to OFFSETS, so all come


def turn(seed: int) -> int:
    """Of the OFFSETS, that of the first chunk."""
    return (seed >> 7) % OFFSETS
