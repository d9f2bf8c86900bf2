"""Whole models from what is kept of a run: copies of stages, however cut, become the parameters of one model."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from swarmnode.errors import DataError
from swarmnode.manifest import Manifest, ModelSpec
from swarmnode.model.average import weight_of
from swarmnode.model.export import load_stage, read_tensors
from swarmnode.model.split import parameter_shapes, split

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Copy:
    """One replica's parameters of one stage (or of the whole model), float32 by name. `origin` is for messages,
    `weight` what it counts in the mean of all."""

    peer: str
    tensors: dict[str, Tensor]
    origin: str
    weight: float = 1.0


@dataclass(frozen=True, slots=True)
class Gathered:
    """All copies found of one run. `round` and `samples` are the largest among them; `kind` says where from."""

    manifest: Manifest
    run_id: str
    round: int
    samples: int
    copies: tuple[Copy, ...]
    kind: str

    @property
    def replicas(self) -> int:
        """Copies of the parameter that has most."""
        return max(_counts(self.copies).values(), default=0)


def of_stage_files(paths: Sequence[Path], manifest: Manifest, run_id: str = "", *, last: bool = False) -> Gathered:
    """Of the files nodes saved when they left: of each replica its running mean where it has one (model/average.py), or
    with `last` its last weights. Raises DataError for one that is of another run or no such file."""
    copies, rounds, samples = [], [0], [0]
    for path in paths:
        label, tensors, average = load_stage(path)
        run_id = run_id or label.run_id
        if label.run_id != run_id:
            raise DataError(f"{path}: belongs to run {label.run_id[:12]}, not to run {run_id[:12]}; leave it out")
        share = manifest.inner.average_share
        if last or not share:
            copies.append(Copy(label.peer, tensors, str(path)))
        else:
            weight = weight_of(share, label.averaged, label.samples)
            copies.append(Copy(label.peer, average or tensors, str(path), weight))
        rounds.append(label.round)
        samples.append(label.samples)
    return _checked(Gathered(manifest, run_id, max(rounds), max(samples), tuple(copies), "saved stages"))


def of_buffers(
    buffers: Sequence[tuple[str, Mapping[str, tuple[Shape, memoryview]]]], gathered: Gathered, origin: str
) -> Gathered:
    """`gathered` with a copy for each (peer, shape and little-endian float32 bytes by name), whose memory it shares."""
    copies = []
    for peer, tensors in buffers:
        made = {
            name: torch.frombuffer(data, dtype=torch.float32).view(shape) for name, (shape, data) in tensors.items()
        }
        copies.append(Copy(peer, made, origin))
    return _checked(
        Gathered(gathered.manifest, gathered.run_id, gathered.round, gathered.samples, tuple(copies), gathered.kind)
    )


def of_export(folder: Path, manifest: Manifest, about: Mapping[str, object]) -> Gathered:
    """Of a folder that `swarmnode export` wrote."""
    path = folder / "model.safetensors"
    tensors = read_tensors(path)
    run_id, round_index, samples = about.get("run_id", ""), about.get("round", 0), about.get("samples", 0)
    if not isinstance(run_id, str) or not isinstance(round_index, int) or not isinstance(samples, int):
        raise DataError(f"{folder}: swarmnode.json is not as export wrote it; export again")
    return _checked(Gathered(manifest, run_id, round_index, samples, (Copy("merged", tensors, str(path)),), "export"))


def merged(gathered: Gathered) -> dict[str, Tensor]:
    """The mean of all copies of each parameter, by their weights, in the model's order. Two models in memory, however
    many copies."""
    weights: dict[str, float] = {}
    mean: dict[str, Tensor] = {}
    for copy in gathered.copies:
        for name, tensor in copy.tensors.items():
            weights[name] = weights.get(name, 0.0) + copy.weight
            into = mean.setdefault(name, torch.zeros_like(tensor, dtype=torch.float64))
            into.add_(tensor.double() - into, alpha=copy.weight / weights[name])
    return {name: mean[name].float() for name in _whole(gathered.manifest.model)}


def chains(gathered: Gathered) -> list[tuple[str, dict[str, Tensor]]]:
    """(names of replicas, parameters) of whole models, as many as the parameter with most copies has: the i-th takes
    the i-th copy of each stage, beginning again where there are fewer."""
    found = []
    by_stage: dict[str, list[Copy]] = {}
    for copy in gathered.copies:
        by_stage.setdefault(next(iter(sorted(copy.tensors))), []).append(copy)
    for index in range(gathered.replicas):
        chosen = [copies[index % len(copies)] for copies in by_stage.values()]
        tensors = {name: tensor for copy in chosen for name, tensor in copy.tensors.items()}
        names = " ".join(copy.peer[-8:] for copy in chosen)
        found.append((names, {name: tensors[name] for name in _whole(gathered.manifest.model)}))
    return found


def flat(copy: Copy) -> Tensor:
    """Its parameters in one new tensor [P], float32."""
    return torch.cat([tensor.reshape(-1).float() for tensor in copy.tensors.values()])


def with_flat(copy: Copy, values: Tensor) -> Copy:
    """`copy` with the parameters in `values` [P], whose memory it shares."""
    pieces = torch.split(values, [tensor.numel() for tensor in copy.tensors.values()])
    shaped = (piece.view(tensor.shape) for piece, tensor in zip(pieces, copy.tensors.values(), strict=True))
    return replace(copy, tensors=dict(zip(copy.tensors, shaped, strict=True)))


def spread(gathered: Gathered) -> float:
    """Root mean square distance of copies from their mean, over the root mean square of the mean."""
    mean = merged(gathered)
    counts = _counts(gathered.copies)
    apart, count = 0.0, 0
    for copy in gathered.copies:
        for name, tensor in copy.tensors.items():
            if counts[name] > 1:
                apart += float((tensor - mean[name]).square().sum())
                count += tensor.numel()
    size = sum(tensor.numel() for tensor in mean.values())
    norm = sum(float(tensor.square().sum()) for tensor in mean.values()) / size
    return float((apart / count / norm) ** 0.5) if count and norm else 0.0


def _whole(model: ModelSpec) -> dict[str, Shape]:
    return parameter_shapes(model, split(model, 1)[0])


def _counts(copies: Sequence[Copy]) -> Counter[str]:
    return Counter(name for copy in copies for name in copy.tensors)


def _checked(gathered: Gathered) -> Gathered:
    """`gathered`, if every parameter of its model is there, shaped and finite. Raises DataError."""
    shapes = _whole(gathered.manifest.model)
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
    """What `swarmnode export` said of the model in `folder`; empty when it said nothing."""
    try:
        found = json.loads((folder / "swarmnode.json").read_text())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise DataError(f"{folder}/swarmnode.json cannot be read: {error}") from None
    return found if isinstance(found, dict) else {}
