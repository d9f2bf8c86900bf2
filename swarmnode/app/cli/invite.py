"""`swarmnode invite RUN`: print a line that lets others join."""

from __future__ import annotations

import dataclasses
import re
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import click
from click.core import ParameterSource

from swarmnode.app.cli.option.param import BOOTSTRAP, DURATION, FOLDER, check_own_run, check_peer
from swarmnode.app.cli.output.console import note
from swarmnode.base.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from swarmnode.base.ids import RunId
    from swarmnode.run.admission.invite import Invite

_LOCAL = re.compile(r"/(ip4/127\.|ip6/::1/|ip4/0\.)")
_WHEEL = re.compile(r"(https?|file)://\S+\.whl#sha256=[0-9a-f]{64}\Z")
EXPIRES_S = 30 * 86_400.0  # by default, as GitLab's access tokens that gitlab-shell makes


@click.command(short_help="print a line that lets others join a run")
@click.argument("run", metavar="RUN | INVITE | -")
@click.option("--bootstrap", "bootstraps", type=BOOTSTRAP, multiple=True, help="Address for joiners; may be repeated.")
@click.option("--home", type=FOLDER, help="Home of the run's bootstrap on this machine, for its addresses.")
@click.option("--expires", "expires_s", type=DURATION, default=EXPIRES_S, show_default="30d", help="Validity.")
@click.option(
    "--machines", type=click.IntRange(0, 1_000_000), default=0, show_default="any", help="Number of machines it admits."
)
@click.option("--machine", metavar="PEER_ID", help="Only for this machine (`swarmnode identity` there prints its id).")
@click.option(
    "--out",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Write it to this file, which only you can read (0600).",
)
@click.option(
    "--wheel",
    metavar="URL#sha256=HEX",
    help="With --out: where joiners get swarmnode, if not at the project's address; the file then begins with the line "
    "that installs it.",
)
def command(
    run: str,
    bootstraps: tuple[str, ...],
    home: Path | None,
    expires_s: float,
    machines: int,
    machine: str | None,
    out: Path | None,
    wheel: str | None,
) -> None:
    """Print an invite to RUN, a folder of `swarmnode init` or a signed manifest. It is all that `swarmnode join` needs.

    Without --bootstrap the addresses of the bootstrap that runs on this machine are used. An invite to a restricted run
    (access.mode in the manifest) holds a secret and expires after --expires; `swarmnode access` revokes it. From such
    an INVITE ("-" reads it from stdin) and --machine, its holder makes an invite for one machine only, so that the
    secret need not be sent there.
    """
    from swarmnode.run.admission.invite import decode, encode, looks_like_invite

    if wheel is not None and (out is None or not _WHEEL.match(wheel)):
        raise click.UsageError("--wheel needs --out FILE, and a URL of a .whl file that ends in #sha256=64 hex digits")
    peer = None if machine is None else check_peer(machine)
    source = click.get_current_context().get_parameter_source("expires_s")
    limited = machines or peer is not None or source == ParameterSource.COMMANDLINE
    if run == "-" or looks_like_invite(run):
        invite = decode(sys.stdin.read() if run == "-" else run)
        if peer is None or invite.grant is None:
            raise click.UsageError("an invite with a secret, and --machine, make an invite for one machine")
    else:
        invite = of_run(Path(_own_run(run)), bootstraps, home, expires_s, machines)
        if limited and invite.grant is None:
            raise click.UsageError(
                '--machines, --machine and --expires need a restricted run: set access.mode to "invited" in '
                "manifest.toml before the run starts; into an open run anybody can join"
            )
    if peer is not None and invite.grant is not None:
        invite = _for_machine(invite, peer)
    if all(_LOCAL.match(address) for address in invite.bootstraps):
        note(
            "only this machine can use it: its addresses are 127.0.0.1. For others start the meeting point with"
            " --listen /ip4/0.0.0.0/tcp/4001, or say at which address they reach it: --bootstrap"
        )
    if out is None:
        click.echo(encode(invite))
    else:
        _write(out, encode(invite), wheel)
    _explain(invite)


def _write(out: Path, line: str, wheel: str | None) -> None:
    from swarmnode.base.atomic_file import atomic_write, write_errors

    install = _install_line(wheel)
    with write_errors(out):
        atomic_write(out, f"{install}{line}\n".encode(), mode=0o600)
    note(f"{out}: send it, and say: swarmnode join --invite-file {out.name}")


def _install_line(wheel: str | None) -> str:
    """The comment that says how a joiner installs swarmnode; "" where neither a wheel nor an address is known."""
    from swarmnode import __version__
    from swarmnode.base.project_address import install_lines, project_address, with_uv

    where = project_address()
    if not wheel and not where:
        return ""
    line = with_uv(f"'swarmnode-trainer @ {wheel}'") if wheel else install_lines(where, __version__)["uv"]
    return f"# install: {line}\n"


def _own_run(text: str) -> str:
    try:
        identity = check_own_run(text)
    except ValueError as error:
        raise click.UsageError(f"{text[:100]!r}: {error}") from None
    if not Path(identity).exists():
        raise click.UsageError(f"{text[:100]!r}: an invite is made from the run's folder or its signed manifest")
    return identity


def of_run(run: Path, bootstraps: tuple[str, ...], home: Path | None, expires_s: float, machines: int) -> Invite:
    """An invite to `run`, with a new secret if it is restricted. Raises NotPermitted without its owner's key."""
    from swarmnode.app.cli.owner import chain_at, key_beside
    from swarmnode.base.identity import Identity
    from swarmnode.run.admission.access import grant_name, mark_of, sign_grant
    from swarmnode.run.admission.invite import Invite
    from swarmnode.run.manifest import issued, read_signed, verify
    from swarmnode.run.manifest.folder import signed_of

    path = signed_of(run)
    signed, manifest = read_signed(path)
    _, run_id = verify(signed, None)
    addresses = bootstraps or _running(home, run_id)
    chain = chain_at(path)
    invite = Invite(run_id, signed.owner, tuple(addresses), amendment=len(chain.chain), head=chain.head)
    if manifest.access.mode == "open":
        return invite
    key, _ = key_beside(path, f"{run} is restricted, and only its owner can invite")
    delegate = Identity.generate()
    now_s = time.time()
    grant = sign_grant(key, run_id, delegate, int(now_s + expires_s), machines, len(chain.chain))
    issued.note(path.parent, mark_of(grant), grant.expires_unix_s, now_s, grant_name(grant))
    return dataclasses.replace(invite, grant=grant, secret=delegate.seed)


def _for_machine(invite: Invite, peer: str) -> Invite:
    """`invite` with a pass for `peer` in place of its secret."""
    from swarmnode.base.identity import Identity
    from swarmnode.base.ids import PeerId
    from swarmnode.run.admission.access import sign_pass

    assert invite.grant is not None
    machine = PeerId(peer)
    delegate = Identity.of_seed(invite.secret)
    machine_pass = sign_pass(delegate, invite.run_id, invite.grant, machine, invite.grant.expires_unix_s)
    return dataclasses.replace(invite, grant=None, secret=b"", machine_pass=machine_pass, machine=machine)


def _running(home: Path | None, run_id: RunId) -> Sequence[str]:
    """Addresses of the run's meeting point in `home` (None: where they usually are), without local ones if there are
    others."""
    from swarmnode.app.daemon import ready_file

    homes = [home] if home is not None else ready_file.meeting_homes()
    running = ready_file.running(homes)
    if not running:
        raise UsageError(
            f"no meeting point runs in {' or '.join(map(str, homes))}: start one (swarmnode coordinator RUN), give its "
            "folder (--home), or addresses for joiners (--bootstrap /ip4/ADDRESS/tcp/PORT/p2p/PEER_ID)"
        )
    for ready in running.values():
        if ready.run_id == run_id:
            return [address for address in ready.addresses if not _LOCAL.match(address)] or ready.addresses
    where, ready = next(iter(running.items()))
    raise UsageError(
        f"the meeting point in {where} is of run {ready.run_id[:16]}, not of {run_id[:16]}: if manifest.toml was "
        "changed since it started, that made another run; else give its folder (--home)"
    )


def _explain(invite: Invite) -> None:
    from swarmnode.run.admission.access import grant_name

    shown = invite.grant or (invite.machine_pass.grant if invite.machine_pass is not None else None)
    if shown is None:
        note("anybody with this line can join: swarmnode join INVITE")
        return
    until = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(shown.expires_unix_s))
    who = (
        f"machine {invite.machine}" if invite.machine is not None else "anybody with this line: keep it like a password"
    )
    note(f"admits {who}, until {until}; revoke it with: swarmnode access RUN --revoke {grant_name(shown).hex()}")
