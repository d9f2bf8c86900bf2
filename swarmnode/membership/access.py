"""Who may take part in a run. Pure: what a peer shows, the owner's words and the time in; (permitted, reason) out.

A run is open, or only those the owner invited may take part: peers its guest list names, and peers with a pass. The
owner signs a *grant* for a delegate's key and gives grant and secret away as an invite; the delegate signs a *pass* for
each machine, bound to its peer id, which the transport has proved. So no secret ever travels, what travels is of no use
to others, and a grant is taken back for all its machines by one line in the guest list.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from google.protobuf.message import DecodeError

from swarmnode import bounds
from swarmnode.errors import RemoteFault
from swarmnode.identity import PUBLIC_KEY_BYTES, SIGNATURE_BYTES, Identity, public_key_of
from swarmnode.ids import PeerId, RunId, digest
from swarmnode.wire import access_pb2 as wire

PASS_BYTES_MAX = 512
GUEST_LIST_BYTES_MAX = 256 << 10  # guess: 4,000 peer ids; for more there are invites
GRANT_NAME_BYTES = 8
SKEW_S = 300  # guess: clocks of volunteers, for things that live for days

_GRANT = b"swarmnode/grant/v1\0"
_PASS = b"swarmnode/pass/v1\0"
_GUESTS = b"swarmnode/guests/v1\0"


@dataclass(frozen=True, slots=True)
class Guests:
    """The owner's guest list, verified."""

    sequence: int = 0
    allowed: frozenset[PeerId] = frozenset()
    banned: frozenset[PeerId] = frozenset()
    revoked: frozenset[bytes] = frozenset()


@dataclass(frozen=True, slots=True)
class Rules:
    """All that decides who may take part; frozen. `owner` is the public key the manifest is signed with."""

    run_id: RunId
    owner: bytes
    is_open: bool
    guests: Guests = Guests()


def grant_name(grant: wire.Grant) -> bytes:
    """The 8 bytes by which the owner takes `grant` back."""
    return digest("grant", grant.delegate)[:GRANT_NAME_BYTES]


def sign_grant(
    owner: Ed25519PrivateKey, run_id: RunId, delegate: Identity, expires_unix_s: int, machines_max: int = 0
) -> wire.Grant:
    """The owner's leave for whoever holds `delegate`'s key to sign passes until `expires_unix_s`."""
    grant = wire.Grant(delegate=delegate.public_key, expires_unix_s=expires_unix_s, machines_max=machines_max)
    grant.signature = owner.sign(_GRANT + _grant_digest(run_id, grant))
    return grant


def sign_pass(delegate: Identity, run_id: RunId, grant: wire.Grant, machine: PeerId, expires_unix_s: int) -> wire.Pass:
    """A pass for `machine`, at most as long as `grant` lasts."""
    expires_unix_s = min(expires_unix_s, grant.expires_unix_s)
    signature = delegate.sign(_PASS + _pass_digest(run_id, grant, machine, expires_unix_s))
    return wire.Pass(grant=grant, expires_unix_s=expires_unix_s, signature=signature)


def sign_guests(owner: Ed25519PrivateKey, run_id: RunId, guests: Guests) -> wire.SignedGuestList:
    """`guests` as nodes pass it on."""
    raw = wire.GuestList(
        run_id=run_id,
        sequence=guests.sequence,
        allowed=sorted(guests.allowed),
        banned=sorted(guests.banned),
        revoked=sorted(guests.revoked),
    ).SerializeToString(deterministic=True)
    return wire.SignedGuestList(list=raw, signature=owner.sign(_GUESTS + raw))


def open_guests(signed: wire.SignedGuestList, run_id: RunId, owner: bytes) -> Guests:
    """The guest list inside `signed`. Raises RemoteFault unless the owner of `run_id` signed it; sizes are first."""
    if len(signed.list) > GUEST_LIST_BYTES_MAX:
        raise RemoteFault(f"guest list of {len(signed.list)} bytes; at most {GUEST_LIST_BYTES_MAX}")
    if not _verifies(owner, _GUESTS + signed.list, signed.signature):
        raise RemoteFault("guest list that the run's owner did not sign")
    try:
        found = wire.GuestList.FromString(signed.list)
    except DecodeError:
        raise RemoteFault("guest list that does not parse") from None
    if found.run_id != run_id:
        raise RemoteFault(f"guest list of run {found.run_id[:16]!r}, not of {run_id[:16]!r}")
    bounds.check(found)
    return Guests(
        found.sequence,
        frozenset(map(PeerId, found.allowed)),
        frozenset(map(PeerId, found.banned)),
        frozenset(found.revoked),
    )


def permitted(
    rules: Rules,
    peer: PeerId,
    shown: wire.Pass | None,
    now_unix_s: float,
    machines: Mapping[bytes, set[PeerId]] | None = None,
) -> tuple[bool, str]:
    """Whether `peer`, which shows a pass or none, may take part now, and why (not).

    `machines` are the peers seen so far by grant; without it `machines_max` is not looked at. The cheapest checks come
    first: a signature is verified only when nothing else is wrong.
    """
    guests = rules.guests
    if peer in guests.banned:
        return False, "the owner has banned this peer"
    if rules.is_open:
        return True, "the run is open"
    if peer in guests.allowed:
        return True, "the owner's guest list names it"
    if shown is None or not shown.HasField("grant"):
        return False, "this run is by invitation, and it shows no pass: join with an invite of its organiser"
    grant = shown.grant
    if len(grant.delegate) != PUBLIC_KEY_BYTES or len(shown.signature) != SIGNATURE_BYTES:
        return False, "its pass is malformed"
    name = grant_name(grant)
    if name in guests.revoked:
        return False, "its invite was taken back by the owner: ask for a new one"
    if min(shown.expires_unix_s, grant.expires_unix_s) + SKEW_S <= now_unix_s:
        return False, "its invite has expired: ask the organiser for a new one"
    if machines is not None and grant.machines_max:
        seen = machines.get(name, set())
        if peer not in seen and len(seen) >= grant.machines_max:
            return False, f"its invite is for {grant.machines_max} machines, and as many are here"
    if not _grant_verifies(rules.owner, rules.run_id, grant.SerializeToString(deterministic=True)):
        return False, "its invite is not signed by the owner of this run"
    if not _pass_verifies(rules.run_id, peer, shown.SerializeToString(deterministic=True)):
        return False, "its pass is forged, or another machine's"
    return True, f"it has a pass of invite {name.hex()}"


@functools.lru_cache(maxsize=1024)
def _grant_verifies(owner: bytes, run_id: RunId, raw: bytes) -> bool:
    grant = wire.Grant.FromString(raw)
    return _verifies(owner, _GRANT + _grant_digest(run_id, grant), grant.signature)


@functools.lru_cache(maxsize=4096)
def _pass_verifies(run_id: RunId, peer: PeerId, raw: bytes) -> bool:
    shown = wire.Pass.FromString(raw)
    message = _PASS + _pass_digest(run_id, shown.grant, peer, shown.expires_unix_s)
    return _verifies(shown.grant.delegate, message, shown.signature)


def _grant_digest(run_id: RunId, grant: wire.Grant) -> bytes:
    return digest(run_id, grant.delegate, grant.expires_unix_s, grant.machines_max)


def _pass_digest(run_id: RunId, grant: wire.Grant, machine: PeerId, expires_unix_s: int) -> bytes:
    return digest(run_id, grant.delegate, public_key_of(machine), expires_unix_s)


def _verifies(key: bytes, message: bytes, signature: bytes) -> bool:
    try:
        Ed25519PublicKey.from_public_bytes(key).verify(signature, message)
    except (InvalidSignature, ValueError):
        return False
    return True
