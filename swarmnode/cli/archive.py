"""`swarmnode archive RUN --out DIR`: the owner copies the model out of the swarm."""

from __future__ import annotations

import asyncio
import base64
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from swarmnode.cli.bootstrap import meet, meeting_point
from swarmnode.cli.option.param import ARCHIVE_EVERY_S, ARCHIVE_KEEP, DURATION, FOLDER, check_own_run, check_peer
from swarmnode.daemon.options import ArchiveOptions
from swarmnode.errors import NotPermitted, UsageError
from swarmnode.machine.archive_lock import keeper
from swarmnode.plugin import check_library

FOLDER_NAME = "archive"
FILE = click.Path(dir_okay=False, path_type=Path)


def archive_options(command: Callable[..., int]) -> Callable[..., int]:
    """The options of an archive; the command gets them as `kept`, for `options_of`."""
    given = (
        click.option(
            "--archive-every",
            "every_s",
            type=DURATION,
            default=ARCHIVE_EVERY_S,
            show_default="1h",
            help="How often the run is copied, after the copies of its first half hour.",
        ),
        click.option(
            "--archive-keep",
            "keep",
            type=click.IntRange(1, 1000),
            default=ARCHIVE_KEEP,
            show_default=True,
            help="Newest checkpoints kept; the best by validation is kept, too.",
        ),
        click.option(
            "--push",
            metavar="URL",
            default="",
            help="Also copy them there: a folder or s3://BUCKET/PREFIX, with your keys.",
        ),
        click.option(
            "--push-to-hub",
            "hub",
            metavar="OWNER/NAME",
            default="",
            help="Also push the newest as a revision of that model on the Hugging Face Hub, with a model card.",
        ),
        click.option("--warrant", type=FILE, help="The owner's permission, if the owner's key is not beside RUN."),
    )
    for add in reversed(given):
        command = add(command)
    return command


def options_of(run: str, folder: Path, kept: dict[str, Any], **more: Any) -> ArchiveOptions:
    """The options of an archive of RUN in `folder`."""
    if kept["hub"]:
        check_library("huggingface_hub", "--push-to-hub")
    data = more.pop("data", None) or (Path(run) if Path(run).is_dir() else None)
    return ArchiveOptions(folder=folder, data=data, **kept, **more)


@click.command(short_help="copy the model out of a running swarm")
@meeting_point("archive")
@click.option("--out", type=FOLDER, help="Folder of the checkpoints.  [default: archive, in RUN]")
@click.option("--once", is_flag=True, help="Make one checkpoint, print its folder and leave.")
@click.option("--allow", metavar="PEER_ID", help="Print the owner's permission for that machine to archive RUN.")
@archive_options
def command(
    out: Path | None,
    once: bool,
    allow: str | None,
    every_s: float,
    keep: int,
    push: str,
    hub: str,
    warrant: Path | None,
    **where: Any,
) -> int:
    """Copy the slow weights of every stage of RUN from the nodes that train it, and keep complete checkpoints.

    Replicas of a stage are compared with each other first: a copy that others contradict is refused. Each checkpoint is
    a folder that transformers loads (from_pretrained) and that `swarmnode export`, `eval`, `generate` and `up --resume`
    accept. It is evaluated on held-out text; the newest --archive-keep and the best one are kept. Copies are made after
    2, 5, 15 and 30 minutes of training, then every --archive-every. The process may be killed at any moment. `swarmnode
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
    kept = {"every_s": every_s, "keep": keep, "push": push, "hub": hub, "warrant": warrant}
    if not Path(run).is_dir() and out is None:
        raise click.UsageError("--out DIR is required (RUN is not a folder)")
    folder = out or Path(run) / FOLDER_NAME
    if once and (home := keeper(folder)) is not None:
        click.echo(_asked(home))
        return 0
    options = options_of(run, folder, kept, once=once, data=where["data_root"])
    where["bootstrap"] = where["bootstrap"] or _here(run)
    return meet("archive", where, archive=options)


def _asked(home: Path) -> Path:
    """The folder of the newest checkpoint of the archive that the process of `home` keeps, made now."""
    from swarmnode.local.model_source import copy_now

    reply = asyncio.run(copy_now(home, lambda text: click.echo(text, err=True)))
    return Path(reply["folder"], reply["newest"])


def _here(run: str) -> tuple[str, ...]:
    """Addresses of a bootstrap of `run` on this machine. Raises UsageError if there is none."""
    from swarmnode.daemon import ready_file
    from swarmnode.manifest import read_signed, verify
    from swarmnode.manifest.folder import signed_of

    run_id = verify(read_signed(signed_of(Path(run)))[0], None)[1] if Path(run).exists() else run
    for ready in ready_file.running(ready_file.meeting_homes()).values():
        if ready.run_id == run_id:
            return ready.addresses
    raise UsageError(
        "no meeting point of this run has its home where this looks by itself: give --peer with the address it printed"
    )


def _warrant_for(run: Path, peer: str) -> str:
    """The warrant as a line of text. Raises NotPermitted without the owner's key."""
    from swarmnode import owner
    from swarmnode.daemon.admission import OWN_PASS_S
    from swarmnode.ids import PeerId
    from swarmnode.manifest import read_signed, verify
    from swarmnode.manifest.folder import signed_of
    from swarmnode.membership.access import sign_warrant

    path = signed_of(Path(check_own_run(str(run))))
    signed, _ = read_signed(path)
    key_path = path.parent / owner.FILE_NAME
    if not key_path.exists():
        raise NotPermitted(f"only the run's owner can permit an archive: {key_path} is not here")
    key = owner.load_owner(key_path)
    if owner.public_bytes(key) != signed.owner:
        raise NotPermitted(f"{key_path} is not the key that {path} is signed with")
    warrant = sign_warrant(key, verify(signed, None)[1], PeerId(peer), int(time.time()) + OWN_PASS_S)
    return base64.b64encode(warrant.SerializeToString(deterministic=True)).decode()
