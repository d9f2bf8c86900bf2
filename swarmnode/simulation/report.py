"""What came of a life, for people: a table in the terminal, and one HTML page that needs nothing else."""

from __future__ import annotations

import html
import itertools
from collections.abc import Callable, Sequence

from swarmnode.simulation.outcome import Outcome, Sample

WIDTH, HEIGHT, LEFT, BOTTOM = 640, 200, 60, 24
COLOURS = ("#2f6db3", "#c8553d", "#3c8d5a", "#8a5fb0", "#c79a2b", "#3aa0a8", "#8c8c8c", "#b04f7d")
STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; margin: 2rem auto; max-width: 1380px; padding: 0 1rem; color: #222;
       background: #fff }
h1 { font-size: 1.5rem } h2 { font-size: 1.05rem; margin: 0 0 .3rem } .pair { display: grid; gap: 1.5rem 2rem;
grid-template-columns: repeat(auto-fit, minmax(480px, 1fr)) } table { border-collapse: collapse; margin: .5rem 0 1.5rem }
td, th { padding: .15rem .9rem .15rem 0; text-align: left; vertical-align: top } td.n { text-align: right;
font-variant-numeric: tabular-nums } svg { width: 100%; height: auto } .bad { color: #b3261e; font-weight: 600 }
.good { color: #2b7a3d; font-weight: 600 } pre { background: #f4f4f4; padding: .8rem; overflow-x: auto; font-size: 12px }
figure { margin: 0 } figcaption { font-size: .85rem; color: #555 } .key { display: inline-block; margin-right: 1rem }
.key i { display: inline-block; width: .8em; height: .8em; margin-right: .35em; border-radius: 2px }
"""

Curve = tuple[str, Sequence[tuple[float, float]]]


def rows(outcome: Outcome) -> list[tuple[str, str]]:
    """(what, how much) in the order of interest."""
    total, storm, demands = outcome.total, outcome.storm, outcome.demands
    found = [
        ("scenario, seed", f"{outcome.scenario}, {outcome.seed}"),
        ("verdict", "; ".join(outcome.failures[:3]) or "every law held, everything came back"),
        ("nodes", f"{outcome.nodes} at first, {outcome.nodes_ever} ever"),
        ("virtual time", f"{outcome.virtual_s:.0f} s, of which {storm.at_s:.0f} s storm"),
        ("share of what the nodes could do where they were", f"{outcome.share:.1%}"),
        ("share of what they could do at best", f"{outcome.share_ideal:.1%}"),
        ("samples", f"{total.samples:,.0f}"),
        (
            "microbatches",
            (
                f"{total.done:,.0f} done, {total.lost:,.0f} lost, {total.retried:,.0f} retried, "
                f"{total.duplicate:,.0f} duplicate, {total.recomputed:,.0f} tapes recomputed"
            ),
        ),
        ("outer steps", f"{total.paired:,.0f} paired, {total.lone:,.0f} lone, {outcome.onesided} one-sided"),
        ("states downloaded", f"{total.recoveries:,.0f}"),
        ("bytes sent", ", ".join(f"{kind} {_bytes(count)}" for kind, count in total.bytes.items()) or "none"),
        ("faults", ", ".join(f"{kind} {count}" for kind, count in outcome.struck.items()) or "none"),
    ]
    if "served_s" in demands:
        found.append(("all stages served again after", f"{demands['served_s']:.0f} s"))
    if "training_s" in demands:
        found.append(("all nodes train again after", f"{demands['training_s']:.0f} s"))
    if "throughput" in demands:
        found.append(("throughput after the storm", f"{demands['throughput']:.1%} of what the nodes could do"))
    if outcome.validations:
        first, last = outcome.validations[0], outcome.validations[-1]
        found.append(("held-out loss", f"{first[1]:.4f} to {last[1]:.4f} nats after {last[2]:,} samples"))
    found += [
        ("laws checked", f"{outcome.laws_checked:,}"),
        ("trace", outcome.trace),
        (
            "cost",
            (
                f"{outcome.cpu_s:.1f} CPU s, {outcome.callbacks:,} callbacks, "
                f"{outcome.callbacks / max(1e-9, outcome.cpu_s):,.0f} a CPU second"
            ),
        ),
    ]
    return found


def _bytes(count: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"


def page(outcomes: Sequence[Outcome]) -> str:
    """A self-contained HTML page of one life, or of two beside each other."""
    title = " and ".join(f"{o.scenario}, seed {o.seed}" for o in outcomes)
    columns = "".join(f"<section>{_section(outcome)}</section>" for outcome in outcomes)
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{html.escape(title)}</title>'
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

    def of(value: Callable[[Sample], float]) -> list[tuple[float, float]]:
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
        ("Nodes that train, by stage", "nodes", [(f"stage {i}", of(lambda s, i=i: s.stages[i])) for i in stages]),  # type: ignore[misc]
        (
            "Nodes by state",
            "nodes",
            [(state, of(lambda s, k=state: s.states[k])) for state in (curve[0].states if curve else ())],  # type: ignore[misc]
        ),
        ("Bytes sent", "MB/s", [(k, _rate(curve, lambda s, k=k: s.bytes.get(k, 0) / 1e6)) for k in kinds]),  # type: ignore[misc]
        ("So far", "count", [("faults", of(lambda s: s.faults)), ("states downloaded", of(lambda s: s.recoveries))]),
    ]
    if outcome.validations:
        found.append(("Held-out loss", "nats", [("validation", [(t, loss) for t, loss, _ in outcome.validations])]))
    return found


def _rate(curve: Sequence[Sample], value: Callable[[Sample], float]) -> list[tuple[float, float]]:
    """Differences per second, each at the later point."""
    pairs = itertools.pairwise(curve)
    return [(b.at_s, (value(b) - value(a)) / max(1e-9, b.at_s - a.at_s)) for a, b in pairs]


def _plot(title: str, unit: str, curves: Sequence[Curve], storm_s: float) -> str:
    points = [point for _, curve in curves for point in curve]
    if len(points) < 2:
        return ""
    end = max(t for t, _ in points)
    top = max(1e-09, *(value for _, value in points)) * 1.05
    base = min(0.0, *(value for _, value in points))
    if title == "Held-out loss":
        base = min(value for _, value in points) * 0.95

    def x(t: float) -> float:
        return LEFT + (WIDTH - LEFT - 8) * t / end

    def y(value: float) -> float:
        return (HEIGHT - BOTTOM) - (HEIGHT - BOTTOM - 8) * (value - base) / (top - base)

    calm = f'<rect x="{x(storm_s):.1f}" y="8" width="{max(0.0, x(end) - x(storm_s)):.1f}" height="{HEIGHT - BOTTOM - 8}" fill="#eef6ee"/>'
    grid = "".join(
        f'<line x1="{LEFT}" x2="{WIDTH - 8}" y1="{y(v):.1f}" y2="{y(v):.1f}" stroke="#ddd"/>'
        f'<text x="{LEFT - 6}" y="{y(v) + 4:.1f}" text-anchor="end" font-size="11" fill="#555">{v:.3g}</text>'
        for v in (base, base + (top - base) / 2, top)
    )
    ticks = "".join(
        f'<text x="{x(end * i / 4):.1f}" y="{HEIGHT - 6}" text-anchor="middle" font-size="11" fill="#555">{end * i / 4:.0f} s</text>'
        for i in range(5)
    )
    lines = keys = ""
    for index, (name, curve) in enumerate(curves):
        colour = COLOURS[index % len(COLOURS)]
        path = " ".join(f"{x(t):.1f},{y(value):.1f}" for t, value in curve)
        lines += f'<polyline fill="none" stroke="{colour}" stroke-width="1.4" points="{path}"/>'
        keys += f'<span class="key"><i style="background:{colour}"></i>{html.escape(name)}</span>'
    return (
        f"<figure><h2>{html.escape(title)}, {html.escape(unit)}</h2>"
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{html.escape(title)}">{calm}{grid}{ticks}{lines}</svg>'
        f"<figcaption>{keys}</figcaption></figure>"
    )
