"""Curves as SVG and rows as an HTML table, without external resources."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

WIDTH = 900
HEIGHT = 400
LEFT = 60
RIGHT = 230
TOP = 16
BOTTOM = 62
COLOURS = ("#06c", "#c50", "#080", "#a0a", "#c09000", "#088")
TICKS = (1.0, 2.0, 5.0)
STYLE = (
    "body{font:15px/1.5 sans-serif;margin:2em auto;max-width:960px;padding:0 1em;color:#222;background:#fff}"
    "table{border-collapse:collapse;font-size:14px;display:block;overflow-x:auto}"
    "td,th{padding:.25em .8em;text-align:right;border-bottom:1px solid #ddd;white-space:nowrap}"
    "td:first-child,th:first-child{text-align:left}svg{max-width:100%;height:auto}h2{margin-bottom:.2em}"
)


@dataclass(frozen=True, slots=True)
class Curve:
    """A curve of a plot: points (x, y), x above zero. Without a name it is thin: another seed of a named one."""

    name: str
    colour: str
    points: Sequence[tuple[float, float]]
    dashed: bool = False


def drawing(lines: Sequence[Curve], x_name: str, y_name: str, floor: float | None = None, note: str = "") -> str:
    """Curves over a logarithmic axis as SVG, each with its name at its end; "" without any. `note` stands below."""
    lines = [line for line in lines if line.points]
    if not lines:
        return "<p>not measured</p>"
    xs = [x for line in lines for x, _ in line.points]
    ys = [y for line in lines for _, y in line.points] + ([] if floor is None else [floor])
    low = math.log(min(xs))
    high = math.log(max(xs) * 1.001)
    least = min(ys)
    most = max(ys)
    margin = max((most - least) * 0.05, 1e-3)
    most += margin
    least -= margin if floor is None else 0.0

    def x(value: float) -> float:
        return LEFT + (math.log(value) - low) / max(high - low, 1e-9) * (WIDTH - LEFT - RIGHT)

    def y(value: float) -> float:
        return TOP + (most - value) / (most - least) * (HEIGHT - TOP - BOTTOM)

    right = WIDTH - RIGHT
    bottom = HEIGHT - BOTTOM
    parts = []
    for tick in _logarithmic(math.exp(low), math.exp(high)):
        parts.append(f"<line x1='{x(tick):.1f}' x2='{x(tick):.1f}' y1='{TOP}' y2='{bottom}' stroke='#eee'/>")
        parts.append(_text(x(tick), bottom + 18, f"{tick:,g}", "middle"))
    for tick in _linear(least, most):
        parts.append(f"<line x1='{LEFT}' x2='{right}' y1='{y(tick):.1f}' y2='{y(tick):.1f}' stroke='#eee'/>")
        parts.append(_text(LEFT - 8, y(tick) + 4, f"{tick:.4g}", "end"))
    for line in lines:
        points = " ".join(f"{x(a):.1f},{y(b):.1f}" for a, b in line.points)
        dashes = " stroke-dasharray='5'" if line.dashed else ""
        width = 2 if line.name else 1
        parts.append(f"<polyline points='{points}' fill='none' stroke='{line.colour}' stroke-width='{width}'{dashes}/>")
    named = [line for line in lines if line.name]
    parts += _names(named, [y(line.points[-1][1]) for line in named], [x(line.points[-1][0]) for line in named])
    parts.append(_text((LEFT + right) / 2, bottom + 36, x_name, "middle"))
    parts += [_text(LEFT, HEIGHT - 6, note, "start")] if note else []
    parts.append(
        f"<text transform='translate(14 {(TOP + bottom) / 2:.0f}) rotate(-90)' text-anchor='middle'>{y_name}</text>"
    )
    label = html.escape(f"{y_name} over {x_name}")
    return (
        f"<svg viewBox='0 0 {WIDTH} {HEIGHT}' width='{WIDTH}' height='{HEIGHT}'"
        f" font-size='13' font-family='sans-serif' role='img' aria-label='{label}'>"
        f"{''.join(parts)}</svg>"
    )


def _names(lines: Sequence[Curve], heights: Sequence[float], ends: Sequence[float]) -> list[str]:
    """Names of the lines beside the plot, ordered by the lines' ends, without overlap."""
    parts = []
    taken = -math.inf
    for index in sorted(range(len(lines)), key=lambda index: heights[index]):
        line = lines[index]
        taken = max(heights[index], taken + 17)
        x = WIDTH - RIGHT + 26
        dashes = " stroke-dasharray='2'" if line.dashed else ""
        parts.append(f"<circle cx='{ends[index]:.1f}' cy='{heights[index]:.1f}' r='3' fill='{line.colour}'/>")
        parts.append(
            f"<path d='M{ends[index]:.1f} {heights[index]:.1f}L{x - 6} {taken:.1f}' stroke='{line.colour}'"
            f" stroke-width='1' stroke-opacity='.35'{dashes}/>"
        )
        parts.append(f"<text x='{x}' y='{taken + 4:.1f}' fill='{line.colour}'>{html.escape(line.name)}</text>")
    return parts


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return f"<text x='{x:.1f}' y='{y:.1f}' text-anchor='{anchor}' fill='#555'>{html.escape(text)}</text>"


def _logarithmic(low: float, high: float) -> list[float]:
    """1, 2 and 5 of each decade between `low` and `high`."""
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    return [tick for decade in decades for first in TICKS if low <= (tick := first * math.pow(10.0, decade)) <= high]


def _linear(low: float, high: float) -> list[float]:
    """Four to ten round numbers between `low` and `high`."""
    raw = (high - low) / 5
    decade = math.pow(10.0, math.floor(math.log10(raw)))
    step = next(first * decade for first in (*TICKS, 10.0) if first * decade >= raw)
    return [count * step for count in range(math.ceil(low / step), math.floor(high / step) + 1)]


def table(rows: Sequence[dict[str, Any]]) -> str:
    """`rows` as an HTML table, with the first one's keys above."""
    if not rows:
        return "<p>not measured</p>"
    heads = "".join(f"<th>{html.escape(key.replace('_', ' '))}</th>" for key in rows[0])
    body = "".join(
        "<tr>" + "".join(f"<td>{html.escape(cell(value))}</td>" for value in row.values()) + "</tr>" for row in rows
    )
    return f"<table><tr>{heads}</tr>{body}</table>"


def cell(value: object) -> str:
    """A number, a bound of one ({"value", "bound"}), a text, or a dash if unknown."""
    match value:
        case None:
            return "–"
        case {"value": inner, "bound": bound}:
            return f"{bound} {cell(inner)}" if bound else cell(inner)
        case float():
            return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
        case _:
            return str(value)
