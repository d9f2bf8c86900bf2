"""The table of events (metrics/event.py) holds what the code emits: no more, no less."""

import ast
import functools
from collections import defaultdict
from collections.abc import Iterator

import pytest

from swarmnode.metrics.event import EVENTS, check_event
from tests.support.package_source import MODULES, nodes

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


def test_unknown_events_levels_and_fields_are_our_bug() -> None:
    check_event("exchange.paired", "info", ["round", "peer"])
    with pytest.raises(AssertionError, match=r"exchange\.lost"):
        check_event("exchange.lost", "info")
    with pytest.raises(AssertionError, match="loud"):
        check_event("exchange.paired", "loud")
    with pytest.raises(AssertionError, match="colour"):
        check_event("exchange.paired", "info", ["round", "colour"])
