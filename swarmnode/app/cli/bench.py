"""`swarmnode bench WHAT`: the benchmarks of one machine. A checkout of the sources adds those of `benchmarks/`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from swarmnode.app.cli.option.param import DURATION, RATE, Parsed, parse_leaves, parse_loss, parse_stages
from swarmnode.app.cli.output.console import note, paper
from swarmnode.app.cli.output.listed import ListedGroup


def show(found: dict[str, Any], as_json: bool) -> None:
    """Print `found` as one JSON object, or as tables: a list of rows is a table, a dict one with two columns."""
    if as_json:
        click.echo(json.dumps(found))
        return
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    console = paper()
    for key, value in found.items():
        if isinstance(value, list) and value and isinstance(value[0], dict):
            value = _without_empty(value)
            heads = (name.replace("_", " ").replace("/", " / ") for name in value[0])
            table = Table(*heads, title=key, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
            table.columns[0].no_wrap = True  # the name; other columns wrap, and nothing is cut
            for column in table.columns[1:]:
                column.overflow = "fold"
            for row in value:
                table.add_row(*map(_text, row.values()))
            console.print(table)
        elif isinstance(value, dict):
            table = Table("", "", title=key, title_justify="left", show_header=False)
            for name, inner in value.items():
                table.add_row(name, _text(inner))
            console.print(table)
        else:
            console.print(f"{key}: {_text(value)}", highlight=False)


def _without_empty(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """`rows` without the columns that are empty in all of them."""
    said = [name for name in rows[0] if any(row[name] == row[name] for row in rows)]
    return [{name: row[name] for name in said} for row in rows]


def _text(value: object) -> str:
    if value != value:
        return "–"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


JSON = click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")


OF_WHEEL = 3  # gpu, foreground and wan, below


class Benchmarks(ListedGroup):
    """Says where the benchmarks are that a page names and the wheel has not."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        try:
            return super().resolve_command(ctx, args)
        except click.UsageError:
            if args[0].startswith("-"):
                raise
            names = self.list_commands(ctx)
            said = f"no benchmark {args[0][:40]!r} here: there are {', '.join(names)}"
            if len(names) == OF_WHEEL:
                said += (
                    ". Those that compare methods and whole swarms are in a checkout of the sources: `make setup`"
                    " there, then .venv/bin/swarmnode bench"
                )
            raise click.UsageError(said, ctx) from None


@click.group(cls=Benchmarks, short_help="measure this machine")
def command() -> None:
    """Benchmarks on this machine. Each command measures both sides of its comparison and prints the results."""


@command.command()
@click.option("--device", default="auto", metavar="auto|cpu|cuda|cuda:1", help="Device.")
@click.option("--small", is_flag=True, help="A model of a few megabytes; seconds on a CPU.")
@JSON
def gpu(device: str, small: bool, as_json: bool) -> None:
    """A stage on a device: speed beside that of its layers alone and of plain PyTorch's, share of the device's own
    speed, bytes, waits, codecs, and equality with the CPU. One table to paste."""
    from swarmnode.app.bench import gpu as measured
    from swarmnode.model.device import resolve_device

    show(measured.run(device=resolve_device(device), small=small), as_json)


@command.command()
@click.option(
    "--pairs",
    type=click.IntRange(0, 100),
    default=5,
    help="Compilations beside the node at work and paused; 0: only what the paused one takes, which a busy machine can"
    " tell, too.",
)
@click.option("--idle", "idle_s", type=DURATION, default="60s", help="Time over which the paused node is watched.")
@click.option(
    "--priority", type=click.Choice(["lowest", "normal"]), default="lowest", help="Of the node, as of `join`."
)
@JSON
def foreground(pairs: int, idle_s: float, priority: str, as_json: bool) -> None:
    """Measure what you feel of a node here: a compilation on all cores beside a node that works and beside the same
    node paused, in pairs; and the share of a core that the paused node takes. The node trains the demo's model."""
    from swarmnode.app.bench import foreground as measured

    show(measured.run(priority=priority, pairs=pairs, idle_s=idle_s), as_json)


@command.command()
@click.argument("run", metavar="[RUN]", required=False, type=click.Path(exists=True, path_type=Path))
@click.option("--nodes", type=click.IntRange(2, 64), default=12, help="Node processes.")
@click.option("--stages", type=Parsed("1,3", parse_stages), default="1,3", help="Stages of the model; a run for each.")
@click.option("--delay", "delay_s", type=DURATION, default="100ms", help="Round trip between two nodes.")
@click.option("--up", "up_bps", type=RATE, default="20Mbit", help="Each node's line, up.")
@click.option("--down", "down_bps", type=RATE, default="100Mbit", help="Each node's line, down.")
@click.option("--loss", type=Parsed("1%", parse_loss), default="1%", help="TCP segments lost on the way.")
@click.option("--leave", type=Parsed("16%/h", parse_leaves), default="16%/h", help="Nodes killed and replaced, of all.")
@click.option("--for", "for_s", type=DURATION, default="120s", help="Time of each run, from when all nodes train.")
@click.option("--flops", type=click.FloatRange(1e3, 1e18), default=1e9, help="FLOP/s of each node's device.")
@click.option("--fit", is_flag=True, help="Settings as `init` makes them for these lines and devices.")
@click.option("--set", "settings", multiple=True, metavar="KEY=VALUE", help="A value of the manifest.")
@JSON
def wan(
    run: Path | None,
    nodes: int,
    stages: tuple[int, ...],
    delay_s: float,
    up_bps: float,
    down_bps: float,
    loss: float,
    leave: float,
    for_s: float,
    flops: float,
    fit: bool,
    settings: tuple[str, ...],
    as_json: bool,
) -> None:
    """Node processes behind home lines, beside the same ones on loopback. RUN is a folder of `swarmnode init`, or a
    manifest; without it the demo's model.

    Lines need no root: each node has a TCP proxy with its rates, delay and loss, and TCP's answer to loss (CUBIC).

    Devices are paced: a microbatch takes as long as a device of --flops takes, however busy this machine is. A step's
    compute over its bytes' time is 6 N U / (8 F c), for N tokens of a node's step, U bit/s, F FLOP/s and c bytes a
    weight, whatever the model's size. So a device k times as fast that takes steps of k times as many tokens has the
    same ratio; the round trip is the same for both.

    Figures: busy: share of time at microbatches; learning: samples that loopback took to the same held-out loss, over
    the samples taken; a step over its bytes' time: 1 is a line that is always full.
    """
    from swarmnode.app.bench import wan as measured
    from swarmnode.app.bench.line_proxy import LineSpec

    line = LineSpec(up_bps, down_bps, delay_s / 2.0, loss)
    spec = measured.WanSpec(nodes, line, flops, leave * nodes, for_s)
    made = [measured.manifest_of(run, number, settings, spec if fit else None) for number in stages]
    show(measured.run(made, spec, note, data_root=run if run is not None and run.is_dir() else None), as_json)
