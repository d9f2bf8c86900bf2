"""`swarmnode bench WHAT`: numbers of this machine."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import click

from swarmnode.cli import bench_learning
from swarmnode.cli.duration import Duration
from swarmnode.cli.findings import show as _print

JSON = click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")


@click.group(short_help="measure this machine")
def command() -> None:
    """Measure this machine. Each command runs both sides of its comparison, and prints what it measured."""


@command.command()
@JSON
def swarm(as_json: bool) -> None:
    """Tokens per second of a local swarm of 6 processes, against one plain PyTorch process that trains the same model
    with the same global batch on the same cores, and where the rest goes."""
    _print(_run("swarm"), as_json)


@command.command()
@JSON
def transport(as_json: bool) -> None:
    """Tensors of 1, 4, 16 and 64 MiB between two processes, against a bare libp2p stream of the same bytes."""
    _print(_run("transport"), as_json)


@command.command()
@JSON
def kill(as_json: bool) -> None:
    """Seconds a local swarm stands still when a node is killed: ten kills, each stage in turn, feeders included."""
    _print(_run("kill"), as_json)


@command.command()
@click.option("--runs", type=click.IntRange(1, 1000), default=1, show_default=True, help="Lives, one seed each.")
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True, help="Of the first life.")
@click.option(
    "--journal",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Write each life there, a JSON line; lives of these seeds that it holds are not lived again.",
)
@JSON
def chaos(runs: int, seed: int, journal: Path | None, as_json: bool) -> None:
    """Whole lives of a local swarm under real faults (processes killed, frozen, cut off, told to go, disks full). Laws
    are checked in the logs afterwards; exit code 1 if any was broken."""
    from swarmnode.bench.laws import read_lines
    from swarmnode.cli.daemon import SystemClock

    bench = importlib.import_module("swarmnode.bench.chaos")
    seeds = range(seed, seed + runs)
    before = {life["seed"]: life for life in (read_lines(journal) if journal else ()) if life["seed"] in seeds}
    lives = list(before.values())
    for number in (number for number in seeds if number not in before):
        lives.append(bench.run(SystemClock(), number, lambda text: click.echo(f"  {text}", err=True)))
        if journal is not None:
            with journal.open("a") as file:
                file.write(json.dumps(lives[-1]) + "\n")
        click.echo(f"life {number}: {lives[-1]['laws broken'] or 'no law broken'}", err=True)
    _print(
        {"lives": lives if as_json else [bench.row(life) for life in lives], "in a row": bench.in_a_row(lives)}, as_json
    )
    if any(life["laws broken"] for life in lives):
        raise SystemExit(1)


@command.command()
@click.option(
    "--preset", type=click.Choice(("tiny", "demo", "small")), default="small", show_default=True, help="Model."
)
@click.option("--repeats", type=click.IntRange(1, 100), default=3, show_default=True, help="Of each; medians count.")
@click.option("--folder", type=click.Path(exists=True, file_okay=False, path_type=Path), help="On the disk to measure.")
@JSON
def checkpoint(preset: str, repeats: int, folder: Path | None, as_json: bool) -> None:
    """The pause of training for a checkpoint against an inner step; saving and loading a stage against the same disk,
    written and read plainly in the same run."""
    bench = importlib.import_module("swarmnode.bench.checkpoint")
    _print(bench.run(preset, repeats, folder), as_json)


@command.command()
@click.option(
    "--width", type=click.IntRange(0, 8192), default=0, help="Of one layer; 0, the default: the demo's stage."
)
@click.option("--context", type=click.IntRange(0, 8192), default=0, help="Tokens; 0: the demo's, or 512.")
@click.option("--samples", type=click.IntRange(0, 1024), default=0, help="Of a microbatch; 0: the demo's.")
@click.option("--repeats", type=click.IntRange(1, 100), default=3, show_default=True, help="Medians count.")
@JSON
def muon(width: int, context: int, samples: int, repeats: int, as_json: bool) -> None:
    """Share of a stage's processor time that inner steps take, by inner batch."""
    bench = importlib.import_module("swarmnode.bench.muon")
    _print(bench.run(width, context, samples, repeats), as_json)


@command.command()
@click.option("--live", is_flag=True, help="Also nodes of a local swarm, some minutes.")
@click.option("--seeds", type=click.IntRange(1, 100), default=2, show_default=True, help="Simulated lives a notice.")
@JSON
def drain(live: bool, seeds: int, as_json: bool) -> None:
    """Share of in-flight work and of unsent learning that a machine brings home when it is taken away with 120, 30, 5
    or 0 s of notice."""
    bench = importlib.import_module("swarmnode.bench.drain")
    _print(bench.run(live, seeds, lambda line: click.echo(line, err=True)), as_json)


@command.command()
@JSON
def recovery(as_json: bool) -> None:
    """Seconds a stage stays away when all its replicas are killed: the middle, first and last of a local swarm."""
    bench = importlib.import_module("swarmnode.bench.recovery")
    _print(bench.run(say=lambda line: click.echo(line, err=True)), as_json)


@command.command()
@click.option("--preset", default="quick", show_default=True, help="tiny (seconds), quick (minutes) or standard.")
@click.option("--seeds", type=click.IntRange(1, 100), default=None, help="Seeds 0 to N-1; default: the preset's.")
@click.option("--jobs", type=click.IntRange(1, 64), default=2, show_default=True, help="Processes, a thread each.")
@click.option("--text", type=click.Path(exists=True), default=None, help="A text file or a folder of .txt files.")
@JSON
def checkfree(preset: str, seeds: int | None, jobs: int, text: str | None, as_json: bool) -> None:
    """What lost stages cost by each way of going on: roll-back to checkpoints, redundant computation, and rebuilding
    from neighbours (CheckFree); held-out nats at the same simulated wall time."""
    bench = importlib.import_module("swarmnode.bench.checkfree")
    found = bench.run(preset, seeds, jobs, text, lambda line: click.echo(line, err=True))
    _print(found if as_json else {key: value for key, value in found.items() if key != "lives"}, as_json)


@command.command()
@click.option(
    "--hours", type=click.FloatRange(0.1, 1000), default=4.0, show_default=True, help="Of each life, virtual."
)
@click.option("--seeds", type=click.IntRange(1, 100), default=1, show_default=True, help="Seeds 0 to N-1.")
@click.option("--jobs", type=click.IntRange(1, 64), default=2, show_default=True, help="Processes, a thread each.")
@click.option(
    "--out", type=click.Path(path_type=Path), default=Path("runs/goodput"), show_default=True, help="Results."
)
@JSON
def goodput(hours: float, seeds: int, jobs: int, out: Path, as_json: bool) -> None:
    """What of a simulated fleet's work remains at 0 to 33 % deaths an hour, by three ways of going on after a lost
    stage. Writes OUT/goodput.html (the curves). About six CPU minutes."""
    bench = importlib.import_module("swarmnode.bench.goodput")
    _print(bench.run(hours, seeds, jobs, out, lambda line: click.echo(line, err=True)), as_json)


@command.command()
@JSON
def fresh(as_json: bool) -> None:
    """Seconds from `git clone` to a live page on which the loss falls: clones this very clone, and runs `make demo`."""
    _print(_run("fresh"), as_json)


@command.command()
@click.option("--preset", type=click.Choice(("tiny", "demo")), default="tiny", show_default=True, help="Model.")
@JSON
def join(preset: str, as_json: bool) -> None:
    """Seconds from `swarmnode join INVITE` in a fresh home to the first accepted microbatch, against a local swarm."""
    _print(_run("join", preset=preset), as_json)


@command.command()
@JSON
def knock(as_json: bool) -> None:
    """What 10,000 connection attempts a minute by peers that may not take part cost a node in CPU and memory."""
    _print(_run("knock"), as_json)


@command.command()
@JSON
def limit(as_json: bool) -> None:
    """How closely --max-up is kept, half a minute each at 5, 20 and 100 Mbit/s; and how near its --quota a node stops.
    Seven minutes, of little work."""
    _print(_run("limit"), as_json)


@command.command()
@JSON
def agreement(as_json: bool) -> None:
    """Six node processes on this machine, and the same six simulated with the speeds the live ones measured: tokens per
    second and bytes per token of both."""
    _print(_run("agreement"), as_json)


@command.command()
@JSON
def clock(as_json: bool) -> None:
    """CPU time of an event in virtual time, in C and in Python, against asyncio and uvloop in the same run."""
    _print(_run("clock"), as_json)


@command.command()
@click.option("--extension/--no-extension", default=True, help="With the C kernels, or numpy and torch alone.")
@JSON
def codec(extension: bool, as_json: bool) -> None:
    """Encoding and decoding speed of every gossip codec on one core, against copying memory in the same run."""
    _print(_run("codec", extension=extension), as_json)


@command.command()
@click.option("--codec", "names", multiple=True, help="Several times for several; int8 and modular4 without it.")
@click.option("--parameters", type=click.IntRange(1), default=50_000_000, show_default=True, help="Of the replica.")
@click.option("--up-mbps", type=click.FloatRange(min=0.1), help="Send no more Mbit/s, as with --max-up.")
@click.option("--extension/--no-extension", default=True, help="With the C kernels, or numpy and torch alone.")
@JSON
def packet(names: tuple[str, ...], parameters: int, up_mbps: float | None, extension: bool, as_json: bool) -> None:
    """Seconds from a round's boundary to the packet delivered to another process: sent while it is encoded, against
    encoded first and then sent."""
    given = {"names": names} if names else {}
    limit = None if up_mbps is None else up_mbps * 1e6
    _print(_run("packet", parameters=parameters, extension=extension, up_bps=limit, **given), as_json)


@command.command()
@click.option("--exchanges", type=click.IntRange(1, 10_000), default=60, show_default=True, help="In pairs, at least.")
@click.option("--codec", "codecs", multiple=True, help="[METHOD/]CODEC, several times for several swarms; all: each.")
@JSON
def exchange(exchanges: int, codecs: tuple[str, ...], as_json: bool) -> None:
    """What exchanges cost a live swarm of six processes, with the demo's codec or others: bytes against the formula,
    whether compute waits, and the loss before and after."""
    bench = importlib.import_module("swarmnode.bench.exchange")
    which = bench.CODECS if codecs == ("all",) else codecs
    _print(bench.run(exchanges, codecs=which, say=lambda line: click.echo(line, err=True)), as_json)


@command.command()
@JSON
def boundary(as_json: bool) -> None:
    """What coded activations cost in loss, bytes and CPU: four stages in one process, three seeds; about a minute."""
    _print(_run("boundary"), as_json)


@command.command()
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
@click.option("--healing/--no-healing", default=True, help="Whether fragments of slow weights go with packets of D.")
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
    bench = importlib.import_module("swarmnode.bench.gossip")
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


@command.command()
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
@click.option("--honest", is_flag=True, help="Nobody lies: the share of honest packets that the guard takes whole.")
@click.option("--pipeline", is_flag=True, help="Liars answer microbatches falsely instead, in a swarm of processes.")
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
    liars: float,
    every: int,
    replicas: int,
    samples: int,
    as_json: bool,
) -> None:
    """What a quarter of lying replicas costs the honest ones, by what they believe (gossip.acceptance): held-out nats
    over the same run without the liars. With --pipeline the same of false gradients, activations and losses (--liars,
    --every, --replicas and --samples belong to it), and how soon the liars are excluded."""
    if pipeline:
        from swarmnode.cli.daemon import SystemClock

        lies = importlib.import_module("swarmnode.bench.liar")
        bench = importlib.import_module("swarmnode.bench.pipeline_attack")
        chosen = [word.strip() for word in attacks.split(",")] if attacks else list(lies.ALL)
        asked = chosen, liars, replicas, samples, every, 1, SystemClock()
        _print(bench.run(*asked, lambda line: click.echo(line, err=True)), as_json)
        return
    if honest:
        bench = importlib.import_module("swarmnode.bench.honest")
        _print(bench.run(codec, seeds, text, lambda line: click.echo(line, err=True), jobs=jobs, out=out), as_json)
        return
    bench = importlib.import_module("swarmnode.bench.attack")
    names = tuple(name.strip() for name in attacks.split(",")) if attacks else tuple(bench.ATTACKS)
    believing = tuple(word.strip() for word in acceptance.split(","))
    found = bench.run(
        *(preset, names, codec, believing, seeds, text, lambda line: click.echo(line, err=True)),
        jobs=jobs,
        out=out,
        resume=resume,
        references=references,
    )
    _print(found if as_json else {key: value for key, value in found.items() if key != "runs"}, as_json)


@command.command()
@click.option("--nodes", type=click.IntRange(2, 5000), default=1000, show_default=True, help="Made-up nodes.")
@click.option("--look", "look_s", type=Duration(), default=0.0, help="Only serve the page this long: 10m.")
@click.option("--port", type=click.IntRange(0, 65535), default=0, help="Of the page.")
@JSON
def dashboard(nodes: int, look_s: float, port: int, as_json: bool) -> None:
    """What the coordinator's page costs with a thousand nodes: share of a core of the server, main-thread time of an
    update in Chromium (playwright), first paint, bytes of assets."""
    bench = importlib.import_module("swarmnode.bench.dashboard")
    _print(bench.run(nodes, lambda line: click.echo(line, err=True), look_s, port), as_json)


def _run(what: str, **options: object) -> dict[str, Any]:
    found: dict[str, Any] = importlib.import_module(f"swarmnode.bench.{what}").run(**options)
    return found


command.add_command(bench_learning.command, "learning")
