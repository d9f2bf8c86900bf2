"""`swarmnode plan`: estimate a run on a fleet before anybody joins."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING

import click

from swarmnode.cli.option.param import DURATION
from swarmnode.cli.output.console import paper
from swarmnode.plugin import SIMULATOR, load

if TYPE_CHECKING:
    from swarmnode.manifest import Manifest
    from swarmnode.planner.fleet import MachineKind
    from swarmnode.planner.plan import Plan

TOKENS = 1e9
TOKENS_A_PARAMETER = 20.0  # arXiv 2203.15556, table 3
FILE = click.Path(exists=True, dir_okay=False, path_type=Path)


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
    """
    from swarmnode import api
    from swarmnode.planner.fitted import alone, forecast
    from swarmnode.planner.fleet import read_fleet

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
        click.echo(json.dumps(dataclasses.asdict(planned) | {"simulated_tokens_per_s": measured}, default=list))
    else:
        _table(planned, tokens, measured, cards=any(kind.host_gb for kind in kinds))
        for line in forecast(planned, parsed, tokens, alone(parsed, kinds, tokens))[2:]:
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
    from swarmnode.cli.output.search_table import print_search, search_json
    from swarmnode.manifest.recipe import parameters_of
    from swarmnode.planner.plan_search import search

    tokens = TOKENS_A_PARAMETER * parameters_of(manifest.model) if tokens is None else tokens
    result = search(manifest, kinds, tokens, by_money=None if by is None else by == "money", ranks=ranks)
    best = result.best
    measured = _simulated(best.manifest, best.fleet, simulate_s) if simulate_s is not None else None
    if as_json:
        click.echo(json.dumps(search_json(result, tokens) | {"simulated_tokens_per_s": measured}, default=list))
    else:
        print_search(result, tokens)
        if measured is not None:
            click.echo(f"simulated: {measured:,.0f} tokens/s")


def _simulated(manifest: Manifest, kinds: tuple[MachineKind, ...], seconds: float) -> float:
    rate = load(SIMULATOR, "rate")
    if not callable(rate):
        raise click.UsageError("--simulate: the package swarmsim is missing; install swarmnode anew")
    return float(rate(manifest, kinds, seconds, lambda line: click.echo(line, err=True)))


def _table(found: Plan, tokens: float, measured: float | None, *, cards: bool) -> None:
    from rich.table import Table

    from swarmnode.planner.fitted import took

    console = paper()
    columns = ("stage", "layers", "weights", "nodes", "TFLOP/s", "up, Mb/s", "memory", "join", "kept a day")
    table = Table(box=None, padding=(0, 2, 0, 0))
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    for stage in found.stages:
        part = stage.part
        table.add_row(
            str(part.stage),
            f"{part.layers.start}-{part.layers.stop - 1}",
            f"{part.parameters / 1e6:.1f} M",
            str(stage.replicas),
            f"{stage.flops / 1e12:.2f}",
            f"{stage.egress * 8 / 1e6:.1f}",
            f"{stage.need.device / 1e9:.1f} + {stage.need.host / 1e9:.1f} GB"
            if cards
            else f"{stage.shared / 1e9:.2f} GB",
            f"{stage.download_s:.0f} s",
            f"{stage.survival:.4%}",
        )
    console.print(table)
    memory = "memory: of the card + of its host, by formula; " if cards else ""
    console.print(
        f"up and memory: of each node; {memory}kept a day: odds that the stage does not die out\n", highlight=False
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
    if measured is not None:
        console.print(f"simulated: {measured:,.0f} tokens/s", highlight=False)
