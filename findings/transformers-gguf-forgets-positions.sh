#!/usr/bin/env bash
# transformers 5.23.0: a GGUF file with scaled rotary positions is loaded with unscaled ones.
#
# Guess: `from_pretrained(..., gguf_file=FILE)` gives the model that the file holds, as its page says of the
# architecture `llama`, or fails. `rope.scaling.*` keys (YaRN, linear) are in GGUF's specification, and the tensor
# `rope_freqs.weight` is how converters write Llama 3.1 and 3.2.
# Seen: neither is read. All three load without a word of it, with `rope_type` "default": each position beyond the
# first is another one. A file with experts (`expert_count`, Mixtral) becomes a LlamaForCausalLM, whose feed-forwards
# are drawn by chance; that is a warning. So convert GGUF files without these keys only, and take the original folder
# of the others.
#
# Prints the positions in each file, what transformers made of them, and how far the logits of a model with and without
# the key are apart (0: the key changes nothing).
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --disable-pip-version-check \
  transformers==5.23.0 gguf==0.19.0 accelerate==1.15.0 numpy==2.4.6 torch==2.13.0
HF_HUB_OFFLINE=1 TRANSFORMERS_VERBOSITY=error "$folder/venv/bin/python" - "$folder" <<'PYTHON'
import sys
from importlib.metadata import version
from pathlib import Path

import gguf
import numpy as np
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

torch.manual_seed(0)
WIDTH, HEADS, CONTEXT = 32, 2, 64
BASE = dict(vocab_size=64, hidden_size=WIDTH, intermediate_size=WIDTH, num_hidden_layers=1, num_attention_heads=HEADS,
            num_key_value_heads=HEADS, max_position_embeddings=CONTEXT, tie_word_embeddings=False)
SCALED = {
    "linear": {"rope_type": "linear", "factor": 4.0},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
    "llama3": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
               "original_max_position_embeddings": 16},
}
NAMES = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output",
         "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
         "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
         "mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
         "model.layers.0": "blk.0"}


def write(path, model, kind):
    """`model` as llama.cpp's converter writes it."""
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in (("context_length", CONTEXT), ("embedding_length", WIDTH), ("feed_forward_length", WIDTH),
                       ("block_count", 1), ("head_count", HEADS), ("head_count_kv", HEADS), ("vocab_size", 64),
                       ("layer_norm_rms_eps", 1e-6), ("rope_freq_base", 10000.0),
                       ("rope_dimension_count", WIDTH // HEADS)):
        getattr(writer, f"add_{key}")(value)
    if kind in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(kind))
        writer.add_rope_scaling_factor(4.0)
        writer.add_rope_scaling_orig_ctx_len(16)
    if kind == "llama3":
        usual = LlamaForCausalLM(LlamaConfig(**BASE)).model.rotary_emb.inv_freq
        writer.add_tensor("rope_freqs.weight", (usual / model.model.rotary_emb.inv_freq).numpy().astype(np.float32))
    for name, tensor in model.state_dict().items():
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            tensor = tensor.reshape(HEADS, 2, -1, WIDTH).swapaxes(1, 2).reshape(WIDTH, WIDTH)
        for theirs, ours in NAMES.items():
            name = name.replace(theirs, ours)
        writer.add_tensor(name, tensor.contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def logits(model):
    with torch.no_grad():
        return model.eval()(torch.arange(40)[None] + 3).logits


assert version("transformers") == "5.23.0"
folder = Path(sys.argv[1])
weights = {name: torch.randn_like(tensor) * 0.3 if tensor.dim() > 1 else tensor
           for name, tensor in LlamaForCausalLM(LlamaConfig(**BASE)).state_dict().items()}
for kind, rope in {"default": {"rope_type": "default"}, **SCALED}.items():
    model = LlamaForCausalLM(LlamaConfig(**BASE, rope_parameters={**rope, "rope_theta": 10000.0}))
    model.load_state_dict(weights)
    write(folder / f"{kind}.gguf", model, kind)
    loaded = AutoModelForCausalLM.from_pretrained(folder, gguf_file=f"{kind}.gguf", dtype=torch.float32)
    apart = (logits(model) - logits(loaded)).abs().max().item()
    made = loaded.config.rope_parameters["rope_type"]
    print(f"the file's positions: {kind:8} transformers': {made:8} logits apart by {apart:.5f}")
    assert made == "default" and (apart < 1e-4) == (kind == "default"), (kind, made, apart)
PYTHON
