"""`swarmnode coordinator RUN`: a run's meeting point and its page."""

from __future__ import annotations

from typing import Any

import click

from swarmnode.cli.bootstrap import meet, meeting_point
from swarmnode.cli.options import DASHBOARD_PORT, HOST, PORT


@click.command(short_help="show a run on one page, and be its meeting point")
@meeting_point("coordinator")
@click.option("--port", type=PORT, default=DASHBOARD_PORT, show_default=True, help="Of the page; 0: any free one.")
@click.option("--bind", "host", type=HOST, help="Where the page listens.  [default: 127.0.0.1, --public: 0.0.0.0]")
@click.option("--public", is_flag=True, help="Let other machines open the page. It is read-only; addresses are hidden.")
def command(port: int, host: str | None, public: bool, **where: Any) -> int:
    """Show RUN on a live web page, hold its directory and give its manifest to joiners, as `bootstrap` does. RUN is a
    folder of `swarmnode init`, a signed manifest, or with --peer a run id.

    Trains nothing, needs no GPU. Nobody who trains needs it: stop it, and training goes on; start it again, and the
    picture is back, its history kept in the home. Prints its multiaddrs on stdout, the page's address on stderr.
    """
    address = host or ("0.0.0.0" if public else "127.0.0.1")
    return meet("coordinator", where, f"{address}:{port}", public=public)
