"""`swarmnode bootstrap RUN`: the first node, which others are told of."""

from __future__ import annotations

from pathlib import Path

import click

from swarmnode.cli.options import BOOTSTRAP, FOLDER, HOST, LISTEN, OWN_RUN, PORT, NodeOptions
from swarmnode.local.place import default_cache, default_home


@click.command(short_help="be a run's first meeting point")
@click.argument("run", metavar="RUN", type=OWN_RUN)
@click.option("--listen", type=LISTEN, default="/ip4/0.0.0.0/tcp/0", show_default=True, help="Where peers reach us.")
@click.option("--peer", "peers", type=BOOTSTRAP, multiple=True, help="Another bootstrap of the run; may be repeated.")
@click.option("--home", type=FOLDER, help="The node's own folder.  [default: ~/.local/share/swarmnode/bootstrap]")
@click.option("--metrics-port", type=PORT, default=0, show_default="any", help="Prometheus, /healthz, /readyz.")
@click.option("--lan", is_flag=True, help="Find members in this network by multicast, and be found.")
@click.option("--metrics-host", type=HOST, default="127.0.0.1", show_default=True, help="Who may ask: 0.0.0.0 all.")
@click.option("--name", default="bootstrap", show_default=True, help="What people call this node.")
def command(
    run: str,
    listen: str,
    peers: tuple[str, ...],
    home: Path | None,
    metrics_port: int,
    lan: bool,
    metrics_host: str,
    name: str,
) -> int:
    """Hold the directory of RUN and give its manifest to joiners. RUN is a folder of `swarmnode init`, signed now, or
    a signed manifest. Trains nothing, needs no GPU. Prints its multiaddrs on stdout: what `swarmnode join` takes.
    """
    from swarmnode.cli.launch import launch
    from swarmnode.local.ready import Ready

    home = home or default_home("bootstrap")
    signed = signed_manifest(run)

    def tell(ready: Ready) -> None:
        for address in ready.addresses:
            click.echo(address)
        click.echo(f"metrics http://{ready.metrics_address}/metrics", err=True)
        click.echo(f"others join by the line that this prints: swarmnode invite {run} --home {home}", err=True)

    options = NodeOptions(
        run=signed,
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
        lan=lan,
    )
    return launch(options, tell)


def signed_manifest(run: str) -> str:
    """The signed manifest of an organiser's folder, made now; anything else as it is."""
    folder = Path(run)
    if not (folder / "manifest.toml").is_file():
        return run
    from swarmnode.manifest import SIGNED_FILE, sign_folder

    sign_folder(folder)
    return str(folder / SIGNED_FILE)
