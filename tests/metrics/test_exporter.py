"""The exporter: counts arrive, and a real HTTP client can read them."""

import asyncio
import json
import pathlib
import urllib.error
import urllib.request

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as openmetrics_families
from prometheus_client.parser import text_string_to_metric_families

from swarmnode.base.errors import UsageError
from swarmnode.base.metrics import name
from swarmnode.base.metrics.exporter import PrometheusTelemetry
from tests.support.clock import ManualClock


def make(path: pathlib.Path | None = None) -> PrometheusTelemetry:
    return PrometheusTelemetry(clock=ManualClock(), run="run0", node="peer0", path=path)


def fetch(address: str, path: str = "/metrics", method: str = "GET") -> tuple[int, str]:
    request = urllib.request.Request(f"http://{address}{path}", method=method)
    try:
        with urllib.request.urlopen(request, timeout=20) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def test_counters_are_keyed_as_prometheus_writes_series() -> None:
    telemetry = make()
    telemetry.count(name.MICROBATCHES, outcome="done")
    telemetry.count(name.MICROBATCHES, 2, outcome="done")
    telemetry.count(name.LINK_BYTES, 10, kind="gossip", direction="sent")
    telemetry.gauge(name.LOSS, 2.5, split="validation")
    telemetry.observe(name.EXCHANGE_SECONDS, 0.5)
    counters = telemetry.counters()
    assert counters['swarmnode_microbatches_total{outcome="done"}'] == 3
    assert counters['swarmnode_microbatches_total{outcome="lost"}'] == 0
    assert counters['swarmnode_link_bytes_total{direction="sent",kind="gossip"}'] == 10
    assert counters['swarmnode_loss_nats{split="validation"}'] == 2.5
    assert counters["swarmnode_exchange_seconds_count"] == 1
    assert counters["swarmnode_exchange_seconds_sum"] == 0.5
    assert not [key for key in counters if "_bucket" in key or "_created" in key]


def test_what_the_log_only_counts_is_heard_all_the_same() -> None:
    heard = []
    telemetry = PrometheusTelemetry(
        clock=ManualClock(), run="run0", node="peer0", hear=lambda event, fields: heard.append((event, fields["peer"]))
    )
    for peer in ("a", "b", "a"):
        telemetry.event("bootstrap.unreachable", peer=peer, why="refused")
    assert heard == [("bootstrap.unreachable", peer) for peer in ("a", "b", "a")]


def test_names_and_signs_are_checked() -> None:
    telemetry = make()
    with pytest.raises(AssertionError):
        telemetry.count("swarmnode_nothing_total")
    with pytest.raises(AssertionError):
        telemetry.gauge(name.SAMPLES, 1)
    with pytest.raises(AssertionError):
        telemetry.count(name.MICROBATCHES, outcome="vanished")
    with pytest.raises(AssertionError):
        telemetry.count(name.SAMPLES, -1)
    with pytest.raises(AssertionError):
        telemetry.event("nothing.happened")


def test_events_carry_the_stage_and_lost_lines_are_counted(tmp_path: pathlib.Path) -> None:
    telemetry = make(tmp_path / "events.jsonl")
    telemetry.stage = 1
    telemetry.event("stage.chosen", reason="neediest")
    line = json.loads((tmp_path / "events.jsonl").read_text())
    assert (line["stage"], line["fields"]) == (1, {"reason": "neediest"})
    assert telemetry.counters()["swarmnode_stage"] == 1
    lost = make(tmp_path / "missing" / "events.jsonl")
    lost.event("node.ready")
    assert lost.counters()["swarmnode_events_dropped_total"] == 1


async def test_real_http_serves_every_metric_of_the_table() -> None:
    telemetry = make()
    telemetry.count(name.SAMPLES, 64)
    telemetry.observe(name.LOOP_LAG_SECONDS, 0.004)
    for metric in name.METRICS.values():
        if metric.kind is name.MetricKind.GAUGE and metric.labels:
            telemetry.gauge(metric.name, 1, **{label: values[0] for label, values in metric.labels.items()})
    address = await telemetry.serve(0)
    try:
        status, text = await asyncio.to_thread(fetch, address)
        assert status == 200
        families = {family.name: family for family in text_string_to_metric_families(text)}
        assert {metric.removesuffix("_total") for metric in name.METRICS} <= set(families)
        assert families["swarmnode_samples"].samples[0].value == 64
        assert families["swarmnode_info"].samples[0].labels["run"] == "run0"
        assert (await asyncio.to_thread(fetch, address, "/"))[0] == 404
        assert (await asyncio.to_thread(fetch, address, "/metrics", "POST"))[0] == 405
        assert (await asyncio.to_thread(fetch, address, "/metrics", "HEAD")) == (200, "")
    finally:
        await telemetry.close()


async def test_scrapers_that_ask_get_openmetrics() -> None:
    telemetry = make()
    telemetry.count(name.LINK_BYTES, 10, kind="gossip", direction="sent")
    address = await telemetry.serve(0)
    try:
        request = urllib.request.Request(
            f"http://{address}/metrics", headers={"Accept": "application/openmetrics-text;version=1.0.0,*/*;q=0.1"}
        )
        with await asyncio.to_thread(urllib.request.urlopen, request, timeout=20) as answer:
            kind = answer.headers["Content-Type"]
            text = answer.read().decode()
    finally:
        await telemetry.close()
    assert kind.startswith("application/openmetrics-text")
    families = {family.name: family for family in openmetrics_families(text)}
    assert families["swarmnode_link_bytes"].unit == "bytes"
    assert families["swarmnode_exchange_seconds"].unit == "seconds"
    assert families["process_resident_memory_bytes"].samples[0].value > 0


async def test_health_is_the_loop_and_readiness_the_state() -> None:
    telemetry = make()
    address = await telemetry.serve(0, "::1")
    try:
        assert await asyncio.to_thread(fetch, address, "/healthz") == (200, "alive\n")
        assert await asyncio.to_thread(fetch, address, "/readyz") == (503, "unspecified\n")
        telemetry.gauge(name.STATE, 3)
        assert await asyncio.to_thread(fetch, address, "/readyz") == (200, "training\n")
        telemetry.gauge(name.STATE, 4)
        assert await asyncio.to_thread(fetch, address, "/readyz") == (503, "draining\n")
        telemetry.readiness = lambda: (True, "bootstrap")
        assert await asyncio.to_thread(fetch, address, "/readyz") == (200, "bootstrap\n")
    finally:
        await telemetry.close()


async def test_garbage_and_long_heads_do_no_harm() -> None:
    telemetry = make()
    host, _, port = (await telemetry.serve(0)).partition(":")
    try:
        for garbage in (b"\x00\xff\r\n\r\n", b"GET\r\n\r\n", b"GET /metrics HTTP/1.1\r\nA: " + b"x" * 100_000):
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(garbage)
            try:
                answer = await reader.read()
            except ConnectionError:  # reset is as good as closed
                answer = b""
            assert answer == b"" or answer.startswith((b"HTTP/1.1 4", b"HTTP/1.0 4"))
            writer.close()
        assert await asyncio.to_thread(fetch, f"{host}:{port}", "/healthz") == (200, "alive\n")
    finally:
        await telemetry.close()


async def test_a_port_in_use_names_the_flag() -> None:
    first = make()
    second = make()
    host, _, port = (await first.serve(0)).partition(":")
    try:
        with pytest.raises(UsageError, match=rf"--metrics-port {port}: {host}:{port} is in use"):
            await second.serve(int(port))
        with pytest.raises(UsageError, match="--metrics-port 70000"):
            await second.serve(70000)
    finally:
        await first.close()
        await second.close()
