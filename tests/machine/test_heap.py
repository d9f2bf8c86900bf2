"""Freed memory goes back to the system."""

import psutil
import torch

from swarmnode.machine.heap import give_back

BLOCKS = 2000
ELEMENTS = 20_000  # 80 kB: below glibc's least limit


def test_freed_blocks_between_blocks_in_use_are_no_longer_resident() -> None:
    """Every 64th block stays, as what a step leaves lies between what its forwards took."""
    process = psutil.Process()
    kept = [torch.ones(ELEMENTS) for _ in range(BLOCKS)]
    full = process.memory_info().rss
    del kept[1::2], kept[1::2], kept[1::2], kept[1::2], kept[1::2], kept[1::2]
    give_back()
    freed = (BLOCKS - len(kept)) * 4 * ELEMENTS
    assert full - process.memory_info().rss > 0.7 * freed
    assert all(float(block[-1]) == 1.0 for block in kept)
