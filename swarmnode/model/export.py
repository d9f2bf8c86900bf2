"""A trained run as files: one safetensors file a stage, and all stages together as a Hugging Face model folder."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from swarmnode.errors import DataError, LocalFault
from swarmnode.manifest import MANIFEST_FILE, Manifest, ModelSpec, template
from swarmnode.model.stage import StageReplica

AVERAGE = "average."  # begins the names of the running mean's parameters in a stage's file


@dataclass(frozen=True, slots=True)
class StageLabel:
    """Where a stage's parameters come from: the run, the stage, how far it had come, and whose copy it is. `averaged`
    are the samples that its running mean spans; 0 where it has none."""

    run_id: str
    stage: int
    round: int
    samples: int
    peer: str
    averaged: int = 0


def stage_state_dict(replica: StageReplica, flat: Tensor | None = None) -> dict[str, Tensor]:
    """The stage's parameters by Hugging Face name, float32 on the CPU, copied: of `flat` [N] laid out as theta (the
    slow weights, say), or of theta itself."""
    views = replica.named(replica.theta if flat is None else flat)
    return {name: view.detach().to("cpu", torch.float32, copy=True) for name, view in views.items()}


def save_stage(
    path: Path, tensors: Mapping[str, Tensor], label: StageLabel, average: Mapping[str, Tensor] | None = None
) -> None:
    """Write `tensors`, the running mean of them if there is one, and their label to `path` (safetensors), whole or not
    at all. Raises LocalFault when the disk does not take it."""
    metadata = {key: str(value) for key, value in asdict(label).items()}
    mean = {AVERAGE + name: tensor for name, tensor in (average or {}).items()}
    _write(path, safetensors.torch.save({**tensors, **mean}, metadata))


def load_stage(path: Path) -> tuple[StageLabel, dict[str, Tensor], dict[str, Tensor]]:
    """What `save_stage` wrote: label, parameters, their running mean, empty where there is none. Raises DataError that
    names the file when it is not there or not such a file."""
    try:
        with safetensors.safe_open(path, framework="pt", device="cpu") as opened:
            metadata = opened.metadata() or {}
            tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 - not a mapping
        label = StageLabel(
            run_id=metadata["run_id"],
            stage=int(metadata["stage"]),
            round=int(metadata["round"]),
            samples=int(metadata["samples"]),
            peer=metadata["peer"],
            averaged=int(metadata["averaged"]),
        )
    except OSError as error:
        raise DataError(f"{path}: cannot be read as a stage file ({error.strerror or error})") from error
    except (safetensors.SafetensorError, KeyError, ValueError) as error:
        raise DataError(f"{path}: not a stage file of swarmnode ({error}); export needs what a node saved") from error
    last = {name: tensor for name, tensor in tensors.items() if not name.startswith(AVERAGE)}
    mean = {name.removeprefix(AVERAGE): tensor for name, tensor in tensors.items() if name.startswith(AVERAGE)}
    return label, last, mean


def read_tensors(path: Path) -> dict[str, Tensor]:
    """All tensors of a safetensors file. Raises DataError that names it when it is not there or not such a file."""
    try:
        return safetensors.torch.load_file(path)
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror or error})") from error
    except safetensors.SafetensorError as error:
        raise DataError(f"{path}: not a safetensors file ({error}); export again") from error


def write_model(
    tensors: Mapping[str, Tensor],
    manifest: Manifest,
    out_dir: Path,
    tokenizer: Path | None = None,
    about: Mapping[str, object] | None = None,
) -> int:
    """Write `out_dir` as a Hugging Face model folder: config.json, generation_config.json, model.safetensors and the
    tokenizer: a copy of the file `tokenizer`, or of the run's byte tokenizer made here; beside them manifest.toml and
    `about` in swarmnode.json, for `eval` and `generate`. Returns the number of parameters.

    Raises DataError when `tokenizer` cannot be read, LocalFault when the disk does not take the result.
    """
    tokens = _tokenizer_json(manifest, tokenizer)
    try:
        out_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise LocalFault(f"{out_dir}: {error.strerror or error}") from error
    if tokens is not None:
        _write(out_dir / "tokenizer.json", tokens)
        limits = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": manifest.model.context}
        _write_json(out_dir / "tokenizer_config.json", limits)
    _write_json(out_dir / "config.json", huggingface_config(manifest.model))
    _write_json(out_dir / "generation_config.json", {"do_sample": True})
    _write(out_dir / MANIFEST_FILE, template(manifest).encode())
    _write_json(out_dir / "swarmnode.json", dict(about or {}))
    _write(out_dir / "model.safetensors", safetensors.torch.save(dict(tensors), {"format": "pt"}))
    return sum(tensor.numel() for tensor in tensors.values())


def huggingface_config(model: ModelSpec) -> dict[str, object]:
    """config.json of a LlamaForCausalLM, for transformers 4 (`rope_theta`, `torch_dtype`) and 5 alike."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": model.vocabulary,
        "hidden_size": model.width,
        "intermediate_size": model.ffn,
        "num_hidden_layers": model.layers,
        "num_attention_heads": model.heads,
        "num_key_value_heads": model.kv_heads,
        "head_dim": model.width // model.heads,
        "max_position_embeddings": model.context,
        "rms_norm_eps": model.norm_eps,
        "rope_theta": model.rope_theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": model.rope_theta},
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": None,
        "torch_dtype": "float32",
    }


def byte_tokenizer() -> dict[str, object]:
    """tokenizer.json in which each byte is one token and its id the byte's value: byte-level BPE without merges."""
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    # Byte-level BPE shows a byte as itself where it prints, and the others, in order, from U+0100 on (GPT-2).
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = (byte for byte in range(256) if byte not in printable)
    shown = {byte: chr(byte) for byte in printable} | {byte: chr(256 + n) for n, byte in enumerate(others)}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": level,
        "post_processor": None,
        "decoder": level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {shown[byte]: byte for byte in range(256)},
            "merges": [],
        },
    }


def _tokenizer_json(manifest: Manifest, tokenizer: Path | None) -> bytes | None:
    if tokenizer is not None:
        try:
            return tokenizer.read_bytes()
        except OSError as error:
            raise DataError(f"{tokenizer}: cannot be read as a tokenizer ({error.strerror or error})") from error
    return _json_bytes(byte_tokenizer()) if manifest.data.tokenizer == "bytes" else None


def _json_bytes(value: Mapping[str, object]) -> bytes:
    return (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode()


def _write_json(path: Path, value: Mapping[str, object]) -> None:
    _write(path, _json_bytes(value))


def _write(path: Path, data: bytes) -> None:
    """Write, flush, fsync, rename: readers see the old file or the new one. Raises LocalFault with path and reason."""
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        with open(partial, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            partial.unlink()
        raise LocalFault(f"{path}: {error.strerror or error}") from error
