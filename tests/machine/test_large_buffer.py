"""Buffers for states: large ones take no anonymous memory, and a full disk is an error and not a crash."""

from __future__ import annotations

from pathlib import Path

import pytest

from swarmnode import large_buffer as module
from swarmnode.errors import LocalFault
from swarmnode.large_buffer import large_buffer


def anonymous_nbytes() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon"))


def test_a_large_buffer_lies_in_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "IN_MEMORY_NBYTES", 1 << 20)
    before, size = anonymous_nbytes(), 64 << 20
    room = large_buffer(size)
    room[:] = bytes(4) * (size // 4)
    room[5] = 7
    assert room.nbytes == size and bytes(room[4:7]) == b"\0\7\0"
    del room
    kept = large_buffer(size)
    for start in range(0, size, 1 << 20):
        kept[start : start + (1 << 20)] = b"x" * (1 << 20)
    assert anonymous_nbytes() - before < size / 2


def test_a_full_disk_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "IN_MEMORY_NBYTES", 1 << 20)
    with pytest.raises(LocalFault, match=r"\d+ bytes for a state do not fit"):
        large_buffer(1 << 60)
