"""`swarmnode bootstrap RUN`: the first node, which others are told of; and what `coordinator` has in common with it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from swarmnode.cli.options import BOOTSTRAP, FOLDER, HOST, LISTEN, OWN_RUN, PORT, NodeOptions
from swarmnode.place import default_cache, default_home


def meeting_point(kind: str) -> Callable[[Callable[..., int]], Callable[..., int]]:
    """The argument and the options of a node that trains nothing; the command takes them as `where`, for `meet`."""
    given = (
        click.argument("run", metavar="RUN", type=OWN_RUN),
        click.option(
            "--listen", type=LISTEN, default="/ip4/0.0.0.0/tcp/0", show_default=True, help="Where peers reach us."
        ),
        click.option(
            "--peer", "bootstrap", type=BOOTSTRAP, multiple=True, help="A member of the run; may be repeated."
        ),
        click.option("--home", type=FOLDER, help=f"Its own folder.  [default: ~/.local/share/swarmnode/{kind}]"),
        click.option("--metrics-port", type=PORT, default=0, show_default="any", help="Prometheus, /healthz, /readyz."),
        click.option("--lan", is_flag=True, help="Find members in this network by multicast, and be found."),
        click.option(
            "--metrics-host", type=HOST, default="127.0.0.1", show_default=True, help="Who may ask: 0.0.0.0 all."
        ),
        click.option("--name", default=kind, show_default=True, help="What people call it."),
    )

    def decorate(command: Callable[..., int]) -> Callable[..., int]:
        for add in reversed(given):
            command = add(command)
        return command

    return decorate


def meet(kind: str, where: dict[str, Any], dashboard: str | None = None, *, public: bool = False) -> int:
    """Be the node that `where`, the options of `meeting_point`, asks for. Returns the exit code."""
    from swarmnode.cli.launch import launch
    from swarmnode.local.ready import Ready

    run, home = where.pop("run"), where.pop("home") or default_home(kind)

    def tell(ready: Ready) -> None:
        for address in ready.addresses:
            click.echo(address)
        if dashboard:
            click.echo(f"dashboard {ready.dashboard}", err=True)
        click.echo(f"metrics http://{ready.metrics_address}/metrics", err=True)
        line = "the line on the page, or that this prints" if dashboard else "the line that this prints"
        click.echo(f"others join by {line}: swarmnode invite {run} --home {home}", err=True)

    options = NodeOptions(
        run=signed_manifest(run),
        stage=None,
        home=home,
        cache=default_cache(),
        bootstrap_only=True,
        out=None,
        dashboard=dashboard,
        public=public,
        **where,
    )
    return launch(options, tell)


@click.command(short_help="be a run's first meeting point")
@meeting_point("bootstrap")
def command(**where: Any) -> int:
    """Hold the directory of RUN and give its manifest to joiners. RUN is a folder of `swarmnode init`, signed now, or
    a signed manifest. Trains nothing, needs no GPU. Prints its multiaddrs on stdout: what `swarmnode join` takes.
    """
    return meet("bootstrap", where)


def signed_manifest(run: str) -> str:
    """The signed manifest of an organiser's folder, made now; anything else as it is."""
    folder = Path(run)
    if not (folder / "manifest.toml").is_file():
        return run
    from swarmnode.manifest import SIGNED_FILE, sign_folder

    sign_folder(folder)
    return str(folder / SIGNED_FILE)
