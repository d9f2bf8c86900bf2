"""A node that ends of a fault says so in its log before it is gone."""

import asyncio
import json
from pathlib import Path

import pytest

from swarmnode.daemon.clock import SystemClock
from swarmnode.daemon.process import failure_logged
from swarmnode.errors import LocalFault, RemoteFault
from swarmnode.metrics.exporter import PrometheusTelemetry


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


def test_being_told_to_stop_is_no_fault(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    telemetry = PrometheusTelemetry(path=path, clock=SystemClock(), run="r", node="n")
    with pytest.raises(asyncio.CancelledError), failure_logged(telemetry):
        raise asyncio.CancelledError
    assert not path.read_text()
