"""`swarmnode bench WHAT`: benchmarks on this machine."""

from __future__ import annotations

import json
from pathlib import Path

import click

from swarmnode.cli import bench_learning, bench_method
from swarmnode.cli.option.duration import Duration
from swarmnode.cli.output.findings import show as _print

JSON = click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")


@click.group(short_help="measure this machine")
def command() -> None:
    """Benchmarks on this machine. Each command measures both sides of its comparison and prints the results."""


@command.command()
@JSON
def swarm(as_json: bool) -> None:
    """Tokens per second of a local swarm of 6 processes, against one plain PyTorch process that trains the same model
    with the same global batch on the same cores, and the causes of the difference."""
    from swarmnode.bench.swarm import throughput as measured

    _print(measured.run(), as_json)


@command.command()
@click.option("--full", is_flag=True, help="A data set of 1 GB and 16 MB of text; minutes.")
@JSON
def data(full: bool, as_json: bool) -> None:
    """A feeder's text behind a web server of 50 Mbit/s: seconds to its first microbatch, bytes fetched a byte trained,
    time spent waiting. And tokenising, against the tokenizers library alone."""
    from swarmnode.bench.micro import data_set as measured

    _print(measured.run(full=full), as_json)


@command.command()
@JSON
def transport(as_json: bool) -> None:
    """Tensors of 1, 4, 16 and 64 MiB between two processes, against a bare libp2p stream of the same bytes."""
    from swarmnode.bench.micro import transport as measured

    _print(measured.run(), as_json)


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
    from swarmnode.bench.swarm import chaos as bench
    from swarmnode.bench.swarm.laws import read_lines
    from swarmnode.daemon.clock import SystemClock

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
    """The pause of training for a checkpoint against an inner step; saving and loading a stage against plain writing
    and reading on the same disk in the same run."""
    from swarmnode.bench.micro import checkpoint as bench

    _print(bench.run(preset, repeats, folder), as_json)


@command.command()
@JSON
def recovery(as_json: bool) -> None:
    """Seconds until a stage is back when all its replicas are killed: the middle, first and last of a local swarm."""
    from swarmnode.bench.swarm import recovery as bench

    _print(bench.run(say=lambda line: click.echo(line, err=True)), as_json)


@command.command()
@JSON
def knock(as_json: bool) -> None:
    """CPU and memory cost of 10,000 connection attempts a minute by peers that may not take part."""
    from swarmnode.bench.micro import connection_flood as measured

    _print(measured.run(), as_json)


@command.command()
@JSON
def agreement(as_json: bool) -> None:
    """Six node processes on this machine, and the same six simulated with the measured speeds: tokens per second and
    bytes per token of both."""
    from swarmnode.bench.swarm import agreement as measured

    _print(measured.run(), as_json)


@command.command()
@click.option("--extension/--no-extension", default=True, help="With the C kernels, or numpy and torch alone.")
@JSON
def codec(extension: bool, as_json: bool) -> None:
    """Encoding and decoding speed of every gossip codec on one core, against copying memory in the same run."""
    from swarmnode.bench.micro import codec as measured

    _print(measured.run(extension=extension), as_json)


@command.command()
@click.option("--device", default="auto", show_default=True, metavar="auto|cpu|cuda|cuda:1|mps|xpu", help="Device.")
@click.option("--small", is_flag=True, help="A model of a few megabytes; seconds on a CPU.")
@click.option("--swarm", is_flag=True, help="Also three node processes on the one device, beside plain PyTorch.")
@JSON
def gpu(device: str, small: bool, swarm: bool, as_json: bool) -> None:
    """A stage on a device: speed beside that of its layers alone and of plain PyTorch's, share of the device's own
    speed, bytes, waits, codecs, and equality with the CPU. One table to paste."""
    from swarmnode.bench.micro import gpu as measured
    from swarmnode.bench.swarm import one_device
    from swarmnode.model.device import resolve_device

    where = resolve_device(device)
    found = measured.run(device=where, small=small)
    _print(found | ({"swarm": one_device.run(where, small=small)} if swarm else {}), as_json)


@command.command()
@click.option("--boundary", type=click.Choice(["bf16", "subspace"]), default="bf16", show_default=True)
@click.option("--microbatch", type=click.IntRange(1, 64), default=4, show_default=True, help="Samples of 2,048 tokens.")
def memory(boundary: str, microbatch: int) -> None:
    """Stages of Llama 3 1B, 8B and 70B that fit on cards of 8 to 48 GB and hosts of 16 and 32 GB, by the formula of
    `join` and `plan`; a table to paste."""
    from swarmnode.bench.micro import memory as computed

    click.echo(computed.page(boundary, microbatch))


@command.command()
@click.option("--nodes", type=click.IntRange(2, 5000), default=1000, show_default=True, help="Synthetic nodes.")
@click.option("--look", "look_s", type=Duration(), default=0.0, help="Only serve the page this long: 10m.")
@click.option("--port", type=click.IntRange(0, 65535), default=0, help="Of the page.")
@JSON
def dashboard(nodes: int, look_s: float, port: int, as_json: bool) -> None:
    """Cost of the coordinator's page with a thousand nodes: share of a server's core, main-thread time of an update in
    Chromium (playwright), first paint, bytes of assets."""
    from swarmnode.bench.swarm import dashboard as bench

    _print(bench.run(nodes, lambda line: click.echo(line, err=True), look_s, port), as_json)


command.add_command(bench_learning.command, "learning")
command.add_command(bench_method.gossip)
command.add_command(bench_method.attack)
