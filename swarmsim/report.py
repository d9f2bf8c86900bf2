"""Reports of a life for users: a table in the terminal, and a self-contained HTML page."""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Sequence

from swarmnode.train.pipeline.microbatch_size import shares_text
from swarmsim.outcome import CurvePoint, Outcome

WIDTH = 640
HEIGHT = 200
LEFT = 60
RIGHT = 22
BOTTOM = 24
SMOOTHED = 6  # points of a curve over which a rate is averaged: microbatches end in bursts
CURVE_COLOURS = 8
STYLE = """
:root { color-scheme: light dark; --ink: #222; --soft: #5a5a5a; --page: #fff; --box: #f4f4f4; --grid: #dcdcdc;
  --after: #eef6ee; --bad: #b3261e; --good: #2b7a3d;
  --c0: #2f6db3; --c1: #c8553d; --c2: #3c8d5a; --c3: #8a5fb0; --c4: #a87c0e; --c5: #1f8d96; --c6: #7d7d7d; --c7: #b04f7d }
@media (prefers-color-scheme: dark) { :root { --ink: #e4e4e4; --soft: #a6a6a6; --page: #16181b; --box: #212428;
  --grid: #353a40; --after: #1d2a22; --bad: #ff8a80; --good: #7fd494;
  --c0: #6ea8ec; --c1: #f0866d; --c2: #6cc58c; --c3: #b996e0; --c4: #dfb64e; --c5: #5cc6cf; --c6: #a9a9a9; --c7: #e083ac } }
body { font: 15px/1.45 system-ui, sans-serif; margin: 2rem auto; max-width: 1380px; padding: 0 1rem; color: var(--ink);
  background: var(--page) }
h1 { font-size: 1.5rem } h2 { font-size: 1.05rem; margin: 0 0 .3rem }
h2 small { font-weight: 400; color: var(--soft) }
.pair { display: grid; gap: 1.5rem 2rem; grid-template-columns: repeat(auto-fit, minmax(min(100%, 480px), 1fr)) }
table { border-collapse: collapse; margin: .5rem 0 1.5rem }
td, th { padding: .15rem .9rem .15rem 0; text-align: left; vertical-align: top }
th { font-weight: 400; color: var(--soft); min-width: 8rem; max-width: 22rem }
td { font-variant-numeric: tabular-nums; overflow-wrap: anywhere }
svg { width: 100%; height: auto } text { font-size: 11px; fill: var(--soft) } svg line { stroke: var(--grid) }
svg rect { fill: var(--after) } polyline { fill: none; stroke-width: 1.5; stroke-linejoin: round }
.bad { color: var(--bad); font-weight: 600 } .good { color: var(--good); font-weight: 600 }
pre { background: var(--box); padding: .8rem; overflow-x: auto; font-size: 12px }
section { min-width: 0 } figure { margin: 0; min-width: 0 } figcaption { font-size: .85rem; color: var(--soft) }
.key { display: inline-block; margin-right: 1rem }
.key i { display: inline-block; width: .8em; height: .8em; margin-right: .35em; border-radius: 2px }
"""

Curve = tuple[str, Sequence[tuple[float, float]]]


def rows(outcome: Outcome) -> list[tuple[str, str]]:
    """(description, value) in order of interest."""
    speed = outcome.callbacks / max(1e-9, outcome.cpu_s)
    return [
        ("scenario, seed", f"{outcome.scenario}, {outcome.seed}"),
        ("verdict", "; ".join(outcome.failures[:3]) or "every law held, everything recovered"),
        ("nodes", f"{outcome.nodes} at first, {outcome.nodes_ever} ever"),
        ("virtual time", f"{outcome.virtual_s:.0f} s, of which {outcome.storm.at_s:.0f} s storm"),
        ("share of what the nodes could do in their stages", f"{outcome.share:.1%}"),
        ("share of what they could do at best", f"{outcome.share_ideal:.1%}"),
        *_work_rows(outcome),
        ("directory, sent and received a node", _directory(outcome)),
        ("faults", ", ".join(f"{kind} {count}" for kind, count in outcome.struck.items()) or "none"),
        *_demand_rows(outcome),
        ("laws checked", f"{outcome.laws_checked:,}"),
        ("trace", outcome.trace),
        (
            "cost",
            (
                f"{outcome.cpu_s:.1f} CPU s, {outcome.storm_cpu_s:.1f} of them in the storm, {outcome.callbacks:,} callbacks, "
                f"{speed:,.0f} a CPU second"
            ),
        ),
    ]


def _work_rows(outcome: Outcome) -> list[tuple[str, str]]:
    """Microbatches, steps and bytes of the whole life."""
    total = outcome.total
    return [
        ("samples", f"{total.samples:,.0f}"),
        (
            "microbatches",
            (
                f"{total.done:,.0f} done, {total.lost:,.0f} lost, {total.retried:,.0f} retried, "
                f"{total.duplicate:,.0f} duplicate, {total.recomputed:,.0f} tapes recomputed"
            ),
        ),
        ("machines that a microbatch visits", f"{outcome.machines_visited:.1f}"),
        ("inner steps between forward and backward", shares_text(total.staleness)),
        ("gradients added by a second replica of a stage", f"{outcome.doubled:,}"),
        (
            "outer steps",
            (
                f"{total.paired:,.0f} paired, {outcome.fallbacks} of them with fallback partners, {total.lone:,.0f} lone, "
                f"{outcome.onesided} one-sided"
            ),
        ),
        ("replicas meet", _meetings(outcome)),
        ("states downloaded", f"{total.recoveries:,.0f}"),
        ("bytes sent", ", ".join(f"{kind} {_bytes(count)}" for kind, count in total.bytes.items()) or "none"),
    ]


def _demand_rows(outcome: Outcome) -> list[tuple[str, str]]:
    """The swarm after the storm, as far as the scenario demands anything."""
    demands = outcome.demands
    found = []
    if "served_s" in demands:
        found.append(("all stages served again after", f"{demands['served_s']:.0f} s"))
    if "training_s" in demands:
        found.append(("all nodes train again after", f"{demands['training_s']:.0f} s"))
    if "throughput" in demands:
        found.append(("throughput after the storm", f"{demands['throughput']:.1%} of what the nodes could do"))
    if outcome.real and outcome.validations:
        first = outcome.validations[0][1]
        last, samples = outcome.validations[-1][1:]
        found.append(("held-out loss", f"{first:.4f} to {last:.4f} nats after {samples:,} samples"))
    return found


def _meetings(outcome: Outcome) -> str:
    if not (steps := outcome.meets_every_steps()):
        return "never" if outcome.meets_every_steps_planned else "not in this run"
    return f"every {steps:,.3g} inner steps in the mean; planned: every {outcome.meets_every_steps_planned:,.3g}"


def _directory(outcome: Outcome) -> str:
    if not outcome.directory or not outcome.virtual_s:
        return "none"
    mbps = sorted(8e-6 * nbytes / outcome.virtual_s for nbytes in outcome.directory.values())
    return f"{sum(mbps) / len(mbps):.3f} Mbit/s, at most {mbps[-1]:.3f}"


def _bytes(count: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"


def page(outcomes: Sequence[Outcome]) -> str:
    """A self-contained HTML page of one life, or of two side by side."""
    title = " and ".join(f"{o.scenario}, seed {o.seed}" for o in outcomes)
    columns = "".join(f"<section>{_section(outcome)}</section>" for outcome in outcomes)
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
        f"<title>{html.escape(title)}</title>"
        f"<style>{STYLE}</style><h1>swarmnode simulate: {html.escape(title)}</h1>"
        f'<div class="{"pair" if len(outcomes) > 1 else ""}">{columns}</div></html>'
    )


def _section(outcome: Outcome) -> str:
    lines = []
    for what, much in rows(outcome):
        verdict = f' class="{"bad" if outcome.failures else "good"}"' if what == "verdict" else ""
        lines.append(f"<tr><th>{html.escape(what)}</th><td{verdict}>{html.escape(much)}</td></tr>")
    plots = "".join(_plot(title, unit, curves, outcome.storm.at_s) for title, unit, curves in _curves(outcome))
    last = f"<h2>Last events</h2><pre>{html.escape(outcome.last_events)}</pre>" if outcome.failures else ""
    return f'<table>{"".join(lines)}</table><div class="pair">{plots}</div>{last}'


def _curves(outcome: Outcome) -> list[tuple[str, str, list[Curve]]]:
    curve = outcome.curve
    stages = range(len(curve[0].stages)) if curve else range(0)
    kinds = sorted({kind for sample in curve for kind in sample.bytes})

    def of(value: Callable[[CurvePoint], float]) -> list[tuple[float, float]]:
        return [(sample.at_s, value(sample)) for sample in curve]

    found: list[tuple[str, str, list[Curve]]] = [
        (
            "Throughput",
            "samples/s",
            [
                ("done", _rate(curve, lambda s: s.samples)),
                ("possible where nodes are", of(lambda s: s.optimum)),
                ("possible at best", of(lambda s: s.ideal)),
            ],
        ),
        (
            "Utilisation",
            "share of living FLOP/s",
            [
                (
                    "training",
                    [
                        (t, rate / max(1.0, s.flops))
                        for (t, rate), s in zip(_rate(curve, lambda s: s.busy), curve[1:], strict=False)
                    ],
                )
            ],
        ),
        ("Nodes that train, by stage", "", [(f"stage {i}", of(lambda s, i=i: s.stages[i])) for i in stages]),  # type: ignore[misc]
        (
            "Nodes by state",
            "",
            [(state, of(lambda s, k=state: s.states[k])) for state in (curve[0].states if curve else ())],  # type: ignore[misc]
        ),
        ("Bytes sent", "MB/s", [(k, _rate(curve, lambda s, k=k: s.bytes.get(k, 0) / 1e6)) for k in kinds]),  # type: ignore[misc]
        ("So far", "", [("faults", of(lambda s: s.faults)), ("states downloaded", of(lambda s: s.recoveries))]),
    ]
    if outcome.real and outcome.validations:
        found.append(("Held-out loss", "nats", [("validation", [(t, loss) for t, loss, _ in outcome.validations])]))
    return found


def _rate(curve: Sequence[CurvePoint], value: Callable[[CurvePoint], float]) -> list[tuple[float, float]]:
    """Differences per second over up to SMOOTHED points, each at the latest of them."""
    found = []
    for index in range(1, len(curve)):
        a = curve[max(0, index - SMOOTHED)]
        b = curve[index]
        found.append((b.at_s, (value(b) - value(a)) / max(1e-9, b.at_s - a.at_s)))
    return found


def _ticks(low: float, high: float, count: int) -> list[float]:
    """About `count` round numbers from `low` to `high`."""
    step = (high - low) / count
    size = 10.0 ** math.floor(math.log10(step)) if step > 0 else 1.0
    step = next(size * factor for factor in (1, 2, 2.5, 5, 10) if size * factor >= step * 0.8)
    first = math.ceil(low / step - 1e-9)
    return [step * index for index in range(first, math.floor(high / step + 1e-9) + 1)]


def _plot(title: str, unit: str, curves: Sequence[Curve], storm_s: float) -> str:
    points = [point for _, curve in curves for point in curve]
    if len(points) < 2:
        return ""
    end = max(t for t, _ in points)
    top = max(1e-9, *(value for _, value in points)) * 1.05
    base = min(0.0, *(value for _, value in points))
    if title == "Held-out loss":
        base = min(value for _, value in points) * 0.95

    def x(t: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * t / end

    def y(value: float) -> float:
        return (HEIGHT - BOTTOM) - (HEIGHT - BOTTOM - 8) * (value - base) / (top - base)

    width = max(0.0, x(end) - x(storm_s))
    calm = f'<rect x="{x(storm_s):.1f}" y="8" width="{width:.1f}" height="{HEIGHT - BOTTOM - 8}"/>'
    if width > 90:
        calm += f'<text x="{x(storm_s) + 6:.1f}" y="20">after the storm</text>'
    grid = "".join(
        f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y(v):.1f}" y2="{y(v):.1f}"/>'
        f'<text x="{LEFT - 6}" y="{y(v) + 4:.1f}" text-anchor="end">{v:.4g}</text>'
        for v in _ticks(base, top, 3)
    )
    # Time axes use ticks in sixties.
    scale, shown = next((s, u) for s, u in ((3600.0, "h"), (60.0, "min"), (1.0, "s")) if end >= 3 * s or s == 1.0)
    ticks = "".join(
        f'<text x="{x(v * scale):.1f}" y="{HEIGHT - 6}" text-anchor="middle">{v:g} {shown}</text>'
        for v in _ticks(0.0, end / scale, 5)
    )
    lines = keys = ""
    for index, (name, curve) in enumerate(curves):
        colour = f"var(--c{index % CURVE_COLOURS})"
        path = " ".join(f"{x(t):.1f},{y(value):.1f}" for t, value in curve)
        # Shift overlapping lines so that all are visible.
        apart = "" if index == 0 or "stage" not in name else f' transform="translate(0,{-1.2 * (index % 4):.1f})"'
        lines += f'<polyline style="stroke:{colour}" points="{path}"{apart}/>'
        keys += f'<span class="key"><i style="background:{colour}"></i>{html.escape(name)}</span>'
    return (
        f"<figure><h2>{html.escape(title)} <small>{html.escape(unit)}</small></h2>"
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{html.escape(title)}">{calm}{grid}{ticks}{lines}</svg>'
        f"<figcaption>{keys}</figcaption></figure>"
    )
