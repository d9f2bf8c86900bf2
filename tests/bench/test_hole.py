"""bench hole: a stage that is passed by does not move, and waiting trains less."""

import pytest
import torch

from benchmarks.method import boundary, hole
from benchmarks.method.boundary import BASE, BoundaryRun, Pipeline
from benchmarks.method.hole import HoleRun
from swarmnode.base.errors import UsageError
from tests.bench.test_boundary import TEXT


@pytest.fixture(autouse=True)
def _short_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(boundary, "read_text", lambda path: TEXT)


def test_a_stage_that_is_away_does_not_move() -> None:
    one = HoleRun(BoundaryRun(BASE, 3, 3, 32, 1, 8, 10, 0.01, 0, 1, None), 2, 4)
    assert [list(one.passed_by(step)) for step in (2, 3, 6, 7)] == [[], [1], [1], []]
    pipeline = Pipeline(one.run)
    before = [parameter.clone() for layer in pipeline.net.layers for parameter in layer.parameters()]
    pipeline.learn(passed_by=lambda step: range(1, 2))
    after = [parameter for layer in pipeline.net.layers for parameter in layer.parameters()]
    each = len(after) // 3
    moved = [not torch.equal(old, new) for old, new in zip(before, after, strict=True)]
    assert not any(moved[each : 2 * each]) and all(moved[:each]) and all(moved[2 * each :])


def test_rows_set_each_stage_beside_waiting() -> None:
    found = hole.run([3, 6], [2], stages=3, width=32, samples=1, context=8, steps=12)
    assert [row["of the run"] for row in found["rows"]] == [0.25, 0.5]
    assert all({"waiting", "stage 2 passed by"} <= set(row) for row in found["rows"])


@pytest.mark.parametrize(("away", "stage"), [(12, 2), (0, 2), (3, 1), (3, 3)])
def test_ends_cannot_be_passed_by(away: int, stage: int) -> None:
    with pytest.raises(UsageError, match="inner stages are 2 to 2"):
        hole.run([away], [stage], stages=3, width=32, samples=1, context=8, steps=12)
