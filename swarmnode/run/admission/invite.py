"""An invite: one line of text with all a machine needs to join a run. Compact, checksummed, URL-safe, versioned.

    swarm1.<base64url of (serialised Invite, first 4 bytes of SHA-256 of it)>

It holds the run's id, its owner's key and bootstrap addresses. For a restricted run it also holds a grant with its
secret, or a pass for one machine. White space inside, as mail programs insert it, is ignored.
"""

from __future__ import annotations

import base64
import ipaddress
import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from swarmnode.base import bounds
from swarmnode.base.errors import RemoteFault, UsageError, VersionMismatch
from swarmnode.base.identity import PUBLIC_KEY_BYTES, SEED_BYTES, peer_id_of, public_key_of
from swarmnode.base.ids import PeerId, RunId, digest
from swarmnode.base.wire import access_pb2 as wire

PREFIX = "swarm1."
INVITE_CHARACTERS_MAX = 4096
MEETINGS_MAX = 8
ADDRESSES_MAX = 8  # of one meeting point
HOST_CHARACTERS_MAX = 253  # RFC 1035: of a host name
RUN_ID_BYTES = 32

_CHECK_BYTES = 4
_LIKE_ONE = re.compile(r"swarm(\d+)\.")
_TEXT = re.compile(r"[A-Za-z0-9_-]*\Z")
_HOST = re.compile(r"[A-Za-z0-9._-]{1,253}\Z")
_FAMILIES = {4: "ip4", 6: "ip6", 1: "dns", 2: "dns4", 3: "dns6"}
_UDP = 0x80  # added to the family's number where the address is one of UDP
_NUMBERS = {family: number for number, family in _FAMILIES.items()}


@dataclass(frozen=True, slots=True)
class Invite:
    """`bootstraps` are multiaddrs that end in /p2p/PEER_ID. It has at most one of `grant` (with its `secret`) and
    `machine_pass` (for `machine`); an open run needs neither. `amendment` and `head`: the owner's last amendment,
    and its digest."""

    run_id: RunId
    owner: bytes
    bootstraps: tuple[str, ...]
    grant: wire.Grant | None = None
    secret: bytes = field(default=b"", repr=False)
    machine_pass: wire.Pass | None = None
    machine: PeerId | None = None
    amendment: int = 0
    head: bytes = b""

    @property
    def is_secret(self) -> bool:
        """Whether anybody who reads this invite could use it."""
        return bool(self.secret)


def looks_like_invite(text: str) -> bool:
    """Whether `text` is meant as an invite, of this version or another."""
    return _LIKE_ONE.match("".join(text.split())) is not None


def encode(invite: Invite) -> str:
    """`invite` as one line. Raises UsageError for addresses that an invite cannot hold."""
    message = wire.Invite(run_id=bytes.fromhex(invite.run_id), owner=invite.owner)
    meetings: dict[bytes, list[bytes]] = {}
    for text in invite.bootstraps:
        key, address = _pack(text)
        addresses = meetings.setdefault(key, [])
        if address not in addresses and len(addresses) < ADDRESSES_MAX:
            addresses.append(address)
    for key, addresses in list(meetings.items())[:MEETINGS_MAX]:
        message.meetings.add(peer=key, addresses=addresses)
    if invite.grant is not None:
        message.grant.CopyFrom(invite.grant)
        message.secret = invite.secret
    if invite.machine_pass is not None and invite.machine is not None:
        getattr(message, "pass").CopyFrom(invite.machine_pass)
        message.machine = public_key_of(invite.machine)
    message.amendment = invite.amendment
    message.head = invite.head
    raw = message.SerializeToString(deterministic=True)
    return PREFIX + base64.urlsafe_b64encode(raw + _check(raw)).rstrip(b"=").decode()


def decode(text: str) -> Invite:
    """The invite in `text`. Raises UsageError that describes the damage, VersionMismatch for a newer kind."""
    if len(text) > 2 * INVITE_CHARACTERS_MAX:
        raise UsageError(f"an invite has at most {INVITE_CHARACTERS_MAX} characters, this has {len(text)}")
    text = "".join(text.removeprefix("\ufeff").split())  # a byte order mark, from a pipe
    kind = _LIKE_ONE.match(text)
    if kind is None:
        raise UsageError(f"not an invite: one begins with {PREFIX!r}, as `swarmnode invite` prints it")
    if kind.group(0) != PREFIX:
        raise VersionMismatch(
            f"this invite is of kind {kind.group(1)[:8]}; this swarmnode reads kind 1: install a newer swarmnode"
        )
    body = text[len(PREFIX) :]
    if len(body) > INVITE_CHARACTERS_MAX:
        raise UsageError(f"an invite has at most {INVITE_CHARACTERS_MAX} characters, this has {len(text)}")
    if not _TEXT.match(body):
        wrong = next(c for c in body if not _TEXT.match(c))
        raise UsageError(
            f"damaged invite: {wrong!r} (character {text.index(wrong) + 1}) is not allowed in an invite; copy it again"
        )
    damaged = UsageError(f"damaged invite: {len(text)} characters with a wrong checksum; copy the whole invite again")
    try:
        packed = base64.urlsafe_b64decode(body + "=" * (-len(body) % 4))
    except ValueError:
        raise damaged from None
    raw = packed[:-_CHECK_BYTES]
    check = packed[-_CHECK_BYTES:]
    if not raw or check != _check(raw) or base64.urlsafe_b64encode(packed).rstrip(b"=").decode() != body:
        raise damaged
    try:
        return _open(bounds.parse(wire.Invite, raw, "an invite"))
    except (RemoteFault, ValueError) as error:
        raise UsageError(f"this invite is invalid ({error}): ask for a new one") from None


def _open(message: wire.Invite) -> Invite:
    """The parsed invite. Raises ValueError or RemoteFault with the reason."""
    if len(message.run_id) != RUN_ID_BYTES or len(message.owner) != PUBLIC_KEY_BYTES:
        raise ValueError("no run id and owner's key")
    if not 0 < len(message.meetings) <= MEETINGS_MAX:
        raise ValueError(f"{len(message.meetings)} meeting points; 1 to {MEETINGS_MAX}")
    bootstraps = tuple(address for meeting in message.meetings for address in _addresses(meeting))
    has_pass = message.HasField("pass")
    if message.HasField("grant") != (len(message.secret) == SEED_BYTES) or (has_pass and message.secret):
        raise ValueError("a grant without its secret, or the reverse")
    if has_pass != (len(message.machine) == PUBLIC_KEY_BYTES):
        raise ValueError("a pass without its machine, or the reverse")
    return Invite(
        RunId(message.run_id.hex()),
        message.owner,
        bootstraps,
        message.grant if message.HasField("grant") else None,
        message.secret,
        getattr(message, "pass") if has_pass else None,
        peer_id_of(message.machine) if has_pass else None,
        message.amendment,
        message.head,
    )


def _addresses(meeting: wire.Meeting) -> Sequence[str]:
    if len(meeting.peer) != PUBLIC_KEY_BYTES or not 0 < len(meeting.addresses) <= ADDRESSES_MAX:
        raise ValueError("a meeting point without key or addresses")
    return [f"{_unpack(raw)}/p2p/{peer_id_of(meeting.peer)}" for raw in meeting.addresses]


def _pack(text: str) -> tuple[bytes, bytes]:
    """(public key, packed address) of a multiaddr that ends in /p2p/PEER_ID. Raises UsageError."""
    address, _, peer = text.partition("/p2p/")
    parts = address.split("/")
    known = len(parts) == 5 and not parts[0] and parts[1] in _NUMBERS and parts[3] in ("tcp", "udp")
    if not known or not parts[4].isdecimal():
        raise UsageError(f"{text[:100]!r} cannot be put into an invite: use /ip4/ADDRESS/tcp/PORT/p2p/PEER_ID")
    try:
        host = parts[2].encode() if parts[1].startswith("dns") else ipaddress.ip_address(parts[2]).packed
        kind = _NUMBERS[parts[1]] | (_UDP if parts[3] == "udp" else 0)
        packed = bytes([kind]) + int(parts[4]).to_bytes(2, "big") + host
        if _unpack(packed) != address:
            raise ValueError(f"reads back as {_unpack(packed)}")
        return public_key_of(PeerId(peer)), packed
    except (ValueError, OverflowError, RemoteFault) as error:
        raise UsageError(f"{text[:100]!r} cannot be put into an invite: {error}") from None


def _unpack(raw: bytes) -> str:
    family = _FAMILIES.get(raw[0] & ~_UDP) if raw else None
    port = int.from_bytes(raw[1:3], "big")
    host = raw[3:]
    match family, len(host):
        case "ip4", 4:
            name = str(ipaddress.IPv4Address(host))
        case "ip6", 16:
            name = str(ipaddress.IPv6Address(host))
        case "dns" | "dns4" | "dns6", length if 0 < length <= HOST_CHARACTERS_MAX:
            name = host.decode("ascii", "replace")
            if not _HOST.match(name):
                raise ValueError(f"{name[:40]!r} is not a host name")
        case _:
            raise ValueError("an address of an unknown kind")
    if port == 0:
        raise ValueError("port 0 cannot be reached")
    return f"/{family}/{name}/{'udp' if raw[0] & _UDP else 'tcp'}/{port}"


def _check(raw: bytes) -> bytes:
    return digest("invite", raw)[:_CHECK_BYTES]
