"""`swarmnode coordinator RUN`: a run's bootstrap and its page."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from swarmnode.cli.archive import FOLDER_NAME, archive_options, options_of
from swarmnode.cli.bootstrap import meet, meeting_point
from swarmnode.cli.option.param import DASHBOARD_PORT, FOLDER, HOST, PORT, TRACK
from swarmnode.plugin import check_library
from swarmnode.user_folders import default_home


@click.command(short_help="show a run on a web page, and be its bootstrap")
@meeting_point("coordinator")
@click.option("--port", type=PORT, default=DASHBOARD_PORT, show_default=True, help="Of the page; 0: any free one.")
@click.option("--bind", "host", type=HOST, help="Where the page listens.  [default: 127.0.0.1, --public: 0.0.0.0]")
@click.option("--public", is_flag=True, help="Let other machines open the page. It is read-only; addresses are hidden.")
@click.option(
    "--archive/--no-archive", "archives", default=None, help="Archive the model.  [default: yes, with the owner's key]"
)
@click.option(
    "--archive-folder", type=FOLDER, help="Folder.  [default: archive, in RUN if that is a folder, else in the home]"
)
@click.option("--publish-model", is_flag=True, help="With --public: also for a restricted run.")
@TRACK
@archive_options
def command(
    port: int,
    host: str | None,
    public: bool,
    archives: bool | None,
    archive_folder: Path | None,
    publish_model: bool,
    track: str | None,
    every_s: float,
    keep: int,
    push: str,
    hub: str,
    warrant: Path | None,
    **where: Any,
) -> int:
    """Show RUN on a live web page, hold its directory and give its manifest to joiners, as `bootstrap` does. RUN is a
    folder of `swarmnode init`, a signed manifest, or with --peer a run id.

    Trains nothing, needs no GPU. Training does not depend on it: it may be stopped, and after a restart the page is
    back, with its history kept in the home. Prints its multiaddrs on stdout, the page's address on stderr.

    With the owner's key in RUN it also copies the model out of the swarm, as `swarmnode archive` does, and offers the
    newest and the best checkpoint on the page.
    """
    if track:
        check_library(track, f"--track {track}")
    address = host or ("0.0.0.0" if public else "127.0.0.1")
    run = str(where["run"])
    above = Path(run) if Path(run).is_dir() else where["home"] or default_home("coordinator")
    asked = bool(archives or archive_folder or push or hub or warrant)
    kept = {"every_s": every_s, "keep": keep, "push": push, "hub": hub, "warrant": warrant}
    archive = options_of(
        run, archive_folder or above / FOLDER_NAME, kept, asked=asked, publish=publish_model, data=where["data_root"]
    )
    page = f"{address}:{port}"
    return meet(
        "coordinator", where, page, public=public, track=track or "", archive=None if archives is False else archive
    )
