"""The device a replica works on: whether PyTorch has it, what it is called, how much memory it has left."""

from __future__ import annotations

import functools
import math
import time

import torch

from swarmnode.errors import HardwareFault, UsageError

KINDS = ("cpu", "cuda", "mps", "xpu")
MATRIX, TIMES = 512, 5  # of the product timed; guess: large enough for its speed to show
FASTER = 1.5  # guess: a matrix product that is so much faster outweighs the casts around it


def check_device(device: str) -> None:
    """Raises UsageError for a device PyTorch does not know, HardwareFault for one that is not here."""
    if device.partition(":")[0] not in KINDS:
        raise UsageError(f"--device {device[:40]!r}: say cpu, cuda, cuda:1 or mps")
    try:
        torch.empty(1, device=torch.device(device))
    except (RuntimeError, AssertionError, ValueError) as error:
        reason = (str(error).splitlines() or ["?"])[0][:160]
        raise HardwareFault(f"--device {device[:40]}: {reason}; `swarmnode doctor` says more") from None


def has_cuda() -> bool:
    """Whether this PyTorch sees an NVIDIA GPU."""
    return torch.cuda.is_available()


def device_text(device: str) -> str:
    """`PyTorch 2.5, NVIDIA H200, 139 GiB`, of a device that is here."""
    if device.startswith("cuda"):
        found = torch.cuda.get_device_properties(torch.device(device))
        return f"PyTorch {torch.__version__}, {found.name}, {found.total_memory >> 30} GiB"
    return f"PyTorch {torch.__version__}, {device}"


def free_nbytes(device: str) -> int | None:
    """Memory of a CUDA device that nobody uses; None for others, which share the machine's."""
    return int(torch.cuda.mem_get_info(torch.device(device))[0]) if device.startswith("cuda") else None


def autocasts(device: str, precision: str = "auto") -> bool:
    """Whether a replica on `device` multiplies its matrices in bfloat16; "auto": where it is clearly faster here."""
    return precision == "bf16" or (precision == "auto" and bfloat16_speedup(device) >= FASTER)


@functools.cache
def bfloat16_speedup(device: str) -> float:
    """How many times as fast `device` multiplies in bfloat16 as in float32: measured once, in some tens of
    milliseconds. 1 where it was not tried: only processors and CUDA devices are."""
    if device.partition(":")[0] not in ("cpu", "cuda"):
        return 1.0
    seconds = {torch.float32: math.inf, torch.bfloat16: math.inf}
    factors = {dtype: torch.ones(MATRIX, MATRIX, dtype=dtype, device=device) for dtype in seconds}
    for _ in range(1 + TIMES):  # the first makes ready; by turns, so that no slow moment is one's alone
        for dtype, factor in factors.items():
            begun = time.perf_counter()
            (factor @ factor)[0, 0].item()  # waits for a device that works beside us
            seconds[dtype] = min(seconds[dtype], time.perf_counter() - begun)
    return seconds[torch.float32] / seconds[torch.bfloat16]


def use_one_thread() -> None:
    """As node processes do: more than one a process runs slower (measured, test-lab section 7)."""
    torch.set_num_threads(1)
