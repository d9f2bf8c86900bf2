"""Every family's published weights come into the stages of a run that starts from them, number by number."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from swarmnode.machine.replica import TorchReplica
from swarmnode.manifest import DataSpec, Manifest
from swarmnode.model.export import byte_tokenizer, write_model
from swarmnode.model.huggingface import canonical
from swarmnode.model.split import parameter_shapes, split
from swarmnode.node.base_fetcher import place, spans_of
from tests.support.published_model import VOCABULARY, start_from
from tests.support.tiny_model import FAMILIES, randomised

pytestmark = pytest.mark.node  # seconds to import transformers


OWN_TENSORS = ("tied", "qwen2", "qwen3_moe", "olmo2", "qwen2_moe")  # the others have the names and shapes of these


@pytest.mark.parametrize(
    "family", [pytest.param(name, marks=[pytest.mark.nightly] * (name not in OWN_TENSORS)) for name in FAMILIES]
)
def test_each_stage_has_the_numbers_that_were_published(family: str, tmp_path: Path) -> None:
    model = replace(FAMILIES[family], vocabulary=VOCABULARY)
    weights = randomised(model)
    folder = tmp_path / "model"
    write_model(weights, Manifest(model=model, data=DataSpec(tokenizer="t.json")), folder)
    (folder / "tokenizer.json").write_text(json.dumps(byte_tokenizer()))
    made = start_from(folder, Manifest(), context=model.context)
    run = made.recipe.manifest
    run = replace(run, pipeline=replace(run.pipeline, stages=2), inner=replace(run.inner, average_share=0.0))
    assert run.model == canonical(model)
    held = dict[str, torch.Tensor]()
    for part in split(run.model, 2):
        replica = TorchReplica(run, part.stage)
        for number, spans in spans_of(made.index, parameter_shapes(run.model, part)).items():
            chunk = made.index.chunk(number)
            data = (folder / chunk.shard).read_bytes()[chunk.offset : chunk.offset + chunk.nbytes]
            place(replica, data, spans)
        replica.weights_placed()
        held |= replica.stage.named(replica.outer.phi)
        assert torch.equal(replica.outer.phi, replica.stage.theta) and replica.stage.bump_steps == 0
    assert held.keys() == weights.keys(), "a tied model stays tied"
    assert all(torch.equal(held[name], value.float()) for name, value in weights.items())
