"""Traffic and latency of each link, for display only, never for decisions."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field

from swarmnode.base.ema import Ema, EmaStart
from swarmnode.base.errors import RemoteFault, Unavailable
from swarmnode.base.ids import PeerId
from swarmnode.base.ports import Call, Transport
from swarmnode.base.remembered import Remembered
from swarmnode.base.wire import call_pb2 as wire
from swarmnode.base.wire import report_pb2
from swarmnode.net.membership.liveness import PING_TIMEOUT_S
from swarmnode.net.transport.contact import STALE_S

ACTIVE_S = STALE_S  # a link unused for longer is not shown
MEASURE_PERIOD_S = 3.0  # guess: ten links are measured twice a minute; a ping costs 0.3 ms

Connections = Callable[[], Awaitable[Mapping[PeerId, bool]]]
"""Peers connected now: True for those reached only through relays. Raises Unavailable."""


@dataclass(slots=True)
class PeerLink:
    """A link. `latency` has no value before the first measurement; `relayed` is None until it is known."""

    sent: int = 0
    received: int = 0
    used_at: float = 0.0
    asked_at: float = float("-inf")
    latency: Ema = field(default_factory=lambda: Ema(start=EmaStart.FIRST))
    relayed: bool | None = None


class LinkBook:
    """Links by peer, the most recently used last. Times are the event loop's."""

    def __init__(self) -> None:
        self._links = Remembered[PeerId, PeerLink]()

    def record_bytes(self, peer: PeerId, *, sent: int, received: int, now_s: float) -> None:
        """Count the bytes of one call."""
        link = self._links[peer] = self._links.get(peer) or PeerLink()
        link.sent += sent
        link.received += received
        link.used_at = now_s

    def measured(self, peer: PeerId, seconds: float) -> None:
        """Add one measured round trip."""
        link = self._links.get(peer)
        if link is not None:
            link.latency.add(seconds)

    def connected(self, relayed: Mapping[PeerId, bool]) -> None:
        """Update which peers are connected, directly or through a relay."""
        for peer, link in self._links.items():
            link.relayed = relayed.get(peer)

    def next_to_measure(self, now_s: float) -> PeerId | None:
        """The active link measured longest ago; it counts as measured from now on."""
        active = [(link.asked_at, peer) for peer, link in self._links.items() if now_s - link.used_at < ACTIVE_S]
        if not active:
            return None
        _, peer = min(active)
        self._links[peer].asked_at = now_s
        return peer

    def report(self, most: int, now_s: float) -> list[report_pb2.LinkReport]:
        """At most `most` active links, busiest first."""
        active = [(peer, link) for peer, link in self._links.items() if now_s - link.used_at < ACTIVE_S]
        active.sort(key=lambda entry: (-entry[1].sent - entry[1].received, entry[0]))
        return [
            report_pb2.LinkReport(
                peer_id=peer,
                sent_nbytes=link.sent,
                received_nbytes=link.received,
                latency_s=link.latency.value,
                kind=_KIND[link.relayed],
            )
            for peer, link in active[:most]
        ]


_KIND = {
    None: report_pb2.LINK_KIND_UNSPECIFIED,
    False: report_pb2.LINK_KIND_DIRECT,
    True: report_pb2.LINK_KIND_RELAYED,
}


async def measure(transport: Transport, connections: Connections, book: LinkBook) -> None:
    """Ping one active link every MEASURE_PERIOD_S, and update which are relayed, until cancelled."""
    loop = asyncio.get_running_loop()
    while True:
        await asyncio.sleep(MEASURE_PERIOD_S)
        with contextlib.suppress(Unavailable):
            book.connected(await connections())
        peer = book.next_to_measure(loop.time())
        if peer is None:
            continue
        begun = loop.time()
        ping = Call(wire.Request(ping=wire.Ping()))
        try:
            await transport.call(peer, ping, timeout_s=PING_TIMEOUT_S, reply_bytes_max=0)
        except (RemoteFault, Unavailable):
            continue  # failure detection is not this module's task
        book.measured(peer, loop.time() - begun)
