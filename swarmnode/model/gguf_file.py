"""A model as one GGUF file for llama.cpp, in float32, for the families whose layers it computes as transformers does.

Names of tensors and keys are those of the library gguf. What llama.cpp would compute otherwise is refused.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from swarmnode.base.atomic_file import write_errors
from swarmnode.base.errors import UsageError
from swarmnode.data.tokens import json_object
from swarmnode.model.architecture import DECODER
from swarmnode.model.export_tokenizer import token_ids
from swarmnode.model.gguf_tokenizer import GgufTokenizer, read_tokenizer
from swarmnode.model.huggingface import family_of
from swarmnode.model.split import HEAD, TABLE
from swarmnode.run.manifest import Manifest, ModelSpec

if TYPE_CHECKING:
    import gguf

LIBRARY = "gguf"
UNROTATED_STEP = 4  # llama.cpp's smollm3: every fourth layer has no rotary positions


@dataclass(frozen=True, slots=True)
class GgufFamily:
    """llama.cpp's architecture of a `model_type` (src/models/). `permuted`: it pairs neighbouring elements of a head in
    rotary positions; transformers pairs the two halves. `free_heads`: the width of a head may be any. `biases`: which
    of qkv_bias and output_bias it has. `own_head`: it reads no token table in place of a head. `normalised`: how it
    shares a token among experts, None without experts."""

    architecture: str
    permuted: bool = False
    free_heads: bool = False
    biases: tuple[str, ...] = ()
    own_head: bool = False
    normalised: bool | None = None


GGUF_FAMILIES: dict[str, GgufFamily] = {
    "llama": GgufFamily("llama", permuted=True, free_heads=True, biases=("qkv_bias", "output_bias")),
    "mistral": GgufFamily("llama", permuted=True, free_heads=True),
    "mixtral": GgufFamily("llama", permuted=True, free_heads=True, normalised=True),
    "qwen2": GgufFamily("qwen2", biases=("qkv_bias",)),
    "qwen3": GgufFamily("qwen3", free_heads=True),
    "smollm3": GgufFamily("smollm3", permuted=True, free_heads=True),
    "olmo2": GgufFamily("olmo2", own_head=True),
    "olmoe": GgufFamily("olmoe", own_head=True, normalised=False),
    "qwen3_moe": GgufFamily("qwen3moe", free_heads=True, normalised=True),
    "qwen2_moe": GgufFamily("qwen2moe", biases=("qkv_bias",), own_head=True, normalised=False),
}


def check_gguf(manifest: Manifest) -> GgufFamily:
    """llama.cpp's family of the run's model. Raises UsageError, one line, for a model that it computes otherwise, and
    DataError as family_of."""
    model = manifest.model
    if model.architecture != DECODER:
        raise UsageError(f"--gguf: llama.cpp has no layers of model.architecture = {model.architecture}")
    kind = family_of(model)
    family = GGUF_FAMILIES[kind]
    slides = any(0 < model.window(layer) < model.context for layer in range(model.layers))
    unrotated = tuple(layer for layer in range(model.layers) if (layer + 1) % UNROTATED_STEP == 0)
    refused = {
        f"model.sliding_window = {model.sliding_window}: it reads all tokens": slides,
        f"model.head_width = {model.head_width}: its heads divide the width": (
            not family.free_heads and model.head_dim * model.heads != model.width
        ),
        "model.qkv_bias: it has none": model.qkv_bias and "qkv_bias" not in family.biases,
        "model.output_bias: it has none": model.output_bias and "output_bias" not in family.biases,
        "model.dense_layers: all its layers have experts": model.experts > 0 and bool(model.dense_layers),
        f"model.router_normalised = {str(model.router_normalised).lower()}: it shares tokens otherwise": (
            family.normalised is not None and family.normalised != model.router_normalised
        ),
        f"model.unrotated_layers = {list(model.unrotated_layers)}: it takes every fourth": (
            kind == "smollm3" and model.unrotated_layers != unrotated
        ),
        "model.kv_heads: it wants as many as heads": kind == "olmoe" and model.kv_heads != model.heads,
    }
    if why := next((words for words, holds in refused.items() if holds), None):
        raise UsageError(f"--gguf: llama.cpp's {family.architecture} is another model here: {why}")
    return family


def write_gguf(tensors: Mapping[str, Tensor], manifest: Manifest, path: Path, files: Mapping[str, bytes]) -> int:
    """Write the model of `tensors` (by the names of transformers' Llama) to `path`, whole or not at all. `files`: those
    of its export, with the tokenizer. Returns its bytes. Raises as `check_gguf` and `read_tokenizer`, and LocalFault
    where the disk fails."""
    import gguf

    family = check_gguf(manifest)
    tokenizer = read_tokenizer(files, manifest.model.vocabulary)
    part = path.with_name(f".{path.name}.part")
    with write_errors(path, sum(4 * tensor.numel() for tensor in tensors.values())):
        path.parent.mkdir(parents=True, exist_ok=True)
        writer = gguf.GGUFWriter(part, family.architecture)
        try:
            _write_settings(writer, manifest)
            _write_tokenizer(writer, tokenizer, json_object(files.get("tokenizer_config.json", b"")), files)
            for name, tensor in gguf_tensors(tensors, manifest.model, family).items():
                writer.add_tensor(name, tensor.detach().to("cpu", torch.float32).contiguous().numpy())
            writer.write_header_to_file()
            writer.write_kv_data_to_file()
            writer.write_tensors_to_file()
            writer.close()
            os.replace(part, path)
        finally:
            part.unlink(missing_ok=True)
    return path.stat().st_size


def gguf_tensors(tensors: Mapping[str, Tensor], model: ModelSpec, family: GgufFamily) -> dict[str, Tensor]:
    """The tensors by llama.cpp's names: heads in its order, the experts of a layer as one tensor [experts, out, in]."""
    import gguf

    kind = next(kind for kind, name in gguf.MODEL_ARCH_NAMES.items() if name == family.architecture)
    table = gguf.get_tensor_name_map(kind, model.layers)
    found = dict[str, Tensor]()
    experts = dict[str, list[Tensor]]()
    for name, tensor in tensors.items():
        if ".experts." in name:
            layer, _, rest = name.partition(".experts.")
            experts.setdefault(f"{layer}.experts.{rest.partition('.')[2]}", []).append(tensor)  # in order of number
            continue
        if family.permuted and ".self_attn.q_proj." in name:
            tensor = _permuted(tensor, model.heads)
        if family.permuted and ".self_attn.k_proj." in name:
            tensor = _permuted(tensor, model.kv_heads)
        found[_their_name(table, name)] = tensor
    for name, parts in experts.items():
        found[_their_name(table, name)] = torch.stack(parts)
    if family.own_head and model.tied:
        found[_their_name(table, HEAD)] = tensors[TABLE]
    if (factors := _frequency_factors(model)) is not None:
        found["rope_freqs.weight"] = factors
    return found


def _their_name(table: gguf.TensorNameMap, name: str) -> str:
    theirs = table.get_name(name, try_suffixes=(".weight", ".bias"))
    assert theirs is not None, f"{name}: the library gguf has no name for it"
    return str(theirs)


def _permuted(tensor: Tensor, heads: int) -> Tensor:
    """Rows of `tensor` [heads * width, ...], in each head the halves of transformers' rotary pairs side by side."""
    width = tensor.shape[0] // heads
    halves = tensor.reshape(heads, 2, width // 2, *tensor.shape[1:])
    return halves.swapaxes(1, 2).reshape(tensor.shape)


def _frequency_factors(model: ModelSpec) -> Tensor | None:
    """By how much Llama 3.1 slows each rotary frequency, [head width / 2]; None for other models."""
    if model.rope_scaling != "llama3":
        return None
    steps = torch.arange(0, model.head_dim, 2, dtype=torch.float64) / model.head_dim
    turns = model.rope_original_context / (2 * math.pi * model.rope_theta**steps)  # within the original context
    smooth = ((turns - model.rope_low) / (model.rope_high - model.rope_low)).clamp(0.0, 1.0)
    return (1.0 / ((1.0 - smooth) / model.rope_factor + smooth)).float()


def _write_settings(writer: gguf.GGUFWriter, manifest: Manifest) -> None:
    import gguf

    model = manifest.model
    writer.add_name(manifest.name)
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    writer.add_vocab_size(model.vocabulary)
    writer.add_block_count(model.layers)
    writer.add_context_length(model.context)
    writer.add_embedding_length(model.width)
    writer.add_feed_forward_length(model.expert_ffn if model.experts else model.ffn)
    writer.add_head_count(model.heads)
    writer.add_head_count_kv(model.kv_heads)
    writer.add_key_length(model.head_dim)
    writer.add_value_length(model.head_dim)
    writer.add_rope_dimension_count(model.head_dim)
    writer.add_rope_freq_base(model.rope_theta)
    writer.add_layer_norm_rms_eps(model.norm_eps)
    if model.experts:
        writer.add_expert_count(model.experts)
        writer.add_expert_used_count(model.experts_active)
        writer.add_expert_feed_forward_length(model.expert_ffn)
    if model.shared_expert_ffn:
        writer.add_expert_shared_feed_forward_length(model.shared_expert_ffn)
    if model.rope_scaling in ("linear", "yarn"):
        yarn = model.rope_scaling == "yarn"
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN if yarn else gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(model.rope_factor)
    if model.rope_scaling == "yarn":
        writer.add_rope_scaling_orig_ctx_len(model.rope_original_context)
        writer.add_rope_scaling_yarn_beta_fast(model.rope_high)
        writer.add_rope_scaling_yarn_beta_slow(model.rope_low)
        usual = 0.1 * math.log(model.rope_factor) + 1.0  # llama.cpp multiplies by it
        writer.add_rope_scaling_yarn_attn_factor((model.rope_attention_factor or usual) / usual)


def _write_tokenizer(
    writer: gguf.GGUFWriter, tokenizer: GgufTokenizer, config: Mapping[str, Any], files: Mapping[str, bytes]
) -> None:
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(tokenizer.pre)
    writer.add_token_list(list(tokenizer.tokens))
    writer.add_token_types(list(tokenizer.kinds))
    writer.add_token_merges(list(tokenizer.merges))
    add = {
        "bos_token_id": writer.add_bos_token_id,
        "eos_token_id": writer.add_eos_token_id,
        "pad_token_id": writer.add_pad_token_id,
    }
    for name, index in tokenizer.specials.items():
        add[name](index)
    # llama.cpp ends an answer at the tokenizer's end and at usual names of other tokens, and where it is told to.
    ends = token_ids(json_object(files.get("generation_config.json", b"")).get("eos_token_id"))
    others = [index for index in ends if index != tokenizer.specials.get("eos_token_id")]
    for index, end in zip(others, (writer.add_eot_token_id, writer.add_eom_token_id), strict=False):
        end(index)
    writer.add_add_bos_token(tokenizer.adds["bos"])
    writer.add_add_eos_token(tokenizer.adds["eos"])
    template = files.get("chat_template.jinja", b"").decode(errors="replace") or config.get("chat_template")
    if isinstance(template, str) and template:
        writer.add_chat_template(template)
