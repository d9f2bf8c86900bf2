"""The report of a run: the page's own figures, who gave what by receipts, and commands that are."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from swarmnode.app.cli.main import main
from swarmnode.app.dashboard import view
from swarmnode.app.dashboard.run_report import read_report, report_text, run_report, write_report
from swarmnode.app.dashboard.totals import Contribution
from swarmnode.run.manifest.recipe import PRESETS
from tests.support.watched import watched_run

TINY = PRESETS["tiny"]


async def test_a_coordinator_that_ends_writes_what_its_page_showed(tmp_path: Path) -> None:
    async with watched_run(tmp_path, 20) as w:
        await w.until(lambda: w.board.live.board.samples > 0, "the page shows samples")
        shown = view.summary(w.board.live.board, 0.0)
        rows = view.contributors(w.board.live.board)
    tree = json.loads((tmp_path / "report.json").read_text())
    assert shown["samples"] and [tree[key] for key in ("samples", "tokens", "round")] == [
        shown[key] for key in ("samples", "tokens", "round")
    ]
    assert [one["name"] for one in tree["members"]] == [row["name"] for row in rows]
    assert sum(one["hours"] for one in tree["members"]) == pytest.approx(tree["machine_hours"], abs=0.01)
    assert tree["energy_kwh"] is None and tree["model"]["parameters"] > 0
    text = (tmp_path / "REPORT.md").read_text()
    assert f"{shown['samples']:,}" in text and "not measured" in text


def test_receipts_of_others_are_told_and_their_words_are_text(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [
        {"name": "ada", "peer": "A", "worked_s": 7200.0, "receipts": {"samples": 100}},
        {"name": "| <b>eve</b> https://x", "peer": "B", "worked_s": 0.0, "receipts": None},
    ]
    figures = {"t": 1.0, "wall_s": 3600.0, "samples": 100, "tokens": 3_200, "round": 3, "loss_validation": 1.5}
    tree = run_report(TINY, "r" * 64, figures, rows, "runs/x", "runs/x/archive")
    text = report_text(tree)
    assert "| ada | 2.00 | 100 | 3,200 |" in text and "not known at first, 1.5 last" in text
    assert "<b>" not in text and "https://" not in text and "not known | not known" in text
    path = write_report(tmp_path, tree)
    assert path.read_text() == text and read_report(tmp_path, "r" * 64) == tree
    assert read_report(tmp_path, "s" * 64) is None and read_report(tmp_path / "none", "r" * 64) is None


def test_energy_is_that_of_machines_whose_owners_told_their_watts(tmp_path: Path) -> None:
    ada = Contribution("ada")
    for life, worked_s, watts in ((1, 3600.0, 250), (1, 7200.0, 250), (2, 3600.0, 0)):
        ada.tell(life, {"worked_s": worked_s}, 0, watts)
    row = ada.to_json("A", None)
    assert (row["worked_s"], row["metered_s"], row["kwh"]) == (10_800.0, 7200.0, 0.5)
    tree = run_report(TINY, "r" * 64, {}, [row, {"name": "bob", "worked_s": 60.0}], "runs/x", "runs/x/archive")
    assert (tree["energy_kwh"], tree["energy_of_hours"]) == (0.5, 2.0)
    assert "| energy | 0.5 kWh in 2.0 hours of machines that told their watts |" in report_text(tree)


def test_its_commands_are_verbs_with_these_options(capsys: pytest.CaptureFixture[str]) -> None:
    text = report_text(run_report(TINY, "r" * 64, {}, [], "runs/x", "runs/x/archive"))
    commands = re.findall(r"^swarmnode (\w+)(.*)$", text, re.MULTILINE)
    assert [verb for verb, _ in commands] == ["generate", "export", "export", "chat", "eval", "up", "coordinator"]
    for verb, given in commands:
        assert main([verb, "--help"]) == 0
        shown = capsys.readouterr().out
        assert all(flag in shown for flag in re.findall(r"--[a-z]+", given.partition("#")[0]))


def test_words_of_a_model_stay_in_their_block() -> None:
    tree = run_report(TINY, "r" * 64, {}, [], "runs/x", "runs/x/archive")
    tree["texts"] = [{"prompt": "a", "text": "```\n# a heading of the model's\n````"}]
    text = report_text(tree)
    fence = re.search(r"^(`{4,})text$", text, re.MULTILINE)
    assert fence is not None
    block = text.split(f"{fence[1]}text\n")[1].split(f"\n{fence[1]}\n")[0]
    assert "# a heading" in block and "## What it writes" in text
