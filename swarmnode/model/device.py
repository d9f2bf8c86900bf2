"""The device of a replica: its availability, name, free memory and speed."""

from __future__ import annotations

import functools
import gc
import math
import time
import warnings
from collections.abc import Callable
from typing import TypeVar

import torch

from swarmnode.base.concurrency import processors
from swarmnode.base.errors import Busy, HardwareFault, UsageError, cause_of

KINDS = ("cpu", "cuda", "mps", "xpu")
MATRIX = 512  # guess: size of the timed product, large enough to show the speed
TIMES = 5  # guess
BFLOAT16_SINCE = (8, 0)  # compute capability of Ampere, the first with bfloat16 units
FASTER = 1.5  # guess: a matrix product this much faster outweighs the casts around it


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
        relieve()  # the frames of `work`, and the tensors they hold, are gone
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


def check_device(device: str) -> None:
    """Raises UsageError for a device that PyTorch does not know, HardwareFault for one this machine lacks."""
    if device.partition(":")[0] not in KINDS:
        raise UsageError(
            f"--device {device[:40]!r}: use auto, cpu, cuda or cuda:1; cuda on ROCm, mps and xpu are passed to"
            " PyTorch as they are, and were never run"
        )
    try:
        torch.empty(1, device=torch.device(device))
    except (RuntimeError, AssertionError, ValueError) as error:
        reason = cause_of(error)[:160]
        raise HardwareFault(f"--device {device[:40]}: {reason}; `swarmnode doctor` says more") from None


def devices() -> tuple[str, ...]:
    """The accelerators of this machine, the one with the most free memory first; ("cpu",) if there is none. PyTorch
    counts ROCm's GPUs as CUDA's. Only cpu and CUDA's were ever run."""
    if torch.cuda.is_available():
        names = [f"cuda:{index}" for index in range(torch.cuda.device_count())]
        return tuple(sorted(names, key=lambda device: -_unused_nbytes(device)) if len(names) > 1 else names)
    if torch.backends.mps.is_available():
        return ("mps",)
    if torch.xpu.is_available():
        return tuple(f"xpu:{index}" for index in range(torch.xpu.device_count()))
    return ("cpu",)


def _unused_nbytes(device: str) -> int:
    """Free memory of a CUDA device, asked from its driver: PyTorch's own way opens a context on it, half a gigabyte."""
    total = int(torch.cuda.get_device_properties(torch.device(device)).total_memory)
    try:
        return total - int(torch.cuda.device_memory_used(torch.device(device)))
    except (RuntimeError, ModuleNotFoundError, AttributeError):  # no NVML; by size then
        return total


def resolve_device(device: str) -> str:
    """`device`, with "auto" as the accelerator that has the most free memory, else the CPU."""
    return devices()[0] if device == "auto" else device


def use_device(device: str) -> None:
    """Make `device` PyTorch's current one, so that no context is opened on another GPU, and set the host's threads: one
    on a CPU, where nodes with more run slower (measured); beside a GPU, whose codecs and copies wait for them, its
    share of all processors."""
    if device.partition(":")[0] == "cpu":
        torch.set_num_threads(1)
        return
    torch.set_num_threads(max(1, processors() // len(devices())))
    if device.startswith("cuda"):
        # Autograd's own thread says so at its first product, and then does what it should.
        warnings.filterwarnings("ignore", "Attempting to run cuBLAS, but there was no current CUDA context")
        torch.cuda.set_device(torch.device(device).index or 0)  # "cuda" alone has no index


def built_cuda() -> str | None:
    """The version of CUDA that this PyTorch is built with; None: none."""
    return torch.version.cuda


def device_text(device: str) -> str:
    """Description of a present device: `PyTorch 2.5, NVIDIA H200, 139 GiB`."""
    if device.startswith("cuda"):
        properties = torch.cuda.get_device_properties(torch.device(device))
        return f"PyTorch {torch.__version__}, {properties.name}, {properties.total_memory >> 30} GiB"
    return f"PyTorch {torch.__version__}, {device}"


def half_text(device: str) -> str:
    """The dtype of matrix products on a CUDA device, and the reason."""
    major, minor = torch.cuda.get_device_capability(torch.device(device))
    return f"compute capability {major}.{minor}: products in {str(half_dtype(torch.device(device))).rpartition('.')[2]}"


def free_nbytes(device: str) -> int | None:
    """Free memory of a CUDA device; None for others, which share the machine's."""
    return int(torch.cuda.mem_get_info(torch.device(device))[0]) if device.startswith("cuda") else None


def autocasts(device: str, precision: str = "auto") -> bool:
    """Whether a replica on `device` multiplies matrices in 16 bits (`half_dtype`). "auto": on GPUs yes, where float32
    has no fused attention for grouped heads; on a CPU if bfloat16 is clearly faster there, measured."""
    if precision != "auto":
        return precision == "bf16"
    kind = device.partition(":")[0]
    return kind in ("cuda", "xpu") or (kind == "cpu" and bfloat16_speedup(device) >= FASTER)


def half_dtype(device: torch.device) -> torch.dtype:
    """The dtype of matrix products with autocast: bfloat16; float16 on NVIDIA's GPUs before compute capability 8.0,
    which multiply bfloat16 more slowly than float32."""
    nvidia = device.type == "cuda" and torch.version.hip is None
    if nvidia and torch.cuda.get_device_capability(device) < BFLOAT16_SINCE:
        return torch.float16
    return torch.bfloat16


@functools.cache
def bfloat16_speedup(device: str) -> float:
    """Speed of the CPU in bfloat16 relative to float32: measured once, in some tens of milliseconds. On a GPU so small
    a product measures the time of a launch."""
    seconds = {torch.float32: math.inf, torch.bfloat16: math.inf}
    factors = {dtype: torch.ones(MATRIX, MATRIX, dtype=dtype, device=device) for dtype in seconds}
    for _ in range(1 + TIMES):  # the first is a warm-up; the dtypes alternate, so that a slow moment affects both
        for dtype, factor in factors.items():
            begun = time.perf_counter()
            (factor @ factor)[0, 0].item()  # waits for an asynchronous device
            seconds[dtype] = min(seconds[dtype], time.perf_counter() - begun)
    return seconds[torch.float32] / seconds[torch.bfloat16]


def use_one_thread() -> None:
    """Use one thread, as node processes do: with more per process they run slower (measured)."""
    torch.set_num_threads(1)
