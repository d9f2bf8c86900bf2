"""`swarmnode guests RUN`: whom the owner lets in by name, and whom no more."""

from __future__ import annotations

import re
from pathlib import Path

import click

from swarmnode.cli.options import check_peer
from swarmnode.errors import UsageError

_NAME = re.compile(r"[0-9a-f]{16}\Z")


@click.command(short_help="whom the run's owner lets in, and whom no more")
@click.argument("run", metavar="RUN", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--allow", multiple=True, metavar="PEER_ID", help="Let this machine in without an invite.")
@click.option("--ban", multiple=True, metavar="PEER_ID", help="Turn this machine out, whatever it shows.")
@click.option("--revoke", multiple=True, metavar="NAME", help="Take an invite back, for all its machines.")
@click.option("--remove", multiple=True, metavar="PEER_ID", help="Take a machine off both lists.")
def command(
    run: Path, allow: tuple[str, ...], ban: tuple[str, ...], revoke: tuple[str, ...], remove: tuple[str, ...]
) -> None:
    """Change the guest list of RUN, a folder with its owner's key, and print it: a word and a name a line.

    The bootstrap that runs from this folder sees the change within seconds and passes it on; every node checks the
    owner's signature, and turns out whom it bans within a minute or two.
    """
    from swarmnode import owner
    from swarmnode.cli.entrance import GUESTS_FILE
    from swarmnode.ids import PeerId
    from swarmnode.manifest import read_signed, verify
    from swarmnode.manifest.folder import signed_of, write_whole
    from swarmnode.membership.access import Guests, open_guests, sign_guests
    from swarmnode.wire.access_pb2 import SignedGuestList

    for name in revoke:
        if not _NAME.match(name):
            raise UsageError(f"--revoke {name[:40]!r}: an invite's name has 16 hex digits, as `swarmnode invite` said")
    key = owner.load_owner(run / owner.FILE_NAME)
    _, run_id = verify(read_signed(signed_of(run))[0], None)
    path = run / GUESTS_FILE
    guests = Guests()
    if path.is_file():
        guests = open_guests(SignedGuestList.FromString(path.read_bytes()), run_id, owner.public_bytes(key))
    allowed, banned, gone = ({PeerId(check_peer(peer)) for peer in group} for group in (allow, ban, remove))
    fresh = Guests(
        guests.sequence + 1,
        (guests.allowed | allowed) - banned - gone,
        (guests.banned | banned) - allowed - gone,
        guests.revoked | {bytes.fromhex(name) for name in revoke},
    )
    if allow or ban or revoke or remove:
        write_whole(path, sign_guests(key, run_id, fresh).SerializeToString(deterministic=True))
        guests = fresh
    for word, names in (("allowed", guests.allowed), ("banned", guests.banned)):
        for peer in sorted(names):
            click.echo(f"{word} {peer}")
    for revoked in sorted(guests.revoked):
        click.echo(f"revoked {revoked.hex()}")
