from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from swarmnode.model.decoder import Decoder, Experts, SparseFeedForward, grouped
from swarmnode.model.documents import Documents, causal_attention
from swarmnode.model.split import initial, layer_flops, parameter_shapes, split
from swarmnode.run.manifest import DataSpec, Manifest, PipelineSpec, parse, template
from swarmnode.run.manifest.recipe import parameters_of
from tests.support.tiny_model import FAMILIES, TINY, manifest, randomised, stages_of, token_batch, train_on

TOKENS = DataSpec(tokenizer="tokenizer.json")


@pytest.mark.parametrize("family", FAMILIES)
def test_names_and_shapes_are_what_split_says(family):
    model = FAMILIES[family]
    assert parse(template(Manifest(model=model, data=TOKENS, pipeline=PipelineSpec(stages=1))), family).model == model
    for stages in (1, 3, 5):
        for part in split(model, stages):
            found = {name: tuple(value.shape) for name, value in Decoder(model, part).named_parameters()}
            assert found == parameter_shapes(model, part)
    assert parameters_of(model) == split(model, 1)[0].parameters


@pytest.mark.parametrize(
    ("family", "stages"), [*((family, 3) for family in FAMILIES), ("llama", 1), ("llama", 2), ("llama", 5)]
)
def test_stages_in_a_row_have_the_gradients_of_the_whole_model(family, stages):
    model = FAMILIES[family]
    chain = stages_of(manifest(model, stages), torch.float64)
    weights = randomised(model)
    for stage in chain:
        for name, view in stage.named(stage.theta).items():
            view.copy_(weights[name])
    net = Decoder(model, split(model, 1)[0]).double()
    net.load_state_dict(weights)
    for seed in range(2):  # gradients add up
        tokens = token_batch(model, 2, seed)
        logits = net(tokens[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="sum")
        (loss / model.context).backward()
        assert train_on(chain, tokens) == pytest.approx(loss.item(), rel=1e-12)
    assert all(stage.accumulated == 4 for stage in chain)
    found: dict[str, Tensor] = {}
    for stage in chain:
        for name, gradient in stage.named(stage.grad).items():
            found[name] = found[name] + gradient if name in found else gradient  # a tied table is at both ends
    for name, parameter in net.named_parameters():
        torch.testing.assert_close(found[name], parameter.grad, rtol=1e-9, atol=1e-12)


def test_attention_in_a_window_is_that_of_a_mask():
    q, k, v = (torch.randn(2, heads, 600, 8, dtype=torch.float64, requires_grad=True) for heads in (4, 2, 2))
    for window in (1, 7, 300, 599):
        age = torch.arange(600)[:, None] - torch.arange(600)
        mask = (age >= 0) & (age < window)
        expected = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
        torch.testing.assert_close(causal_attention(q, k, v, window), expected)
    for wide in (0, 600, 1000):
        expected = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        assert torch.equal(causal_attention(q, k, v, wide), expected)


def test_a_window_keeps_to_its_documents():
    model = FAMILIES["mistral"]
    net = Decoder(model, split(model, 1)[0]).double()
    net.load_state_dict(randomised(model))
    tokens = token_batch(model)[:1, :-1]
    tokens[0, 4] = 0
    tokens[0, 5:][tokens[0, 5:] == 0] = 1
    tokens[0, :4][tokens[0, :4] == 0] = 1
    both = net(tokens, Documents.of(tokens, 0))
    torch.testing.assert_close(both[:, :5], net(tokens[:, :5]))
    torch.testing.assert_close(both[:, 5:], net(tokens[:, 5:]))


def test_the_balance_loss_is_that_of_its_formula():
    """Its gradient reaches the router and the stream, per sample, and the output does not change."""
    model = replace(FAMILIES["mixtral"], layers=1, router_balance=0.3)
    plain = replace(model, router_balance=0.0)
    weights = {name: value.double() for name, value in randomised(model).items()}
    found = []
    x = torch.randn(3, 16, 32, dtype=torch.float64)
    for spec in (model, plain):
        mlp = SparseFeedForward(spec).double()
        prefix = "model.layers.0.mlp."
        mlp.load_state_dict({n.removeprefix(prefix): v for n, v in weights.items() if n.startswith(prefix)})
        leaf = x.clone().requires_grad_()
        y = mlp(leaf)
        loss = y.square().sum()
        if spec is plain:
            scores = mlp.gate(leaf.flatten(0, 1)).softmax(-1)
            share = torch.zeros_like(scores).scatter(1, scores.topk(2)[1], 1.0).mean(0)
            loss = loss + 3 * 0.3 * 4 * (share * scores.mean(0)).sum()
        loss.backward()
        found.append((y, leaf.grad, mlp.gate.weight.grad))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other)


def test_flops_count_active_experts_and_the_window():
    model = replace(TINY, experts=8, experts_active=2, expert_ffn=10, shared_expert_ffn=6, dense_layers=(0,))
    attention = 2 * 32 * (32 + 16)
    seen = 4 * 8 * 32
    assert layer_flops(model, 0) == 2 * (attention + 3 * 32 * 48) + seen
    assert layer_flops(model, 1) == 2 * (attention + 8 * 32 + 2 * 3 * 32 * 10 + 3 * 32 * 6 + 32) + seen
    window = replace(TINY, sliding_window=4, sliding_layers=(1,))
    assert layer_flops(window, 0) - layer_flops(window, 1) == pytest.approx(4 * 32 * (8 - (4 - 16 / 32)))


def test_initial_values_are_a_bell_of_the_right_width():
    matrix = initial(TINY, 7, "model.layers.0.mlp.up_proj.weight", (300, 400))
    std = (2 / 5 / 32) ** 0.5
    assert matrix.mean().abs() < 0.015 * std and matrix.std() == pytest.approx(std, rel=0.01)
    assert 3.2 * std < matrix.abs().max() <= 12**0.5 * std
    kurtosis = (matrix / matrix.std()).pow(4).mean()
    assert kurtosis == pytest.approx(2.7, abs=0.05)  # four uniforms; a normal has 3
    into_stream = initial(TINY, 7, "model.layers.0.mlp.down_proj.weight", (300, 400))
    assert into_stream.std() == pytest.approx(std / 10**0.5, rel=0.01)
    assert torch.equal(initial(TINY, 7, "model.norm.weight", (4,)), torch.ones(4))


def test_initial_values_depend_on_seed_and_name_and_never_change():
    q = initial(TINY, 7, "model.layers.0.self_attn.q_proj.weight", (2, 2))
    assert torch.equal(q, initial(TINY, 7, "model.layers.0.self_attn.q_proj.weight", (2, 2)))
    assert not torch.equal(q, initial(TINY, 8, "model.layers.0.self_attn.q_proj.weight", (2, 2)))
    assert not torch.equal(q, initial(TINY, 7, "model.layers.1.self_attn.q_proj.weight", (2, 2)))
    # Pinned: nodes of different builds must start alike.
    assert [value.hex() for value in q.flatten().tolist()] == PINNED


def test_initial_values_do_not_depend_on_the_chunk(monkeypatch):
    before = initial(TINY, 1, "lm_head.weight", (7, 9))
    monkeypatch.setattr("swarmnode.model.split.INIT_CHUNK_ELEMENTS", 10)
    assert torch.equal(initial(TINY, 1, "lm_head.weight", (7, 9)), before)


PINNED = ["0x1.a1fde20000000p-3", "-0x1.f54f2e0000000p-4", "-0x1.064f560000000p-4", "-0x1.b79eb40000000p-4"]


@pytest.mark.skipif(not hasattr(F, "grouped_mm"), reason="an older torch than the kernel")
def test_the_one_kernel_is_the_loop() -> None:
    torch.manual_seed(1)
    experts = Experts(4, 32, 16)
    counts = torch.tensor([5, 0, 9, 2])
    x = torch.randn(16, 32, requires_grad=True)
    expected = experts(x, counts)
    gates, ups, downs = (
        [getattr(expert, name).weight for expert in experts] for name in ("gate_proj", "up_proj", "down_proj")
    )
    found = grouped(F.silu(grouped(x, counts, gates)) * grouped(x, counts, ups), counts, downs)
    torch.testing.assert_close(found, expected)
    out = torch.randn_like(expected)
    for one, other in zip(
        torch.autograd.grad(found, (x, *gates, *ups, *downs), out),
        torch.autograd.grad(expected, (x, *gates, *ups, *downs), out),
        strict=True,
    ):
        torch.testing.assert_close(one, other)
