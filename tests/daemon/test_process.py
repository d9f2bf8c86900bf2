"""A fault that ends a node is in its log, and a person's pause outlives the process."""

import json
import math
from pathlib import Path

import pytest

from swarmnode.app.daemon.clock import SystemClock
from swarmnode.app.daemon.process import PAUSE_FILE, failure_logged, read_pause, tell_pause, write_pause
from swarmnode.base.errors import LocalFault, RemoteFault
from swarmnode.base.metrics.exporter import PrometheusTelemetry
from swarmnode.train.node.limits import NOT_ASKED, AskedPause, LimitVerdict


@pytest.mark.parametrize(
    ("raised", "reason"),
    [
        (LocalFault("no text"), "LocalFault: no text"),
        (ExceptionGroup("tasks", [RemoteFault("x"), LocalFault("the disk is gone")]), "LocalFault: the disk is gone"),
    ],
)
def test_the_fault_that_ends_a_node_is_logged(raised: Exception, reason: str, tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    telemetry = PrometheusTelemetry(path=path, clock=SystemClock(), run="r", node="n")
    with pytest.raises(type(raised)), failure_logged(telemetry):
        raise raised
    (line,) = [json.loads(text) for text in path.read_text().splitlines()]
    assert (line["event"], line["level"], line["fields"]) == ("node.failed", "error", {"reason": reason})


@pytest.mark.parametrize("asked", [AskedPause(1.7e9, "snoozed"), AskedPause(math.inf, "asked to"), NOT_ASKED])
def test_kept_limits_are_read_back(tmp_path: Path, asked: AskedPause) -> None:
    path = tmp_path / PAUSE_FILE
    write_pause(path, AskedPause(1.0, "before"))
    write_pause(path, asked)
    assert read_pause(path) == asked
    assert path.exists() == (asked != NOT_ASKED)


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"until_unix_s": "x", "reason": ""}', "{"])
def test_a_damaged_file_is_no_pause(tmp_path: Path, text: str) -> None:
    path = tmp_path / PAUSE_FILE
    path.write_text(text)
    assert read_pause(path) == NOT_ASKED


def test_a_start_during_a_snooze_says_until_when(capsys: pytest.CaptureFixture[str]) -> None:
    tell_pause(LimitVerdict(True, None, "within its limits"), 0.0)
    assert not capsys.readouterr().err
    tell_pause(LimitVerdict(False, 7200.0, "snoozed"), 0.0)
    said = capsys.readouterr().err
    assert said.startswith("paused: snoozed; until ")
    assert "swarmnode resume" in said
