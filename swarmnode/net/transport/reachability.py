"""Determine whether others can reach this node, by asking peers to try. An unreachable node uses relays, or does not
serve.

libp2p's own AutoNAT takes minutes and does not report its verdict. Here a helper (a bootstrap, or any member) opens a
TCP connection to the address that it sees us come from, at the ports we listen on, and waits for libp2p's greeting. It
tries only the asker's own address, so it cannot be aimed at a third party.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import ipaddress
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field

from swarmnode.base.errors import Busy, RemoteFault, Unavailable, UsageError
from swarmnode.base.ids import PeerId
from swarmnode.base.ports import Answer, Call, Transport
from swarmnode.base.remembered import Remembered
from swarmnode.base.wire import call_pb2 as wire
from swarmnode.net.membership.liveness import PING_TIMEOUT_S
from swarmnode.net.transport.address import Endpoint, is_circuit, parse_endpoint

PORTS_MAX = 4
PROBE_TIMEOUT_S = 4.0  # derived: TCP's first retransmission comes after 1 s, its second after 3 s
ASK_TIMEOUT_S = 10.0
PROBES_MAX = 8  # guess: concurrent, for all askers
AGAIN_S = PING_TIMEOUT_S  # the same asker is refused sooner
_GREETING = b"/multistream/1.0.0"


class Reachability(enum.StrEnum):
    """Ways in which other nodes can reach this node."""

    UNKNOWN = "unknown"  # nobody could try
    LOCAL = "local"  # from its own network; no helper outside was there to try
    PUBLIC = "public"
    RELAYED = "relayed"  # through a relay to which it keeps a connection
    PRIVATE = "private"  # not at all


@dataclass(frozen=True, slots=True)
class ReachReport:
    """A helper's report: our IP address as it sees it, and the addresses at which it reached us."""

    observed: str
    reached: tuple[str, ...]


def verdict(seen: Sequence[ReachReport]) -> tuple[Reachability, str]:
    """The conclusion from several helpers' reports, and the reason. A helper in our own network tells nothing about the
    outside."""
    outside = [one for one in seen if is_global(one.observed)]
    if any(one.reached for one in outside):
        where = ", ".join(sorted({address for one in outside for address in one.reached}))
        return Reachability.PUBLIC, f"reached from outside at {where}"
    if outside:
        return (
            Reachability.PRIVATE,
            f"{len(outside)} peers outside see us at {outside[0].observed} and cannot connect there",
        )
    if any(one.reached for one in seen):
        return Reachability.LOCAL, "reached from its own network; nobody outside was there to try"
    if seen:
        return Reachability.PRIVATE, f"{len(seen)} peers of the same network cannot connect to {seen[0].observed}"
    return Reachability.UNKNOWN, "nobody was there to try"


def is_global(host: str) -> bool:
    """Whether `host` is an IP address of the internet at large."""
    try:
        return ipaddress.ip_address(host).is_global
    except ValueError:
        return False


def ports_of(addresses: Iterable[str]) -> list[int]:
    """The ports of direct addresses, in order, at most PORTS_MAX."""
    ports: list[int] = []
    for address in addresses:
        if not is_circuit(address):
            with contextlib.suppress(UsageError):
                port = parse_endpoint(address).port
                if port and port not in ports:
                    ports.append(port)
    return ports[:PORTS_MAX]


@dataclass(slots=True)
class ReachHelper:
    """Answers "reach". `observed` returns the IP address of a peer's connection, "" if unknown or relayed; `greets`
    whether a node answers somewhere."""

    observed: Callable[[PeerId], str]
    greets: Callable[[Endpoint], Awaitable[bool]]
    _asked: Remembered[PeerId, float] = field(default_factory=Remembered)
    _slots: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(PROBES_MAX))

    def serve(self, transport: Transport) -> None:
        """Register the handler."""
        transport.serve("reach", self.answer, tensor_bytes_max=0)

    async def answer(self, peer: PeerId, call: Call) -> Answer:
        """Try the asker's own address at its ports. Raises Busy (asked a moment ago, or too many askers),
        RemoteFault."""
        now = asyncio.get_running_loop().time()
        if len(call.header.reach.addresses) > PORTS_MAX:
            raise RemoteFault(f"{len(call.header.reach.addresses)} addresses to try; at most {PORTS_MAX}")
        if now - self._asked.get(peer, -AGAIN_S) < AGAIN_S or self._slots.locked():
            raise Busy("this peer asked a moment ago, or too many peers ask", AGAIN_S)
        self._asked[peer] = now
        host = self.observed(peer)
        reached: list[str] = []
        if host:
            family = f"ip{ipaddress.ip_address(host).version}"
            asked = call.header.reach.addresses
            protocol = "udp" if any("/udp/" in one for one in asked) else "tcp"
            tries = [Endpoint(family, host, port, protocol) for port in ports_of(asked)]
            async with self._slots:
                greeted = await asyncio.gather(*(self.greets(endpoint) for endpoint in tries))
            reached = [str(endpoint) for endpoint, answered in zip(tries, greeted, strict=True) if answered]
        return Answer(wire.Reply(reach=wire.Reached(reached=reached, observed=host)))


async def greets(endpoint: Endpoint) -> bool:
    """Whether a libp2p host answers at `endpoint`: some routers accept every connection themselves."""
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


async def connected(transport: Transport, peers: Iterable[tuple[PeerId, Sequence[str]]]) -> list[PeerId]:
    """The ones of `peers` that a connection is made with. All are tried at once, as a dead one costs seconds."""

    async def one(peer: PeerId, addresses: Sequence[str]) -> PeerId | None:
        try:
            await transport.connect(peer, addresses)
        except (RemoteFault, Unavailable):
            return None
        return peer

    return [peer for peer in await asyncio.gather(*(one(*known) for known in peers)) if peer is not None]


def report_of(told: wire.Reached, ports: Sequence[int], protocol: str) -> ReachReport | None:
    """The report that a helper gave; None without the address that it sees. Only our ports at that address count,
    because a node announces what helpers reach, and hands it to p2pd."""
    try:
        seen = ipaddress.ip_address(told.observed)
    except ValueError:
        return None
    here = {str(Endpoint(f"ip{seen.version}", told.observed, port, protocol)) for port in ports}
    return ReachReport(told.observed, tuple(one for one in told.reached if one in here))


async def ask(transport: Transport, helpers: Iterable[PeerId]) -> list[ReachReport]:
    """The reports of all `helpers` that answer."""
    own = await transport.addresses()
    protocol = "udp" if any("/udp/" in one for one in own) else "tcp"
    addresses = [str(Endpoint("ip4", "0.0.0.0", port, protocol)) for port in ports_of(own)]

    async def one(helper: PeerId) -> ReachReport | None:
        request = Call(wire.Request(reach=wire.ReachRequest(addresses=addresses)))
        try:
            answer = await transport.call(helper, request, timeout_s=ASK_TIMEOUT_S, reply_bytes_max=0)
        except (RemoteFault, Unavailable):
            return None
        return report_of(answer.header.reach, ports_of(own), protocol)

    return [seen for seen in await asyncio.gather(*(one(helper) for helper in helpers)) if seen is not None]
