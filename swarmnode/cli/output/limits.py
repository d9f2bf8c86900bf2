"""Request a daemon's limits and print its answer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click


def ask_limits(home: Path, verb: str, **arguments: Any) -> dict[str, Any]:
    """The daemon's reply; prints its verdict on stderr: `paused: snoozed; until 14:05`."""
    from swarmnode.control import client
    from swarmnode.machine.sensors import local_time

    reply = client.ask(home, verb, **arguments)
    until = f"; until {local_time(reply['until_s'])}" if reply["until_s"] else ""
    click.echo(f"{'runs' if reply['running'] else 'paused'}: {reply['reason']}{until}", err=True)
    return reply
