"""The result of `swarmnode plan --search`, as a table and as JSON."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click

from swarmnode.cli.output.console import paper

if TYPE_CHECKING:
    from swarmnode.manifest import Manifest
    from swarmnode.planner.plan_search import Candidate, Search

SMALL_MODEL = "measured on a small model (width 96, 300 steps, docs/methods.md)"


def print_search(found: Search, tokens: float) -> None:
    """Print the best settings, the machines they cannot use, what the boundary costs, and the lines to change."""
    from rich.table import Table

    console = paper()
    priced = any(row.plan.per_hour for row in found.rows)
    columns = ["", "stages", "boundary", "microbatch", "round", "tokens/s", "limit", "replicas", "idle", "up, Mb/s"]
    columns += ["kept a day", "nats", *(["an hour", "tokens for 1", "kinds"] if priced else [])]
    table = Table(box=None, padding=(0, 2, 0, 0))
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    for number, row in enumerate(found.rows):
        table.add_row(*_cells("best" if number == 0 else "", row, tokens, priced=priced))
    if found.own is not None and found.best.changes:
        table.add_row(*_cells("manifest", found.own, tokens, priced=priced))
    console.print(table)
    ranked = "tokens for money" if found.by_money else "tokens/s"
    legend = (
        "limit: memory, if machines with more of it would be faster; replicas: of the stage with the fewest; idle:"
        " machines without a stage;\nup: of a mean node of the busiest stage; nats: what the boundary costs a byte,"
        f" measured on a small model;\nbest: by {ranked}, times learning efficiency in a run of {tokens:.3g} tokens"
        " (docs/learning.md)\n"
    )
    click.echo("\n".join([legend, *_remarks(found), "", *_change_lines(found.best)]))


def _cells(name: str, row: Candidate, tokens: float, *, priced: bool) -> list[str]:
    from swarmnode.planner.plan_search import idle_machines, limit_of

    cells = [
        name,
        str(row.manifest.pipeline.stages),
        boundary_name(row.manifest),
        str(row.manifest.inner.microbatch),
        str(row.manifest.gossip.round_samples),
        f"{row.plan.tokens_per_s:,.0f}",
        limit_of(row, tokens),
        str(row.plan.replicas_min),
        str(idle_machines(row)),
        f"{row.plan.egress * 8 / 1e6:.1f}",
        f"{row.plan.survival:.2%}",
        f"{row.nats:+.3f}",
    ]
    if priced:
        cells += [f"{row.plan.per_hour:,.2f}", f"{row.plan.tokens_per_money:,.0f}"]
        cells.append(f"{len(row.fleet)} of {len(row.fleet) + len(row.left_out)}")
    return cells


def boundary_name(manifest: Manifest) -> str:
    """`int8`, `subspace 512`."""
    pipeline = manifest.pipeline
    return f"subspace {pipeline.boundary_rank}" if pipeline.boundary == "subspace" else pipeline.boundary


def _remarks(found: Search) -> list[str]:
    best = found.best
    lines = [f"not used: {line}" for line in best.plan.idle]
    if best.left_out:
        lines.append(f"not used: {', '.join(best.left_out)}: they cost more than they add (--by speed uses them)")
    if found.own is None:
        lines.append(f"the manifest's own settings do not fit: {found.own_fault}")
    elif best.changes:
        lines.append(f"the best is {best.plan.tokens_per_s / found.own.plan.tokens_per_s:.2f} times as fast as now")
    if best.plan.limit_kind == "in flight":
        lines.append(
            f"machines wait for lines: inner.inner_batch = {best.manifest.inner.inner_batch} lets no more be in flight;"
            " a larger one learns less from a sample, and is not searched"
        )
    if best.frailty == 1:
        lines.append(f"with every setting stages die out within a day; best: {best.plan.survival:.4%} for none")
    if best.frailty == 2:
        lines.append("the fleet cannot fill every stage with two replicas: a machine that leaves stops the run")
    if found.subspace is not None:
        lines.append(_of_subspace(found.subspace, best if best is not found.subspace else found.plain))
    return lines


def _of_subspace(within: Candidate, plain: Candidate | None) -> str:
    text = (
        f'boundary = "subspace" with rank {within.manifest.pipeline.boundary_rank}: {within.plan.tokens_per_s:,.0f}'
        f" tokens/s, and about {within.nats:.3f} nat a byte worse, {SMALL_MODEL}; longer training does not close it"
    )
    if plain is None:
        return text
    return (
        f"{text}. Without: {plain.plan.tokens_per_s:,.0f} tokens/s with {plain.manifest.pipeline.stages} stages,"
        f" {boundary_name(plain.manifest)}, microbatch {plain.manifest.inner.microbatch}, round"
        f" {plain.manifest.gossip.round_samples}"
    )


def _change_lines(best: Candidate) -> Sequence[str]:
    if not best.changes:
        return ["the manifest's own settings are the best: nothing to change"]
    lines, table = ["change in the manifest:"], ""
    for of, key, value in best.changes:
        if of != table:
            lines += ["", f"[{of}]"]
            table = of
        lines.append(f"{key} = {json.dumps(value)}")
    return lines


def search_json(found: Search, tokens: float) -> dict[str, Any]:
    """The same as an object; infinite numbers are null."""
    best = found.best
    return {
        "by": "money" if found.by_money else "speed",
        "tried": found.tried,
        "best": _object(best, tokens) | {"plan": _finite(dataclasses.asdict(best.plan))},
        "rows": [_object(row, tokens) for row in found.rows],
        "manifest": _object(found.own, tokens) if found.own else None,
        "manifest_fault": found.own_fault,
        "plain": _object(found.plain, tokens) if found.plain else None,
        "subspace": _object(found.subspace, tokens) if found.subspace else None,
    }


def _object(row: Candidate, tokens: float) -> dict[str, Any]:
    from swarmnode.planner.plan_search import idle_machines, limit_of

    pipeline = row.manifest.pipeline
    return {
        "stages": pipeline.stages,
        "boundary": pipeline.boundary,
        "boundary_rank": pipeline.boundary_rank,
        "microbatch": row.manifest.inner.microbatch,
        "round_samples": row.manifest.gossip.round_samples,
        "tokens_per_s": row.plan.tokens_per_s,
        "tokens_per_money": _finite(row.plan.tokens_per_money),
        "per_hour": row.plan.per_hour,
        "nats": row.nats,
        "limit": limit_of(row, tokens),
        "limit_at": row.plan.limit,
        "replicas_min": row.plan.replicas_min,
        "idle": idle_machines(row),
        "not_used": [*row.plan.idle, *row.left_out],
        "egress_bytes_per_s": row.plan.egress,
        "survival": row.plan.survival,
        "changes": {f"{table}.{key}": value for table, key, value in row.changes},
    }


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value
