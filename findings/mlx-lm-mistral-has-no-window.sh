#!/usr/bin/env bash
# mlx-lm 0.32.2 (mlx 0.32.4, CPU): a Mistral model with `sliding_window` attends to everything.
#
# Guess: `mlx_lm` loads a Mistral checkpoint as transformers does, whose config.json says `"sliding_window": 4`: a layer
# sees the last four tokens (arXiv 2310.06825), or the load fails. Its module for the family has the argument, a mask
# and a rotating cache for it.
# Seen: the window is used only in layers that `layer_types` calls "sliding_attention", a key that Mistral's files do
# not have. Without it each layer is "full_attention": the model loads, says nothing, and gives other probabilities as
# soon as a text is longer than the window (6 nats apart from transformers 5.23.0 in a model drawn by chance). With the
# key in all layers it raises ValueError, as it wants one layer of full attention. So a model that was trained with a
# window in every layer has no right form for mlx-lm 0.32.2: keep texts within the window there.
#
# Prints how much the last token's logits move when the first of twelve tokens changes, in a model of one layer and a
# window of 4 (0 is right), and the error with `layer_types`.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --disable-pip-version-check "mlx[cpu]==0.32.4" mlx-lm==0.32.2
HF_HUB_OFFLINE=1 "$folder/venv/bin/python" - "$folder" <<'PYTHON'
import json
import sys
from importlib.metadata import version
from pathlib import Path

import mlx.core as mx
from mlx_lm.utils import load_model

WINDOW = 4
CONFIG = {
    "architectures": ["MistralForCausalLM"], "model_type": "mistral", "num_hidden_layers": 1, "hidden_size": 32,
    "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 32, "vocab_size": 64,
    "rms_norm_eps": 1e-5, "max_position_embeddings": 64, "rope_theta": 10000.0, "hidden_act": "silu",
    "tie_word_embeddings": False, "sliding_window": WINDOW,
}


def write_model(path, **more):
    path.mkdir()
    (path / "config.json").write_text(json.dumps(CONFIG | more))
    square = [f"self_attn.{name}_proj" for name in "qkvo"] + [f"mlp.{name}_proj" for name in ("gate", "up", "down")]
    shapes = {f"model.layers.0.{name}.weight": (32, 32) for name in square}
    shapes |= {"model.embed_tokens.weight": (64, 32), "lm_head.weight": (64, 32)}
    keys = mx.random.split(mx.random.key(3), len(shapes))
    tensors = {name: mx.random.normal(shape, key=key) * 0.3 for (name, shape), key in zip(shapes.items(), keys)}
    norms = ("model.norm", "model.layers.0.input_layernorm", "model.layers.0.post_attention_layernorm")
    tensors |= {f"{name}.weight": mx.ones((32,)) for name in norms}
    mx.save_safetensors(str(path / "model.safetensors"), tensors, metadata={"format": "mlx"})
    return path


assert (version("mlx"), version("mlx-lm")) == ("0.32.4", "0.32.2")
mx.set_default_device(mx.cpu)
folder = Path(sys.argv[1])
model, config = load_model(write_model(folder / "as-published"))
assert config["sliding_window"] == WINDOW
first, changed = (model(mx.array([[token, *range(10, 21)]]))[0, -1] for token in (1, 2))
moved = mx.abs(first - changed).max().item()
print(f"window {WINDOW}, 12 tokens: another first token moves the last logits by {moved:.3f}")
assert moved > 0.01, moved
within = [model(mx.array([[token, *range(10, 21)]]))[0, WINDOW + 3] for token in (1, 1)]
assert mx.array_equal(*within), "the comparison itself is exact"
try:
    load_model(write_model(folder / "with-types", layer_types=["sliding_attention"]))
except ValueError as error:
    print(f"with layer_types: ValueError: {error}")
else:
    raise AssertionError("layer_types of one kind are taken now")
PYTHON
