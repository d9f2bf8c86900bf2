"""Export a trained run as a Hugging Face model folder."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from swarmnode.base.atomic_file import atomic_write, write_errors
from swarmnode.base.errors import DataError, cause_of
from swarmnode.base.untrusted_text import markdown_text
from swarmnode.data.tokens import json_object
from swarmnode.model.adapter import has_adapters
from swarmnode.model.architecture import DECODER
from swarmnode.model.export_tokenizer import byte_tokenizer, end_of_text, special_ids, tokenizer_files
from swarmnode.model.frozen import ADAPTER_CONFIG, ADAPTER_FILE, peft_config, peft_tensors, published_base
from swarmnode.model.huggingface import config_of, source_names
from swarmnode.model.stage import StageReplica
from swarmnode.run.manifest import Manifest, template
from swarmnode.run.manifest.folder import MANIFEST_FILE

MODEL_CONFIGS = ("config.json", "generation_config.json")
ENDS = ("bos_token_id", "eos_token_id", "pad_token_id")
PADDING = "pad_token_id"
KEPT_SETTINGS = ("bos_token_id", "eos_token_id", "pad_token_id", "max_position_embeddings")


CARD = "README.md"
LICENCES = ("apache-2.0", "mit", "bsd-3-clause", "cc0-1.0", "cc-by-4.0", "cc-by-sa-4.0", "gpl-3.0", "openrail")
"""The Hub's names of usual licences (huggingface.co/docs/hub/repositories-licenses); it refuses a card with others."""
MEMBERS_SHOWN = 200  # guess: a page that one still scrolls


def model_card(manifest: Manifest, about: Mapping[str, Any], library: str = "transformers") -> str:
    """The card: what it is for, how it was trained, on what data, by whom. `about`: the facts in swarmnode.json, with
    `members` (name, hours of work, signed samples) where a coordinator kept them. `library` loads it."""
    run = manifest.about
    inner = manifest.inner
    gossip = manifest.gossip
    pipeline = manifest.pipeline
    licence = run.licence.lower()
    head = [f"library_name: {library}", "pipeline_tag: text-generation", "tags: [swarmnode, decentralized-training]"]
    if base := published_base(manifest)[0]:
        head.append(f"base_model: {base}")
    if licence:
        head.append(f"license: {licence if licence in LICENCES else 'other'}")
    samples = int(about.get("samples") or 0)
    model = manifest.model
    loss = about.get("validation")
    facts = {
        "run": f"`{about.get('run_id', '')}`",
        "samples, tokens": f"{samples:,}, {samples * model.context:,}",
        "rounds": about.get("round"),
        "held-out loss, nats a token": None if loss is None else f"{loss:.4f}",
        "model": f"{model.layers} layers of width {model.width}, contexts of {model.context} tokens",
        "pipeline": f"{pipeline.stages} stages, {pipeline.boundary} between them",
        "replicas meet by": f"{gossip.method}, {gossip.codec}, every {gossip.round_samples:,} samples",
        "inner steps": f"{inner.optimizer}, rate {inner.learning_rate:g}, batches of {inner.inner_batch} samples",
    }
    data = markdown_text(run.data) or f"source `{manifest.data.source}`; manifest.toml beside this names all of it."
    return "\n".join(
        [
            "---\n" + "\n".join(head) + "\n---",
            f"\n# {manifest.name}\n",
            markdown_text(run.why) or "A language model.",
            f"\nRun by {markdown_text(run.by) or 'somebody unnamed'}.",
            f"Licence: {markdown_text(run.licence) or 'none named'}.",
            "\n## How it was trained\n",
            "By a swarm of machines over the internet, with swarmnode: each serves a stage of the model, and replicas",
            "of a stage average their weights now and then. manifest.toml has every setting.\n",
            "| | |\n| --- | --- |",
            *(f"| {key} | {value} |" for key, value in facts.items() if value is not None),
            "\n## Data\n",
            data,
            *_members(about.get("members") or []),
            "",
        ]
    )


def _members(members: list[Mapping[str, Any]]) -> list[str]:
    """The members with their hours, and what is known of the energy; nothing where no coordinator kept them."""
    if not members:
        return []
    hours = sum(float(one["hours"]) for one in members)
    named = [(markdown_text(str(one["name"])) or "somebody", one["hours"]) for one in members[:MEMBERS_SHOWN]]
    more = [f"\nAnd {len(members) - MEMBERS_SHOWN} more."] if len(members) > MEMBERS_SHOWN else []
    return [
        "\n## Members\n",
        "| name | hours of work |\n| --- | --- |",
        *(f"| {name} | {hours:.1f} |" for name, hours in named),
        *more,
        "\n## Energy\n",
        f"{len(members)} machines computed for {hours:,.1f} hours in all, as each tells. Nobody measured their watts.",
    ]


def stage_state_dict(replica: StageReplica, flat: Tensor | None = None) -> dict[str, Tensor]:
    """The stage's parameters by Hugging Face name, float32 on the CPU, copied from `flat` [N] in theta's layout (the
    slow weights, for example), or from theta."""
    views = replica.named(replica.theta if flat is None else flat)
    return {name: view.detach().to("cpu", torch.float32, copy=True) for name, view in views.items()}


def read_tensors(path: Path) -> dict[str, Tensor]:
    """All tensors of a safetensors file. Raises DataError that names the file if it is missing or invalid."""
    try:
        return safetensors.torch.load_file(path)
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({cause_of(error)})") from error
    except safetensors.SafetensorError as error:
        raise DataError(f"{path}: not a safetensors file ({error}); export again") from error


def write_model(
    tensors: Mapping[str, Tensor],
    manifest: Manifest,
    out_dir: Path,
    tokenizer: Path | None = None,
    about: Mapping[str, object] | None = None,
    carried: Mapping[str, bytes] | None = None,
) -> int:
    """Write `out_dir` as a Hugging Face model folder: config.json, generation_config.json, model.safetensors and the
    tokenizer (a copy of the file `tokenizer`, or the run's byte tokenizer). It also gets manifest.toml, a model card,
    and `about` in swarmnode.json, for `eval` and `generate`; `carried` are the small files of the base model, whose
    chat template, special tokens and longest context the export keeps. Returns the number of parameters.

    Raises DataError if `tokenizer` cannot be read or transformers has no such model, LocalFault if a write fails.
    """
    if manifest.model.architecture == DECODER:
        config_of(manifest.model)  # before anything is written
    theirs = source_names(manifest.model)
    named = {theirs[name]: tensor for name, tensor in tensors.items()}
    return _write_folder(
        out_dir, small_files(manifest, tokenizer, about or {}, carried or {}), "model.safetensors", named
    )


def write_adapter(
    adapters: Mapping[str, Tensor],
    manifest: Manifest,
    out_dir: Path,
    tokenizer: Path | None = None,
    about: Mapping[str, object] | None = None,
    carried: Mapping[str, bytes] | None = None,
) -> int:
    """Write `out_dir` as an adapter folder that peft loads beside the base model: adapter_config.json,
    adapter_model.safetensors, and what `write_model` writes beside the weights. Returns the number of parameters,
    and raises as `write_model`."""
    files = small_files(manifest, tokenizer, about or {}, carried or {})
    files |= {ADAPTER_CONFIG: peft_config(manifest), CARD: model_card(manifest, about or {}, "peft").encode()}
    for name in MODEL_CONFIGS:
        files.pop(name, None)  # the base model has them
    return _write_folder(out_dir, files, ADAPTER_FILE, peft_tensors(adapters))


def sharded_model_files(
    manifest: Manifest,
    tokenizer: Path | None,
    where: Mapping[str, str],
    nbytes: int,
    about: Mapping[str, object],
    carried: Mapping[str, bytes] | None = None,
) -> dict[str, bytes]:
    """The files that turn a folder of safetensors files into a Hugging Face model folder: as `write_model`, plus the
    index with the file of each parameter (`where`) and their `nbytes`. Of adapters, which are no model by themselves,
    only what `export` needs. Raises DataError if `tokenizer` cannot be read."""
    if has_adapters(manifest):
        files = small_files(manifest, tokenizer, about, carried or {})
        return {name: data for name, data in files.items() if name not in MODEL_CONFIGS}
    index = {"metadata": {"total_size": nbytes}, "weight_map": dict(sorted(where.items()))}
    small = small_files(manifest, tokenizer, about, carried or {})
    return {**small, "model.safetensors.index.json": _json_bytes(index)}


def small_files(
    manifest: Manifest, tokenizer: Path | None, about: Mapping[str, object], carried: Mapping[str, bytes]
) -> dict[str, bytes]:
    """All files of a model folder except the weights."""
    files = {
        "generation_config.json": _json_bytes({"do_sample": True}),
        **{name: raw for name, raw in carried.items() if name != "config.json"},
        MANIFEST_FILE: template(manifest).encode(),
        "swarmnode.json": _json_bytes(about),
        CARD: model_card(manifest, about).encode(),
    }
    if (raw := _tokenizer_json(manifest, tokenizer)) is not None:
        files |= tokenizer_files(raw, {**carried, **files}, manifest)
    settings = json_object(files["generation_config.json"])
    ends = {} if (end := end_of_text(manifest)) is None else {"eos_token_id": end}
    for key, index in {**special_ids(files), **ends}.items():
        if settings.get(key) is None:
            settings[key] = index
    files["generation_config.json"] = _json_bytes(settings)
    # Padding is no property of the model: transformers trains no row of the table that config.json names for it.
    kept = {key: settings[key] for key in ENDS if settings.get(key) is not None and key != PADDING}
    with contextlib.suppress(DataError):  # transformers has no such model
        files["config.json"] = _json_bytes(config_of(manifest.model) | kept | _kept_settings(carried))
    return files


def _kept_settings(carried: Mapping[str, bytes]) -> dict[str, object]:
    """The settings in the base model's config.json that hold for any training of it."""
    tree = json_object(carried.get("config.json", b"{}"))
    return {key: tree[key] for key in KEPT_SETTINGS if key in tree}


def _tokenizer_json(manifest: Manifest, tokenizer: Path | None) -> bytes | None:
    """The run's tokenizer.json; None where its file is not here."""
    if tokenizer is None:
        return _json_bytes(byte_tokenizer()) if manifest.data.tokenizer == "bytes" else None
    try:
        return tokenizer.read_bytes()
    except OSError as error:
        raise DataError(f"{tokenizer}: cannot be read as a tokenizer ({error.strerror or error})") from error


def _json_bytes(value: Mapping[str, object]) -> bytes:
    return (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode()


def _write_folder(out_dir: Path, files: Mapping[str, bytes], weights: str, tensors: Mapping[str, Tensor]) -> int:
    """Write `files` and, last, the `tensors` to `out_dir`; return the number of their elements."""
    with write_errors(out_dir):
        out_dir.mkdir(parents=True, exist_ok=True)
    for name, data in files.items():
        _write(out_dir / name, data)
    _write(out_dir / weights, safetensors.torch.save(dict(tensors), {"format": "pt"}))
    return sum(tensor.numel() for tensor in tensors.values())


def _write(path: Path, data: bytes) -> None:
    """`atomic_write` that raises LocalFault with path and reason."""
    with write_errors(path, len(data)):
        atomic_write(path, data)
