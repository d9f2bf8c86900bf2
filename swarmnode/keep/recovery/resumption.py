"""The checkpoint that a node starts from or goes back to, and where it saves its own."""

from __future__ import annotations

import asyncio
import itertools
import re
from collections.abc import AsyncIterator, Callable, Collection, Mapping
from dataclasses import dataclass, replace

from swarmnode.base.damaged_file import tell_damaged
from swarmnode.base.errors import DataError, LocalFault, RemoteFault, cause_of
from swarmnode.base.ids import PeerId, RunId
from swarmnode.base.ports import State, Store, Telemetry
from swarmnode.base.wire import record_pb2
from swarmnode.keep.recovery import checkpoint as form
from swarmnode.keep.recovery import checkpoint_io
from swarmnode.keep.recovery.checkpoint import Checkpoint, Origin, StagePart
from swarmnode.keep.recovery.checkpoint_io import ReplicaHoldings, SavedMean, Shapes
from swarmnode.keep.recovery.run_store import RunStore
from swarmnode.model.section import section_shapes
from swarmnode.model.split import stages_of
from swarmnode.net.membership.progress import FLOOR, Progress, to_message, to_samples
from swarmnode.net.membership.state_line import UNBROKEN, StateLine
from swarmnode.run.manifest import CheckpointSpec, Manifest


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

    def line(self, stage: int) -> StateLine:
        """The line of the state of `stage`; where the stages were cut otherwise, the same for all who read it."""
        lines = {part.stage: part.line for part in self.checkpoint.parts}
        return lines.get(stage, UNBROKEN)

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

    `store` None: it saves none. `home` keeps the stages that it served itself (keep/recovery/resumption.py). `layout`
    gives names and shapes of the parameters in each section of a stage's state, in order; None: those of the manifest.
    """

    store: Store | None = None
    resume: Resumption | None = None
    signed: str = ""  # the signed manifest, base64
    layout: Callable[[int], Shapes] | None = None
    shard_nbytes: int = form.SHARD_NBYTES
    home: Store | None = None
    archives: tuple[PeerId, ...] = ()  # bootstraps that the user named: one may hold the owner's archive

    def shapes(self, manifest: Manifest, stage: int) -> Shapes:
        """Names and shapes of the parameters in each section of the state of `stage`."""
        if self.layout is not None:
            return self.layout(stage)
        return section_shapes(manifest, stages_of(manifest)[stage])


async def newest_of(store: Store, run_id: RunId) -> Resumption | None:
    """The newest whole checkpoint of `run_id` in `store`, None without one. Raises DataError, LocalFault."""
    for checkpoint in reversed(await checkpoint_io.find(store)):
        kept = checkpoint.checkpoint
        if kept is not None and checkpoint.fault is None and kept.origin.run_id == run_id:
            return Resumption(store, checkpoint.name.removesuffix(form.ROOT), kept)
    return None


KEPT = CheckpointSpec().keep  # saved stages that stay in a home, whatever stages they are of
LABEL = r"round-(?P<round>\d+)(-cut-(?P<cut>\d+))?(-again-\d+)?-(?P<stage>stage-\d+)"
SAVED = re.compile(rf".*/{LABEL}/(?P=stage)\.json")


@dataclass(frozen=True, slots=True)
class SavedStage:
    """A saved stage in a store: its files are named `base` + name, and it is of the stages as amendment `cut` cut
    them."""

    base: str
    cut: int
    part: StagePart

    @property
    def label(self) -> str:
        """The name of its folder."""
        return self.base.rstrip("/").rpartition("/")[2]

    @property
    def run_id(self) -> str:
        """The id of its run; of a stage that an earlier version saved, the beginning of it."""
        return self.part.run_id or self.base.split("/")[-3]

    @property
    def samples(self) -> int:
        """Samples of the run when it was saved."""
        return Progress.from_wire(to_message(self.part.progress)).total

    @property
    def age(self) -> Age:
        """Grows with what is trained."""
        return _age(self.samples, self.part)


async def saved_stages(
    store: Store, sizes: Mapping[str, int], damaged: Callable[[str, str], None]
) -> AsyncIterator[SavedStage]:
    """The saved stages among the files `sizes` of `store`, of any run. Half written ones are left out; `damaged` is
    told the name of one that cannot be read, and why."""
    for name in sizes:
        if (whose := SAVED.fullmatch(name)) is None:
            continue
        try:
            found = SavedStage(
                f"{name.rpartition('/')[0]}/",
                int(whose["cut"] or 0),
                form.part_of(await store.read(name) or b"", name),
            )
            Progress.from_wire(to_message(found.part.progress))
        except (DataError, LocalFault, RemoteFault) as error:
            damaged(name, cause_of(error))
            continue
        if form.missing(found.part.files, found.base, sizes) is None:
            yield found


@dataclass(frozen=True, slots=True)
class EarlierCut:
    """The stages as they were cut before: by amendment `cut` (0: none), last of `manifest`, until round `until`. On the
    wire their numbers begin with STAGES_MAX."""

    cut: int
    manifest: Manifest
    until: int


class SavedStages:
    """The stages of one run in `store`, None: nothing is saved. `look` reads which there are, `save` writes another.

    RUN/round-000000012-stage-1/theta-00000.stage-1.k3VxA9Qp.safetensors ...    the files of a checkpoint
                                stage-1.json                                    written last: else nothing is read
    RUN/round-000000040-cut-2-stage-1/...                                       after amendment 2 cut the stages anew
    """

    def __init__(self, store: Store | None, origin: Origin, cut: int = 0, earlier: EarlierCut | None = None) -> None:
        """`origin`, `cut`: of the stages as they are; `earlier`: as they were before."""
        self._store = store
        self._origins = {cut: origin}
        if earlier is not None:
            self._origins[earlier.cut] = replace(origin, stages=earlier.manifest.pipeline.stages)
        self._cut = cut
        self._earlier = earlier
        self.found: list[Resumption] = []
        """Those found or saved, each a checkpoint of one stage, the one of most samples first."""
        self.pieces: list[Resumption] = []
        """The same of the cut before."""
        self._damaged = set[str]()  # those that were told

    def newest(self, stage: int) -> Resumption | None:
        """The one of `stage` with most samples; None without one."""
        return next((one for one in self.found if one.checkpoint.parts[0].stage == stage), None)

    def best(self, empty: Collection[int], unable: Collection[int]) -> int | None:
        """The stage saved last of those `empty`, which nobody serves, that this machine is not `unable` to serve."""
        stages = [one.checkpoint.parts[0].stage for one in self.found]
        return next((stage for stage in stages if stage in empty and stage not in unable), None)

    async def look(self) -> None:
        """Read the saved stages; half written, damaged and foreign ones are left out, and damage is told once. Raises
        LocalFault."""
        self.found = []
        self.pieces = []
        if self._store is None:
            return
        sizes = await self._store.names(f"{self._origins[self._cut].run_id[: form.RUN_CHARACTERS]}/")
        async for saved in saved_stages(self._store, sizes, self._tell_damaged):
            part = saved.part
            origin = self._origins.get(saved.cut)
            if origin is not None and part.stage < origin.stages:
                kept = Checkpoint(origin, saved.label, part.round, saved.samples, part.progress, (part,))
                found = self.found if saved.cut == self._cut else self.pieces
                found.append(Resumption(self._store, saved.base, kept))
        self.found.sort(key=_of, reverse=True)
        self.pieces.sort(key=_of, reverse=True)

    def _tell_damaged(self, name: str, why: str) -> None:
        if name not in self._damaged:
            self._damaged.add(name)
            tell_damaged(name, why)

    def recut(self, stages: Collection[int]) -> Resumption | None:
        """The newest pieces of `stages` as one checkpoint, as old as the oldest; None where one is missing."""
        newest = {one.checkpoint.parts[0].stage: one for one in reversed(self.pieces)}
        if not newest.keys() >= set(stages):
            return None
        parts = list[StagePart]()
        oldest = min((newest[stage] for stage in stages), key=_of)
        for base, (part,) in ((newest[stage].base, newest[stage].checkpoint.parts) for stage in stages):
            files = (replace(file, name=f"{base}{file.name}") for file in part.files)
            parts.append(replace(part, files=tuple(files)))
        return Resumption(oldest.store, "", replace(oldest.checkpoint, parts=tuple(parts)))

    async def save(
        self,
        state: State,
        shapes: Shapes,
        *,
        stage: int,
        round_index: int,
        peer: PeerId,
        progress: record_pb2.Progress,
        blocks: record_pb2.Blocks | None = None,
        line: StateLine = UNBROKEN,
        piece: bool = False,
        left: bool = False,
        mean: SavedMean | None = None,
    ) -> None:
        """Write `state`, with `piece` of a stage of the cut before, then delete those of its stage with fewer samples,
        and all but the KEPT saved stages of most samples: a run that began again never takes the place of what was
        trained before. A piece takes the place of nothing. `left`: the node leaves, and saves its running `mean`, if it
        has one. Raises LocalFault; what was there stays."""
        if self._store is None:
            return
        samples = to_samples(progress)
        if progress.total > Progress.from_wire(to_message(samples)).total:  # samples whose feeders are not known here
            samples[FLOOR] = progress.total
        run_id = self._origins[self._cut].run_id
        done = blocks or record_pb2.Blocks()
        holding = ReplicaHoldings(stage, round_index, peer, to_message(samples), done, line, run_id, left, mean)
        cut = self._earlier.cut if piece and self._earlier is not None else self._cut
        label = self._free(f"{form.label(round_index)}{f'-cut-{cut}' if cut else ''}", f"-stage-{stage}")
        place = form.place(run_id, label)
        await checkpoint_io.save_stage(self._store, place, state, shapes, holding)
        await self.look()
        if piece:
            return
        mine = next(one for one in self.found if one.base == f"{place}/")
        same = [one for one in self.found if one.checkpoint.parts[0].stage == stage and _of(one) <= _of(mine)]
        for at, old in enumerate([*self.found, *self.pieces]):
            if old is not mine and (at >= KEPT or any(old is one for one in same)):
                await RunStore(self._store, old.checkpoint.origin.run_id).delete(old.checkpoint.label)
        await self._clean(round_index)

    async def _clean(self, round_index: int) -> None:
        """Delete what is never read again: saved stages of cuts before the last one, and half-written ones of rounds
        before `round_index`, whose writer was killed. Raises LocalFault."""
        assert self._store is not None
        run = RunStore(self._store, self._origins[self._cut].run_id)
        least = 0 if self._earlier is None else self._earlier.cut
        for label, files in (await run.labels()).items():
            whose = re.fullmatch(LABEL, label)
            if whose is None:
                continue
            cut = int(whose["cut"] or 0)
            torn = cut == self._cut and int(whose["round"]) < round_index and f"{whose['stage']}.json" not in files
            if cut < least or torn:
                await run.delete(label)

    def _free(self, before: str, after: str) -> str:
        """A label that no saved stage has: one that a kill leaves half written spoils none that was whole."""
        taken = {one.checkpoint.label for one in (*self.found, *self.pieces)}
        labels = (f"{before}{f'-again-{number}' if number else ''}{after}" for number in itertools.count())
        return next(label for label in labels if label not in taken)


Age = tuple[int, int, int, bool]


def _age(samples: int, part: StagePart) -> Age:
    """Samples of the run, the round, the replica's steps, and whether it has all that a node saves as it leaves."""
    return samples, part.round, part.inner_steps, part.left


def _of(saved: Resumption) -> Age:
    return _age(saved.checkpoint.samples, saved.checkpoint.parts[0])
