"""bench protocol: what a line takes, what lives measure of it, and steps to a loss."""

import pytest

from benchmarks.method import boundary
from benchmarks.method.boundary import BASE
from benchmarks.swarm import protocol
from benchmarks.swarm.protocol import TOKENS
from swarmnode.base.errors import UsageError
from tests.bench.test_boundary import TEXT


@pytest.fixture(autouse=True)
def _short_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(boundary, "read_text", lambda path: TEXT)


def test_a_life_takes_what_its_line_takes_and_little_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "MICROBATCH", 32)  # fewer events
    monkeypatch.setattr(protocol, "IN_FLIGHT", 8)
    found = protocol.run(["int4"], [200.0], steps=6, learned_steps=0, width=32, seeds=1, jobs=1)
    dense, coded = found["rows"]
    for row, nbytes in ((dense, 4096), (coded, 1088)):
        assert row["bytes a token"] == nbytes
        least_s = TOKENS * nbytes * 8 / 200e6  # an inner stage sends activations and gradients
        assert least_s < row["s/step"] < 2.0 * least_s
    assert coded["of bf16"] < 0.6
    assert [row["score over bf16"] for row in found["published"]] == [1.0, 0.618]


def test_steps_are_counted_to_the_loss_that_the_slower_one_has() -> None:
    base = [(10, 3.0), (20, 2.0), (30, 1.0)]
    assert protocol._ratio(base, base) == 1.0
    assert protocol._ratio([(10, 3.0), (20, 2.5), (30, 2.0)], base) == 1.5
    assert protocol._ratio([(10, 3.0), (20, 1.0), (30, 0.5)], base) == pytest.approx(20 / 30)
    assert protocol._ratio([(10, 3.0), (20, 2.0), (30, 2.2)], base) == 1.0  # what a last look is off by is no step


def test_a_boundary_learns_in_as_many_stages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "STAGES", 2)
    found = protocol.steps_over_base([BASE, "int4"], 16, 32, 1, 1)
    assert found[BASE] == 1.0 and 0.5 < found["int4"] < 2.0


def test_unknown_boundaries_are_named() -> None:
    with pytest.raises(UsageError, match="'int3': boundaries are bf16, int8, int4, int4_int2"):
        protocol.run(["int3"], [200.0], steps=2, learned_steps=0, width=32, seeds=1, jobs=1)
