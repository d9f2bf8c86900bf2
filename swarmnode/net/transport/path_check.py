"""The parts of a path to a peer that can fail: its name, its port, the handshake, small packets, large ones."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Sequence

from swarmnode.base.errors import cause_of
from swarmnode.net.membership.liveness import PING_TIMEOUT_S
from swarmnode.net.transport.address import PROBE_TIMEOUT_S, is_circuit, parse_endpoint

MTU_ADVICE = (
    "the path drops large packets, it seems: lower the MTU of this machine's interface or VPN to 1280"
    " (ip link set dev NAME mtu 1280)"
)
SMALL_NBYTES = 64  # of a ping's payload: it fits into one packet of any path
HANDSHAKE = f"but no handshake is done: another program may have that port; or {MTU_ADVICE}"


async def knock(addresses: Sequence[str]) -> tuple[str, str]:
    """(the first of `addresses` whose port accepts a TCP connection within PROBE_TIMEOUT_S, ""), or ("", why none does,
    with what to look at).

    p2pd waits 5 s and more after a refused dial. Probing the port first keeps a joiner from waiting that long for a
    bootstrap that starts a moment later.
    """
    reasons = []
    for address in addresses:
        if is_circuit(address) or "/udp/" in address:
            return address, ""  # only a dial can tell
        endpoint = parse_endpoint(address)
        try:
            async with asyncio.timeout(PROBE_TIMEOUT_S):
                _, writer = await asyncio.open_connection(endpoint.host, endpoint.port)
        except (OSError, TimeoutError) as error:
            reasons.append(_refusal(str(endpoint), endpoint.host, error))
            continue
        writer.close()
        return str(endpoint), ""
    return "", "; ".join(dict.fromkeys(reasons))


def _refusal(where: str, host: str, error: Exception) -> str:
    match error:
        case socket.gaierror():
            return f"the name {host} does not resolve ({cause_of(error)}): is it written right, and does DNS work here?"
        case ConnectionRefusedError():
            return f"nothing listens at {where} (connection refused): is the process there up, with this port?"
        case TimeoutError():
            return (
                f"no answer from {where} within {PROBE_TIMEOUT_S:.0f} s: is that machine on, and does its firewall let"
                " the port in?"
            )
    return f"{where} cannot be reached ({cause_of(error)}): is this machine's network up?"


def large_unanswered(what: str, small_s: float, waited_s: float, small: str = f"a ping of {SMALL_NBYTES} bytes") -> str:
    """The reason where `small` came back within `small_s`, and `what`, which needs full packets, did not."""
    return f"{small} is answered in {1000 * small_s:.0f} ms, {what} is not within {waited_s:.0f} s: {MTU_ADVICE}"


def small_unanswered(where: str) -> str:
    """The reason where the handshake is done, and not even a ping comes back."""
    return (
        f"{where} finishes the handshake but answers no ping within {PING_TIMEOUT_S:.0f} s: its process hangs or is"
        f" overloaded; or {MTU_ADVICE}"
    )
