"""`swarmnode bench gossip`, `attack` and `experts`: gossip methods compared with each other and under false packets."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from swarmnode.cli.output.findings import show as _print

JSON = click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")


@click.command()
@click.option(
    "--preset", default="quick", show_default=True, help="quick (minutes), standard (3 seeds) or long (hours)."
)
@click.option(
    "--methods",
    default="",
    help="METHOD/CODEC[/FRAGMENTS][+NAME=NUMBER][@SCHEDULE],... instead of the default list; NAME: alpha, beta, gamma,"
    " rate.",
)
@click.option("--rounds", type=click.IntRange(1, 10_000), default=None, help="Instead of the preset's.")
@click.option("--inner-steps", type=click.IntRange(1, 10_000), default=None, help="Of a round; also the preset's.")
@click.option("--replicas", type=click.IntRange(1, 1024), default=None, help="Instead of the preset's 8.")
@click.option("--batch", type=click.IntRange(1, 4096), default=None, help="Samples of a replica's inner step.")
@click.option("--group", type=click.IntRange(0, 1024), default=None, help="Replicas that meet; 0: all. Default: 2.")
@click.option("--optimizer", type=click.Choice(["adamw", "muon"]), default=None, help="Of inner steps. Default: adamw.")
@click.option("--learning-rate", type=click.FloatRange(0.0, 10.0, min_open=True), default=None, help="Its peak.")
@click.option(
    "--elsewhere", type=click.FloatRange(0.0, 10.0), default=None, help="muon: AdamW's rate, beside matrices."
)
@click.option("--decay", type=click.Choice(["cosine", "flat"]), default=None, help="Of the rate. Default: cosine.")
@click.option("--beta1", type=click.FloatRange(0.0, 1.0, max_open=True), default=None, help="AdamW's. Default: 0.9.")
@click.option("--momentum", type=click.FloatRange(0.0, 1.0, max_open=True), default=None, help="Muon's. Default: 0.95.")
@click.option("--acceptance", default="", help="A value of gossip.acceptance instead of its default.")
@click.option("--seeds", type=click.IntRange(1, 100), default=None, help="Seeds 0 to N-1; default: the preset's.")
@click.option("--jobs", type=click.IntRange(1, 64), default=2, show_default=True, help="Processes, a thread each.")
@click.option("--text", type=click.Path(exists=True), default=None, help="A text file or a folder of .txt files.")
@click.option("--out", type=click.Path(path_type=Path), default=Path("runs/gossip"), show_default=True, help="Results.")
@click.option("--resume", is_flag=True, help="Keep the runs that OUT/gossip.json has already.")
@click.option("--lost", type=click.FloatRange(0.0, 1.0), default=None, help="Share of packets that come too late.")
@click.option(
    "--healing/--no-healing", default=True, help="Whether fragments of slow weights are sent with packets of D."
)
@JSON
def gossip(
    preset: str,
    methods: str,
    acceptance: str,
    seeds: int | None,
    jobs: int,
    text: str | None,
    out: Path,
    resume: bool,
    healing: bool,
    as_json: bool,
    **size: Any,
) -> None:
    """Loss against bytes of gossip methods and codecs: 8 replicas of a small byte model in one process, the same text,
    seeds and steps for all. Writes OUT/gossip.json and OUT/gossip.html (the Pareto front)."""
    from swarmnode.bench.method import gossip as bench

    whats = tuple(methods.split(",")) if methods else bench.DEFAULT
    found = bench.run(
        *(preset, whats, seeds, jobs, text, out, lambda line: click.echo(line, err=True)),
        changes={key: value for key, value in size.items() if value is not None},
        resume=resume,
        healing=healing,
        acceptance=acceptance,
    )
    _print(found if as_json else {key: found[key] for key in ("methods", "preset", "seconds")}, as_json)
    if not as_json:
        click.echo(f"page: {out / 'gossip.html'}")


@click.command()
@click.option("--preset", default="quick", show_default=True, help="quick (minutes) or standard.")
@click.option("--attacks", default="", help="Names with commas between, instead of all.")
@click.option("--codec", default="noloco/modular4", show_default=True, help="METHOD/CODEC.")
@click.option("--acceptance", default="guarded,clipped,all", show_default=True, help="Values of gossip.acceptance.")
@click.option("--seeds", type=click.IntRange(1, 100), default=1, show_default=True, help="Seeds 0 to N-1.")
@click.option("--text", type=click.Path(exists=True), default=None, help="A text file or a folder of .txt files.")
@click.option("--jobs", type=click.IntRange(1, 64), default=2, show_default=True, help="Processes, a thread each.")
@click.option("--out", type=click.Path(path_type=Path), default=Path("runs/attack"), show_default=True, help="Results.")
@click.option("--resume", is_flag=True, help="Keep the runs that OUT/attack.json has already.")
@click.option(
    "--references", type=click.IntRange(1, 100), default=1, show_default=True, help="Runs without liars, a seed."
)
@click.option("--honest", is_flag=True, help="No liars: the share of honest packets that the guard accepts whole.")
@click.option("--pipeline", is_flag=True, help="Liars answer microbatches falsely instead, in a swarm of processes.")
@click.option("--resources", is_flag=True, help="Attackers on memory, processors and logs, of a swarm of processes.")
@click.option(
    "--liars", type=click.FloatRange(0.0, 1.0), default=0.25, show_default=True, help="Of the stage attacked."
)
@click.option("--every", type=click.IntRange(1, 1000), default=1, show_default=True, help="One false answer in N.")
@click.option("--replicas", type=click.IntRange(2, 64), default=4, show_default=True, help="Of each of two stages.")
@click.option("--samples", type=click.IntRange(512), default=6000, show_default=True, help="Of each swarm.")
@JSON
def attack(
    preset: str,
    attacks: str,
    codec: str,
    acceptance: str,
    seeds: int,
    text: str | None,
    jobs: int,
    out: Path,
    resume: bool,
    references: int,
    honest: bool,
    pipeline: bool,
    resources: bool,
    liars: float,
    every: int,
    replicas: int,
    samples: int,
    as_json: bool,
) -> None:
    """Cost of a quarter of lying replicas for the honest ones, by gossip.acceptance: held-out nats over the same run
    without the liars. With --pipeline the same for false gradients, activations and losses (with --liars, --every,
    --replicas and --samples), and the time until the liars are excluded. With --resources samples a second with and
    without silent streams, floods of records and events, and malformed frames."""
    if resources:
        from swarmnode.bench.swarm import resource_attack, resource_attacker
        from swarmnode.daemon.clock import SystemClock

        ways = [word.strip() for word in attacks.split(",")] if attacks else list(resource_attacker.WAYS)
        _print(resource_attack.run(ways, SystemClock(), lambda line: click.echo(line, err=True)), as_json)
        return
    if pipeline:
        from swarmnode.bench.swarm import byzantine_replica as lies
        from swarmnode.bench.swarm import pipeline_attack
        from swarmnode.daemon.clock import SystemClock

        chosen = [word.strip() for word in attacks.split(",")] if attacks else list(lies.ALL)
        asked = chosen, liars, replicas, samples, every, 1, SystemClock()
        found = pipeline_attack.run(
            *(*asked, lambda line: click.echo(line, err=True)), seeds=range(seeds), out=out, resume=resume
        )
        _print(found if as_json else {"lies": found["lies"]}, as_json)
        return
    if honest:
        from swarmnode.bench.method import guard_false_positives as honesty

        _print(honesty.run(codec, seeds, text, lambda line: click.echo(line, err=True), jobs=jobs, out=out), as_json)
        return
    from swarmnode.bench.method import attack as bench
    from swarmnode.bench.method.attacks import ATTACKS

    names = tuple(name.strip() for name in attacks.split(",")) if attacks else tuple(ATTACKS)
    believing = tuple(word.strip() for word in acceptance.split(","))
    found = bench.run(
        *(preset, names, codec, believing, seeds, text, lambda line: click.echo(line, err=True)),
        jobs=jobs,
        out=out,
        resume=resume,
        references=references,
    )
    _print(found if as_json else {key: value for key, value in found.items() if key != "runs"}, as_json)
