"""Find members of a run in the local network without a bootstrap, by periodic datagrams to a multicast group.

A beacon carries run, peer and TCP port; the address is the datagram's own. It is only a hint: a dialled peer proves its
identity by its key, and a forged beacon costs a few failed dials. TTL 1 keeps beacons inside the network.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import socket
import struct
from collections.abc import Callable, Sequence

from swarmnode.errors import RemoteFault
from swarmnode.identity import public_key_of
from swarmnode.ids import PeerId, RunId
from swarmnode.transport.address import is_circuit, parse_endpoint
from swarmnode.transport.contact import ALONE_MAX
from swarmnode.transport.reachability import ports_of

GROUP, PORT = "239.192.83.87", 40183  # organisation-local scope, RFC 2365; the port is a guess at a free one
PERIOD_S = 5.0  # guess
BEACON_BYTES_MAX = 200
HINTS_MAX = ALONE_MAX  # peers taken from beacons in one process lifetime, so that a flood of them displaces nobody
RUN_CHARACTERS = 16
_MAGIC = "swarmnode1"

Hint = Callable[[PeerId, list[str]], None]


def beacon(run_id: RunId, peer: PeerId, port: int) -> bytes:
    """The bytes of a beacon."""
    return f"{_MAGIC} {run_id[:RUN_CHARACTERS]} {peer} {port}".encode()


def read_beacon(
    raw: bytes, source: str, run_id: RunId, me: PeerId, protocol: str = "tcp"
) -> tuple[PeerId, list[str]] | None:
    """(peer, addresses) of another peer's beacon of this run; None for anything else."""
    if len(raw) > BEACON_BYTES_MAX or not raw.isascii():
        return None
    words = raw.decode().split(" ")
    if len(words) != 4 or words[:2] != [_MAGIC, run_id[:RUN_CHARACTERS]] or words[2] == me:
        return None
    peer, port = PeerId(words[2]), words[3]
    try:
        public_key_of(peer)
        ipaddress.IPv4Address(source)
    except (RemoteFault, ValueError):
        return None
    if not (port.isdecimal() and 0 < int(port) <= 65535):
        return None
    return peer, [f"/ip4/{source}/{protocol}/{int(port)}"]


class _Ear(asyncio.DatagramProtocol):
    def __init__(self, run_id: RunId, me: PeerId, protocol: str, hint: Hint) -> None:
        self._run_id, self._me, self._protocol, self._hint = run_id, me, protocol, hint
        self._heard: set[PeerId] = set()

    def datagram_received(self, data: bytes, addr: tuple[str, int]) -> None:
        hint = read_beacon(data, addr[0], self._run_id, self._me, self._protocol)
        if hint is not None and (hint[0] in self._heard or len(self._heard) < HINTS_MAX):
            self._heard.add(hint[0])
            self._hint(*hint)

    def error_received(self, exc: Exception) -> None:
        pass  # no route or network: the next beacon may find one


async def announce(run_id: RunId, me: PeerId, addresses: Callable[[], Sequence[str]], hint: Hint) -> None:
    """Send beacons and pass received ones to `hint`, until cancelled. Returns at once if multicast is not available."""
    loop = asyncio.get_running_loop()
    transport = None
    try:
        protocol = next((parse_endpoint(one).protocol for one in addresses() if not is_circuit(one)), "tcp")
        transport, _ = await loop.create_datagram_endpoint(lambda: _Ear(run_id, me, protocol, hint), sock=_socket())
        while True:
            for port in ports_of(addresses())[:1]:
                with contextlib.suppress(OSError):
                    transport.sendto(beacon(run_id, me, port), (GROUP, PORT))
            await asyncio.sleep(PERIOD_S)
    except OSError:
        return
    finally:
        if transport is not None:
            transport.close()


def _socket() -> socket.socket:
    """A multicast socket; several nodes of one machine may listen. Raises OSError if multicast is not available."""
    sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if hasattr(socket, "SO_REUSEPORT"):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        sock.bind(("", PORT))
        sock.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_TTL, 1)
        sock.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_LOOP, 1)
        sock.setsockopt(
            socket.IPPROTO_IP, socket.IP_ADD_MEMBERSHIP, struct.pack("4sl", socket.inet_aton(GROUP), socket.INADDR_ANY)
        )
        sock.setblocking(False)
    except OSError:
        sock.close()
        raise
    return sock
