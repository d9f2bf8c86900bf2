import pytest
import torch
from torch import Tensor

from swarmnode.manifest import ModelSpec
from swarmnode.model.llama import Llama, RMSNorm, initial
from swarmnode.model.split import parameter_shapes, split
from tests.model.tiny import TINY, token_batch


def whole(model: ModelSpec = TINY, seed: int = 7) -> Llama:
    part = split(model, 1)[0]
    net = Llama(model, part)
    net.load_state_dict({name: initial(model, seed, name, s) for name, s in parameter_shapes(model, part).items()})
    return net


def test_names_and_shapes_are_what_split_says():
    for stages in (1, 3, 5):
        for part in split(TINY, stages):
            found = {name: tuple(value.shape) for name, value in Llama(TINY, part).named_parameters()}
            assert found == parameter_shapes(TINY, part)


def test_rms_norm_has_the_gradient_of_its_formula():
    norm = RMSNorm(6, 1e-5).double()
    x = torch.randn(2, 3, 6, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(6, dtype=torch.float64, requires_grad=True)

    def run(x: Tensor, weight: Tensor) -> Tensor:
        return torch.func.functional_call(norm, {"weight": weight}, (x,))

    torch.testing.assert_close(run(x, weight), x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5) * weight)
    assert torch.autograd.gradcheck(run, (x, weight))


def test_attention_is_causal():
    net = whole()
    a = token_batch()[:, :-1]
    b = a.clone()
    b[:, 9] = (b[:, 9] + 1) % TINY.vocabulary
    with torch.no_grad():
        same = (net(a) - net(b)).abs().amax((0, 2)) < 1e-6
    assert same[:9].all() and not same[9:].any()


def test_logits_and_gradients_are_those_of_hugging_face():
    transformers = pytest.importorskip("transformers")
    from swarmnode.model.export import huggingface_config

    config = transformers.LlamaConfig(**{k: v for k, v in huggingface_config(TINY).items() if k != "architectures"})
    theirs, ours = transformers.LlamaForCausalLM(config).double(), whole().double()
    theirs.load_state_dict(ours.state_dict())
    tokens = token_batch()[:, :-1]
    logits = ours(tokens)
    torch.testing.assert_close(logits, theirs(tokens).logits, rtol=0, atol=2e-6)  # its norms are float32 inside
    logits.square().sum().backward()
    theirs(tokens).logits.square().sum().backward()
    expected = {name: parameter.grad for name, parameter in theirs.named_parameters()}
    for name, parameter in ours.named_parameters():
        assert (parameter.grad - expected[name]).norm() < 1e-5 * expected[name].norm(), name


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
    monkeypatch.setattr("swarmnode.model.llama.INIT_CHUNK_ELEMENTS", 10)
    assert torch.equal(initial(TINY, 1, "lm_head.weight", (7, 9)), before)


PINNED = ["0x1.a1fde20000000p-3", "-0x1.f54f2e0000000p-4", "-0x1.064f560000000p-4", "-0x1.b79eb40000000p-4"]
