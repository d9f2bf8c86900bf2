"""How this machine stands in the network: asked of others before anything is announced, and looked after later."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
from collections.abc import Callable, Sequence
from pathlib import Path

from swarmnode.errors import RemoteFault, Unavailable, Unreachable
from swarmnode.ids import PeerId, RunId
from swarmnode.metrics import name
from swarmnode.ports import Telemetry
from swarmnode.transport import lan
from swarmnode.transport.address import parse_endpoint
from swarmnode.transport.contact import Contacts
from swarmnode.transport.libp2p import Libp2pTransport
from swarmnode.transport.p2pd import Footing
from swarmnode.transport.reach import AGAIN_S, Reach, Seen, ask, is_global, verdict

HELPERS_MAX = 4
UPNP_WAIT_S = 6.0  # guess: how long a home router takes to open a port
RELAY_WAIT_S = 20.0  # guess: measured 1.8 s to a place at a relay
ADDRESSES_PERIOD_S = 30.0
REACH_PERIOD_S = 1800.0  # guess: a router forgets an open port without anybody's address changing
CONTACTS_ASKED_MAX = 8  # guess: dead ones cost up to 10 s each, and only where no bootstrap answers
KNOWN_MAX = 64  # guess
CONTACTS_FILE = "contacts.json"

CHOICES = ("auto", "public", "private")
_LEVEL = {Reach.PUBLIC: 1.0, Reach.LOCAL: 1.0, Reach.RELAYED: 0.5}


def first_footing(listen: str, choice: str) -> Footing:
    """How p2pd starts: on this machine alone nothing of the kind is needed."""
    if ipaddress.ip_address(parse_endpoint(listen).host).is_loopback:
        return Footing("local")
    return Footing("public" if choice == "public" else "open")


async def settle(
    transport: Libp2pTransport,
    bootstraps: Sequence[tuple[PeerId, Sequence[str]]],
    footing: Footing,
    choice: str,
    telemetry: Telemetry,
) -> Reach:
    """Find out whether others reach this node, and see to it that they do.

    Raises Unreachable when they cannot, neither directly nor through a relay: such a node would only be in the way.
    """
    if footing.kind in ("local", "public"):
        return _tell(Reach.LOCAL if footing.kind == "local" else Reach.PUBLIC, "as it was told", telemetry)
    reach, reason, seen = Reach.PRIVATE, "as it was told", list[Seen]()
    if choice == "auto":
        reach, reason, seen = await _ask(transport, bootstraps)
        if reach is Reach.PRIVATE:
            await asyncio.sleep(UPNP_WAIT_S)
            reach, reason, seen = await _ask(transport, bootstraps)
    if reach is Reach.PRIVATE:
        return await _by_relay(transport, bootstraps, reason, telemetry)
    if reach is Reach.PUBLIC:
        # Behind a cloud's one-to-one NAT or an open port of a router p2pd knows only its inner address.
        outer = {address for one in seen if is_global(one.observed) for address in one.reached}
        own = await transport.addresses()
        if not outer & set(own) or transport.daemon.footing.kind == "private":
            await transport.stand(footing, [*sorted(outer), *own])
    return _tell(reach, reason, telemetry)


async def stay_reachable(
    transport: Libp2pTransport,
    bootstraps: Sequence[tuple[PeerId, Sequence[str]]],
    footing: Footing,
    reach: Reach,
    telemetry: Telemetry,
) -> None:
    """Ask again whenever our addresses have changed, and now and then; stand differently when the answer is another.
    Until cancelled. A node that works is not ended by it: who nobody reaches any more can still call others."""
    loop = asyncio.get_running_loop()
    told, asked_s = frozenset[str](), loop.time()
    while True:
        with contextlib.suppress(Unavailable):  # p2pd starts again; next time
            here = frozenset(await transport.addresses())
            told = told or here
            if here != told or loop.time() >= asked_s + REACH_PERIOD_S:
                asked_s = loop.time()
                found, _, _ = await _ask(transport, bootstraps)
                before = Reach.PRIVATE if reach is Reach.RELAYED else reach
                if found not in (Reach.UNKNOWN, before):
                    await asyncio.sleep(AGAIN_S)  # helpers are not asked twice at once
                    reach = Reach.PRIVATE
                    with contextlib.suppress(Unreachable):
                        reach = await settle(transport, bootstraps, footing, "auto", telemetry)
                told = frozenset(await transport.addresses())
        await asyncio.sleep(ADDRESSES_PERIOD_S)


async def _ask(
    transport: Libp2pTransport, bootstraps: Sequence[tuple[PeerId, Sequence[str]]]
) -> tuple[Reach, str, list[Seen]]:
    helpers = []
    for peer, addresses in bootstraps[:HELPERS_MAX]:
        try:
            await transport.connect(peer, addresses)
        except (Unavailable, RemoteFault):
            continue
        helpers.append(peer)
    seen = await ask(transport, helpers)
    return *verdict(seen), seen


async def _by_relay(
    transport: Libp2pTransport,
    bootstraps: Sequence[tuple[PeerId, Sequence[str]]],
    reason: str,
    telemetry: Telemetry,
) -> Reach:
    relays = tuple(f"{address}/p2p/{peer}" for peer, addresses in bootstraps for address in addresses)
    if relays:
        await transport.stand(Footing("private", relays))
        try:
            async with asyncio.timeout(RELAY_WAIT_S):
                while not any("/p2p-circuit" in address for address in await transport.addresses()):  # noqa: ASYNC110
                    await asyncio.sleep(0.1)
            return _tell(Reach.RELAYED, reason, telemetry)
        except TimeoutError:
            pass
    _tell(Reach.PRIVATE, reason, telemetry)
    raise Unreachable(
        f"others cannot reach this machine ({reason}) and no bootstrap relays for it: open a TCP port in the router "
        "and firewall and listen there (--listen /ip4/0.0.0.0/tcp/4001); or --reachability public if you know better"
    )


def _tell(reach: Reach, reason: str, telemetry: Telemetry) -> Reach:
    telemetry.gauge(name.REACH, _LEVEL.get(reach, 0.0))
    telemetry.event("node.reach", reach=reach, reason=reason)
    return reach


async def listen_around(
    transport: Libp2pTransport, run_id: RunId, contacts: Contacts, known: list[tuple[PeerId, list[str]]]
) -> None:
    """Say on the local network that we are here; who else is goes into `contacts`, and into `known` for joining."""
    own = await transport.addresses()

    def hint(peer: PeerId, addresses: list[str]) -> None:
        contacts.hint(peer, addresses)
        if (peer, addresses) not in known and len(known) < KNOWN_MAX:
            known.append((peer, addresses))

    transport.spawn(lan.announce(run_id, transport.peer_id, lambda: own, hint))


async def keep_current(
    transport: Libp2pTransport, contacts: Contacts, home: Path, moved: Callable[[list[str]], None]
) -> None:
    """Tell `moved` our addresses of now, and keep `contacts` on disk, until cancelled."""
    try:
        while True:
            with contextlib.suppress(Unavailable):  # p2pd starts again; next time
                moved(await transport.addresses())
            await asyncio.to_thread(contacts.save, home / CONTACTS_FILE)
            await asyncio.sleep(ADDRESSES_PERIOD_S)
    finally:
        contacts.save(home / CONTACTS_FILE)
