"""A node's telemetry: metrics in its own Prometheus registry, served over HTTP from the node's own loop.

Rate limits for events that peers cause, so that one peer cannot push a node's history out of its log.

There is a bucket for each peer, and one for all peers, so that many keys gain little. Excess events are counted and
reported in one line per minute: "N more of EVENT from PEER". Events that repeat themselves are counted likewise. Events
of a node's own rhythm, such as the end of a round, are never limited.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import prometheus_client
from aiohttp import web
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.openmetrics import exposition as openmetrics

from swarmnode import __version__
from swarmnode.base.metrics import name
from swarmnode.base.metrics.events import LOG_BYTES_MAX, Echo, EventLog
from swarmnode.base.metrics.http_server import HttpServer
from swarmnode.base.metrics.name import MetricKind
from swarmnode.base.ports import Clock
from swarmnode.base.token_bucket import PeerBudget, TokenBucket
from swarmnode.base.wire.record_pb2 import NodeState

PROVOKED: Final = frozenset(
    {
        "final_delta.merged",
        "final_delta.stale",
        "call.failed",
        "exchange.onesided",
        "exchange.refused",
        "exchange.fallback",
        "gate.changed",
        "microbatch.moved",
        "microbatch.refused",
        "peer.banned",
        "peer.excluded",
        "peer.gone",
        "peer.left_out",
        "peer.unbanned",
        "progress.doubted",
        "receipt.failed",
        "receipt.given",
        "receipt.got",
        "record.refused",
        "recovery.kept",
        "state.failed",
        "state.served",
    }
)
"""Events that a peer can cause as often as it likes, or as often as we call it."""

REPEATED: Final = frozenset(
    {
        "access_list.failed",
        "archive.failed",
        "audit.done",
        "bootstrap.unreachable",
        "directory.failed",
        "notice.unreadable",
        "recovery.source_failed",
        "recovery.waiting",
        "stage.stays",
        "state.waiting",
        "table.missed",
    }
)
"""Events of what is tried again, or comes with each answer: for hours they may say the same. The first is written, its
repeats are counted: the same words about whatever peer, round and number."""

# Derived. Of one peer 1 KB/s, so that a log of 32 MiB lasts nine hours; of all 4 KB/s, more than two hours.
PEER_PER_S = 2.0
PEER_BURST = 128.0
ALL_PER_S = 8.0
ALL_BURST = 1024.0
SUMMARY_S = 60.0  # guess: between two lines about the same peer and kind
WORDS_MAX = 32  # of a reason: enough to tell two of them apart (guess)
KEPT_MAX = 4096  # derived: buckets and counts kept, 0.8 MB


@dataclass(slots=True)
class _Held:
    """Events not written since `since_s`."""

    since_s: float
    count: int = 0


def alike(event: str, fields: Mapping[str, object]) -> tuple[str, str] | None:
    """The mark that repeats of a REPEATED event share: its name, and its outcome and reason without the words that have
    digits, as numbers and keys do; None for another event."""
    if event not in REPEATED:
        return None
    words = f"{fields.get('outcome', '')} {fields.get('reason', '')}".split()[:WORDS_MAX]
    return event, " ".join(word for word in words if not any(letter.isdigit() for letter in word))


class EventLimiter:
    """The buckets of one log. Pure: time is an argument, in seconds that may also jump back."""

    def __init__(self) -> None:
        self._all = TokenBucket.full(ALL_PER_S, ALL_BURST)
        self._peers = PeerBudget(PEER_PER_S, PEER_BURST)
        self._held: OrderedDict[tuple[str, str], _Held] = OrderedDict()  # oldest first
        self._repeats: OrderedDict[tuple[str, str], _Held] = OrderedDict()  # likewise; of those that were written

    def admit(self, event: str, fields: Mapping[str, object], now_s: float) -> bool:
        """Whether to write the event; otherwise it is counted."""
        if (words := alike(event, fields)) is not None:
            return self._is_new(words, now_s)
        if event not in PROVOKED:
            return True
        peer = str(fields.get("peer", ""))
        buckets = [self._all, self._peers.of(peer)] if peer else [self._all]
        if min(bucket.fill(now_s) for bucket in buckets) >= 1.0:
            for bucket in buckets:
                bucket.take(now_s)
            return True
        held = self._held.setdefault((event, peer), _Held(now_s))
        held.count += 1
        if len(self._held) > KEPT_MAX:  # too many keys to report each: count it as unnamed
            (other, _), lost = self._held.popitem(last=False)
            self._held.setdefault((other, ""), _Held(lost.since_s)).count += lost.count
        return False

    def _is_new(self, words: tuple[str, str], now_s: float) -> bool:
        """Whether nothing like it was written of late; otherwise it is counted."""
        if (known := self._repeats.get(words)) is not None:
            known.count += 1
            return False
        self._repeats[words] = _Held(now_s)
        if len(self._repeats) > KEPT_MAX:
            (event, _), lost = self._repeats.popitem(last=False)
            if lost.count:
                self._held.setdefault((event, ""), _Held(lost.since_s)).count += lost.count
        return True

    def due(self, now_s: float) -> list[dict[str, str | int]]:
        """The suppressed events that are due to be reported, as fields of `events.more`: `count` events of one kind
        from one peer ("": unnamed) were not written within `seconds`."""
        told = list[dict[str, str | int]]()
        while self._held:
            (event, peer), held = next(iter(self._held.items()))
            seconds = now_s - held.since_s
            if 0.0 <= seconds < SUMMARY_S:
                break
            del self._held[event, peer]
            told.append({"of": event, "peer": peer, "count": held.count, "seconds": round(max(0.0, seconds))})
        return told + self._due_repeats(now_s)

    def _due_repeats(self, now_s: float) -> list[dict[str, str | int]]:
        told = list[dict[str, str | int]]()
        while self._repeats:
            (event, words), known = next(iter(self._repeats.items()))
            seconds = now_s - known.since_s
            if 0.0 <= seconds < SUMMARY_S:
                break
            del self._repeats[event, words]
            if known.count:  # it goes on: its repeats are counted further
                told.append({"of": event, "reason": words, "count": known.count, "seconds": round(max(0.0, seconds))})
                self._repeats[event, words] = _Held(now_s)
        return told


Series = Counter | Gauge | Histogram

NODE_STATES = {number: word.removeprefix("NODE_STATE_").lower() for word, number in NodeState.items()}


class PrometheusTelemetry:
    """The Telemetry port over its own registry and a log of JSON lines.

    `path` None keeps no log. `hear` is called with each event and its fields, also with those that the log only counts.
    A metric, label or event missing in base/metrics/name.py and event.py raises AssertionError.
    May be called from the compute thread.
    """

    def __init__(
        self,
        *,
        clock: Clock,
        run: str,
        node: str,
        path: Path | None = None,
        log_bytes_max: int = LOG_BYTES_MAX,
        echo: Echo | None = None,
        hear: Callable[[str, Mapping[str, object]], None] | None = None,
    ) -> None:
        self._hear = hear
        self.log = EventLog(path, clock=clock, run=run, node=node, nbytes_max=log_bytes_max, echo=echo)
        self._clock = clock
        self._flood = EventLimiter()
        prometheus_client.disable_created_metrics()  # type: ignore[no-untyped-call]
        self.registry = CollectorRegistry(auto_describe=False)
        ProcessCollector(registry=self.registry)
        self._metrics = {row.name: _make(row, self.registry) for row in name.METRICS.values()}
        self._series: dict[tuple[str, tuple[tuple[str, str], ...]], Series] = {}
        app = web.Application()
        app.router.add_get("/metrics", self._exposition)
        app.router.add_get("/healthz", self._healthz)
        app.router.add_get("/readyz", self._readyz)
        self._server = HttpServer(app)
        self._dropped_counted = 0
        self._state = NODE_STATES[0]
        self.readiness: Callable[[], tuple[bool, str]] = lambda: (self._state == "training", self._state)
        self.gauge(name.INFO, 1, run=run, version=__version__)

    @property
    def stage(self) -> int | None:
        """The stage written into every later event."""
        return self.log.stage

    @stage.setter
    def stage(self, stage: int | None) -> None:
        self.log.stage = stage
        self.gauge(name.STAGE, -1 if stage is None else stage)

    def event(self, event: str, *, level: str = "info", **fields: object) -> None:
        """Append one line to the log, unless a peer causes too many like it. Never raises for a full disk."""
        if self._hear is not None:
            self._hear(event, fields)
        now_s = self._clock.unix_s()
        for more in self._flood.due(now_s):
            self.log.write("events.more", level="info" if "reason" in more else "warning", fields=more)
        if self._flood.admit(event, fields, now_s):
            self.log.write(event, level=level, fields=fields)
        if self.log.dropped > self._dropped_counted:
            self.count(name.EVENTS_DROPPED, self.log.dropped - self._dropped_counted)
            self._dropped_counted = self.log.dropped

    def count(self, metric: str, value: float = 1.0, **labels: str) -> None:
        """Add `value` (not negative) to a counter."""
        assert value >= 0, f"counter {metric} cannot go down by {-value}"
        series = self._find(metric, MetricKind.COUNTER, labels)
        assert isinstance(series, Counter)
        series.inc(value)

    def gauge(self, metric: str, value: float, **labels: str) -> None:
        """Set a gauge."""
        series = self._find(metric, MetricKind.GAUGE, labels)
        assert isinstance(series, Gauge)
        series.set(value)
        if metric == name.STAGE:
            self.log.stage = int(value) if value >= 0 else None
        elif metric == name.STATE:
            self._state = NODE_STATES[int(value)]

    def observe(self, metric: str, value: float, **labels: str) -> None:
        """Add one observation to a histogram."""
        series = self._find(metric, MetricKind.HISTOGRAM, labels)
        assert isinstance(series, Histogram)
        series.observe(value)

    def counters(self) -> dict[str, float]:
        """Every series except histogram buckets, keyed as by `name.series` (StatusReply.counters)."""
        counts: dict[str, float] = {}
        for row, metric in self._metrics.items():
            if row == name.INFO:
                continue
            for family in metric.collect():
                for sample in family.samples:
                    if not sample.name.endswith("_bucket"):
                        counts[name.series(sample.name, **sample.labels)] = sample.value
        return counts

    async def serve(self, port: int, host: str = "127.0.0.1") -> str:
        """Serve GET /metrics, /healthz and /readyz on `host`:`port` (0: any free one) until `close`; return host:port.

        Raises UsageError if the port is not available.
        """
        shown = f"[{host}]" if ":" in host else host
        return f"{shown}:{await self._server.start(host, port, '--metrics-port')}"

    async def close(self) -> None:
        """Stop serving, cut the connections and close the log. A second call does nothing."""
        await self._server.close()
        self.log.close()

    def _find(self, metric: str, kind: MetricKind, labels: Mapping[str, str]) -> Series:
        key = (metric, tuple(sorted(labels.items())))
        series = self._series.get(key)
        if series is None:
            name.check_metric(metric, kind, labels)
            whole = self._metrics[metric]
            series = whole.labels(**labels) if labels else whole
            self._series[key] = series
        return series

    async def _healthz(self, request: web.Request) -> web.Response:
        return web.Response(text="alive\n")  # an answer proves that the event loop runs

    async def _readyz(self, request: web.Request) -> web.Response:
        ready, reason = self.readiness()
        return web.Response(status=200 if ready else 503, text=f"{reason}\n")

    async def _exposition(self, request: web.Request) -> web.Response:
        """OpenMetrics if the scraper asks for it, as Prometheus does, else the older text format."""
        if "application/openmetrics-text" in request.headers.get("Accept", ""):
            kind = openmetrics.CONTENT_TYPE_LATEST
            body = openmetrics.generate_latest(self.registry)  # type: ignore[no-untyped-call]
        else:
            kind = CONTENT_TYPE_LATEST
            body = generate_latest(self.registry)
        return web.Response(body=body, headers={"Content-Type": kind})


def _make(row: name.Metric, registry: CollectorRegistry) -> Series:
    """The collector of one row. Series of closed labels exist from the start, at 0, so that rates are defined."""
    labels = tuple(row.labels)
    unit = row.unit if row.unit in name.BASE_UNITS else ""  # OpenMetrics: a unit is the last word of the name
    match row.kind:
        case MetricKind.COUNTER:
            made: Series = Counter(row.name, row.help, labels, unit=unit, registry=registry)
        case MetricKind.GAUGE:
            made = Gauge(row.name, row.help, labels, unit=unit, registry=registry)
        case MetricKind.HISTOGRAM:
            made = Histogram(row.name, row.help, labels, unit=unit, registry=registry, buckets=row.buckets)
    if labels and row.kind is MetricKind.COUNTER and all(row.labels.values()):
        for values in itertools.product(*row.labels.values()):
            made.labels(*values)
    return made
