"""The replica bench's inner optimizers against plain arithmetic, one replica and one matrix at a time."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from benchmarks.method import gossip
from benchmarks.method.inner_optimizer import BETA2, EPS, SCALE, WEIGHT_DECAY, BatchOptimizer
from benchmarks.method.replica_batch import ReplicaBatch, ToySpec, losses, matrices, shapes
from swarmnode.errors import UsageError
from swarmnode.model.muon import orthogonalize

TINY = replace(ToySpec(), replicas=3, width=16, ffn=24, layers=2, context=16, batch=2, validation=16, warmup=2)
DRAW = np.random.Generator(np.random.Philox(key=1))
TEXT = (DRAW.integers(32, 64, 4000).astype(np.uint8), DRAW.integers(32, 64, 400).astype(np.uint8))


def test_adamw_is_torchs_own() -> None:
    theta, steps = torch.randn(3, 40), 4
    flat = theta.clone().requires_grad_()
    theirs = torch.optim.AdamW([flat], lr=0.01, betas=(0.7, BETA2), eps=EPS, weight_decay=WEIGHT_DECAY)
    ours = BatchOptimizer(theta, [], beta1=0.7, momentum=0.9)
    for _ in range(steps):
        flat.grad = torch.randn(3, 40)
        ours.step(flat.grad.clone(), 0.5, 0.01)
        theirs.step()
    torch.testing.assert_close(theta, flat.detach())


def test_muon_steps_each_matrix_by_itself() -> None:
    """Queries, keys, values, gate and up are orthogonalised apart, tall or wide; the rest is AdamW's."""
    count = sum(math.prod(shape) for shape in shapes(TINY))
    theta, momentum, rate, elsewhere = torch.randn(3, count), 0.8, 0.02, 0.003
    found = matrices(TINY)
    d, f = TINY.width, TINY.ffn
    assert [(one.rows, one.columns) for one in found] == [(d, d)] * 4 + [(d, f)] * 2 + [(f, d)] + [(d, d)] * 4 + [
        (d, f),
        (d, f),
        (f, d),
    ]
    plain, averages = theta.clone(), torch.zeros_like(theta)
    by_adamw = theta.clone()
    inner, adamw = (
        BatchOptimizer(theta, found, beta1=0.9, momentum=momentum),
        BatchOptimizer(by_adamw, [], beta1=0.9, momentum=0.0),
    )
    for _ in range(3):
        gradient = torch.randn(3, count)
        averages = momentum * averages + (1 - momentum) * gradient
        ahead = momentum * averages + (1 - momentum) * gradient
        for row in range(3):
            for one in found:
                numbers = one.first + torch.arange(one.rows)[:, None] * one.stride + torch.arange(one.columns)
                update = orthogonalize(ahead[row][numbers][None])[0]
                scale = rate * SCALE * math.sqrt(max(update.shape))
                plain[row][numbers] = (1 - rate * WEIGHT_DECAY) * plain[row][numbers] - scale * update
        inner.step(gradient.clone(), rate, elsewhere)
        adamw.step(gradient.clone(), 0.0, elsewhere)
    mine = torch.zeros(count, dtype=torch.bool)
    for one in found:
        mine[(one.first + torch.arange(one.rows)[:, None] * one.stride + torch.arange(one.columns)).view(-1)] = True
    assert mine.sum() == sum(one.rows * one.columns for one in found)
    torch.testing.assert_close(theta[:, mine], plain[:, mine], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(theta[:, ~mine], by_adamw[:, ~mine])


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_data_parallel_replicas_are_one_with_the_whole_batch(optimizer: str) -> None:
    """Three that average their gradients stay alike, and step as one replica does that reads all their text."""
    size = replace(TINY, optimizer=optimizer, decay="flat", warmup=1)
    three = ReplicaBatch(size, 0, None, TEXT, together=True)
    one = ReplicaBatch(replace(size, replicas=1, batch=6), 0, None, TEXT)
    tokens = torch.stack([three._batch(i) for i in range(3)])
    one._batch = lambda replica: tokens.flatten(0, 1)  # type: ignore[method-assign]
    batches = iter(tokens)
    three._batch = lambda replica: next(batches)  # type: ignore[method-assign]
    before = float(losses(size, one.theta, tokens.flatten(0, 1)[None])[0].detach())
    three.learn(1)
    one.learn(1)
    assert torch.equal(three.theta[0], three.theta[1]) and torch.equal(three.theta[0], three.theta[2])
    torch.testing.assert_close(three.theta[:1], one.theta, rtol=1e-3, atol=2e-4)
    assert float(losses(size, one.theta, tokens.flatten(0, 1)[None])[0].detach()) < before


def test_the_rate_stays_or_falls() -> None:
    flat, falling = (ReplicaBatch(replace(TINY, decay=decay), 0, None, TEXT) for decay in ("flat", "cosine"))
    for replica_batch in (flat, falling):
        replica_batch.steps = 10**6
    assert flat.rate == TINY.learning_rate and falling.rate == pytest.approx(0.1 * TINY.learning_rate)


def test_an_unknown_optimizer_is_refused() -> None:
    with pytest.raises(UsageError, match="adamw, muon"):
        gossip.run("quick", changes={"optimizer": "sgd"})
