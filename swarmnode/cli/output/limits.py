"""Request a daemon's limits and print its answer."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from google.protobuf.message import Message

    from swarmnode.wire.control_pb2 import LimitsReply


def ask_limits(home: Path, method: str, request: Message) -> LimitsReply:
    """The daemon's reply; prints its verdict on stderr."""
    from swarmnode.control import client

    reply: LimitsReply = client.ask(home, method, request)
    click.echo(verdict_text(reply), err=True)
    return reply


def verdict_text(reply: LimitsReply) -> str:
    """The verdict as text: `paused: snoozed; until 14:05`."""
    from swarmnode.machine.sensors import local_time

    word = "runs" if reply.running else "paused"
    until = f"; until {local_time(reply.until_s)}" if reply.until_s else ""
    return f"{word}: {reply.reason}{until}"
