"""Turns events of nodes into sentences for the timeline. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import asdict, dataclass

from swarmnode.base.ids import PeerId, short
from swarmnode.base.metrics.event import EVENTS, told
from swarmnode.base.metrics.events import nbytes_text
from swarmnode.net.membership.state_line import lost_text

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

SENTENCES = {
    "node.ready": ("arrival", "serves stage {serves}"),
    "node.draining": ("departure", "is leaving{because}"),
    "node.left": ("departure", "has left"),
    "stage.chosen": ("move", "took stage {serves}{because}"),
    "stage.moving": ("move", "moves from stage {source} to stage {target}{because}"),
    "stage.moved": ("move", "has moved to stage {target}{because}"),
    "stage.lost": ("recovery", "finds that nobody serves stage {of_stage} any more{because}"),
    "stage.back": ("recovery", "finds stage {of_stage} served again after {seconds} s"),
    "recovery.began": ("recovery", "brings stage {stage} back by {method}{because}"),
    "recovery.done": ("recovery", "got its stage from {origin} in {seconds} s{size}{back}"),
    "state.kept": ("recovery", "is back with the newer state of its stage: {lost}"),
    "state.behind": ("recovery", "takes the newer state of its stage{because}"),
    "notice.received": ("preemption", "was told by {source} that it will be taken away{because}"),
    "drain.cut": ("preemption", "had no time for one step of leaving, {step}{because}"),
    "checkpoint.complete": ("checkpoint", "completed a checkpoint"),
    "peer.banned": ("fault", "sends {who} no work for now{because}"),
    "gate.changed": ("fault", "keeps strangers away{because}"),
    "exchange.refused": ("fault", "refused an exchange in round {round}{because}"),
    "exchange.onesided": ("fault", "cannot tell whether {who} applied round {round}"),
}
"""(kind, sentence) of an event; the words in braces are its fields, or those of `_words`."""

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
    """Returns (kind, text) for events with their own sentence. Other events use the meaning in
    base/metrics/event.py."""
    if event not in SENTENCES or (event == "node.draining" and "cut" in fields):
        return None
    kind, text = SENTENCES[event]
    return kind, text.format_map(_words(fields))


def _words(fields: Mapping[str, str]) -> Mapping[str, str]:
    """The words that a sentence can name: the event's fields, and words made of them. A missing field is a question
    mark."""
    words = defaultdict(lambda: "?", {key: _short(str(told(key, value))) for key, value in fields.items()})
    words["because"] = _because(fields)
    words["who"] = _who(fields)
    words["lost"] = lost_text(fields.get("lost"))
    words["origin"] = "a replica" if fields.get("method") == "replica" else words["method"]
    words["size"] = f", {nbytes_text(float(fields['nbytes']))}" if fields.get("nbytes", "").isdecimal() else ""
    words["back"] = f": round {words['round']}, {lost_text(fields['behind'])}" if "behind" in fields else ""
    return words


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
