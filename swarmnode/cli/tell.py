"""The verbs that tell the node on this machine something: ui, pause, resume, snooze, limit, finish, leave, drain."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import click

from swarmnode.cli.option.config_file import config_path
from swarmnode.cli.option.param import DURATION, PORT, home_option, limit_options, taken_limits
from swarmnode.control import client
from swarmnode.errors import EXIT_PREEMPTED_INCOMPLETE
from swarmnode.metrics.events import nbytes_text
from swarmnode.node.notice import GRACE_S


def _ask_limits(home: Path, verb: str, **arguments: Any) -> dict[str, Any]:
    """The daemon's reply; prints its verdict on stderr: `paused: snoozed; until 14:05`."""
    from swarmnode.machine.sensors import local_time

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
    asyncio.run(_serve(home, port))


async def _serve(home: Path, port: int) -> None:
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

    from swarmnode.local.node_page import NodePage

    token = AESGCM.generate_key(128).hex()
    page = NodePage(home, token, config_path())
    click.echo(f"{await page.start('127.0.0.1', port)}#{token}")
    click.echo("open this address in a browser; Ctrl-C ends the page, not the node", err=True)
    try:
        await asyncio.Event().wait()
    finally:
        await page.close()


@click.command(short_help="pause the node until `resume`")
@home_option
def pause(home: Path) -> None:
    """Finish held work and take no new work until `swarmnode resume`. The stage stays in memory; peers are told.

    Exit code 69 if no node runs in --home.
    """
    _ask_limits(home, "pause", reason="asked to pause")


@click.command(short_help="end a pause")
@home_option
def resume(home: Path) -> None:
    """End `pause` and `snooze`. Limits still apply: outside its hours a node stays paused."""
    _ask_limits(home, "resume")


@click.command(short_help="pause the node for a time")
@click.argument("duration", metavar="DURATION", type=DURATION)
@home_option
def snooze(duration: float, home: Path) -> None:
    """Pause for DURATION (90s, 30m, 2h), then resume automatically. Peers are told when to expect it back."""
    _ask_limits(home, "pause", for_s=duration, reason="snoozed")


@click.command(short_help="show or change the limits of the running node")
@limit_options
@home_option
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
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


@click.command(short_help="finish all held work, then leave")
@home_option
def finish(home: Path) -> None:
    """Take no new work, finish all held work however long it takes, save, leave. Returns at once; `status` shows
    progress.

    To leave faster: `swarmnode leave`.
    """
    client.ask(home, "finish", reason="swarmnode finish")
    click.echo("finishing: the node takes no new work and leaves when all is done", err=True)


@click.command(short_help="leave in order, within seconds")
@home_option
@click.option("--forget", is_flag=True, help="Then delete what the node keeps: its key, receipts, stages and logs.")
def leave(home: Path, forget: bool) -> None:
    """Finish held work within seconds, save, announce the leave, stop. Returns when leaving has begun; with --forget
    when nothing of the node is left on this machine but the program, caches and settings (`swarmnode uninstall`).

    --forget deletes the usual home alone: a folder of your own (--home) may hold other things.
    """
    from swarmnode.local.traces import Trace, freed, remove, size_of
    from swarmnode.user_folders import default_home

    if forget and home.resolve() != default_home("node").resolve():
        raise click.UsageError(f"--forget: {home} is a folder of your own: leave, then delete it by hand")
    client.ask(home, "leave", reason="swarmnode leave")
    click.echo("leaving", err=True)
    if forget:
        asyncio.run(freed(home))
        nbytes = size_of(home)
        remove(Trace(home, "", nbytes), keep_identity=False)
        click.echo(f"forgotten: {nbytes_text(nbytes)} in {home} deleted", err=True)


@click.command(short_help="tell the node on this machine that the machine will be taken away")
@home_option
@click.option("--notice", type=DURATION, default=GRACE_S, show_default="30s", help="Time until the machine is gone.")
@click.option("--reason", default="swarmnode drain", help="For the node's log.")
@click.option("--json", "as_json", is_flag=True, help="Print how it left as one JSON object.")
def drain(home: Path, notice: float, reason: str, as_json: bool) -> int:
    """Make the node in --home leave within --notice, and wait until it has: it finishes what it holds, passes its
    progress to another replica, hands over the state of a stage's last replica, and saves its stage. Steps that do not
    fit are cut from the end, and reported. For a preStop hook, a batch script's trap, or before you switch a machine
    off.

    Exit code 0 if nothing was lost, 31 if something was cut, 69 if no node runs there.
    """
    reply = client.drain(home, notice, reason)
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
