"""A page for the person at this machine: its address holds a token, and it is served until Ctrl-C."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from swarmnode.app.dashboard.server import PageServer

TOKEN_BITS = 128


async def show_page(make: Callable[[str], PageServer], port: int, told: str) -> None:
    """Serve the page that `make` makes for a new token, on this machine's `port` alone (0: any free one), until Ctrl-C.
    The address goes to stdout, `told` to stderr. Raises UsageError where the port is taken."""
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

    token = AESGCM.generate_key(TOKEN_BITS).hex()
    page = make(token)
    click.echo(f"{await page.start('127.0.0.1', port)}#{token}")
    click.echo(told, err=True)
    try:
        await asyncio.Event().wait()
    finally:
        await page.close()
