"""Push metrics by OTLP over HTTP, for collectors that do not scrape. Configured by OpenTelemetry's standard variables.

OTEL_EXPORTER_OTLP_ENDPOINT (or ..._METRICS_ENDPOINT) turns it on. The exporter reads it and ..._HEADERS, ..._TIMEOUT,
..._COMPRESSION, ..._CERTIFICATE itself; OTEL_METRIC_EXPORT_INTERVAL (ms), OTEL_SERVICE_NAME, OTEL_RESOURCE_ATTRIBUTES,
OTEL_METRICS_EXPORTER=none and OTEL_SDK_DISABLED=true have the specification's meaning. The pushed values equal those of
/metrics at the same moment: there is one set of counters, and the SDK's own instruments are not used.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import math
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from swarmnode import __version__
from swarmnode.metrics import name

if TYPE_CHECKING:
    from opentelemetry.sdk.metrics.export import (
        HistogramDataPoint,
        Metric,
        MetricExporter,
        MetricsData,
        NumberDataPoint,
    )
    from prometheus_client import CollectorRegistry
    from prometheus_client.metrics_core import Metric as Family
    from prometheus_client.samples import Sample

INTERVAL_S = 60.0  # OpenTelemetry specification, OTEL_METRIC_EXPORT_INTERVAL
INTERVAL_MIN_S = 0.1
GOODBYE_S = 3.0  # guess: time for the last push; an unreachable collector must not delay a preempted node
MISSING = (
    "OTEL_EXPORTER_OTLP_ENDPOINT is set, but not the packages for it: pip install opentelemetry-sdk"
    " opentelemetry-exporter-otlp-proto-http"
)

UNITS = {"bytes": "By", "seconds": "s", "": ""}  # UCUM; counts of things are written {things}


def wanted(environment: Mapping[str, str]) -> bool:
    """Whether the standard variables ask for metrics to be pushed."""
    endpoint = environment.get("OTEL_EXPORTER_OTLP_METRICS_ENDPOINT") or environment.get("OTEL_EXPORTER_OTLP_ENDPOINT")
    disabled = environment.get("OTEL_SDK_DISABLED", "").strip().lower() == "true"
    return bool(endpoint) and not disabled and environment.get("OTEL_METRICS_EXPORTER", "otlp").strip() != "none"


def interval_s(environment: Mapping[str, str]) -> float:
    """Seconds between two pushes; the standard's default if the variable is missing or not a number."""
    try:
        seconds = float(environment.get("OTEL_METRIC_EXPORT_INTERVAL", "")) / 1000.0
    except ValueError:
        return INTERVAL_S
    return max(INTERVAL_MIN_S, seconds) if math.isfinite(seconds) and seconds > 0 else INTERVAL_S


class OtlpPusher:
    """Pushes the metrics in `registry`. `failed` is called once each time the collector becomes unreachable."""

    def __init__(
        self, registry: CollectorRegistry, run: str, node: str, unix_s: Callable[[], float], failed: Callable[[], None]
    ) -> None:
        """Raises ImportError when OpenTelemetry is not installed."""
        from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter

        logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)  # it reports on stderr what `failed` reports
        self._registry = registry
        self._unix_s = unix_s
        self._failed = failed
        self._failing = False
        self._began_ns = int(unix_s() * 1e9)
        self._attributes = {
            "service.name": "swarmnode",
            "service.version": __version__,
            "service.instance.id": node,
            "swarmnode.run": run,
        }
        self._exporter: MetricExporter = OTLPMetricExporter()

    async def run(self, period_s: float) -> None:
        """Push every `period_s`, until cancelled."""
        while True:
            await asyncio.sleep(period_s)
            await self.once()

    async def close(self) -> None:
        """A last push, within GOODBYE_S."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(GOODBYE_S):
                await self.once()
        self._exporter.shutdown()  # also ends a push that is being retried

    async def once(self) -> None:
        """Push what is counted now."""
        data = metrics_data(self._registry, self._attributes, self._began_ns, int(self._unix_s() * 1e9))
        taken = await self._export(data)
        if not taken and not self._failing:
            self._failed()
        self._failing = not taken

    async def _export(self, data: MetricsData) -> bool:
        """Push on a separate thread that is not joined at the end: a collector that does not answer holds a request for
        OTEL_EXPORTER_OTLP_TIMEOUT (10 s), which a preempted machine does not have."""
        from opentelemetry.sdk.metrics.export import MetricExportResult

        loop = asyncio.get_running_loop()
        done: asyncio.Future[bool] = loop.create_future()

        def tell(taken: bool) -> None:
            if not done.done():
                done.set_result(taken)

        def work() -> None:
            taken = self._exporter.export(data) is MetricExportResult.SUCCESS
            with contextlib.suppress(RuntimeError):  # the loop has ended meanwhile
                loop.call_soon_threadsafe(tell, taken)

        threading.Thread(target=work, name="otlp", daemon=True).start()
        return await done


def metrics_data(registry: CollectorRegistry, attributes: Mapping[str, str], began_ns: int, now_ns: int) -> MetricsData:
    """All of `registry` in OpenTelemetry's form. Names are those of /metrics, without `_total`."""
    from opentelemetry.sdk.metrics.export import MetricsData, ResourceMetrics, ScopeMetrics
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.util.instrumentation import InstrumentationScope

    rows = [metric for family in registry.collect() if (metric := _metric(family, began_ns, now_ns)) is not None]
    scope = ScopeMetrics(InstrumentationScope("swarmnode", __version__), rows, "")
    return MetricsData([ResourceMetrics(Resource.create(dict(attributes)), [scope], "")])


def _metric(family: Family, began_ns: int, now_ns: int) -> Metric | None:
    from opentelemetry.sdk.metrics.export import AggregationTemporality, Gauge, Histogram, Metric, Sum

    cumulative = AggregationTemporality.CUMULATIVE
    data: Sum | Gauge | Histogram
    if family.type == "counter":
        data = Sum(_numbers(family.samples, "_total", began_ns, now_ns), cumulative, is_monotonic=True)
    elif family.type == "gauge":
        data = Gauge(_numbers(family.samples, "", began_ns, now_ns))
    elif family.type == "histogram":
        data = Histogram(list(_histograms(family, began_ns, now_ns)), cumulative)
    else:
        return None
    return Metric(family.name, family.documentation, _unit(family.name), data) if data.data_points else None


def _unit(family: str) -> str:
    row = name.METRICS.get(family) or name.METRICS.get(f"{family}_total")
    unit = row.unit if row is not None else "seconds" if family.endswith("_seconds") else ""
    return UNITS.get(unit, f"{{{unit}}}")


def _numbers(samples: Iterable[Sample], suffix: str, began_ns: int, now_ns: int) -> Sequence[NumberDataPoint]:
    from opentelemetry.sdk.metrics.export import NumberDataPoint

    return [
        NumberDataPoint(dict(sample.labels), began_ns, now_ns, sample.value)
        for sample in samples
        if sample.name.endswith(suffix) and math.isfinite(sample.value)
    ]


def _histograms(family: Family, began_ns: int, now_ns: int) -> Iterable[HistogramDataPoint]:
    """A point per set of labels: Prometheus's buckets are cumulative, OpenTelemetry's are not."""
    from opentelemetry.sdk.metrics.export import HistogramDataPoint

    points: dict[tuple[tuple[str, str], ...], dict[float, float]] = {}
    sums: dict[tuple[tuple[str, str], ...], float] = {}
    for sample in family.samples:
        labels = tuple(sorted((key, value) for key, value in sample.labels.items() if key != "le"))
        if sample.name.endswith("_bucket"):
            points.setdefault(labels, {})[float(sample.labels["le"])] = sample.value
        elif sample.name.endswith("_sum"):
            sums[labels] = sample.value
    for labels, buckets in points.items():
        bounds = sorted(buckets)
        below = [0.0, *(buckets[bound] for bound in bounds)]
        counts = [int(upper - lower) for lower, upper in itertools.pairwise(below)]
        yield HistogramDataPoint(
            attributes=dict(labels),
            start_time_unix_nano=began_ns,
            time_unix_nano=now_ns,
            count=sum(counts),
            sum=sums.get(labels, 0.0),
            bucket_counts=counts,
            explicit_bounds=[bound for bound in bounds if math.isfinite(bound)],
            min=None,  # type: ignore[arg-type]  # unknown, and optional on the wire
            max=None,  # type: ignore[arg-type]
        )
