"""What a checkpoint costs: the pause of training against an inner step, and saving and loading against the same disk
written and read plainly, alternating in one run. `swarmnode bench checkpoint` prints it.

Saving is everything a node does: files hashed, written, fsynced, renamed, their manifest last. Loading verifies every
hash. Both readings end in fresh memory of the state's size, which no loader can do without. Before each of them the
page cache forgets the files (posix_fadvise), so that the disk is read.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from swarmnode.ids import PeerId, RunId
from swarmnode.manifest import PRESETS, Manifest
from swarmnode.membership.progress import to_message
from swarmnode.node.replica import TorchReplica
from swarmnode.node.saver import Saving
from swarmnode.node.store import FolderStore
from swarmnode.ports import State, WireTensor
from swarmnode.recovery import checkpoint as form
from swarmnode.recovery import saving
from swarmnode.recovery.saving import Holding, Shapes
from swarmnode.wire import record_pb2

PIECE_NBYTES = 8 << 20
TARGET_DISK = 0.7
TARGET_PAUSE = 0.01
RUN = RunId("be" * 32)


def run(preset: str = "small", repeats: int = 3, folder: Path | None = None) -> dict[str, Any]:
    """{"pause": ..., "save": ..., "load": ...}: see the module. `folder` is on the disk to be measured."""
    manifest = replace(PRESETS[preset], pipeline=replace(PRESETS[preset].pipeline, stages=1))
    place = Path(tempfile.mkdtemp(prefix="swarmnode-bench-", dir=folder))
    try:
        replica = TorchReplica(manifest, 0)
        pause = _pause(replica, manifest, repeats)
        disk = asyncio.run(_disk(replica.snapshot(), Saving().shapes(manifest, 0), manifest, place, repeats))
    finally:
        shutil.rmtree(place)
    return {"parameters": replica.parameters, **pause, **disk}


def _pause(replica: TorchReplica, manifest: Manifest, repeats: int) -> dict[str, Any]:
    """Seconds of the one copy against those of an inner step."""
    model, batch = manifest.model, manifest.inner.microbatch
    tokens = torch.randint(model.vocabulary, (batch, model.context + 1)).to(torch.uint16)
    wire = WireTensor("u16", tuple(tokens.shape), tokens.numpy().tobytes())
    replica.loss(wire, wire, batch, train=True)
    replica.step(0)  # the first of each is slower
    replica.snapshot()
    microbatch_s = _median(lambda: replica.loss(wire, wire, batch, train=True), repeats)
    update_s = _median(lambda: replica.step(0) if replica.accumulated else None, 1)
    step_s = microbatch_s * manifest.inner.inner_batch / batch + update_s
    pause_s = _median(replica.snapshot, repeats)
    return {
        "pause of training, ms": 1000 * pause_s,
        "inner step, ms": 1000 * step_s,
        "pause / inner step": pause_s / step_s,
        "target, at most": TARGET_PAUSE,
    }


async def _disk(state: State, shapes: Shapes, manifest: Manifest, place: Path, repeats: int) -> dict[str, Any]:
    rates: dict[str, list[float]] = {"plain write": [], "save": [], "plain read": [], "load": []}
    nbytes = sum(section.nbytes for section in state.sections.values())
    progress = to_message({"bench": 1})
    for number in range(repeats):
        plain, label = place / "plain", form.label(number)
        rates["plain write"].append(nbytes / _timed(lambda plain=plain: _write(plain, state)))  # type: ignore[misc]
        store = FolderStore(place)
        begun = time.perf_counter()
        holding = Holding(0, number, PeerId("bench"), progress, record_pb2.Blocks())
        await saving.save_stage(store, form.place(RUN, label), state, shapes, holding)
        made = await saving.complete(store, form.Origin.of(manifest, RUN), label)
        rates["save"].append(nbytes / (time.perf_counter() - begun))
        assert made is not None
        _forget(place)
        rates["plain read"].append(nbytes / _timed(lambda plain=plain: _read(plain, nbytes)))  # type: ignore[misc]
        begun = time.perf_counter()
        loaded = await saving.load_stage(store, f"{made.place}/", made, shapes)
        rates["load"].append(nbytes / (time.perf_counter() - begun))
        assert loaded.sections["theta"] == state.sections["theta"], "what was loaded is not what was saved"
        shutil.rmtree(place / RUN[: form.RUN_CHARACTERS])
    found = {key: statistics.median(values) for key, values in rates.items()}
    return {
        "state, MB": nbytes / 1e6,
        "GB/s": {key: value / 1e9 for key, value in found.items()},
        "save / plain write": found["save"] / found["plain write"],
        "load / plain read": found["load"] / found["plain read"],
        "target, at least": TARGET_DISK,
    }


def _write(path: Path, state: State) -> None:
    with path.open("wb", buffering=0) as file:
        for section in state.sections.values():
            for start in range(0, section.nbytes, PIECE_NBYTES):
                file.write(section[start : start + PIECE_NBYTES])
        os.fsync(file.fileno())


def _read(path: Path, nbytes: int) -> None:
    into = np.empty(nbytes, np.uint8).data
    with path.open("rb", buffering=0) as file:
        for start in range(0, nbytes, PIECE_NBYTES):
            file.readinto(into[start : start + PIECE_NBYTES])


def _forget(place: Path) -> None:
    """Make the page cache forget every file below `place`."""
    for path in place.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _timed(work: Callable[[], object]) -> float:
    begun = time.perf_counter()
    work()
    return time.perf_counter() - begun


def _median(work: Callable[[], object], repeats: int) -> float:
    return statistics.median(_timed(work) for _ in range(repeats))
