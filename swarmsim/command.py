"""`swarmnode simulate`: the daemon's own coroutines in virtual time, under faults drawn from one seed."""

from __future__ import annotations

import dataclasses
import gc
import json
import time
from pathlib import Path
from typing import TYPE_CHECKING

import click

from swarmnode.app.cli.option.param import DURATION
from swarmnode.app.cli.output.console import paper

if TYPE_CHECKING:
    from swarmsim.outcome import Outcome
    from swarmsim.scenario import Scenario

EXIT_BROKEN = 70
NODES_MAX = 100_000
PROFILE_LINES = 24


@click.command(short_help="a whole swarm in virtual time, in a storm drawn from a seed")
@click.option("--scenario", "name", default="calm", show_default=True, help="A TOML file, or a name from examples/.")
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Each seed is one life.")
@click.option("--nodes", type=click.IntRange(1, NODES_MAX), help="Scale the fleet to so many machines.")
@click.option("--for", "for_s", type=DURATION, help="Length of the storm in virtual time.  [default: the scenario's]")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.option("--report", type=click.Path(dir_okay=False, path_type=Path), help="Write an HTML page with plots.")
@click.option(
    "--without-faults", is_flag=True, help="Also run without faults, and compare the losses at equal samples."
)
@click.option("--against", type=click.IntRange(min=0), metavar="SEED", help="Show a second seed beside the first.")
@click.option("--against-scenario", metavar="SCENARIO", help="Show a second scenario beside the first.")
@click.option(
    "--rebalance",
    "periods",
    metavar="SECONDS,...",
    help="Run one life per pipeline.rebalance_period_s given (0: no moves), and report the placement of nodes.",
)
@click.option("--profile", is_flag=True, help="Also report CPU time by module (slows the run down).")
@click.option("--sweep", "sweep_s", type=DURATION, help="Run seed after seed from --seed on, for so much real time.")
def command(
    name: str,
    seed: int,
    nodes: int | None,
    for_s: float | None,
    as_json: bool,
    report: Path | None,
    without_faults: bool,
    against: int | None,
    against_scenario: str | None,
    periods: str | None,
    profile: bool,
    sweep_s: float | None,
) -> int:
    """Run a scenario: nodes on simulated machines and links, with faults drawn from --seed.

    Laws are checked during the storm; after it, everything must recover within the scenario's bounds. Exit code 70 if a
    law is broken or something does not recover: the last lines then show how to replay it.
    """
    from swarmsim.scenario import chosen

    scenario = chosen(name, nodes, for_s)
    if sweep_s is not None:
        return _sweep(scenario, name, seed, sweep_s, _flags(nodes, for_s), as_json)
    if periods is not None:
        return _rebalance(scenario, seed, periods, as_json)
    from swarmsim.life import simulate

    outcomes = [_profiled(scenario, seed) if profile else simulate(scenario, seed)]
    if against is not None or against_scenario is not None:
        other = chosen(against_scenario or name, nodes, for_s)
        outcomes.append(simulate(other, seed if against is None else against))
    if without_faults:
        outcomes.append(simulate(dataclasses.replace(scenario, name=f"{scenario.name}, no faults", faults={}), seed))
    gc.freeze()  # skip collecting the garbage of a thousand nodes: that took seconds, and the process ends soon
    if report is not None:
        from swarmsim.report import page

        report.write_text(page(outcomes), encoding="utf-8")
    if as_json:
        found = [outcome.to_json() for outcome in outcomes]
        click.echo(json.dumps(found[0] if len(found) == 1 else found))
    else:
        _table(outcomes)
        if without_faults:
            _losses(outcomes[0], outcomes[-1])
    for outcome in outcomes:
        _tell(outcome, name, _flags(nodes, for_s))
    return EXIT_BROKEN if any(outcome.failures for outcome in outcomes) else 0


def _flags(nodes: int | None, for_s: float | None) -> str:
    return (f" --nodes {nodes}" if nodes is not None else "") + (f" --for {for_s:g}s" if for_s is not None else "")


def _tell(outcome: Outcome, name: str, flags: str) -> None:
    """Print what broke, the last events of the nodes involved, and the command that replays it."""
    if outcome.failures:
        click.echo(outcome.last_events, err=True)
        for failure in outcome.failures:
            click.echo(f"broken: {failure}", err=True)
        click.echo(f"replay: swarmnode simulate --seed {outcome.seed} --scenario {name}{flags}", err=True)


def _table(outcomes: list[Outcome]) -> None:
    from rich.table import Table

    from swarmsim.report import rows

    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    columns = [dict(rows(outcome)) for outcome in outcomes]
    for what in dict.fromkeys(key for column in columns for key in column):
        table.add_row(what, *(column.get(what, "") for column in columns))
    paper().print(table, highlight=False)


def _profiled(scenario: Scenario, seed: int) -> Outcome:
    """Run one life; print the shares of its CPU time by module on stderr."""
    import cProfile
    import pstats
    from collections import Counter

    from swarmsim.life import simulate

    profile = cProfile.Profile()
    outcome = profile.runcall(simulate, scenario, seed)
    spent: Counter[str] = Counter()
    for (file, _, function), (_, _, own_s, _, _) in pstats.Stats(profile).stats.items():  # type: ignore[attr-defined]
        inside = file.rpartition("/swarmnode/")[2].removesuffix(".py") if "/swarmnode/" in file else ""
        spent[inside or (function if file == "~" else Path(file).name)] += own_s
    whole = sum(spent.values())
    for what, seconds in spent.most_common(PROFILE_LINES):
        click.echo(f"{seconds / whole:6.1%}  {what}", err=True)
    return outcome


def _losses(stormy: Outcome, calm: Outcome) -> None:
    """Print the held-out loss of two lives at equal samples, over the last tenth of those that both have reached."""
    reached = min(max((samples for _, _, samples in life.validations), default=0) for life in (stormy, calm))
    ours, theirs = (life.history().loss_towards(reached) for life in (stormy, calm))
    if ours is not None and theirs is not None:
        click.echo(
            f"held-out loss, mean from {0.9 * reached:,.0f} to {reached:,} samples: {ours:.4f} nats, without faults "
            f"{theirs:.4f}: "
            f"{ours / theirs - 1.0:+.2%}"
        )


def _sweep(scenario: Scenario, name: str, seed: int, seconds: float, flags: str, as_json: bool) -> int:
    """Run lives from `seed` on until `seconds` of real time are over; list the broken ones."""
    from swarmsim.sweep import sweep

    begun = time.monotonic()
    found = sweep(
        scenario, seed, lambda swept: time.monotonic() - begun < seconds, lambda outcome: _tell(outcome, name, flags)
    )
    if as_json:
        click.echo(json.dumps(dataclasses.asdict(found)))
    else:
        click.echo(
            f"{found.lives} lives from seed {seed}, {found.faults} faults, {found.laws_checked} checks of laws, "
            f"{found.virtual_s:.0f} s of virtual time in {found.cpu_s:.0f} CPU s; broken: {found.broken or 'none'}"
        )
    return EXIT_BROKEN if found.broken else 0


def _rebalance(scenario: Scenario, seed: int, periods: str, as_json: bool) -> int:
    """Run the same life with each of the rebalance periods."""
    from rich.table import Table

    from swarmsim.life import simulate

    try:
        wanted = [float(text) for text in periods.split(",")]
    except ValueError:
        raise click.BadParameter(f"{periods!r}: seconds with commas between, as 0,300,60") from None
    columns = ("every", "of the optimum", "= training", "x even", "worked off", "moves", "machines", "CPU s")
    table = Table(*columns, box=None, padding=(0, 2, 0, 0))
    found = []
    for period_s in wanted:
        pipeline = dataclasses.replace(scenario.manifest.pipeline, rebalance_period_s=period_s)
        manifest = dataclasses.replace(scenario.manifest, pipeline=pipeline)
        outcome = simulate(dataclasses.replace(scenario, manifest=manifest), seed)
        found.append({"period_s": period_s} | outcome.to_json())
        table.add_row(
            f"{period_s:g} s" if period_s else "never",
            f"{outcome.share_placed:.3f}",
            f"{outcome.share_training:.3f}",
            f"{outcome.share_even:.3f}",
            f"{outcome.share:.3f}",
            str(outcome.storm.moves),
            str(outcome.nodes_ever),
            f"{outcome.cpu_s:.0f}",
        )
    if as_json:
        click.echo(json.dumps(found))
    else:
        paper().print(table)
    return EXIT_BROKEN if any(outcome["failures"] for outcome in found) else 0
