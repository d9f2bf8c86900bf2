"""What a checkpoint is, who saves it, which are kept: plain decisions and text, no waiting, no arithmetic.

    RUN/round-000000012/theta-00000.stage-0.k3VxA9Qp.safetensors    parameters by the whole model's names
                        stage-0.json                                written when the stage's files are safe
                        checkpoint.json                             written last, when every stage's is there

A folder with checkpoint.json is a checkpoint: it names every file with its size, hash and tensors. Names are those of
the whole model, so stages cut elsewhere load it as well (`sources`).
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from swarmnode.errors import DataError
from swarmnode.ids import PeerId, RunId, digest64, short
from swarmnode.manifest import Manifest
from swarmnode.model.section import SECTIONS
from swarmnode.recovery import tensorfile
from swarmnode.recovery.tensorfile import Shape

FORMAT = 1
ROOT = "checkpoint.json"
TEXT_BYTES_MAX = 256 << 20
SHARD_NBYTES = 256 << 20  # guess: large enough for a disk's full speed, small enough to hold a few in memory
RUN_CHARACTERS = 16
FINAL = "-final"
COUNT_MAX = 1 << 53


@dataclass(frozen=True, slots=True)
class ShardFile:
    """One safetensors file: tensors of one section, in the order they lie in it. `name` is relative to the folder."""

    name: str
    section: str
    nbytes: int
    sha256: str
    tensors: dict[str, Shape]


@dataclass(frozen=True, slots=True)
class StagePart:
    """What one replica saved of its stage. `blocks` are those finished (data/blocks.py), known to feeders only."""

    stage: int
    round: int
    peer: str
    inner_steps: int
    gradient_norm: float
    bump_steps: int
    progress: dict[str, int]
    blocks_below: int
    blocks: tuple[int, ...]
    files: tuple[ShardFile, ...]


@dataclass(frozen=True, slots=True)
class Origin:
    """Whose checkpoint: the run, and what of its manifest must agree with whoever loads it. `manifest` is the signed
    one, base64, "" where there is none. `subspace` is "" or which one the weights were kept in."""

    run_id: str
    run_name: str
    stages: int
    model: dict[str, float]
    tokenizer: str
    block_samples: int
    manifest: str = ""
    subspace: str = ""

    @staticmethod
    def of(manifest: Manifest, run_id: RunId, signed: str = "") -> Origin:
        model = dataclasses.asdict(manifest.model)
        stages, data = manifest.pipeline.stages, manifest.data
        kept = subspace_of(manifest)
        return Origin(run_id, manifest.name, stages, model, data.tokenizer, data.block_samples, signed, kept)


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """All stages. `samples` are those of the whole run, `progress` by feeder."""

    origin: Origin
    label: str
    round: int
    samples: int
    progress: dict[str, int]
    parts: tuple[StagePart, ...]

    @property
    def nbytes(self) -> int:
        return sum(file.nbytes for part in self.parts for file in part.files)

    @property
    def files(self) -> Iterable[ShardFile]:
        for part in self.parts:
            yield from part.files

    @property
    def place(self) -> str:
        return place(self.origin.run_id, self.label)


def label(round_index: int, *, final: bool = False) -> str:
    """The name of a checkpoint's folder; in text order they are in the order of rounds, a final one after its round."""
    return f"round-{round_index:09d}{FINAL if final else ''}"


def place(run_id: str, label: str) -> str:
    return f"{run_id[:RUN_CHARACTERS]}/{label}"


def part_name(stage: int) -> str:
    return f"stage-{stage}.json"


# ---- who saves


def due(done: int, saved: int, every: int) -> int | None:
    """The round whose checkpoint is due at a replica that finished round `done` and last saved (or left to others) that
    of round `saved`: the newest multiple of `every`, if it is newer. Missed ones are not made up for."""
    newest = done // every * every
    return newest if newest > saved else None


def order(run_id: RunId, stage: int, label: str, able: Collection[PeerId]) -> list[PeerId]:
    """Replicas of `stage` in the order in which they save `label`: the first does, the next when it did not. Everybody
    computes the same, and each checkpoint burdens another one."""
    return sorted(able, key=lambda peer: (digest64(run_id, "save", stage, label, peer), peer))


def turn(
    order: Sequence[PeerId], me: PeerId, alive: Collection[PeerId], waited_s: float, patience_s: float
) -> tuple[bool, str]:
    """Whether `me` saves now, `waited_s` after the boundary: each one alive before it in `order` has `patience_s`."""
    before = [peer for peer in order[: order.index(me)] if peer in alive]
    if not before:
        return True, "first of those who can"
    if waited_s >= patience_s * len(before):
        return True, f"{short(before[0])} has not saved it within {waited_s:.0f} s"
    return False, f"{short(before[0])} saves it"


def expired(complete: Collection[str], present: Collection[str], keep: int) -> list[str]:
    """Labels to delete: complete ones but the newest `keep`, and what is older than the newest complete one and never
    became complete."""
    if not complete:
        return []
    kept = set(sorted(complete)[-keep:])
    return sorted(label for label in present if label not in kept and label < max(complete))


# ---- what a file holds


@dataclass(frozen=True, slots=True)
class Cut:
    """One file to be: bytes [start, end) of `section`, which are `tensors`."""

    name: str
    section: str
    start: int
    end: int
    tensors: dict[str, Shape]


def cuts(
    stage: int, peer: PeerId, shapes: Mapping[str, Mapping[str, Shape]], shard_nbytes: int = SHARD_NBYTES
) -> list[Cut]:
    """How a stage's sections, of `shapes` by section and parameter, become files of at most `shard_nbytes` (a larger
    tensor has a file of its own)."""
    found = []
    for section, held in shapes.items():
        groups: list[dict[str, Shape]] = []
        room = 0
        for name, shape in held.items():
            nbytes = tensorfile.nbytes_of(shape)
            if not groups or nbytes > room:
                groups.append({})
                room = shard_nbytes
            groups[-1][name] = shape
            room -= nbytes
        start = 0
        for index, tensors in enumerate(groups):
            end = start + sum(tensorfile.nbytes_of(shape) for shape in tensors.values())
            name = f"{section}-{index:05d}.stage-{stage}.{short(peer)}.safetensors"
            found.append(Cut(name, section, start, end, tensors))
            start = end
    return found


def sources(checkpoint: Checkpoint, shapes: Mapping[str, Shape], section: str) -> list[ShardFile]:
    """The files that hold `shapes` in `section`, wherever the checkpoint's stages were cut.

    Raises DataError that names the first parameter that is missing or of another shape.
    """
    found: dict[str, ShardFile] = {}
    wanted = dict(shapes)
    for file in checkpoint.files:
        if file.section == section:
            for name in file.tensors.keys() & wanted.keys():
                if tuple(file.tensors[name]) != tuple(wanted[name]):
                    held = list(file.tensors[name])
                    raise DataError(
                        f"checkpoint {checkpoint.place}: {name} is {held}, this model's is {list(wanted[name])}: it is"
                        " a checkpoint of another model"
                    )
                del wanted[name]
                found[file.name] = file
    if wanted:
        name = next(iter(wanted))
        raise DataError(f"checkpoint {checkpoint.place}: {name} is not in it: it is a checkpoint of another model")
    return [found[name] for name in sorted(found)]


def anew(checkpoint: Checkpoint, shapes: Mapping[str, Mapping[str, Shape]]) -> frozenset[str]:
    """Sections of `shapes` that begin at zero, as the run that saved `checkpoint` did not keep them as this one does:
    its outer method had no momentum, or its optimizer other second moments, and then both moments do."""
    found = set()
    for section in sorted({"momentum", "exp_avg_sq"} & shapes.keys()):
        held: dict[str, Shape] = {}
        for file in checkpoint.files:
            if file.section == section:
                held |= file.tensors
        if any(held.get(name) != tuple(shape) for name, shape in shapes[section].items()):
            found.add(section)
    return frozenset(found | {"exp_avg"} if "exp_avg_sq" in found else found)


def subspace_of(manifest: Manifest) -> str:
    """Names the frozen subspace that the stream of a run of `manifest` is kept in; "" without one."""
    pipeline = manifest.pipeline
    return f"rank {pipeline.boundary_rank} of seed {manifest.seed}" if pipeline.boundary == "subspace" else ""


def check_fits(checkpoint: Checkpoint, manifest: Manifest, where: str) -> None:
    """Raises DataError unless a run of `manifest` can go on from `checkpoint`: same model, same tokenizer, and where
    it keeps the stream in a subspace, the same. Stages, nodes, data and optimizer may differ."""
    theirs, ours = checkpoint.origin.model, dataclasses.asdict(manifest.model)
    different = sorted(key for key in theirs.keys() | ours.keys() if theirs.get(key) != ours.get(key))
    if different:
        key = different[0]
        raise DataError(
            f"{where}: a checkpoint of another model: model.{key} is {theirs.get(key)} there and {ours.get(key)} in"
            f" this manifest ({len(different)} differ); give the manifest of run {checkpoint.origin.run_name!r}"
        )
    if checkpoint.origin.tokenizer != manifest.data.tokenizer:
        raise DataError(
            f"{where}: its tokens are of tokenizer {checkpoint.origin.tokenizer!r}, this manifest's of"
            f" {manifest.data.tokenizer!r}: the model would read another language"
        )
    if (ours_kept := subspace_of(manifest)) not in ("", checkpoint.origin.subspace):
        raise DataError(
            f"{where}: its weights were not kept in the subspace of this manifest ({ours_kept}; there:"
            f" {checkpoint.origin.subspace or 'none'}): give another pipeline.boundary, or its rank and seed"
        )


def missing(checkpoint: Checkpoint, sizes: Mapping[str, int]) -> str | None:
    """What is wrong with its files as the store lists them (`sizes` by full name): None when nothing is."""
    for file in checkpoint.files:
        found = sizes.get(f"{checkpoint.place}/{file.name}")
        if found is None:
            return f"{file.name} is missing"
        if found != file.nbytes:
            return f"{file.name} has {found} bytes, not {file.nbytes}"
    return None


# ---- as text


def to_text(value: StagePart | Checkpoint) -> bytes:
    return (json.dumps({"format": FORMAT, **dataclasses.asdict(value)}, indent=1, sort_keys=True) + "\n").encode()


def part_of(data: bytes, where: str) -> StagePart:
    """Raises DataError that begins with `where`."""
    return _part(_tree(data, where), where)


def checkpoint_of(data: bytes, where: str) -> Checkpoint:
    """Raises DataError that begins with `where`: not such a file, or written by another version of swarmnode."""
    tree = _tree(data, where)
    given = tree.get("origin")
    if not isinstance(given, dict) or not isinstance(tree.get("parts"), list):
        raise DataError(f"{where}: not a checkpoint of swarmnode: origin and parts are missing")
    model = given.get("model")
    if not isinstance(model, dict) or not all(type(value) in (int, float) for value in model.values()):
        raise DataError(f"{where}: its model is not a table of numbers")
    origin = Origin(
        run_id=_text(given, "run_id", where),
        run_name=_text(given, "run_name", where),
        stages=_whole(given, "stages", where),
        model={str(key): value for key, value in model.items()},
        tokenizer=_text(given, "tokenizer", where),
        block_samples=_whole(given, "block_samples", where),
        manifest=_text(given, "manifest", where),
        subspace=_text({"subspace": "", **given}, "subspace", where),
    )
    parts = tuple(_part(part, where) for part in tree["parts"])
    if [part.stage for part in parts] != list(range(origin.stages)) or origin.block_samples < 1:
        raise DataError(f"{where}: holds stages {[part.stage for part in parts][:8]}, not 0 to {origin.stages - 1}")
    return Checkpoint(
        origin=origin,
        label=_text(tree, "label", where),
        round=_whole(tree, "round", where),
        samples=_whole(tree, "samples", where),
        progress=_progress(tree, where),
        parts=parts,
    )


def _tree(data: bytes, where: str) -> dict[str, Any]:
    try:
        tree = json.loads(data)
    except (ValueError, RecursionError):
        raise DataError(f"{where}: not JSON: it was cut off or changed; use another checkpoint") from None
    if not isinstance(tree, dict) or tree.get("format") != FORMAT:
        found = tree.get("format") if isinstance(tree, dict) else None
        raise DataError(f"{where}: format {str(found)[:20]}; this version of swarmnode reads {FORMAT}")
    return tree


def _part(tree: object, where: str) -> StagePart:
    if not isinstance(tree, dict) or not isinstance(tree.get("files"), list):
        raise DataError(f"{where}: a stage without files")
    norm = tree.get("gradient_norm")
    if not isinstance(norm, int | float) or not (math.isfinite(norm) and norm >= 0.0):
        raise DataError(f"{where}: gradient_norm = {str(norm)[:40]}; a number of at least 0 belongs there")
    blocks = tree.get("blocks")
    if not isinstance(blocks, list) or not all(type(block) is int and 0 <= block <= COUNT_MAX for block in blocks):
        raise DataError(f"{where}: blocks is not a list of whole numbers")
    return StagePart(
        stage=_whole(tree, "stage", where),
        round=_whole(tree, "round", where),
        peer=_text(tree, "peer", where),
        inner_steps=_whole(tree, "inner_steps", where),
        gradient_norm=float(norm),
        bump_steps=_whole(tree, "bump_steps", where),
        progress=_progress(tree, where),
        blocks_below=_whole(tree, "blocks_below", where),
        blocks=tuple(blocks),
        files=tuple(_file(file, where) for file in tree["files"]),
    )


def _file(tree: object, where: str) -> ShardFile:
    match tree:
        case {
            "name": str(name),
            "section": str(section),
            "nbytes": int(nbytes),
            "sha256": str(sha256),
            "tensors": dict(tensors),
        } if section in SECTIONS and len(sha256) == 64 and nbytes >= 0 and "/" not in name and name.strip("."):
            if all(
                isinstance(shape, list) and all(type(n) is int and n >= 0 for n in shape) for shape in tensors.values()
            ):
                return ShardFile(name, section, nbytes, sha256, {str(key): tuple(v) for key, v in tensors.items()})
    raise DataError(f"{where}: a file without name, section, nbytes, sha256 and tensors")


def _progress(tree: Mapping[str, Any], where: str) -> dict[str, int]:
    progress = tree.get("progress")
    if not isinstance(progress, dict) or not all(type(n) is int and 0 <= n <= COUNT_MAX for n in progress.values()):
        raise DataError(f"{where}: progress is not a table of samples by feeder")
    return {str(feeder): samples for feeder, samples in progress.items()}


def _whole(tree: Mapping[str, Any], key: str, where: str) -> int:
    value = tree.get(key)
    if type(value) is not int or not 0 <= value <= COUNT_MAX:
        raise DataError(f"{where}: {key} = {str(value)[:40]}; a whole number of at least 0 belongs there")
    return value


def _text(tree: Mapping[str, Any], key: str, where: str) -> str:
    value = tree.get(key)
    if not isinstance(value, str):
        raise DataError(f"{where}: {key} = {str(value)[:40]}; text belongs there")
    return value
