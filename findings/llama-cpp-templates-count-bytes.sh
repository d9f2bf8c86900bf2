#!/usr/bin/env bash
# llama.cpp (xllamacpp 2026.10.11549) beside transformers 5.23.0: one chat template, two texts.
#
# Guess: llama.cpp's Jinja engine gives what transformers' gives wherever both take a template, so that a model which was
# tuned by transformers' text is asked by the same text from its GGUF file.
# Seen: strings are bytes there. `length`, slices and an index count bytes and cut letters in two, `upper` and `lower`
# know ASCII only, `trim` and `split()` keep a no-break or an ideographic space, and `split()` counts an empty part
# between two blanks. A mapping that is printed is an empty text, a list loses brackets, commas and quotes, None is
# an empty text behind `~`, and `tojson` writes 2.0 as 2. Nothing is said. So print arguments of tools by `tojson`,
# without floats that are whole numbers, and cut, trim and count texts before they reach the template.
#
# Prints one line for each piece of a template: what transformers renders, what llama.cpp renders.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --disable-pip-version-check \
  xllamacpp==2026.10.11549 gguf==0.19.0 transformers==5.23.0 jinja2==3.1.6 numpy==2.4.6
cat > "$folder/ask.py" <<'PYTHON'
import json
import sys
import urllib.request

import xllamacpp

params = xllamacpp.CommonParams()
params.model.path = sys.argv[1]
params.n_ctx, params.warmup, params.n_parallel, params.cpuparams.n_threads = 64, False, 1, 1
params.use_jinja = True
server = xllamacpp.Server(params)
body = json.dumps({"messages": [{"role": "user", "content": "x"}]}).encode()
url = f"{server.listening_address}/apply-template"
with urllib.request.urlopen(urllib.request.Request(url, body, {"Content-Type": "application/json"})) as answer:
    print("@@" + json.dumps(json.load(answer)["prompt"]))
PYTHON
HF_HUB_OFFLINE=1 TRANSFORMERS_VERBOSITY=error "$folder/venv/bin/python" - "$folder" <<'PYTHON'
import json
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import gguf
import numpy as np
from transformers.utils.chat_template_utils import render_jinja_template

SEEN = [  # piece of a template, transformers' text, llama.cpp's text
    ("{{ 'äöü' | length }}", "3", "6"),
    ("{{ 'naïve'[:3] | tojson }}", '"naï"', '"na\ufffd"'),
    ("{{ 'straße ÿ' | upper }}", "STRASSE Ÿ", "STRAßE ÿ"),
    ("{{ 'ÀÉ' | lower }}", "àé", "ÀÉ"),
    ("[{{ '\u3000a\u00a0' | trim }}]", "[a]", "[\u3000a\u00a0]"),
    ("{{ 'a  b'.split() | length }}", "2", "3"),
    ("[{{ {'city': 'Ulm'} }}]", "[{'city': 'Ulm'}]", "[]"),
    ("[{{ ['a', 'b'] }}]", "[['a', 'b']]", "[ab]"),
    ("[{{ 'x' ~ none }}]", "[xNone]", "[x]"),
    ("{{ {'degrees': 2.0} | tojson }}", '{"degrees": 2.0}', '{"degrees": 2}'),
]
CHAT = [{"role": "user", "content": "x"}]
folder = Path(sys.argv[1])
template = "|".join(piece for piece, _, _ in SEEN)


def write_model(path):
    """A llama of one layer and width 32, whose tokens are the 256 bytes of GPT-2."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    letters = {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(others)}
    writer = gguf.GGUFWriter(path, "llama")
    for name, value in (("context_length", 64), ("embedding_length", 32), ("feed_forward_length", 32),
                        ("block_count", 1), ("head_count", 1), ("layer_norm_rms_eps", 1e-5)):
        getattr(writer, f"add_{name}")(value)
    writer.add_vocab_size(256)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([letters[byte] for byte in range(256)])
    writer.add_token_types([1] * 256)
    writer.add_token_merges([f"{letters[97]} {letters[98]}"])
    writer.add_eos_token_id(0)
    writer.add_chat_template(template)
    square = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
    tensors = {f"blk.0.{name}.weight": (32, 32) for name in square}
    tensors |= {"token_embd.weight": (256, 32), "output.weight": (256, 32), "output_norm.weight": (32,)}
    tensors |= {"blk.0.attn_norm.weight": (32,), "blk.0.ffn_norm.weight": (32,)}
    for name, shape in tensors.items():
        writer.add_tensor(name, np.full(shape, 0.01, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


assert (version("xllamacpp"), version("transformers")) == ("2026.10.11549", "5.23.0")
theirs = render_jinja_template(conversations=[CHAT], chat_template=template)[0][0]
write_model(folder / "model.gguf")
done = subprocess.run([sys.executable, folder / "ask.py", folder / "model.gguf"], capture_output=True, text=True)
lines = [line for line in done.stdout.splitlines() if line.startswith("@@")]
assert lines, done.stderr[-2000:]
cpp = json.loads(lines[0][2:])
for (piece, hf, other), one, two in zip(SEEN, theirs.split("|"), cpp.split("|"), strict=True):
    print(f"{piece:38} transformers {one!r:24} llama.cpp {two!r}")
    assert (one, two) == (hf, other), (piece, one, two)
PYTHON
