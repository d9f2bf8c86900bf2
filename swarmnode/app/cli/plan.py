"""`swarmnode plan`: estimate a run on a fleet before anybody joins."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from swarmnode.app.cli.option.param import DURATION
from swarmnode.app.cli.output.console import paper
from swarmnode.base.plugin import SIMULATOR, load

if TYPE_CHECKING:
    from swarmnode.app.planner.fleet import MachineKind
    from swarmnode.app.planner.plan import Plan
    from swarmnode.app.planner.plan_search import Candidate, Search
    from swarmnode.app.planner.simulated import Simulated
    from swarmnode.run.manifest import Manifest


TOKENS = 1e9
FILE = click.Path(exists=True, dir_okay=False, path_type=Path)


SMALL_MODEL = "measured on a small model (width 96, 300 steps, docs/methods.md)"


def print_search(found: Search, tokens: float) -> None:
    """Print the best settings, the machines they cannot use, what the boundary costs, and the lines to change."""
    from rich.table import Table

    console = paper()
    priced = any(row.plan.per_hour for row in found.rows)
    columns = ["", "stages", "boundary", "microbatch", "round", "tokens/s", "limit", "replicas", "idle"]
    columns += ["up, Mbit/s", "kept a day", "nats", *(["an hour", "tokens for 1", "kinds"] if priced else [])]
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
        "microbatch and round: samples; limit: what holds the run up (memory: machines with more of it would be"
        " faster);\nreplicas: of the stage with the fewest; idle: machines without a stage;\nup: of a mean node of the"
        f" busiest stage; nats: what the boundary costs a byte, measured on a small model;\nbest: by"
        f" {ranked}, times learning efficiency in a run of {tokens:.3g} tokens"
        " (docs/learning.md)\n"
    )
    click.echo("\n".join([legend, *_remarks(found), "", *_change_lines(found.best)]))


def _cells(name: str, row: Candidate, tokens: float, *, priced: bool) -> list[str]:
    from swarmnode.app.planner.plan_search import idle_machines, limit_of

    cells = [
        name,
        _stages(row),
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


def _stages(row: Candidate) -> str:
    """`16`, or `16 in 6.8 hops` where machines serve several."""
    stages = row.manifest.pipeline.stages
    hops = row.plan.hops
    return str(stages) if row.manifest.pipeline.span_max == 1 else f"{stages} in {hops:.1f} hops"


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
    lines = ["change in the manifest:"]
    table = ""
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
    from swarmnode.app.planner.plan_search import idle_machines, limit_of

    pipeline = row.manifest.pipeline
    return {
        "stages": pipeline.stages,
        "span_max": pipeline.span_max,
        "hops": row.plan.hops,
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


@click.command(short_help="estimate stages, speed, days and traffic of a fleet")
@click.argument("manifest", metavar="RUN | MANIFEST", type=click.Path(exists=True, path_type=Path))
@click.argument("fleet", metavar="FLEET", type=FILE)
@click.option(
    "--tokens", type=click.FloatRange(min=1), help="Tokens to train on.  [default: 1e9; with --search 20 a parameter]"
)
@click.option("--stages", type=click.IntRange(1, 512), help="Stages of the model.  [default: the manifest's]")
@click.option(
    "--simulate",
    "simulate_s",
    type=DURATION,
    metavar="TIME",
    help="Check it by simulating so much virtual time, without faults.",
)
@click.option("--search", "searches", is_flag=True, help="Find the best stages, boundary, microbatch and round.")
@click.option(
    "--by",
    type=click.Choice(("speed", "money")),
    help="With --search: what is best.  [default: money if the fleet has prices]",
)
@click.option(
    "--rank",
    "ranks",
    type=click.IntRange(1),
    multiple=True,
    metavar="K",
    help="With --search: a subspace boundary to try; repeatable.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def command(
    manifest: Path,
    fleet: Path,
    tokens: float | None,
    stages: int | None,
    simulate_s: float | None,
    searches: bool,
    by: str | None,
    ranks: tuple[int, ...],
    as_json: bool,
) -> None:
    """Estimate RUN (a run's folder, its manifest, or a scenario of `simulate`) on the machines of FLEET (CSV: count,
    flops, up_mbps, down_mbps, region, life_h, ...): the split into stages, replicas, tokens per second, days, egress
    and memory per node, and the odds that no stage dies out in a day.

    The estimate is by formula; --simulate runs the nodes' own code in virtual time and prints its result beside it.
    --search tries other settings by the same formula, and says which lines of the manifest to change.

    \b
    A fleet of eight cards at home:   count,flops,up_mbps,down_mbps
                                      8,2e13,20,100
    """
    from swarmnode.app import api
    from swarmnode.app.planner.fitted import alone, forecast
    from swarmnode.app.planner.fleet import read_fleet

    parsed = api.manifest_or_scenario(manifest)
    kinds = read_fleet(fleet)
    if searches:
        if stages is not None:
            raise click.UsageError("--search chooses the stages: leave out --stages")
        _search(parsed, kinds, tokens, by, ranks, simulate_s, as_json=as_json)
        return
    if by is not None or ranks:
        raise click.UsageError("--by and --rank go with --search")
    if stages is not None:
        parsed = dataclasses.replace(parsed, pipeline=dataclasses.replace(parsed.pipeline, stages=stages))
    tokens = TOKENS if tokens is None else tokens
    planned = api.plan(parsed, kinds, tokens)
    measured = _simulated(parsed, kinds, simulate_s) if simulate_s is not None else None
    if as_json:
        click.echo(json.dumps(dataclasses.asdict(planned) | _simulated_json(measured), default=list))
    else:
        _table(planned, tokens, cards=any(kind.host_gb for kind in kinds))
        for line in forecast(planned, parsed, tokens, alone(parsed, kinds, tokens), measured)[0 if measured else 2 :]:
            click.echo(line)
        if parsed.base.index:
            most = max(2 * stage.part.parameters for stage in planned.stages) / 1e9
            click.echo(f"it starts from a model: a node fetches its stage of that first, up to {most:.2g} GB")


def _search(
    manifest: Manifest,
    kinds: tuple[MachineKind, ...],
    tokens: float | None,
    by: str | None,
    ranks: tuple[int, ...],
    simulate_s: float | None,
    *,
    as_json: bool,
) -> None:
    from swarmnode.app.planner.fitted import alone, forecast
    from swarmnode.app.planner.plan_search import search
    from swarmnode.run.manifest.recipe import TOKENS_A_PARAMETER, parameters_of

    tokens = float(TOKENS_A_PARAMETER * parameters_of(manifest.model)) if tokens is None else tokens
    result = search(manifest, kinds, tokens, by_money=None if by is None else by == "money", ranks=ranks)
    best = result.best
    measured = _simulated(best.manifest, best.fleet, simulate_s) if simulate_s is not None else None
    if as_json:
        click.echo(json.dumps(search_json(result, tokens) | _simulated_json(measured), default=list))
    else:
        print_search(result, tokens)
        if measured is not None:
            one_alone = alone(best.manifest, kinds, tokens)
            click.echo("\n".join(forecast(best.plan, best.manifest, tokens, one_alone, measured)))


def _simulated_json(found: Simulated | None) -> dict[str, float | None]:
    return {
        "simulated_tokens_per_s": found.tokens_per_s if found else None,
        "simulated_meets_every_steps": found.meets_every_steps if found else None,
    }


def _simulated(manifest: Manifest, kinds: tuple[MachineKind, ...], seconds: float) -> Simulated:
    from swarmnode.app.planner.simulated import Simulated

    rate = load(SIMULATOR, "rate")
    if not callable(rate):
        raise click.UsageError("--simulate: the package swarmsim is missing; install swarmnode anew")
    found = rate(manifest, kinds, seconds, lambda line: click.echo(line, err=True))
    assert isinstance(found, Simulated)
    return found


def _table(found: Plan, tokens: float, *, cards: bool) -> None:
    from rich.table import Table

    from swarmnode.app.planner.fitted import took

    console = paper()
    columns = ("stage", "layers", "weights", "nodes", "TFLOP/s", "up, Mbit/s", "memory", "join", "kept a day")
    table = Table(box=None, padding=(0, 2, 0, 0))
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    for stage in found.stages:
        part = stage.part
        table.add_row(
            str(part.stage + 1),
            f"{part.layers.start + 1}-{part.layers.stop}",
            f"{part.parameters / 1e6:.1f} M",
            str(stage.replicas),
            f"{stage.flops / 1e12:.2f}",
            f"{stage.egress * 8 / 1e6:.1f}",
            f"{stage.need.device / 1e9:.1f} + {stage.need.host / 1e9:.1f} GB"
            if stage.need.device
            else f"{stage.need.host / 1e9:.2f} GB",
            f"{stage.download_s:.0f} s",
            f"{stage.survival:.4%}",
        )
    console.print(table)
    card = ", memory of the card + of its host by formula" if cards else ""
    console.print(
        "weights: M are millions; TFLOP/s: of all nodes of the stage; up: what each node sends while it trains; memory:"
        f" of each node{card};\njoin: what a newcomer takes to fetch the stage; kept a day: odds that the stage does"
        " not die out\n",
        highlight=False,
    )
    if found.replicas_min and found.hops < len(found.stages):
        console.print(
            f"machines serve what their memory holds: a microbatch visits {found.hops:.1f} of them on its way through"
            f" {len(found.stages)} stages",
            highlight=False,
        )
    for line in found.idle:
        console.print(f"idle: {line}", highlight=False)
    console.print(
        f"{found.tokens_per_s:,.0f} tokens/s (limit: {found.limit}); {tokens:.3g} tokens in "
        f"{took(86400.0 * found.days)}; odds of a day without losing a stage: {found.survival:.4%}",
        highlight=False,
    )
    if found.per_hour:
        console.print(
            f"{found.per_hour:,.2f} of money an hour: {found.tokens_per_money:,.0f} tokens for 1", highlight=False
        )
