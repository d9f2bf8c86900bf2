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
@JSON
def kill(as_json: bool) -> None:
    """Seconds that a local swarm stands still when a node is killed: ten kills, each stage in turn, feeders
    included."""
    from swarmnode.bench.swarm import kill as measured

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
@click.option(
    "--width", type=click.IntRange(0, 8192), default=0, help="Of one layer; 0, the default: the demo's stage."
)
@click.option("--context", type=click.IntRange(0, 8192), default=0, help="Tokens; 0: the demo's, or 512.")
@click.option("--samples", type=click.IntRange(0, 1024), default=0, help="Of a microbatch; 0: the demo's.")
@click.option("--repeats", type=click.IntRange(1, 100), default=3, show_default=True, help="Medians count.")
@JSON
def muon(width: int, context: int, samples: int, repeats: int, as_json: bool) -> None:
    """Share of a stage's processor time for inner steps, by inner batch."""
    from swarmnode.bench.micro import muon as bench

    _print(bench.run(width, context, samples, repeats), as_json)


@command.command()
@click.option("--width", type=click.IntRange(4, 8192), default=128, show_default=True, help="Of the layer; even heads.")
@click.option("--context", type=click.IntRange(8, 65_536), default=128, show_default=True, help="Tokens of a window.")
@click.option("--samples", type=click.IntRange(1, 1024), default=8, show_default=True, help="Of a microbatch.")
@click.option("--repeats", type=click.IntRange(1, 100), default=9, show_default=True, help="Of each time.")
@JSON
def documents(width: int, context: int, samples: int, repeats: int, as_json: bool) -> None:
    """Cost of data.documents = "masked" for a stage, by the length of documents, against whole windows and against
    masks of T x T."""
    from swarmnode.bench.micro import documents as bench

    _print(bench.run(width, context, samples, repeats), as_json)


@command.command()
@click.option("--live", is_flag=True, help="Also nodes of a local swarm, some minutes.")
@click.option("--seeds", type=click.IntRange(1, 100), default=2, show_default=True, help="Simulated lives a notice.")
@JSON
def drain(live: bool, seeds: int, as_json: bool) -> None:
    """Share of in-flight work and of unsent progress that a machine saves when it is taken away with 120, 30, 5 or 0 s
    of notice."""
    from swarmnode.bench.swarm import drain as bench

    _print(bench.run(live, seeds, lambda line: click.echo(line, err=True)), as_json)


@command.command()
@JSON
def recovery(as_json: bool) -> None:
    """Seconds until a stage is back when all its replicas are killed: the middle, first and last of a local swarm."""
    from swarmnode.bench.swarm import recovery as bench

    _print(bench.run(say=lambda line: click.echo(line, err=True)), as_json)


@command.command()
@click.option("--preset", default="quick", show_default=True, help="tiny (seconds), quick (minutes) or standard.")
@click.option("--seeds", type=click.IntRange(1, 100), default=None, help="Seeds 0 to N-1; default: the preset's.")
@click.option("--jobs", type=click.IntRange(1, 64), default=2, show_default=True, help="Processes, a thread each.")
@click.option("--text", type=click.Path(exists=True), default=None, help="A text file or a folder of .txt files.")
@JSON
def checkfree(preset: str, seeds: int | None, jobs: int, text: str | None, as_json: bool) -> None:
    """Cost of lost stages by recovery method: roll-back to checkpoints, redundant computation, and rebuilding from
    neighbours (CheckFree); held-out nats at the same simulated wall time."""
    from swarmnode.bench.method import checkfree as bench

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
    """Share of a simulated fleet's work that remains at 0 to 33 % deaths an hour, by three ways of recovering a lost
    stage. Writes OUT/goodput.html (the curves). About six CPU minutes."""
    from swarmnode.bench.swarm import goodput as bench

    _print(bench.run(hours, seeds, jobs, out, lambda line: click.echo(line, err=True)), as_json)


@command.command()
@JSON
def fresh(as_json: bool) -> None:
    """Seconds from `git clone` to a live page with a falling loss: clones this clone, and runs `make demo`."""
    from swarmnode.bench.swarm import clone_to_page as measured

    _print(measured.run(), as_json)


@command.command()
@click.option("--preset", type=click.Choice(("tiny", "demo")), default="tiny", show_default=True, help="Model.")
@JSON
def join(preset: str, as_json: bool) -> None:
    """Seconds from `swarmnode join INVITE` in a fresh home to the first accepted microbatch, against a local swarm."""
    from swarmnode.bench.swarm import join as measured

    _print(measured.run(preset=preset), as_json)


@command.command()
@JSON
def knock(as_json: bool) -> None:
    """CPU and memory cost of 10,000 connection attempts a minute by peers that may not take part."""
    from swarmnode.bench.micro import connection_flood as measured

    _print(measured.run(), as_json)


@command.command()
@JSON
def limit(as_json: bool) -> None:
    """Accuracy of --max-up, half a minute each at 5, 20 and 100 Mbit/s, and of --quota. Takes seven minutes, with
    little load."""
    from swarmnode.bench.micro import rate_limit as measured

    _print(measured.run(), as_json)


@command.command()
@JSON
def agreement(as_json: bool) -> None:
    """Six node processes on this machine, and the same six simulated with the measured speeds: tokens per second and
    bytes per token of both."""
    from swarmnode.bench.swarm import agreement as measured

    _print(measured.run(), as_json)


@command.command()
@JSON
def clock(as_json: bool) -> None:
    """CPU time of an event in virtual time, in C and in Python, against asyncio and uvloop in the same run."""
    from swarmnode.bench.micro import virtual_time as measured

    _print(measured.run(), as_json)


@command.command()
@click.option("--extension/--no-extension", default=True, help="With the C kernels, or numpy and torch alone.")
@JSON
def codec(extension: bool, as_json: bool) -> None:
    """Encoding and decoding speed of every gossip codec on one core, against copying memory in the same run."""
    from swarmnode.bench.micro import codec as measured

    _print(measured.run(extension=extension), as_json)


@command.command()
@click.option("--codec", "names", multiple=True, help="Several times for several; int8 and modular4 without it.")
@click.option("--parameters", type=click.IntRange(1), default=50_000_000, show_default=True, help="Of the replica.")
@click.option("--up-mbps", type=click.FloatRange(min=0.1), help="Send no more Mbit/s, as with --max-up.")
@click.option("--extension/--no-extension", default=True, help="With the C kernels, or numpy and torch alone.")
@JSON
def packet(names: tuple[str, ...], parameters: int, up_mbps: float | None, extension: bool, as_json: bool) -> None:
    """Seconds from a round's boundary to the packet delivered to another process: sent while it is encoded, against
    encoded first and then sent."""
    from swarmnode.bench.micro import packet as measured

    limit = None if up_mbps is None else up_mbps * 1e6
    _print(measured.run(names or measured.CODECS, parameters, extension=extension, up_bps=limit), as_json)


@command.command()
@click.option("--exchanges", type=click.IntRange(1, 10_000), default=60, show_default=True, help="In pairs, at least.")
@click.option("--codec", "codecs", multiple=True, help="[METHOD/]CODEC, several times for several swarms; all: each.")
@JSON
def exchange(exchanges: int, codecs: tuple[str, ...], as_json: bool) -> None:
    """Cost of exchanges in a live swarm of six processes, with the demo's codec or others: bytes against the formula,
    waiting of compute, and the loss before and after."""
    from swarmnode.bench.swarm import exchange as bench

    which = bench.CODECS if codecs == ("all",) else codecs
    _print(bench.run(exchanges, codecs=which, say=lambda line: click.echo(line, err=True)), as_json)


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
@JSON
def boundary(as_json: bool) -> None:
    """Cost of coded activations in loss, bytes and CPU: four stages in one process, three seeds; about a minute."""
    from swarmnode.bench.method import boundary as measured

    _print(measured.run(), as_json)


@command.command()
@click.option("--boundary", type=click.Choice(["bf16", "subspace"]), default="bf16", show_default=True)
@click.option("--microbatch", type=click.IntRange(1, 64), default=4, show_default=True, help="Samples of 2,048 tokens.")
def memory(boundary: str, microbatch: int) -> None:
    """Stages of Llama 3 1B, 8B and 70B that fit on cards of 8 to 48 GB and hosts of 16 and 32 GB, by the formula of
    `join` and `plan`; a table to paste."""
    from swarmnode.bench.micro import memory as computed

    click.echo(computed.page(boundary, microbatch))


@command.command("join-peak")
def join_peak() -> None:
    """Host memory that a donor and a joiner of a real stage of 1.1 GB take over their steady states; needs 8 GB."""
    from swarmnode.bench.micro import join_peak as measured

    for name, value in measured.run().items():
        click.echo(f"{name:>22} {value:8.3f}")


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
command.add_command(bench_method.experts)
