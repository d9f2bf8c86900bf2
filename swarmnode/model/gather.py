"""Assemble whole models from saved copies of stages, with any division into stages."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from swarmnode.base.errors import DataError
from swarmnode.data.base_index import SMALL_NBYTES_MAX, object_of
from swarmnode.data.chunk_store import read_regular
from swarmnode.model.adapter import trained_shapes
from swarmnode.model.export import read_tensors
from swarmnode.model.frozen import BaseWeights, whole_weights
from swarmnode.model.huggingface import source_names
from swarmnode.model.split import parameter_shapes, split
from swarmnode.run.manifest import Manifest

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class StageCopy:
    """A replica's parameters of one stage (or of the whole model), float32 by name. `origin` is for messages,
    `weight` its weight in the mean of all."""

    peer: str
    tensors: dict[str, Tensor]
    origin: str
    weight: float = 1.0


@dataclass(frozen=True, slots=True)
class Gathered:
    """All copies found of one run. `round` and `samples` are the largest among them; `kind` is their source. Copies
    hold the parameters that the run trains; with `whole` all of the model's, with adapters merged. `run_folder`: where
    the run's base model may be. `made_unix_s` and `validation` (nats per token) are None where nobody noted them."""

    manifest: Manifest
    run_id: str
    round: int
    samples: int
    copies: tuple[StageCopy, ...]
    kind: str
    whole: bool = False
    run_folder: Path | None = None
    made_unix_s: float | None = None
    validation: float | None = None

    @property
    def replicas(self) -> int:
        """Number of copies of the stage with the most copies."""
        return max(Counter(_place(copy) for copy in self.copies).values(), default=0)


def copy_of(peer: str, tensors: Mapping[str, tuple[Shape, memoryview]], origin: str, weight: float = 1.0) -> StageCopy:
    """A copy of shape and little-endian float32 bytes by name, whose memory it shares."""
    made = {name: torch.frombuffer(data, dtype=torch.float32).view(shape) for name, (shape, data) in tensors.items()}
    return StageCopy(peer, made, origin, weight)


def of_export(folder: Path, manifest: Manifest, about: Mapping[str, object]) -> Gathered:
    """The copy in a folder written by `swarmnode export`."""
    path = folder / "model.safetensors"
    ours = {theirs: name for name, theirs in source_names(manifest.model).items()}
    tensors = {ours.get(name, name): tensor for name, tensor in read_tensors(path).items()}
    run_id = about.get("run_id", "")
    round_index = about.get("round", 0)
    samples = about.get("samples", 0)
    if not isinstance(run_id, str) or not isinstance(round_index, int) or not isinstance(samples, int):
        raise DataError(f"{folder}: swarmnode.json is not as export wrote it; export again")
    return checked(
        Gathered(manifest, run_id, round_index, samples, (StageCopy("merged", tensors, str(path)),), "export", True)
    )


def merged(gathered: Gathered) -> dict[str, Tensor]:
    """The weighted mean of all copies of each parameter, in the model's order. Needs memory for two models, for any
    number of copies."""
    weights: dict[str, float] = {}
    mean: dict[str, Tensor] = {}
    for copy in gathered.copies:
        for name, tensor in copy.tensors.items():
            weights[name] = weights.get(name, 0.0) + copy.weight
            into = mean.setdefault(name, torch.zeros_like(tensor, dtype=torch.float64))
            into.add_(tensor.double() - into, alpha=copy.weight / weights[name])
    return {name: mean[name].float() for name in _whole(gathered)}


def model_of(gathered: Gathered, tensors: Mapping[str, Tensor], base: BaseWeights | None = None) -> dict[str, Tensor]:
    """All parameters of the model of which `tensors` are the trained ones, such as their mean; see `whole_weights`."""
    return dict(tensors) if gathered.whole else whole_weights(gathered.manifest, tensors, base)


def chains(gathered: Gathered) -> list[tuple[str, dict[str, Tensor]]]:
    """(names of replicas, parameters) of whole models, as many as the stage with the most copies has: the i-th takes
    the i-th copy of each stage, cyclically if there are fewer."""
    chains = []
    by_stage: dict[str, list[StageCopy]] = {}
    for copy in gathered.copies:
        by_stage.setdefault(_place(copy), []).append(copy)
    for index in range(gathered.replicas):
        chosen = [copies[index % len(copies)] for copies in by_stage.values()]
        tensors = {name: tensor for copy in chosen for name, tensor in copy.tensors.items()}
        names = " ".join(copy.peer[-8:] for copy in chosen)
        chains.append((names, {name: tensors[name] for name in _whole(gathered)}))
    return chains


def spread(gathered: Gathered) -> float:
    """Root mean square distance of copies from their mean, over the root mean square of the mean."""
    mean = merged(gathered)
    counts = _counts(gathered.copies)
    apart = 0.0
    count = 0
    for copy in gathered.copies:
        for name, tensor in copy.tensors.items():
            if counts[name] > 1:
                apart += float((tensor - mean[name]).square().sum())
                count += tensor.numel()
    size = sum(tensor.numel() for tensor in mean.values())
    norm = sum(float(tensor.square().sum()) for tensor in mean.values()) / size
    return float((apart / count / norm) ** 0.5) if count and norm else 0.0


def _whole(gathered: Gathered) -> dict[str, Shape]:
    manifest = gathered.manifest
    whole = split(manifest.model, 1)[0]
    return parameter_shapes(manifest.model, whole) if gathered.whole else trained_shapes(manifest, whole)


def _place(copy: StageCopy) -> str:
    """A name of the copy's stage: its last parameter, because both ends hold a tied model's table."""
    return max(copy.tensors)


def _counts(copies: Sequence[StageCopy]) -> Counter[str]:
    return Counter(name for copy in copies for name in copy.tensors)


def checked(gathered: Gathered) -> Gathered:
    """`gathered`, if every parameter of its model is present, of the right shape and finite. Raises DataError."""
    shapes = _whole(gathered)
    for copy in gathered.copies:
        for name, tensor in copy.tensors.items():
            if shapes.get(name) != tuple(tensor.shape):
                raise DataError(
                    f"{copy.origin}: parameter {name} has shape {tuple(tensor.shape)} where the manifest asks for"
                    f" {shapes.get(name, 'none')}: is this the run's own manifest?"
                )
            if not torch.isfinite(tensor).all():
                raise DataError(f"{copy.origin}: parameter {name} is not finite: leave this file out")
    counts = _counts(gathered.copies)
    if absent := [name for name in shapes if not counts[name]]:
        raise DataError(
            f"no copy of {absent[0]} ({len(absent)} of {len(shapes)} parameters are missing): a model needs a replica"
            " of each of its stages"
        )
    return gathered


def read_about(folder: Path) -> dict[str, object]:
    """The description that `swarmnode export` wrote to `folder`; empty if there is none. Raises DataError."""
    path = folder / "swarmnode.json"
    if not path.exists():
        return {}
    if (raw := read_regular(path, SMALL_NBYTES_MAX)) is None:
        raise DataError(f"{path} cannot be read")
    return object_of(raw, str(path))
