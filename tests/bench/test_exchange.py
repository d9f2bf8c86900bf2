"""What `swarmnode bench exchange` makes of logs and counters."""

from __future__ import annotations

import pytest

from swarmnode.bench.swarm.exchange import CODECS, manifest_of, report, run
from swarmnode.errors import ManifestError
from swarmnode.gossip.compression import codec
from swarmnode.manifest import PRESETS, Manifest, parse, template
from swarmnode.model.split import stages_of


def test_bytes_against_the_formula_and_idle_against_the_time_between() -> None:
    manifest = PRESETS["demo"]
    parts = stages_of(manifest)
    coder = codec(manifest.gossip.codec)
    nbytes = {stage: coder.least_nbytes(parts[stage].parameters) for stage in (0, 2)}

    def of(stage: int) -> tuple[int, dict[str, float]]:
        times = {"seconds": 0.5, "worked_s": 0.4, "between_s": 2.0, "between_worked_s": 1.8}
        return stage, {**times, "sent_bytes": round(1.01 * nbytes[stage]), "round": 7}

    lone = (1, {**of(0)[1], "sent_bytes": 0})
    found = report(manifest, {"paired": [of(0), of(0), of(2)], "lone": [lone], "losses": [5.0, 4.0]})
    assert found["formula"] == (2 * nbytes[0] + nbytes[2]) / 1e6 and found["off"] == pytest.approx(0.01, abs=1e-5)
    assert found["pairs"] == 3 and found["alone"] == 1
    assert found["idle"] == pytest.approx(1.0 - 0.8 / 0.9)
    assert (found["loss"], found["last"]) == (5.0, 4.0)


def test_the_formula_of_sparse_packets_is_that_of_their_round_with_the_fragment() -> None:
    manifest = manifest_of(PRESETS["demo"], "topk")
    parameters = stages_of(manifest)[1].parameters
    times = {"seconds": 0.5, "worked_s": 0.4, "between_s": 2.0, "between_worked_s": 1.8, "sent_bytes": 1}
    paired = [(1, {**times, "round": r}) for r in (1, 60, 200)]
    chunks = -(-parameters // 4096)
    packets = chunks * sum(k * (2 + 1 + 1 + low) // 8 + 4 for k, low in ((512, 3), (256, 4), (64, 6)))
    found = report(manifest, {"paired": paired, "lone": [], "losses": [5.0, 4.0]})
    fragments = sum(2 * len(range(r % every, parameters, every)) for r, every in ((1, 31), (60, 31), (200, 127)))
    assert found["formula"] == (packets + fragments) / 1e6 and found["codec"] == "partial_average/topk"


def test_live_codecs_are_those_a_manifest_takes() -> None:
    manifest = PRESETS["demo"]
    for which in CODECS:
        each = manifest_of(manifest, which)
        assert parse(template(each), "here") == each and each.gossip.codec == which
        assert each.gossip.group == (0 if codec(which).of_delta else Manifest().gossip.group)
    assert manifest_of(manifest, "desloc/int8").gossip.method == "desloc"
    for wrong in ("zip", "noloco/topk64", "partial_average/e3m0"):
        with pytest.raises(ManifestError, match=r"gossip\.codec"):
            run(1, codecs=(wrong,))
