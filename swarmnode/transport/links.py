"""What went over each link and how far away its other end is: for people who watch, never for decisions."""

from __future__ import annotations

import asyncio
import contextlib
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass

from swarmnode.errors import RemoteFault, Unavailable
from swarmnode.ids import PeerId
from swarmnode.ports import Call, Transport
from swarmnode.wire import call_pb2 as wire
from swarmnode.wire import report_pb2

LINKS_MAX = 512  # guess: peers remembered; the least recently used is forgotten
ACTIVE_S = 60.0  # guess: a link unused for longer is no longer shown
LATENCY_SHARE = 0.3  # guess: weight of the newest round trip
MEASURE_PERIOD_S = 3.0  # guess: ten links are measured twice a minute; a ping costs 0.3 ms
PING_TIMEOUT_S = 2.0

Connections = Callable[[], Awaitable[Mapping[PeerId, bool]]]
"""Peers connected now: True for those reached through relays only. Raises Unavailable."""


@dataclass(slots=True)
class Link:
    """`latency_s` is None until a round trip was measured, `relayed` until it is known."""

    sent: int = 0
    received: int = 0
    used_at: float = 0.0
    asked_at: float = float("-inf")
    latency_s: float | None = None
    relayed: bool | None = None


class LinkBook:
    """Links by peer, the most recently used last. Times are the event loop's."""

    def __init__(self) -> None:
        self._links: OrderedDict[PeerId, Link] = OrderedDict()

    def moved(self, peer: PeerId, *, sent: int, received: int, now_s: float) -> None:
        """Count bytes of one call."""
        link = self._links.get(peer)
        if link is None:
            link = self._links[peer] = Link()
            if len(self._links) > LINKS_MAX:
                self._links.popitem(last=False)
        link.sent += sent
        link.received += received
        link.used_at = now_s
        self._links.move_to_end(peer)

    def measured(self, peer: PeerId, seconds: float) -> None:
        """Take in one round trip."""
        link = self._links.get(peer)
        if link is not None:
            before = link.latency_s
            link.latency_s = seconds if before is None else before + LATENCY_SHARE * (seconds - before)

    def connected(self, relayed: Mapping[PeerId, bool]) -> None:
        """Which peers are connected now, and through a relay or not."""
        for peer, link in self._links.items():
            link.relayed = relayed.get(peer)

    def next_to_measure(self, now_s: float) -> PeerId | None:
        """The link in use whose last measurement was longest ago; it counts as asked from now on."""
        active = [(link.asked_at, peer) for peer, link in self._links.items() if now_s - link.used_at < ACTIVE_S]
        if not active:
            return None
        _, peer = min(active)
        self._links[peer].asked_at = now_s
        return peer

    def report(self, most: int, now_s: float) -> list[report_pb2.LinkReport]:
        """At most `most` links in use, busiest first."""
        active = [(peer, link) for peer, link in self._links.items() if now_s - link.used_at < ACTIVE_S]
        active.sort(key=lambda entry: (-entry[1].sent - entry[1].received, entry[0]))
        return [
            report_pb2.LinkReport(
                peer_id=peer,
                sent_nbytes=link.sent,
                received_nbytes=link.received,
                latency_s=link.latency_s or 0.0,
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
    """Ping one link in use every MEASURE_PERIOD_S, and learn which are relayed, until cancelled."""
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
            continue  # whether it lives is for those to find out who need it
        book.measured(peer, loop.time() - begun)
