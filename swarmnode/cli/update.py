"""`swarmnode update --check`: whether the run still admits this version."""

from __future__ import annotations

from pathlib import Path

import click

from swarmnode import __version__
from swarmnode.cli.option.param import home_option
from swarmnode.errors import NotPermitted


@click.command(short_help="whether the run still admits this version")
@home_option
@click.option("--check", is_flag=True, required=True, help="Only look: swarmnode never updates itself.")
def command(home: Path, check: bool) -> None:
    """Ask the node in --home for the oldest version that the run's owner admits, and compare the installed one.

    A node that the owner does not admit any more says so when it starts, with the line to run.
    """
    from swarmnode.control import client
    from swarmnode.membership.access import too_old

    reply = client.status(home)
    for version in (reply.version, __version__):
        if reason := too_old(reply.least_version, version):
            raise NotPermitted(reason)
    again = "" if reply.version == __version__ else f"; the node runs {reply.version} until it is started again"
    click.echo(f"swarmnode {__version__} is admitted (the owner asks for {reply.least_version or 'no version'}){again}")
