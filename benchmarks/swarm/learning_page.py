"""HTML page of `bench learning`: plots and tables in one file without external resources."""

from __future__ import annotations

import html
from typing import Any

from swarmsim.drawing import COLOURS, STYLE, Curve, drawing, table

PLAIN_COLOURS = {"adamw": "#222", "muon": "#888"}
NAMES = {"adamw": "plain AdamW", "muon": "plain Muon"}


def page(found: dict[str, Any]) -> str:
    """Page of the results of `bench learning`."""
    model = found["model"]
    seconds = found.get("seconds")
    target = (
        f"<p>One plain AdamW process on all cores ({html.escape(seconds['plain'])}) has {seconds['nats']:.3f} nats "
        f"after {seconds['wall_s']:.0f} s and {seconds['samples']} samples.</p>"
        if seconds
        else ""
    )
    return (
        f"<!doctype html><html lang=en><meta charset=utf-8><meta name=viewport content='width=device-width'>"
        f"<title>swarmnode bench learning</title><style>{STYLE}</style><h1>What a swarm learns</h1>"
        f"<p>{model['layers']} layers of width {model['width']}, contexts of {model['context']} tokens, on "
        f"{html.escape(found['machine'])}{_busy(found)}. "
        "Lower is better in the first two drawings. The plain curves are the best of all settings at each "
        "cost. Efficiency is what plain AdamW needs for the swarm's loss, over what the swarm needed: above 1 the "
        "swarm learns more.</p>"
        f"<h2>Loss over samples</h2>{drawing(_lines(found, 'samples'), 'samples', 'held-out nats a token')}"
        f"<h2>Loss over core seconds</h2>{drawing(_lines(found, 'core_s'), 'core seconds', 'held-out nats a token')}"
        f"<h2>Efficiency over samples</h2>{drawing(_efficiencies(found), 'samples', 'learning efficiency', 0.0)}"
        f"<h2>Swarms</h2>{table(found['swarms'])}{target}"
        f"{'<h2>Over seeds</h2>' + table(found['mean']) if found['mean'] else ''}"
        f"<h2>Best plain runs</h2>{table(found['plain'])}</html>"
    )


def _busy(found: dict[str, Any]) -> str:
    """Warning if other programs used much of the machine."""
    others = found.get("machine used by others", 0.0)
    return f", of which other programs used {others:.0%}: seconds are too long" if others > 0.1 else ""


def _lines(found: dict[str, Any], cost: str) -> list[Curve]:
    plain = [
        Curve(_named(NAMES[one["optimizer"]], one["seed"]), PLAIN_COLOURS[one["optimizer"]], one[cost], dashed=True)
        for one in found["curves"]["plain"]
    ]
    return plain + [Curve(_swarm(one), _colour(found, one), one[cost]) for one in found["curves"]["swarms"]]


def _efficiencies(found: dict[str, Any]) -> list[Curve]:
    """A bound is drawn at its value."""
    return [
        Curve(_swarm(one), _colour(found, one), [(samples, reached["value"]) for samples, reached in points])
        for one in found["curves"]["swarms"]
        if (points := [point for point in one["efficiency, adamw"] if point[1]["value"] is not None])
    ]


def _swarm(one: dict[str, Any]) -> str:
    return _named(f"{one['replicas']} a stage", one["seed"])


def _named(name: str, seed: int) -> str:
    return f"{name}, seed {seed}" if seed else name


def _colour(found: dict[str, Any], one: dict[str, Any]) -> str:
    kinds = list(dict.fromkeys(each["replicas"] for each in found["curves"]["swarms"]))
    return COLOURS[kinds.index(one["replicas"]) % len(COLOURS)]
