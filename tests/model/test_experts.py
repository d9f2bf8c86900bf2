"""A small model with experts learns in two stages, and uses its experts."""

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from swarmnode.model.decoder import Experts, SparseFeedForward, grouped
from swarmnode.model.stage import StageReplica
from tests.support.tiny_model import TINY, manifest, stages_of, train_on

SPARSE = replace(
    TINY, layers=2, experts=8, experts_active=2, expert_ffn=24, shared_expert_ffn=16, router_normalised=True
)
STEPS = 40


def cycles(seed: int) -> Tensor:
    """Token ids [8, T + 1] that count up by a step of 1 to 3 from anywhere: a model learns them to some tenths."""
    chance = torch.Generator().manual_seed(seed)
    first, step = (torch.randint(low, high, (8, 1), generator=chance) for low, high in ((0, 50), (1, 4)))
    return (first + step * torch.arange(TINY.context + 1)) % TINY.vocabulary


def uneven(chain: list[StageReplica]) -> float:
    """E · sum f_e P_e / A, the mean of the layers, on text that was not trained on; 1 is even."""
    found: list[float] = []

    def look(mlp: SparseFeedForward, given: tuple[Tensor], _: Tensor) -> None:
        scores = mlp.gate(given[0].flatten(0, 1)).softmax(-1)
        chosen = scores.topk(mlp.active)[1]
        share = torch.bincount(chosen.flatten(), minlength=SPARSE.experts) / len(scores)
        found.append(float((share * scores.mean(0)).sum()) * SPARSE.experts / mlp.active)

    handles = [
        module.register_forward_hook(look)
        for stage in chain
        for module in stage.module.modules()
        if isinstance(module, SparseFeedForward)
    ]
    x = cycles(1000)[:, :-1]
    with torch.no_grad():
        for stage in chain:
            x = stage.module.hidden(x)
    for handle in handles:
        handle.remove()
    assert len(found) == SPARSE.layers
    return sum(found) / len(found)


@pytest.mark.node
@pytest.mark.parametrize("optimizer", ["muon", pytest.param("adamw", marks=pytest.mark.nightly)])
def test_experts_learn_in_two_stages(optimizer: str) -> None:
    found = {}
    for balance in (0.0, 1.0):
        model = replace(SPARSE, router_balance=balance)
        run = manifest(
            model,
            stages=2,
            optimizer=optimizer,
            learning_rate=0.01,
            muon_learning_rate=0.02,
            muon_momentum=0.95,  # with it, uses are uneven without a balance
        )
        chain = stages_of(run)
        losses = []
        for step in range(STEPS):
            losses.append(train_on(chain, cycles(step)) / (8 * model.context))
            for stage in chain:
                stage.step(8 * step + 8)
        assert losses[0] > math.log(50) - 0.3 and losses[-1] < 2.3, losses
        experts = [view for stage in chain for name, view in stage.named(stage.exp_avg).items() if ".experts." in name]
        assert len(experts) == 2 * 8 * 3 and sum(bool(view.any()) for view in experts) > len(experts) // 2
        found[balance] = uneven(chain)
    assert found[1.0] < found[0.0] and found[1.0] < 1.1, found


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
