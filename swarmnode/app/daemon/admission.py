"""Admission control of this process, made from the run's manifest, the given invite, and the owner's files if
present."""

from __future__ import annotations

import functools
from pathlib import Path

from swarmnode.app.daemon.options import NodeOptions
from swarmnode.base import bounds
from swarmnode.base.errors import ManifestError, NotPermitted, RemoteFault
from swarmnode.base.identity import Identity
from swarmnode.base.ids import PeerId, RunId
from swarmnode.base.ports import Clock
from swarmnode.base.wire import access_pb2
from swarmnode.base.wire.record_pb2 import SignedManifest
from swarmnode.run import owner as owner_key
from swarmnode.run.admission.access import ACCESS_LIST_BYTES_MAX, AccessRules, sign_grant, sign_pass
from swarmnode.run.admission.admission import Admission
from swarmnode.run.admission.amendment import Amendments
from swarmnode.run.admission.invite import Invite
from swarmnode.run.manifest import Manifest, read_signed

ACCESS_FILE = "access.signed"
# Validity of a pass that the owner's own machines sign at each start: that of a web certificate at most (CA/Browser
# Forum, Baseline Requirements 6.3.2, since 2020).
OWN_PASS_S = 398 * 86_400


def make_admission(
    signed: SignedManifest,
    manifest: Manifest,
    run_id: RunId,
    options: NodeOptions,
    identity: Identity,
    clock: Clock,
) -> Admission:
    """The admission control. Raises NotPermitted if this node itself may not take part, ManifestError for amendments
    that no owner signed."""
    try:
        amendments = Amendments.of(signed, manifest, run_id)
    except RemoteFault as fault:
        raise ManifestError(f"the manifest of run {run_id[:16]}: {fault}") from None
    is_open = amendments.newest.access.mode == "open"
    _check_head(options.invite, amendments)
    rules = AccessRules(run_id, signed.owner, is_open=is_open, amended=amendments.keys)
    mine = None if rules.is_open else own_pass(options, run_id, amendments, identity, clock)
    admission = Admission(rules, clock, mine, amendments)
    admission.renew = functools.partial(own_pass, options, run_id, amendments, identity, clock)
    if (here := read_access_list(options)) is not None:
        admission.learn(here)
    return admission


def own_pass(
    options: NodeOptions, run_id: RunId, amendments: Amendments, identity: Identity, clock: Clock
) -> access_pb2.Pass | None:
    """This node's pass: from the invite, or signed now if the owner's key is here. None without either."""
    if options.invite is not None:
        return pass_of_invite(options.invite, identity.peer_id)
    key_path = Path(options.run).parent / owner_key.FILE_NAME
    if not key_path.is_file():
        return None
    key = owner_key.load_owner(key_path)
    if owner_key.public_bytes(key) not in amendments.owners:
        return None
    until = int(clock.unix_s()) + OWN_PASS_S
    grant = sign_grant(key, run_id, identity, until, amendment=len(amendments.chain))
    return sign_pass(identity, run_id, grant, identity.peer_id, until)


def _check_head(invite: Invite | None, amendments: Amendments) -> None:
    """Raises NotPermitted where the owner's amendments, as meeting points gave them, are not those of `invite`: others
    with a stolen key made them, or some are kept back."""
    if invite is None or not invite.amendment:
        return
    known = invite.amendment <= len(amendments.chain)
    recovered = any(one.recovery and one.serial <= invite.amendment for one in amendments.chain)
    if not recovered and not (known and amendments.digest_of(invite.amendment) == invite.head):
        raise NotPermitted(
            f"the meeting points of this invite do not know the owner's amendment {invite.amendment}, or have another "
            "in its place: ask the organiser for a new invite"
        )


def pass_of_invite(invite: Invite, me: PeerId) -> access_pb2.Pass | None:
    """The pass in `invite` for this machine. Raises NotPermitted if it is another machine's."""
    if invite.machine_pass is not None:
        if invite.machine != me:
            raise NotPermitted(
                f"this invite is for machine {invite.machine}, this one is {me}: ask for one with --machine {me}"
            )
        return invite.machine_pass
    if invite.grant is None:
        return None
    delegate = Identity.of_seed(invite.secret)
    return sign_pass(delegate, invite.run_id, invite.grant, me, invite.grant.expires_unix_s)


def read_access_list(options: NodeOptions) -> access_pb2.SignedAccessList | None:
    """The owner's access list beside the manifest, where the organiser keeps it, and the amendments in the manifest's
    file; None if there is no such file. Raises ManifestError."""
    run = Path(options.run)
    if not run.is_file():
        return None
    signed = access_pb2.SignedAccessList(amendments=read_signed(run)[0].amendments)
    path = run.parent / ACCESS_FILE
    if not path.is_file():
        return signed
    with path.open("rb") as file:
        raw = file.read(ACCESS_LIST_BYTES_MAX + 1)
    try:
        if len(raw) > ACCESS_LIST_BYTES_MAX:
            raise RemoteFault(f"{path} is longer than {ACCESS_LIST_BYTES_MAX} bytes")
        signed.MergeFrom(bounds.parse(access_pb2.SignedAccessList, raw, "access list"))
        return signed
    except RemoteFault:
        raise ManifestError(f"{path} is not a access list: `swarmnode access` makes one") from None
