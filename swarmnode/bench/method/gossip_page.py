"""HTML page of `swarmnode bench gossip`: loss against bytes, as a plot and a table."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from typing import Any

ALONE, PARALLEL = "alone", "parallel"
"""Base lines: replicas that never meet, and synchronous data parallel."""

LABEL_PX = (110, 13)  # size of a method's name in the plot


def _base(method: str) -> str:
    """A row's method without its numbers and its schedule."""
    return method.partition("@")[0].partition("+")[0]


def page(result: dict[str, Any]) -> str:
    """A page of one drawing, loss against bytes (logarithmic), and the table; nothing is loaded from outside."""
    rows = result["methods"]
    drawn = [row for row in rows if row["bytes/param/round"] > 0 and _base(row["method"]) != PARALLEL]
    apart = [row for row in rows if _base(row["method"]) == PARALLEL]  # an outlier would compress all others
    also = "".join(
        f" Not drawn: synchronous data parallel, {row['nats']:.4f} nats at {row['bytes/param/round']:g} bytes."
        for row in apart
    )
    cells = "".join(
        "<tr>" + "".join(f"<td>{html.escape(_cell(value))}</td>" for value in row.values()) + "</tr>" for row in rows
    )
    heads = "".join(f"<th>{html.escape(key)}</th>" for key in rows[0])
    return (
        "<!doctype html><meta charset=utf-8><title>swarmnode bench gossip</title><style>body{font:14px sans-serif;"
        "margin:2em}td,th{padding:.2em .8em;text-align:right}td:first-child{text-align:left}</style>"
        f"<h1>Loss against bytes</h1><p>preset {html.escape(result['preset'])}, held-out nats per byte, lower left is"
        f" better; bars are one standard deviation over seeds; the dashed line is a lone replica.{also}</p>"
        f"{_drawing(drawn, [row for row in rows if row not in apart])}<table><tr>{heads}</tr>{cells}</table>"
    )


def _cell(value: object) -> str:
    if isinstance(value, float):
        return "–" if math.isnan(value) else f"{value:.4f}"
    return str(value)


def _drawing(drawn: Sequence[dict[str, Any]], rows: Sequence[dict[str, Any]]) -> str:
    width, height, left, bottom = 900, 480, 70, 50
    if not drawn:
        return ""
    xs = [math.log10(row["bytes/param/round"]) for row in drawn]
    nats = [row["nats"] for row in rows]
    low, high = min(xs) - 0.2, max(xs) + 0.5
    least, most = min(nats), max(nats)
    margin = max((most - least) * 0.1, 1e-3)

    def x(value: float) -> float:
        return float(left + (value - low) / (high - low) * (width - left - 20))

    def y(value: float) -> float:
        return float(20 + (most + margin - value) / (most - least + 2 * margin) * (height - bottom - 20))

    parts = []
    best = math.inf
    front = []
    labels: list[tuple[float, float]] = []
    for at, row in sorted(zip(xs, drawn, strict=True), key=lambda pair: pair[0]):
        spread = 0.0 if math.isnan(row["spread"]) else row["spread"]
        here = y(row["nats"])
        label = here - 6
        while any(abs(label - other) < LABEL_PX[1] and abs(x(at) - beside) < LABEL_PX[0] for beside, other in labels):
            label += 4.0
        labels.append((x(at), label))
        parts.append(
            f"<line x1={x(at):.1f} x2={x(at):.1f} y1={y(row['nats'] - spread):.1f} y2={y(row['nats'] + spread):.1f}"
            f" stroke=#999 /><circle cx={x(at):.1f} cy={here:.1f} r=5 fill=#06c />"
            f"<text x={x(at) + 8:.1f} y={label:.1f} font-size=12>{html.escape(row['method'])}</text>"
        )
        if row["nats"] < best:
            best = row["nats"]
            front.append(f"{x(at):.1f},{here:.1f}")
    for row in rows:
        if row["method"] == ALONE:
            here = y(row["nats"])
            parts.append(
                f"<line x1={left} x2={width - 20} y1={here:.1f} y2={here:.1f} stroke=#c00 stroke-dasharray=6 />"
            )
    for tick in range(math.floor(low), math.ceil(high) + 1):
        if low <= tick <= high:
            parts.append(f"<text x={x(tick):.1f} y={height - 25} font-size=12>{math.pow(10.0, tick):g}</text>")
    for i in range(5):
        value = least + (most - least) * i / 4
        parts.append(f"<text x=5 y={y(value):.1f} font-size=12>{value:.4f}</text>")
    parts.append(f"<text x={width // 2} y={height - 5} font-size=13>bytes a parameter and round</text>")
    return (
        f"<svg width={width} height={height}><polyline points='{' '.join(front)}' fill=none stroke=#06c "
        f"stroke-opacity=.4 />{''.join(parts)}</svg>"
    )
