"""Who can be reached: what helpers' answers come to, and a real helper that tries the asker's own address only."""

import asyncio
import itertools
from collections.abc import Sequence

import pytest

from benchmarks.memory_network import MemoryNetwork, MemoryTransport
from swarmnode.app.daemon import reachability
from swarmnode.base.errors import Busy, Refused, Unreachable
from swarmnode.base.ids import PeerId, RunId
from swarmnode.base.ports import Call
from swarmnode.base.wire import call_pb2 as wire
from swarmnode.net.transport import reachability as reach
from swarmnode.net.transport.address import Endpoint, dialable, parse_bootstrap
from swarmnode.net.transport.p2pd import NetworkMode
from swarmnode.net.transport.reachability import (
    Reachability,
    ReachHelper,
    ReachReport,
    ask,
    connected,
    greets,
    ports_of,
    report_of,
    verdict,
)
from tests.support.fake_telemetry import Quiet
from tests.support.libp2p_node import node

pytestmark = pytest.mark.node  # real processes of p2pd

OUT = "81.2.3.4"
BACK = "192.168.1.7"
PEER = "12D3KooWMhLtgoPf2FHypfY8NntC2gsgQ4DdXEQWUojEhqVorubJ"


@pytest.mark.parametrize(
    ("seen", "reach"),
    [
        ([], Reachability.UNKNOWN),
        ([ReachReport(BACK, ("/ip4/192.168.1.7/tcp/1",))], Reachability.LOCAL),
        ([ReachReport(BACK, ())], Reachability.PRIVATE),
        ([ReachReport(OUT, ())], Reachability.PRIVATE),
        ([ReachReport(OUT, ("/ip4/81.2.3.4/tcp/1",))], Reachability.PUBLIC),
        ([ReachReport(OUT, ()), ReachReport(OUT, ("/ip4/81.2.3.4/tcp/1",))], Reachability.PUBLIC),
        ([ReachReport(BACK, ("/ip4/192.168.1.7/tcp/1",)), ReachReport(OUT, ())], Reachability.PRIVATE),
        ([ReachReport("not an address", ())], Reachability.PRIVATE),
    ],
)
def test_a_verdict_does_not_depend_on_the_order_of_answers(seen: list[ReachReport], reach: Reachability) -> None:
    for order in itertools.permutations(seen):
        found, reason = verdict(order)
        assert found is reach and reason


@pytest.mark.parametrize(
    "reached",
    ["/ip4/9.9.9.9/tcp/4001", "/ip4/81.2.3.4/tcp/22", "/ip4/81.2.3.4/udp/4001", "/dns/else.where/tcp/4001", "/", ""],
)
def test_a_helper_names_no_address_but_ours_for_us_to_announce(reached: str) -> None:
    mine = "/ip4/81.2.3.4/tcp/4001"
    found = report_of(wire.Reached(observed=OUT, reached=[reached, mine]), [4001], "tcp")
    assert found == ReachReport(OUT, (mine,))


def test_a_helper_that_sees_no_address_says_nothing() -> None:
    assert report_of(wire.Reached(observed="else.where", reached=["/dns/else.where/tcp/4001"]), [4001], "tcp") is None


def test_ports_are_those_of_direct_addresses() -> None:
    addresses = [f"/ip4/1.2.3.4/tcp/{port}" for port in (5, 6, 5, 7, 8, 9)] + [
        f"/ip4/9.9.9.9/tcp/1/p2p/{PEER}/p2p-circuit"
    ]
    assert ports_of(["/dns4/x/sctp/3", "nonsense", *addresses]) == [5, 6, 7, 8]


def test_addresses_through_relays_are_addresses() -> None:
    circuit = f"/ip4/1.2.3.4/tcp/5/p2p/{PEER}/p2p-circuit"
    assert dialable(circuit) == dialable(f"{circuit}/p2p/{PEER}") == circuit
    assert dialable(f"/ip4/1.2.3.4/tcp/5/p2p/{PEER}") == "/ip4/1.2.3.4/tcp/5"
    assert parse_bootstrap(f"{circuit}/p2p/{PEER}") == (PEER, circuit)


async def test_peers_are_connected_to_at_once() -> None:
    """A dead one costs its seconds, but not beside those of others."""
    tried = asyncio.Barrier(3)

    class Line(MemoryTransport):
        async def connect(self, peer: PeerId, addresses: Sequence[str]) -> None:
            await tried.wait()
            await super().connect(peer, addresses)

    network = MemoryNetwork()
    here, there = (Line(network, PeerId(name), RunId("ab" * 32), telemetry=Quiet()) for name in ("here", "there"))
    peers = [(PeerId("dead"), [OUT]), (there.peer_id, [OUT]), (PeerId("also dead"), [OUT])]
    async with asyncio.timeout(60):
        assert await connected(here, peers) == [there.peer_id]


@pytest.mark.loop("uvloop")
async def test_a_helper_reaches_who_can_be_reached() -> None:
    async with node() as (here, _), node() as (helper, _):
        ReachHelper(helper.observed, helper.greets).serve(helper)
        helper.start()
        await here.connect(helper.peer_id, await helper.addresses())
        (seen,) = await ask(here, [helper.peer_id])
        assert seen.observed == "127.0.0.1"
        assert list(seen.reached) == await here.addresses()
        assert verdict([seen])[0] is Reachability.LOCAL
        request = Call(wire.Request(reach=wire.ReachRequest(addresses=["/ip4/127.0.0.1/tcp/1"])))
        with pytest.raises(Busy):  # nobody makes us knock all the time
            await here.call(helper.peer_id, request, timeout_s=60, reply_bytes_max=0)
        many = Call(wire.Request(reach=wire.ReachRequest(addresses=["/ip4/127.0.0.1/tcp/1"] * 5)))
        with pytest.raises(Refused, match="at most 4"):
            await here.call(helper.peer_id, many, timeout_s=60, reply_bytes_max=0)


@pytest.mark.loop("uvloop")
async def test_a_port_without_libp2p_is_not_reachable() -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"220 a mail server\r\n" + b"x" * 100_000)
        await reader.read()
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        assert not await greets(Endpoint("ip4", "127.0.0.1", port))
    assert not await greets(Endpoint("ip4", "127.0.0.1", port)), "nobody there"


@pytest.mark.loop("uvloop")
async def test_a_node_nobody_reaches_says_so_instead_of_joining(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reachability, "RELAY_WAIT_S", 2.0)

    heard = Quiet()
    async with node() as (here, _), node() as (other, _):  # `other` is no relay
        other.start()
        before = await here.addresses()
        known = [(other.peer_id, await other.addresses())]
        with pytest.raises(Unreachable, match="open a port"):
            await reachability.settle(here, known, NetworkMode("open"), "private", heard)
        assert heard.events == [("node.reach", {"reach": "private", "reason": "as it was told"})]
        assert await here.addresses() == before, "p2pd came back where it was"


@pytest.mark.loop("uvloop")
async def test_a_node_that_comes_to_be_reached_finds_out(monkeypatch: pytest.MonkeyPatch) -> None:
    for module, constant in (
        (reachability, "REACH_PERIOD_S"),
        (reachability, "ADDRESSES_PERIOD_S"),
        (reachability, "AGAIN_S"),
        (reach, "AGAIN_S"),
    ):
        monkeypatch.setattr(module, constant, 0.0)

    heard = Quiet()
    async with node() as (here, _), node() as (helper, _):
        ReachHelper(helper.observed, helper.greets).serve(helper)
        helper.start()
        known = [(helper.peer_id, await helper.addresses())]
        here.spawn(reachability.stay_reachable(here, known, NetworkMode("open"), Reachability.PRIVATE, heard))
        while not heard.events:  # the bound is run's
            await asyncio.sleep(0.02)
        assert heard.events[0][1]["reach"] == "local"


@pytest.mark.parametrize(
    ("listen", "choice", "kind"),
    [
        ("/ip4/127.0.0.1/tcp/0", "auto", "local"),
        ("/ip4/127.0.0.1/tcp/0", "public", "local"),
        ("/ip4/0.0.0.0/tcp/0", "auto", "open"),
        ("/ip6/::/tcp/0", "private", "open"),
        ("/ip4/0.0.0.0/tcp/4001", "public", "public"),
    ],
)
def test_the_first_network_mode(listen: str, choice: str, kind: str) -> None:
    assert reachability.first_network_mode(listen, choice) == NetworkMode(kind)


def test_a_network_mode_is_flags_of_p2pd() -> None:
    assert not any(NetworkMode().options().values())
    assert NetworkMode("public").options()["relayService"] and "autoRelay" not in NetworkMode("public").options()
    private = NetworkMode("private", ("/ip4/1.2.3.4/tcp/5/p2p/X", "/ip4/1.2.3.5/tcp/5/p2p/Y")).options()
    assert private["trustedRelays"] == "/ip4/1.2.3.4/tcp/5/p2p/X,/ip4/1.2.3.5/tcp/5/p2p/Y"
