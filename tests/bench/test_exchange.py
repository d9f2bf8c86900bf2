"""What `swarmnode bench exchange` makes of logs and counters."""

from __future__ import annotations

import pytest

from swarmnode.bench.exchange import report
from swarmnode.gossip.compression import codec
from swarmnode.manifest import PRESETS
from swarmnode.model.split import split


def test_bytes_against_the_formula_and_idle_against_the_time_between() -> None:
    manifest = PRESETS["demo"]
    fields = {"seconds": 0.5, "worked_s": 0.4, "between_s": 2.0, "between_worked_s": 1.8}
    parts = split(manifest.model, manifest.pipeline.stages)
    nbytes = sum(codec(manifest.gossip.codec).least_nbytes(parts[stage].parameters) for stage in (0, 0, 2))
    found = report(
        manifest, {"sent": round(1.01 * nbytes), "paired": [(stage, fields) for stage in (0, 0, 2)], "alone": 1}
    )
    assert found["bytes by the formula"] == nbytes and found["off"] == pytest.approx(0.01, abs=1e-6)
    assert found["exchanges"] == 3 and found["alone"] == 1
    assert found["idle because of exchanges"] == pytest.approx(1.0 - 0.8 / 0.9)
