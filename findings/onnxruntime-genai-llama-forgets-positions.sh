#!/usr/bin/env bash
# onnxruntime-genai 0.18.0: a Llama with YaRN's or linear positions is built with unscaled ones.
#
# Guess: `onnxruntime_genai.models.builder` gives transformers' model for a Llama whose `rope_type` is "yarn" or
# "linear", or refuses it: its general builder computes both, and raises NotImplementedError for a type it lacks.
# Seen: the builder of `LlamaForCausalLM` has a function of its own for positions, which knows "llama3" and does nothing
# for any other type. The model is built without a word, and its table of cosines is the one of "default". Llama 3.1's
# is right. So build a model of another type there only where its family has not this builder, and compare a text.
#
# Prints the cosines of position 9 in the built model and in transformers, for four types.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --disable-pip-version-check onnxruntime-genai==0.18.0 onnxruntime==1.32.0 \
  onnx==1.23.2 onnx-ir==1.1.0 transformers==5.23.0 torch==2.13.0 numpy==2.4.6
HF_HUB_OFFLINE=1 TRANSFORMERS_VERBOSITY=error "$folder/venv/bin/python" - "$folder" <<'PYTHON'
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import onnx
import torch
from onnx import numpy_helper
from tokenizers import Tokenizer, models
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

TYPES = {
    "default": {"rope_type": "default"},
    "llama3": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
               "original_max_position_embeddings": 16},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
    "linear": {"rope_type": "linear", "factor": 4.0},
}
SEEN = {"default": True, "llama3": True, "yarn": False, "linear": False}  # whether the positions are transformers'

assert version("onnxruntime-genai") == "0.18.0"
folder = Path(sys.argv[1])
inner = Tokenizer(models.WordLevel({f"w{n}": n for n in range(64)}, unk_token="w0"))
for kind, rope in TYPES.items():
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=64, tie_word_embeddings=False, eos_token_id=1, bos_token_id=2,
        rope_parameters={**rope, "rope_theta": 10000.0},
    )
    net = LlamaForCausalLM(config)
    net.save_pretrained(folder / kind)
    PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="w1").save_pretrained(folder / kind)
    made = folder / f"{kind}-onnx"
    command = [sys.executable, "-m", "onnxruntime_genai.models.builder", "-i", folder / kind, "-o", made, "-p", "fp32",
               "-e", "cpu", "-c", folder / "cache"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    graph = onnx.load(made / "model.onnx").graph
    (table,) = [one for one in graph.initializer if "cos_cache" in one.name]
    built = torch.tensor(numpy_helper.to_array(table, base_dir=str(made)))[9]
    right = net.model.rotary_emb(torch.zeros(1, 1, 1), torch.tensor([[9]]))[0][0, 0, : built.numel()]
    same = bool((built - right).abs().max() < 1e-4)
    shown = [" ".join(f"{value:+.3f}" for value in one[:4].tolist()) for one in (built, right)]
    print(f"{kind:8} built: {shown[0]}  transformers: {shown[1]}")
    assert same is SEEN[kind], kind
PYTHON
