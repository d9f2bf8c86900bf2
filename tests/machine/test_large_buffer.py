"""Buffers for states: large ones take no anonymous memory, and a full disk is an error and not a crash."""

import subprocess
import sys

import pytest

from swarmnode.base import large_buffer as module
from swarmnode.base.errors import LocalFault
from swarmnode.base.large_buffer import large_buffer

WRITES = """
from pathlib import Path
from swarmnode.base import large_buffer as module

def anonymous_nbytes():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon"))

module.IN_MEMORY_NBYTES, size, piece = 1 << 20, 64 << 20, 1 << 20
before = anonymous_nbytes()
room = module.large_buffer(size)
for start in range(0, size, piece):
    room[start : start + piece] = bytes(piece)
room[5] = 7
assert room.nbytes == size and bytes(room[4:7]) == bytes([0, 7, 0])
del room
kept = module.large_buffer(size)
for start in range(0, size, piece):
    kept[start : start + piece] = b"x" * piece
grown = anonymous_nbytes() - before
assert grown < size / 2, grown
"""


def test_a_large_buffer_lies_in_a_file() -> None:
    """In a process of its own: threads of other tests may take or give back memory meanwhile."""
    subprocess.run([sys.executable, "-c", WRITES], check=True, timeout=120)


def test_a_full_disk_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "IN_MEMORY_NBYTES", 1 << 20)
    with pytest.raises(LocalFault, match=r"\d+ bytes for a state do not fit"):
        large_buffer(1 << 60)
