"""`swarmnode join BOOTSTRAP... --run RUN`: this machine takes part."""

from __future__ import annotations

import socket
from pathlib import Path

import click

from swarmnode.cli.options import BOOTSTRAP, FOLDER, HOST, LISTEN, PORT, RUN, STAGE, NodeOptions
from swarmnode.local.place import default_cache, default_home


@click.command(short_help="join a run with this machine")
@click.argument("bootstraps", metavar="BOOTSTRAP...", type=BOOTSTRAP, nargs=-1, required=True)
@click.option("--run", "run", type=RUN, required=True, help="Run id (64 hex digits), or the path of manifest.signed.")
@click.option("--stage", type=STAGE, help="Stage to serve.  [default: the neediest]")
@click.option("--listen", type=LISTEN, default="/ip4/0.0.0.0/tcp/0", show_default=True, help="Where peers reach us.")
@click.option("--home", type=FOLDER, help="The node's own folder.  [default: ~/.local/share/swarmnode/node]")
@click.option("--metrics-port", type=PORT, default=0, show_default="any", help="Prometheus, /healthz, /readyz.")
@click.option("--metrics-host", type=HOST, default="127.0.0.1", show_default=True, help="Who may ask: 0.0.0.0 all.")
@click.option("--name", default=socket.gethostname, show_default="host name", help="What people call this node.")
@click.option("--cache", type=FOLDER, help="Folder of tokens.  [default: ~/.cache/swarmnode]")
def command(
    bootstraps: tuple[str, ...],
    run: str,
    stage: int | None,
    listen: str,
    home: Path | None,
    metrics_port: int,
    metrics_host: str,
    name: str,
    cache: Path | None,
) -> int:
    """Join RUN through any BOOTSTRAP (a multiaddr that ends in /p2p/PEER_ID), train until told to leave.

    SIGTERM and Ctrl-C leave cleanly: what is held is finished, the stage is saved in the home. The second one exits at
    once. Says on stderr where its metrics and its control socket are.
    """
    from swarmnode.cli.launch import launch
    from swarmnode.local.ready import Ready

    def tell(ready: Ready) -> None:
        click.echo(f"peer {ready.peer_id}", err=True)
        click.echo(f"metrics http://{ready.metrics_address}/metrics", err=True)
        click.echo(f"control {ready.control}", err=True)

    options = NodeOptions(
        run=run,
        bootstrap=bootstraps,
        stage=stage,
        listen=listen,
        home=home or default_home("node"),
        metrics_port=metrics_port,
        cache=cache or default_cache(),
        name=name,
        bootstrap_only=False,
        out=None,
        metrics_host=metrics_host,
    )
    return launch(options, tell)
