"""Training through a few numbers a token is training: compressed and uncompressed agree to rounding."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from swarmnode.manifest import InnerSpec, ModelSpec
from swarmnode.model.llama import Llama, initial
from swarmnode.model.split import parameter_shapes, split
from swarmnode.model.subspace import TABLE, Subspace, SubspaceAdamW, basis, is_writer

MODEL = ModelSpec(layers=4, width=32, heads=4, kv_heads=2, ffn=48, context=16, vocabulary=50)
RANK = 6


class Line:
    """Stages in one process; between them X itself, or Z and its gradient only."""

    def __init__(self, *, compressed: bool, stages: int = 3) -> None:
        table = initial(MODEL, 0, TABLE, (MODEL.vocabulary, MODEL.width)).double()
        self.subspace, self.compressed = Subspace(basis(MODEL.width, RANK, 0), table), compressed
        self.parts: list[Llama] = []
        for part in split(MODEL, stages):
            net = Llama(MODEL, part).double()
            for name, shape in parameter_shapes(MODEL, part).items():
                net.get_parameter(name).data.copy_(initial(MODEL, 0, name, shape))
            self.subspace.constrain(dict(net.named_parameters()))
            self.parts.append(net)
        inner = InnerSpec(weight_decay=0.1)
        self.optimizers = [SubspaceAdamW(self.subspace, dict(net.named_parameters()), inner) for net in self.parts]

    def learn(self, tokens: Tensor) -> float:
        inputs, targets = tokens[:, :-1], tokens[:, 1:]
        leaves, outputs, x = [], [], inputs
        for i, net in enumerate(self.parts):
            leaf = x if i == 0 else x.detach().requires_grad_()
            x = net(leaf)
            leaves.append(leaf)
            outputs.append(x)
            if self.compressed and i < len(self.parts) - 1:
                x = self.subspace.up(self.subspace.down(x.detach(), inputs), inputs)
        loss = F.cross_entropy(outputs[-1].flatten(0, 1), targets.flatten())
        gradient, last = torch.ones(()).double(), loss
        for i in reversed(range(len(self.parts))):
            self.parts[i].zero_grad()
            torch.autograd.backward(last, gradient)
            if i:
                given = leaves[i].grad
                assert given is not None
                gradient = self.subspace.gradient_up(self.subspace.gradient_down(given)) if self.compressed else given
                last = outputs[i - 1]
        for net, optimizer in zip(self.parts, self.optimizers, strict=True):
            named = dict(net.named_parameters())
            optimizer.step({name: p.grad for name, p in named.items() if p.grad is not None}, 3e-3)
        return float(loss.detach())


def batch(seed: int) -> Tensor:
    return torch.randint(MODEL.vocabulary, (4, MODEL.context + 1), generator=torch.Generator().manual_seed(seed))


def test_compressed_training_is_uncompressed_training() -> None:
    lines = [Line(compressed=compressed) for compressed in (True, False)]
    for step in range(12):
        losses = [line.learn(batch(step % 3)) for line in lines]
        assert abs(losses[0] - losses[1]) < 1e-10, step
    for one, other in zip(*(line.parts for line in lines), strict=True):
        for (name, mine), theirs in zip(one.named_parameters(), other.parameters(), strict=True):
            assert float((mine - theirs).detach().abs().max()) < 1e-10, name
    assert losses[0] < 0.9 * Line(compressed=True).learn(batch(2)), "and it learns"


def test_writers_stay_in_the_span_and_the_table_as_it_was() -> None:
    line = Line(compressed=True)
    before = line.subspace.digest()
    for step in range(5):
        line.learn(batch(step))
    assert line.subspace.digest() == before
    for net, optimizer in zip(line.parts, line.optimizers, strict=True):
        for name, weight in net.named_parameters():
            if is_writer(name):
                assert float((weight - line.subspace.project(weight)).detach().abs().max()) < 1e-14
                assert optimizer.exp_avg_sq[name].shape == (1, weight.shape[1])
            elif name == TABLE:
                assert torch.equal(weight.detach(), line.subspace.table)


def test_what_lies_outside_the_span_is_lost_both_ways() -> None:
    """The other way round: without constrained writers Z would not be enough."""
    line = Line(compressed=True)
    tokens = batch(0)[:, :-1]
    x = torch.randn(4, MODEL.context, MODEL.width, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    again = line.subspace.up(line.subspace.down(x, tokens), tokens)
    assert not torch.allclose(again, x)
    assert torch.allclose(line.subspace.up(line.subspace.down(again, tokens), tokens), again, atol=1e-12)


@pytest.mark.parametrize("rank", [1, 6, 32])
def test_the_basis_is_orthonormal_and_its_seeds_own(rank: int) -> None:
    found = basis(32, rank, 5)
    assert torch.allclose(found.T @ found, torch.eye(rank, dtype=torch.float64), atol=1e-12)
    assert torch.equal(found, basis(32, rank, 5)) and not torch.equal(found, basis(32, rank, 6))
