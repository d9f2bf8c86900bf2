"""A bounded memory of peers: keys cost nothing, memory does."""

from __future__ import annotations

from collections import OrderedDict
from typing import TypeVar

K = TypeVar("K")
V = TypeVar("V")

REMEMBERED_MAX = 4096  # guess: more than the machines that a node has to do with; a MB or two of some 300 bytes each


class Remembered(OrderedDict[K, V]):
    """The entries set last, REMEMBERED_MAX at most; the one set longest ago is forgotten first."""

    def __setitem__(self, key: K, value: V) -> None:
        super().__setitem__(key, value)
        self.move_to_end(key)
        if len(self) > REMEMBERED_MAX:
            self.popitem(last=False)
