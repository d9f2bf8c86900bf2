"""The UDP sockets of an iroh endpoint: exactly those that its user named.

iroh 1.2.0 always has a socket of each family: for the one that is not named it takes all addresses of the machine, and
its Python package has no way to leave it out. So that socket is bound to this machine alone, and closed at once.
"""

from __future__ import annotations

import contextlib
import os
import socket
import stat
from collections.abc import Sequence
from pathlib import Path

from swarmnode.base.errors import UsageError
from swarmnode.net.transport.address import Endpoint, check_listenable, parse_endpoint

SPARE = {"ip4": "127.0.0.1:0", "ip6": "[::1]:0"}
DESCRIPTORS = Path("/dev/fd")


def bound_to(listen: Sequence[str]) -> list[str]:
    """The addresses to bind, and a spare one of a family that `listen` does not name. Raises UsageError."""
    endpoints = list(map(parse_endpoint, listen))
    families = [endpoint.family for endpoint in endpoints]
    for endpoint in endpoints:
        if endpoint.protocol != "udp":
            raise UsageError(f"{endpoint}: iroh listens on UDP; give /{endpoint.family}/{endpoint.host}/udp/PORT")
        if families.count(endpoint.family) > 1:
            raise UsageError(f"{', '.join(listen)}: iroh listens on one address of each family; give one, or 0.0.0.0")
        check_listenable(endpoint)
    if not endpoints:
        raise UsageError("no address to listen on; give at least one, such as /ip4/127.0.0.1/udp/0")
    spare = [where for family, where in SPARE.items() if family not in families]
    return [f"{bracketed(one.host)}:{one.port}" for one in endpoints] + spare


def close_spare(spare: Sequence[Endpoint]) -> None:
    """Close this process's UDP sockets at `spare`. iroh goes on with sockets that have no address: nothing is ever
    received there."""
    wanted = {(endpoint.host, endpoint.port) for endpoint in spare}
    for number in map(int, os.listdir(DESCRIPTORS) if wanted else ()):
        with contextlib.suppress(OSError):  # closed meanwhile
            if stat.S_ISSOCK(os.fstat(number).st_mode) and _bound_at(number) in wanted:
                _unbind(number)


def _bound_at(number: int) -> tuple[str, int] | None:
    """(host, port) of a UDP socket over IP; None of another one."""
    with socket.socket(fileno=os.dup(number)) as found:
        if found.type != socket.SOCK_DGRAM or found.family not in (socket.AF_INET, socket.AF_INET6):
            return None
        host, port, *_ = found.getsockname()
        return host, port


def _unbind(number: int) -> None:
    """Put a socket without an address in the place of the one with this descriptor, which ends."""
    with socket.socket(fileno=os.dup(number)) as found:
        family = found.family
    with socket.socket(family, socket.SOCK_DGRAM) as blank:
        blank.setblocking(False)
        os.dup2(blank.fileno(), number, inheritable=False)


def bracketed(host: str) -> str:
    """`host` as iroh reads it before a port."""
    return f"[{host}]" if ":" in host else host


def endpoint_of(where: str) -> Endpoint:
    """The endpoint of `host:port` as iroh writes it."""
    host, _, port = where.rpartition(":")
    host = host.strip("[]").partition("%")[0]
    return Endpoint("ip6" if ":" in host else "ip4", host, int(port), "udp")
