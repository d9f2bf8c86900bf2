"""`swarmnode invite RUN`: one line that lets others join."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from swarmnode.cli.options import BOOTSTRAP, FOLDER, OWN_RUN
from swarmnode.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from swarmnode.ids import RunId

_LOCAL = re.compile(r"/(ip4/127\.|ip6/::1/|ip4/0\.)")


@click.command(short_help="one line that lets others join a run")
@click.argument("run", metavar="RUN", type=OWN_RUN)
@click.option("--bootstrap", "bootstraps", type=BOOTSTRAP, multiple=True, help="Where joiners begin; may be repeated.")
@click.option("--home", type=FOLDER, help="Home of the run's bootstrap on this machine, asked for its addresses.")
def command(run: str, bootstraps: tuple[str, ...], home: Path | None) -> None:
    """Print an invite to RUN, a folder of `swarmnode init` or a signed manifest: all that `swarmnode join` needs.

    Without --bootstrap the addresses of the bootstrap that runs on this machine are taken.
    """
    from swarmnode.local.place import default_home
    from swarmnode.manifest import read_signed, verify
    from swarmnode.manifest.folder import signed_of
    from swarmnode.membership.invite import Invite, encode

    signed, _ = read_signed(signed_of(Path(run)))
    _, run_id = verify(signed, None)
    addresses = bootstraps or _running(home or default_home("bootstrap"), run_id)
    if all(_LOCAL.match(address) for address in addresses):
        _say("every address in it is of this machine alone: others cannot use it; give --bootstrap")
    click.echo(encode(Invite(run_id, signed.owner, tuple(addresses))))
    _say("whoever has this line can join: swarmnode join INVITE")


def _running(home: Path, run_id: RunId) -> Sequence[str]:
    """Addresses of the bootstrap in `home`, those that only this machine can reach last and left out if possible."""
    from swarmnode.local import ready

    found = ready.read(home)
    if found is None:
        raise UsageError(
            f"no bootstrap runs in {home}: start one (swarmnode bootstrap RUN), say where it lives (--home), or where "
            "joiners begin (--bootstrap /ip4/ADDRESS/tcp/PORT/p2p/PEER_ID)"
        )
    if found.run_id != run_id:
        raise UsageError(f"the bootstrap in {home} is of run {found.run_id[:16]}, not of {run_id[:16]}: give --home")
    far = [address for address in found.addresses if not _LOCAL.match(address)]
    return far or found.addresses


def _say(text: str) -> None:
    click.echo(text, err=True)
    sys.stderr.flush()
