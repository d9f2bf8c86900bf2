"""Models assembled from a run's saved copies: their held-out loss, and their export."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from swarmnode.daemon.clock import SystemClock
from swarmnode.data.base_folder import FOLDER
from swarmnode.data.corpus import Corpus
from swarmnode.data.indexed import IndexedCorpus, open_text
from swarmnode.data.tokenizer_file import carried_files, run_tokenizer, tokenizer_file
from swarmnode.errors import DataError, SwarmnodeError, Unavailable, UsageError
from swarmnode.ids import PeerId, RunId
from swarmnode.local.model_scores import BATCH_TOKENS, scores_of
from swarmnode.local.model_source import Moved, Note, WeightChoice, facts, gather
from swarmnode.manifest import EvaluationSpec, Manifest
from swarmnode.model.adapter import has_adapters
from swarmnode.model.base_weights import base_weights
from swarmnode.recovery.archive import Scores

if TYPE_CHECKING:
    from swarmnode.model.decoder import Decoder
    from swarmnode.model.gather import Gathered, StageCopy


PAIRED = ("noloco", "average")
"""Methods whose outer step is NoLoCo's with their own constants."""


def mixed(found: Gathered, rounds: int) -> Gathered:
    """`found` after `rounds` in which the copies of each stage meet in pairs, by the run's own outer step if it is one
    of pairs, else by NoLoCo's. Nothing is lost on the wire.

    Without training the mean of all copies stays the same and each copy approaches it, so that any one of them
    suffices. A swarm can do this even if no node can fetch all copies.
    """
    stages: dict[tuple[str, ...], list[StageCopy]] = {}
    for copy in found.copies:
        stages.setdefault(tuple(copy.tensors), []).append(copy)
    copies: list[StageCopy] = []
    for stage, group in enumerate(stages.values()):
        copies += _met(found, stage, group, rounds) if len(group) > 1 else group
    return replace(found, copies=tuple(copies))


def _met(found: Gathered, stage: int, group: list[StageCopy], rounds: int) -> list[StageCopy]:
    from swarmnode.gossip.compression import codec
    from swarmnode.gossip.outer.noloco import NoLoCo
    from swarmnode.gossip.pairing import pairs
    from swarmnode.manifest import GossipSpec, constants
    from swarmnode.model.gather import flat, with_flat
    from swarmnode.ports import Packet

    spec = found.manifest.gossip
    step = constants(spec if spec.method in PAIRED else GossipSpec(method=NoLoCo.name))
    members = {
        PeerId(f"{at:06d} {copy.peer}"): NoLoCo(flat(copy), codec("fp32"), step.alpha, step.beta, step.gamma)
        for at, copy in enumerate(group)
    }
    for number in range(found.round + 1, found.round + 1 + rounds):
        sent = {peer: Packet(1.0, 0, member.message(number)) for peer, member in members.items()}
        for met in pairs(RunId(found.run_id), stage, number, members):
            for peer in met:
                members[peer].apply(number, 1.0, [sent[other] for other in met if other != peer])
    return [with_flat(copy, member.theta) for copy, member in zip(group, members.values(), strict=True)]


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
    found: Gathered, folder: Path | None, cache: Path, samples: int | None, lists: Path | None = None
) -> Evaluation:
    """The loss of the merged model, and, with several replicas, of each chain of them, on the first `samples` (None:
    the manifest's) held-out samples. With the model folder `lists` also what [evaluation] of the manifest lists, on
    the merged model. Raises DataError if the run's text, a chunk of its data set, or its tokenizer cannot be read
    here."""
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
        lists=None if lists is None else _lists(net, manifest, folder, lists),
    )


def _lists(net: Decoder, manifest: Manifest, folder: Path | None, source: Path) -> Scores:
    """Scores of [evaluation]. Its texts and the tokenizer lie below `folder`; lm-eval reads the model folder
    `source`."""
    try:
        tokenizer, _ = run_tokenizer(folder, manifest.data)
        return scores_of(net, manifest, tokenizer, folder, source)
    except SwarmnodeError:
        if manifest.evaluation == EvaluationSpec():
            return Scores()  # nobody asked for any
        raise


def _loss(net: Decoder, manifest: Manifest, corpus: Corpus | IndexedCorpus, wanted: int) -> tuple[float, int]:
    """(nats per token, tokens)"""
    from swarmnode.model.text_generation import loss_of

    step = max(1, BATCH_TOKENS // manifest.model.context)
    total, count = 0.0, 0
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


def export_run(folder: Path, out: Path, note: Note = lambda text: None) -> Path:
    """Export the saved state in a session's folder; return `out`."""
    return Path(str(export_model(str(folder), out, "auto", note)["model"]))


def export_model(
    source: str,
    out: Path,
    kind: str,
    note: Note,
    moved: Moved = lambda done, of: None,
    rounds: int = 0,
    last: bool = False,
    checkpoints: int = 1,
    data: Path | None = None,
    adapter: bool = False,
) -> dict[str, object]:
    """Merge `source` into a model in `out`, after `rounds` of gossip among its replicas; return the fields of --json.

    Raises UsageError if there is nothing to merge, and the merge's own errors.
    """
    from swarmnode.model.export import write_adapter, write_model
    from swarmnode.model.gather import merged, model_of, spread

    model, folder = gather(source, kind, note, moved, WeightChoice(last, checkpoints))
    model = mixed(model, rounds) if rounds else model
    about = {
        "kind": model.kind,
        "run_id": model.run_id,
        "run_name": model.manifest.name,
        "round": model.round,
        "samples": model.samples,
        "made_unix_s": model.made_unix_s,
        "validation": model.validation,
        "replicas": model.replicas,
        "gossip_rounds": rounds,
        "spread": spread(model) if model.replicas > 1 else 0.0,
    }
    tokenizer = tokenizer_file(data or folder, model.manifest.data)
    base_folder = None if folder is None else folder / FOLDER
    carried = carried_files(base_folder, model.manifest.base.index, tokenizer)
    base = base_weights(model)
    if adapter:
        if model.whole or not has_adapters(model.manifest):
            raise UsageError(f"--adapter: {source} holds a whole model; give the folder of a run that trains adapters")
        parameters = write_adapter(merged(model), model.manifest, out, tokenizer, about, carried, base)
    else:
        parameters = write_model(model_of(model, merged(model), base), model.manifest, out, tokenizer, about, carried)
    return {"model": str(out), "parameters": parameters, **about, **facts(model, SystemClock().unix_s())}
