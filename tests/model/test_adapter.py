"""Adapters beside frozen weights: a pipeline of stages computes what plain PyTorch does with W + s B A in the whole."""

import math
from collections.abc import Mapping
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from swarmnode.app.machine.replica import TorchReplica
from swarmnode.model.adapter import LORA_A, LORA_B, frozen_nbytes, initial_adapter, trained_count, trained_shapes
from swarmnode.model.decoder import Decoder
from swarmnode.model.frozen import FrozenWeight, whole_weights
from swarmnode.model.section import section_sizes
from swarmnode.model.split import initial, parameter_shapes, split
from swarmnode.model.stage import StageReplica
from swarmnode.run.manifest import Manifest, ModelSpec, TrainingSpec
from tests.model.test_stage import check_tape
from tests.support.tiny_model import TINY, manifest, stages_of, token_batch, train_on

MODEL = replace(TINY, width=64, ffn=128)
WHOLE = split(MODEL, 1)[0]


FAMILIES = {
    "llama": MODEL,
    "qwen2": replace(MODEL, qkv_bias=True, tied=True),
    "olmo2": replace(MODEL, norm_placement="post", qk_norm="whole", head_width=12),
    "qwen2-moe": replace(MODEL, experts=4, experts_active=2, expert_ffn=32, shared_expert_ffn=64, router_balance=0.01),
}


def adapting(stages: int = 3, model: ModelSpec = MODEL, **training: object) -> Manifest:
    spec = replace(TrainingSpec(kind="adapters", rank=4, base_format="fp32"), **training)  # type: ignore[arg-type]
    return replace(manifest(model, stages, optimizer="adamw"), training=spec)


def base_of(run: Manifest) -> dict[str, Tensor]:
    shapes = parameter_shapes(run.model, split(run.model, 1)[0])
    return {name: initial(run.model, run.seed, name, shape) for name, shape in shapes.items()}


def unsettled(stages: list[StageReplica]) -> dict[str, Tensor]:
    """Give every adapter of `stages` other values than the initial ones; returns copies by name."""
    generator = torch.Generator().manual_seed(3)
    found = {}
    for stage in stages:
        for name, view in stage.named(stage.theta).items():
            view.add_(0.1 * torch.randn(view.shape, generator=generator, dtype=torch.float64))
            found[name] = view.clone()
    return found


def dense(run: Manifest, base: Mapping[str, Tensor], adapters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The model's weights with adapters, differentiable in these: the papers' equations, written out."""
    weights = {}
    for name, weight in base.items():
        stem = name.removesuffix(".weight")
        changed = weight
        if stem + LORA_B in adapters:
            factor = run.training.alpha / run.training.rank
            changed = weight + factor * adapters[stem + LORA_B] @ adapters[stem + LORA_A]
        weights[name] = changed
    return weights


@pytest.mark.parametrize(
    ("family", "targets"), [(name, TrainingSpec().targets) for name in FAMILIES] + [("llama", ("q_proj", "down_proj"))]
)
def test_a_pipeline_of_stages_equals_the_whole_model_with_dense_changes(family: str, targets: tuple[str, ...]) -> None:
    model = FAMILIES[family]
    run = adapting(model=model, targets=targets)
    tokens = token_batch(model)
    chain = stages_of(run, torch.float64)
    adapters = {name: value.requires_grad_() for name, value in unsettled(chain).items()}
    assert {name.rpartition(".")[0].rpartition(".")[2] for name in adapters} == set(targets)
    base = {name: weight.double() for name, weight in base_of(run).items()}
    net = Decoder(model, split(model, 1)[0]).double()
    logits = torch.func.functional_call(net, dense(run, base, adapters), (tokens[:, :-1],))
    expected = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="sum")

    assert train_on(chain, tokens) == pytest.approx(expected.item(), rel=1e-9)
    (expected / model.context).backward()
    for stage in chain:
        assert all(value.grad is None for value in stage.module.parameters() if not value.requires_grad)
        for name, found in stage.named(stage.grad).items():
            torch.testing.assert_close(found, adapters[name].grad, rtol=0, atol=1e-10)


@pytest.mark.parametrize("kind", ["bf16", "int8", "nf4"])
def test_experts_are_frozen_in_few_bytes(kind: str) -> None:
    run = adapting(model=FAMILIES["qwen2-moe"], base_format=kind)
    tokens = token_batch(MODEL)
    chain = stages_of(run)
    first = train_on(chain, tokens)
    merged = whole_weights(run, {k: v for stage in chain for k, v in stage.named(stage.theta).items()}, None)
    net = Decoder(run.model, split(run.model, 1)[0])
    net.load_state_dict(merged)
    loss = F.cross_entropy(net(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten(), reduction="sum")
    assert first == pytest.approx(loss.item(), rel=1e-5)
    for stage in chain:
        tables = {"cos", "sin"}
        held = sum(value.nbytes for name, value in stage.module.named_buffers() if name not in tables)
        vectors = sum(value.nbytes for value in stage.module.parameters() if not value.requires_grad)
        assert held + vectors == frozen_nbytes(run, stage.part)


def test_a_step_moves_adapters_and_leaves_the_base() -> None:
    run = adapting()
    tokens = token_batch(MODEL)
    chain = stages_of(run)
    frozen = [buffer.clone() for stage in chain for buffer in stage.module.buffers()]
    losses = []
    for _ in range(6):
        losses.append(train_on(chain, tokens))
        for stage in chain:
            stage.step(run.inner.warmup_samples)
    assert losses[-1] < losses[0] - 0.5 * tokens[:, 1:].numel()
    for before, now in zip(frozen, (b for stage in chain for b in stage.module.buffers()), strict=True):
        assert torch.equal(before, now)
    base = base_of(run)
    adapters = {k: v.detach() for stage in chain for k, v in stage.named(stage.theta).items()}
    merged = whole_weights(run, adapters, None)
    net = Decoder(MODEL, WHOLE)
    net.load_state_dict(merged)
    loss = F.cross_entropy(net(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten(), reduction="sum")
    assert train_on(chain, tokens) == pytest.approx(loss.item(), rel=1e-5)
    assert all(torch.equal(merged[name], base[name]) for name in base if "proj" not in name)


def test_a_fresh_adapter_depends_on_seed_and_name_alone_and_changes_nothing() -> None:
    run = adapting()
    tokens = token_batch(MODEL)
    drawn = {name: initial_adapter(run, name, shape) for name, shape in trained_shapes(run, WHOLE).items()}
    for stage in stages_of(run):
        for name, view in stage.named(stage.theta).items():
            assert torch.equal(view, drawn[name])
    name = "model.layers.1.mlp.down_proj" + LORA_A
    assert drawn[name].std() == pytest.approx(1 / math.sqrt(3 * MODEL.ffn), rel=0.1)
    assert not torch.equal(drawn[name], initial_adapter(replace(run, seed=8), name, (4, MODEL.ffn)))
    assert all(not value.any() for name, value in drawn.items() if not name.endswith(LORA_A))
    plain = replace(run, training=TrainingSpec())
    assert train_on(stages_of(run), tokens) == pytest.approx(train_on(stages_of(plain), tokens), rel=1e-5)


@pytest.mark.parametrize(("kind", "error"), [("fp32", 0.0), ("bf16", 2**-9), ("int8", 0.02), ("nf4", 0.12)])
def test_a_frozen_format_is_near_the_weight_and_as_large_as_planned(kind: str, error: float) -> None:
    run = adapting(base_format=kind)
    weight = initial(MODEL, 1, "model.layers.0.mlp.up_proj.weight", (MODEL.ffn, MODEL.width))
    weight[3] = 0.0
    coded = FrozenWeight.of(weight, kind)
    found = coded.dense(torch.float32)
    assert float((found - weight).norm() / weight.norm()) <= error
    assert torch.equal(found[3], weight[3])
    again = FrozenWeight.of(found, kind).dense(torch.float32)
    assert kind == "int8" or torch.equal(again, found)

    x = torch.randn(5, MODEL.width, generator=torch.Generator().manual_seed(0)).requires_grad_()
    y = coded.times(x)
    torch.testing.assert_close(y, x @ found.T)
    (gradient,) = torch.autograd.grad(y, x, torch.ones_like(y))
    torch.testing.assert_close(gradient, torch.ones_like(y) @ found)
    for stage in stages_of(run):
        held = sum(buffer.nbytes for buffer in stage.module.buffers())
        norms = sum(value.nbytes for value in stage.module.parameters() if not value.requires_grad)
        tables = stage.module.cos.nbytes + stage.module.sin.nbytes
        assert held - tables + norms == frozen_nbytes(run, stage.part)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_only_adapters_are_kept_sent_and_loaded(optimizer: str) -> None:
    run = adapting()
    run = replace(run, inner=replace(run.inner, optimizer=optimizer))
    one = TorchReplica(run, 1)
    other = TorchReplica(run, 1)
    part = one.stage.part
    count = trained_count(run, part)
    assert count < part.parameters / 3
    assert set(section_sizes(run, part).values()) == {count} and one.stage.parameters == count
    unsettled([one.stage])
    state = one.snapshot(packed=True)
    assert sum(section.nbytes for section in state.sections.values()) <= 12 * count
    other.load(state)
    assert torch.allclose(one.stage.theta, other.stage.theta, atol=2**-6)
    assert one.outer.message_nbytes < 5 * count
    assert ("exp_avg_sq" in state.sections) == (optimizer == "adamw")


@pytest.mark.parametrize("autocast", [False, True])
def test_a_tape_is_as_large_as_planned(autocast: bool) -> None:
    check_tape(adapting(base_format="bf16"), 1, autocast, rel=0.15)
