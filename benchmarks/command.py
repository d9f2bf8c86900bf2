"""`swarmnode bench`, from a checkout of the sources: all benchmarks beside the few that are in the package."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from swarmnode.app.cli.bench import JSON, command, show
from swarmnode.app.cli.option.param import DURATION

if TYPE_CHECKING:
    from swarmnode.run.manifest import Manifest


@command.command()
@JSON
def transport(as_json: bool) -> None:
    """Tensors of 1, 4, 16 and 64 MiB between two processes, against a bare libp2p stream of the same bytes."""
    from benchmarks.micro import transport as measured

    show(measured.run(), as_json)


@command.command()
@click.option(
    "--preset", default="quick", show_default=True, help="quick (minutes), standard (3 seeds) or long (hours)."
)
@click.option(
    "--methods",
    default="",
    show_default=False,
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
@click.option("--decay", type=click.Choice(["cosine", "flat", "wsd"]), default=None, help="Of the rate; else cosine.")
@click.option("--beta1", type=click.FloatRange(0.0, 1.0, max_open=True), default=None, help="AdamW's. Default: 0.9.")
@click.option("--momentum", type=click.FloatRange(0.0, 1.0, max_open=True), default=None, help="Muon's. Default: 0.95.")
@click.option("--nesterov/--no-nesterov", default=None, help="Of Muon. Default: with.")
@click.option(
    "--acceptance", default="", show_default=False, help="A value of gossip.acceptance instead of its default."
)
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
    from benchmarks.method import gossip as bench

    whats = tuple(methods.split(",")) if methods else bench.DEFAULT
    found = bench.run(
        *(preset, whats, seeds, jobs, text, out, lambda line: click.echo(line, err=True)),
        changes={key: value for key, value in size.items() if value is not None},
        resume=resume,
        healing=healing,
        acceptance=acceptance,
    )
    show(found if as_json else {key: found[key] for key in ("methods", "preset", "seconds")}, as_json)
    if not as_json:
        click.echo(f"page: {out / 'gossip.html'}")


@command.command()
@click.option(
    "--settings",
    default="lloyd4,lloyd4/3,lloyd4/9",
    show_default=True,
    help="CODEC/F[/delay],...: gossip.codec, fragments, delay.",
)
@click.option("--replicas", default="4,16,64", show_default=True, help="Numbers with commas between.")
@click.option("--width", type=click.IntRange(32, 1024), default=64, show_default=True, help="Of the model.")
@click.option("--samples", type=click.IntRange(1, 4096), default=64, show_default=True, help="Of a step of all.")
@click.option("--steps", type=click.IntRange(12, 100_000), default=240, show_default=True, help="Of each run.")
@click.option(
    "--learning-rate", type=click.FloatRange(0.0, 10.0, min_open=True), default=0.012, show_default=True, help="Muon's."
)
@click.option("--seeds", type=click.IntRange(1, 100), default=1, show_default=True, help="Seeds 0 to N-1.")
@click.option("--jobs", type=click.IntRange(1, 64), default=2, show_default=True, help="Processes, a thread each.")
@click.option("--text", type=click.Path(exists=True), default=None, help="A text file or a folder of .txt files.")
@click.option(
    "--along", is_flag=True, help="Rows along each run, at a constant rate: the steps that few bytes cost by then."
)
@click.option("--out", type=click.Path(path_type=Path), default=Path("runs/averaging.json"), show_default=True)
@JSON
def averaging(
    settings: str,
    replicas: str,
    width: int,
    samples: int,
    steps: int,
    learning_rate: float,
    seeds: int,
    jobs: int,
    text: str | None,
    along: bool,
    out: Path,
    as_json: bool,
) -> None:
    """Learning efficiency by the bytes that a member sends a weight and step, where gradients are averaged in parts
    before each step: against one process with all samples. Bytes of fragments, which heal weights, are listed apart."""
    from benchmarks.method import shared_step, shared_step_along

    found = (shared_step_along if along else shared_step).run(
        settings.split(","),
        [int(one) for one in replicas.split(",")],
        width=width,
        samples=samples,
        steps=steps,
        rate=learning_rate,
        seeds=seeds,
        jobs=jobs,
        text=text,
        out=out,
        say=lambda line: click.echo(line, err=True),
    )
    show(found if as_json else {key: found[key] for key in ("rows", "curve") if key in found}, as_json)


@command.command()
@click.option(
    "--settings",
    default="int8,had4,had4:had2,had4:sd2,had2,frozen48+bf16,learned48+bf16,residual48+bf16,learned96+had4",
    show_default=True,
    help="[MAP+]THERE[:BACK],... beside bf16; MAP: frozenK, learnedK, residualK; THERE, BACK: bf16, int8, intN, hadN,"
    " rdN, sdN, mcN; THERE also aqN.",
)
@click.option("--stages", type=click.IntRange(2, 64), default=3, show_default=True, help="With boundaries between.")
@click.option("--layers", type=click.IntRange(2, 64), default=3, show_default=True, help="Of the model.")
@click.option("--width", type=click.IntRange(32, 1024), default=192, show_default=True, help="Of the model.")
@click.option("--samples", type=click.IntRange(1, 4096), default=4, show_default=True, help="Of a step.")
@click.option("--context", type=click.IntRange(8, 4096), default=128, show_default=True, help="Bytes of a sample.")
@click.option("--steps", type=click.IntRange(12, 100_000), default=300, show_default=True, help="Of each run.")
@click.option(
    "--learning-rate", type=click.FloatRange(0.0, 10.0, min_open=True), default=0.006, show_default=True, help="Muon's."
)
@click.option("--epochs", type=click.IntRange(1, 100), default=1, show_default=True, help="How often samples come.")
@click.option("--seeds", type=click.IntRange(1, 100), default=1, show_default=True, help="Seeds 0 to N-1.")
@click.option("--jobs", type=click.IntRange(1, 64), default=2, show_default=True, help="Processes, a thread each.")
@click.option("--text", type=click.Path(exists=True), default=None, help="A text file or a folder of .txt files.")
@click.option("--out", type=click.Path(path_type=Path), default=Path("runs/boundary.json"), show_default=True)
@JSON
def boundary(settings: str, learning_rate: float, text: str | None, out: Path, as_json: bool, **sizes: int) -> None:
    """Loss by the bytes of a token and boundary between two stages, there and back: against bf16, in plain PyTorch."""
    from benchmarks.method import boundary as bench

    found = bench.run(
        settings.split(","),
        rate=learning_rate,
        text=text,
        out=out,
        say=lambda line: click.echo(line, err=True),
        **sizes,
    )
    show(found if as_json else {"rows": found["rows"]}, as_json)


@command.command()
@click.option("--attacks", default="", show_default=False, help="Names with commas between, instead of all in swarms.")
@click.option("--replicas", default="", show_default=False, help="Of the stage attacked: 2,3,4 instead of each row's.")
@click.option("--methods", default="", show_default=False, help="average,gradient: gossip methods, else each row's.")
@click.option("--samples", type=click.IntRange(512), default=3000, show_default=True, help="Of each swarm.")
@click.option("--seeds", type=click.IntRange(1, 100), default=1, show_default=True, help="Seeds 0 to N-1.")
@click.option("--jobs", type=click.IntRange(1, 64), default=2, show_default=True, help="Processes, a thread each.")
@click.option("--out", type=click.Path(path_type=Path), default=Path("runs/attack"), show_default=True, help="Results.")
@click.option("--resume", is_flag=True, help="Keep what OUT has already.")
@click.option("--preset", default="quick", show_default=True, help="Of attacks on packets: quick (minutes), standard.")
@click.option("--codec", default="noloco/modular4", show_default=True, help="The same: METHOD/CODEC.")
@click.option("--acceptance", default="clipped,all", show_default=True, help="The same: values of gossip.acceptance.")
@click.option("--text", type=click.Path(exists=True), default=None, help="The same: a text file or folder of .txt.")
@click.option("--references", type=click.IntRange(1, 100), default=1, show_default=True, help="The same: honest runs.")
@JSON
def attack(
    attacks: str,
    replicas: str,
    methods: str,
    samples: int,
    seeds: int,
    jobs: int,
    out: Path,
    resume: bool,
    preset: str,
    codec: str,
    acceptance: str,
    text: str | None,
    references: int,
    as_json: bool,
) -> None:
    """Costs of attackers to a run: held-out nats over the same swarm without them, their lies until all callers had
    excluded them, honest nodes that were blamed, and how often what they plant is said. Swarms are real nodes and
    weights in virtual time. Attacks on packets of rounds (sign flip, ...) and on resources (silent, records, ...) have
    tables of their own; search looks for the strongest steering that the checks do not see."""
    from benchmarks.attack import table
    from swarmnode.app.daemon.clock import SystemClock

    found = table.run(
        _words(attacks) or list(table.ATTACKERS),
        [int(word) for word in _words(replicas)],
        _words(methods),
        samples,
        seeds,
        SystemClock(),
        lambda line: click.echo(line, err=True),
        jobs=jobs,
        out=out,
        resume=resume,
        preset=preset,
        codec=codec,
        acceptances=tuple(_words(acceptance)),
        text=text,
        references=references,
    )
    show(found, as_json)


def _words(text: str) -> list[str]:
    """The words of `text`, with commas between."""
    return [word.strip() for word in text.split(",") if word.strip()]


@command.command()
@click.argument("run", metavar="[RUN]", required=False, type=click.Path(exists=True, path_type=Path))
@click.option(
    "--preset", type=click.Choice(("tiny", "demo", "small")), default="demo", show_default=True, help="Without RUN."
)
@click.option("--replicas", default="1,2,4", show_default=True, help="Of each stage, a swarm for each number.")
@click.option("--samples", type=click.IntRange(512), help="Of each swarm.  [default: 2500; with --thorough 7500]")
@click.option("--seeds", type=click.IntRange(1, 100), default=1, show_default=True, help="Seeds, from the manifest's.")
@click.option("--thorough", is_flag=True, help="All settings of plain PyTorch: about two hours the first time.")
@click.option("--plain-only", is_flag=True, help="No swarm: fill the journal.")
@click.option(
    "--journal",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Of plain runs, which are measured once.  [default: ~/.cache/swarmnode/bench-learning.jsonl]",
)
@click.option("--fresh", is_flag=True, help="Repeat plain runs that the journal already has.")
@click.option(
    "--out", type=click.Path(path_type=Path), default=Path("runs/learning"), show_default=True, help="Results."
)
@click.option(
    "--device", default="cpu", show_default=True, metavar="auto|cpu|cuda|cuda:1|mps|xpu", help="Of both sides."
)
@JSON
def learning(
    run: Path | None,
    preset: str,
    replicas: str,
    samples: int | None,
    seeds: int,
    thorough: bool,
    plain_only: bool,
    journal: Path | None,
    fresh: bool,
    out: Path,
    device: str,
    as_json: bool,
) -> None:
    """Learning efficiency of live swarms per sample and per second, against the best plain PyTorch with AdamW and with
    Muon. RUN is a folder of `swarmnode init` or a signed manifest. About five minutes; plain runs are kept in a
    journal. Writes OUT/learning.json and OUT/learning.html (the curves)."""
    from benchmarks.swarm import learning as bench
    from swarmnode.app.daemon.clock import SystemClock
    from swarmnode.model.device import resolve_device
    from swarmnode.run.manifest.recipe import PRESETS

    numbers = () if plain_only else bench.replicas_of(replicas)
    manifest, base = (PRESETS[preset], None) if run is None else _read(run)
    extent = dataclasses.replace(bench.THOROUGH_EXTENT if thorough else bench.FAST_EXTENT, seeds=seeds)
    if samples is not None:
        extent = dataclasses.replace(extent, samples=samples)
    found = bench.run(
        *(manifest, numbers, extent, SystemClock(), lambda line: click.echo(line, err=True)),
        base=base,
        journal=journal,
        fresh=fresh,
        out=out,
        device=resolve_device(device),
    )
    show(found if as_json else bench.shown(found), as_json)
    if not as_json:
        click.echo(f"page: {out / bench.PAGE}")


@command.command()
@click.option("--device", default="auto", show_default=True, metavar="auto|cpu|cuda|cuda:1", help="Device.")
@click.option("--small", is_flag=True, help="A model of a few megabytes; seconds on a CPU.")
@JSON
def one_device(device: str, small: bool, as_json: bool) -> None:
    """Three node processes on one device, beside plain PyTorch with the same model and batch."""
    from benchmarks.swarm import one_device as measured
    from swarmnode.model.device import resolve_device

    show({"swarm": measured.run(resolve_device(device), small=small)}, as_json)


def _read(run: Path) -> tuple[Manifest, Path]:
    """The manifest of `run`, and the base of its relative paths."""
    from swarmnode.run.manifest import read_signed
    from swarmnode.run.manifest.folder import MANIFEST_FILE, SIGNED_FILE, read_manifest

    if not run.is_dir():
        return read_signed(run)[1], run.parent
    if (run / MANIFEST_FILE).exists():
        return read_manifest(run / MANIFEST_FILE), run
    return read_signed(run / SIGNED_FILE)[1], run


@command.command()
@JSON
def swarm(as_json: bool) -> None:
    """Tokens per second of a local swarm of 6 processes, against one plain PyTorch process that trains the same model
    with the same global batch on the same cores, and the causes of the difference."""
    from benchmarks.swarm import throughput as measured

    show(measured.run(), as_json)


@command.command()
@click.option("--runs", type=click.IntRange(1, 1000), default=1, show_default=True, help="Lives, one seed each.")
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True, help="Of the first life.")
@click.option(
    "--journal",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Write each life there as a JSON line; seeds that it already holds are skipped.",
)
@JSON
def chaos(runs: int, seed: int, journal: Path | None, as_json: bool) -> None:
    """Whole lives of a local swarm under real faults (processes killed, frozen, cut off, told to leave, disks full).
    Laws are checked in the logs afterwards; exit code 1 if any was broken."""
    from benchmarks.swarm import chaos as bench
    from benchmarks.swarm.laws import read_lines
    from swarmnode.app.daemon.clock import SystemClock

    seeds = range(seed, seed + runs)
    before = {life["seed"]: life for life in (read_lines(journal) if journal else ()) if life["seed"] in seeds}
    lives = list(before.values())
    for number in (number for number in seeds if number not in before):
        lives.append(bench.run(SystemClock(), number, lambda text: click.echo(f"  {text}", err=True)))
        if journal is not None:
            with journal.open("a") as file:
                file.write(json.dumps(lives[-1]) + "\n")
        click.echo(f"life {number}: {lives[-1]['laws broken'] or 'no law broken'}", err=True)
    show(
        {"lives": lives if as_json else [bench.row(life) for life in lives], "in a row": bench.in_a_row(lives)}, as_json
    )
    if any(life["laws broken"] for life in lives):
        raise SystemExit(1)


@command.command()
@click.option("--away", default="3,27", show_default=True, metavar="N,...", help="Steps of the run that it is away.")
@click.option("--stages-away", default="2,4,7", show_default=True, metavar="N,...", help="Inner stages, from 1.")
@click.option("--stages", type=click.IntRange(3, 64), default=8, show_default=True, help="Of one layer each.")
@click.option("--width", type=click.IntRange(32, 1024), default=96, show_default=True, help="Of the model.")
@click.option("--steps", type=click.IntRange(12, 100_000), default=160, show_default=True, help="Of a run.")
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True)
@click.option("--jobs", type=click.IntRange(1, 64), default=2, show_default=True, help="Processes, a thread each.")
@JSON
def hole(away: str, stages_away: str, as_json: bool, **sizes: int) -> None:
    """Loss of a pipeline that passes a lost inner stage by, against one that waits for it, at equal wall time: in plain
    PyTorch."""
    from benchmarks.method import hole as bench

    try:
        counts, lost = ([int(text) for text in texts.split(",")] for texts in (away, stages_away))
    except ValueError:
        raise click.BadParameter("--away and --stages-away are numbers with commas between, as 3,27") from None
    show(bench.run(counts, lost, say=lambda line: click.echo(line, err=True), **sizes), as_json)


@command.command()
@click.option("--boundaries", default="int8,int4,int4_int2", show_default=True, metavar="WORD,...", help="Beside bf16.")
@click.option(
    "--mbps", default="200,100,20", show_default=True, metavar="N,...", help="Mbit/s of each line, both ways."
)
@click.option("--steps", type=click.IntRange(2, 1000), default=8, show_default=True, help="Of each life, about.")
@click.option("--learned-steps", type=click.IntRange(0), default=300, show_default=True, help="Of the small model.")
@click.option("--width", type=click.IntRange(32, 1024), default=128, show_default=True, help="Of the small model.")
@click.option("--seeds", type=click.IntRange(1, 100), default=1, show_default=True, help="Seeds 0 to N-1.")
@click.option("--jobs", type=click.IntRange(1, 64), default=2, show_default=True, help="Processes, a thread each.")
@JSON
def protocol(boundaries: str, mbps: str, as_json: bool, **sizes: int) -> None:
    """Protocol NanoGPT's score of a pipeline over narrow lines: seconds a step by the node's own code in virtual time,
    times steps to a loss of a small model, over those of bf16, with the published rows."""
    from benchmarks.swarm import protocol as bench

    try:
        lines = [float(text) for text in mbps.split(",")]
    except ValueError:
        raise click.BadParameter(f"{mbps!r}: numbers with commas between, as 200,100,20") from None
    if not all(1.0 <= line <= 1e5 for line in lines):
        raise click.BadParameter(f"{mbps!r}: lines have 1 to 100,000 Mbit/s")
    found = bench.run(boundaries.split(","), lines, say=lambda line: click.echo(line, err=True), **sizes)
    show(found, as_json)


@command.command()
@click.option(
    "--preset", type=click.Choice(("tiny", "demo", "small")), default="small", show_default=True, help="Model."
)
@click.option("--repeats", type=click.IntRange(1, 100), default=3, show_default=True, help="Of each; medians count.")
@click.option("--folder", type=click.Path(exists=True, file_okay=False, path_type=Path), help="On the disk to measure.")
@JSON
def checkpoint(preset: str, repeats: int, folder: Path | None, as_json: bool) -> None:
    """The pause of training for a checkpoint against an inner step; saving and loading a stage against plain writing
    and reading on the same disk in the same run."""
    from benchmarks.micro import checkpoint as bench

    show(bench.run(preset, repeats, folder), as_json)


@command.command()
@click.option("--boundary", type=click.Choice(["bf16", "subspace"]), default="bf16")
@click.option("--microbatch", type=click.IntRange(1, 64), default=4, help="Samples of 2,048 tokens.")
def memory(boundary: str, microbatch: int) -> None:
    """Stages of Llama 3 1B, 8B and 70B that fit on cards of 8 to 48 GB and hosts of 16 and 32 GB, by the formula of
    `join` and `plan`; a table to paste."""
    from benchmarks.micro import memory as computed

    click.echo(computed.page(boundary, microbatch))


@command.command()
@JSON
def knock(as_json: bool) -> None:
    """CPU and memory cost of 10,000 connection attempts a minute by peers that may not take part."""
    from benchmarks.micro import connection_flood as measured

    show(measured.run(), as_json)


@command.command()
@JSON
def agreement(as_json: bool) -> None:
    """Six node processes on this machine, and the same six simulated with the measured speeds: tokens per second and
    bytes per token of both."""
    from benchmarks.swarm import agreement as measured

    show(measured.run(), as_json)


@command.command()
@click.option("--extension/--no-extension", default=True, help="With the C kernels, or numpy and torch alone.")
@JSON
def codec(extension: bool, as_json: bool) -> None:
    """Encoding and decoding speed of every gossip codec on one core, against copying memory in the same run."""
    from benchmarks.micro import codec as measured

    show(measured.run(extension=extension), as_json)


@command.command()
@click.option("--nodes", type=click.IntRange(2, 5000), default=1000, show_default=True, help="Synthetic nodes.")
@click.option("--look", "look_s", type=DURATION, default=None, help="Only serve the page this long: 10m.")
@click.option("--port", type=click.IntRange(0, 65535), default=0, help="Of the page.")
@JSON
def dashboard(nodes: int, look_s: float | None, port: int, as_json: bool) -> None:
    """Cost of the coordinator's page with a thousand nodes: share of a server's core, main-thread time of an update in
    Chromium (playwright), first paint, bytes of assets."""
    from benchmarks.swarm import dashboard as bench

    show(bench.run(nodes, lambda line: click.echo(line, err=True), look_s or 0.0, port), as_json)


@command.command()
@click.option(
    "--machines", default="1,2,4,8,16,32", show_default=True, metavar="N,...", help="Numbers of equal machines."
)
@click.option("--lines", default="LAN,home", show_default=True, metavar="LINE,...", help="LAN, home.")
@click.option("--samples", type=click.IntRange(100), default=8_000, show_default=True, help="Of each life.")
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True)
@click.option(
    "--out", type=click.Path(path_type=Path), default=Path("runs/scaling"), show_default=True, help="Results."
)
@JSON
def scaling(machines: str, lines: str, samples: int, seed: int, out: Path, as_json: bool) -> None:
    """Time to a loss of one machine over that of many, each as `init` makes the run for them: real learning in virtual
    time, on a local network and on home lines, with the factors that make the ratio. Writes OUT/scaling.html (the
    curves)."""
    from benchmarks.swarm import scaling as bench

    try:
        counts = [int(text) for text in machines.split(",")]
    except ValueError:
        raise click.BadParameter(f"{machines!r}: numbers with commas between, as 1,4,16") from None
    places = lines.split(",")
    if min(counts) < 1 or not set(places) <= set(bench.LINES):
        raise click.BadParameter(f"machines are at least 1, lines are of {', '.join(bench.LINES)}")
    show(bench.run(counts, places, samples, seed, out, lambda line: click.echo(line, err=True)), as_json)


@command.command()
@click.option(
    "--preset", type=click.Choice(("tiny", "demo", "small")), default="demo", show_default=True, help="The model."
)
@click.option("--parameters", type=click.IntRange(10_000), default=None, help="Fit the model to so many.")
@click.option("--nodes", default="2,4", show_default=True, metavar="N,...", help="Numbers of nodes, one after another.")
@click.option("--batch", type=click.IntRange(1, 4096), default=16, show_default=True, help="Samples of a step, of all.")
@click.option("--window", "window_s", type=DURATION, default="30s", show_default=True, help="Length of a window.")
@click.option("--windows", type=click.IntRange(1, 100), default=3, show_default=True, help="Windows of each number.")
@JSON
def data_parallel(
    preset: str, parameters: int | None, nodes: str, batch: int, window_s: float, windows: int, as_json: bool
) -> None:
    """Samples a core second of nodes that average gradients before each step, over those of plain PyTorch on the same
    model, batch and text at the same time: two nodes beside DistributedDataParallel (gloo) with two processes, other
    numbers beside one process of one thread. With the memory of the largest node."""
    from benchmarks.swarm import data_parallel as bench
    from swarmnode.run.manifest.recipe import PRESETS, model_of

    try:
        counts = [int(text) for text in nodes.split(",")]
    except ValueError:
        raise click.BadParameter(f"{nodes!r}: numbers with commas between, as 2,4") from None
    if min(counts) < 1 or batch % max(counts):
        raise click.BadParameter(f"{nodes!r}: numbers that divide the batch of {batch}")
    manifest = PRESETS[preset]
    if parameters is not None:
        manifest = dataclasses.replace(manifest, model=model_of(parameters, manifest.model, 1))
    found = bench.run(manifest, counts, batch, window_s, windows, lambda line: click.echo(line, err=True))
    show({"rows": found}, as_json)
