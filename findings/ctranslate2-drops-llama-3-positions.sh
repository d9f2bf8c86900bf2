#!/usr/bin/env bash
# CTranslate2 4.8.5 with transformers 5.23.0 and torch 2.13.0, CPU: a converted Llama 3.1 has the positions of Llama 3.
#
# Guess: `TransformersConverter` takes a model whose rotary positions are scaled as Llama 3.1's (`rope_type` "llama3",
# factor 8, 8,192 original positions), as its list of supported scaling types says, and gives transformers' logits.
# Seen: it converts and loads without a word. The converter knows the type and writes factor, low and high frequency
# factors, but the model that runs turns by the unscaled frequencies: its log-probabilities are those of the same
# weights with `rope_type` "default". "linear" is scaled as in transformers. The longer the text, the further apart.
#
# Prints how far CTranslate2's log-probabilities are from transformers' with each `rope_type`, for 600 tokens and a model
# of two layers drawn by chance: nats, the largest of all positions and tokens.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --disable-pip-version-check \
  ctranslate2==4.8.5 transformers==5.23.0 torch==2.13.0 numpy==2.4.6 setuptools
HF_HUB_OFFLINE=1 TRANSFORMERS_VERBOSITY=error "$folder/venv/bin/python" - "$folder" <<'PYTHON'
import json
import sys
from importlib.metadata import version
from pathlib import Path

import ctranslate2
import numpy as np
import tokenizers
import torch
import transformers
from ctranslate2.converters import TransformersConverter

LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 8192, "rope_theta": 500000.0}
LINEAR = {"rope_type": "linear", "factor": 8.0, "rope_theta": 500000.0}
DEFAULT = {"rope_type": "default", "rope_theta": 500000.0}
WORDS = [f"w{number}" for number in range(256)]
folder = Path(sys.argv[1])
ids = np.random.RandomState(0).randint(3, 250, 600).tolist()
torch.set_num_threads(1)


def net_of(positions):
    config = transformers.LlamaConfig(
        hidden_size=256, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=256, max_position_embeddings=131072, rope_parameters=positions)
    torch.manual_seed(0)
    net = transformers.LlamaForCausalLM(config).eval()
    for parameter in net.parameters():
        parameter.data = 1.0 + 0.2 * torch.randn_like(parameter) if parameter.dim() == 1 else \
            0.15 * torch.randn_like(parameter)
    return net


def by_transformers(net):
    with torch.no_grad():
        return net(torch.tensor([ids])).logits[0].log_softmax(-1).numpy()


def by_ctranslate2(net, path):
    net.save_pretrained(path)
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel({word: at for at, word in enumerate(WORDS)}, "w0"))
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=inner, bos_token="w1", eos_token="w2",
                                                     unk_token="w0")
    tokenizer.save_pretrained(path)
    out = str(path) + "-converted"
    TransformersConverter(str(path)).convert(out, quantization="float32")
    assert json.loads((Path(out) / "vocabulary.json").read_text()) == WORDS
    model = ctranslate2.Generator(out, device="cpu", compute_type="float32", inter_threads=1, intra_threads=1)
    return np.array(model.forward_batch([[WORDS[one] for one in ids]], return_log_probs=True))[0]


def apart(one, other):
    return float(np.abs(one - other).max())


assert (version("ctranslate2"), version("transformers"), torch.__version__[:6]) == ("4.8.5", "5.23.0", "2.13.0")
net = net_of(LLAMA3)
theirs = by_ctranslate2(net, folder / "llama3")
unscaled = by_transformers(net_of(DEFAULT))
right = by_transformers(net)
linear = net_of(LINEAR)
of_linear = apart(by_ctranslate2(linear, folder / "linear"), by_transformers(linear))
print(f"llama3: {apart(theirs, right):.4f} from transformers' llama3, {apart(theirs, unscaled):.4f} from its default")
print(f"linear: {of_linear:.4f} from transformers' linear")
assert apart(theirs, right) > 1.0 and apart(theirs, unscaled) < 0.01 and of_linear < 0.01
PYTHON
