"""The weighted mean of several models of one architecture, as Hugging Face folders.

The last step of Branch-Train-Merge (Li et al., 2022, arXiv 2208.03306, section 3.3): runs that began from one model,
each on its own part of the data, never meet; at the end their weights are averaged, theta = sum_i w_i theta_i.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch

from swarmnode.atomic_file import write_fault
from swarmnode.errors import DataError, NotPermitted, UsageError

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
SMALL_NBYTES_MAX = 64 << 20  # guess: config, tokenizer and index of the largest models are a tenth of it
SAME = ("model_type", "hidden_size", "num_hidden_layers", "vocab_size", "tie_word_embeddings")

Note = Callable[[int, int], None]
"""Called with (files written, files in all)."""


@dataclass(frozen=True, slots=True)
class ModelFolder:
    """A model folder: its config.json, and the file of each tensor by name."""

    path: Path
    config: dict[str, object]
    files: dict[str, str]


def open_folder(path: Path) -> ModelFolder:
    """The model in `path`. Raises DataError that names what is missing or unreadable."""
    config = _json_of(path / "config.json")
    if (path / INDEX_FILE).exists():
        where = _json_of(path / INDEX_FILE).get("weight_map")
        if not isinstance(where, dict) or not all(
            isinstance(name, str) and isinstance(file, str) and Path(file).name == file for name, file in where.items()
        ):
            raise DataError(f"{path / INDEX_FILE}: its weight_map does not name files of this folder")
        return ModelFolder(path, config, where)
    with _opened(path / SINGLE_FILE) as file:
        return ModelFolder(path, config, dict.fromkeys(file.keys(), SINGLE_FILE))


def merge_models(out: Path, models: Sequence[Path], weights: Sequence[float], note: Note = lambda n, of: None) -> int:
    """Write the mean of `models` with `weights`, whose sum need not be 1, as the folder `out`; everything but weights
    is the first one's. Returns the number of parameters. One file of the first model is in memory at a time.

    Raises DataError for models that do not fit each other, UsageError for weights, NotPermitted if `out` is there.
    """
    if len(models) < 2 or len(weights) != len(models) or min(weights) < 0.0 or not 0.0 < sum(weights) < float("inf"):
        raise UsageError(
            f"{len(models)} models and weights {list(weights)}: give two models or more, a weight for each"
        )
    if out.exists():
        raise NotPermitted(f"{out} exists; name another folder")
    opened = [open_folder(path) for path in models]
    for other in opened[1:]:
        _check_alike(opened[0], other)
    first, shares = opened[0], [weight / sum(weights) for weight in weights]
    partial = out.with_name(f".{out.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        partial.mkdir(parents=True)
        names = sorted(set(first.files.values()))
        parameters = 0
        for index, file in enumerate(names):
            parameters += _merge_file(partial / file, file, opened, shares)
            note(index + 1, len(names))
        for path in sorted(first.path.iterdir()):
            if path.is_file() and not path.is_symlink() and path.suffix not in (".safetensors", ".bin", ".pt", ".pth"):
                shutil.copyfile(path, partial / path.name)
        os.replace(partial, out)
    except OSError as error:
        raise write_fault(out, error) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return parameters


def _merge_file(path: Path, file: str, models: Sequence[ModelFolder], shares: Sequence[float]) -> int:
    """Write the tensors of one file of the first model."""
    first, merged = models[0], dict[str, torch.Tensor]()
    for name in [name for name, where in first.files.items() if where == file]:
        mean, dtype = torch.empty(0), torch.float32
        for index, (model, share) in enumerate(zip(models, shares, strict=True)):
            with _opened(model.path / model.files[name]) as opened:
                try:
                    tensor = opened.get_tensor(name)
                except safetensors.SafetensorError as error:
                    raise DataError(f"{model.path / model.files[name]}: no tensor {name}") from error
            if index == 0:
                mean, dtype = torch.zeros(tensor.shape), tensor.dtype
            if tensor.shape != mean.shape or not tensor.is_floating_point():
                what = f"{tensor.dtype} {list(tensor.shape)}"
                raise DataError(f"{model.path}: {name} is {what}; {first.path} has {dtype} {list(mean.shape)}")
            mean.add_(tensor.float(), alpha=share)
        merged[name] = mean.to(dtype)
    safetensors.torch.save_file(merged, path, {"format": "pt"})
    return sum(tensor.numel() for tensor in merged.values())


def _check_alike(one: ModelFolder, other: ModelFolder) -> None:
    """Raises DataError unless both have the same architecture and tensors."""
    for key in SAME:
        if one.config.get(key) != other.config.get(key):
            raise DataError(
                f"{other.path} has {key} {other.config.get(key)}, {one.path} {one.config.get(key)}: only models that "
                "began as one can be merged"
            )
    if missing := sorted(one.files.keys() ^ other.files.keys()):
        raise DataError(f"{one.path} and {other.path} differ in {len(missing)} tensors, the first {missing[0]}")


def _opened(path: Path) -> contextlib.AbstractContextManager[Any]:
    try:
        return safetensors.safe_open(path, framework="pt", device="cpu")
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror or error})") from error
    except safetensors.SafetensorError as error:
        raise DataError(f"{path}: not a safetensors file ({error})") from error


def _json_of(path: Path) -> dict[str, object]:
    try:
        with path.open("rb") as file:
            data = file.read(SMALL_NBYTES_MAX + 1)
        if len(data) > SMALL_NBYTES_MAX:
            raise DataError(f"{path}: more than {SMALL_NBYTES_MAX} bytes")
        fields = json.loads(data)
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror or error})") from error
    except ValueError as error:
        raise DataError(f"{path}: not JSON ({error})") from error
    if not isinstance(fields, dict):
        raise DataError(f"{path}: not a JSON object")
    return fields
