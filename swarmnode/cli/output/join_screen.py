"""The screen of `swarmnode join`: a live panel on a terminal, a line for each change elsewhere."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from swarmnode.errors import SwarmnodeError

if TYPE_CHECKING:
    from swarmnode.daemon.ready_file import Ready
    from swarmnode.wire.report_pb2 import StatusReply

PERIOD_S = 1.0
LINE_PERIOD_S = 600.0  # without a change; a log of a week then has a thousand lines
HINT = "Ctrl-C is fine: this machine then finishes what it holds"


class JoinScreen:
    """Shows the node of `home` through its control socket. For one use."""

    def __init__(self, home: Path) -> None:
        self._home = home
        self._last: StatusReply | None = None

    async def run(self, ready: Ready) -> None:
        """Show the node until cancelled."""
        if sys.stderr.isatty() and "NO_COLOR" not in os.environ and os.environ.get("TERM") != "dumb":
            await self._live()
        else:
            click.echo(f"peer {ready.peer_id}", err=True)
            click.echo(f"metrics http://{ready.metrics_address}/metrics", err=True)
            click.echo(f"control {ready.control}", err=True)
            await self._lines()

    def thank(self) -> None:
        """Thank whoever started the node for what it gave."""
        if self._last is not None:
            from swarmnode.local.swarm_view import thanks

            click.echo(thanks(self._last), err=True)

    async def _status(self) -> StatusReply | None:
        from swarmnode.control import client

        try:
            self._last = await asyncio.to_thread(client.status, self._home)
        except SwarmnodeError:  # it ends, or is busy: the next one may come
            return None
        return self._last

    async def _live(self) -> None:
        from rich.console import Console, Group
        from rich.file_proxy import FileProxy
        from rich.live import Live
        from rich.text import Text

        from swarmnode.local.swarm_view import NodeWatch, panel

        class Above(FileProxy):
            encoding = "utf-8"  # without one click.echo takes the file behind it, and tears the panel

        console, watch, loop = Console(stderr=True), NodeWatch(), asyncio.get_running_loop()
        hint = Text(HINT, style="dim")  # a line with room for the ^C that a terminal writes after it
        live = Live(console=console, auto_refresh=False, redirect_stderr=False)
        with live, contextlib.redirect_stderr(Above(console, sys.stderr)):
            while True:
                if (status := await self._status()) is not None:
                    watch.add(loop.time(), status)
                    live.update(Group(panel(watch), hint), refresh=True)
                await asyncio.sleep(PERIOD_S)

    async def _lines(self) -> None:
        from swarmnode.local.swarm_view import headline, paused_text, thanks

        said, at, loop = "", 0.0, asyncio.get_running_loop()
        while True:
            if (status := await self._status()) is not None:
                text = paused_text(status) if status.limits.reason and not status.limits.running else headline(status)
                if text != said or loop.time() > at + LINE_PERIOD_S:
                    again = f"; {thanks(status)}" if text == said else ""
                    click.echo(f"{text}{again}", err=True)
                    said, at = text, loop.time()
            await asyncio.sleep(PERIOD_S)
