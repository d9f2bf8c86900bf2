"""Makes remote text safe to show: one line, no control characters, no addresses, names for ids. Pure."""

from __future__ import annotations

import re
from collections.abc import Callable

from swarmnode.metrics.event import LEVELS
from swarmnode.untrusted_text import printable
from swarmnode.wire import report_pb2

LINKS_MAX = 64
EVENTS_MAX = 256
RECEIPTS_MAX = 64
PEER_CHARS_MAX = 64  # a peer id has 52
LATENCY_MAX_S = 3600.0
NUMBER_MAX = 2**53  # exact in JavaScript numbers, and fits SQLite

_ID = re.compile(r"\b(12D3Koo[1-9A-HJ-NP-Za-km-z]{45}|[1-9A-HJ-NP-Za-km-z]{8})\b")
_ADDRESS = re.compile(r"/(?:ip4|ip6|dns[46]?)/\S+")


def named(text: str, name_of: Callable[[str], str | None]) -> str:
    """Replace peer ids in `text`, whole or their last eight characters, by names. Unknown ids are shortened."""
    return _ID.sub(lambda match: name_of(match[0]) or match[0][-8:], text)


def brief(reason: str) -> str:
    """Shorten an error's text: without addresses and the details of failed dials, which only its node can use."""
    return _ADDRESS.sub("its address", reason.partition(": failed to dial")[0])


def clean(text: str) -> str:
    """Put remote `text` on one line without control characters."""
    return printable(text, len(text)).strip()


def number(text: str | None) -> float | None:
    """Parse a finite number. None when `text` is not one."""
    try:
        value = float(text) if text is not None else None
    except ValueError:
        return None
    return value if value is not None and abs(value) != float("inf") and value == value else None


def sane(report: report_pb2.Report) -> report_pb2.Report:
    """Clean `report` in place: clear numbers that are not finite or impossibly large, limit links, events and receipts,
    and replace unknown event levels."""
    status = report.status
    for field, value in status.ListFields():
        if isinstance(value, float) and not abs(value) <= NUMBER_MAX:  # also true for NaN
            status.ClearField(field.name)
    for key in [key for key, value in status.counters.items() if not abs(value) <= NUMBER_MAX]:
        del status.counters[key]
    del report.links[LINKS_MAX:]
    del report.receipts[RECEIPTS_MAX:]
    for link in report.links:
        link.peer_id = link.peer_id[:PEER_CHARS_MAX]
        if not 0.0 <= link.latency_s <= LATENCY_MAX_S:
            link.latency_s = 0.0
    report.incarnation %= NUMBER_MAX
    report.unix_ms = min(report.unix_ms, NUMBER_MAX)
    status.samples_total = status.samples_total if status.samples_total <= NUMBER_MAX else 0
    status.inner_steps = status.inner_steps if status.inner_steps <= NUMBER_MAX else 0
    status.resident_nbytes = status.resident_nbytes if status.resident_nbytes <= NUMBER_MAX else 0
    for index in reversed(range(len(report.events))):
        event = report.events[index]
        if index >= EVENTS_MAX or event.serial > NUMBER_MAX:
            del report.events[index]
        elif event.level not in LEVELS:
            event.level = "info"
    return report
