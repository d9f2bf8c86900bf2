"""The event log: JSON lines on the node's own disk, bounded in size. A failing disk never stops the node."""

from __future__ import annotations

import datetime
import errno
import json
import math
import os
import sys
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from swarmnode.base.atomic_file import FULL, full_text
from swarmnode.base.damaged_file import put_aside
from swarmnode.base.errors import cause_of
from swarmnode.base.metrics.event import check_event
from swarmnode.base.ports import Clock
from swarmnode.base.untrusted_text import printable

LOG_BYTES_MAX = 16 << 20
"""Size of one file; with its rotated copy a log takes at most twice this. Guess: a day of info lines at the demo's
rate."""

TEXT_CHARS_MAX = 512
"""Characters of one value, for example a peer's error text."""

TAIL_BYTES = 1 << 20  # some thousand lines

Echo = Callable[[str, str, Mapping[str, object]], None]
"""Called with (level, event, fields) for each line; `join` uses it to show events on a terminal."""


def digits(value: float) -> str:
    """`value` as people read it: six digits, more only of large numbers."""
    return f"{value:.6g}" if abs(value) < 1e6 else str(round(value, 1))


def nbytes_text(nbytes: float) -> str:
    """Bytes in decimal units, as links are measured: 1.5 MB."""
    for unit in ("B", "kB", "MB", "GB"):
        if nbytes < 1000:
            return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1000
    return f"{nbytes:.1f} TB"


def plain(value: object) -> object:
    """`value` in a form that JSON can hold and a terminal can show: bytes as hex, NaN and Inf as text, long text cut,
    control characters replaced, other types as text."""
    match value:
        case None | bool() | int():
            return value
        case float():
            return value if math.isfinite(value) else str(value)
        case str():
            text = printable(value, TEXT_CHARS_MAX)
            return text if len(value) <= TEXT_CHARS_MAX else text[: TEXT_CHARS_MAX - 1] + "…"
        case bytes() | bytearray() | memoryview():
            return bytes(value)[: TEXT_CHARS_MAX // 2].hex()
        case Mapping():
            return {printable(str(key)): plain(item) for key, item in list(value.items())[:TEXT_CHARS_MAX]}
        case list() | tuple() | set() | frozenset():
            items = sorted(value, key=repr) if isinstance(value, set | frozenset) else list(value)
            return [plain(item) for item in items[:TEXT_CHARS_MAX]]
        case _:
            return plain(str(value))


def timestamp(unix_s: float) -> str:
    """ISO 8601 in UTC with milliseconds: 2026-02-03T04:05:06.789Z."""
    moment = datetime.datetime.fromtimestamp(unix_s, datetime.UTC)
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def tail(path: Path) -> list[str]:
    """The last lines of a log; none where there is no log."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL_BYTES))
            return file.read().decode(errors="replace").splitlines()
    except FileNotFoundError:
        return []


@dataclass(eq=False)
class EventLog:
    """Writes one JSON object a line: ts, level, event, run, node, stage, fields.

    Each line is one `write` to a file opened for appending, so nothing is buffered. Beyond `nbytes_max` the file
    becomes `<path>.1` (replacing the previous one) and a new one begins. If the disk fails, lines are lost, counted in
    `dropped` and reported once on stderr; no exception is raised.
    """

    path: Path | None
    clock: Clock
    run: str
    node: str
    nbytes_max: int = LOG_BYTES_MAX
    echo: Echo | None = None

    def __post_init__(self) -> None:
        self.stage: int | None = None
        self.dropped = 0
        self._descriptor: int | None = None
        self._nbytes = 0
        self._told = False
        if self.path is not None:
            self._open(self.path)

    def write(self, event: str, *, level: str = "info", fields: Mapping[str, object] | None = None) -> None:
        """Append one line. AssertionError for an event or level missing in base/metrics/event.py."""
        check_event(event, level)
        fields = fields or {}
        if self.echo is not None:
            self.echo(level, event, fields)
        if self.path is None:
            return
        line = {
            "ts": timestamp(self.clock.unix_s()),
            "level": level,
            "event": event,
            "run": self.run,
            "node": self.node,
            "stage": self.stage,
            "fields": plain(fields),
        }
        self._append(self.path, json.dumps(line, separators=(",", ":")).encode() + b"\n")

    def close(self) -> None:
        """Close the file; later lines are dropped."""
        if self._descriptor is not None:
            os.close(self._descriptor)
        self._descriptor = None
        self.path = None

    def _append(self, path: Path, line: bytes) -> None:
        if self._descriptor is None:
            self._open(path)
        if self._nbytes and self._nbytes + len(line) > self.nbytes_max:
            self._rotate(path)
        if self._descriptor is None:
            self.dropped += 1
            return
        try:
            written = os.write(self._descriptor, line)
            if written < len(line):
                os.ftruncate(self._descriptor, self._nbytes)  # a torn line would corrupt the next one
                raise OSError(errno.ENOSPC, "the disk took only part of a line")
            self._nbytes += written
        except OSError as error:
            self._lose(path, error)

    def _open(self, path: Path) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NONBLOCK  # or a pipe waits for a reader
        try:
            self._descriptor = os.open(path, flags, 0o600)
            self._nbytes = os.fstat(self._descriptor).st_size
        except IsADirectoryError:
            put_aside(path, "a folder")
            if not path.is_dir():
                self._open(path)
        except OSError as error:
            self._lose(path, error, lines=0)

    def _rotate(self, path: Path) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
        self._descriptor = None
        self._nbytes = 0
        try:
            os.replace(path, path.with_name(path.name + ".1"))
        except OSError as error:
            self._lose(path, error, lines=0)
        else:
            self._open(path)

    def _lose(self, path: Path, error: OSError, lines: int = 1) -> None:
        self.dropped += lines
        if not self._told:
            self._told = True
            full = error.errno in FULL
            reason = full_text(path, None, advice="free space there") if full else cause_of(error)
            sys.stderr.write(f"swarmnode: cannot write the log {path}: {reason}; lines are dropped\n")


RECENT_MAX = 256
"""Events kept. A coordinator asks every few seconds, in swarms of a thousand every few minutes. Guess."""

FIELDS_MAX = 12
FIELD_CHARS_MAX = 160

TOO_MANY = frozenset(
    {
        "data.block",
        "drain.done",
        "recovery.kept",
        "state.download",
    }
)
"""Events that are not kept: they come many times a minute and their metrics suffice."""


@dataclass(frozen=True, slots=True)
class RecentEvent:
    """An event: `serial` grows by one with each, `fields` are short texts."""

    serial: int
    unix_s: float
    event: str
    level: str
    fields: Mapping[str, str]


class RecentEvents:
    """An `events.Echo` that keeps the newest RECENT_MAX events since the node's start."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._ring: deque[RecentEvent] = deque(maxlen=RECENT_MAX)
        self._serial = 0
        self.on_event: Callable[[], None] = lambda: None  # called after each, in its thread

    def __call__(self, level: str, event: str, fields: Mapping[str, object]) -> None:
        if event in TOO_MANY:
            return
        self._serial += 1
        short = {key: _text(value) for key, value in list(fields.items())[:FIELDS_MAX]}
        self._ring.append(RecentEvent(self._serial, self._clock.unix_s(), event, level, short))
        self.on_event()

    def after(self, serial: int, most: int) -> list[RecentEvent]:
        """At most `most` events later than `serial`, oldest first."""
        return [happening for happening in self._ring if happening.serial > serial][:most]


def _text(value: object) -> str:
    text = digits(value) if isinstance(value, float) else str(plain(value))
    return text.encode(errors="replace").decode()[:FIELD_CHARS_MAX]
