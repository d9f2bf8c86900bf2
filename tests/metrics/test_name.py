"""The tables of names and of events: Prometheus practice, and the code says those names, no more and no fewer."""

import ast
import functools
from collections import defaultdict
from collections.abc import Iterator

import pytest

from swarmnode.base.metrics import name
from swarmnode.base.metrics.event import EVENTS
from swarmnode.base.metrics.name import MetricKind
from tests.support.package_source import MODULES, PRODUCT, ROOT, nodes


@pytest.mark.parametrize("metric", name.METRICS.values(), ids=lambda metric: metric.name)
def test_a_metric_follows_prometheus_practice(metric: name.Metric) -> None:
    assert metric.name.startswith("swarmnode_")
    assert metric.name == metric.name.lower()
    assert metric.help.endswith(".")
    assert (metric.kind is MetricKind.COUNTER) == metric.name.endswith("_total")
    stem = metric.name.removesuffix("_total")
    if metric.unit in ("seconds", "bytes", "nats"):
        assert stem.endswith("_" + metric.unit)
    assert not stem.endswith(("_ms", "_milliseconds", "_kb", "_mb"))
    assert not set(metric.labels) & {"peer", "peer_id", "node", "feeder", "address", "instance", "job"}
    assert bool(metric.buckets) == (metric.kind is MetricKind.HISTOGRAM)
    assert list(metric.buckets) == sorted(metric.buckets)


def test_series_are_written_as_prometheus_writes_them() -> None:
    assert name.series(name.SAMPLES) == "swarmnode_samples_total"
    key = name.series(name.LINK_BYTES, kind="gossip", direction="sent")
    assert key == 'swarmnode_link_bytes_total{direction="sent",kind="gossip"}'


@pytest.mark.node
def test_the_code_says_each_metric_with_its_kind_and_labels() -> None:
    """So that no node dies of a typing error. Labels that are not written out are checked when they are said."""
    kinds = {"count": MetricKind.COUNTER, "gauge": MetricKind.GAUGE, "observe": MetricKind.HISTOGRAM}
    calls = 0
    wrong = list[str]()
    said = set[str]()
    for path in MODULES:
        for node in nodes(path):
            match node:
                case ast.Attribute(ast.Name("name"), constant) if path in PRODUCT and "dashboard" not in path.parts:
                    said.add(str(getattr(name, constant, "")))
                case ast.Call(
                    func=ast.Attribute(attr=verb), args=[ast.Attribute(value=ast.Name("name"), attr=constant), *_]
                ) if verb in kinds:
                    calls += 1
                    labels = {word.arg or "**": word.value for word in node.keywords if word.arg != "value"}
                    row = name.METRICS[getattr(name, constant)]
                    unlike = "**" not in labels and row.labels.keys() != labels.keys()
                    values = {label: one.value for label, one in labels.items() if isinstance(one, ast.Constant)}
                    if (
                        unlike
                        or row.kind is not kinds[verb]
                        or any(
                            value not in row.labels[label]
                            for label, value in values.items()
                            if row.labels[label] not in (name.OPEN, name.FREE)
                        )
                    ):
                        wrong.append(f"{path.relative_to(ROOT)}:{node.lineno}: {verb} {constant} {sorted(labels)}")
    assert calls > 60 and not wrong, "not in swarmnode/base/metrics/name.py:\n" + "\n".join(wrong)
    assert name.METRICS.keys() <= said, f"no node sets {sorted(name.METRICS.keys() - said)}"


EMITTERS = {"event", "_event", "write"}
BY_MAPPING = {
    "archive.compared",
    "bootstrap.connected",
    "bootstrap.unreachable",
    "events.more",
    "exchange.lone",
    "exchange.onesided",
    "exchange.paired",
    "notice.received",
}
"""Events whose fields are not all written where they are emitted; the telemetry of tests checks them at run time."""


def literals(node: ast.expr) -> Iterator[str]:
    """The event names that `node` may be: one, one of two, or those an f-string begins."""
    match node:
        case ast.Constant(value=str() as text):
            yield text
        case ast.IfExp():
            yield from (*literals(node.body), *literals(node.orelse))
        case ast.JoinedStr(values=[ast.Constant(value=str() as begun), *_]):
            yield from (event for event in EVENTS if event.startswith(begun) and event in BY_MAPPING)


@functools.cache
def emitted() -> dict[str, set[str]]:
    """The fields of each event, over all places that emit it."""
    found = defaultdict[str, set[str]](set)
    for path in MODULES:
        for node in nodes(path):
            if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.args):
                continue
            if node.func.attr in EMITTERS:
                for event in literals(node.args[0]):
                    if "." in event and " " not in event:
                        found[event] |= {word.arg for word in node.keywords if word.arg} - {"level"}
    return found


def test_declared_events_are_those_emitted() -> None:
    """An event that no code emits would be documented, and waited for in vain."""
    assert emitted().keys() == EVENTS.keys()


@pytest.mark.parametrize("event", sorted(EVENTS.keys() - BY_MAPPING))
def test_declared_fields_are_those_emitted(event: str) -> None:
    assert emitted()[event] == set(EVENTS[event].fields)
