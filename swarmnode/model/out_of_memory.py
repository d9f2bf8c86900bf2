"""Out of memory costs one microbatch: free what can be made again, try once again, then tell the caller `Busy`."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import TypeVar

import torch

from swarmnode.errors import Busy

T = TypeVar("T")
AFTER_S = 1.0  # guess: a caller asks again so much later; a microbatch in work has then ended
CPU_SAYS = "can't allocate memory"  # PyTorch's DefaultCPUAllocator raises a plain RuntimeError


def is_out_of_memory(error: BaseException) -> bool:
    """Whether `error` says that memory ran out, on a device or on the host."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and CPU_SAYS in str(error)


def tried(work: Callable[[], T]) -> tuple[bool, T | None]:
    """(True, the value of `work`), or (False, None) if memory ran out. Then its frames, and the tensors they hold, are
    gone."""
    try:
        return True, work()
    except Exception as error:
        if not is_out_of_memory(error):
            raise
    return False, None


def twice(work: Callable[[], T], relieve: Callable[[], None], what: str) -> T:
    """The value of `work`; if memory runs out, that of a second call after `relieve` has freed some. Raises Busy if it
    runs out again."""
    for _ in range(2):
        done, value = tried(work)
        if done:
            return value  # type: ignore[return-value]  # it is T where `work` returned
        relieve()
    raise Busy(f"{what}: out of memory", retry_after_s=AFTER_S)


def give_back(device: torch.device) -> None:
    """Return memory that PyTorch keeps for later to the device."""
    if device.type == "cpu":
        return
    gc.collect()  # graphs may lie in reference cycles
    if device.type == "cuda":
        torch.cuda.empty_cache()
    elif device.type == "mps":
        torch.mps.empty_cache()
    elif device.type == "xpu":
        torch.xpu.empty_cache()


__all__ = ["AFTER_S", "give_back", "is_out_of_memory", "tried", "twice"]
