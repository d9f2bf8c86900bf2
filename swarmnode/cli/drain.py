"""`swarmnode drain`: tell the node on this machine that the machine will be taken away."""

from __future__ import annotations

import json
from pathlib import Path

import click

from swarmnode.cli.option.param import DURATION, FOLDER
from swarmnode.errors import EXIT_PREEMPTED_INCOMPLETE
from swarmnode.node.notice import GRACE_S
from swarmnode.user_folders import default_home


@click.command(short_help="tell the node on this machine that the machine will be taken away")
@click.option("--home", type=FOLDER, help="The node's own folder.  [default: ~/.local/share/swarmnode/node]")
@click.option("--notice", type=DURATION, default=GRACE_S, show_default="30s", help="Time until the machine is gone.")
@click.option("--reason", default="swarmnode drain", show_default=True, help="For the node's log.")
@click.option("--json", "as_json", is_flag=True, help="Print how it left as one JSON object.")
def command(home: Path | None, notice: float, reason: str, as_json: bool) -> int:
    """Make the node in --home leave within --notice, and wait until it has: it finishes what it holds, passes its
    progress to another replica, hands over the state of a stage's last replica, and saves its stage. Steps that do not
    fit are cut from the end, and reported. For a preStop hook, a batch script's trap, or before you switch a machine
    off.

    Exit code 0 if nothing was lost, 31 if something was cut, 69 if no node runs there.
    """
    from swarmnode.control import client

    reply = client.drain(home or default_home("node"), notice, reason)
    if as_json:
        click.echo(json.dumps(reply, sort_keys=True))
    else:
        click.echo(f"left in {reply['seconds']:.1f} s", err=True)
        click.echo(f"{reply['finished']} of {reply['held']} microbatches finished", err=True)
        click.echo(f"{reply['sent']} of {reply['unsent']} samples learnt since the last round passed on", err=True)
        if reply["successor"]:
            click.echo(f"the stage's state is kept by {reply['successor']}", err=True)
        for cut in reply["cut"]:
            click.echo(f"cut: {cut}", err=True)
    return EXIT_PREEMPTED_INCOMPLETE if reply["cut"] else 0
