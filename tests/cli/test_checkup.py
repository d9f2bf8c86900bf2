"""What doctor tells: the pure parts, and the whole on a machine that has no run to join."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from swarmnode.cli.checkup import Check, exit_code, fit, stages_text
from swarmnode.cli.main import main
from swarmnode.manifest import PRESETS, ModelSpec


@pytest.mark.parametrize(
    ("stages", "text"), [((), ""), ((0,), "0"), ((3, 4, 5), "3-5"), ((0, 2, 3), "0, 2-3"), ((1, 3), "1, 3")]
)
def test_stages_as_people_say_them(stages: tuple[int, ...], text: str) -> None:
    assert stages_text(stages) == text


def test_the_largest_stage_needs_the_most_memory() -> None:
    manifest = replace(PRESETS["small"], model=ModelSpec(layers=6, width=512, heads=8, ffn=1376, vocabulary=50_000))
    needed = fit(manifest, 0).needed
    assert fit(manifest, 0).stages == ()
    assert fit(manifest, max(needed)).stages == (0, 1, 2)
    assert fit(manifest, max(needed) - 1).stages != (0, 1, 2)
    assert min(needed) > 24 * 1_000_000


def test_the_worst_decides_the_exit_code() -> None:
    good, advice = Check("a", True, ""), Check("b", None, "", exit_code=20)
    unreachable, small, stranger = (Check("c", False, "", exit_code=code) for code in (21, 20, 77))
    assert exit_code([good, advice]) == 0
    assert exit_code([good, unreachable]) == 21
    assert exit_code([unreachable, small]) == 20
    assert exit_code([unreachable, stranger, small]) == 77


def test_doctor_of_this_machine(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["doctor", "--home", str(tmp_path / "node"), "--json"])
    seen = json.loads(capsys.readouterr().out)
    assert code == seen["exit_code"] == 0, seen
    assert {"system", "device", "memory", "home", "disk", "p2pd", "clock"} <= {row["name"] for row in seen["checks"]}
    assert main(["doctor", "--home", str(tmp_path / "node"), "--device", "cuda:9"]) == 20
    said = capsys.readouterr().out
    assert "FAILS  device" in said and "fix: " in said and "cannot take part yet: device" in said
    assert main(["doctor", "hello"]) == 2


def test_a_key_that_others_can_read_is_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "node.key").write_bytes(b"x")
    os.chmod(tmp_path / "node.key", 0o644)
    assert main(["doctor", "--home", str(tmp_path)]) == 77
    assert f"fix: chmod 600 {tmp_path / 'node.key'}" in capsys.readouterr().out
