"""What happened, in sentences: events of nodes become entries of the timeline. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from swarmnode.ids import PeerId, short
from swarmnode.metrics.name import EVENTS

TEXT_CHARS_MAX = 240

KINDS = ("arrival", "departure", "move", "recovery", "preemption", "checkpoint", "fault", "alarm")
"""What the page lets one filter by."""

SILENT = frozenset(
    {"peer.gone", "peer.found", "node.state", "node.started", "bootstrap.unreachable", "directory.failed"}
)
"""Never shown: the coordinator sees the same itself, or each node says it about each other."""

_PREFIXES = {
    "preempt": "preemption",
    "notice": "preemption",
    "drain": "preemption",
    "handover": "preemption",
    "recovery": "recovery",
    "checkfree": "recovery",
    "checkpoint": "checkpoint",
}


@dataclass(frozen=True, slots=True)
class Entry:
    """One line of the timeline. `peer` is "" for the run as a whole; `serial` grows."""

    serial: int
    unix_s: float
    peer: str
    name: str
    stage: int | None
    kind: str
    level: str
    text: str

    def to_json(self) -> dict[str, object]:
        return {
            "serial": self.serial,
            "t": round(self.unix_s, 3),
            "peer": self.peer,
            "name": self.name,
            "stage": self.stage,
            "kind": self.kind,
            "level": self.level,
            "text": self.text,
        }


def sentence(event: str, level: str, fields: Mapping[str, str]) -> tuple[str, str] | None:
    """(kind, text) of an event as the timeline shows it; None for what it does not show."""
    if event in SILENT or (event.startswith("exchange.") and level not in ("warning", "error")):
        return None
    found = _known(event, fields)
    if found is None:
        kind = _PREFIXES.get(event.partition(".")[0], "fault" if level in ("warning", "error") else "")
        if not kind:
            return None
        found = kind, f"{EVENTS.get(event, event)}{_because(fields)}"
    kind, text = found
    return kind, text[:TEXT_CHARS_MAX]


def _known(event: str, fields: Mapping[str, str]) -> tuple[str, str] | None:
    match event:
        case "node.ready":
            return "arrival", f"serves stage {fields.get('serves', '?')}"
        case "node.draining" if "cut" not in fields:
            return "departure", f"is leaving; finishes {fields.get('held', '0')} microbatches it holds"
        case "node.left":
            return "departure", "has left"
        case "stage.chosen":
            return "move", f"took stage {fields.get('serves', '?')}{_because(fields)}"
        case "stage.moved":
            to = fields.get("to", fields.get("serves", "?"))
            return "move", f"moved to stage {to}{_because(fields)}"
        case "recovery.done" if fields.get("method") == "replica":
            size = f", {nbytes_text(fields['nbytes'])}" if "nbytes" in fields else ""
            return "recovery", f"got its stage from a replica in {fields.get('seconds', '?')} s{size}"
        case "peer.banned":
            return "fault", f"sends {_who(fields)} no work for now{_because(fields)}"
        case "exchange.refused":
            return "fault", f"refused an exchange in round {fields.get('round', '?')}{_because(fields)}"
        case "exchange.onesided":
            return "fault", f"cannot tell whether {_who(fields)} applied round {fields.get('round', '?')}"
        case _:
            return None


def _who(fields: Mapping[str, str]) -> str:
    return short(PeerId(fields["peer"])) if fields.get("peer") else "a peer"


def _because(fields: Mapping[str, str]) -> str:
    reason = fields.get("reason") or fields.get("why") or ""
    return f": {reason}" if reason else ""


def nbytes_text(nbytes: str) -> str:
    """`nbytes`, a number as text, in decimal units."""
    try:
        value = float(nbytes)
    except ValueError:
        return nbytes
    for unit in ("B", "kB", "MB", "GB"):
        if value < 1000:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1000
    return f"{value:.1f} TB"
