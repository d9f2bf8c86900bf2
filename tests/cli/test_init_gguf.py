"""A run from a model in one GGUF file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from click.testing import CliRunner
from transformers import AutoModelForCausalLM

from swarmnode.cli.init import command
from swarmnode.errors import DataError, NotPermitted
from swarmnode.manifest import read_manifest
from swarmnode.model.base_weights import to_folder

WIDTH, FFN, LAYERS, HEADS, KV_HEADS = 64, 96, 2, 4, 2
KV_WIDTH = WIDTH // HEADS * KV_HEADS
WORDS = [*(chr(33 + one) for one in range(60)), "!!"]
OUTSIDE = {"token_embd": (len(WORDS) + 1, WIDTH), "output": (len(WORDS) + 1, WIDTH), "output_norm": (WIDTH,)}
INSIDE = {
    "attn_norm": (WIDTH,),
    "ffn_norm": (WIDTH,),
    "attn_q": (WIDTH, WIDTH),
    "attn_k": (KV_WIDTH, WIDTH),
    "attn_v": (KV_WIDTH, WIDTH),
    "attn_output": (WIDTH, WIDTH),
    "ffn_gate": (FFN, WIDTH),
    "ffn_up": (FFN, WIDTH),
    "ffn_down": (WIDTH, FFN),
}
Q8 = gguf.GGMLQuantizationType.Q8_0


def write_gguf(path: Path) -> dict[str, Any]:
    """A tiny Llama with random weights, its matrices in 8 bits; returns them by GGUF's names, as they decode."""
    chance = np.random.default_rng(0)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(LAYERS)
    writer.add_context_length(64)
    writer.add_embedding_length(WIDTH)
    writer.add_feed_forward_length(FFN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(len(WORDS) + 1)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([*WORDS, "<|endoftext|>"])
    writer.add_token_types([1] * len(WORDS) + [3])
    writer.add_token_merges(["! !"])
    writer.add_bos_token_id(len(WORDS))
    writer.add_eos_token_id(len(WORDS))
    layers = {f"blk.{layer}.{name}": shape for layer in range(LAYERS) for name, shape in INSIDE.items()}
    kept = {}
    for name, shape in (OUTSIDE | layers).items():
        value = chance.normal(0.0, 0.1, shape).astype(np.float32)
        if len(shape) == 1:
            writer.add_tensor(f"{name}.weight", value)
        else:
            coded = gguf.quantize(value, Q8)
            writer.add_tensor(f"{name}.weight", coded, raw_dtype=Q8)
            kept[name] = gguf.dequantize(coded, Q8)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return kept


def test_a_run_begins_from_a_gguf_file(tmp_path: Path) -> None:
    written = write_gguf(tmp_path / "tiny.gguf")
    run = tmp_path / "run"
    done = CliRunner().invoke(command, [str(run), "--from", str(tmp_path / "tiny.gguf"), "--context", "32"])
    assert done.exit_code == 0, done.output
    model = read_manifest(run / "manifest.toml").model
    assert (model.layers, model.width, model.ffn, model.heads, model.kv_heads) == (LAYERS, WIDTH, FFN, HEADS, KV_HEADS)
    assert (run / "base" / "model.safetensors").samefile(run / "model" / "model.safetensors")
    theirs = AutoModelForCausalLM.from_pretrained(run / "base").state_dict()
    for ours, name in (("model.embed_tokens", "token_embd"), ("model.layers.1.mlp.down_proj", "blk.1.ffn_down")):
        expected = torch.from_numpy(written[name]).to(torch.bfloat16)
        assert torch.equal(theirs[f"{ours}.weight"].to(torch.bfloat16), expected)


@pytest.mark.parametrize(
    ("raw", "why"),
    [
        (b"once upon a time", "not a GGUF file"),
        (None, "No such file"),
        pytest.param(b"GGUF\x03\x00", "does not read this model", marks=pytest.mark.nightly),  # 6 s of transformers
    ],
)
def test_other_files_than_gguf_are_refused_in_a_line(tmp_path: Path, raw: bytes | None, why: str) -> None:
    if raw is not None:
        (tmp_path / "other.gguf").write_bytes(raw)
    with pytest.raises(DataError, match=why):
        to_folder(tmp_path / "other.gguf", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_an_existing_folder_is_left_alone(tmp_path: Path) -> None:
    write_gguf(tmp_path / "tiny.gguf")
    (tmp_path / "out").mkdir()
    with pytest.raises(NotPermitted, match="another run"):
        to_folder(tmp_path / "tiny.gguf", tmp_path / "out")
