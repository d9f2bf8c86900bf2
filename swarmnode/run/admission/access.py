"""Decide whether a peer may take part in a run. Pure: takes the peer's pass, the owner's rules and the time; returns
(permitted, reason).

A run is open, or restricted to invited peers: those on its access list and those with a pass. The owner signs a *grant*
for a delegate's key and hands out grant and secret as an invite. The delegate signs a *pass* for each machine, bound to
its peer id, which the transport has verified. So no secret is ever sent, an intercepted pass is useless to others, and
one line in the access list revokes a grant for all its machines.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from swarmnode.base import bounds
from swarmnode.base.bounds.table import PEER_MAX
from swarmnode.base.errors import RemoteFault
from swarmnode.base.identity import PUBLIC_KEY_BYTES, SIGNATURE_BYTES, Identity, public_key_of, signed_by
from swarmnode.base.ids import PeerId, RunId, digest
from swarmnode.base.remembered import REMEMBERED_MAX
from swarmnode.base.wire import access_pb2 as wire

PASS_BYTES_MAX = 512
ACCESS_LIST_BYTES_MAX = REMEMBERED_MAX * PEER_MAX  # as many peers as a node remembers; use invites for more
GRANT_NAME_BYTES = 8
SEQUENCE_STEP_MAX = 1 << 16  # guess: lists that an owner makes by hand while a node does not hear of them
UPDATE = "pip install --upgrade WHEEL, the file or URL that the run's organiser gives"
_VERSION = re.compile(r"\d+(\.\d+)*")
SKEW_S = 300  # clock error of volunteers: RFC 4120, section 8.2, lets Kerberos' clocks differ by five minutes

_GRANT = b"swarmnode/grant/v1\0"
_PASS = b"swarmnode/pass/v1\0"
_ACCESS_LIST = b"swarmnode/guests/v1\0"
_WARRANT = b"swarmnode/archive/v1\0"


@dataclass(frozen=True, slots=True)
class AccessList:
    """The owner's access list, verified."""

    sequence: int = 0
    allowed: frozenset[PeerId] = frozenset()
    banned: frozenset[PeerId] = frozenset()
    revoked: frozenset[bytes] = frozenset()
    least_version: str = ""  # of this program; empty: any
    amendment: int = 0  # the last one when it was signed


@dataclass(frozen=True, slots=True)
class OwnerKeys:
    """The keys that sign for a run. `after`: those in force after so many amendments, from none on. `living`: marks of
    what earlier keys signed that lives on."""

    after: tuple[tuple[bytes, ...], ...]
    living: frozenset[bytes] = frozenset()

    @property
    def now(self) -> tuple[bytes, ...]:
        """The keys in force, as far as the chain is known here."""
        return self.after[-1]

    def of(self, amendment: int, mark: bytes = b"") -> tuple[bytes, ...]:
        """The keys that can have signed what names `amendment` as the last one: owners then, and owners still unless
        its `mark` lives on. None for an amendment that is not known here."""
        if amendment >= len(self.after):
            return ()
        return tuple(key for key in self.after[amendment] if key in self.now or mark in self.living)


@dataclass(frozen=True, slots=True)
class AccessRules:
    """All rules on who may take part; frozen. `owner` is the public key that signed the manifest."""

    run_id: RunId
    owner: bytes
    is_open: bool
    access_list: AccessList = AccessList()
    amended: OwnerKeys | None = None  # None: no amendments

    @property
    def keys(self) -> OwnerKeys:
        """The keys that sign for the run."""
        return self.amended or OwnerKeys(((self.owner,),))


def grant_name(grant: wire.Grant) -> bytes:
    """The 8 bytes that identify `grant` in revocations."""
    return digest("grant", grant.delegate)[:GRANT_NAME_BYTES]


def mark_of(signed: wire.Grant | wire.Warrant) -> bytes:
    """The 8 bytes that name one grant or warrant, as it was signed, in an amendment that lets it live on."""
    return digest("mark", signed.SerializeToString(deterministic=True))[:GRANT_NAME_BYTES]


def sign_grant(
    owner: Ed25519PrivateKey,
    run_id: RunId,
    delegate: Identity,
    expires_unix_s: int,
    machines_max: int = 0,
    amendment: int = 0,
) -> wire.Grant:
    """The owner's permission for the holder of `delegate`'s key to sign passes until `expires_unix_s`. `amendment`: the
    last one as it is signed."""
    grant = wire.Grant(delegate=delegate.public_key, expires_unix_s=expires_unix_s, machines_max=machines_max)
    grant.amendment = amendment
    grant.signature = owner.sign(_grant_text(run_id, grant))
    return grant


def sign_pass(delegate: Identity, run_id: RunId, grant: wire.Grant, machine: PeerId, expires_unix_s: int) -> wire.Pass:
    """A pass for `machine`, which expires with `grant` at the latest."""
    expires_unix_s = min(expires_unix_s, grant.expires_unix_s)
    signature = delegate.sign(_pass_text(run_id, grant, machine, expires_unix_s))
    return wire.Pass(grant=grant, expires_unix_s=expires_unix_s, signature=signature)


def sign_access_list(owner: Ed25519PrivateKey, run_id: RunId, access_list: AccessList) -> wire.SignedAccessList:
    """`access_list`, signed for distribution among nodes."""
    raw = wire.AccessList(
        run_id=run_id,
        sequence=access_list.sequence,
        allowed=sorted(access_list.allowed),
        banned=sorted(access_list.banned),
        revoked=sorted(access_list.revoked),
        least_version=access_list.least_version,
        amendment=access_list.amendment,
    ).SerializeToString(deterministic=True)
    return wire.SignedAccessList(list=raw, signature=owner.sign(_ACCESS_LIST + raw))


def open_access_list(signed: wire.SignedAccessList, run_id: RunId, *owners: bytes) -> AccessList:
    """The access list inside `signed`. Raises RemoteFault unless one of the `owners` of `run_id` signed it. The size
    is checked first."""
    if len(signed.list) > ACCESS_LIST_BYTES_MAX:
        raise RemoteFault(f"access list of {len(signed.list)} bytes; at most {ACCESS_LIST_BYTES_MAX}")
    if not any(signed_by(owner, _ACCESS_LIST + signed.list, signed.signature) for owner in owners):
        raise RemoteFault("access list that the run's owner did not sign")
    access = bounds.parse(wire.AccessList, signed.list, "access list")
    if access.run_id != run_id:
        raise RemoteFault(f"access list of run {access.run_id[:16]!r}, not of {run_id[:16]!r}")
    bounds.check(access)
    return AccessList(
        access.sequence,
        frozenset(map(PeerId, access.allowed)),
        frozenset(map(PeerId, access.banned)),
        frozenset(access.revoked),
        access.least_version,
        access.amendment,
    )


def too_old(least: str, version: str) -> str:
    """The answer to a machine of `version` where the owner admits `least` or newer; "" where it is admitted."""
    if not least or _numbers(version) >= _numbers(least):
        return ""
    return f"the owner admits swarmnode {least} or newer, and it has {version[:40]}: update it ({UPDATE})"


def _numbers(version: str) -> tuple[int, ...]:
    """`0.10.1.dev3` as (0, 10, 1): what comes behind the numbers does not count."""
    match = _VERSION.match(version)
    return tuple(int(number[:9]) for number in match.group().split(".")) if match else ()


def permitted(
    rules: AccessRules,
    peer: PeerId,
    shown: wire.Pass | None,
    now_unix_s: float,
    machines: Mapping[bytes, set[PeerId]] | None = None,
) -> tuple[bool, str]:
    """Whether `peer`, with the pass `shown` or none, may take part now, and the reason.

    `machines` are the peers seen so far, by grant; without it `machines_max` is not checked. Cheap checks come first: a
    signature is verified last.
    """
    access_list = rules.access_list
    if peer in access_list.banned:
        return False, "the owner has banned this peer"
    if rules.is_open:
        return True, "the run is open"
    if peer in access_list.allowed:
        return True, "the owner's access list names it"
    if shown is None or not shown.HasField("grant"):
        return False, "this run is by invitation, and it shows no pass: join with an invite of its organiser"
    grant = shown.grant
    if len(grant.delegate) != PUBLIC_KEY_BYTES or len(shown.signature) != SIGNATURE_BYTES:
        return False, "its pass is malformed"
    name = grant_name(grant)
    if name in access_list.revoked:
        return False, "its invite was taken back by the owner: ask for a new one"
    if min(shown.expires_unix_s, grant.expires_unix_s) + SKEW_S <= now_unix_s:
        return False, "its invite has expired: ask the organiser for a new one"
    if machines is not None and grant.machines_max:
        seen = machines.get(name, set())
        if peer not in seen and len(seen) >= grant.machines_max:
            return False, f"its invite is for {grant.machines_max} machines, and that many have joined"
    if why := _grant_fault(rules, grant):
        return False, why
    if not _verifies(grant.delegate, _pass_text(rules.run_id, grant, peer, shown.expires_unix_s), shown.signature):
        return False, "its pass is forged, or another machine's"
    return True, f"it has a pass of invite {name.hex()}"


def _grant_fault(rules: AccessRules, grant: wire.Grant) -> str:
    """The reason why no key that may sign for the run now signed `grant`; "" if one did."""
    text = _grant_text(rules.run_id, grant)
    keys = rules.keys
    if grant.amendment >= len(keys.after):
        return f"its invite is of amendment {grant.amendment}, which has not come here yet: try again in a minute"
    mark = mark_of(grant) if keys.living else b""
    if any(_verifies(owner, text, grant.signature) for owner in keys.of(grant.amendment, mark)):
        return ""
    if any(_verifies(owner, text, grant.signature) for owner in keys.after[grant.amendment]):
        return "its invite is signed with a key that the owner replaced: ask the organiser for a new one"
    return "its invite is not signed by the owner of this run"


@functools.lru_cache(maxsize=4096)
def _verifies(key: bytes, message: bytes, signature: bytes) -> bool:
    return signed_by(key, message, signature)


def _grant_text(run_id: RunId, grant: wire.Grant) -> bytes:
    named = (grant.amendment,) if grant.amendment else ()  # grants of the first chain are as they were
    return _GRANT + digest(run_id, grant.delegate, grant.expires_unix_s, grant.machines_max, *named)


def _pass_text(run_id: RunId, grant: wire.Grant, machine: PeerId, expires_unix_s: int) -> bytes:
    return _PASS + digest(run_id, grant.delegate, public_key_of(machine), expires_unix_s)


def _warrant_text(run_id: RunId, machine: PeerId, warrant: wire.Warrant) -> bytes:
    named = (warrant.amendment,) if warrant.amendment else ()
    return _WARRANT + digest(run_id, public_key_of(machine), warrant.expires_unix_s, *named)


def sign_warrant(
    owner: Ed25519PrivateKey, run_id: RunId, machine: PeerId, expires_unix_s: int, amendment: int = 0
) -> wire.Warrant:
    """The owner's leave to archive a run: `machine` may copy the slow weights of every stage without taking part.

    It gives access to less than what every member of the run can copy anyway (keep/transfer/donor.py), so one that is
    lost costs each node a bounded share of its line until it expires or the owner bans the machine."""
    warrant = wire.Warrant(expires_unix_s=expires_unix_s, amendment=amendment)
    warrant.signature = owner.sign(_warrant_text(run_id, machine, warrant))
    return warrant


def check_warrant(
    shown: wire.Warrant, *, owners: Sequence[bytes], run_id: RunId, machine: PeerId, now_unix_s: float
) -> tuple[bool, str]:
    """(whether `machine` may archive run `run_id` now, why or why not). `owners`: the keys that can have signed it
    (OwnerKeys.of). The signature is checked last."""
    if len(shown.signature) != SIGNATURE_BYTES:
        return False, "its warrant is malformed"
    if shown.expires_unix_s <= now_unix_s:
        return False, "its warrant has expired: the owner signs a new one"
    text = _warrant_text(run_id, machine, shown)
    if not any(_verifies(owner, text, shown.signature) for owner in owners):
        return False, "its warrant is not signed by the owner of this run, or is another machine's"
    return True, "the owner's warrant"
