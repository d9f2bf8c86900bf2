"""Scores of a whole model: the held-out texts, lm-eval tasks and prompts that the manifest's [evaluation] lists."""

from __future__ import annotations

import json
import math
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, cast

import numpy as np

from swarmnode.data.root import DataRoot
from swarmnode.data.sample import SampleBatch
from swarmnode.data.tokens import Tokenizer, Tokens
from swarmnode.errors import DataError, SwarmnodeError
from swarmnode.manifest import Manifest
from swarmnode.recovery.archive import Score, Scores

if TYPE_CHECKING:
    from swarmnode.model.decoder import Decoder

SET_TOKENS_MAX = 1 << 18  # guess: 0.01 nat of sampling error, and minutes on a CPU for 135 M parameters
BATCH_TOKENS = 4096  # guess: the logits of so many tokens fit into any memory
LM_EVAL = "lm_eval"
PROMPTS = ("The", "Once upon a time")  # guess: begins most English text; an owner lists better ones
KEEP = ("acc_norm", "acc", "exact_match", "f1", "bleu", "bits_per_byte", "perplexity", "word_perplexity")
"""The metric shown of a task that reports several: the first of these."""


def scores_of(
    net: Decoder, manifest: Manifest, tokenizer: Tokenizer, data: Path | None, exported: Path | None
) -> Scores:
    """Everything that `manifest.evaluation` lists, measured on `net`. Texts lie below `data`; tasks read the model
    folder `exported`. What cannot be measured becomes a line in `failed`; the rest is measured all the same."""
    asked = manifest.evaluation
    scores, failed = list[Score](), list[str]()
    for name in asked.sets:
        try:
            scores.append(Score(name, "nats/token", text_loss(net, manifest, tokenizer, read_text(data, name))))
        except (SwarmnodeError, OSError) as error:
            failed.append(f"{name}: {error}")
    if asked.tasks:
        try:
            scores += task_scores(exported, asked.tasks, manifest.model.context, data)
        except (SwarmnodeError, OSError) as error:
            failed.append(f"{', '.join(asked.tasks)}: {error}")
    return Scores(tuple(scores), continued(net, manifest, tokenizer), tuple(failed))


def read_text(data: Path | None, name: str) -> bytes:
    """The beginning of the file `name` below `data`, or of all files of that folder one after another: enough for
    SET_TOKENS_MAX tokens of 16 bytes. Raises DataError if there is none, NotPermitted for a path out of `data`."""
    root = DataRoot(data)
    path = root.find(name)
    files = sorted(each for each in path.rglob("*") if each.is_file()) if path.is_dir() else [path]
    pieces, left = list[bytes](), 16 * SET_TOKENS_MAX
    for file in files:
        try:
            with root.inside(file).open("rb") as opened:
                pieces.append(opened.read(left))
        except OSError as error:
            raise DataError(f"{file}: cannot be read: {error.strerror}; evaluation.sets names it") from None
        left -= len(pieces[-1])
    return b"\n".join(pieces)


def text_loss(net: Decoder, manifest: Manifest, tokenizer: Tokenizer, text: bytes) -> float:
    """Nats per token of `text`, at most SET_TOKENS_MAX of them, in windows of the model's context that follow each
    other. Raises DataError for less than two tokens."""
    from swarmnode.model.text_generation import loss_of

    tokens = tokenizer.encode(text)[: SET_TOKENS_MAX + 1]
    if tokens.size < 2:
        raise DataError("less than two tokens of text")
    if int(tokens.max()) >= manifest.model.vocabulary:
        raise DataError(f"the tokenizer makes ids above model.vocabulary = {manifest.model.vocabulary}")
    total, count = 0.0, 0
    for batch in _windows(tokens, manifest.model.context):
        loss, counted = loss_of(net, SampleBatch(batch), manifest.data.document_end)
        total += loss
        count += counted
    return total / max(1, count)


def _windows(tokens: Tokens, context: int) -> list[Tokens]:
    """Batches [B, T + 1] that have each token but the first once as a target; the last may be shorter."""
    whole = (tokens.size - 1) // context
    rows = [tokens[at * context : (at + 1) * context + 1] for at in range(whole)]
    step = max(1, BATCH_TOKENS // context)
    batches = [cast(Tokens, np.stack(rows[at : at + step])) for at in range(0, whole, step)]
    rest = tokens[whole * context :]
    return batches + ([rest[None, :]] if rest.size > 1 else [])


def continued(net: Decoder, manifest: Manifest, tokenizer: Tokenizer) -> tuple[tuple[str, str], ...]:
    """Each prompt of the manifest, or of PROMPTS where it has none, with its most likely continuation."""
    from swarmnode.model.text_generation import Sampling, generate

    asked, texts = manifest.evaluation, []
    stops = frozenset[int]() if tokenizer.separator is None else frozenset({tokenizer.separator})
    for prompt in asked.prompts or PROMPTS:
        ids = [int(token) for token in tokenizer.encode(prompt)]
        made = generate(net, manifest.model, ids, asked.prompt_tokens, Sampling(temperature=0.0), stops)
        texts.append((prompt, tokenizer.decode(list(made))))
    return tuple(texts)


def task_scores(exported: Path | None, tasks: Sequence[str], context: int, data: Path | None) -> list[Score]:
    """Scores of lm-evaluation-harness tasks for the Hugging Face model folder `exported`, by a process of its own. The
    task files below `data` are known to it, too. Raises DataError if it is not installed or fails."""
    if exported is None or not (exported / "config.json").is_file():
        raise DataError("tasks need a model folder: give the folder that `swarmnode export` or `archive` wrote")
    if find_spec(LM_EVAL) is None:
        raise DataError('lm-evaluation-harness is not installed here: pip install "lm-eval[hf]"')
    model = f"pretrained={exported},dtype=float32,max_length={context}"
    if not _has_first_token(exported):
        model += ",prefix_token_id=0"
    with tempfile.TemporaryDirectory(prefix="swarmnode-lm-eval-") as out:
        command = [sys.executable, "-m", LM_EVAL, "--model", "hf", "--model_args", model, "--tasks", ",".join(tasks)]
        command += ["--device", "cpu", "--output_path", out]
        command += ["--include_path", str(data)] if data is not None and any(data.glob("*.yaml")) else []
        ended = subprocess.run(command, capture_output=True, cwd=data or out, check=False)
        if ended.returncode:
            lines = ended.stderr.decode(errors="replace").strip().splitlines() or ["no reason given"]
            raise DataError(f"lm_eval: {lines[-1][:200]}")
        written = sorted(Path(out).rglob("results_*.json"))
        if not written:
            raise DataError("lm_eval wrote no results")
        return parsed_tasks(written[-1].read_bytes())


def _has_first_token(exported: Path) -> bool:
    """Whether the tokenizer has a token that begins a text; the tokenizer `bytes` has none."""
    try:
        tree = json.loads((exported / "tokenizer_config.json").read_bytes())
    except (OSError, ValueError):
        return False
    return isinstance(tree, dict) and bool(tree.get("bos_token") or tree.get("eos_token"))


def parsed_tasks(data: bytes) -> list[Score]:
    """One score for each task in lm-eval's results. Raises DataError for another file."""
    try:
        results = json.loads(data)["results"]
        scores = []
        for task, row in sorted(results.items()):
            values = {
                key.partition(",")[0]: float(value)
                for key, value in row.items()
                if isinstance(value, int | float) and "stderr" not in key and math.isfinite(value)
            }
            values.pop("sample_len", None)
            metric = next((name for name in KEEP if name in values), next(iter(sorted(values)), None))
            if metric is not None:
                scores.append(Score(str(task), metric, values[metric]))
        return scores
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(f"lm_eval's results cannot be read: {error}") from None
