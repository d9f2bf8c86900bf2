import dataclasses
import json
import math

import numpy as np
import pytest
import torch

from benchmarks.swarm import learning, learning_page, plain_grid, pytorch_learning
from benchmarks.swarm.learning_swarm import SwarmRun, Validation
from benchmarks.swarm.plain_grid import GridConditions, PlainRun
from benchmarks.swarm.plain_model import PlainLlama, initialise
from benchmarks.swarm.pytorch_learning import GridPoint, LossPoint, TrainingTask, train
from swarmnode.base.errors import UsageError
from swarmnode.data.corpus import open_corpus
from swarmnode.run.manifest import Manifest, ModelSpec, PipelineSpec

SMALL = ModelSpec(layers=2, width=32, heads=4, kv_heads=2, ffn=48, context=24)
ADAMW = GridPoint("adamw", 8, 1e-2)
MUON = GridPoint("muon", 8, 2e-2)
THEIRS = {
    "attention_norm": "input_layernorm",
    "feed_norm": "post_attention_layernorm",
    **{short: f"self_attn.{short}_proj" for short in "qkvo"},
    **{short: f"mlp.{short}_proj" for short in ("gate", "up", "down")},
}


@pytest.fixture
def manifest():
    return Manifest(model=SMALL, pipeline=PipelineSpec(stages=2, validation_samples=16))


@pytest.fixture
def ground(manifest, tmp_path):
    return GridConditions(learning._signed(tmp_path / "run", manifest), tmp_path / "cache", manifest, False)


def hugging_face_name(name: str) -> str:
    match name.split("."):
        case ["layers", number, part, "weight"]:
            return f"model.layers.{number}.{THEIRS[part]}.weight"
        case ["head", "weight"]:
            return "lm_head.weight"
        case ["embedding", "weight"]:
            return "model.embed_tokens.weight"
    return f"model.{name}"


def test_the_plain_model_is_hugging_faces():
    transformers = pytest.importorskip("transformers")
    net = PlainLlama(SMALL)
    initialise(net, SMALL, 3)
    config = transformers.LlamaConfig(
        vocab_size=SMALL.vocabulary,
        hidden_size=SMALL.width,
        intermediate_size=SMALL.ffn,
        num_hidden_layers=SMALL.layers,
        num_attention_heads=SMALL.heads,
        num_key_value_heads=SMALL.kv_heads,
        max_position_embeddings=SMALL.context,
        rms_norm_eps=SMALL.norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": SMALL.rope_theta},
        tie_word_embeddings=False,
    )
    theirs = transformers.LlamaForCausalLM(config)
    theirs.load_state_dict({hugging_face_name(name): value for name, value in net.state_dict().items()})
    tokens = torch.randint(0, 256, (3, SMALL.context), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        torch.testing.assert_close(net(tokens), theirs(tokens).logits, rtol=0, atol=1e-4)


@pytest.mark.parametrize("setting", [ADAMW, MUON], ids=str)
def test_the_plain_process_learns(ground, manifest, setting):
    corpus = open_corpus(manifest, ground.data, ground.cache)
    task = TrainingTask(str(ground.signed), str(ground.cache), setting, 1024)
    looks = train(task, manifest, corpus)
    assert [look.samples for look in looks] == [256, 512, 768, 1024]
    assert looks[-1].nats < looks[0].nats < math.log(256)
    assert 0 < looks[0].core_s < looks[-1].core_s
    again = train(dataclasses.replace(task, samples=256), manifest, corpus)
    assert again[-1].nats == looks[0].nats  # a longer run begins like a shorter one: journals rely on it


def test_held_out_loss_is_of_the_samples_that_the_swarm_validates_on(ground, manifest):
    from swarmnode.train.node.chunk_samples import CorpusSamples

    corpus = open_corpus(manifest, ground.data, ground.cache)
    net = PlainLlama(SMALL)
    initialise(net, SMALL, 0)
    theirs = [
        np.frombuffer(one.data, dtype="<u2").reshape(one.shape) for one in CorpusSamples(corpus, manifest).held_out()
    ]
    tokens = torch.from_numpy(np.concatenate(theirs).astype("int64"))
    with torch.no_grad():
        expected = torch.nn.functional.cross_entropy(net(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
    assert len(tokens) == manifest.pipeline.validation_samples
    task = TrainingTask(str(ground.signed), str(ground.cache), ADAMW, 0)
    assert pytorch_learning.held_out(net, manifest, corpus, task) == pytest.approx(float(expected), rel=1e-5)


def curve(setting: GridPoint, decades: float, threads: int = 1) -> PlainRun:
    """From 4 nats at 100 samples and 1 s, `decades` nats less a decade."""
    looks = [LossPoint(100 * 10**i, 4.0 - decades * i, 10.0**i, 10.0**i, 4.0 - decades * i) for i in range(3)]
    return PlainRun(setting, 0, threads, plain_grid.machine(), tuple(looks))


def reported(**changed):
    swarm = SwarmRun(2, 0, 1000, 40.0, 20.0, (Validation(100, 3.5, 4.0, 2.0), Validation(1000, 2.5, 40.0, 20.0)))
    plain = [curve(ADAMW, 1.0), curve(MUON, 2.0)]
    return learning.report(Manifest(), plain, curve(ADAMW, 1.0, 2), [dataclasses.replace(swarm, **changed)], 1000)


def test_a_swarm_is_held_against_the_plain_curves():
    row = reported()["swarms"][0]
    assert row["AdamW needs"]["value"] == pytest.approx(10**3.5)
    assert row["efficiency"]["value"] == pytest.approx(10**0.5) and row["efficiency"]["bound"] == ""
    assert row["of Muon"]["value"] == pytest.approx(10 ** (2 + 0.75 - 3))
    assert row["of core s"]["value"] == pytest.approx(10**1.5 / 40)
    assert row["of wall s"]["value"] == pytest.approx(10**1.5 / 20)
    assert (row["nodes"], row["tokens_per_s"]) == (6, 6400.0)
    assert row["s to plain's loss"] == {"value": 20.0, "bound": ">"}  # plain's last loss is 2, the swarm's 2.5


def test_a_loss_below_the_plain_curve_is_a_bound():
    found = reported(validations=(Validation(100, 3.5, 4.0, 2.0), Validation(1000, 1.5, 40.0, 20.0)))
    assert found["swarms"][0]["efficiency"] == {"value": 10.0, "bound": ">"}
    assert learning.shown(found)["swarms"][0]["efficiency"] == "> 10"
    assert found["swarms"][0]["s to plain's loss"]["value"] < 20.0


def test_the_page_has_every_curve_and_loads_nothing():
    found = json.loads(json.dumps(learning._without_nan(reported()), allow_nan=False))
    page = learning_page.page(found)
    assert page.count("<svg") == 3 and page.count("<polyline") == 3 + 3 + 1
    assert "plain AdamW" in page and "plain Muon" in page and "2 a stage" in page
    assert "http" not in page and "<script" not in page


def test_a_run_that_plain_pytorch_does_not_train_alike_is_refused(manifest):
    apart = dataclasses.replace(manifest, data=dataclasses.replace(manifest.data, documents="masked"))
    with pytest.raises(UsageError, match=r'set data\.documents = "joined"'):
        learning.run(apart, (), learning.FAST_EXTENT, None, print)  # type: ignore[arg-type]
