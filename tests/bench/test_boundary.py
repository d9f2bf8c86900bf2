"""bench boundary: what codes and maps between stages do to activations, their gradients, and the bytes."""

import math

import numpy as np
import pytest
import torch

from benchmarks.method import boundary
from benchmarks.method.boundary import (
    BASE,
    Boundary,
    BoundaryRun,
    FrozenMap,
    LearnedMap,
    Pipeline,
    Setting,
    code_nbytes,
    coded,
    normal_levels,
)
from swarmnode.base.errors import UsageError

DRAW = np.random.Generator(np.random.Philox(key=1))
TEXT = (
    np.tile(DRAW.integers(32, 64, 97), 300).astype(np.uint8),
    np.tile(DRAW.integers(32, 64, 97), 30).astype(np.uint8),
)


@pytest.fixture(autouse=True)
def _short_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(boundary, "read_text", lambda path: TEXT)


def of(what: str, **changes: int) -> BoundaryRun:
    sizes = {"stages": 3, "layers": 3, "width": 64, "samples": 2, "context": 16, "steps": 12, "epochs": 1} | changes
    return BoundaryRun(what, rate=0.01, seed=1, text=None, **sizes)


@pytest.mark.parametrize(("bits", "error"), [(1, 0.3634), (2, 0.1175), (3, 0.03454), (4, 0.009497)])
def test_levels_have_the_errors_of_max_1960(bits: int, error: float) -> None:
    levels, middles = normal_levels(bits)
    x = torch.randn(1 << 18, generator=torch.Generator().manual_seed(0))
    assert float((levels[torch.bucketize(x, middles)] - x).square().mean()) == pytest.approx(error, rel=0.02)


def test_an_outlier_costs_rotated_tiles_least() -> None:
    x = torch.randn(1, 8, 192, generator=torch.Generator().manual_seed(0))
    x[..., 5] *= 30.0
    rest = [float((coded(x, code) - x)[..., 6:64].norm()) for code in ("int3", "had3")]
    assert rest[1] < 0.75 * rest[0]


def test_errors_cancel_along_tokens() -> None:
    x = torch.randn(2, 64, 64, generator=torch.Generator().manual_seed(0))
    apart = [float((coded(x, code) - x).sum(1).norm()) for code in ("had2", "sd2")]
    assert apart[1] < 0.25 * apart[0]


def test_errors_of_equal_tokens_cancel_by_signs_of_places_and_by_the_mean() -> None:
    """What a code does to one token it does to all that are alike, unless their signs differ; levels of least error are
    a little short, always."""
    x = torch.randn(1, 1, 64, generator=torch.Generator().manual_seed(0)).expand(1, 64, 64)
    alike, drawn, mean = (float((coded(x, code) - x).sum(1).norm()) for code in ("had2", "rd2", "mc2"))
    assert drawn < 0.5 * alike and mean < 0.02 * alike


def test_activations_are_coded_there_and_gradients_back() -> None:
    x = torch.randn(1, 2, 64, generator=torch.Generator().manual_seed(0), requires_grad=True)
    y = Boundary(Setting.of("had4:had2"))(x, torch.zeros(1, 2, dtype=torch.int64), [0])
    assert torch.equal(y, coded(x.detach(), "had4"))
    weights = torch.randn(1, 2, 64, generator=torch.Generator().manual_seed(1))
    (y * weights).sum().backward()
    assert x.grad is not None and torch.equal(x.grad, coded(weights, "had2"))


def test_differences_come_closer_each_time_that_a_sample_comes() -> None:
    way = Boundary(Setting.of("aq2"))
    x = torch.randn(1, 4, 64, generator=torch.Generator().manual_seed(0))
    apart = [float((way.send(x + 0.01 * k, [7]) - x - 0.01 * k).norm()) for k in range(4)]
    assert apart[3] < 0.1 * float((coded(x, "had2") - x).norm())
    assert torch.equal(way.send(x, [-1]), coded(x, "bf16"))  # a validation's


@pytest.mark.parametrize("what", ["frozen16+bf16", "learned16+had4", "anchors16+had4", "residual16+int8:had3", "aq3"])
def test_a_pipeline_learns_through_each_map(what: str) -> None:
    one = Pipeline(of(what, epochs=2, steps=24))
    before = one.nats()
    one.learn()
    assert one.nats() < before - 0.5
    for way in one._cuts.values():
        if isinstance(way, LearnedMap):
            apart = way.projector.T @ way.projector - torch.eye(16)
            assert float(apart.abs().max()) < 1e-4
        if isinstance(way, FrozenMap):
            for writer in (one.detach() for one in one._writers):
                outside = writer - way.basis @ (way.basis.T @ writer)
                assert float(outside.norm()) < 1e-4 * float(writer.norm())


def test_rows_count_both_directions_against_the_base_of_the_same_seed() -> None:
    found = boundary.run(["had2:had1", "learned16+had4"], width=64, samples=1, context=8, steps=12, seeds=2)
    rows = {row["boundary"]: row for row in found["rows"]}
    assert rows[BASE]["bytes"] == 256 and rows[BASE]["over bf16"] == 0.0
    assert rows["had2:had1"]["bytes"] == 16 + 2 + 8 + 2 and rows["learned16+had4"]["bytes"] == 2 * (8 + 2)
    assert math.isfinite(rows["had2:had1"]["spread"])
    assert code_nbytes("mc4", 192, 8) == code_nbytes("rd4", 192, 8) + 48  # a mean of eight tokens
    assert code_nbytes("had4", 192, 8) == 96 + 6 and code_nbytes("had4", 48, 8) == 24 + 6  # tiles of 64 and of 16


@pytest.mark.parametrize("wrong", ["had9", "learned+had4", "frozen16", "bf16:aq4", "learned999+had4"])
def test_unknown_settings_are_named(wrong: str) -> None:
    with pytest.raises(UsageError, match=wrong.split("+")[0]):
        Pipeline(of(wrong))
