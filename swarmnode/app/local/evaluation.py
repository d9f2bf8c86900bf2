"""Models assembled from a run's saved copies: their held-out loss, and their export."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, cast

import numpy as np

from swarmnode.app.daemon.clock import SystemClock
from swarmnode.app.dashboard.history import read_members
from swarmnode.app.local.model_source import Moved, Note, WeightChoice, facts, gather
from swarmnode.app.local.text_pieces import pieces
from swarmnode.base.errors import DataError, SwarmnodeError, Unavailable, UsageError, cause_of, os_errors
from swarmnode.data.base_index import FOLDER
from swarmnode.data.corpus import Corpus
from swarmnode.data.indexed import IndexedCorpus, open_text
from swarmnode.data.root import DataRoot
from swarmnode.data.sample import SampleBatch
from swarmnode.data.tokenizer_file import carried_files, run_tokenizer, tokenizer_file
from swarmnode.data.tokens import Tokenizer, Tokens
from swarmnode.keep.recovery.archive import Score, Scores
from swarmnode.model.adapter import has_adapters
from swarmnode.model.base_weights import base_weights
from swarmnode.run.manifest import EvaluationSpec, Manifest

if TYPE_CHECKING:
    from swarmnode.model.decoder import Decoder
    from swarmnode.model.gather import Gathered


SET_TOKENS_MAX = 1 << 18  # derived: 0.01 nat of sampling error where losses deviate by 5; minutes on a CPU for 135 M
PROMPTS = ("The", "Once upon a time")  # an owner lists better ones


def scores_of(net: Decoder, manifest: Manifest, tokenizer: Tokenizer, data: Path | None) -> Scores:
    """Everything that `manifest.evaluation` lists, measured on `net`. Texts lie below `data`. What cannot be measured
    becomes a line in `failed`; the rest is measured all the same."""
    asked = manifest.evaluation
    scores = list[Score]()
    failed = list[str]()
    for name in asked.sets:
        try:
            scores.append(Score(name, "nats/token", text_loss(net, manifest, tokenizer, read_text(data, name))))
        except (SwarmnodeError, OSError) as error:
            failed.append(f"{name}: {cause_of(error)}")
    return Scores(tuple(scores), continued(net, manifest, tokenizer), tuple(failed))


def read_text(data: Path | None, name: str) -> bytes:
    """The beginning of the file `name` below `data`, or of all files of that folder one after another: enough for
    SET_TOKENS_MAX tokens of 16 bytes. Raises DataError if there is none, NotPermitted for a path out of `data`."""
    root = DataRoot(data)
    path = root.find(name)
    files = sorted(each for each in path.rglob("*") if each.is_file()) if path.is_dir() else [path]
    pieces = list[bytes]()
    left = 16 * SET_TOKENS_MAX
    for file in files:
        unread = os_errors(DataError, f"{file}: cannot be read", "; evaluation.sets names it")
        with unread, root.inside(file).open("rb") as opened:
            pieces.append(opened.read(left))
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
    total = 0.0
    count = 0
    for batch in _windows(tokens, manifest.model.context, manifest.inner.microbatch):
        loss, counted = loss_of(net, SampleBatch(batch), manifest.data.document_end)
        total += loss
        count += counted
    return total / max(1, count)


def _windows(tokens: Tokens, context: int, step: int) -> list[Tokens]:
    """Batches [B, T + 1], B <= step, that have each token but the first once as a target; the last may be shorter."""
    whole = (tokens.size - 1) // context
    rows = [tokens[at * context : (at + 1) * context + 1] for at in range(whole)]
    batches = [cast(Tokens, np.stack(rows[at : at + step])) for at in range(0, whole, step)]
    rest = tokens[whole * context :]
    return batches + ([rest[None, :]] if rest.size > 1 else [])


def continued(net: Decoder, manifest: Manifest, tokenizer: Tokenizer) -> tuple[tuple[str, str], ...]:
    """Each prompt of the manifest, or of PROMPTS where it has none, with its most likely continuation."""
    from swarmnode.model.text_generation import Sampling, generate

    asked = manifest.evaluation
    texts = []
    stops = frozenset[int]() if tokenizer.separator is None else frozenset({tokenizer.separator})
    for prompt in asked.prompts or PROMPTS:
        ids = [int(token) for token in tokenizer.encode(prompt)]
        made = generate(net, manifest.model, ids, asked.prompt_tokens, Sampling(temperature=0.0), stops)
        texts.append((prompt, "".join(pieces(tokenizer, made, prompt))))
    return tuple(texts)


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Nats per token on `tokens` held-out tokens; `replicas` has the loss of each chain of single replicas, by name;
    `lists` the scores of [evaluation], if they were asked for."""

    kind: str
    run_id: str
    round: int
    samples: int
    tokens: int
    merged: float
    replicas: tuple[tuple[str, float], ...]
    spread: float
    lists: Scores | None = None

    def to_json(self) -> dict[str, object]:
        return {
            "kind": self.kind,
            "run": self.run_id,
            "round": self.round,
            "samples": self.samples,
            "tokens": self.tokens,
            "merged": {"loss": self.merged, "perplexity": math.exp(min(self.merged, 700.0))},
            "replicas": [{"replicas": names, "loss": loss} for names, loss in self.replicas],
            "spread": self.spread,
            **({} if self.lists is None else self.lists.to_json()),
        }


def merged_model(found: Gathered) -> Decoder:
    """The whole model: the mean of all copies, on the base model of a run that trains adapters. Raises DataError where
    that base is not here."""
    from swarmnode.model.gather import merged, model_of
    from swarmnode.model.text_generation import whole_model

    return whole_model(found.manifest.model, model_of(found, merged(found), base_weights(found)))


def evaluate(
    found: Gathered, folder: Path | None, cache: Path, samples: int | None, *, lists: bool = False
) -> Evaluation:
    """The loss of the merged model, and, with several replicas, of each chain of them, on the first `samples` (None:
    the manifest's) held-out samples. With `lists` also what [evaluation] of the manifest lists, on the merged model.
    Raises DataError if the run's text, a chunk of its data set, or its tokenizer cannot be read here."""
    from swarmnode.model.gather import chains, model_of, spread
    from swarmnode.model.text_generation import whole_model

    manifest = found.manifest
    corpus = open_text(manifest, folder, cache)
    wanted = samples or manifest.pipeline.validation_samples
    net = merged_model(found)
    whole, tokens = _loss(net, manifest, corpus, wanted)
    replicas = []
    if found.replicas > 1:
        base = base_weights(found)
        for names, tensors in chains(found):
            loss, _ = _loss(whole_model(manifest.model, model_of(found, tensors, base)), manifest, corpus, wanted)
            replicas.append((names, loss))
    return Evaluation(
        kind=found.kind,
        run_id=found.run_id,
        round=found.round,
        samples=found.samples,
        tokens=tokens,
        merged=whole,
        replicas=tuple(replicas),
        spread=spread(found) if replicas else 0.0,
        lists=_lists(net, manifest, folder) if lists else None,
    )


def _lists(net: Decoder, manifest: Manifest, folder: Path | None) -> Scores:
    """Scores of [evaluation]. Its texts and the tokenizer lie below `folder`."""
    try:
        tokenizer, _ = run_tokenizer(folder, manifest.data)
        return scores_of(net, manifest, tokenizer, folder)
    except SwarmnodeError:
        if manifest.evaluation == EvaluationSpec():
            return Scores()  # nobody asked for any
        raise


def _loss(net: Decoder, manifest: Manifest, corpus: Corpus | IndexedCorpus, wanted: int) -> tuple[float, int]:
    """(nats per token, tokens)"""
    from swarmnode.model.text_generation import loss_of

    step = manifest.inner.microbatch  # fits into memory: the run trains with it
    total = 0.0
    count = 0
    for first in range(0, wanted, step):
        try:
            batch = corpus.validation_batch(first, min(step, wanted - first), wanted)
        except Unavailable as error:
            raise DataError(f"{error}: give --data FOLDER, where `swarmnode data make` wrote the data set") from None
        if len(batch) == 0:
            break
        loss, tokens = loss_of(net, batch, manifest.data.document_end)
        total += loss
        count += tokens
    return total / max(1, count), count


def _about(model: Gathered, folder: Path | None) -> dict[str, object]:
    """The origin of `model`, and the members of its run where `folder` has its history."""
    from swarmnode.model.gather import spread

    about: dict[str, object] = {
        "kind": model.kind,
        "run_id": model.run_id,
        "run_name": model.manifest.name,
        "round": model.round,
        "samples": model.samples,
        "made_unix_s": model.made_unix_s,
        "validation": model.validation,
        "replicas": model.replicas,
        "spread": spread(model) if model.replicas > 1 else 0.0,
    }
    found = [] if folder is None else folder.rglob("history-*.sqlite")
    histories = sorted(found, key=lambda path: path.stat().st_mtime)
    if histories and (members := read_members(histories[-1])):
        about["members"] = members
    return about


def export_model(
    source: str,
    out: Path | None,
    kind: str = "auto",
    note: Note = lambda text: None,
    moved: Moved = lambda done, of: None,
    last: bool = False,
    checkpoints: int = 1,
    data: Path | None = None,
    adapter: bool = False,
    gguf: Path | None = None,
) -> dict[str, object]:
    """Merge `source` into a model in the folder `out`, the file `gguf`, or both; return the fields of --json.

    Raises UsageError if there is nothing to merge, and the merge's own errors.
    """
    from swarmnode.model.export import small_files, write_adapter, write_model
    from swarmnode.model.gather import merged, model_of
    from swarmnode.model.gguf_file import check_gguf, write_gguf

    model, folder = gather(source, kind, note, moved, WeightChoice(last, checkpoints))
    if gguf is not None:
        check_gguf(model.manifest)  # before anything is merged
    about = _about(model, folder)
    tokenizer = tokenizer_file(data or folder, model.manifest.data)
    base_folder = None if folder is None else folder / FOLDER
    carried = carried_files(base_folder, model.manifest.base.index, tokenizer)
    told: dict[str, object] = {"model": str(out or gguf)}
    if adapter:
        if model.whole or not has_adapters(model.manifest):
            raise UsageError(f"--adapter: {source} holds a whole model; give the folder of a run that trains adapters")
        assert out is not None
        told["parameters"] = write_adapter(merged(model), model.manifest, out, tokenizer, about, carried)
    else:
        tensors = model_of(model, merged(model), base_weights(model))
        told["parameters"] = sum(tensor.numel() for tensor in tensors.values())
        if out is not None:
            write_model(tensors, model.manifest, out, tokenizer, about, carried)
        if gguf is not None:
            told["gguf"] = str(gguf)
            write_gguf(tensors, model.manifest, gguf, small_files(model.manifest, tokenizer, about, carried))
    return {**told, **about, **facts(model, SystemClock().unix_s())}
