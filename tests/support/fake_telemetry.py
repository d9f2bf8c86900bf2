"""A Telemetry for tests that keeps what it is told."""

from collections import Counter

from swarmnode.base.metrics.event import check_event


class Quiet:
    """ports.Telemetry in memory: `counted[(metric, labels)]`, `events[i] = (event, fields)`."""

    def __init__(self) -> None:
        self.counted: Counter[tuple[str, tuple[tuple[str, str], ...]]] = Counter()
        self.events: list[tuple[str, dict[str, object]]] = []
        self.gauges: dict[str, float] = {}  # the last value of each

    def event(self, event: str, *, level: str = "info", **fields: object) -> None:
        check_event(event, level, fields)
        self.events.append((event, fields))

    def count(self, metric: str, value: float = 1.0, **labels: str) -> None:
        self.counted[metric, tuple(sorted(labels.items()))] += value  # type: ignore[assignment]

    def gauge(self, metric: str, value: float, **labels: str) -> None:
        self.gauges[metric] = value

    def observe(self, metric: str, value: float, **labels: str) -> None: ...

    def total(self, metric: str, **labels: str) -> float:
        return self.counted[metric, tuple(sorted(labels.items()))]

    def all(self, event: str) -> list[dict[str, object]]:
        return [fields for found, fields in self.events if found == event]
