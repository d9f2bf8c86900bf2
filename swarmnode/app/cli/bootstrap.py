"""Nodes that do not train: `swarmnode bootstrap RUN`, `coordinator RUN` with the run's page, `archive RUN`."""

from __future__ import annotations

import asyncio
import base64
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from swarmnode.app.cli.option.param import (
    ARCHIVE_EVERY_S,
    ARCHIVE_KEEP,
    BOOTSTRAP,
    DISK,
    DURATION,
    FOLDER,
    HOST,
    NETWORK_OPTIONS,
    OWN_RUN,
    PORT,
    TRACK,
    check_own_run,
    check_peer,
    notify_option,
    together,
)
from swarmnode.app.cli.output.console import note
from swarmnode.app.control.socket_path import TOKEN_FILE
from swarmnode.app.daemon.options import DASHBOARD_PORT, ArchiveOptions, NodeOptions
from swarmnode.app.machine.folder_store import keeper
from swarmnode.base.errors import UsageError
from swarmnode.base.plugin import check_library
from swarmnode.base.user_folders import default_cache, default_home


def meeting_point(kind: str) -> Callable[[Callable[..., int]], Callable[..., int]]:
    """The argument and the options of a node that does not train; the command gets them as `where`, for `meet`."""
    return together(
        click.argument("run", metavar="RUN", type=OWN_RUN),
        NETWORK_OPTIONS,
        click.option(
            "--peer", "bootstrap", type=BOOTSTRAP, multiple=True, help="A member of the run; may be repeated."
        ),
        click.option("--home", type=FOLDER, help=f"Its own folder.  [default: ~/.local/share/swarmnode/{kind}]"),
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
        click.option("--name", default=kind, help="Display name."),
    )


def meet(kind: str, where: dict[str, Any], dashboard: str | None = None, **more: Any) -> int:
    """Run the node described by `where`, the options of `meeting_point`, and `more`. Returns the exit code."""
    from swarmnode.app.daemon.launch import launch
    from swarmnode.app.daemon.ready_file import Ready

    run = where.pop("run")
    home = where.pop("home") or default_home(kind)

    async def tell(ready: Ready) -> None:
        if kind == "archive":
            click.echo(f"archive of run {ready.run_id[:16]}: peer {ready.peer_id}", err=True)
            return
        for address in ready.addresses:
            click.echo(address)
        if dashboard:
            click.echo(f"dashboard {ready.dashboard}", err=True)
        click.echo(f"metrics http://{ready.metrics_address}/metrics", err=True)
        if ready.grpc:
            click.echo(f"control by gRPC {ready.grpc}, token in {home / TOKEN_FILE}", err=True)
        line = "the line on the page, or the output of" if dashboard else "the output of"
        where = "" if home == default_home(kind) else f" --home {home}"  # `invite` looks there by itself
        click.echo(f"others join with {line}: swarmnode invite {run}{where}", err=True)

    options = NodeOptions(
        run=signed_manifest(run),
        stage=None,
        home=home,
        cache=default_cache(),
        bootstrap_only=True,
        out=None,
        dashboard=dashboard,
        **more,
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
    from swarmnode.run.manifest.folder import SIGNED_FILE, sign_folder

    sign_folder(folder)
    return str(folder / SIGNED_FILE)


FOLDER_NAME = "archive"
FILE = click.Path(dir_okay=False, path_type=Path)


ARCHIVE_OPTIONS = together(
    click.option(
        "--archive-every",
        "every_s",
        type=DURATION,
        default=ARCHIVE_EVERY_S,
        show_default="1h",
        help="The longest gap between two copies; it is every ten minutes where copying is quick.",
    ),
    click.option(
        "--archive-keep",
        "keep",
        type=click.IntRange(1, 1000),
        default=ARCHIVE_KEEP,
        help="Newest checkpoints kept; the best by validation is kept, too.",
    ),
    click.option(
        "--push",
        metavar="URL",
        default="",
        show_default=False,
        help="Also copy them there: a folder or s3://BUCKET/PREFIX, with your keys.",
    ),
    click.option(
        "--push-to-hub",
        "hub",
        metavar="OWNER/NAME",
        default="",
        show_default=False,
        help="Also push the newest as a revision of that model on the Hugging Face Hub, with a model card.",
    ),
    click.option("--warrant", type=FILE, help="The owner's permission, if the owner's key is not beside RUN."),
)
"""Those of an archive; the command gets them among `where`, from which `options_of` takes them."""
ARCHIVED = ("every_s", "keep", "push", "hub", "warrant")


def options_of(run: str, folder: Path, where: dict[str, Any], **more: Any) -> ArchiveOptions:
    """The options of an archive of RUN in `folder`, those of ARCHIVED taken out of `where`."""
    if where["hub"]:
        check_library("huggingface_hub", "--push-to-hub")
    data = where["data_root"] or (Path(run) if Path(run).is_dir() else None)
    return ArchiveOptions(folder=folder, data=data, **{key: where.pop(key) for key in ARCHIVED}, **more)


@click.command(short_help="copy the model out of a running swarm")
@meeting_point("archive")
@click.option("--out", type=FOLDER, help="Folder of the checkpoints.  [default: archive, in RUN]")
@click.option("--once", is_flag=True, help="Make one checkpoint, print its folder and leave.")
@click.option("--allow", metavar="PEER_ID", help="Print the owner's permission for that machine to archive RUN.")
@ARCHIVE_OPTIONS
def archive(out: Path | None, once: bool, allow: str | None, **where: Any) -> int:
    """Copy the slow weights of every stage of RUN from the nodes that train it, and keep complete checkpoints.

    Replicas of a stage are compared with each other first: a copy that others contradict is refused. Each checkpoint is
    a folder that transformers loads (from_pretrained) and that `swarmnode export`, `eval`, `generate` and `up --resume`
    accept, and is then evaluated on held-out text; the newest --archive-keep and the best one are kept. Copies are made
    after 2, 5 and 10 minutes of training, then every ten minutes, or every --archive-every where that is sooner or a
    copy takes long, and when the last replica of a stage leaves. The process may be killed at any moment. `swarmnode
    coordinator` does the same by itself and offers the model on its page; --once then has it make a copy now.

    Only the run's owner can archive: RUN is the folder with owner.key, or anything with --warrant, which the owner
    makes by `swarmnode archive RUN --allow PEER_ID` for a machine without the key (`swarmnode identity --home HOME`
    prints its id). --peer names a member of the run to start from; the default is the bootstrap or coordinator of RUN
    on this machine.
    """
    run = str(where["run"])
    if allow is not None:
        click.echo(_warrant_for(Path(run), check_peer(allow)))
        return 0
    if not Path(run).is_dir() and out is None:
        raise click.UsageError("--out DIR is required (RUN is not a folder)")
    folder = out or Path(run) / FOLDER_NAME
    if once and (home := keeper(folder)) is not None:
        click.echo(_asked(home))
        return 0
    options = options_of(run, folder, where, once=once)
    where["bootstrap"] = where["bootstrap"] or _here(run)
    return meet("archive", where, archive=options)


def _asked(home: Path) -> Path:
    """The folder of the newest checkpoint of the archive that the process of `home` keeps, made now."""
    from swarmnode.app.local.model_source import copy_now

    reply = asyncio.run(copy_now(home, note))
    return Path(reply["folder"], reply["newest"])


def _here(run: str) -> tuple[str, ...]:
    """Addresses of a bootstrap of `run` on this machine. Raises UsageError if there is none."""
    from swarmnode.app.daemon import ready_file
    from swarmnode.run.manifest import read_signed, verify
    from swarmnode.run.manifest.folder import signed_of

    run_id = verify(read_signed(signed_of(Path(run)))[0], None)[1] if Path(run).exists() else run
    for ready in ready_file.running(ready_file.meeting_homes()).values():
        if ready.run_id == run_id:
            return ready.addresses
    raise UsageError(
        "no coordinator or bootstrap of this run is found in its usual home on this machine: start one, or give --peer"
        " with an address that it printed"
    )


def _warrant_for(run: Path, peer: str) -> str:
    """The warrant as a line of text. Raises NotPermitted without the owner's key."""
    from swarmnode.app.cli.owner import key_beside
    from swarmnode.app.daemon.admission import OWN_PASS_S
    from swarmnode.base.ids import PeerId
    from swarmnode.run.admission.access import mark_of, sign_warrant
    from swarmnode.run.manifest import issued
    from swarmnode.run.manifest.folder import signed_of

    path = signed_of(Path(check_own_run(str(run))))
    now_s = time.time()
    key, chain = key_beside(path, "only the run's owner can permit an archive")
    warrant = sign_warrant(key, chain.run_id, PeerId(peer), int(now_s) + OWN_PASS_S, len(chain.chain))
    issued.note(path.parent, mark_of(warrant), warrant.expires_unix_s, now_s)
    return base64.b64encode(warrant.SerializeToString(deterministic=True)).decode()


@click.command(short_help="show a run on a web page, and be its meeting point")
@meeting_point("coordinator")
@click.option("--port", type=PORT, default=DASHBOARD_PORT, help="Of the page; 0: any free one.")
@click.option("--bind", "host", type=HOST, help="Where the page listens.  [default: 127.0.0.1, --public: 0.0.0.0]")
@click.option("--public", is_flag=True, help="Let other machines open the page. It is read-only; addresses are hidden.")
@click.option(
    "--archive/--no-archive", "archives", default=None, help="Archive the model.  [default: yes, with the owner's key]"
)
@click.option("--publish-model", is_flag=True, help="With --public: also for a restricted run.")
@TRACK
@notify_option("Tell you of alarms: on this desktop, or by a POST to a webhook (Slack, Mattermost, Discord).")
@ARCHIVE_OPTIONS
def coordinator(
    port: int,
    host: str | None,
    public: bool,
    archives: bool | None,
    publish_model: bool,
    track: str | None,
    **where: Any,
) -> int:
    """Show RUN on a live web page, hold its directory and give its manifest to joiners, as `bootstrap` does. RUN is a
    folder of `swarmnode init`, a signed manifest, or with --peer a run id.

    Trains nothing, needs no GPU. Training does not depend on it: it may be stopped, and after a restart the page is
    back, with its history kept in the home. Prints its multiaddrs on stdout, the page's address on stderr.

    With the owner's key in RUN it also copies the model out of the swarm, as `swarmnode archive` does, and offers the
    newest and the best checkpoint on the page. The copies are in RUN/archive if RUN is a folder, else in the home.
    """
    if track:
        check_library(track, f"--track {track}")
    address = host or ("0.0.0.0" if public else "127.0.0.1")
    run = str(where["run"])
    above = Path(run) if Path(run).is_dir() else where["home"] or default_home("coordinator")
    asked = bool(archives or where["push"] or where["hub"] or where["warrant"])
    archive = options_of(run, above / FOLDER_NAME, where, asked=asked, publish=publish_model)
    page = f"{address}:{port}"
    return meet(
        "coordinator", where, page, public=public, track=track or "", archive=None if archives is False else archive
    )
