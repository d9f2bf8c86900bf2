"""Whole nodes that save and go on: the same stages, other stages, a disk that fills, one saver a stage."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from swarmnode.errors import LocalFault
from swarmnode.machine.checkup import find_resumptions
from swarmnode.machine.folder_store import FolderStore
from swarmnode.manifest import CheckpointSpec, Manifest
from swarmnode.recovery.resumption import CheckpointOptions, Resumption
from swarmnode.wire.record_pb2 import NODE_STATE_TRAINING
from tests.support.village import RUN, Village, manifest, village


def run_of(stages: int = 2, every: int = 2, keep: int = 2, **gossip: Any) -> Manifest:
    return replace(manifest(stages, **gossip), checkpoint=CheckpointSpec(every_rounds=every, keep=keep))


async def newest(folder: Path) -> Resumption:
    return (await find_resumptions(str(folder), RUN))[0]


def events(v: Village, event: str) -> list[dict[str, object]]:
    return [fields for person in v.people for name, fields in person.quiet.events if name == event]


async def save_some(folder: Path, stages: int, nodes: int, count: int = 2) -> Resumption:
    """Train until `count` checkpoints are complete, then leave with a final one as `up` asks for."""
    async with village(run_of(stages)) as v:
        v.saving = CheckpointOptions(FolderStore(folder), shard_nbytes=4096)
        for index in range(nodes):
            v.add(index % stages)
        await v.until(lambda: len(events(v, "checkpoint.complete")) >= count, f"{count} checkpoints")
        for person in v.people[:stages]:
            person.node.save_before_leaving("round-000000999-final")
        await v.leave()
        saved = events(v, "checkpoint.saved")
        assert not events(v, "checkpoint.failed")
        for label in {str(fields["label"]) for fields in saved}:
            stages_saved = [fields["stage"] for fields in saved if fields["label"] == label]
            assert len(stages_saved) == len(set(stages_saved)), f"{label} was saved once a stage: {stages_saved}"
        assert len(list(folder.rglob("checkpoint.json"))) <= 2, "the budget holds"
        resumption = await newest(folder)
        assert resumption.checkpoint.label == "round-000000999-final"
        # What one feeder fed last another may not have heard of before it left.
        assert v.people[0].node.samples_total() <= resumption.checkpoint.samples <= v.total()
    return resumption


async def test_a_stopped_swarm_goes_on_with_other_stages_and_nodes(tmp_path: Path) -> None:
    resumption = await save_some(tmp_path, stages=2, nodes=4)
    before = resumption.checkpoint.samples
    async with village(run_of(stages=3)) as v:
        v.saving = CheckpointOptions(FolderStore(tmp_path / "later"), resumption)
        for stage in (0, 1, 2, 1):
            v.add(stage)
        await v.until(lambda: v.people[0].node.served is not None and v.people[0].served.feeder is not None, "a feeder")
        feeder = v.people[0].served.feeder
        await v.until(lambda: feeder is not None and feeder.validation is not None, "a first validation")
        assert feeder is not None and feeder.validation_first is not None
        await v.until(lambda: all(p.node.state == NODE_STATE_TRAINING for p in v.people), "everybody trains")
        assert [fields["method"] for fields in events(v, "recovery.done")] == ["checkpoint"] * 4
        # A model that had lost what it learnt would stand at log(50) = 3.9.
        assert feeder.validation_first < 2.5
        assert feeder.ledger.finished().finished_below >= resumption.blocks(v.run).finished_below > 0
        await v.until(lambda: v.people[0].node.samples_total() > before + 256, "more samples")


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
    monkeypatch.setattr("swarmnode.node.checkpointer.PATIENCE_S", 0.01)

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
