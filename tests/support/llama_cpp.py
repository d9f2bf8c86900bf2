"""llama.cpp, in a process of its own: what it makes of texts and ids with a GGUF file."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

PROBE = r"""
import json, sys, urllib.request
import xllamacpp
path, texts, prompts, top = json.loads(sys.stdin.read())
params = xllamacpp.CommonParams()
params.model.path = path
params.n_ctx, params.warmup, params.n_parallel, params.cpuparams.n_threads = 512, False, 1, 1
params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32  # float16 by default
params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED  # which computes in float16
server = xllamacpp.Server(params)
def asked(verb, **fields):
    body = json.dumps(fields).encode()
    request = urllib.request.Request(f"{server.listening_address}/{verb}", body, {"Content-Type": "application/json"})
    return json.load(urllib.request.urlopen(request))
ids = [asked("tokenize", content=text, add_special=False, parse_special=True)["tokens"] for text in texts]
told = [
    asked("completion", prompt=prompt, n_predict=1, n_probs=top, temperature=0.0, cache_prompt=False)
    for prompt in prompts
]
tops = [(one.get("completion_probabilities") or [{"top_logprobs": []}])[0]["top_logprobs"] for one in told]
print("@@" + json.dumps([ids, tops]))
"""


def llama_cpp(
    path: Path, texts: list[str], prompts: list[list[int]], top: int = 40
) -> tuple[list[list[int]], list[dict[int, float]]]:
    """(ids of each text, log-probabilities of the `top` most likely next tokens of each prompt, by id; none of a prompt
    after which the end of the text is the most likely: llama.cpp does not tell)."""
    given = json.dumps([str(path), texts, prompts, top])
    done = subprocess.run(
        [sys.executable, "-c", PROBE], input=given, capture_output=True, text=True, timeout=600, check=False
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("@@")]
    assert lines, done.stderr[-2000:]
    ids, told = json.loads(lines[-1][2:])
    return ids, [_by_id(rows) for rows in told]


def _by_id(rows: list[dict[str, Any]]) -> dict[int, float]:
    return {row["id"]: row["logprob"] for row in rows}
