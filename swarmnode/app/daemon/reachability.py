"""Determine this machine's reachability with the help of peers before it is announced, and keep it up to date."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import itertools
from collections.abc import Callable, Sequence
from pathlib import Path

from swarmnode.base.errors import Unavailable, Unreachable
from swarmnode.base.ids import PeerId
from swarmnode.base.metrics import name
from swarmnode.base.ports import Telemetry
from swarmnode.net.membership.liveness import SAMPLE
from swarmnode.net.transport.address import parse_endpoint
from swarmnode.net.transport.contact import Contacts
from swarmnode.net.transport.p2pd import NetworkMode
from swarmnode.net.transport.reachability import AGAIN_S, Reachability, ReachReport, ask, connected, is_global, verdict
from swarmnode.net.transport.stream_transport import StreamTransport

HELPERS_MAX = 4
UPNP_WAIT_S = 6.0  # guess: time for a home router to open a port
RELAY_WAIT_S = 20.0  # derived: ten times the 1.8 s measured to a place at a relay
ADDRESSES_PERIOD_S = 30.0
SAVE_S = 2.0  # guess: a process killed by SIGKILL loses no older contact
REACH_PERIOD_S = 900.0  # refresh_interval of libp2p's AutoNAT: a router may close a port and no address changes
CONTACTS_ASKED_MAX = SAMPLE  # at once, beside the bootstraps
CONTACTS_FILE = "contacts.json"

_LEVEL = {Reachability.PUBLIC: 1.0, Reachability.LOCAL: 1.0, Reachability.RELAYED: 0.5}


def first_network_mode(listen: str, choice: str) -> NetworkMode:
    """p2pd's settings at start; a swarm on one machine needs no reachability."""
    if ipaddress.ip_address(parse_endpoint(listen).host).is_loopback:
        return NetworkMode("local")
    return NetworkMode("public" if choice == "public" else "open")


async def settle(
    transport: StreamTransport,
    bootstraps: Sequence[tuple[PeerId, Sequence[str]]],
    network_mode: NetworkMode,
    choice: str,
    telemetry: Telemetry,
) -> Reachability:
    """Find out whether others reach this node, and use relays if they do not.

    Raises Unreachable if it is reachable neither directly nor through a relay, because such a node would only hinder
    others.
    """
    if network_mode.kind in ("local", "public"):
        return _tell(
            Reachability.LOCAL if network_mode.kind == "local" else Reachability.PUBLIC, "as it was told", telemetry
        )
    reach = Reachability.PRIVATE
    reason = "as it was told"
    seen = list[ReachReport]()
    if choice == "auto":
        reach, reason, seen = await _ask(transport, bootstraps)
        if reach is Reachability.PRIVATE:
            await asyncio.sleep(UPNP_WAIT_S)
            reach, reason, seen = await _ask(transport, bootstraps)
    if reach is Reachability.PRIVATE:
        return await _by_relay(transport, bootstraps, reason, telemetry)
    if reach is Reachability.PUBLIC:
        # Behind a cloud's one-to-one NAT or an open router port, p2pd knows only its inner address.
        outer = {address for one in seen if is_global(one.observed) for address in one.reached}
        own = await transport.addresses()
        if not outer & set(own) or transport.network_mode.kind == "private":
            await transport.stand(network_mode, [*sorted(outer), *own])
    return _tell(reach, reason, telemetry)


async def stay_reachable(
    transport: StreamTransport,
    bootstraps: Sequence[tuple[PeerId, Sequence[str]]],
    network_mode: NetworkMode,
    reach: Reachability,
    telemetry: Telemetry,
) -> None:
    """Check again periodically and when our addresses change, and adapt p2pd's settings. Runs until cancelled. It never
    ends a working node: an unreachable node can still call others."""
    loop = asyncio.get_running_loop()
    told = frozenset[str]()
    asked_s = loop.time()
    while True:
        with contextlib.suppress(Unavailable):  # p2pd restarts; try again next time
            here = frozenset(await transport.addresses())
            told = told or here
            if here != told or loop.time() >= asked_s + REACH_PERIOD_S:
                asked_s = loop.time()
                reachability, _, _ = await _ask(transport, bootstraps)
                before = Reachability.PRIVATE if reach is Reachability.RELAYED else reach
                if reachability not in (Reachability.UNKNOWN, before):
                    await asyncio.sleep(AGAIN_S)  # helpers refuse a second request at once
                    reach = Reachability.PRIVATE
                    with contextlib.suppress(Unreachable):
                        reach = await settle(transport, bootstraps, network_mode, "auto", telemetry)
                told = frozenset(await transport.addresses())
        await asyncio.sleep(ADDRESSES_PERIOD_S)


async def _ask(
    transport: StreamTransport, bootstraps: Sequence[tuple[PeerId, Sequence[str]]]
) -> tuple[Reachability, str, list[ReachReport]]:
    seen = await ask(transport, await connected(transport, bootstraps[:HELPERS_MAX]))
    return *verdict(seen), seen


async def _by_relay(
    transport: StreamTransport,
    bootstraps: Sequence[tuple[PeerId, Sequence[str]]],
    reason: str,
    telemetry: Telemetry,
) -> Reachability:
    relays = tuple(f"{address}/p2p/{peer}" for peer, addresses in bootstraps for address in addresses)
    if relays and transport.can_relay:
        await transport.stand(NetworkMode("private", relays))
        try:
            async with asyncio.timeout(RELAY_WAIT_S):
                while not any("/p2p-circuit" in address for address in await transport.addresses()):  # noqa: ASYNC110
                    await asyncio.sleep(0.1)
            return _tell(Reachability.RELAYED, reason, telemetry)
        except TimeoutError:
            pass
    _tell(Reachability.PRIVATE, reason, telemetry)
    raise Unreachable(
        f"others cannot reach this machine ({reason}) and no meeting point relays for it: open a port"
        f" ({transport.ip_protocol.upper()}) in the router and firewall and listen there (--listen"
        " /ip4/0.0.0.0/tcp/4001); or --reachability public if you know better"
    )


def _tell(reach: Reachability, reason: str, telemetry: Telemetry) -> Reachability:
    telemetry.gauge(name.REACH, _LEVEL.get(reach, 0.0))
    telemetry.event("node.reach", reach=reach, reason=reason)
    return reach


async def keep_current(
    transport: StreamTransport, contacts: Contacts, home: Path, moved: Callable[[list[str]], None]
) -> None:
    """Pass our current addresses to `moved`, and save `contacts` on disk, new ones soon, until cancelled."""
    saved = -1
    try:
        for tick in itertools.count():
            if tick % round(ADDRESSES_PERIOD_S / SAVE_S) == 0:
                saved = -1
                with contextlib.suppress(Unavailable):  # p2pd restarts; try again next time
                    moved(await transport.addresses())
            if contacts.news != saved:
                saved = contacts.news
                await asyncio.to_thread(contacts.save, home / CONTACTS_FILE)
            await asyncio.sleep(SAVE_S)
    finally:
        contacts.save(home / CONTACTS_FILE)
