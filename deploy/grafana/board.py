"""Writes swarmnode.json, the Grafana board: `python deploy/grafana/board.py`. The table below is what it shows.

A test says when the JSON is stale, and when a query names a metric that no node has.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

COLUMNS = 24  # Grafana's grid
HEIGHT = 8
FROM = '{job=~"$job"}'


@dataclass(frozen=True, slots=True)
class Panel:
    """One panel: `queries` are (PromQL, legend); `unit` is Grafana's id of a unit."""

    title: str
    unit: str
    queries: tuple[tuple[str, str], ...]
    kind: str = "timeseries"
    width: int = 8
    help: str = ""


ROWS: tuple[tuple[str, tuple[Panel, ...]], ...] = (
    (
        "The run",
        (
            Panel("Samples trained", "short", ((f"max(swarmnode_run_samples{FROM})", "samples"),), "stat", 6),
            Panel("Tokens/s", "short", ((f"sum(rate(swarmnode_tokens_total{FROM}[2m]))", "tokens/s"),), "stat", 6),
            Panel("Fewest replicas of a stage", "none", ((f"min(swarmnode_replicas_fewest{FROM})", ""),), "stat", 6),
            Panel("Peers", "none", ((f"max(swarmnode_peers{FROM})", "peers"),), "stat", 6),
            Panel(
                "Loss",
                "none",
                (('avg by (split) (swarmnode_loss_nats{job=~"$job"} > 0)', "{{split}}"),),
                width=12,
                help="Nats per target token: mean of the nodes that measure it.",
            ),
            Panel(
                "Tokens/s by feeder", "short", ((f"rate(swarmnode_tokens_total{FROM}[2m])", "{{instance}}"),), width=12
            ),
        ),
    ),
    (
        "Microbatches",
        (
            Panel(
                "What became of them",
                "ops",
                ((f"sum by (outcome) (rate(swarmnode_microbatches_total{FROM}[2m]))", "{{outcome}}"),),
            ),
            Panel("Refused: every place taken", "ops", ((f"rate(swarmnode_busy_total{FROM}[2m])", "{{instance}}"),)),
            Panel("Window of a feeder", "none", ((f"swarmnode_window{FROM} > 0", "{{instance}}"),)),
            Panel(
                "Compute thread: share of time by work",
                "percentunit",
                ((f"sum by (kind) (rate(swarmnode_compute_seconds_total{FROM}[2m]))", "{{kind}}"),),
            ),
            Panel("Work waiting", "none", ((f"swarmnode_compute_waiting{FROM}", "{{instance}}"),)),
            Panel(
                "Forwards done again",
                "ops",
                (
                    (f"sum(rate(swarmnode_recomputed_tapes_total{FROM}[2m]))", "recomputed"),
                    (f"sum(rate(swarmnode_released_tapes_total{FROM}[2m]))", "released"),
                ),
            ),
        ),
    ),
    (
        "Rounds",
        (
            Panel("Round", "none", ((f"swarmnode_round{FROM}", "{{instance}}"),)),
            Panel(
                "Outer steps",
                "ops",
                ((f"sum by (outcome) (rate(swarmnode_exchanges_total{FROM}[5m]))", "{{outcome}}"),),
            ),
            Panel(
                "Exchange, 50 % and 95 %",
                "s",
                tuple(
                    (
                        f"histogram_quantile({q}, sum by (le) (rate(swarmnode_exchange_seconds_bucket{FROM}[5m])))",
                        f"{q}",
                    )
                    for q in (0.5, 0.95)
                ),
            ),
            Panel("Gradient norm", "none", ((f"swarmnode_gradient_norm{FROM}", "{{instance}}"),)),
            Panel("Learning rate", "sci", ((f"max(swarmnode_learning_rate{FROM})", "rate"),)),
            Panel("Inner steps", "ops", ((f"rate(swarmnode_inner_steps_total{FROM}[5m])", "{{instance}}"),)),
        ),
    ),
    (
        "Network and machines",
        (
            Panel(
                "Traffic by kind",
                "Bps",
                ((f"sum by (kind, direction) (rate(swarmnode_link_bytes_total{FROM}[2m]))", "{{kind}} {{direction}}"),),
            ),
            Panel(
                "State moved to joiners",
                "Bps",
                ((f"sum by (direction) (rate(swarmnode_snapshot_bytes_total{FROM}[5m]))", "{{direction}}"),),
            ),
            Panel(
                "Faults found in peers",
                "ops",
                ((f"sum by (kind) (rate(swarmnode_peer_faults_total{FROM}[5m]))", "{{kind}}"),),
            ),
            Panel("Resident memory", "bytes", ((f"process_resident_memory_bytes{FROM}", "{{instance}}"),)),
            Panel("CPU", "percentunit", ((f"rate(process_cpu_seconds_total{FROM}[2m])", "{{instance}}"),)),
            Panel(
                "Event loop late, 99 %",
                "s",
                (
                    (
                        f"histogram_quantile(0.99, sum by (instance, le) (rate(swarmnode_loop_lag_seconds_bucket{FROM}[5m])))",
                        "{{instance}}",
                    ),
                ),
            ),
            Panel("Stage served", "none", ((f"swarmnode_stage{FROM}", "{{instance}}"),), "state-timeline", 24),
            Panel(
                "State (1 joining, 2 syncing, 3 training, 4 draining, 5 left)",
                "none",
                ((f"swarmnode_state{FROM}", "{{instance}}"),),
                "state-timeline",
                24,
            ),
            Panel(
                "Recoveries", "none", ((f"sum by (method) (swarmnode_recoveries_total{FROM})", "{{method}}"),), width=12
            ),
            Panel(
                "p2pd restarts",
                "none",
                ((f"increase(swarmnode_p2pd_restarts_total{FROM}[1h])", "{{instance}}"),),
                width=12,
            ),
        ),
    ),
)

SOURCE = {"type": "prometheus", "uid": "${datasource}"}


def panel_json(panel: Panel, number: int, x: int, y: int) -> dict[str, Any]:
    """`panel` as Grafana keeps it, at column `x` and line `y`."""
    height = HEIGHT // 2 if panel.kind == "stat" else HEIGHT
    return {
        "id": number,
        "type": panel.kind,
        "title": panel.title,
        "description": panel.help,
        "datasource": SOURCE,
        "gridPos": {"x": x, "y": y, "w": panel.width, "h": height},
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": None}, "overrides": []},
        "targets": [
            {"refId": chr(ord("A") + index), "datasource": SOURCE, "expr": expr, "legendFormat": legend}
            for index, (expr, legend) in enumerate(panel.queries)
        ],
    }


def board() -> dict[str, Any]:
    """The whole board, rows from top to bottom."""
    panels: list[dict[str, Any]] = []
    y = 0
    for title, row in ROWS:
        place = {"x": 0, "y": y, "w": COLUMNS, "h": 1}
        panels.append({"id": len(panels) + 1, "type": "row", "title": title, "gridPos": place, "panels": []})
        x = 0
        y += 1
        tallest = 0
        for panel in row:
            if x + panel.width > COLUMNS:
                x = 0
                y += tallest
                tallest = 0
            panels.append(panel_json(panel, len(panels) + 1, x, y))
            x += panel.width
            tallest = max(tallest, panels[-1]["gridPos"]["h"])
        y += tallest
    variables = [
        {"name": "datasource", "type": "datasource", "query": "prometheus", "label": "Prometheus"},
        {
            "name": "job",
            "type": "query",
            "label": "Run",
            "datasource": SOURCE,
            "query": "label_values(swarmnode_info, job)",
            "includeAll": True,
            "multi": True,
            "refresh": 2,
            "current": {"text": "All", "value": "$__all"},
        },
    ]
    return {
        "uid": "swarmnode",
        "title": "swarmnode",
        "description": "A run of swarmnode, by what Prometheus scrapes from its nodes.",
        "tags": ["swarmnode"],
        "schemaVersion": 38,
        "refresh": "15s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {"list": variables},
        "panels": panels,
    }


def main(path: Path) -> None:
    """Write the board."""
    path.write_text(json.dumps(board(), indent=1) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).with_name("swarmnode.json"))
