"""Multiaddrs as users write them: `/ip4/1.2.3.4/tcp/4001`, followed by `/p2p/12D3KooW...` for a bootstrap."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import ipaddress
import re
import socket
from collections.abc import Sequence
from dataclasses import dataclass

from swarmnode.base.errors import RemoteFault, UsageError, cause_of
from swarmnode.base.identity import public_key_of
from swarmnode.base.ids import PeerId

_NAME = re.compile(r"(?=.{1,253}\Z)[A-Za-z0-9_]([A-Za-z0-9_-]{0,62})(\.[A-Za-z0-9_-]{1,63})*\.?\Z")
_NUMBER = re.compile(r"(.*\.)?(0[xX][0-9A-Fa-f]*|[0-9]+)\.?\Z")  # a name that resolvers read as an IPv4 address
# Networks of the metadata services of clouds, which hand out a machine's keys. No node runs there, and a forged record
# could make us call one. (Link-local: Amazon EC2 and ECS, Google, Azure and most others; Azure's WireServer; Oracle;
# Alibaba; Amazon's, Google's, Oracle's and Scaleway's over IPv6.)
METADATA = tuple(
    ipaddress.ip_network(one)
    for one in [
        "169.254.0.0/16",
        "168.63.129.16",
        "192.0.0.0/24",
        "100.100.100.0/24",
        "fe80::/10",
        "fd00:ec2::/32",
        "fd20:ce::/32",
        "fd00:c1::/64",
        "fd00:42::/64",
    ]
)
_NAT64 = tuple(map(ipaddress.ip_network, ("64:ff9b::/96", "64:ff9b:1::/48", "::/96", "::ffff:0:0:0/96")))
Address = ipaddress.IPv4Address | ipaddress.IPv6Address
PROBE_TIMEOUT_S = 5.0  # libp2p's own limit for one address
PROTOCOLS = ("tcp", "udp")
_EXAMPLE = "/ip4/203.0.113.7/tcp/4001"


@dataclass(frozen=True, slots=True)
class Endpoint:
    """An address. `family` is ip4, ip6, dns, dns4 or dns6; `protocol` tcp or udp."""

    family: str
    host: str
    port: int
    protocol: str = "tcp"

    def __str__(self) -> str:
        return f"/{self.family}/{self.host}/{self.protocol}/{self.port}"


def plain(address: Address) -> Address:
    """The IPv4 address inside an IPv6 one that embeds it (mapped, compatible, NAT64, 6to4, Teredo); else `address`."""
    if isinstance(address, ipaddress.IPv4Address) or address in (ipaddress.IPv6Address(0), ipaddress.IPv6Address(1)):
        return address
    if any(address in network for network in _NAT64):
        return ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
    return address.ipv4_mapped or address.sixtofour or (address.teredo or (address, address))[1]


def is_metadata(address: Address) -> bool:
    """Whether a cloud's metadata service may answer at `address`, in any of its forms."""
    return any(one in network for one in (address, plain(address)) for network in METADATA)


def is_public(address: Address) -> bool:
    """True if `address` is on the public internet: not loopback, private, link-local (cloud metadata and keys), shared,
    multicast or reserved, nor an IPv6 address that embeds such an IPv4 one."""
    if isinstance(address, ipaddress.IPv6Address) and (address.sixtofour or address.teredo or address.is_site_local):
        return False
    if (inner := plain(address)) is not address:
        return is_public(inner)
    if is_metadata(address):
        return False
    return address.is_global and not (address.is_multicast or address.is_reserved or address.is_unspecified)


def parse_endpoint(text: str) -> Endpoint:
    """Parse `/ip4/HOST/tcp/PORT` or `/ip4/HOST/udp/PORT`. Raises UsageError that names the wrong part."""

    def wrong(what: str) -> UsageError:
        return UsageError(f"address {text[:128]!r}: {what}; write it like {_EXAMPLE}")

    parts = text.split("/")
    if len(parts) != 5 or parts[0] or parts[3] not in PROTOCOLS:
        raise wrong("not a TCP or UDP multiaddr")
    family = parts[1]
    host = parts[2]
    port = parts[4]
    try:
        match family:
            case "ip4":
                ipaddress.IPv4Address(host)
            case "ip6":
                ipaddress.IPv6Address(host)
            case "dns" | "dns4" | "dns6":
                if not _NAME.match(host) or _NUMBER.match(host):
                    raise wrong(f"{host[:64]!r} is not a host name")
            case _:
                raise wrong(f"{family[:16]!r} is none of ip4, ip6, dns, dns4, dns6")
    except ipaddress.AddressValueError:
        raise wrong(f"{host[:64]!r} is not an {family} address") from None
    if not (port.isascii() and port.isdigit() and len(port) <= 5 and int(port) <= 65535):
        raise wrong(f"port {port[:16]!r} is not a number from 0 to 65535")
    return Endpoint(family, host, int(port), parts[3])


def parse_peer_endpoint(text: str, *, names: bool = True) -> Endpoint:
    """`parse_endpoint` of an address given by others, with `names` also of a host name. Also raises UsageError for a
    cloud's metadata service."""
    endpoint = parse_endpoint(text)
    if endpoint.family in ("ip4", "ip6"):
        if is_metadata(ipaddress.ip_address(endpoint.host)):
            raise UsageError(f"address {text[:128]!r}: this is a cloud's metadata service, not a peer")
    elif not names:
        raise UsageError(f"address {text[:128]!r}: only bootstraps have names; give an IP address")
    return endpoint


def is_circuit(address: str) -> bool:
    """Whether `address` leads through a relay: /ip4/.../tcp/.../p2p/RELAY/p2p-circuit."""
    return address.endswith("/p2p-circuit")


def ip_of(address: str) -> str:
    """The IP address at the start of multiaddr `address`; "" for a name or a relayed address."""
    parts = address.split("/")
    return parts[2] if "/p2p-circuit" not in address and len(parts) > 2 and parts[1] in ("ip4", "ip6") else ""


def dialable_of(addresses: Sequence[str], *, names: bool = False) -> list[str]:
    """The valid ones among `addresses`, in the form of `dialable`."""
    dialables = []
    for address in addresses:
        with contextlib.suppress(UsageError):
            dialables.append(dialable(address, names=names))
    return dialables


def dialable(text: str, *, names: bool = False) -> str:
    """`text`, a direct or relayed address, without the peer's own /p2p/ID at its end. `names`: it may name a host, as
    bootstraps do; a relay always may.

    Raises UsageError.
    """
    address, circuit, _ = text.strip().partition("/p2p-circuit")
    if not circuit:
        return str(parse_peer_endpoint(address.partition("/p2p/")[0], names=names))
    relay, endpoint = parse_bootstrap(address)
    return f"{endpoint}/p2p/{relay}/p2p-circuit"


async def numeric(addresses: Sequence[str]) -> list[str]:
    """`addresses` with the IP addresses of their host names, looked up now; without those of metadata services. A relay
    keeps its name, which p2pd looks up."""
    numeric = dict[str, None]()
    for address in addresses:
        if is_circuit(address) or parse_endpoint(address).family in ("ip4", "ip6"):
            numeric[address] = None
            continue
        named = parse_endpoint(address)
        with contextlib.suppress(OSError, UnicodeError, UsageError):
            family = {"dns4": socket.AF_INET, "dns6": socket.AF_INET6}.get(named.family, socket.AF_UNSPEC)
            looked = asyncio.get_running_loop().getaddrinfo(
                named.host, named.port, family=family, type=socket.SOCK_STREAM
            )
            for kind, *_, where in await looked:
                version = "ip4" if kind == socket.AF_INET else "ip6"
                numeric[str(parse_peer_endpoint(f"/{version}/{where[0]}/{named.protocol}/{named.port}"))] = None
    return list(numeric)


def parse_bootstrap(text: str) -> tuple[PeerId, str]:
    """(peer, address) of `/ip4/1.2.3.4/tcp/4001/p2p/12D3KooW...`. Raises UsageError."""
    address, separator, peer = text.strip().rpartition("/p2p/")
    if not separator:
        raise UsageError(f"meeting point {text[:128]!r} names no peer; write it like {_EXAMPLE}/p2p/12D3KooW...")
    if is_circuit(address):
        parsed = dialable(address)
    else:
        endpoint = parse_peer_endpoint(address)
        if endpoint.port == 0:
            raise UsageError(f"meeting point {text[:128]!r}: port 0 cannot be reached; give the port it listens on")
        parsed = str(endpoint)
    try:
        public_key_of(PeerId(peer))
    except RemoteFault as fault:
        raise UsageError(f"meeting point {text[:128]!r}: {fault}") from None
    return PeerId(peer), parsed


def parse_bootstraps(texts: Sequence[str]) -> list[tuple[PeerId, list[str]]]:
    """Addresses grouped by peer, in the order first named. Raises UsageError."""
    peers: dict[PeerId, list[str]] = {}
    for text in texts:
        peer, address = parse_bootstrap(text)
        addresses = peers.setdefault(peer, [])
        if address not in addresses:
            addresses.append(address)
    return list(peers.items())


def check_listenable(endpoint: Endpoint, option: str = "--listen") -> None:
    """Raises UsageError, which names `option`, if the port is taken or the address is not one of this machine.

    p2pd listens with SO_REUSEPORT: two daemons on one port both start and each gets half of the calls (measured). So
    the port is first probed without it.
    """
    wrong = f"{option}: cannot listen on {endpoint}"
    if endpoint.family not in ("ip4", "ip6"):
        raise UsageError(f"{wrong}: give an IP address of this machine, or 0.0.0.0")
    family = socket.AF_INET if endpoint.family == "ip4" else socket.AF_INET6
    tcp = endpoint.protocol == "tcp"
    with socket.socket(family, socket.SOCK_STREAM if tcp else socket.SOCK_DGRAM) as probe:
        try:
            if tcp:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((endpoint.host, endpoint.port))
            if tcp:
                probe.listen(1)
        except PermissionError:
            raise UsageError(f"{wrong}: ports below 1024 need privileges; choose another") from None
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise UsageError(f"{wrong}: the port is in use; give another, or 0 for any free one") from None
            raise UsageError(f"{wrong}: {cause_of(error)}; give an address of this machine") from None
