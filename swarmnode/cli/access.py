"""`swarmnode access RUN`: allow and ban machines by name."""

from __future__ import annotations

import re
from pathlib import Path

import click

from swarmnode import __version__
from swarmnode.cli.option.param import check_peer
from swarmnode.errors import UsageError

_VERSION = re.compile(r"\d+(\.\d+){0,3}\Z")
_NAME = re.compile(r"[0-9a-f]{16}\Z")


@click.command(short_help="which machines the run's owner admits")
@click.argument("run", metavar="RUN", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--allow", multiple=True, metavar="PEER_ID", help="Admit this machine without an invite.")
@click.option("--ban", multiple=True, metavar="PEER_ID", help="Exclude this machine, whatever pass it shows.")
@click.option("--revoke", multiple=True, metavar="NAME", help="Revoke an invite for all its machines.")
@click.option("--least-version", metavar="VERSION", help="Admit this version of swarmnode or newer; 0: any.")
@click.option("--remove", multiple=True, metavar="PEER_ID", help="Remove a machine from both lists.")
def command(
    run: Path,
    allow: tuple[str, ...],
    ban: tuple[str, ...],
    revoke: tuple[str, ...],
    remove: tuple[str, ...],
    least_version: str | None,
) -> None:
    """Change the access list of RUN, a folder with its owner's key, and print it: a word and a name per line.

    The bootstrap that runs from this folder sees the change within seconds and passes it on. Every node checks the
    owner's signature, and disconnects banned peers within a minute or two.
    """
    from swarmnode import owner
    from swarmnode.atomic_file import write_whole
    from swarmnode.daemon.admission import ACCESS_FILE
    from swarmnode.ids import PeerId
    from swarmnode.manifest import read_signed, verify
    from swarmnode.manifest.folder import signed_of
    from swarmnode.membership.access import AccessList, open_access_list, sign_access_list, too_old
    from swarmnode.wire.access_pb2 import SignedAccessList

    for name in revoke:
        if not _NAME.match(name):
            raise UsageError(
                f"--revoke {name[:40]!r}: an invite's name has 16 hex digits, as printed by `swarmnode invite`"
            )
    if least_version is not None and not _VERSION.match(least_version):
        raise UsageError(f"--least-version {least_version[:40]!r}: say 0.2.0, or 0 for any")
    if least_version is not None and too_old(least_version, __version__):
        raise UsageError(
            f"--least-version {least_version}: this is {__version__}, which would leave: update here first"
        )
    key = owner.load_owner(run / owner.FILE_NAME)
    _, run_id = verify(read_signed(signed_of(run))[0], None)
    path = run / ACCESS_FILE
    access_list = AccessList()
    if path.is_file():
        access_list = open_access_list(SignedAccessList.FromString(path.read_bytes()), run_id, owner.public_bytes(key))
    allowed, banned, gone = ({PeerId(check_peer(peer)) for peer in group} for group in (allow, ban, remove))
    fresh = AccessList(
        access_list.sequence + 1,
        (access_list.allowed | allowed) - banned - gone,
        (access_list.banned | banned) - allowed - gone,
        access_list.revoked | {bytes.fromhex(name) for name in revoke},
        access_list.least_version if least_version is None else least_version.strip("0.") and least_version,
    )
    if allow or ban or revoke or remove or least_version is not None:
        write_whole(path, sign_access_list(key, run_id, fresh).SerializeToString(deterministic=True))
        access_list = fresh
    for word, names in (("allowed", access_list.allowed), ("banned", access_list.banned)):
        for peer in sorted(names):
            click.echo(f"{word} {peer}")
    if access_list.least_version:
        click.echo(f"least-version {access_list.least_version}")
    for revoked in sorted(access_list.revoked):
        click.echo(f"revoked {revoked.hex()}")
