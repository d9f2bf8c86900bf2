"""What `doctor` looks at: each check says what it found, whether that will do, and the exact fix when it will not."""

from __future__ import annotations

import ctypes
import os
import platform
import shutil
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from swarmnode.errors import HardwareFault, NotPermitted, Unreachable, UsageError
from swarmnode.manifest import Manifest

MEMORY_MIN_NBYTES = 700 << 20  # measured: a node of the demo holds 450 MB, p2pd 65
DISK_MIN_NBYTES = 1 << 30  # guess: logs, tokens of a small corpus, a saved stage
_TIME_ERROR = 5  # adjtimex(2): the clock is not synchronised


@dataclass(frozen=True, slots=True)
class Check:
    """`ok` None: it could not be told. `exit_code` is that of a machine on which this fails, 0 for mere advice."""

    name: str
    ok: bool | None
    says: str
    fix: str = ""
    exit_code: int = 0


def machine(home: Path, device: str) -> Iterator[Check]:
    """Checks that need nobody else."""
    yield _python()
    yield _device(device)
    yield _memory()
    yield from _home(home)
    yield _p2pd()
    yield _clock()


def _python() -> Check:
    version, system = platform.python_version(), f"{platform.system()} {platform.machine()}"
    return Check("system", sys.version_info >= (3, 11), f"Python {version} on {system}, {os.cpu_count()} processors")


def _device(device: str) -> Check:
    from swarmnode.model.device import FASTER, bfloat16_speedup, check_device, device_text, has_cuda

    driver = _driver()
    try:
        check_device(device)
    except HardwareFault as fault:
        fix = "install NVIDIA's driver (nvidia-smi must list the GPU), or give --device cpu"
        if driver:
            fix = "this PyTorch has no CUDA: pip install torch --index-url https://download.pytorch.org/whl/cu128"
        return Check("device", False, str(fault), fix, HardwareFault.exit_code)
    says = device_text(device) + (f", driver {driver}" if driver else "")
    if (times := bfloat16_speedup(device)) >= FASTER:
        says += f", bfloat16 {times:.1f} times as fast as float32"
    if device == "cpu" and has_cuda():
        says += "; a GPU is here: --device cuda"
    elif device == "cpu" and driver:
        says += "; its GPU is not used: this PyTorch is built without CUDA"
    return Check("device", True, says)


def _driver() -> str:
    import pynvml

    try:
        pynvml.nvmlInit()
        return str(pynvml.nvmlSystemGetDriverVersion())
    except pynvml.NVMLError:
        return ""


def _memory() -> Check:
    import psutil

    free, total = psutil.virtual_memory().available, psutil.virtual_memory().total
    says = f"{free / 1e9:.1f} GB free of {total / 1e9:.1f}"
    fix = f"close programs until {MEMORY_MIN_NBYTES / 1e9:.1f} GB are free"
    return Check("memory", free >= MEMORY_MIN_NBYTES, says, fix, HardwareFault.exit_code)


def _home(home: Path) -> Iterator[Check]:
    place = home
    while not place.exists():
        place = place.parent
    if not os.access(place, os.W_OK | os.X_OK):
        fix = f"chown {os.getuid()} {place}, or give another --home"
        yield Check("home", False, f"{home} cannot be written", fix, NotPermitted.exit_code)
        return
    key = home / "node.key"
    if key.exists() and key.stat().st_mode & 0o077:
        yield Check("home", False, f"{key} can be read by others", f"chmod 600 {key}", NotPermitted.exit_code)
    else:
        yield Check("home", True, str(home))
    free = shutil.disk_usage(place).free
    fix = f"make room until {DISK_MIN_NBYTES >> 30} GiB are free at {place}, or give another --home"
    yield Check("disk", free >= DISK_MIN_NBYTES, f"{free / 1e9:.1f} GB free", fix, HardwareFault.exit_code)


def _p2pd() -> Check:
    import importlib.util

    spec = importlib.util.find_spec("hivemind")
    binary = Path(spec.origin).parent / "hivemind_cli" / "p2pd" if spec is not None and spec.origin else None
    there = binary is not None and os.access(binary, os.X_OK)
    return Check("p2pd", there, str(binary) if there else "not found", "pip install --force-reinstall hivemind", 70)


def _clock() -> Check:
    """Whether the kernel's clock is disciplined: records are believed within seconds."""
    try:
        state = ctypes.CDLL(None, use_errno=True).adjtimex(ctypes.create_string_buffer(256))
    except (OSError, AttributeError):
        return Check("clock", None, "this system does not say whether its clock is set by NTP")
    if state == _TIME_ERROR or state < 0:
        return Check("clock", None, "nobody says that it is set by NTP", "timedatectl set-ntp true")
    return Check("clock", True, "set by NTP")


def link_tokens_per_s(manifest: Manifest, stage: int, up_bps: float, down_bps: float) -> float:
    """Tokens a second that a link carries for a replica of `stage`, microbatches alone; inf in a single stage."""
    from swarmnode.pipeline.allowed import link_samples_per_s

    return manifest.model.context * link_samples_per_s(manifest, stage, up_bps, down_bps)


def about(number: float) -> str:
    """Two digits of it, as far as such a measurement goes: `1,900`."""
    return f"{float(f'{number:.2g}'):,.0f}" if number >= 10 else f"{number:.2g}"


def rate_text(bps: float) -> str:
    """`48 Mbit/s`, `0.6 Mbit/s`."""
    return f"{bps / 1e6:,.0f} Mbit/s" if bps >= 10e6 else f"{bps / 1e6:.2g} Mbit/s"


def stages_text(stages: Sequence[int]) -> str:
    """`3-5`, `0, 2-3`."""
    spans: list[list[int]] = []
    for stage in stages:
        if spans and spans[-1][1] == stage - 1:
            spans[-1][1] = stage
        else:
            spans.append([stage, stage])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in spans)


def exit_code(checks: Sequence[Check]) -> int:
    """Of the worst: not permitted, then this machine, then nobody reachable."""
    failed = {check.exit_code for check in checks if check.ok is False and check.exit_code}
    for code in (NotPermitted.exit_code, HardwareFault.exit_code, Unreachable.exit_code, UsageError.exit_code):
        if code in failed:
            return code
    return max(failed, default=0)
