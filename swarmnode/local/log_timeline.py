"""Merge the event logs of several nodes into one timeline."""

from __future__ import annotations

import fnmatch
import heapq
import json
import tarfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from swarmnode.errors import UsageError
from swarmnode.metrics.event import LEVELS

LOG_NAMES = ("events.jsonl.1", "events.jsonl")  # the older first
BUNDLE_NBYTES_MAX = 64 << 20  # logs of a bundle, unpacked: twice what a node keeps (metrics/events.py)
LINE_CHARS_MAX = 1 << 20


@dataclass(frozen=True, slots=True)
class LogLine:
    """An event of one node. `at` is ISO 8601 in UTC, which sorts by time."""

    at: str
    node: str
    stage: int | None
    level: str
    event: str
    fields: Mapping[str, Any]


@dataclass(slots=True)
class Log:
    """A node's log, in order. `bad` counts unreadable lines."""

    path: str
    lines: list[LogLine]
    bad: int = 0


def parse(path: str, texts: Iterable[str]) -> Log:
    """The events of one log. Invalid lines (torn by a crash, for example) are counted and left out."""
    log = Log(path, [])
    for text in texts:
        if not text.strip():
            continue
        line = _line(text) if len(text) <= LINE_CHARS_MAX else None
        if line is None:
            log.bad += 1
        else:
            log.lines.append(line)
    return log


def _line(text: str) -> LogLine | None:
    try:
        parsed = json.loads(text)
        at, node, level, event = (str(parsed[key]) for key in ("ts", "node", "level", "event"))
        stage, fields = parsed.get("stage"), parsed.get("fields") or {}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
    if level not in LEVELS or not isinstance(fields, dict) or not (stage is None or isinstance(stage, int)):
        return None
    return LogLine(at, node, stage, level, event, fields)


def read(path: Path) -> list[Log]:
    """The logs at `path`: a log, a node's home, a folder of homes, or a bundle of `swarmnode report`.

    Raises UsageError if there is none.
    """
    try:
        if path.is_dir():
            paths = sorted(path.rglob(LOG_NAMES[1]))
            logs = [parse(str(home), _texts(home.with_name(name) for name in LOG_NAMES)) for home in paths]
        elif tarfile.is_tarfile(path):
            logs = _bundled(path)
        else:
            logs = [parse(str(path), _texts([path]))]
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror or error}") from None
    if not any(log.lines for log in logs):
        raise UsageError(f"{path}: no events there; give an events.jsonl, a node's home, or a bundle of `report`")
    return logs


def _texts(paths: Iterable[Path]) -> Iterator[str]:
    for path in paths:
        if path.is_file():
            with path.open(encoding="utf-8", errors="replace") as file:
                yield from file


def _bundled(path: Path) -> list[Log]:
    texts: dict[str, list[str]] = {}
    with tarfile.open(path) as bundle:
        members = [member for member in bundle if member.isfile() and Path(member.name).name in LOG_NAMES]
        if (nbytes := sum(member.size for member in members)) > BUNDLE_NBYTES_MAX:
            raise UsageError(f"{path} holds {nbytes} bytes of logs; at most {BUNDLE_NBYTES_MAX} are read: unpack it, "
                             "and give one node's events.jsonl")  # fmt: skip
        for member in sorted(members, key=lambda member: (str(Path(member.name).parent), -len(member.name))):
            file = bundle.extractfile(member)
            assert file is not None
            home = str(Path(member.name).parent)
            texts.setdefault(home, []).extend(file.read().decode(errors="replace").splitlines())
    return [parse(f"{path}:{home}", lines) for home, lines in texts.items()]


def merge(logs: Sequence[Log]) -> Iterator[LogLine]:
    """All events in order of time; within a node in the order written, whatever its clock did."""
    return heapq.merge(*(_steady(log.lines) for log in logs), key=lambda line: line.at)


def _steady(lines: Iterable[LogLine]) -> Iterator[LogLine]:
    """Lines with non-decreasing times: after a clock was set back, events keep the time before."""
    latest = ""
    for line in lines:
        latest = max(latest, line.at)
        yield line if line.at == latest else LogLine(latest, line.node, line.stage, line.level, line.event, line.fields)


def names(logs: Sequence[Log]) -> dict[str, str]:
    """A display name for each node: its given name if unique, else the end of its peer id."""
    given: dict[str, str] = {}
    for log in logs:
        for line in log.lines:
            if line.event == "node.started" and isinstance(line.fields.get("name"), str):
                given[line.node] = line.fields["name"]
    used = list(given.values())
    nodes = {line.node for log in logs for line in log.lines}
    return {n: given[n] if n in given and used.count(given[n]) == 1 else n[-8:] for n in nodes}


def wanted(line: LogLine, level: str, events: Sequence[str], nodes: Sequence[str], name: str) -> bool:
    """Whether `line` passes the filter: at least `level`, one of `events` (globs; none: all), of one of `nodes`."""
    if LEVELS.index(line.level) < LEVELS.index(level):
        return False
    if events and not any(fnmatch.fnmatchcase(line.event, glob) for glob in events):
        return False
    return not nodes or name in nodes or any(line.node.endswith(node) for node in nodes)


def told(fields: Mapping[str, Any], called: Mapping[str, str]) -> str:
    """The fields of an event for a terminal, with peers by display name."""
    return " ".join(f"{key}={_value(value, called)}" for key, value in fields.items() if value not in ("", None, []))


def _value(value: Any, called: Mapping[str, str]) -> str:
    if isinstance(value, str):
        return called.get(value, value)
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, list):
        return ",".join(_value(item, called) for item in value)
    return str(value)
