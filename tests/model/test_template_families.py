"""A model fine-tuned on conversations answers with its own template after export, in `chat` and in transformers."""

import io
import json
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import transformers

from swarmnode.app.cli.main import main
from swarmnode.data.indexed import document_of, index_of
from swarmnode.data.sample import IGNORED
from swarmnode.data.tokenizer_file import carried_files, tokenizer_file
from swarmnode.model.export import write_model
from swarmnode.run.manifest import DataSpec, ModelSpec
from tests.data.test_chat_template import FAMILIES, save, unmarked
from tests.support.tiny_model import manifest, plain_model, stages_of

PIECES = ("llama2", "mistral", "gemma")
"""Families with tokenizers in the form of SentencePiece; the others have byte-level ones."""
ANSWERS = {"a boat?": "the river", "the rain?": "went down 1 2", "user?": "so the boat fell", "it's 3?": "and it's <b>"}
STEPS = 150


@pytest.mark.parametrize("family", FAMILIES)
def test_a_tuned_model_answers_with_its_own_template(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = save(tmp_path / "model", "SentencePiece" if family in PIECES else "byte-level", unmarked(FAMILIES[family]))
    rows = [[{"role": "user", "content": q}, {"role": "assistant", "content": a}] for q, a in ANSWERS.items()]
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps({"messages": row}) + "\n" for row in rows))
    given = ["data", "make", str(tmp_path / "set"), "--from", str(tmp_path / "chats.jsonl"), "--tokenizer", str(path)]
    assert main([*given, "--weight", "40"]) == 0, capsys.readouterr().err
    index = index_of(tmp_path / "set")

    model = ModelSpec(layers=2, width=64, heads=4, kv_heads=2, ffn=128, context=64, vocabulary=index.vocabulary)
    data = DataSpec("index", index=index.digest.hex(), tokenizer="tokenizer.json", end_token=index.end_token)
    run = replace(manifest(model, 1), data=replace(data, documents="masked"))
    documents = [document_of(tmp_path / "set", index, "train", row) for row in range(8)]
    length = max(len(ids) for ids, _ in documents)
    batch = torch.zeros(8, length - 1, dtype=torch.int64)
    targets = torch.full((8, length - 1), IGNORED)
    for row, (ids, counts) in enumerate(documents):
        batch[row, : len(ids) - 1] = torch.from_numpy(ids[:-1].astype(np.int64))
        targets[row, : len(ids) - 1] = torch.from_numpy(np.where(counts[1:], ids[1:].astype(np.int64), IGNORED))
    net = plain_model(stages_of(run), torch.float32)
    optimizer = torch.optim.AdamW(net.parameters(), 3e-3)
    for _ in range(STEPS):
        optimizer.zero_grad()
        F.cross_entropy(net(batch).flatten(0, 1), targets.flatten(), ignore_index=IGNORED).backward()
        optimizer.step()
    tokenizer = tokenizer_file(tmp_path / "set", run.data)
    about = {"kind": "a test", "run_id": "00", "run_name": family, "round": 1, "samples": 1, "made_unix_s": time.time()}
    tensors = {name: value.detach() for name, value in net.state_dict().items()}
    write_model(tensors, run, tmp_path / "out", tokenizer, about, carried_files(None, "", tokenizer))

    capsys.readouterr()
    hub = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    learnt = hub.decode(documents[0][0])
    question, answer = next((q, a) for q, a in ANSWERS.items() if q in learnt)
    monkeypatch.setattr(sys, "stdin", io.StringIO(f"{question}\n\n"))
    assert main(["chat", str(tmp_path / "out"), "--temperature", "0", "--tokens", "20"]) == 0
    assert capsys.readouterr().out.strip() == answer
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    talk = [{"role": "user", "content": question}]
    prompt = hub.apply_chat_template(talk, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    made = theirs.generate(**prompt, do_sample=False, max_new_tokens=20)[0, prompt["input_ids"].shape[1] :]
    assert len(made) < 20, "it stops by itself"
    assert hub.decode(made, skip_special_tokens=True).strip() == answer
