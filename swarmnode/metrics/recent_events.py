"""The most recent events of this node, in a ring in memory beside the log on disk."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

from swarmnode.metrics.events import digits, plain
from swarmnode.ports import Clock

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

    def __call__(self, level: str, event: str, fields: Mapping[str, object]) -> None:
        if event in TOO_MANY:
            return
        self._serial += 1
        short = {key: _text(value) for key, value in list(fields.items())[:FIELDS_MAX]}
        self._ring.append(RecentEvent(self._serial, self._clock.unix_s(), event, level, short))

    def after(self, serial: int, most: int) -> list[RecentEvent]:
        """At most `most` events later than `serial`, oldest first."""
        return [happening for happening in self._ring if happening.serial > serial][:most]


def _text(value: object) -> str:
    text = digits(value) if isinstance(value, float) else str(plain(value))
    return text.encode(errors="replace").decode()[:FIELD_CHARS_MAX]
