"""What `swarmnode bench exchange` makes of logs and counters."""

from __future__ import annotations

from dataclasses import replace

import pytest

from swarmnode.bench.exchange import CODECS, report, run
from swarmnode.errors import ManifestError
from swarmnode.gossip.compression import codec
from swarmnode.manifest import PRESETS, parse, template
from swarmnode.model.split import split


def test_bytes_against_the_formula_and_idle_against_the_time_between() -> None:
    manifest = PRESETS["demo"]
    parts = split(manifest.model, manifest.pipeline.stages)
    coder = codec(manifest.gossip.codec)
    nbytes = {stage: coder.least_nbytes(parts[stage].parameters) for stage in (0, 2)}

    def of(stage: int) -> tuple[int, dict[str, float]]:
        times = {"seconds": 0.5, "worked_s": 0.4, "between_s": 2.0, "between_worked_s": 1.8}
        return stage, {**times, "sent_bytes": round(1.01 * nbytes[stage])}

    lone = (1, {**of(0)[1], "sent_bytes": 0})
    found = report(manifest, {"paired": [of(0), of(0), of(2)], "lone": [lone], "losses": [5.0, 4.0]})
    assert found["formula"] == (2 * nbytes[0] + nbytes[2]) / 1e6 and found["off"] == pytest.approx(0.01, abs=1e-5)
    assert found["pairs"] == 3 and found["alone"] == 1
    assert found["idle"] == pytest.approx(1.0 - 0.8 / 0.9)
    assert (found["loss"], found["last"]) == (5.0, 4.0)


def test_live_codecs_are_those_a_manifest_takes() -> None:
    manifest = PRESETS["demo"]
    for which in CODECS:
        each = replace(manifest, gossip=replace(manifest.gossip, codec=which))
        assert parse(template(each), "here") == each
    with pytest.raises(ManifestError, match=r"gossip\.codec"):
        run(1, codecs=("zip",))
