"""The format of checkpoints, the order in which replicas save them, and the ones kept. Pure: no waiting, no tensors.

    RUN/round-000000012/theta-00000.stage-0.k3VxA9Qp.safetensors    parameters by the whole model's names
                        stage-0.json                                written when the stage's files are safe
                        checkpoint.json                             written last, when every stage's is there

A folder with checkpoint.json is a checkpoint: the file names every other file with its size, hash and tensors.
Parameters have the names of the whole model, so that stages cut elsewhere load them as well (`sources`).
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_args, get_origin, get_type_hints

from swarmnode.base.errors import DataError
from swarmnode.base.ids import PeerId, RunId, digest64, short
from swarmnode.base.large_buffer import IN_MEMORY_NBYTES
from swarmnode.keep.recovery import tensorfile
from swarmnode.keep.recovery.tensorfile import Shape
from swarmnode.model.section import SECTIONS
from swarmnode.net.membership.state_line import UNBROKEN, StateLine
from swarmnode.run.manifest import Manifest
from swarmnode.run.manifest.spec import LAYERS_MAX

FORMAT = 1
ROOT = "checkpoint.json"
SHARD_NBYTES = IN_MEMORY_NBYTES  # a shard is held in memory
RUN_CHARACTERS = 16
FINAL = "-final"
COUNT_MAX = 1 << 53
MEAN = "mean"
"""The section of a saved stage with its running mean (model/running_mean.py), laid out as theta."""


ModelValue = int | float | bool | str | tuple[int, ...]
"""A field of the manifest's model."""
WORD_MAX = 64  # characters of a word in a ModelSpec


@dataclass(frozen=True, slots=True)
class ShardFile:
    """A safetensors file with tensors of one section, in file order. `name` is relative to the folder."""

    name: str
    section: str
    nbytes: int
    sha256: str
    tensors: dict[str, Shape]


@dataclass(frozen=True, slots=True)
class CopyAgreement:
    """Other replicas' words on a copy that an archive took: the number that agreed, those whose copies were far from
    it, and the reason for taking it."""

    agree: int = 0
    liars: tuple[str, ...] = ()
    reason: str = ""


NO_AGREEMENT = CopyAgreement()


@dataclass(frozen=True, slots=True)
class StagePart:
    """The files of a stage as saved by one replica. `blocks` are the finished ones (data/blocks.py), known to feeders
    only. `left`: saved as its node left, not under way. `averaged`: samples of the run that its running mean spans."""

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
    line: StateLine = UNBROKEN
    run_id: str = ""
    left: bool = True
    averaged: int = 0
    agreement: CopyAgreement = NO_AGREEMENT


@dataclass(frozen=True, slots=True)
class Origin:
    """The run that a checkpoint is of, and the parts of its manifest that must agree with the run that loads it.

    `manifest` is the signed one, base64, "" where there is none. `subspace` names the one the weights were kept in, or
    is "".
    """

    run_id: str
    run_name: str
    stages: int
    model: dict[str, ModelValue]
    tokenizer: str
    block_samples: int
    manifest: str = ""
    subspace: str = ""

    @staticmethod
    def of(manifest: Manifest, run_id: RunId, signed: str = "") -> Origin:
        model = dataclasses.asdict(manifest.model)
        stages = manifest.pipeline.stages
        data = manifest.data
        kept = subspace_of(manifest)
        return Origin(run_id, manifest.name, stages, model, data.tokenizer, data.block_samples, signed, kept)


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """All stages of a run at one round. `samples` counts those of the whole run, `progress` those of each feeder."""

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
    """The name of a checkpoint's folder. Text order is the order of rounds; a final one comes after its round."""
    return f"round-{round_index:09d}{FINAL if final else ''}"


def place(run_id: str, label: str) -> str:
    return f"{run_id[:RUN_CHARACTERS]}/{label}"


def part_name(stage: int) -> str:
    return f"stage-{stage}.json"


# ---- order of savers


def due(done: int, saved: int, every: int) -> int | None:
    """The round whose checkpoint is due, None without one: the newest multiple of `every` beyond `saved`.

    The replica finished round `done`, and last saved the checkpoint of round `saved` or left it to others. Missed
    checkpoints are not made up for.
    """
    newest = done // every * every
    return newest if newest > saved else None


def order(run_id: RunId, stage: int, label: str, able: Collection[PeerId]) -> list[PeerId]:
    """Replicas of `stage` in the order in which they save `label`: each saves when the one before it did not.

    Every node computes the same order. The order differs by checkpoint, so that the load is spread over the replicas.
    """
    return sorted(able, key=lambda peer: (digest64(run_id, "save", stage, label, peer), peer))


def turn(
    order: Sequence[PeerId], me: PeerId, alive: Collection[PeerId], waited_s: float, patience_s: float
) -> tuple[bool, str]:
    """Whether `me` saves now, `waited_s` after the boundary, and why. Each live replica before it has `patience_s`."""
    before = [peer for peer in order[: order.index(me)] if peer in alive]
    if not before:
        return True, "first of those who can"
    if waited_s >= patience_s * len(before):
        return True, f"{short(before[0])} has not saved it within {waited_s:.0f} s"
    return False, f"{short(before[0])} saves it"


def expired(complete: Collection[str], present: Collection[str], keep: int) -> list[str]:
    """Labels to delete: complete ones but the newest `keep`, and incomplete ones older than the newest complete one."""
    if not complete:
        return []
    kept = set(sorted(complete)[-keep:])
    return sorted(label for label in present if label not in kept and label < max(complete))


# ---- files


@dataclass(frozen=True, slots=True)
class ShardSpan:
    """A file to write: bytes [start, end) of `section`, which hold `tensors`."""

    name: str
    section: str
    start: int
    end: int
    tensors: dict[str, Shape]


def cuts(
    stage: int, peer: PeerId, shapes: Mapping[str, Mapping[str, Shape]], shard_nbytes: int = SHARD_NBYTES
) -> list[ShardSpan]:
    """The files of at most `shard_nbytes` that a stage's sections become; a larger tensor has a file of its own.

    `shapes` are by section and parameter.
    """
    spans = []
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
            spans.append(ShardSpan(name, section, start, end, tensors))
            start = end
    return spans


def holding(files: Iterable[ShardFile], section: str) -> list[ShardFile]:
    """The `files` that are read as `section`: an archive holds the slow weights alone, which are read as the fast
    ones too."""
    files = list(files)
    alone = section == "theta" and all(file.section == "phi" for file in files)
    return [file for file in files if file.section == ("phi" if alone else section)]


def sources(checkpoint: Checkpoint, shapes: Mapping[str, Shape], section: str) -> list[ShardFile]:
    """The files that hold the parameters `shapes` of `section`, wherever the checkpoint's stages were cut.

    Raises DataError that names the first parameter that is missing or of another shape.
    """
    files: dict[str, ShardFile] = {}
    wanted = dict(shapes)
    for file in holding(checkpoint.files, section):
        for name in file.tensors.keys() & wanted.keys():
            if tuple(file.tensors[name]) != tuple(wanted[name]):
                held = list(file.tensors[name])
                raise DataError(
                    f"checkpoint {checkpoint.place}: {name} is {held}, this model's is {list(wanted[name])}: it is"
                    " a checkpoint of another model"
                )
            del wanted[name]
            files[file.name] = file
    if wanted:
        name = next(iter(wanted))
        raise DataError(f"checkpoint {checkpoint.place}: {name} is not in it: it is a checkpoint of another model")
    return [files[name] for name in sorted(files)]


def anew(checkpoint: Checkpoint, shapes: Mapping[str, Mapping[str, Shape]]) -> frozenset[str]:
    """Sections of `shapes` that begin at zero because `checkpoint` does not have them in this form.

    Either the outer method of its run had no momentum, or its optimizer had other second moments; then both moments
    begin at zero. A tied table of one stage has no parts.
    """
    stages = set()
    for section in sorted({"momentum", "exp_avg_sq"} & shapes.keys()):
        held: dict[str, Shape] = {}
        for file in checkpoint.files:
            if file.section == section:
                held |= file.tensors
        if any(held.get(name) != tuple(shape) for name, shape in shapes[section].items()):
            stages.add(section)
    stages |= {"exp_avg", "table"} & shapes.keys() - {file.section for file in checkpoint.files}
    return frozenset(stages | {"exp_avg"} if "exp_avg_sq" in stages else stages)


def subspace_of(manifest: Manifest) -> str:
    """A name of the frozen subspace that a run of `manifest` keeps the residual stream in; "" without one."""
    pipeline = manifest.pipeline
    return f"rank {pipeline.boundary_rank} of seed {manifest.seed}" if pipeline.boundary == "subspace" else ""


def check_fits(checkpoint: Checkpoint, manifest: Manifest, where: str) -> None:
    """Raise DataError unless a run of `manifest` can go on from `checkpoint`.

    Model and tokenizer must be the same, and the subspace, where this run keeps the stream in one. Stages, nodes, data
    and optimizer may differ.
    """
    theirs = checkpoint.origin.model
    ours = dataclasses.asdict(manifest.model)
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


def missing(files: Iterable[ShardFile], base: str, sizes: Mapping[str, int]) -> str | None:
    """The first fault of the `files` below `base` as the store lists them, None without one. `sizes` are by full
    name."""
    for file in files:
        nbytes = sizes.get(f"{base}{file.name}")
        if nbytes is None:
            return f"{file.name} is missing"
        if nbytes != file.nbytes:
            return f"{file.name} has {nbytes} bytes, not {file.nbytes}"
    return None


# ---- as text


def to_text(value: StagePart | Checkpoint) -> bytes:
    return (json.dumps({"format": FORMAT, **dataclasses.asdict(value)}, indent=1, sort_keys=True) + "\n").encode()


def part_of(data: bytes, where: str) -> StagePart:
    """Parse stage-N.json. Raises DataError that begins with `where`."""
    part: StagePart = _parsed(StagePart, _tree(data, where), where)
    _check_files(part.files, where)
    return part


def checkpoint_of(data: bytes, where: str) -> Checkpoint:
    """Parse checkpoint.json. Raises DataError that begins with `where` for other files and other versions."""
    checkpoint: Checkpoint = _parsed(Checkpoint, _tree(data, where), where)
    stages = [part.stage for part in checkpoint.parts]
    origin = checkpoint.origin
    if stages != list(range(origin.stages)) or origin.block_samples < 1:
        raise DataError(f"{where}: holds stages {[stage + 1 for stage in stages[:8]]}, not 1 to {origin.stages}")
    _check_files(checkpoint.files, where)
    return checkpoint


def _tree(data: bytes, where: str) -> dict[str, Any]:
    try:
        tree = json.loads(data)
    except (ValueError, RecursionError):
        raise DataError(f"{where}: not JSON: it was cut off or changed; use another checkpoint") from None
    if not isinstance(tree, dict) or tree.get("format") != FORMAT:
        version = tree.get("format") if isinstance(tree, dict) else None
        raise DataError(f"{where}: format {str(version)[:20]}; this version of swarmnode reads {FORMAT}")
    return tree


def _parsed(kind: Any, value: Any, where: str) -> Any:
    """A `value` of a JSON tree as `kind`: a dataclass, a number of at least 0, text, a field of a model, or tuples and
    dicts of these. Raises DataError that begins with `where`, the place of the value."""
    if dataclasses.is_dataclass(kind) and isinstance(value, dict):
        return _parsed_fields(kind, value, where)
    outer = get_origin(kind)
    inner = get_args(kind)
    if outer is tuple and isinstance(value, list):
        return tuple(_parsed(inner[0], one, where) for one in value)
    if outer is dict and isinstance(value, dict):
        return {key: _parsed(inner[1], one, f"{where}: {key[:WORD_MAX]}") for key, one in value.items()}
    if kind == ModelValue and isinstance(value, list) and _is_model_value(value):
        return tuple(value)  # as the manifest has lists
    if kind == ModelValue and _is_model_value(value):
        return value
    if kind is bool and type(value) is bool:
        return value
    if kind is int and type(value) is int and 0 <= value <= COUNT_MAX:
        return value
    if kind is float and type(value) in (int, float) and 0.0 <= value < 2.0**1023:
        return float(value)
    if kind is str and isinstance(value, str):
        return value
    due = DUE.get(kind, "something else")
    raise DataError(f"{where} = {str(value)[:40]}; {due} belongs there")


DUE = {bool: "true or false", int: "a whole number of at least 0", float: "a number of at least 0", str: "text"}


def _parsed_fields(kind: Any, value: dict[str, Any], where: str) -> Any:
    """A dataclass `kind` from the fields in `value`; fields that it does not know are left out."""
    for field in dataclasses.fields(kind):
        if field.name not in value and field.default is dataclasses.MISSING:
            raise DataError(f"{where}: {field.name} is missing: not a checkpoint of swarmnode")
    hints = get_type_hints(kind).items()
    return kind(**{name: _parsed(hint, value[name], f"{where}: {name}") for name, hint in hints if name in value})


def _is_model_value(value: Any) -> bool:
    if isinstance(value, list):
        return len(value) <= LAYERS_MAX and all(type(one) is int for one in value)
    return type(value) in (int, float, bool) or (isinstance(value, str) and len(value) <= WORD_MAX)


def _check_files(files: Iterable[ShardFile], where: str) -> None:
    for file in files:
        if (
            file.section not in (*SECTIONS, MEAN)
            or len(file.sha256) != 64
            or "/" in file.name
            or not file.name.strip(".")
        ):
            raise DataError(f"{where}: a file without name, section and sha256 as a checkpoint has them")
