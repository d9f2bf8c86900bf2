"""The loss of the head in chunks is the loss, and its gradients are the gradients."""

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from swarmnode.data.sample import IGNORED
from swarmnode.model import memory_budget
from swarmnode.model.backprop import HeadProgress, head_loss
from swarmnode.model.memory_budget import head_nbytes
from swarmnode.model.tensor import decode, encode
from tests.support.tiny_model import TINY, manifest, stages_of, token_batch, train_on

ROWS = 23
WIDTH = 8
VOCABULARY = 51
SHARE = 1 / 16


@pytest.fixture(params=[1, 3, 8, 22], ids=lambda rows: f"{rows}-rows")
def chunked(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """Chunks of so many rows of float64, twice as many of float32; softmax and gradient in parts of some rows."""
    monkeypatch.setitem(memory_budget.CHUNK_NBYTES, "cpu", request.param * VOCABULARY * 8)
    monkeypatch.setattr(memory_budget, "TILE_NBYTES", 7 * WIDTH * 2)
    yield request.param


def made(dtype: torch.dtype, ignored: int = 0) -> tuple[Tensor, nn.Parameter, Tensor]:
    """Rows [N, D], a head [V, D] with a gradient already, and targets [N] of which `ignored` do not count."""
    generator = torch.Generator().manual_seed(4)
    x = torch.randn(ROWS, WIDTH, generator=generator, dtype=torch.float64).to(dtype)
    weight = nn.Parameter(torch.randn(VOCABULARY, WIDTH, generator=generator, dtype=torch.float64).to(dtype))
    weight.grad = torch.randn(VOCABULARY, WIDTH, generator=generator, dtype=torch.float64).to(dtype)
    targets = torch.randint(VOCABULARY, (ROWS,), generator=generator)
    targets[torch.randperm(ROWS, generator=generator)[:ignored]] = IGNORED
    return x, weight, targets


def plain(x: Tensor, weight: nn.Parameter, targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Loss, gradient of the rows, and what the head's gradient becomes, by autograd in float64."""
    leaf = x.double().requires_grad_()
    head = weight.detach().double().requires_grad_()
    loss = F.cross_entropy(F.linear(leaf, head), targets, reduction="sum", ignore_index=IGNORED)
    by_x, by_head = torch.autograd.grad(SHARE * loss, (leaf, head))
    assert weight.grad is not None
    return loss.detach(), by_x, weight.grad.double() + by_head


@pytest.mark.parametrize("ignored", [0, 9, ROWS])
@pytest.mark.parametrize(
    ("dtype", "autocast", "tolerance"),
    [(torch.float64, None, 1e-12), (torch.float32, None, 2e-6), (torch.float32, torch.bfloat16, 0.03)],
    ids=["fp64", "fp32", "bf16"],
)
def test_chunks_make_the_whole(
    chunked: int, dtype: torch.dtype, autocast: torch.dtype | None, tolerance: float, ignored: int
) -> None:
    x, weight, targets = made(dtype, ignored)
    loss, by_x, by_head = plain(x, weight, targets)
    found = head_loss(x, weight, targets, share=SHARE, train=True, progress=HeadProgress(), autocast=autocast)
    assert found.gradient is not None and weight.grad is not None and found.gradient.dtype == dtype
    assert float(found.loss_sum) == pytest.approx(float(loss), rel=tolerance, abs=tolerance)
    for mine, wanted in ((found.gradient, by_x), (weight.grad, by_head)):
        assert (mine.double() - wanted).norm() <= tolerance * wanted.norm() + 1e-30
    assert not found.gradient[targets == IGNORED].any()


def test_gradients_are_computed_only_where_requested(chunked: int) -> None:
    x, weight, targets = made(torch.float64, 5)
    loss, by_x, _ = plain(x, weight, targets)
    assert weight.grad is not None
    before = weight.grad.clone()
    validation = head_loss(x, weight, targets, share=SHARE, train=False)
    audit = head_loss(x, weight, targets, share=SHARE, train=True)
    weight.requires_grad_(False)
    frozen = head_loss(x, weight, targets, share=SHARE, train=True, progress=HeadProgress())
    assert validation.gradient is None and torch.equal(weight.grad, before)
    for found in (validation, audit, frozen):
        torch.testing.assert_close(found.loss_sum, loss, rtol=1e-12, atol=0)
    for found in (audit, frozen):
        torch.testing.assert_close(found.gradient, by_x, rtol=0, atol=1e-12)


def test_the_last_stage_of_an_8b_model_fits_beside_its_state() -> None:
    """4 windows of 2,048 tokens at a vocabulary of 128,256: all logits at once would be 12.6 GB."""
    assert head_nbytes(8192, 128_256, 4096, autocast=True, kind="cuda") < 1.7e9
    assert head_nbytes(64, 50, 32, autocast=False, kind="cpu") < 64 * 50 * 4 * 4


@pytest.mark.parametrize("boundary", ["fp32", "subspace"])
def test_a_last_stage_in_chunks_is_the_stage(boundary: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Loss, gradients, held-out loss and audits, of text in which some targets do not count."""
    run = manifest(boundary=boundary, rank=8 if boundary == "subspace" else 0)
    told = []
    for nbytes in (1 << 40, 5 * TINY.vocabulary * 8):
        monkeypatch.setitem(memory_budget.CHUNK_NBYTES, "cpu", nbytes)
        stages = stages_of(run, torch.float64)
        last = stages[-1]
        tokens = token_batch().to(torch.uint32)
        tokens[:, 3:9] |= 1 << 31  # not in the loss
        losses = [train_on(stages, encode(tokens))]
        grads = torch.cat([stage.grad for stage in stages])
        x = stages[0].forward(encode(tokens), keep=False, tokens=encode(tokens))[0]
        x = stages[1].forward(x, keep=False, tokens=encode(tokens))[0]
        validated = last.loss(x, encode(tokens), 4, train=False)
        audited = last.loss(x, encode(tokens), 4, train=True, accumulate=False)
        assert audited.gradient is not None and audited.tokens == validated.tokens == 4 * (TINY.context - 6)
        losses += [validated.loss_sum, audited.loss_sum]
        assert torch.equal(torch.cat([stage.grad for stage in stages]), grads)
        told.append((torch.tensor(losses, dtype=torch.float64), grads, decode(audited.gradient).clone()))
    for whole, parts in zip(*told, strict=True):
        torch.testing.assert_close(parts.double(), whole.double(), rtol=1e-10, atol=1e-12)
