"""The checkpoint that a node starts from or goes back to, and where it saves its own."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from swarmnode.ids import PeerId, RunId
from swarmnode.manifest import Manifest
from swarmnode.membership.progress import Progress
from swarmnode.model.section import section_shapes
from swarmnode.model.split import stages_of
from swarmnode.ports import State, Store, Telemetry
from swarmnode.recovery import checkpoint as form
from swarmnode.recovery import checkpoint_io
from swarmnode.recovery.checkpoint import Checkpoint
from swarmnode.recovery.checkpoint_io import Shapes
from swarmnode.wire import record_pb2


@dataclass(frozen=True, slots=True)
class Resumption:
    """A checkpoint in a store. Its files are named `base` + name."""

    store: Store
    base: str
    checkpoint: Checkpoint

    @property
    def where(self) -> str:
        """The folder or URL of this checkpoint alone."""
        return f"{self.store}/{self.base}".rstrip("/")

    def progress(self) -> Progress:
        """Samples of the run when it was saved."""
        return checkpoint_io.progress_of(self.checkpoint)

    def rounds(self, manifest: Manifest) -> int:
        """Rounds of `manifest` that the run had completed when it was saved."""
        return self.checkpoint.samples // manifest.gossip.round_samples

    def blocks(self, manifest: Manifest) -> record_pb2.Blocks:
        """Blocks finished when it was saved, in blocks of `manifest`."""
        return checkpoint_io.blocks_of(self.checkpoint, manifest.data.block_samples)

    async def load(self, shapes: Shapes, telemetry: Telemetry, stage: int) -> State:
        """The state of `stage`. Raises DataError for a checkpoint that is damaged or of another model, LocalFault for a
        store that cannot be read."""
        loop = asyncio.get_running_loop()
        begun = loop.time()
        state = await checkpoint_io.load_stage(self.store, self.base, self.checkpoint, shapes)
        telemetry.event(
            "checkpoint.loaded",
            label=self.checkpoint.label,
            stage=stage,
            samples_total=self.checkpoint.samples,
            anew=sorted(form.anew(self.checkpoint, shapes)),
            nbytes=sum(section.nbytes for section in state.sections.values()),
            seconds=round(loop.time() - begun, 4),
        )
        return state


@dataclass(frozen=True, slots=True)
class CheckpointOptions:
    """The store that a node saves checkpoints in, and the checkpoint that it starts from.

    `store` None: it saves none. `home` keeps the stages that it served itself (recovery/saved_stage.py). `layout` gives
    names and shapes of the parameters in each section of a stage's state, in order; None: those of the manifest.
    """

    store: Store | None = None
    resume: Resumption | None = None
    signed: str = ""  # the signed manifest, base64
    layout: Callable[[int], Shapes] | None = None
    shard_nbytes: int = form.SHARD_NBYTES
    home: Store | None = None
    archives: tuple[PeerId, ...] = ()  # bootstraps that the user named: one may hold the owner's archive
    written: Callable[[int], None] = field(default=lambda nbytes: None)

    def shapes(self, manifest: Manifest, stage: int) -> Shapes:
        """Names and shapes of the parameters in each section of the state of `stage`."""
        if self.layout is not None:
            return self.layout(stage)
        return section_shapes(manifest, stages_of(manifest)[stage])


async def newest_of(store: Store, run_id: RunId) -> Resumption | None:
    """The newest whole checkpoint of `run_id` in `store`, None without one. Raises DataError, LocalFault."""
    for found in reversed(await checkpoint_io.find(store)):
        kept = found.checkpoint
        if kept is not None and found.fault is None and kept.origin.run_id == run_id:
            return Resumption(store, found.name.removesuffix(form.ROOT), kept)
    return None
