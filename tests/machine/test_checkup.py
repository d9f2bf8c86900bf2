"""What doctor tells: the pure parts, and the whole on a machine that has no run to join."""

import json
import math
import os
import re
from dataclasses import replace
from pathlib import Path

import jsonschema
import pytest

from swarmnode.app.cli.main import main
from swarmnode.app.cli.schema import schema_of
from swarmnode.app.machine.checkup import (
    HealthCheck,
    device_fix,
    exit_code,
    link_tokens_per_s,
)
from swarmnode.app.machine.stage_fit import FreeMemory, MachineMemory, StageFit, stage_fit
from swarmnode.run.manifest import ModelSpec, boundary_nbytes
from swarmnode.run.manifest.recipe import PRESETS


def test_the_largest_stage_needs_the_most_memory() -> None:
    manifest = replace(PRESETS["small"], model=ModelSpec(layers=6, width=512, heads=8, ffn=1376, vocabulary=50_000))

    def fit(nbytes: int) -> StageFit:
        return stage_fit(manifest, MachineMemory(FreeMemory(nbytes, "test")), has_data=True)

    needed = [need.host for need in fit(0).needed]
    assert fit(0).unable == {0, 1, 2}
    assert fit(max(needed)).unable == set()
    assert fit(max(needed) - 1).unable
    assert min(needed) > 24 * 1_000_000


def test_the_worst_decides_the_exit_code() -> None:
    good = HealthCheck("a", True, "")
    advice = HealthCheck("b", None, "", exit_code=20)
    unreachable, small, stranger = (HealthCheck("c", False, "", exit_code=code) for code in (21, 20, 77))
    assert exit_code([good, advice]) == 0
    assert exit_code([good, unreachable]) == 21
    assert exit_code([unreachable, small]) == 20
    assert exit_code([unreachable, stranger, small]) == 77


def test_doctor_of_this_machine(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["doctor", "--home", str(tmp_path / "node"), "--json"])
    seen = json.loads(capsys.readouterr().out)
    jsonschema.validate(seen, schema_of("doctor"))
    assert code == seen["exit_code"] == 0, seen
    assert {"system", "device", "memory", "home", "disk", "network", "clock"} <= {row["name"] for row in seen["checks"]}
    assert main(["doctor", "--home", str(tmp_path / "node"), "--device", "cuda:9"]) == 20
    said = capsys.readouterr().out
    assert "FAILS  device" in said and "fix: " in said and "cannot take part yet: device" in said
    assert main(["doctor", "hello"]) == 2


@pytest.mark.parametrize(
    ("driver", "cuda", "said"),
    [
        ("", "12.8", "install NVIDIA's driver"),
        ("470.82.01", None, "driver 470.82.01 is too old for PyTorch: install 525 or newer"),
        ("570.86.15", None, "this PyTorch has no CUDA: .*/whl/cu128$"),
        (
            "570.86.15",
            "13.0",
            "CUDA 13.0 needs driver 580 or newer, this one is 570.86.15: update it, or .*/whl/cu128$",
        ),
        ("590.1", "13.0", "give --device cuda"),
    ],
)
def test_driver_and_torch_that_fit_each_other_are_named(driver: str, cuda: str | None, said: str) -> None:
    assert re.search(said, device_fix(driver, cuda))


def test_the_image_for_gpus_can_compile_the_kernels() -> None:
    file = Path(__file__).parents[2] / "deploy" / "docker" / "Dockerfile.cuda"
    assert "gcc libc6-dev" in file.read_text().rpartition("FROM ")[2]


def test_a_key_that_others_can_read_is_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "node.key").write_bytes(b"x")
    os.chmod(tmp_path / "node.key", 0o644)
    assert main(["doctor", "--home", str(tmp_path)]) == 77
    assert f"fix: chmod 600 {tmp_path / 'node.key'}" in capsys.readouterr().out


@pytest.mark.parametrize("stages", [1, 2, 4])
def test_a_link_carries_least_in_the_middle(stages: int) -> None:
    manifest = replace(PRESETS["demo"], pipeline=replace(PRESETS["demo"].pipeline, stages=stages))
    carried = [link_tokens_per_s(manifest, stage, 8e6, 8e6) for stage in range(stages)]
    if stages == 1:
        assert carried == [math.inf], "nothing leaves a pipeline of one stage"
        return
    one_way = boundary_nbytes(manifest.pipeline.boundary, 1, manifest.model.width)
    assert carried[0] == carried[-1] and 0.8e6 / one_way < carried[0] <= 1e6 / one_way
    assert all(inner == pytest.approx(carried[0] / 2, rel=0.1) for inner in carried[1:-1])
    assert link_tokens_per_s(manifest, 0, 4e6, 8e6) < carried[0]
