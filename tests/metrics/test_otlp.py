"""Metrics pushed by OTLP to a small HTTP server: what arrives is what /metrics shows."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import json
import os
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from swarmnode.metrics import name
from swarmnode.metrics.exporter import PrometheusTelemetry
from swarmnode.metrics.otlp import INTERVAL_S, OtlpPusher, interval_s, metrics_data, wanted
from tests.support.village import LoopClock

pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="the extra otlp is missing: pip install .[otlp]")

from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest

BOUND_S = 150.0


@pytest.mark.parametrize(
    ("environment", "asked"),
    [
        ({}, False),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": ""}, False),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://h:4318"}, True),
        ({"OTEL_EXPORTER_OTLP_METRICS_ENDPOINT": "http://h:4318/v1/metrics"}, True),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://h", "OTEL_SDK_DISABLED": "TRUE"}, False),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://h", "OTEL_METRICS_EXPORTER": "none"}, False),
    ],
)
def test_the_standard_variables_decide(environment: dict[str, str], asked: bool) -> None:
    assert wanted(environment) is asked


@pytest.mark.parametrize(("text", "seconds"), [("500", 0.5), ("1", 0.1), ("", 60), ("-5", 60), ("nan", 60), ("x", 60)])
def test_the_interval_is_in_milliseconds(text: str, seconds: float) -> None:
    assert interval_s({"OTEL_METRIC_EXPORT_INTERVAL": text}) == seconds and interval_s({}) == INTERVAL_S


class Collector:
    """Takes what is pushed to /v1/metrics; answers with `status`."""

    def __init__(self) -> None:
        self.status = 200
        self.got: list[ExportMetricsServiceRequest] = []
        self.headers: list[dict[str, str]] = []
        self.changed = asyncio.Event()

    async def take(self, request: web.Request) -> web.Response:
        body = await request.read()
        self.got.append(
            ExportMetricsServiceRequest.FromString(body if body[:2] != b"\x1f\x8b" else gzip.decompress(body))
        )
        self.headers.append(dict(request.headers))
        self.changed.set()
        return web.Response(status=self.status)

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(BOUND_S):
            while not condition():
                self.changed.clear()
                await self.changed.wait()

    def metrics(self) -> dict[str, Any]:
        """Of the newest push, by name."""
        (resource,) = self.got[-1].resource_metrics
        (scope,) = resource.scope_metrics
        return {metric.name: metric for metric in scope.metrics}

    def attributes(self) -> dict[str, str]:
        return {one.key: one.value.string_value for one in self.got[-1].resource_metrics[0].resource.attributes}


@contextlib.asynccontextmanager
async def collector() -> AsyncIterator[tuple[Collector, str]]:
    here = Collector()
    app = web.Application()
    app.router.add_post("/v1/metrics", here.take)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield here, f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


def counted() -> PrometheusTelemetry:
    telemetry = PrometheusTelemetry(clock=LoopClock(), run="ab" * 32, node="me")
    telemetry.count(name.MICROBATCHES, 3, outcome="done")
    telemetry.gauge(name.ROUND, 7)
    for seconds in (0.01, 0.2, 1e6):
        telemetry.observe(name.EXCHANGE_SECONDS, seconds)
    return telemetry


async def test_exported_metrics_equal_scraped_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    async with collector() as (here, url):
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", url)
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "x-token=secret")
        monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment=lab")
        telemetry, failures = counted(), []
        push = OtlpPusher(telemetry.registry, "ab" * 32, "me", LoopClock().unix_s, lambda: failures.append(1))
        await push.once()
        found = here.metrics()
        values = {
            (metric, tuple((one.key, one.value.string_value) for one in point.attributes)): point.as_double
            for metric, row in found.items()
            for point in [*row.sum.data_points, *row.gauge.data_points]
        }
        assert values["swarmnode_microbatches", (("outcome", "done"),)] == 3.0
        assert values["swarmnode_microbatches", (("outcome", "lost"),)] == 0.0
        assert values["swarmnode_round", ()] == 7.0
        assert found["swarmnode_microbatches"].sum.is_monotonic
        assert found["swarmnode_microbatches"].unit == "{microbatches}"
        assert found["swarmnode_link_bytes"].unit == "By"
        (point,) = found["swarmnode_exchange_seconds"].histogram.data_points
        assert point.count == 3 == sum(point.bucket_counts) and point.bucket_counts[-1] == 1
        assert len(point.bucket_counts) == len(point.explicit_bounds) + 1 and point.sum == pytest.approx(1e6 + 0.21)
        assert here.attributes()["service.instance.id"] == "me"
        assert here.attributes()["deployment.environment"] == "lab"
        assert here.headers[-1]["x-token"] == "secret"
        scraped = {key.partition("{")[0].removesuffix("_total") for key in telemetry.counters()}
        assert {metric for metric in found if metric.startswith("swarmnode_")} >= {
            metric for metric in scraped if not metric.endswith(("_sum", "_count")) and "info" not in metric
        }
        here.status = 400
        await push.once()
        await push.once()
        here.status = 200
        await push.once()
        here.status = 400
        await push.close()
        assert len(failures) == 2, "a collector that is away is told of once, until it is back"


def test_an_empty_registry_and_odd_numbers_do_no_harm() -> None:
    telemetry = PrometheusTelemetry(clock=LoopClock(), run="ab" * 32, node="me")
    telemetry.gauge(name.LEARNING_RATE, float("nan"))
    data = metrics_data(telemetry.registry, {}, 0, 1)
    names = {metric.name for metric in data.resource_metrics[0].scope_metrics[0].metrics}
    assert "swarmnode_learning_rate" not in names and "swarmnode_microbatches" in names


@pytest.mark.node
async def test_a_bootstrap_pushes_where_the_variable_says(tmp_path: Path) -> None:
    """A real process, ended by SIGTERM: its last push comes while it leaves."""

    async with collector() as (here, url):
        environment = {
            **os.environ,
            "OTEL_EXPORTER_OTLP_ENDPOINT": url,
            "OTEL_METRIC_EXPORT_INTERVAL": "200",
            "OTEL_EXPORTER_OTLP_COMPRESSION": "gzip",
        }
        run = "ab" * 32
        process = await asyncio.create_subprocess_exec(
            *[sys.executable, "-m", "swarmnode.cli.main", "init", "run", "--preset", "tiny"],
            cwd=tmp_path,
        )
        assert await process.wait() == 0
        process = await asyncio.create_subprocess_exec(
            *[sys.executable, "-m", "swarmnode.cli.main", "bootstrap", "run", "--home", "home"],
            *["--listen", "/ip4/127.0.0.1/tcp/0"],
            cwd=tmp_path,
            env=environment,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL,
        )
        try:
            await here.until(lambda: len(here.got) >= 2)
            assert here.attributes()["service.name"] == "swarmnode"
            assert here.attributes()["swarmnode.run"] != run and "swarmnode_reach" in here.metrics()
        finally:
            process.terminate()
            async with asyncio.timeout(BOUND_S):
                await process.wait()
        events = [json.loads(line)["event"] for line in (tmp_path / "home" / "events.jsonl").read_text().splitlines()]
        assert "metrics.push_failed" not in events
