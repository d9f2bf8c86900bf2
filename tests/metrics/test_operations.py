"""What operators get: alert rules that fire when they should, and a board whose every query a real node answers."""

import asyncio
import json
import pathlib
import re
import shutil
import socket
import subprocess
import sys
import urllib.parse
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest

from swarmnode.base.metrics import name
from swarmnode.base.metrics.exporter import PrometheusTelemetry
from tests.support.clock import ManualClock

ROOT = pathlib.Path(__file__).resolve().parents[2]
RULES = ROOT / "deploy" / "prometheus"
BOARD = ROOT / "deploy" / "grafana"
BOUND_S = 60.0
OURS = re.compile(r"\bswarmnode_[a-z0-9_]+")

needs_promtool = pytest.mark.skipif(
    shutil.which("promtool") is None, reason="promtool is missing: apt-get install prometheus"
)
needs_prometheus = pytest.mark.skipif(
    shutil.which("prometheus") is None, reason="prometheus is missing: apt-get install prometheus"
)


def promtool(*arguments: str) -> None:
    done = subprocess.run(
        ["promtool", *arguments], cwd=RULES, capture_output=True, text=True, timeout=BOUND_S, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.node
@needs_promtool
def test_alert_rules_fire_when_they_should_and_not_else() -> None:
    promtool("check", "rules", "alerts.yml")
    promtool("test", "rules", "alerts_test.yml")


def test_every_alert_has_a_unit_test() -> None:
    declared = set(re.findall(r"alert: (\w+)", (RULES / "alerts.yml").read_text()))
    tested = (RULES / "alerts_test.yml").read_text().replace("\n", " ")
    fired = set(re.findall(r"alertname: (\w+)\s+exp_alerts", tested))
    assert declared == fired


@needs_promtool
def test_the_configuration_is_one() -> None:
    promtool("check", "config", "prometheus.yml")


def test_alerts_and_board_ask_for_metrics_that_exist() -> None:
    known = set(name.METRICS) | {
        f"{metric.name}_{part}"
        for metric in name.METRICS.values()
        if metric.kind is name.MetricKind.HISTOGRAM
        for part in ("bucket", "sum", "count")
    }
    for path in (RULES / "alerts.yml", BOARD / "swarmnode.json"):
        asked = set(OURS.findall(path.read_text()))
        assert asked and asked <= known, f"{path}: {sorted(asked - known)} is in no node; see base/metrics/name.py"


def test_the_board_is_current(tmp_path: pathlib.Path) -> None:
    subprocess.run([sys.executable, str(BOARD / "board.py"), str(tmp_path / "b.json")], check=True, timeout=BOUND_S)
    assert (tmp_path / "b.json").read_text() == (BOARD / "swarmnode.json").read_text(), "say: make docs"


def queries() -> Iterator[str]:
    for panel in json.loads((BOARD / "swarmnode.json").read_text())["panels"]:
        for target in panel.get("targets", ()):
            yield target["expr"].replace('"$job"', '"swarmnode"')


def fill(telemetry: PrometheusTelemetry) -> None:
    """Something in every series, as a node that trains has."""
    for metric in name.METRICS.values():
        labels = {label: (values or ("word",))[0] for label, values in metric.labels.items()}
        match metric.kind:
            case name.MetricKind.COUNTER:
                telemetry.count(metric.name, 3, **labels)
            case name.MetricKind.GAUGE:
                telemetry.gauge(metric.name, 3, **labels)
            case name.MetricKind.HISTOGRAM:
                telemetry.observe(metric.name, 0.3)


def ask(address: str, query: str) -> list[Any]:
    url = f"http://{address}/api/v1/query?{urllib.parse.urlencode({'query': query})}"
    with urllib.request.urlopen(url, timeout=BOUND_S) as answer:
        found = json.load(answer)
    assert found["status"] == "success", query
    return list(found["data"]["result"])


@needs_prometheus
@pytest.mark.node  # a process of seconds
async def test_a_real_prometheus_scrapes_a_node_and_answers_every_panel(tmp_path: pathlib.Path) -> None:
    """Prometheus asks for OpenMetrics by itself, so this is a test of that, too."""

    async def answered(address: str, query: str) -> bool:
        try:
            return bool(await asyncio.to_thread(ask, address, query))
        except OSError:  # it starts
            return False

    telemetry = PrometheusTelemetry(clock=ManualClock(), run="run0", node="peer0")
    target = await telemetry.serve(0)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    config = (RULES / "prometheus.yml").read_text().replace("15s", "200ms")
    (tmp_path / "nodes").mkdir()
    (tmp_path / "nodes" / "all.json").write_text(json.dumps([{"targets": [target]}]))
    (tmp_path / "prometheus.yml").write_text(config)
    shutil.copy(RULES / "alerts.yml", tmp_path)
    process = await asyncio.create_subprocess_exec(
        "prometheus",
        f"--config.file={tmp_path}/prometheus.yml",
        f"--storage.tsdb.path={tmp_path}/data",
        f"--web.listen-address={address}",
        "--log.level=error",
    )
    try:
        async with asyncio.timeout(BOUND_S):
            while not await answered(address, "count(rate(swarmnode_samples_total[2m]) > 0)"):
                fill(telemetry)  # counters grow, so that rates have something to say
                await asyncio.sleep(0.1)
        # A scrape that a loaded machine answers too late marks its series as gone until the next one.
        for query in ("up == 1", *queries()):
            try:
                async with asyncio.timeout(BOUND_S):
                    while not await answered(address, query):
                        await asyncio.sleep(0.1)
            except TimeoutError:
                raise AssertionError(f"nothing answers {query}") from None
    finally:
        process.kill()
        await process.wait()
        await telemetry.close()
