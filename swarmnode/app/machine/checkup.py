"""Checks of `doctor`: each reports its finding, whether it suffices, and the exact remedy if it does not."""

from __future__ import annotations

import ctypes
import os
import platform
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from swarmnode.app.machine.folder_store import is_url, open_store
from swarmnode.app.machine.stage_fit import StageFit
from swarmnode.base import landlock
from swarmnode.base.concurrency import processors
from swarmnode.base.errors import DataError, HardwareFault, NotPermitted, RemoteFault, Unreachable, UsageError
from swarmnode.base.ids import RunId
from swarmnode.keep.recovery import checkpoint as form
from swarmnode.keep.recovery import checkpoint_io
from swarmnode.keep.recovery.resumption import Resumption
from swarmnode.run.manifest import Manifest

MEMORY_MIN_NBYTES = 700 << 20  # measured: a node of the demo takes 450 MB, p2pd 65
DISK_MIN_NBYTES = 1 << 30  # guess: logs, tokens of a small corpus, a saved stage
_TIME_ERROR = 5  # adjtimex(2): the clock is not synchronised


Note = Callable[[str], None]

FOLDER = "checkpoints"  # in a session folder of `up`, beside its nodes' homes


async def find_resumptions(text: str, run_id: RunId | None, note: Note = lambda text: None) -> list[Resumption]:
    """Checkpoints at `text`, newest first, at least one: `text` is a checkpoint's folder, a folder or URL of several,
    or the folder of an `up` session. `note` is called for newer torn ones.

    Raises UsageError, DataError, LocalFault.
    """
    if not is_url(text):
        path = Path(text).expanduser()  # noqa: ASYNC240  once, before anything else
        if not path.is_dir():
            raise UsageError(f"--resume {text}: no such folder")
        if (path / FOLDER).is_dir() and not (path / form.ROOT).is_file():
            path /= FOLDER
        text = str(path.resolve())
    store = open_store(text)
    checkpoints = await checkpoint_io.find(store)
    good = checkpoint_io.usable(checkpoints, text, run_id)
    for each in checkpoints[::-1]:
        if each.fault is None:
            break
        note(f"{each.name} cannot be used: {each.fault}")
    for base, checkpoint in good:
        try:
            checkpoint_io.progress_of(checkpoint)
        except RemoteFault as fault:
            raise DataError(f"{text}/{base}{form.ROOT}: {fault}") from None
    return [Resumption(store, base, checkpoint) for base, checkpoint in good]


async def intact(candidates: list[Resumption], note: Note) -> Resumption:
    """The newest of `candidates` with every byte intact. Raises DataError if there is none."""
    last: DataError | None = None
    for resumption in candidates:
        try:
            await checkpoint_io.verify(resumption.store, resumption.base, resumption.checkpoint)
        except DataError as failure:
            note(f"{resumption.checkpoint.label} cannot be used: {failure}")
            last = failure
        else:
            return resumption
    assert last is not None, "no candidates"
    raise last


def check(resumption: Resumption, manifest: Manifest, run_id: RunId, *, other: bool, where: str) -> None:
    """Raises DataError unless `manifest`, run `run_id`, can resume from it; another run's only if `other`."""
    form.check_fits(resumption.checkpoint, manifest, where)
    theirs = resumption.checkpoint.origin
    if theirs.run_id != run_id and not other:
        raise DataError(
            f"{where}: a checkpoint of run {theirs.run_id[:16]} ({theirs.run_name}), not of {run_id[:16]}; use"
            " --resume-other to resume from it in this run"
        )


@dataclass(frozen=True, slots=True)
class HealthCheck:
    """`ok` None: unknown. `exit_code`: that of a machine that fails this check; 0 for mere advice."""

    name: str
    ok: bool | None
    says: str
    fix: str = ""
    exit_code: int = 0


def machine(home: Path, device: str) -> Iterator[HealthCheck]:
    """Checks that need no other machine."""
    yield _python()
    yield _device(device)
    yield _memory()
    yield from _home(home)
    yield _p2pd()
    yield _clock()
    lacks = landlock.missing()
    yield HealthCheck("confined", None if lacks else True, lacks or "a node opens no other files of its user")


def _python() -> HealthCheck:
    version = platform.python_version()
    system = f"{platform.system()} {platform.machine()}"
    return HealthCheck(
        "system", sys.version_info >= (3, 11), f"Python {version} on {system}, {processors()} processors"
    )


CUDA_DRIVERS = {"12.6": 525, "12.8": 525, "12.9": 525, "13.0": 580}
"""The oldest driver of NVIDIA for each CUDA that PyTorch is built with: within a major version any will do (NVIDIA,
"CUDA Compatibility", minor versions)."""

WHEELS = {"12.6": "126", "12.8": "128", "12.9": "128", "13.0": "130"}


def _device(device: str) -> HealthCheck:
    from swarmnode.model.device import FASTER, bfloat16_speedup, built_cuda, check_device, device_text, half_text

    driver = _driver()
    try:
        check_device(device)
    except HardwareFault as fault:
        return HealthCheck("device", False, str(fault), device_fix(driver, built_cuda()), HardwareFault.exit_code)
    says = device_text(device) + (f", driver {driver}" if driver else "")
    if device.startswith("cuda"):
        says += f", {half_text(device)}"
    elif device == "cpu":
        if (times := bfloat16_speedup(device)) >= FASTER:
            says += f", bfloat16 {times:.1f} times as fast as float32"
        if driver:
            says += f"; its GPU is not used: {device_fix(driver, built_cuda())}"
    return HealthCheck("device", True, says)


def device_fix(driver: str, cuda: str | None) -> str:
    """The remedy where a GPU cannot be used, from its driver's version ("": none) and the CUDA that PyTorch is built
    with (None: none)."""
    if not driver:
        return "install NVIDIA's driver (nvidia-smi must list the GPU), or give --device cpu"
    newest = int(driver.split(".")[0]) if driver.split(".")[0].isdigit() else 0
    fitting = [one for one, least in CUDA_DRIVERS.items() if least <= newest]
    if not fitting:
        return f"driver {driver} is too old for PyTorch: install {min(CUDA_DRIVERS.values())} or newer"
    wheel = f"pip install torch --index-url https://download.pytorch.org/whl/cu{WHEELS[fitting[-1]]}"
    if cuda is None:
        return f"this PyTorch has no CUDA: {wheel}"
    if (least := CUDA_DRIVERS.get(cuda, 0)) > newest:
        return f"PyTorch's CUDA {cuda} needs driver {least} or newer, this one is {driver}: update it, or {wheel}"
    return "give --device cuda"


def _driver() -> str:
    import pynvml

    try:
        pynvml.nvmlInit()
        return str(pynvml.nvmlSystemGetDriverVersion())
    except pynvml.NVMLError:
        return ""


def _memory() -> HealthCheck:
    import psutil

    free = psutil.virtual_memory().available
    total = psutil.virtual_memory().total
    says = f"{free / 1e9:.1f} GB free of {total / 1e9:.1f}"
    fix = f"close programs until {MEMORY_MIN_NBYTES / 1e9:.1f} GB are free"
    return HealthCheck("memory", free >= MEMORY_MIN_NBYTES, says, fix, HardwareFault.exit_code)


def _home(home: Path) -> Iterator[HealthCheck]:
    place = home
    while not place.exists():
        place = place.parent
    if not os.access(place, os.W_OK | os.X_OK):
        # Only the home itself is this user's to have; a folder above it may be anybody's.
        fix = (
            f"chown {os.getuid()} {home}, or give another --home"
            if place == home
            else "give a --home in a folder of yours"
        )
        yield HealthCheck("home", False, f"{home} cannot be written", fix, NotPermitted.exit_code)
        return
    key = home / "node.key"
    if key.exists() and key.stat().st_mode & 0o077:
        yield HealthCheck("home", False, f"{key} can be read by others", f"chmod 600 {key}", NotPermitted.exit_code)
    else:
        yield HealthCheck("home", True, str(home))
    free = shutil.disk_usage(place).free
    fix = f"make room until {DISK_MIN_NBYTES >> 30} GiB are free at {place}, or give another --home"
    yield HealthCheck("disk", free >= DISK_MIN_NBYTES, f"{free / 1e9:.1f} GB free", fix, HardwareFault.exit_code)


def _p2pd() -> HealthCheck:
    import importlib.util

    spec = importlib.util.find_spec("hivemind")
    binary = Path(spec.origin).parent / "hivemind_cli" / "p2pd" if spec is not None and spec.origin else None
    there = binary is not None and os.access(binary, os.X_OK)
    says = "p2pd, the program that connects this machine to others, is " + ("here" if there else "not found")
    return HealthCheck("network", there, says, "pip install --force-reinstall hivemind", 70)


def _clock() -> HealthCheck:
    """Whether the kernel's clock is synchronised: records are accepted only within seconds."""
    try:
        state = ctypes.CDLL(None, use_errno=True).adjtimex(ctypes.create_string_buffer(256))
    except (OSError, AttributeError):
        return HealthCheck("clock", None, "this system does not say whether its clock is set by NTP")
    if state == _TIME_ERROR or state < 0:
        return HealthCheck("clock", None, "it is not known to be set by NTP", "timedatectl set-ntp true")
    return HealthCheck("clock", True, "set by NTP")


def link_tokens_per_s(manifest: Manifest, stage: int, up_bps: float, down_bps: float) -> float:
    """Tokens per second that a link carries for a replica of `stage`, microbatches only; inf with a single stage."""
    from swarmnode.train.pipeline.believed_rate import link_samples_per_s

    return manifest.model.context * link_samples_per_s(manifest, stage, up_bps, down_bps)


def memory_text(fits: StageFit) -> str:
    """The memory that replicas need on device and host, and what is free: `device 7 to 9.1 GB a stage, 23.2 free`."""
    memory = fits.memory
    parts = []
    if memory.device is not None:
        needs = [need.device for need in fits.needed]
        parts.append(f"device {_range(needs)} a stage, {memory.device.nbytes / 1e9:.1f} free by {memory.device.bound}")
    needs = [need.host for need in fits.needed]
    name = "host " if memory.device is not None else ""
    parts.append(f"{name}{_range(needs)} a stage, {memory.host.nbytes / 1e9:.1f} free by {memory.host.bound}")
    return "; ".join(parts)


def _range(nbytes: Sequence[int]) -> str:
    least = f"{min(nbytes) / 1e9:.2g}"
    most = f"{max(nbytes) / 1e9:.2g}"
    return f"{least if least == most else f'{least} to {most}'} GB"


def about(number: float) -> str:
    """`number` with the two digits that such a measurement supports: `1,900`."""
    return f"{float(f'{number:.2g}'):,.0f}" if number >= 10 else f"{number:.2g}"


def rate_text(bps: float) -> str:
    """`48 Mbit/s`, `0.6 Mbit/s`."""
    return f"{bps / 1e6:,.0f} Mbit/s" if bps >= 10e6 else f"{bps / 1e6:.2g} Mbit/s"


def exit_code(checks: Sequence[HealthCheck]) -> int:
    """The exit code of the worst failure: not permitted, then this machine, then nobody reachable."""
    failed = {check.exit_code for check in checks if check.ok is False and check.exit_code}
    for code in (NotPermitted.exit_code, HardwareFault.exit_code, Unreachable.exit_code, UsageError.exit_code):
        if code in failed:
            return code
    return max(failed, default=0)
