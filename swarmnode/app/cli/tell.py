"""The verbs that tell the node on this machine something: ui, pause, resume, limit, leave."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import click

from swarmnode.app.cli.option.config_file import config_path
from swarmnode.app.cli.option.param import DURATION, PORT, home_option, limit_options, taken_limits
from swarmnode.app.cli.output.own_page import show_page
from swarmnode.app.control import client
from swarmnode.base.errors import EXIT_PREEMPTED_INCOMPLETE
from swarmnode.base.metrics.events import nbytes_text

JSON = click.option("--json", "as_json", is_flag=True, help="Print one JSON object: all limits, and what they do now.")


def _ask_limits(home: Path, verb: str, **arguments: Any) -> dict[str, Any]:
    """The daemon's reply; prints its verdict on stderr: `paused: snoozed; until 14:05`."""
    from swarmnode.app.machine.sensors import local_time

    reply = client.ask(home, verb, **arguments)
    until = f"; until {local_time(reply['until_s'])}" if reply["until_s"] else ""
    click.echo(f"{'runs' if reply['running'] else 'paused'}: {reply['reason']}{until}", err=True)
    return reply


@click.command(short_help="a page for the node on this machine: pause, hours, limits, history")
@home_option
@click.option("--port", type=PORT, default=0, show_default="any", help="Where the page listens, on this machine only.")
def ui(home: Path, port: int) -> None:
    """Show a page for the node in --home, running or not, until Ctrl-C: what it does and gave, its receipts, and
    buttons for pause, snooze, limits and finish.

    The page's address, printed on stdout, holds a token. Whoever has it may use the buttons as long as this runs.
    """
    from swarmnode.app.local.node_page import NodePage

    told = "open this address in a browser; Ctrl-C ends the page, not the node"
    asyncio.run(show_page(lambda token: NodePage(home, token, config_path()), port, told))


@click.command(short_help="pause the node, until `resume` or for a time")
@click.option("--for", "for_s", type=DURATION, help="90s, 30m or 2h.  [default: until `resume`]")
@home_option
@JSON
def pause(for_s: float | None, home: Path, as_json: bool) -> None:
    """Finish held work and take no new work until `swarmnode resume`, or for a time. The stage stays in memory; peers
    are told, and when to expect the node back.

    Exit code 69 if no node runs in --home.
    """
    if for_s is not None:
        reply = _ask_limits(home, "pause", for_s=for_s, reason="snoozed")
    else:
        reply = _ask_limits(home, "pause", reason="asked to pause")
    if as_json:
        click.echo(json.dumps(reply, sort_keys=True))


@click.command(short_help="end a pause")
@home_option
@JSON
def resume(home: Path, as_json: bool) -> None:
    """End `pause`. Limits still apply: outside its hours a node stays paused."""
    reply = _ask_limits(home, "resume")
    if as_json:
        click.echo(json.dumps(reply, sort_keys=True))


@click.command(short_help="show or change the limits of the running node")
@limit_options
@home_option
@JSON
def limit(home: Path, as_json: bool, **limits: str | None) -> None:
    """Change limits of the node in --home ("none" removes one), at once and until it stops; print all of them.

    To keep them, give them to `join` or put them into the config file. Without options nothing changes.
    """
    reply = _ask_limits(home, "limit", changed=taken_limits(limits))
    if as_json:
        click.echo(json.dumps(reply, sort_keys=True))
        return
    for name, text in sorted(reply["limits"].items()):
        click.echo(f"{name} {text}")
    if not reply["limits"]:
        click.echo("no limit is set", err=True)


@click.command(short_help="leave in order: within seconds, by a deadline, or when all is done")
@home_option
@click.option("--finish", "finishes", is_flag=True, help="Finish all held work first, however long it takes.")
@click.option(
    "--within", "--notice", "within_s", type=DURATION, help="Time until this machine is gone; wait until the node left."
)
@click.option("--reason", default="swarmnode leave", help="For the node's log.")
@click.option("--json", "as_json", is_flag=True, help="With --within: print how it left as one JSON object.")
@click.option("--forget", is_flag=True, help="Then delete what the node keeps: its key, receipts, stages and logs.")
def leave(home: Path, finishes: bool, within_s: float | None, reason: str, as_json: bool, forget: bool) -> int:
    """Finish held work within seconds, save, announce the leave, stop. Returns when leaving has begun.

    With --finish the node takes no new work, and leaves when all that it holds is done; `status` shows progress.

    With --within the machine will be taken away: the node finishes what it holds, passes its progress to another
    replica, hands over the state of a stage's last replica, and saves its stage. Steps that do not fit are cut from the
    end, and reported. For a preStop hook, a batch script's trap, or before you switch a machine off. Exit code 0 if
    nothing was lost, 31 if something was cut.

    With --forget it returns when nothing of the node is left on this machine but the program, caches and settings
    (`swarmnode uninstall`). That deletes the usual home alone: a folder of your own (--home) may hold other things.

    Exit code 69 if no node runs in --home.
    """
    from swarmnode.base.user_folders import default_home

    if finishes and within_s is not None:
        raise click.UsageError("--finish takes as long as it needs, --within does not: give one")
    if as_json and within_s is None:
        raise click.UsageError("--json tells how a node left by a deadline: give --within")
    if forget and home.resolve() != default_home("node").resolve():
        raise click.UsageError(f"--forget: {home} is a folder of your own: leave, then delete it by hand")
    code = 0
    if within_s is not None:
        code = _leave_within(home, within_s, reason, as_json)
    elif finishes:
        client.ask(home, "finish", reason=reason)
        click.echo("finishing: the node takes no new work and leaves when all is done", err=True)
    else:
        client.ask(home, "leave", reason=reason)
        click.echo("leaving", err=True)
    if forget:
        _forget(home)
    return code


def _leave_within(home: Path, within_s: float, reason: str, as_json: bool) -> int:
    """Wait until the node has left, and say what it had time for. Returns the exit code."""
    reply = client.drain(home, within_s, reason)
    if as_json:
        click.echo(json.dumps(reply, sort_keys=True))
    else:
        click.echo(f"left in {reply['seconds']:.1f} s", err=True)
        click.echo(f"{reply['finished']} of {reply['held']} microbatches finished", err=True)
        click.echo(f"{reply['sent']} of {reply['unsent']} samples learnt since the last round passed on", err=True)
        if reply["successor"]:
            click.echo(f"the stage's state is kept by {reply['successor']}", err=True)
        for cut in reply["cut"]:
            click.echo(f"not done: {cut}", err=True)
    return EXIT_PREEMPTED_INCOMPLETE if reply["cut"] else 0


def _forget(home: Path) -> None:
    """Delete the node's home once the node is gone."""
    from swarmnode.app.local.traces import Trace, freed, remove, size_of

    asyncio.run(freed(home))
    nbytes = size_of(home)
    remove(Trace(home, "", nbytes), keep_identity=False)
    click.echo(f"forgotten: {nbytes_text(nbytes)} in {home} deleted", err=True)
