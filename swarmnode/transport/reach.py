"""Can others reach this node? Peers try, and say; a node nobody reaches goes through relays, or does not serve at all.

libp2p's own AutoNAT takes minutes and tells nobody its verdict. Here a helper (a bootstrap, or any member) opens a TCP
connection to the address it sees us come from, at the ports we say we listen on, and waits for libp2p's greeting. It
tries no other address than the asker's own, so nobody can aim it at a third party.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import ipaddress
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from swarmnode.errors import Busy, RemoteFault, Unavailable, UsageError
from swarmnode.ids import PeerId
from swarmnode.ports import Answer, Call, Transport
from swarmnode.transport.address import Endpoint, is_circuit, parse_endpoint
from swarmnode.wire import call_pb2 as wire

PORTS_MAX = 4
PROBE_TIMEOUT_S = 4.0  # guess: TCP's first retransmission comes after 1 s, its second after 3 s
ASK_TIMEOUT_S = 10.0
PROBES_MAX = 8  # at once, for everybody; guess
AGAIN_S = 2.0  # the same asker is refused sooner; guess
ASKERS_MAX = 1024
_GREETING = b"/multistream/1.0.0"


class Reach(enum.StrEnum):
    """How others come to this node."""

    UNKNOWN = "unknown"  # nobody could try
    LOCAL = "local"  # from its own network; nobody outside was there to try
    PUBLIC = "public"
    RELAYED = "relayed"  # through a relay that it keeps a connection to
    PRIVATE = "private"  # not at all


@dataclass(frozen=True, slots=True)
class Seen:
    """What one helper says: the IP address it sees us come from, and where it got through to us."""

    observed: str
    reached: tuple[str, ...]


def verdict(seen: Sequence[Seen]) -> tuple[Reach, str]:
    """What the answers of several helpers come to. A helper on our own network says nothing of the world outside."""
    outside = [one for one in seen if is_global(one.observed)]
    if any(one.reached for one in outside):
        where = ", ".join(sorted({address for one in outside for address in one.reached}))
        return Reach.PUBLIC, f"reached from outside at {where}"
    if outside:
        return Reach.PRIVATE, f"{len(outside)} peers outside see us at {outside[0].observed} and cannot connect there"
    if any(one.reached for one in seen):
        return Reach.LOCAL, "reached from its own network; nobody outside was there to try"
    if seen:
        return Reach.PRIVATE, f"{len(seen)} peers of the same network cannot connect to {seen[0].observed}"
    return Reach.UNKNOWN, "nobody was there to try"


def is_global(host: str) -> bool:
    """Whether `host` is an IP address of the internet at large."""
    try:
        return ipaddress.ip_address(host).is_global
    except ValueError:
        return False


def ports_of(addresses: Iterable[str]) -> list[int]:
    """The TCP ports of direct addresses, in order, at most PORTS_MAX."""
    ports: list[int] = []
    for address in addresses:
        if not is_circuit(address):
            with contextlib.suppress(UsageError):
                port = parse_endpoint(address).port
                if port and port not in ports:
                    ports.append(port)
    return ports[:PORTS_MAX]


@dataclass(slots=True)
class Helper:
    """Answers "reach". `observed` gives the IP address a peer's connection comes from, "" when unknown or relayed."""

    observed: Callable[[PeerId], str]
    _asked: dict[PeerId, float] = field(default_factory=dict)
    _slots: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(PROBES_MAX))

    def serve(self, transport: Transport) -> None:
        """Register."""
        transport.serve("reach", self.answer, tensor_bytes_max=0)

    async def answer(self, peer: PeerId, call: Call) -> Answer:
        """Try the asker's own address at its ports. Raises Busy (asked just before, or too many), RemoteFault."""
        now = asyncio.get_running_loop().time()
        if len(call.header.reach.addresses) > PORTS_MAX:
            raise RemoteFault(f"{len(call.header.reach.addresses)} addresses to try; at most {PORTS_MAX}")
        if now - self._asked.get(peer, -AGAIN_S) < AGAIN_S or self._slots.locked():
            raise Busy("asked to try just before", AGAIN_S)
        if len(self._asked) >= ASKERS_MAX:
            self._asked.clear()
        self._asked[peer] = now
        host = self.observed(peer)
        reached: list[str] = []
        if host:
            family = f"ip{ipaddress.ip_address(host).version}"
            tries = [Endpoint(family, host, port) for port in ports_of(call.header.reach.addresses)]
            async with self._slots:
                found = await asyncio.gather(*(greets(endpoint) for endpoint in tries))
            reached = [str(endpoint) for endpoint, answered in zip(tries, found, strict=True) if answered]
        return Answer(wire.Reply(reach=wire.Reached(reached=reached, observed=host)))


async def greets(endpoint: Endpoint) -> bool:
    """Whether a libp2p host answers there: some routers accept every connection themselves."""
    writer = None
    try:
        async with asyncio.timeout(PROBE_TIMEOUT_S):
            reader, writer = await asyncio.open_connection(endpoint.host, endpoint.port)
            return _GREETING in await reader.readuntil(b"\n")
    except (OSError, TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
        return False
    finally:
        if writer is not None:
            writer.transport.abort()


async def ask(transport: Transport, helpers: Iterable[PeerId]) -> list[Seen]:
    """What each of `helpers` that answers says of us."""
    addresses = [str(Endpoint("ip4", "0.0.0.0", port)) for port in ports_of(await transport.addresses())]

    async def one(helper: PeerId) -> Seen | None:
        request = Call(wire.Request(reach=wire.ReachRequest(addresses=addresses)))
        try:
            answer = await transport.call(helper, request, timeout_s=ASK_TIMEOUT_S, reply_bytes_max=0)
        except (RemoteFault, Unavailable):
            return None
        said = answer.header.reach
        return Seen(said.observed, tuple(said.reached[:PORTS_MAX])) if said.observed else None

    return [seen for seen in await asyncio.gather(*(one(helper) for helper in helpers)) if seen is not None]
