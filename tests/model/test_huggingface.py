"""Each family of models: logits, gradients, names and config.json are those of transformers, in both directions, and
published weights come into the stages of a run number by number."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import torch.nn.functional as F

from swarmnode.app.machine.replica import TorchReplica
from swarmnode.base.errors import DataError
from swarmnode.model.export import write_model
from swarmnode.model.export_tokenizer import byte_tokenizer
from swarmnode.model.gather import merged, of_export
from swarmnode.model.huggingface import FAMILIES as TABLE_OF_FAMILIES
from swarmnode.model.huggingface import canonical, config_of, source_names, spec_of
from swarmnode.model.split import HEAD, TABLE, parameter_shapes, split
from swarmnode.model.text_generation import whole_model
from swarmnode.run.manifest import DataSpec, Manifest, ModelSpec
from swarmnode.run.manifest.recipe import parameters_of
from swarmnode.train.node.base_fetcher import place, spans_of
from tests.support.published_model import VOCABULARY, start_from
from tests.support.tiny_model import FAMILIES, TINY, randomised, token_batch

pytestmark = pytest.mark.node  # seconds to import transformers

KINDS = {
    "llama3": "llama",
    "linear": "llama",
    "yarn": "llama",
    "tied": "llama",
    "biases": "llama",
}  # else the family's own name


def exported(model: ModelSpec, folder: Path) -> dict[str, torch.Tensor]:
    weights = randomised(model)
    write_model(weights, Manifest(model=model, data=DataSpec(tokenizer="t.json")), folder)
    return weights


@pytest.mark.parametrize("family", FAMILIES)
def test_transformers_loads_an_export_and_says_the_same(family: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    model = replace(FAMILIES[family], router_balance=0.0)  # theirs is added only when asked for
    weights = exported(model, tmp_path)
    theirs, loading = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, output_loading_info=True, experts_implementation="eager"
    )
    assert not loading["missing_keys"] and not loading["unexpected_keys"] and not loading["mismatched_keys"]
    kind = KINDS.get(family, family)
    assert config_of(model)["model_type"] == kind == theirs.config.model_type
    assert type(theirs).__name__ == TABLE_OF_FAMILIES[kind].architecture

    theirs = theirs.double()
    ours = whole_model(model, weights).double().requires_grad_()
    tokens = token_batch(model)
    logits = ours(tokens[:, :-1])
    expected = theirs(tokens[:, :-1]).logits
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-5)  # its norms are float32 inside
    for each in (logits, expected):
        F.cross_entropy(each.flatten(0, 1), tokens[:, 1:].flatten(), reduction="sum").backward()
    gradients = their_gradients(theirs)
    for name, parameter in ours.named_parameters():
        wanted = gradients[name]
        assert parameter.grad is not None
        assert (parameter.grad - wanted).norm() <= 1e-4 * wanted.norm() + 1e-7, name

    again = tmp_path / "again"
    theirs.float().save_pretrained(again)
    saved = safetensors.torch.load_file(again / "model.safetensors")
    names = source_names(model)
    assert saved.keys() == set(names.values())
    assert all(torch.equal(saved[names[name]], value) for name, value in weights.items())
    config = json.loads((again / "config.json").read_text())
    assert spec_of(config) == canonical(model)
    back = merged(of_export(tmp_path, Manifest(model=model), {}))
    assert all(torch.equal(back[name], value) for name, value in weights.items())


def their_gradients(net: Any) -> dict[str, torch.Tensor]:
    """By our names: transformers 5 stacks the matrices of experts, and gate above up."""
    found = {}
    for name, parameter in net.named_parameters():
        prefix, _, last = name.rpartition(".")
        if not prefix.endswith(".experts"):
            found[name] = parameter.grad
            continue
        for expert, gradient in enumerate(parameter.grad):
            if last == "down_proj":
                found[f"{prefix}.{expert}.down_proj.weight"] = gradient
            else:
                gate, up = gradient.chunk(2)
                found |= {f"{prefix}.{expert}.gate_proj.weight": gate, f"{prefix}.{expert}.up_proj.weight": up}
    return found


LLAMA3 = {
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
}


def config(kind: str, sizes: tuple[int, int, int, int, int, int], **more: Any) -> dict[str, Any]:
    keys = ("num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads", "intermediate_size",
            "vocab_size")  # fmt: skip
    return {
        "model_type": kind,
        **dict(zip(keys, sizes, strict=True)),
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        **more,
    }


PUBLISHED = {
    "SmolLM2-135M": (config("llama", (30, 576, 9, 3, 1536, 49152), tie_word_embeddings=True), 134_515_008),
    "Llama-3.2-1B": (
        config("llama", (16, 2048, 32, 8, 8192, 128256), head_dim=64, tie_word_embeddings=True, rope_scaling=LLAMA3),
        1_235_814_400,
    ),
    "Qwen2.5-0.5B": (
        config(
            "qwen2",
            (24, 896, 14, 2, 4864, 151936),
            tie_word_embeddings=True,
            sliding_window=32768,
            use_sliding_window=False,
            max_window_layers=21,
        ),
        494_032_768,
    ),
    "Qwen3-0.6B": (
        config("qwen3", (28, 1024, 16, 8, 3072, 151936), head_dim=128, tie_word_embeddings=True),
        596_049_920,
    ),
    "Mistral-7B-v0.1": (config("mistral", (32, 4096, 32, 8, 14336, 32000), sliding_window=4096), 7_241_732_096),
    "OLMo-2-1124-7B": (config("olmo2", (32, 4096, 32, 32, 11008, 100352)), 7_298_617_344),
    "OLMoE-1B-7B": (
        config("olmoe", (16, 2048, 16, 16, 1024, 50304), num_experts=64, num_experts_per_tok=8, clip_qkv=None),
        6_919_161_856,
    ),
    "Mixtral-8x7B": (
        config("mixtral", (32, 4096, 32, 8, 14336, 32000), num_local_experts=8, num_experts_per_tok=2),
        46_702_792_704,
    ),
    "Qwen3-30B-A3B": (
        config(
            "qwen3_moe",
            (48, 2048, 32, 4, 6144, 151936),
            head_dim=128,
            num_experts=128,
            num_experts_per_tok=8,
            moe_intermediate_size=768,
            norm_topk_prob=True,
            decoder_sparse_step=1,
            mlp_only_layers=[],
        ),
        30_532_122_624,
    ),
    "Qwen1.5-MoE-A2.7B": (
        config(
            "qwen2_moe",
            (24, 2048, 16, 16, 5632, 151936),
            num_experts=60,
            num_experts_per_tok=4,
            moe_intermediate_size=1408,
            shared_expert_intermediate_size=5632,
        ),
        14_315_784_192,
    ),
}
"""Published configurations, by the keys of transformers 4, and the number of parameters that their files hold."""


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_configuration_has_its_published_size(name: str) -> None:
    given, parameters = PUBLISHED[name]
    spec = spec_of(given, context=2048)
    assert parameters_of(spec) == parameters and spec.context == 2048
    made = config_of(spec)
    assert made["model_type"] == given["model_type"] and spec_of(made) == spec
    old = {key: value for key, value in made.items() if key != "rope_parameters"}
    new = {key: value for key, value in made.items() if key not in ("rope_theta", "rope_scaling")}
    assert spec_of(old) == spec_of(new) == spec


def test_smollm3_leaves_every_fourth_layer_unrotated() -> None:
    given = config("smollm3", (36, 2048, 16, 4, 11008, 128256), use_sliding_window=False, sliding_window=None)
    spec = spec_of(given)
    assert parameters_of(spec) == 3_075_098_624 and spec.tied and spec.rope_theta == 2e6
    assert spec.unrotated_layers == (3, 7, 11, 15, 19, 23, 27, 31, 35)
    assert spec_of({**given, "no_rope_layers": [1] * 35 + [0]}).unrotated_layers == (35,)


def test_an_untied_head_begins_as_the_published_table() -> None:
    assert source_names(TINY, TABLE)[HEAD] == TABLE
    assert HEAD not in source_names(replace(TINY, tied=True), TABLE)
    assert source_names(TINY)[HEAD] == HEAD
    assert source_names(replace(TINY, tied=True), HEAD)[TABLE] == HEAD


def test_a_model_that_transformers_does_not_have_is_refused(tmp_path: Path) -> None:
    model = replace(TINY, norm_placement="post", qkv_bias=True)
    with pytest.raises(DataError, match="no architecture of transformers has all"):
        exported(model, tmp_path)


GOOD = config("llama", (2, 32, 4, 2, 48, 50))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"model_type": "gpt2"}, r"model_type = 'gpt2'; known are llama, mistral"),
        ({"model_type": ["llama"]}, r"model_type = \['llama'\]; known"),
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"hidden_size": "32"}, r"hidden_size = '32': allowed is a whole number"),
        ({"hidden_size": 1 << 40}, r"hidden_size = 1099511627776: allowed is"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers = 1000000000: allowed is"),
        ({"num_attention_heads": 5}, "heads = 5: allowed is a divisor of model.width = 32"),
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu'; known is 'silu'"),
        ({"mlp_bias": True}, "mlp_bias = True; known is False"),
        ({"quantization_config": {"bits": 4}}, r"quantization_config = \{'bits': 4\}; known is None"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_type = 'dynamic'; known are default"),
        ({"rope_scaling": {"rope_type": "linear"}}, "factor is missing"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "low_freq_factor is missing"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "known is one set for all layers"),
        ({"rope_scaling": [1]}, r"rope_parameters = \[1\]"),
        ({"rms_norm_eps": -1}, "rms_norm_eps = -1: allowed is"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings = 'yes': allowed is true or false"),
        ({"model_type": "olmoe", "num_experts": 4}, "num_experts_per_tok is missing"),
        ({"model_type": "olmoe", "num_experts": 4, "num_experts_per_tok": 9}, "experts_active = 9: allowed is 1 to"),
        ({"model_type": "olmoe", "num_experts": 4, "num_experts_per_tok": 1, "clip_qkv": 8.0}, "clip_qkv = 8.0"),
        (
            {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 4, "layer_types": [{}, {}]},
            "layer_types = ",
        ),
        ({"model_type": "smollm3", "no_rope_layers": [1]}, r"no_rope_layers = \[1\]: allowed is"),
    ],
)
def test_a_config_that_lies_gets_one_line(change: dict[str, Any], says: str) -> None:
    with pytest.raises(DataError, match=says) as caught:
        spec_of({**GOOD, **change})
    assert "\n" not in str(caught.value)


def test_a_context_longer_than_the_model_was_made_for_is_refused() -> None:
    with pytest.raises(DataError, match="the model was made for 4096 tokens at most, not for 5000"):
        spec_of(GOOD, context=5000)


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
