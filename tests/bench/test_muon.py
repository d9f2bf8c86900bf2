"""The bench of Muon's cost, on little: it runs, and its shares follow from its own times."""

from __future__ import annotations

import pytest

from swarmnode.bench.micro import muon


def test_shares_fall_with_the_batch() -> None:
    found = muon.run(width=128, context=16, samples=2, repeats=1)
    assert found["width"] == 128 and found["of it orthogonalisation"] > 0.0
    step, sample = found["step, ms"], found["forward and backward, ms a sample"]
    shares = [row["share"] for row in found["rows"]]
    for row in found["rows"]:
        assert row["tokens"] == 16 * row["inner batch"]
        assert row["share"] == pytest.approx(step / (step + row["inner batch"] * sample))
    assert shares == sorted(shares, reverse=True) and 0.0 < shares[-1] < shares[0] < 1.0
