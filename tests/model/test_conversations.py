"""From conversations in a file to the loss: a pipeline learns the answers alone, each conversation read by itself."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from swarmnode.app.local.evaluation import evaluate
from swarmnode.base.errors import DataError
from swarmnode.data.chat_template import ChatTemplate
from swarmnode.data.indexed import open_indexed
from swarmnode.data.sample import IGNORED
from swarmnode.data.set_maker import Encoding, MakeOptions, make
from swarmnode.data.tokens import ByteTokenizer
from swarmnode.model.decoder import Decoder
from swarmnode.model.gather import Gathered, StageCopy
from swarmnode.model.split import split
from swarmnode.run.manifest import DataSpec, ModelSpec
from tests.support.tiny_model import ascend, manifest, stages_of, train_on

MODEL = ModelSpec(layers=3, width=32, heads=4, kv_heads=2, ffn=48, context=96, vocabulary=256)


def test_answers_alone_are_learnt_each_conversation_by_itself(tmp_path: Path) -> None:
    chats = [
        [{"role": "user", "content": f"how many {n}"}, {"role": "assistant", "content": f"{n} of them"}]
        for n in range(60)
    ]
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats))
    options = MakeOptions((str(tmp_path / "chats.jsonl"),), chunk_tokens=385, validation=0.2)
    index, _ = make(
        tmp_path / "set", options, Encoding(ByteTokenizer(), ChatTemplate()), lambda rendered: {}, lambda *told: None
    )
    data = DataSpec(source="index", index=index.digest.hex(), end_token=0, documents="masked", block_samples=4)
    run = replace(manifest(MODEL), data=data)
    corpus = open_indexed(run, tmp_path / "set", tmp_path / "cache")
    batch = corpus.batch(range(4))
    assert batch.loss_mask is not None and (batch.tokens == 0).any()

    chain = stages_of(run, torch.float64)
    weights = {name: view.clone() for stage in chain for name, view in stage.named(stage.theta).items()}
    net = Decoder(MODEL, split(MODEL, 1)[0]).double()
    net.load_state_dict(weights)
    expected = torch.zeros((), dtype=torch.float64)
    counted = 0
    for ids, mask in zip(batch.tokens.astype(np.int64), batch.loss_mask, strict=True):
        ends = np.flatnonzero(ids == 0) + 1
        for said, counts in zip(np.split(ids, ends), np.split(mask, ends), strict=True):
            if len(said) > 1 and counts[1:].any():
                targets = torch.from_numpy(np.where(counts[1:], said[1:], IGNORED))
                logits = net(torch.from_numpy(said[None, :-1]))[0]
                expected = expected + F.cross_entropy(logits, targets, reduction="sum", ignore_index=IGNORED)
                counted += int(counts[1:].sum())
    assert 0 < counted < batch.tokens[:, 1:].size / 2
    assert train_on(chain, batch.to_wire()) == pytest.approx(expected.item(), rel=1e-9)
    (expected / counted).backward()
    for stage in chain:
        for name, found in stage.named(stage.grad / stage._weight).items():
            torch.testing.assert_close(found, dict(net.named_parameters())[name].grad, rtol=0, atol=1e-10)

    copies = tuple(StageCopy("", {k: v.float() for k, v in stage.named(stage.theta).items()}, "") for stage in chain)
    found = evaluate(Gathered(run, "ab", 1, 4, copies, "copies"), tmp_path / "set", tmp_path / "cache", 4)  # type: ignore[assignment]
    held_out = corpus.validation_batch(0, 4, 4)
    x, _ = ascend(chain, held_out.to_wire())
    result = chain[-1].loss(x, held_out.to_wire(), len(held_out), train=False)
    assert found.tokens == result.tokens < held_out.tokens[:, 1:].size / 2  # type: ignore[attr-defined]
    assert found.merged == pytest.approx(result.loss_sum / result.tokens, rel=1e-5)  # type: ignore[attr-defined]
    (tmp_path / "index alone").mkdir()
    (tmp_path / "index alone" / "index.json").write_bytes((tmp_path / "set" / "index.json").read_bytes())
    with pytest.raises(DataError, match="not on this machine yet: give --data FOLDER"):
        evaluate(Gathered(run, "ab", 1, 4, copies, "copies"), tmp_path / "index alone", tmp_path / "cache", 4)
