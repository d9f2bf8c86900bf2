"""`swarmnode replay FILE...`: several nodes' logs as one timeline."""

from __future__ import annotations

import json
from pathlib import Path

import click

from swarmnode.said import printable

LEVELS = ["debug", "info", "warning", "error"]
COLOURS = {"warning": "yellow", "error": "red", "debug": "bright_black"}


@click.command(short_help="several nodes' logs as one timeline")
@click.argument("paths", metavar="FILE...", nargs=-1, required=True, type=click.Path(exists=True, path_type=Path))
@click.option("--level", type=click.Choice(LEVELS), default="info", show_default=True, help="Events at least so grave.")
@click.option("--event", "events", multiple=True, metavar="GLOB", help="Only such, e.g. 'exchange.*'; repeat it.")
@click.option("--node", "nodes", multiple=True, metavar="NAME", help="Only this node: name, or end of a peer id.")
@click.option("--json", "as_json", is_flag=True, help="Print the events as JSON lines.")
def command(
    paths: tuple[Path, ...], level: str, events: tuple[str, ...], nodes: tuple[str, ...], as_json: bool
) -> None:
    """Merge the event logs at FILE (an events.jsonl, a node's home, a folder of homes such as `up --dir`, or what
    `swarmnode report` made) and print them in the order of time, nodes by their names.
    """
    from swarmnode.local import timeline

    logs = [log for path in paths for log in timeline.read(path)]
    called = timeline.names(logs)
    width = max((len(name) for name in called.values()), default=0)
    for line in timeline.merge(logs):
        name = called[line.node]
        if not timeline.wanted(line, level, events, nodes, name):
            continue
        if as_json:
            whole = {"ts": line.at, "node": line.node, "name": name, "stage": line.stage, "level": line.level}
            click.echo(json.dumps({**whole, "event": line.event, "fields": line.fields}))
            continue
        stage = "-" if line.stage is None else str(line.stage)
        text = f"{line.at[11:23]} {name:{width}} {stage:>2} {line.event:20} {timeline.told(line.fields, called)}"
        click.echo(click.style(printable(text, len(text)).rstrip(), fg=COLOURS.get(line.level)))
    for log in logs:
        if log.bad:
            click.echo(f"{log.path}: {log.bad} lines could not be read", err=True)
