"""`swarmnode bootstrap RUN`: a run's first node; and the options it shares with `coordinator`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from swarmnode.cli.option.param import BOOTSTRAP, DISK, FOLDER, HOST, LISTEN, OWN_RUN, PORT
from swarmnode.daemon.options import ArchiveOptions, NodeOptions
from swarmnode.user_folders import default_cache, default_home


def meeting_point(kind: str) -> Callable[[Callable[..., int]], Callable[..., int]]:
    """The argument and the options of a node that does not train; the command gets them as `where`, for `meet`."""
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
            "--metrics-host",
            type=HOST,
            default="127.0.0.1",
            show_default=True,
            help="Address to serve them on; 0.0.0.0: all.",
        ),
        click.option(
            "--data-root",
            type=FOLDER,
            help="Folder with the run's data set; members get its chunks from here.  [default: RUN]",
        ),
        click.option(
            "--base",
            type=FOLDER,
            help="Folder of the run's base model; members get its chunks from here.  [default: RUN/base]",
        ),
        click.option(
            "--max-give",
            "max_give_nbytes",
            type=DISK,
            help="Give members at most so much of the data set and base model in a day.  [default: no limit]",
        ),
        click.option("--name", default=kind, show_default=True, help="Display name."),
    )

    def decorate(command: Callable[..., int]) -> Callable[..., int]:
        for add in reversed(given):
            command = add(command)
        return command

    return decorate


def meet(
    kind: str,
    where: dict[str, Any],
    dashboard: str | None = None,
    *,
    public: bool = False,
    track: str = "",
    archive: ArchiveOptions | None = None,
) -> int:
    """Run the node described by `where`, the options of `meeting_point`. Returns the exit code."""
    from swarmnode.daemon.launch import launch
    from swarmnode.daemon.ready_file import Ready

    run, home = where.pop("run"), where.pop("home") or default_home(kind)

    async def tell(ready: Ready) -> None:
        if kind == "archive":
            click.echo(f"archive of run {ready.run_id[:16]}: peer {ready.peer_id}", err=True)
            return
        for address in ready.addresses:
            click.echo(address)
        if dashboard:
            click.echo(f"dashboard {ready.dashboard}", err=True)
        click.echo(f"metrics http://{ready.metrics_address}/metrics", err=True)
        line = "the line on the page, or the output of" if dashboard else "the output of"
        click.echo(f"others join with {line}: swarmnode invite {run} --home {home}", err=True)

    options = NodeOptions(
        run=signed_manifest(run),
        stage=None,
        home=home,
        cache=default_cache(),
        bootstrap_only=True,
        out=None,
        dashboard=dashboard,
        public=public,
        track=track,
        archive=archive,
        **where,
    )
    return launch(options, tell)


@click.command(short_help="run the first node of a run")
@meeting_point("bootstrap")
def command(**where: Any) -> int:
    """Hold the directory of RUN and give its manifest to joiners. RUN is a folder of `swarmnode init`, signed now, or a
    signed manifest. Trains nothing, needs no GPU. Prints its multiaddrs on stdout, for `swarmnode join`."""
    return meet("bootstrap", where)


def signed_manifest(run: str) -> str:
    """The signed manifest of an organiser's folder, made now; any other value unchanged."""
    folder = Path(run)
    if not (folder / "manifest.toml").is_file():
        return run
    from swarmnode.manifest import SIGNED_FILE, sign_folder

    sign_folder(folder)
    return str(folder / SIGNED_FILE)
