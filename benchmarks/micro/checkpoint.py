"""Cost of a checkpoint: the pause of training relative to an inner step, and saving and loading relative to plain
writes and reads of the same disk, alternating in one run. `swarmnode bench checkpoint` prints it.

Saving includes all that a node does: hash, write, fsync and rename files, then write their manifest. Loading verifies
every hash. Both kinds of read end in fresh memory of the state's size, since no loader can do without. The page cache
is dropped before each (posix_fadvise), so that the disk is read.
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

from swarmnode.app.machine.folder_store import FolderStore
from swarmnode.app.machine.replica import TorchReplica
from swarmnode.base.ids import PeerId, RunId
from swarmnode.base.ports import State, WireTensor
from swarmnode.base.wire import record_pb2
from swarmnode.keep.recovery import checkpoint as form
from swarmnode.keep.recovery import checkpoint_io
from swarmnode.keep.recovery.checkpoint_io import ReplicaHoldings, Shapes
from swarmnode.keep.recovery.resumption import CheckpointOptions
from swarmnode.keep.transfer.snapshot import Snapshot
from swarmnode.net.membership.progress import to_message
from swarmnode.run.manifest import Manifest
from swarmnode.run.manifest.recipe import PRESETS

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
        disk = asyncio.run(_disk(replica.snapshot(), CheckpointOptions().shapes(manifest, 0), manifest, place, repeats))
    finally:
        shutil.rmtree(place)
    return {"parameters": replica.stage.parameters, **pause, **disk}


def _pause(replica: TorchReplica, manifest: Manifest, repeats: int) -> dict[str, Any]:
    """Seconds of the one copy against those of an inner step."""
    model = manifest.model
    batch = manifest.inner.microbatch
    tokens = torch.randint(model.vocabulary, (batch, model.context + 1)).to(torch.uint16)
    wire = WireTensor("u16", tuple(tokens.shape), tokens.numpy().tobytes())
    replica.loss(wire, wire, batch, train=True)
    replica.step(0)  # the first of each is slower
    replica.snapshot()
    microbatch_s = _median(lambda: replica.loss(wire, wire, batch, train=True), repeats)
    update_s = _median(lambda: replica.step(0) if replica.accumulated else None, 1)
    step_s = microbatch_s * manifest.inner.inner_batch / batch + update_s
    pause_s = _median(replica.snapshot, repeats)
    joiner_s = _median(lambda: replica.snapshot(packed=True), repeats)
    archive_s = _median(lambda: replica.snapshot(packed=True, only=("phi",)), repeats)
    copy = Snapshot.of(replica.snapshot(packed=True, only=("phi",)), 0, 0, to_message({"bench": 1}))
    hashed_s = _median(copy.manifest, 1)
    return {
        "pause of training, ms": 1000 * pause_s,
        "pause for a joiner's copy, ms": 1000 * joiner_s,
        "pause for an archive's copy, ms": 1000 * archive_s,
        "hashing an archive's copy beside training, ms": 1000 * hashed_s,
        "inner step, ms": 1000 * step_s,
        "pause / inner step": pause_s / step_s,
        "target, at most": TARGET_PAUSE,
    }


async def _disk(state: State, shapes: Shapes, manifest: Manifest, place: Path, repeats: int) -> dict[str, Any]:
    rates: dict[str, list[float]] = {"plain write": [], "save": [], "plain read": [], "load": []}
    nbytes = sum(section.nbytes for section in state.sections.values())
    progress = to_message({"bench": 1})
    for number in range(repeats):
        plain = place / "plain"
        label = form.label(number)
        rates["plain write"].append(nbytes / _timed(lambda plain=plain: _write(plain, state)))  # type: ignore[misc]
        store = FolderStore(place)
        begun = time.perf_counter()
        holding = ReplicaHoldings(0, number, PeerId("bench"), progress, record_pb2.Blocks())
        await checkpoint_io.save_stage(store, form.place(RUN, label), state, shapes, holding)
        made = await checkpoint_io.complete(store, form.Origin.of(manifest, RUN), label)
        rates["save"].append(nbytes / (time.perf_counter() - begun))
        assert made is not None
        _forget(place)
        rates["plain read"].append(nbytes / _timed(lambda plain=plain: _read(plain, nbytes)))  # type: ignore[misc]
        begun = time.perf_counter()
        loaded = await checkpoint_io.load_stage(store, f"{made.place}/", made, shapes)
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
