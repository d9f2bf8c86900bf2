"""The verbs of a run's owner: keys that sign for it (`owner`), changes under way (`amend`), admitted machines
(`access`)."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import re
import time
import tomllib
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from swarmnode import __version__
from swarmnode.app.cli.option.param import FOLDER, check_peer
from swarmnode.app.cli.output.listed import ListedGroup
from swarmnode.base.errors import ManifestError, NotPermitted, RemoteFault, UsageError, cause_of
from swarmnode.base.user_folders import default_home

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    from swarmnode.run.admission.access import AccessList
    from swarmnode.run.admission.amendment import Amendment, Amendments

RUN = click.Path(exists=True, file_okay=False, path_type=Path)
AHEAD_PERIODS = 4  # of train/node/access_list.py, in which all members hear of an amendment, as of a ban
PAGE_TIMEOUT_S = 5.0
RECOVER = "swarmnode owner rotate RUN --recovery FILE"


def chain_of(run: Path) -> Amendments:
    """The amendments in RUN/manifest.signed. Raises ManifestError."""
    from swarmnode.run.manifest.folder import SIGNED_FILE

    return chain_at(run / SIGNED_FILE)


def chain_at(path: Path) -> Amendments:
    """The amendments in the signed manifest at `path`. Raises ManifestError."""
    from swarmnode.run.admission.amendment import Amendments
    from swarmnode.run.manifest import read_signed, verify

    signed, manifest = read_signed(path)
    try:
        return Amendments.of(signed, manifest, verify(signed, None)[1])
    except RemoteFault as fault:
        raise ManifestError(f"{path}: {fault}") from None


def key_beside(path: Path, why: str) -> tuple[Ed25519PrivateKey, Amendments]:
    """The owner's key beside the signed manifest at `path`, and the amendments, of which the last one lets it sign.
    Raises NotPermitted without it, which begins with `why`."""
    from swarmnode.run import owner

    key_path = path.parent / owner.FILE_NAME
    if not key_path.exists():
        raise NotPermitted(f"{why}: {key_path} is not here; if it is lost: {RECOVER}")
    key = owner.load_owner(key_path)
    chain = chain_at(path)
    if owner.public_bytes(key) not in chain.owners:
        raise NotPermitted(f"{key_path} is not the key of an owner in force: use theirs, or {RECOVER}")
    return key, chain


def append(
    run: Path,
    key: Ed25519PrivateKey,
    from_round: int,
    values: Mapping[str, object],
    owners: Sequence[bytes] = (),
    living: Sequence[bytes] = (),
) -> tuple[Amendments, Amendment]:
    """Sign the next amendment of RUN with `key` and keep it in RUN/manifest.signed. Raises UsageError."""
    from swarmnode.run.manifest import read_signed
    from swarmnode.run.manifest.folder import SIGNED_FILE, write_signed

    chain = chain_of(run)
    try:
        made = chain.sign(key, from_round, values, owners, living)
    except RemoteFault as fault:
        raise UsageError(f"{fault}; if the owner's key is stolen or lost: {RECOVER}") from None
    signed, _ = read_signed(run / SIGNED_FILE)
    del signed.amendments[:]
    signed.amendments.extend(chain.signed)
    write_signed(run / SIGNED_FILE, signed)
    return chain, made


def round_ahead(home: Path, round_samples: int) -> int:
    """A round that comes when every member has heard, by the page of the coordinator in `home`. Raises UsageError if
    none runs there."""
    from swarmnode.app.daemon import ready_file
    from swarmnode.app.daemon.service_manager import doing
    from swarmnode.train.node.access_list import PERIOD_S

    ready = ready_file.read(home)
    try:
        if ready is None or not ready.dashboard:
            raise OSError("no coordinator runs there")
        with doing("waiting until the coordinator knows the run's speed"):
            until_s = time.monotonic() + AHEAD_PERIODS * PERIOD_S  # a run that stands still has none
            while (view := _summary(ready.dashboard))["phase"] == "training" and not view["tokens_per_s"]:
                if time.monotonic() > until_s:
                    break
                time.sleep(1.0)
        per_s = view["tokens_per_s"] * view["samples"] / max(1, view["tokens"])
        ahead = 1 + math.ceil(AHEAD_PERIODS * PERIOD_S * float(per_s) / round_samples)
        return int(view["samples"]) // round_samples + ahead
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(
            f"--home {home}: the run's round is not known ({error}): give --from-round N, or the coordinator's home"
        ) from None


def _summary(page: str) -> dict[str, Any]:
    with urllib.request.urlopen(f"{page.rstrip('/')}/api/v1/summary", timeout=PAGE_TIMEOUT_S) as answer:
        return dict(json.load(answer))


@click.group(cls=ListedGroup, short_help="which keys sign for the run: add one, or replace a lost one")
def command() -> None:
    """The keys that sign amendments, access lists, invites and archives of a run. What RUN/issued.json lists of earlier
    invites and warrants goes on working."""


@command.command()
@click.argument("path", metavar="FILE", type=click.Path(dir_okay=False, path_type=Path))
def new(path: Path) -> None:
    """Make a key in FILE, for safe keeping or for a second owner, and print its public half, for `owner add`."""
    from swarmnode.run import owner

    click.echo(owner.public_bytes(owner.create_owner(path)).hex())


@command.command()
@click.argument("run", metavar="RUN", type=RUN)
@click.argument("key", metavar="NEWKEY")
def add(run: Path, key: str) -> None:
    """Let NEWKEY sign for RUN as well. NEWKEY: 64 hex digits, or a file of `owner new`.

    A key that is added and kept elsewhere replaces a lost one: copy it to RUN/owner.key, then say `owner rotate RUN`.
    """
    from swarmnode.run import owner

    mine = owner.load_owner(run / owner.FILE_NAME)
    try:
        raw = owner.public_bytes(owner.load_owner(Path(key))) if Path(key).is_file() else bytes.fromhex(key)
    except ValueError:
        raw = b""
    if len(raw) != 32:
        raise UsageError(f"{key[:80]!r} is neither 64 hex digits nor a file of `swarmnode owner new`")
    before = chain_of(run)
    owners = tuple(dict.fromkeys((*before.owners, raw)))
    living = sorted(before.keys.living)
    chain, made = append(run, mine, 0, {}, owners, living)
    click.echo(chain.text(made))


@command.command()
@click.argument("run", metavar="RUN", type=RUN)
@click.option(
    "--recovery",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="The key that `init` made, where owner.key is stolen or lost.  [default: RUN/recovery.key if it is there]",
)
@click.option(
    "--after",
    type=click.IntRange(0, 64),
    help="With the recovery key: the last amendment that is yours; later ones go.  [default: all are]",
)
def rotate(run: Path, recovery: Path | None, after: int | None) -> None:
    """Replace the keys of RUN by a new one, in RUN/owner.key. The present one is kept beside it, and signs no more.

    Signed with the recovery key it counts everywhere, whatever was signed with a stolen key. Invites and warrants that
    RUN/issued.json lists live on, others of earlier keys end. The access list is signed anew.
    """
    from swarmnode.run import owner
    from swarmnode.run.manifest import issued

    path = run / owner.FILE_NAME
    beside = run / owner.RECOVERY_FILE
    _finish_rotation(run, path)
    if recovery is None and beside.exists() and chain_of(run).recovery:
        recovery = beside
    signer = owner.load_owner(path if recovery is None else recovery)
    access_list = list_of(run)  # before anything changes: it may be damaged
    living = issued.living(run, access_list.revoked, time.time())
    before = chain_of(run)
    if recovery is None and owner.public_bytes(signer) not in before.owners:
        raise ManifestError(f"{path} is not the key of an owner in force: add it first with theirs, or {RECOVER}")
    if recovery is not None and owner.public_bytes(signer) != before.recovery:
        raise ManifestError(f"{recovery} is not the recovery key that the manifest of {run} names")
    if after is not None:
        if recovery is None:
            raise click.UsageError("--after needs the recovery key")
        _cut_back(run, after)
    fresh = run / f"{owner.FILE_NAME}.new"
    key = owner.create_owner(fresh)
    chain, made = append(run, signer, 0, {}, (owner.public_bytes(key),), living)
    _finish_rotation(run, path)
    click.echo(chain.text(made))
    write_list(run, key, access_list)  # an empty one, too: a stolen key may have signed another
    click.echo(_lives_on(len(living)), err=True)
    if recovery is None:
        click.echo("not signed by the recovery key: one who has the old key can still mislead newcomers", err=True)


def _lives_on(count: int) -> str:
    """The line on `count` invites and warrants that still work."""
    if not count:
        return "no invite or warrant of earlier keys works any more; `swarmnode invite RUN` prints a new invite"
    of = "invite or warrant works" if count == 1 else "invites and warrants work"
    return f"{count} {of} on, those that RUN/issued.json lists; others of earlier keys do not"


def _finish_rotation(run: Path, path: Path) -> None:
    """Put RUN/owner.key.new in its place if it is an owner's already, and the key before beside it; else remove it."""
    from swarmnode.run import owner

    fresh = path.with_name(f"{path.name}.new")
    if not fresh.exists():
        return
    if owner.public_bytes(owner.load_owner(fresh)) not in chain_of(run).owners:
        fresh.unlink()  # its amendment was never signed
        return
    if path.exists():
        try:
            label = owner.public_bytes(owner.load_owner(path)).hex()[:12]
        except (ManifestError, NotPermitted):
            label = "damaged"
        os.replace(path, run / f"owner-{label}.key")
    os.replace(fresh, path)


def _cut_back(run: Path, after: int) -> None:
    """Keep the first `after` amendments in RUN/manifest.signed."""
    from swarmnode.run.manifest import read_signed
    from swarmnode.run.manifest.folder import SIGNED_FILE, write_signed

    signed, _ = read_signed(run / SIGNED_FILE)
    del signed.amendments[after:]
    write_signed(run / SIGNED_FILE, signed)


def list_of(run: Path) -> AccessList:
    """The access list of RUN, whichever of its owners' keys signed it; an empty one if there is none. Raises
    ManifestError."""
    from swarmnode.app.daemon.admission import ACCESS_FILE
    from swarmnode.base import bounds
    from swarmnode.base.wire.access_pb2 import SignedAccessList
    from swarmnode.run.admission.access import ACCESS_LIST_BYTES_MAX, AccessList, open_access_list

    path = run / ACCESS_FILE
    chain = chain_of(run)
    try:
        with path.open("rb") as file:
            raw = file.read(ACCESS_LIST_BYTES_MAX + 1)
        return open_access_list(bounds.parse(SignedAccessList, raw, str(path)), chain.run_id, *chain.signers)
    except FileNotFoundError:
        return AccessList()
    except OSError as error:
        raise ManifestError(f"{path} cannot be read: {cause_of(error)}") from None
    except RemoteFault as fault:
        raise ManifestError(f"{path} is damaged ({fault}): restore it, or move it away and list anew") from None


def write_list(run: Path, key: Ed25519PrivateKey, access_list: AccessList) -> AccessList:
    """Sign `access_list` with `key` under the last amendment, as the next one, and keep it in RUN."""
    from swarmnode.app.daemon.admission import ACCESS_FILE
    from swarmnode.base.atomic_file import write_whole
    from swarmnode.run.admission.access import sign_access_list

    chain = chain_of(run)
    fresh = dataclasses.replace(access_list, sequence=access_list.sequence + 1, amendment=len(chain.chain))
    signed = sign_access_list(key, chain.run_id, fresh)
    write_whole(run / ACCESS_FILE, signed.SerializeToString(deterministic=True))
    return fresh


ROUND_MAX = 1 << 53


@click.command(short_help="change the run under way: rates, batch, codec, from a round on")
@click.argument("run", metavar="RUN", type=RUN)
@click.argument("changes", metavar="[FIELD=VALUE]...", nargs=-1)
@click.option("--from-round", type=click.IntRange(0, ROUND_MAX), help="First round with it.  [default: a minute ahead]")
@click.option("--home", type=FOLDER, help="The coordinator's.  [default: ~/.local/share/swarmnode/coordinator]")
@click.option("--list", "lists", is_flag=True, help="Print the amendments so far.")
@click.option("--json", "as_json", is_flag=True, help="Print all amendments as a JSON list.")
def amend(
    run: Path, changes: tuple[str, ...], from_round: int | None, home: Path | None, lists: bool, as_json: bool
) -> None:
    """Change fields of RUN's manifest from a round on. RUN is a folder with its owner's key; manifest.toml stays as it
    is, and so do the run's id, invites and history.

    The coordinator or bootstrap that runs from this folder passes the change on within seconds. Each node checks the
    owner's signature, and takes it up when it has done that round; a joiner takes up all that came before.
    """
    from swarmnode.run import owner
    from swarmnode.run.manifest import amended
    from swarmnode.run.manifest.folder import sign_folder

    if lists:
        _show_amendments(chain_of(run), as_json)
        return
    if not changes:
        raise click.UsageError("give FIELD=VALUE, for example inner.muon_learning_rate=1e-3, or --list")
    values: dict[str, object] = {}
    for change in changes:
        name, equals, text = change.partition("=")
        if not equals:
            raise click.UsageError(f"{change[:60]!r}: give FIELD=VALUE, for example inner.muon_learning_rate=1e-3")
        values[name] = _value(text)
    key = owner.load_owner(run / owner.FILE_NAME)
    sign_folder(run)
    try:
        newest = chain_of(run).newest
        amended(newest, values)
    except ManifestError as error:
        raise UsageError(str(error)) from None
    if from_round is None:
        from_round = round_ahead(home or default_home("coordinator"), newest.gossip.round_samples)
    chain, made = append(run, key, from_round, values)
    if as_json:
        _show_amendments(chain, as_json)
    else:
        click.echo(chain.text(made))


def _show_amendments(chain: Amendments, as_json: bool) -> None:
    """Print all amendments of `chain`, oldest first."""
    if not as_json:
        for line in chain.lines():
            click.echo(line)
        return
    rows = [
        {
            "serial": one.serial,
            "from_round": one.from_round,
            "values": dict(one.values),
            "owners": [key.hex() for key in one.owners],
            "text": chain.text(one),
        }
        for one in chain.chain
    ]
    click.echo(json.dumps(rows))


def _value(text: str) -> object:
    """`text` as TOML reads it; a bare word is text."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


_VERSION = re.compile(r"\d+(\.\d+){0,3}\Z")
_NAME = re.compile(r"[0-9a-f]{16}\Z")


@click.command(short_help="which machines the run's owner admits")
@click.argument("run", metavar="RUN", type=RUN)
@click.option("--allow", multiple=True, metavar="PEER_ID", help="Admit this machine without an invite.")
@click.option("--ban", multiple=True, metavar="PEER_ID", help="Exclude this machine, whatever pass it shows.")
@click.option("--revoke", multiple=True, metavar="NAME", help="Revoke an invite for all its machines.")
@click.option("--least-version", metavar="VERSION", help="Admit this version of swarmnode or newer; 0: any.")
@click.option("--remove", multiple=True, metavar="PEER_ID", help="Remove a machine from both lists.")
@click.option("--json", "as_json", is_flag=True, help="Print the list as one JSON object.")
def access(
    run: Path,
    allow: tuple[str, ...],
    ban: tuple[str, ...],
    revoke: tuple[str, ...],
    remove: tuple[str, ...],
    least_version: str | None,
    as_json: bool,
) -> None:
    """Change the access list of RUN, a folder with its owner's key, and print it: a word and a name per line.

    The bootstrap that runs from this folder sees the change within seconds and passes it on. Every node checks the
    owner's signature, and disconnects banned peers within a minute or two.
    """
    from swarmnode.base.ids import PeerId
    from swarmnode.run.admission.access import AccessList, too_old
    from swarmnode.run.manifest.folder import signed_of

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
    key, _ = key_beside(signed_of(run), "only an owner changes who may take part")
    access_list = list_of(run)
    allowed, banned, gone = ({PeerId(check_peer(peer)) for peer in group} for group in (allow, ban, remove))
    fresh = AccessList(
        access_list.sequence,
        (access_list.allowed | allowed) - banned - gone,
        (access_list.banned | banned) - allowed - gone,
        access_list.revoked | {bytes.fromhex(name) for name in revoke},
        access_list.least_version if least_version is None else least_version.strip("0.") and least_version,
    )
    if allow or ban or revoke or remove or least_version is not None:
        access_list = write_list(run, key, fresh)
    _show_list(access_list, as_json)


def _show_list(access_list: AccessList, as_json: bool) -> None:
    """Print who may take part by `access_list`, and who may not."""
    if as_json:
        shown = {
            "allowed": sorted(access_list.allowed),
            "banned": sorted(access_list.banned),
            "revoked": sorted(name.hex() for name in access_list.revoked),
            "least_version": access_list.least_version,
            "sequence": access_list.sequence,
        }
        click.echo(json.dumps(shown))
        return
    for word, names in (("allowed", access_list.allowed), ("banned", access_list.banned)):
        for peer in sorted(names):
            click.echo(f"{word} {peer}")
    if access_list.least_version:
        click.echo(f"least-version {access_list.least_version}")
    for revoked in sorted(access_list.revoked):
        click.echo(f"revoked {revoked.hex()}")
    if not (access_list.allowed or access_list.banned or access_list.revoked or access_list.least_version):
        click.echo("the list is empty: it admits and excludes no machine by name", err=True)
