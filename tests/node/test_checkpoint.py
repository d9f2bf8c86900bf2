"""Whole nodes that save and go on: the same stages, other stages, a disk that fills, one saver a stage."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from swarmnode.app.machine.checkup import find_resumptions
from swarmnode.app.machine.folder_store import FolderStore
from swarmnode.base.errors import LocalFault
from swarmnode.keep.recovery.resumption import CheckpointOptions, Resumption
from swarmnode.run.manifest import CheckpointSpec, Manifest
from tests.support.village import RUN, Village, manifest, told, village


def run_of(stages: int = 2, every: int = 2, keep: int = 2, **gossip: Any) -> Manifest:
    return replace(manifest(stages, **gossip), checkpoint=CheckpointSpec(every_rounds=every, keep=keep))


async def newest(folder: Path) -> Resumption:
    return (await find_resumptions(str(folder), RUN))[0]


def events(v: Village, event: str) -> list[dict[str, object]]:
    return [fields for person in v.people for fields in told(person, event)]


class Full(FolderStore):
    """A disk that takes the first `writes` blobs."""

    def __init__(self, folder: Path, writes: int) -> None:
        super().__init__(folder)
        self.left = writes

    async def write(self, name: str, parts: Sequence[bytes | memoryview]) -> str:
        self.left -= 1
        if self.left < 0:
            raise LocalFault(f"cannot write {name}: No space left on device; free space or save elsewhere")
        return await super().write(name, parts)


async def test_training_goes_on_when_the_disk_is_full(tmp_path: Path) -> None:
    async with village(run_of(stages=1, every=1)) as v:
        disk = Full(tmp_path, 1 << 30)
        v.saving = CheckpointOptions(disk, shard_nbytes=1 << 20)
        v.add(0)
        await v.until(lambda: len(events(v, "checkpoint.complete")) >= 1, "a first checkpoint")
        disk.left = 3
        await v.until(lambda: len(events(v, "checkpoint.failed")) >= 1, "a checkpoint that fails")
        good = await newest(tmp_path)
        failed = events(v, "checkpoint.failed")[0]
        assert "No space left on device" in str(failed["reason"])
        await v.trains(128, "training goes on")
        disk.left = 1 << 30
        count = len(events(v, "checkpoint.complete"))
        await v.until(lambda: len(events(v, "checkpoint.complete")) > count, "checkpoints go on")
        assert (await newest(tmp_path)).checkpoint.samples > good.checkpoint.samples


class Deaf(FolderStore):
    """A disk whose writes never come back."""

    async def write(self, name: str, parts: Sequence[bytes | memoryview]) -> str:
        await asyncio.Event().wait()
        return ""


async def test_another_replica_saves_when_the_first_does_not(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("swarmnode.train.node.checkpointer.PATIENCE_S", 0.01)

    # Time enough between two checkpoints for patience to run out, also on a fast machine.
    async with village(run_of(stages=1, every=8, round_samples=32)) as v:
        v.saving = CheckpointOptions(Deaf(tmp_path))
        v.add(0)
        v.saving = CheckpointOptions(FolderStore(tmp_path))
        v.add(0)
        await v.until(lambda: len(events(v, "checkpoint.complete")) >= 2, "checkpoints by the other one", 150.0)
        saved = events(v, "checkpoint.saved")
        await v.until(
            lambda: any("has not saved it within" in str(f["reason"]) for f in events(v, "checkpoint.saved")),
            "a checkpoint whose turn was the silent one's",
            150.0,
        )
        assert {fields["stage"] for fields in saved} == {0}
