"""Sources of models for `export`, `eval` and `generate`: a session's folder, a checkpoint, or an exported model."""

from __future__ import annotations

import asyncio
import base64
import binascii
import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from swarmnode.app.daemon.clock import SystemClock
from swarmnode.app.machine import checkup
from swarmnode.app.machine.folder_store import FolderStore, is_url, keeper
from swarmnode.base import bounds
from swarmnode.base.concurrency import beside_loop
from swarmnode.base.errors import DataError, NoDaemon, RemoteFault, SwarmnodeError, Unavailable, UsageError
from swarmnode.base.wire.record_pb2 import SignedManifest
from swarmnode.keep.recovery import checkpoint as form
from swarmnode.keep.recovery import checkpoint_io
from swarmnode.keep.recovery.archive import ABOUT, FRESH_S, ONCE_S, ArchiveNotes
from swarmnode.keep.recovery.checkpoint import ROOT
from swarmnode.keep.recovery.resumption import Resumption, SavedStage, saved_stages
from swarmnode.run.manifest import read_signed, verify
from swarmnode.run.manifest.folder import MANIFEST_FILE, SIGNED_FILE, manifest_at

if TYPE_CHECKING:
    from swarmnode.model.gather import Gathered


Note = Callable[[str], None]
Moved = Callable[[int, int], None]
"""Called with (bytes read so far, total bytes)."""


POLL_S = 0.5


def fresh_copy(source: Path, note: Note) -> Path | None:
    """The folder of the checkpoints of the run of `source` (the folder of the run, of its archive, or the home of the
    process that keeps that), once the newest is as the swarm was FRESH_S ago or later. None where no archive is kept
    now, or after ONCE_S: `note` is told why."""
    for home in _keepers(source):
        try:
            return Path(asyncio.run(copy_now(home, note))["folder"])
        except (NoDaemon, UsageError):
            continue
        except SwarmnodeError as error:
            note(f"no copy of now: {error}; the newest that is kept is taken")
    return None


async def copy_now(home: Path, note: Note) -> dict[str, Any]:
    """The reply of the archive of `home` when its newest checkpoint is current. Raises Unavailable after ONCE_S,
    UsageError if `home` keeps no archive, and as control.client.ask."""
    from swarmnode.app.control.client import ask

    loop = asyncio.get_running_loop()
    said = ""
    begun_s = loop.time()
    while True:
        waited_s = loop.time() - begun_s
        reply = await asyncio.to_thread(ask, home, "copy", older_s=FRESH_S + waited_s)
        if reply["current"]:
            return reply
        if not said:
            note(f"the archive of {home} is asked for a copy of now")
        elif reply["status"] != said:
            note(reply["status"])
        said = reply["status"]
        if waited_s > ONCE_S:
            raise Unavailable(f"the archive has none after {waited_s:.0f} s ({said})")
        await asyncio.sleep(POLL_S)


def _keepers(source: Path) -> Iterator[Path]:
    """Homes of the processes that may keep an archive of the run of `source`."""
    from swarmnode.app.daemon import ready_file
    from swarmnode.run.manifest import verify
    from swarmnode.run.manifest.folder import SIGNED_FILE

    for folder in (source, source.parent, source / "archive"):
        if (home := keeper(folder)) is not None:
            yield home
            return
    if ready_file.read(source) is not None:
        yield source
    elif (source / SIGNED_FILE).is_file():
        _, run_id = verify(read_signed(source / SIGNED_FILE)[0], None)
        homes = ready_file.running(ready_file.meeting_homes())
        yield from (home for home, ready in homes.items() if ready.run_id == run_id)


@dataclass(frozen=True, slots=True)
class WeightChoice:
    """The choice of a run's weights: of replicas that left, the running mean, or with `last` the last weights; of
    checkpoints, the mean of the newest `checkpoints` (WSM, arXiv 2507.17634)."""

    last: bool = False
    checkpoints: int = 1


NEWEST = WeightChoice()


@beside_loop
def gather(
    source: str, kind: str, note: Note, moved: Moved = lambda done, of: None, weights: WeightChoice = NEWEST
) -> tuple[Gathered, Path | None]:
    """All copies of stages at `source`, and the folder of the run's files; None for a bucket.

    `kind` "stages": files that nodes saved when they left. "checkpoint": the newest intact one. "auto": the first of
    exported model, stages, checkpoint that makes a whole model; only checkpoints if `weights` asks for several. Raises
    UsageError, DataError, LocalFault. "auto" first has the archive that a running process keeps in `source` make its
    copy current. `note` is told which model was taken.
    """
    asked = None
    if kind == "auto" and not is_url(source):
        asked = fresh_copy(Path(source).expanduser(), note)
    if asked is None:
        gathered, folder = _gather(source, kind, note, moved, weights)
    else:
        gathered = _of_checkpoint(str(asked), note, moved, weights.checkpoints)
        folder = data_folder(Path(source).expanduser())
    note(told(gathered, SystemClock().unix_s()))
    return replace(gathered, run_folder=folder), folder


def is_export(source: str) -> bool:
    """Whether `source` is an exported model, which does not change, and not a run."""
    return not is_url(source) and (Path(source).expanduser() / "model.safetensors").is_file()


def facts(found: Gathered, now_unix_s: float) -> dict[str, object]:
    """Which model it is, as fields of --json; None where that is not known. `validation` is what its archive measured
    or heard, in nats per token."""
    age_s = None if found.made_unix_s is None else max(0.0, round(now_unix_s - found.made_unix_s, 1))
    return {
        "kind": found.kind,
        "round": found.round,
        "samples": found.samples,
        "age_s": age_s,
        "validation": found.validation,
    }


def told(found: Gathered, now_unix_s: float) -> str:
    """`facts` as a line: round 36, 4,640 samples, 2 minutes old, validation 1.999."""
    words = [f"{found.kind}: round {found.round}", f"{found.samples:,} samples"]
    if found.made_unix_s is not None:
        words.append(f"{_span(max(0.0, now_unix_s - found.made_unix_s))} old")
    return ", ".join([*words, *([] if found.validation is None else [f"validation {found.validation:.3f}"])])


def _span(seconds: float) -> str:
    """One number and its unit: 2 minutes."""
    units = ((86_400, "day"), (3600, "hour"), (60, "minute"), (1, "second"))
    size_s, unit = next((each for each in units if seconds >= 2 * each[0]), units[-1])
    count = int(seconds / size_s)
    return f"{count} {unit}{'' if count == 1 else 's'}"


def _gather(source: str, kind: str, note: Note, moved: Moved, weights: WeightChoice) -> tuple[Gathered, Path | None]:
    folder = Path(source).expanduser()
    if weights.checkpoints > 1:
        if kind == "stages":
            raise UsageError("--average only works for checkpoints: give --from checkpoint, or omit it")
        kind = "checkpoint"
    if is_url(source):
        return _of_checkpoint(source, note, moved, weights.checkpoints), None
    if not folder.is_dir():
        raise UsageError(f"{source}: no such folder; give a run's or a session's folder, a checkpoint or an export")
    if kind == "auto" and is_export(source):
        return _of_export(folder), folder
    saved = [] if kind == "checkpoint" else asyncio.run(_saved(_session(folder), note))
    if kind == "stages" and not saved:
        raise UsageError(f"no saved stage below {folder}: nodes save theirs in their homes when they leave")
    failure: DataError | None = None
    if saved:
        try:
            return asyncio.run(_of_saved(saved, folder, weights.last)), data_folder(folder)
        except DataError as error:
            if kind == "stages":
                raise
            note(f"{error}; looking for a checkpoint instead")
            failure = error
    try:
        return _of_checkpoint(source, note, moved, weights.checkpoints), data_folder(folder)
    except (DataError, UsageError) as error:
        raise failure or _no_model(source, folder, error) from None


def _no_model(source: str, folder: Path, error: SwarmnodeError) -> SwarmnodeError:
    """The error where there is nothing to read: the `error` of a checkpoint, if there is one."""
    if any(folder.rglob(ROOT)):
        return error
    return UsageError(
        f"no saved stage, no checkpoint and no exported model in {source}; its owner copies a run"
        " that trains: swarmnode archive RUN --once"
    )


def _of_export(folder: Path) -> Gathered:
    from swarmnode.model import gather as models

    about = models.read_about(folder)
    gathered = models.of_export(folder, manifest_at(folder, signed_first=True), about)
    made_s = about.get("made_unix_s")
    loss = about.get("validation")
    return replace(gathered, made_unix_s=_number(made_s), validation=_number(loss))


def _session(folder: Path) -> Path:
    """The folder below which the nodes' homes are: that of the last of several sessions of a run."""
    sessions = sorted({path.parents[1] for path in folder.glob("up-*/*/saved*")})
    return sessions[-1] if sessions else folder


async def _saved(folder: Path, note: Note) -> list[SavedStage]:
    """The newest state of each stage in each home below `folder`, where a node saved it as it left; of a run whose
    stages were cut anew, those of the last cut. `note` is told of damaged ones."""
    store = FolderStore(folder)
    newest = dict[tuple[str, int], SavedStage]()
    async for found in saved_stages(store, await store.names(), lambda name, why: note(f"{name} is damaged ({why})")):
        place = (found.base.rsplit("/", 3)[0], found.part.stage)
        before = newest.get(place)
        if before is None or (found.cut, found.age) > (before.cut, before.age):
            newest[place] = found
    left = [found for found in newest.values() if found.part.left]
    cut = max((found.cut for found in left), default=0)
    return [found for found in left if found.cut == cut]


async def _of_saved(saved: list[SavedStage], folder: Path, last: bool) -> Gathered:
    """Copies of the stages that nodes `saved` in the session below `folder`: each replica's running mean if it has one
    (model/running_mean.py), or with `last` its last weights. Raises DataError for a stage of another run."""
    from swarmnode.model import gather as models
    from swarmnode.model.running_mean import weight_of

    root = _session(folder)
    store = FolderStore(root)
    manifest = manifest_at(folder, signed_first=True)
    share = manifest.inner.average_share
    run_id = saved[0].run_id
    copies = []
    for found in saved:
        if found.run_id != run_id:
            raise DataError(
                f"{root / found.base}: belongs to run {found.run_id[:12]}, not to run {run_id[:12]}; leave it out"
            )
        part = found.part
        mean = not last and share > 0.0
        weight = weight_of(share, part.averaged, found.samples) if mean else 1.0
        files = form.holding(part.files, form.MEAN) if mean and part.averaged else form.holding(part.files, "theta")
        tensors = await checkpoint_io.load_tensors(store, found.base, files)
        copies.append(models.copy_of(part.peer, tensors, str(root / found.base), weight))
    rounds = max(found.part.round for found in saved)
    samples = max(found.samples for found in saved)
    made_s = max((root / found.base).stat().st_mtime for found in saved)
    return models.checked(
        models.Gathered(manifest, run_id, rounds, samples, tuple(copies), "saved stages", made_unix_s=made_s)
    )


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) else None


def data_folder(folder: Path) -> Path:
    """The folder of the manifest's files: the run's folder, which is the parent of a session's."""
    above = folder.parent
    return above if (above / MANIFEST_FILE).is_file() or (above / SIGNED_FILE).is_file() else folder


def manifest_in(resumption: Resumption) -> SignedManifest:
    """The signed manifest in a checkpoint. Raises DataError, ManifestError."""
    try:
        signed = bounds.parse(
            SignedManifest, base64.b64decode(resumption.checkpoint.origin.manifest, validate=True), "manifest"
        )
    except (binascii.Error, RemoteFault):
        raise DataError(f"{resumption.where}: its manifest cannot be read; give RUN, the folder of the run") from None
    verify(signed, None)
    return signed


def _of_checkpoint(source: str, note: Note, moved: Moved, newest: int) -> Gathered:
    """The newest checkpoint, or the mean of the `newest` ones of its run."""
    from swarmnode.model import gather as models

    read = asyncio.run(_read(source, note, moved, newest))
    if len(read) < newest:
        note(f"only {len(read)} of {newest} checkpoints are usable; these are averaged")
    resumption = read[0][0]
    checkpoint = resumption.checkpoint
    manifest, run_id = verify(manifest_in(resumption), None)
    peers = " ".join(part.peer[-8:] for part in checkpoint.parts)
    kind = f"checkpoint {checkpoint.label}" + (f" averaged with {len(read) - 1} before it" if len(read) > 1 else "")
    made_s, loss = asyncio.run(_made(resumption))
    empty = models.Gathered(
        manifest,
        run_id,
        checkpoint.round,
        checkpoint.samples,
        (),
        kind,
        made_unix_s=made_s,
        validation=loss if len(read) == 1 else None,
    )
    copies = tuple([models.copy_of(peers, tensors, resumption.where) for _, tensors in read])
    gathered = models.checked(replace(empty, copies=copies))
    if len(read) == 1:
        return gathered
    return replace(gathered, copies=(models.StageCopy(peers, models.merged(gathered), resumption.where),))


async def _made(resumption: Resumption) -> tuple[float | None, float | None]:
    """(time at which a checkpoint was made, its validation loss), as far as its archive or its folder tells."""
    data = await resumption.store.read(f"{resumption.base}{ABOUT}")
    with contextlib.suppress(DataError):
        if data is not None:
            notes = ArchiveNotes.of_text(data, resumption.where)
            return notes.unix_s, notes.loss
    root = Path(resumption.where) / ROOT
    return (root.stat().st_mtime if root.is_file() else None), None


async def _read(source: str, note: Note, moved: Moved, newest: int) -> list[tuple[Resumption, checkpoint_io.Tensors]]:
    """The `newest` checkpoints, or as many as exist, with intact parameters. Raises DataError if there is none."""
    failure: DataError | None = None
    candidates = await checkup.find_resumptions(source, None, note)
    sizes = [sum(file.nbytes for file in form.holding(each.checkpoint.files, "theta")) for each in candidates[:newest]]
    seen = 0

    def count(nbytes: int) -> None:
        nonlocal seen
        seen += nbytes
        moved(min(seen, sum(sizes)), sum(sizes))

    read: list[tuple[Resumption, checkpoint_io.Tensors]] = []
    for resumption in candidates:
        try:
            files = form.holding(resumption.checkpoint.files, "theta")
            tensors = await checkpoint_io.load_tensors(resumption.store, resumption.base, files, moved=count)
        except DataError as error:
            failure = error
            note(f"{resumption.checkpoint.label} cannot be used: {failure}")
            continue
        read.append((resumption, tensors))
        if len(read) == newest:
            break
    if not read:
        assert failure is not None
        raise failure
    return read
