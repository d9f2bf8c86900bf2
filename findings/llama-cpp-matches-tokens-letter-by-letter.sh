#!/usr/bin/env bash
# llama.cpp (xllamacpp 2026.10.11549) beside tokenizers 0.23.3: byte-level BPE knows no NFC and no flags of a token.
#
# Guess: with the pre-tokenizer "qwen2", llama.cpp makes the ids of a Qwen 2 tokenizer.json, whose normaliser is NFC, of
# every text; and tokens with `rstrip`, `lstrip` or `single_word` do what tokenizer.json says of them.
# Seen: a text in NFD, as macOS writes names and many editors write Vietnamese, is taken letter by letter: "café" has
# two pieces more than when it is composed. The flags have no key in GGUF: spaces beside such a token stay, and a token
# for whole words is found within words. Nothing is said. So compose texts (NFC) before they reach llama.cpp, and give
# no token of a model that is to run there such flags.
#
# Prints the pieces of both for each text.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --disable-pip-version-check \
  xllamacpp==2026.10.11549 gguf==0.19.0 tokenizers==0.23.3 numpy==2.4.6
cat > "$folder/ask.py" <<'PYTHON'
import json
import sys
import urllib.request

import xllamacpp

params = xllamacpp.CommonParams()
params.model.path = sys.argv[1]
params.n_ctx, params.warmup, params.n_parallel, params.cpuparams.n_threads = 64, False, 1, 1
server = xllamacpp.Server(params)
found = []
for text in json.loads(sys.argv[2]):
    body = json.dumps({"content": text, "add_special": False, "parse_special": True}).encode()
    request = urllib.request.Request(f"{server.listening_address}/tokenize", body, {"Content-Type": "application/json"})
    found.append(json.load(urllib.request.urlopen(request))["tokens"])
print("@@" + json.dumps(found))
PYTHON
"$folder/venv/bin/python" - "$folder" <<'PYTHON'
import json
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import gguf
import numpy as np
import tokenizers
from tokenizers import AddedToken, Regex, normalizers, pre_tokenizers

QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
FLAGGED = [AddedToken("<|r|>", rstrip=True), AddedToken("<|l|>", lstrip=True), AddedToken("<|w|>", single_word=True)]
TEXTS = [("caf\u00e9", True), ("a<|r|>b", True), ("cafe\u0301", False), ("a<|r|>  b", False), ("a  <|l|>b", False),
         ("a<|w|>b", False)]

inner = tokenizers.Tokenizer(tokenizers.models.BPE())
inner.normalizer = normalizers.NFC()
inner.pre_tokenizer = pre_tokenizers.Sequence(
    [pre_tokenizers.Split(Regex(QWEN2), "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
)
trainer = tokenizers.trainers.BpeTrainer(
    vocab_size=280, special_tokens=["<|end|>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
)
inner.train_from_iterator(["un café  a b"] * 9, trainer)
inner.add_special_tokens(FLAGGED)
tree = json.loads(inner.to_str())
size = inner.get_vocab_size()
special = {one["id"] for one in tree["added_tokens"]}

folder = Path(sys.argv[1])
writer = gguf.GGUFWriter(folder / "model.gguf", "llama")
for name, value in (("context_length", 64), ("embedding_length", 32), ("feed_forward_length", 32),
                    ("block_count", 1), ("head_count", 1), ("layer_norm_rms_eps", 1e-5), ("vocab_size", size)):
    getattr(writer, f"add_{name}")(value)
writer.add_tokenizer_model("gpt2")
writer.add_tokenizer_pre("qwen2")
writer.add_token_list([inner.id_to_token(n) for n in range(size)])
writer.add_token_types([gguf.TokenType.CONTROL if n in special else gguf.TokenType.NORMAL for n in range(size)])
writer.add_token_merges([" ".join(pair) for pair in tree["model"]["merges"]])
writer.add_eos_token_id(0)
square = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
tensors = {f"blk.0.{name}.weight": (32, 32) for name in square}
tensors |= {"token_embd.weight": (size, 32), "output.weight": (size, 32), "output_norm.weight": (32,)}
tensors |= {"blk.0.attn_norm.weight": (32,), "blk.0.ffn_norm.weight": (32,)}
for name, shape in tensors.items():
    writer.add_tensor(name, np.full(shape, 0.01, np.float32))
writer.write_header_to_file()
writer.write_kv_data_to_file()
writer.write_tensors_to_file()
writer.close()

assert (version("xllamacpp"), version("tokenizers")) == ("2026.10.11549", "0.23.3")
given = [sys.executable, folder / "ask.py", folder / "model.gguf", json.dumps([text for text, _ in TEXTS])]
done = subprocess.run(given, capture_output=True, text=True)
lines = [line for line in done.stdout.splitlines() if line.startswith("@@")]
assert lines, done.stderr[-2000:]
for (text, same), cpp in zip(TEXTS, json.loads(lines[0][2:]), strict=True):
    right = inner.encode(text, add_special_tokens=False).ids
    shown = [" ".join(inner.id_to_token(n) for n in ids) for ids in (right, cpp)]
    print(f"{ascii(text):16} tokenizers: {shown[0]:20} llama.cpp: {shown[1]}")
    assert (right == cpp) is same, (text, right, cpp)
PYTHON
