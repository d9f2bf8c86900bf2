"""Write checkpoints to a store and read them: a stage's files, checkpoint.json, and the ones to resume from."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from swarmnode.base.concurrency import gather_or_cancel
from swarmnode.base.errors import DataError
from swarmnode.base.ids import PeerId, RunId
from swarmnode.base.ports import State, Store
from swarmnode.base.wire import record_pb2
from swarmnode.keep.recovery import checkpoint as form
from swarmnode.keep.recovery import tensorfile
from swarmnode.keep.recovery.checkpoint import NO_AGREEMENT, Checkpoint, CopyAgreement, Origin, ShardFile, StagePart
from swarmnode.keep.recovery.run_store import RunStore
from swarmnode.keep.recovery.tensorfile import Shape
from swarmnode.net.membership.progress import Progress, to_message, to_samples
from swarmnode.net.membership.state_line import UNBROKEN, StateLine

PARALLEL = 2  # measured: files at once; a third adds nothing on two cores (bench checkpoint)

T = TypeVar("T")
Shapes = Mapping[str, Mapping[str, Shape]]
"""By section and parameter, in their order in the flat buffers (model/section.py)."""

Tensors = dict[str, tuple[Shape, memoryview]]
Moved = Callable[[int], None]  # called with the number of bytes just written or read


@dataclass(frozen=True, slots=True)
class SavedMean:
    """A replica's running mean: float32 bytes in theta's layout, and the samples of the run that it spans."""

    data: memoryview
    span: int


@dataclass(frozen=True, slots=True)
class ReplicaHoldings:
    """The facts that a replica saves beside its state. `left`: it leaves, with its running mean, if it has one."""

    stage: int
    round: int
    peer: PeerId
    progress: record_pb2.Progress
    blocks: record_pb2.Blocks
    line: StateLine = UNBROKEN
    run_id: str = ""
    left: bool = False
    mean: SavedMean | None = None
    agreement: CopyAgreement = NO_AGREEMENT

    def part(self, state: State, files: Sequence[ShardFile]) -> StagePart:
        """The index of `state`, saved as `files`."""
        return StagePart(
            stage=self.stage,
            round=self.round,
            peer=self.peer,
            inner_steps=state.inner_steps,
            gradient_norm=state.gradient_norm,
            bump_steps=state.bump_steps,
            progress=to_samples(self.progress),
            blocks_below=self.blocks.finished_below,
            blocks=tuple(self.blocks.finished),
            files=tuple(files),
            line=self.line,
            run_id=self.run_id,
            left=self.left,
            averaged=0 if self.mean is None else self.mean.span,
            agreement=self.agreement,
        )


async def save_stage(
    store: Store,
    place: str,
    state: State,
    shapes: Shapes,
    holding: ReplicaHoldings,
    *,
    shard_nbytes: int = form.SHARD_NBYTES,
) -> StagePart:
    """Write a stage's files below `place`, then its stage-N.json. `state` must not change meanwhile.

    Raises LocalFault when the store refuses; the files written by then are deleted.
    """
    written: list[str] = []
    sections = dict(state.sections)
    if holding.mean is not None:
        sections[form.MEAN] = holding.mean.data
        shapes = {**shapes, form.MEAN: shapes["theta"]}

    async def write(cut: form.ShardSpan) -> ShardFile:
        head = tensorfile.header(cut.tensors, {"format": "pt", "section": cut.section, "stage": str(holding.stage)})
        data = memoryview(sections[cut.section]).cast("B")[cut.start : cut.end]
        written.append(f"{place}/{cut.name}")
        sha256 = await store.write(f"{place}/{cut.name}", [head, data])
        return ShardFile(cut.name, cut.section, len(head) + data.nbytes, sha256, cut.tensors)

    done = False
    try:
        cuts = form.cuts(holding.stage, holding.peer, shapes, shard_nbytes)
        files = await _some_at_once([partial(write, cut) for cut in cuts])
        part = holding.part(state, files)
        await store.write(f"{place}/{form.part_name(holding.stage)}", [form.to_text(part)])
        done = True
        return part
    finally:
        if not done:
            for name in written:
                await store.delete(name)


async def complete(store: Store, origin: Origin, label: str) -> Checkpoint | None:
    """Write checkpoint.json if every stage's part is there; None when one is missing.

    The node that saves the last part writes it. Two nodes that both come last write the same.
    """
    checkpoint = await assembled(store, origin, label)
    if checkpoint is not None:
        await store.write(f"{checkpoint.place}/{form.ROOT}", [form.to_text(checkpoint)])
    return checkpoint


async def assembled(store: Store, origin: Origin, label: str) -> Checkpoint | None:
    """The checkpoint that the parts of all stages make, not written yet; None when one is missing."""
    place = form.place(origin.run_id, label)
    parts: list[StagePart] = []
    for stage in range(origin.stages):
        name = f"{place}/{form.part_name(stage)}"
        data = await store.read(name)
        if data is None:
            return None
        parts.append(form.part_of(data, name))
    progress = Progress()
    for part in parts:
        progress.merge(Progress.from_wire(to_message(part.progress)))
    return Checkpoint(
        origin=origin,
        label=label,
        round=max(part.round for part in parts),
        samples=progress.total,
        progress=to_samples(progress.to_wire()),
        parts=tuple(parts),
    )


async def prune(store: Store, run_id: RunId, keep: int) -> list[str]:
    """Delete checkpoints of `run_id` beyond the newest `keep`, and return their labels."""
    here = RunStore(store, run_id)
    files = await here.labels()
    gone = form.expired([label for label, names in files.items() if form.ROOT in names], files.keys(), keep)
    for label in gone:
        await here.delete(label)
    return gone


@dataclass(frozen=True, slots=True)
class StoredCheckpoint:
    """A checkpoint found in a store. `fault` says why it cannot be used, None when it can as far as sizes tell."""

    name: str  # of its checkpoint.json
    checkpoint: Checkpoint | None
    fault: str | None


async def find(store: Store) -> list[StoredCheckpoint]:
    """All checkpoints below `store`, of any run, the newest last. Damaged and foreign ones carry their fault."""
    sizes = await store.names()
    checkpoints: list[StoredCheckpoint] = []
    for name in sizes:
        if name == form.ROOT or name.endswith(f"/{form.ROOT}"):
            try:
                data = await store.read(name)
                if data is None:
                    continue
                checkpoint = form.checkpoint_of(data, name)
            except DataError as error:
                checkpoints.append(StoredCheckpoint(name, None, str(error)))
                continue
            fault = form.missing(checkpoint.files, name.removesuffix(form.ROOT), sizes)
            checkpoints.append(StoredCheckpoint(name, checkpoint, fault))
    # By label, not by path: at equal samples, round 8's final one is the newer, but "8-final/" sorts before "8/".
    return sorted(checkpoints, key=lambda f: (f.checkpoint.samples if f.checkpoint else -1, f.name.split("/")))


def usable(found: list[StoredCheckpoint], where: str, run_id: RunId | None = None) -> list[tuple[str, Checkpoint]]:
    """(folder, checkpoint) of the usable ones, the newest first; where there are several runs, only those of `run_id`.

    Raises DataError without any; it says what there is instead.
    """
    good = [
        (each.name.removesuffix(form.ROOT), each.checkpoint) for each in found if each.checkpoint and not each.fault
    ]
    if not good:
        if found:
            raise DataError(f"{where}: no checkpoint that can be used: {found[-1].name}: {found[-1].fault}")
        raise DataError(f"{where}: no checkpoint there (a folder with {form.ROOT})")
    runs = {checkpoint.origin.run_id for _, checkpoint in good}
    if len(runs) > 1:
        good = [(base, checkpoint) for base, checkpoint in good if checkpoint.origin.run_id == run_id]
        if not good:
            listed = ", ".join(run[: form.RUN_CHARACTERS] for run in sorted(runs))
            raise DataError(f"{where}: checkpoints of {len(runs)} runs; give the folder of one of them: {listed}")
    return good[::-1]


async def load_tensors(
    store: Store, base: str, files: Sequence[ShardFile], *, moved: Moved = lambda nbytes: None
) -> Tensors:
    """Shape and bytes of every parameter in `files`. Raises DataError, LocalFault as `load_stage`."""
    tensors: dict[str, tuple[Shape, memoryview]] = {}

    async def read(file: ShardFile) -> None:
        data = await _read(store, base, file)
        tensors.update(tensorfile.read(data, f"{base}{file.name}")[0])
        moved(len(data))

    await _some_at_once([partial(read, file) for file in files])
    return tensors


async def _read(store: Store, base: str, file: ShardFile) -> bytes:
    """The bytes of a checkpoint's file, verified. Raises DataError, LocalFault."""
    data = await store.read(f"{base}{file.name}", file.sha256)
    if data is None:
        raise DataError(f"{base}{file.name}: missing; use another checkpoint")
    return data


async def _some_at_once(works: Sequence[Callable[[], Awaitable[T]]]) -> list[T]:
    """The results of `works`, PARALLEL of which run at a time."""
    gate = asyncio.Semaphore(PARALLEL)

    async def gated(work: Callable[[], Awaitable[T]]) -> T:
        async with gate:
            return await work()

    return await gather_or_cancel([partial(gated, work) for work in works])


async def load_stage(store: Store, base: str, checkpoint: Checkpoint, shapes: Shapes) -> State:
    """The state of a stage of `shapes` from a checkpoint cut in any way; `base` is the folder of its files in `store`.

    Sections named by `checkpoint.anew` are zero, and inner steps are counted from 0 where the moments are zero. Every
    file is verified against its hash. Raises DataError that names the file when one is missing, damaged or without an
    expected tensor; LocalFault when the store cannot be read.
    """
    anew = form.anew(checkpoint, shapes)
    plan = [(section, form.sources(checkpoint, shapes[section], section)) for section in shapes if section not in anew]
    places = {section: _places(held) for section, held in shapes.items()}
    flats: dict[str, npt.NDArray[np.uint8]] = {}
    for section, spans in places.items():
        size = max((end for _, end in spans.values()), default=0)
        flats[section] = np.zeros(size, np.uint8) if section in anew else np.empty(size, np.uint8)

    async def read(section: str, file: ShardFile) -> None:
        where = f"{base}{file.name}"
        room = _room(file, places[section])
        if room is not None:  # file and flat buffer have the same order: read in place
            head = bytearray(file.nbytes - (room[1] - room[0]))
            flat = flats[section].data[room[0] : room[1]]
            if not await store.fill(where, [memoryview(head), flat], file.sha256):
                raise DataError(f"{where}: missing; use another checkpoint")
            tensorfile.check_head(head, file.tensors, where)
            return
        data = await _read(store, base, file)
        tensors, _ = tensorfile.read(data, where)
        for name in file.tensors.keys() & places[section].keys():
            begin, end = places[section][name]
            held = tensors.get(name)
            if held is None or held[1].nbytes != end - begin:
                raise DataError(f"{where}: does not hold {name} as {form.ROOT} says; use another checkpoint")
            flats[section][begin:end] = np.frombuffer(held[1], np.uint8)

    await _some_at_once([partial(read, section, file) for section, files in plan for file in files])
    names = shapes["theta"].keys()
    parts = [part for part in checkpoint.parts if any(f.tensors.keys() & names for f in part.files)]
    sections = {section: flat.data.toreadonly() for section, flat in flats.items()}
    bump_steps = min(part.bump_steps for part in parts)
    steps = 0 if "exp_avg" in anew else _steps(parts)
    return State(sections, inner_steps=steps, gradient_norm=_norm(parts), bump_steps=bump_steps)


def _places(shapes: Mapping[str, Shape]) -> dict[str, tuple[int, int]]:
    """[first, last) byte of each parameter in a section of `shapes`."""
    ends = list(itertools.accumulate((tensorfile.nbytes_of(shape) for shape in shapes.values()), initial=0))
    return dict(zip(shapes, itertools.pairwise(ends), strict=True))


def _room(file: ShardFile, places: Mapping[str, tuple[int, int]]) -> tuple[int, int] | None:
    """The span of the flat buffer that holds the tensors of `file` in file order; None when there is none."""
    spans = [places.get(name) for name in file.tensors]
    if not spans or spans[0] is None:
        return None
    begin = end = spans[0][0]
    for span, shape in zip(spans, file.tensors.values(), strict=True):
        if span is None or span[0] != end or span[1] - span[0] != tensorfile.nbytes_of(shape):
            return None
        end = span[1]
    return (begin, end) if 0 < file.nbytes - (end - begin) <= tensorfile.HEADER_BYTES_MAX else None


def _steps(parts: list[StagePart]) -> int:
    """Inner steps of a stage put together from `parts`: the least, so that AdamW's bias correction errs to caution."""
    return min(part.inner_steps for part in parts)


def _norm(parts: list[StagePart]) -> float:
    """Gradient norm of a stage put together from `parts`: the root mean square, until the first steps correct it."""
    return float(np.sqrt(np.mean([part.gradient_norm**2 for part in parts])))


def progress_of(checkpoint: Checkpoint) -> Progress:
    """Samples of the run when `checkpoint` was saved. Raises RemoteFault for impossible counts."""
    return Progress.from_wire(to_message(checkpoint.progress))


async def verify(store: Store, base: str, checkpoint: Checkpoint) -> None:
    """Read every file and compare its hash. Raises DataError that names the first missing or changed file."""

    async def read(file: ShardFile) -> None:
        await _read(store, base, file)  # of the bytes nothing is kept

    await _some_at_once([partial(read, file) for file in checkpoint.files])


def blocks_of(checkpoint: Checkpoint, block_samples: int) -> record_pb2.Blocks:
    """The finished blocks, in blocks of `block_samples` samples.

    Where the checkpoint has another block size, only the whole blocks below its first unfinished one count.
    """
    part = max(checkpoint.parts, key=lambda part: (part.blocks_below, len(part.blocks)))
    size = checkpoint.origin.block_samples
    if size != block_samples:
        return record_pb2.Blocks(finished_below=part.blocks_below * size // block_samples)
    return record_pb2.Blocks(finished_below=part.blocks_below, finished=part.blocks)
