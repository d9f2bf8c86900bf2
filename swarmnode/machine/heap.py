"""The heap of the C library: what microbatches have freed goes back to the system before a round takes memory."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable


@functools.cache
def _malloc_trim() -> Callable[[int], int] | None:
    """glibc's malloc_trim(3); None where the C library has none."""
    try:
        found: Callable[[int], int] = ctypes.CDLL(None).malloc_trim
    except (OSError, AttributeError, TypeError):
        return None
    return found


def give_back() -> None:
    """Give freed memory back to the system. A C library keeps it for itself in blocks below its limit, 32 MiB in glibc:
    tensors of other sizes do not fit there, and take memory beside it."""
    if (trim := _malloc_trim()) is not None:
        trim(0)
