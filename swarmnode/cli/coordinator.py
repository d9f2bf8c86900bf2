"""`swarmnode coordinator RUN`: a run's meeting point and its page."""

from __future__ import annotations

from pathlib import Path

import click

from swarmnode.cli.bootstrap import signed_manifest
from swarmnode.cli.options import BOOTSTRAP, DASHBOARD_PORT, FOLDER, HOST, LISTEN, OWN_RUN, PORT, NodeOptions
from swarmnode.local.place import default_cache, default_home


@click.command(short_help="show a run on one page, and be its meeting point")
@click.argument("run", metavar="RUN", type=OWN_RUN)
@click.option("--port", type=PORT, default=DASHBOARD_PORT, show_default=True, help="Of the page; 0: any free one.")
@click.option("--bind", "host", type=HOST, help="Where the page listens.  [default: 127.0.0.1, --public: 0.0.0.0]")
@click.option("--public", is_flag=True, help="Let other machines open the page. It is read-only; addresses are hidden.")
@click.option("--listen", type=LISTEN, default="/ip4/0.0.0.0/tcp/0", show_default=True, help="Where peers reach us.")
@click.option("--peer", "peers", type=BOOTSTRAP, multiple=True, help="A member of the run; may be repeated.")
@click.option("--home", type=FOLDER, help="Its own folder.  [default: ~/.local/share/swarmnode/coordinator]")
@click.option("--metrics-port", type=PORT, default=0, show_default="any", help="Prometheus, /healthz, /readyz.")
@click.option("--metrics-host", type=HOST, default="127.0.0.1", show_default=True, help="Who may ask: 0.0.0.0 all.")
@click.option("--name", default="coordinator", show_default=True, help="What people call it.")
def command(
    run: str,
    port: int,
    host: str | None,
    public: bool,
    listen: str,
    peers: tuple[str, ...],
    home: Path | None,
    metrics_port: int,
    metrics_host: str,
    name: str,
) -> int:
    """Show RUN on a live web page, hold its directory and give its manifest to joiners, as `bootstrap` does. RUN is a
    folder of `swarmnode init`, a signed manifest, or with --peer a run id.

    Trains nothing, needs no GPU. Nobody who trains needs it: stop it, and training goes on; start it again, and the
    picture is back, its history kept in the home. Prints its multiaddrs on stdout, the page's address on stderr.
    """
    from swarmnode.cli.launch import launch
    from swarmnode.local.ready import Ready

    def tell(ready: Ready) -> None:
        for address in ready.addresses:
            click.echo(address)
        click.echo(f"dashboard {ready.dashboard}", err=True)
        click.echo(f"metrics http://{ready.metrics_address}/metrics", err=True)
        click.echo(
            f"others join by the line on the page, or that this prints: swarmnode invite {run} --home {home}", err=True
        )

    home = home or default_home("coordinator")
    address = host or ("0.0.0.0" if public else "127.0.0.1")
    options = NodeOptions(
        run=signed_manifest(run),
        bootstrap=peers,
        stage=None,
        listen=listen,
        home=home,
        metrics_port=metrics_port,
        cache=default_cache(),
        name=name,
        bootstrap_only=True,
        out=None,
        metrics_host=metrics_host,
        dashboard=f"{address}:{port}",
        public=public,
    )
    return launch(options, tell)
