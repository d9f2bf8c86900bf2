"""Turns events of nodes into sentences for the timeline. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import asdict, dataclass

from swarmnode.ids import PeerId, short
from swarmnode.membership.state_line import lost_text
from swarmnode.metrics.event import EVENTS
from swarmnode.metrics.events import nbytes_text

TEXT_CHARS_MAX = 240

KINDS = ("arrival", "departure", "move", "recovery", "preemption", "checkpoint", "fault", "alarm")
"""The kinds of entries that the page can filter by."""

SILENT = frozenset(
    {
        "bootstrap.unreachable",
        "checkpoint.pruned",
        "checkpoint.saved",
        "directory.failed",
        "drain.done",
        "node.started",
        "node.state",
        "notice.acknowledged",
        "notice.watching",
        "peer.gone",
        "recovery.kept",
        "stage.stays",
    }
)
"""Events never shown: the coordinator sees them itself, all nodes report them of each other, or they are substeps."""

_PREFIXES = {
    "notice": "preemption",
    "drain": "preemption",
    "recovery": "recovery",
    "checkpoint": "checkpoint",
}


@dataclass(frozen=True, slots=True)
class TimelineEntry:
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
        fields = asdict(self)
        return {"t": round(fields.pop("unix_s"), 3), **fields}


def sentence(event: str, level: str, fields: Mapping[str, str]) -> tuple[str, str] | None:
    """Returns (kind, text) of an event for the timeline, or None for an event that is not shown."""
    if event in SILENT or (event.startswith("exchange.") and level not in ("warning", "error")):
        return None
    if event == "gate.changed" and not fields.get("reason", "").startswith("a flood"):
        return None  # it only looked, or it is over
    known = _known(event, fields)
    if known is None:
        kind = _PREFIXES.get(event.partition(".")[0], "fault" if level in ("warning", "error") else "")
        if not kind:
            return None
        known = kind, f"says: {EVENTS[event].meaning if event in EVENTS else event}{_because(fields)}"
    kind, text = known
    return kind, text[:TEXT_CHARS_MAX]


def _known(event: str, fields: Mapping[str, str]) -> tuple[str, str] | None:
    """Returns (kind, text) for events with their own sentence. Other events use the meaning in metrics/event.py."""
    told = _Told(fields)
    match event:
        case "node.ready":
            return "arrival", told("serves stage {serves}")
        case "node.draining" if "cut" not in fields:
            return "departure", "is leaving" + told.because
        case "node.left":
            return "departure", "has left"
        case "stage.chosen":
            return "move", told("took stage {serves}") + told.because
        case "stage.moving":
            return "move", told("moves from stage {source} to stage {target}") + told.because
        case "stage.moved":
            return "move", told("has moved to stage {target}") + told.because
        case "stage.lost":
            return "recovery", told("finds that nobody serves stage {of_stage} any more") + told.because
        case "stage.back":
            return "recovery", told("finds stage {of_stage} served again after {seconds} s")
        case "recovery.began":
            return "recovery", told("brings stage {stage} back by {method}") + told.because
        case "recovery.done":
            size = f", {nbytes_text(float(fields['nbytes']))}" if fields.get("nbytes", "").isdecimal() else ""
            back = f": round {{round}}, {lost_text(fields['behind'])}" if "behind" in fields else ""
            source = "a replica" if fields.get("method") == "replica" else told("{method}")
            return "recovery", told(f"got its stage from {source} in {{seconds}} s{size}{back}")
        case "state.kept":
            return "recovery", told("is back with the newer state of its stage: ") + lost_text(fields.get("lost"))
        case "state.behind":
            return "recovery", "takes the newer state of its stage" + told.because
        case "notice.received":
            return "preemption", told("was told by {source} that it will be taken away") + told.because
        case "drain.cut":
            return "preemption", told("had no time for one step of leaving, {step}") + told.because
        case "checkpoint.complete":
            return "checkpoint", "completed a checkpoint"
        case "peer.banned":
            return "fault", f"sends {_who(fields)} no work for now{told.because}"
        case "gate.changed":
            return "fault", "keeps strangers away" + told.because
        case "exchange.refused":
            return "fault", told("refused an exchange in round {round}") + told.because
        case "exchange.onesided":
            return "fault", f"cannot tell whether {_who(fields)}" + told(" applied round {round}")
        case _:
            return None


class _Told:
    """Fills fields into a sentence. Missing fields become a question mark."""

    def __init__(self, fields: Mapping[str, str]) -> None:
        self._fields = fields
        self.because = _because(fields)

    def __call__(self, text: str) -> str:
        return text.format_map(defaultdict(lambda: "?", {key: _short(value) for key, value in self._fields.items()}))


def _short(value: str) -> str:
    """Round numbers to three decimal places. Other text stays as it is."""
    try:
        return f"{float(value):.3f}".rstrip("0").rstrip(".")
    except ValueError:
        return value


def _who(fields: Mapping[str, str]) -> str:
    return short(PeerId(fields["peer"])) if fields.get("peer") else "a peer"


def _because(fields: Mapping[str, str]) -> str:
    reason = fields.get("reason") or fields.get("why") or ""
    return f": {reason}" if reason else ""
