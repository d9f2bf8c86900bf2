"""`swarmnode uninstall`: what swarmnode left on this machine, and its end."""

from __future__ import annotations

import json

import click

from swarmnode.app.cli.option.config_file import config_path
from swarmnode.base.errors import UsageError
from swarmnode.base.metrics.events import nbytes_text


@click.command(short_help="show what swarmnode keeps on this machine, and delete it")
@click.option("--yes", is_flag=True, help="Delete it. Without this it is only shown.")
@click.option(
    "--keep-identity", is_flag=True, help="Leave keys and receipts, by which others know this machine and its work."
)
@click.option("--json", "as_json", is_flag=True, help="Print what is kept as a JSON list: path, what, nbytes, holder.")
def command(yes: bool, keep_identity: bool, as_json: bool) -> None:
    """Show all files that swarmnode keeps below this user's home: homes of its processes, caches, settings, services.
    With --yes delete them, then say which command takes the program away. Homes that you named by --home and folders of
    runs (with their owner's key) are yours: they stay.

    A node that still runs is not touched: `swarmnode leave` first.
    """
    from swarmnode.app.local.traces import OWN, remove, remover, traces

    found = traces(config_path())
    if as_json:
        keys = ("path", "what", "nbytes", "holder")
        rows = [(str(one.path), one.what, one.nbytes, one.holder or None) for one in found]
        click.echo(json.dumps([dict(zip(keys, row, strict=True)) for row in rows]))
    for trace in () if as_json else found:
        used = f"; process {trace.holder} uses it: `swarmnode leave` first" if trace.holder else ""
        click.echo(f"{nbytes_text(trace.nbytes):>9}  {trace.path}  ({trace.what}{used})")
    busy = [trace for trace in found if trace.holder]
    if busy and yes:
        raise UsageError(f"{busy[0].path} is used by process {busy[0].holder}: say `swarmnode leave` first")
    if not found:
        click.echo("nothing of swarmnode is kept here", err=True)
    elif not yes:
        click.echo("nothing is deleted yet: say `swarmnode uninstall --yes`", err=True)
        return
    for trace in found:
        remove(trace, keep_identity=keep_identity)
    if found:
        kept = f", except {' and '.join(OWN)}" if keep_identity else ""
        click.echo(f"deleted {nbytes_text(sum(trace.nbytes for trace in found))}{kept}", err=True)
    click.echo(f"the program itself goes with: {remover()}", err=True)
