"""Reports of a replica's work to the laws of the virtual world."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class Witness(Protocol):
    """Events that a replica reports to the laws."""

    def counted(self, replica: int, stage: int, mark: int) -> None: ...

    def mixed(self, replica: int, sent: int, got: int) -> None: ...

    def boundary(self, replica: int, stage: int, round_index: int) -> None: ...

    def applied(self, replica: int, stage: int, round_index: int, packets: Sequence[tuple[int, int]]) -> None: ...

    def fell_back(self, replica: int, round_index: int, giver: int, made_in: int) -> None: ...

    def given(self, chunks: Sequence[tuple[int, bytes]]) -> None: ...

    def taken(self, replica: int, chunks: Sequence[tuple[int, bytes]]) -> None: ...
