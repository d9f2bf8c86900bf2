"""Writes the pages of docs/ that are tables of the code: `make docs`. A test (tests/docs) says when they are stale."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from swarmnode.metrics import name

HERE = Path(__file__).parent
MADE = "<!-- Made by docs/generate.py from {source}: edit that, then `make docs`. -->\n"


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> Iterator[str]:
    """Lines of a Markdown table."""
    head = list(head)
    yield f"| {' | '.join(head)} |"
    yield "|" + " --- |" * len(head)
    for row in rows:
        yield f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |"


def metrics() -> str:
    """Every metric and every event."""

    def labels(metric: name.Metric) -> str:
        said = {name.OPEN: "a word", name.FREE: "any"}
        return "<br>".join(f"`{label}`: {said.get(v) or ', '.join(v)}" for label, v in metric.labels.items())

    lines = [
        MADE.format(source="swarmnode/metrics/name.py"),
        "# Metrics and events\n",
        "Every node serves these at `http://127.0.0.1:PORT/metrics` (`--metrics-port`, `--metrics-host`), in OpenMetrics for",
        "scrapers that ask for it and in Prometheus' older text else, with the usual `process_*` beside them. `/healthz` answers",
        "as long as the node's event loop turns; `/readyz` is 200 while the node trains (a bootstrap: while it runs), else 503.",
        "No label's values grow with the swarm: a peer is never a label. [Operations](operations.md) says what to watch;",
        "`deploy/prometheus/` has alert rules with tests, `deploy/grafana/` a board.\n",
        "## Metrics\n",
        *table(
            ("metric", "type", "unit", "labels", "meaning"),
            ((f"`{m.name}`", m.kind, m.unit, labels(m), m.help) for m in name.METRICS.values()),
        ),
        "\n## Events\n",
        "`events.jsonl` in the node's home: one JSON object a line with `ts`, `level`, `event`, `run`, `node`, `stage`, `fields`.\n",
        *table(("event", "meaning"), ((f"`{event}`", meaning) for event, meaning in name.EVENTS.items())),
    ]
    return "\n".join(lines) + "\n"


PAGES = {"metrics.md": metrics}


def main(folder: Path) -> None:
    """Write every page below `folder`."""
    for page, make in PAGES.items():
        (folder / page).write_text(make())


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else HERE)
