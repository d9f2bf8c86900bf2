"""`swarmnode replay FILE...`: merge several nodes' logs into one timeline."""

from __future__ import annotations

import json
from pathlib import Path

import click

from swarmnode.metrics.event import LEVELS
from swarmnode.untrusted_text import printable

COLOURS = {"warning": "yellow", "error": "red", "debug": "bright_black"}


@click.command(short_help="merge several nodes' logs into one timeline")
@click.argument("paths", metavar="FILE...", nargs=-1, required=True, type=click.Path(exists=True, path_type=Path))
@click.option("--level", type=click.Choice(LEVELS), default="info", show_default=True, help="This level and above.")
@click.option(
    "--event", "events", multiple=True, metavar="GLOB", help="Only these, e.g. 'exchange.*'; may be repeated."
)
@click.option("--node", "nodes", multiple=True, metavar="NAME", help="Only this node: name, or end of a peer id.")
@click.option("--json", "as_json", is_flag=True, help="Print the events as JSON lines.")
def command(
    paths: tuple[Path, ...], level: str, events: tuple[str, ...], nodes: tuple[str, ...], as_json: bool
) -> None:
    """Merge the event logs at FILE (an events.jsonl, a node's home, a folder of homes such as `up --dir`, or a bundle
    of `swarmnode report`) and print them in order of time, with nodes by name."""
    from swarmnode.local import log_timeline

    logs = [log for path in paths for log in log_timeline.read(path)]
    called = log_timeline.names(logs)
    width = max((len(name) for name in called.values()), default=0)
    for line in log_timeline.merge(logs):
        name = called[line.node]
        if not log_timeline.wanted(line, level, events, nodes, name):
            continue
        if as_json:
            whole = {"ts": line.at, "node": line.node, "name": name, "stage": line.stage, "level": line.level}
            click.echo(json.dumps({**whole, "event": line.event, "fields": line.fields}))
            continue
        stage = "-" if line.stage is None else str(line.stage)
        text = f"{line.at[11:23]} {name:{width}} {stage:>2} {line.event:20} {log_timeline.told(line.fields, called)}"
        click.echo(click.style(printable(text, len(text)).rstrip(), fg=COLOURS.get(line.level)))
    for log in logs:
        if log.bad:
            click.echo(printable(f"{log.path}: {log.bad} lines could not be read"), err=True)
