"""Record of a life: a hash over all decisions, the last events of every node, and counters."""

from __future__ import annotations

import hashlib
from collections import Counter, defaultdict, deque
from collections.abc import Callable

from swarmnode.base.metrics.event import check_event

RECENT_MAX = 14
NOT_DECISIONS = frozenset({"loss", "delta_norm", "step_norm", "gradient_norm", "error", "why"})
"""Fields with values of tensors: they differ in the last bit between machines."""

Listener = Callable[[float, str, str, dict[str, object]], None]


class DecisionTrace:
    """All telemetry of a world. Equal worlds have equal `hash`, in every process and on every machine."""

    def __init__(self, now: Callable[[], float], *, keep: bool = False) -> None:
        self._now = now
        self._hash = hashlib.blake2b(digest_size=16)
        self.events = 0
        self.by_event: Counter[str] = Counter()
        self.recent: dict[str, deque[str]] = defaultdict(lambda: deque(maxlen=RECENT_MAX))
        self.counted: Counter[tuple[str, ...]] = Counter()
        self.lines: list[str] | None = [] if keep else None
        self.listeners: dict[str, Listener] = {}

    @property
    def hash(self) -> str:
        return self._hash.hexdigest()

    def say(self, label: str, event: str, fields: dict[str, object]) -> None:
        """Record one event of node `label` ("world": of the world itself)."""
        now = self._now()
        told = " ".join(f"{key}={_told(value)}" for key, value in fields.items() if key not in NOT_DECISIONS)
        line = f"{now:.6f} {label} {event} {told}"
        self._hash.update(line.encode())
        self.events += 1
        self.by_event[event] += 1
        self.recent[label].append(line)
        if self.lines is not None:
            self.lines.append(line)
        listener = self.listeners.get(event)
        if listener is not None:
            listener(now, label, event, fields)

    def total(self, metric: str, *labels: str) -> float:
        return self.counted[metric, *labels]

    def last_of(self, labels: list[str]) -> str:
        """The last events of nodes `labels`, as text."""
        return "\n".join(line for label in labels for line in self.recent.get(label, ()))


def _told(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, bytes):
        return value.hex()
    return str(value)


class SimTelemetry:
    """ports.Telemetry of one node."""

    def __init__(self, trace: DecisionTrace, label: str) -> None:
        self._trace = trace
        self._label = label

    def event(self, event: str, *, level: str = "info", **fields: object) -> None:
        check_event(event, level, fields)
        self._trace.say(self._label, event, fields)

    def count(self, metric: str, value: float = 1.0, **labels: str) -> None:
        self._trace.counted[metric, *labels.values()] += value  # type: ignore[assignment]

    def gauge(self, metric: str, value: float, **labels: str) -> None: ...

    def observe(self, metric: str, value: float, **labels: str) -> None: ...
