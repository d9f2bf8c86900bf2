"""Muon's steps against torch's own Muon, and what orthogonalisation leaves of a matrix."""

from typing import Any

import pytest
import torch
from torch import Tensor

from swarmnode.model import muon
from swarmnode.model.decoder import Decoder
from swarmnode.model.muon import COEFFICIENTS, GRAM_RATIO, STEPS, orthogonalize
from swarmnode.model.optimizer import learning_rate
from swarmnode.model.split import is_hidden_matrix, split
from tests.support.tiny_model import manifest, seconds, stages_of, token_batch, train_on


@pytest.mark.parametrize("shape", [(2, 16, 16), (2, 16, 16 * GRAM_RATIO), (2, 48, 16)])
@pytest.mark.parametrize("scale", [1e-2, 1.0, 1e9])
def test_singular_values_take_the_polynomial(shape: tuple[int, ...], scale: float) -> None:
    """By the singular value decomposition in float64, of matrices whose singular values span a factor of a thousand."""
    chance = torch.Generator().manual_seed(2)
    u, values, v = torch.linalg.svd(torch.randn(shape, generator=chance, dtype=torch.float64), full_matrices=False)
    values *= torch.logspace(0, -3, values.shape[-1], dtype=torch.float64)
    found = orthogonalize((scale * (u * values[:, None]) @ v).float())
    wanted = values / (values**4).sum(-1, keepdim=True) ** 0.25
    a, b, c = COEFFICIENTS
    for _ in range(STEPS):
        wanted = a * wanted + b * wanted**3 + c * wanted**5
    torch.testing.assert_close(found.double(), (u * wanted[:, None]) @ v, rtol=0, atol=1e-4)


def test_a_zero_matrix_stays_zero() -> None:
    assert not orthogonalize(torch.zeros(1, 4, 8)).any()


@pytest.mark.node
@pytest.mark.parametrize("stages", [1, 3])
def test_one_replica_a_stage_is_single_process_muon(stages: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten steps against torch.optim.Muon for hidden matrices and torch.optim.AdamW for the rest, both with torch's five
    iterations from the Frobenius norm.

    torch iterates in bfloat16, which leaves 2^-8 of a step: hence the tolerance of a twentieth of all steps together.
    """

    def as_torch_does(matrices: Tensor) -> Tensor:
        return muon._iterated(x := matrices / matrices.norm(dim=(-2, -1), keepdim=True), x @ x.mT, 5)

    monkeypatch.setattr(muon, "orthogonalize", as_torch_does)
    rates: dict[str, Any] = {"learning_rate": 3e-3, "muon_learning_rate": 0.02}
    run = manifest(stages=stages, optimizer="muon", warmup_samples=1, decay="constant", clip_norm=1e6, **rates)
    chain = stages_of(run)
    inner = run.inner
    whole = split(run.model, 1)[0]
    net = Decoder(run.model, whole)
    net.load_state_dict({name: value.clone() for stage in chain for name, value in stage.named(stage.theta).items()})
    parameters = dict(net.named_parameters())
    hidden = {name: p for name, p in parameters.items() if is_hidden_matrix(name, tuple(p.shape))}
    others = [p for name, p in parameters.items() if name not in hidden]
    theirs_muon = torch.optim.Muon(
        list(hidden.values()),
        lr=inner.muon_learning_rate,
        momentum=inner.muon_momentum,
        weight_decay=inner.weight_decay,
        adjust_lr_fn="match_rms_adamw",
    )
    adamw = torch.optim.AdamW(
        [
            {"params": [p for p in others if p.dim() > 1], "weight_decay": inner.weight_decay},
            {"params": [p for p in others if p.dim() == 1], "weight_decay": 0.0},
        ],
        lr=learning_rate(inner, 8),
        betas=(inner.beta1, inner.beta2),
        eps=inner.eps,
    )
    before = {name: p.detach().clone() for name, p in hidden.items()}
    for step in range(10):
        for half in (0, 1):
            tokens = token_batch(seed=2 * step + half)
            train_on(chain, tokens)
            logits = net(tokens[:, :-1]).flatten(0, 1)
            torch.autograd.backward(torch.nn.functional.cross_entropy(logits, tokens[:, 1:].flatten()) / 2)
        for stage in chain:
            stage.step(8)
        for optimizer in (theirs_muon, adamw):
            optimizer.step()
            optimizer.zero_grad()
    for stage in chain:
        for name, value in stage.named(stage.theta).items():
            theirs = parameters[name].detach()
            if name in hidden:
                moved = (theirs - before[name]).norm()
                assert (value - theirs).norm() < 0.05 * moved, name
            else:
                torch.testing.assert_close(value, theirs, rtol=0, atol=1e-2, msg=name)
        assert seconds(stage).keys() == stage.shapes.keys() - hidden.keys()
        for name, square in seconds(stage).items():
            wanted = adamw.state[parameters[name]]["exp_avg_sq"]
            assert (square - wanted).norm() < 0.05 * wanted.norm(), name
