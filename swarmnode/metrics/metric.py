"""The rows of the table of metrics (metrics/name.py), and the check that a call fits one."""

from __future__ import annotations

import enum
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final


class MetricKind(enum.StrEnum):
    """The kind of a metric: it grows, goes up and down, or is spread over buckets."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


OPEN: Final[tuple[str, ...]] = ()
"""A label whose values are not listed: any word of letters and underscores, at most 32 long."""

FREE: Final[tuple[str, ...]] = ("",)
"""A label with arbitrary values whose number does not grow with the swarm: the run's id, or the scores that the
manifest lists."""

BASE_UNITS: Final = ("seconds", "bytes", "nats")
"""Units that end the name; other units are counted things, named in the help."""

_WORD = re.compile(r"[A-Za-z][A-Za-z_]{0,31}\Z")


@dataclass(frozen=True, slots=True)
class Metric:
    """A row: `labels` maps each label to the values it may take (`OPEN`: any word); `buckets` are upper bounds."""

    name: str
    kind: MetricKind
    unit: str
    help: str
    labels: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    buckets: tuple[float, ...] = ()


METRICS: Final[dict[str, Metric]] = {}


def _metric(
    kind: MetricKind,
    name: str,
    unit: str,
    text: str,
    labels: Mapping[str, tuple[str, ...]] | None = None,
    buckets: tuple[float, ...] = (),
) -> str:
    assert name not in METRICS, f"metric {name} is declared twice"
    METRICS[name] = Metric(name, kind, unit, text, labels or {}, buckets)
    return name


def counter(name: str, unit: str, text: str, **labels: tuple[str, ...]) -> str:
    return _metric(MetricKind.COUNTER, name, unit, text, labels)


def gauge(name: str, unit: str, text: str, **labels: tuple[str, ...]) -> str:
    return _metric(MetricKind.GAUGE, name, unit, text, labels)


def histogram(name: str, unit: str, text: str, *buckets: float) -> str:
    return _metric(MetricKind.HISTOGRAM, name, unit, text, None, buckets)


def check_metric(metric: str, kind: MetricKind, labels: Mapping[str, str]) -> Metric:
    """The row of `metric`, after asserting its kind and exactly these labels with allowed values."""
    row = METRICS.get(metric)
    assert row is not None, f"metric {metric!r} is not in metrics/name.py"
    assert row.kind is kind, f"metric {metric} is a {row.kind}, not a {kind}"
    assert labels.keys() == row.labels.keys(), f"metric {metric} has labels {list(row.labels)}, not {list(labels)}"
    for label, value in labels.items():
        allowed = row.labels[label]
        if allowed is FREE:
            continue
        if allowed is OPEN:
            assert _WORD.match(value), f"metric {metric}: {label}={value!r} is not a short word without digits"
        else:
            assert value in allowed, f"metric {metric}: {label}={value!r} is not one of {allowed}"
    return row
