"""Nobody is dialled who was not met: the book alone, and before a real p2pd."""

import asyncio
import socket

import pytest
from hivemind.p2p.p2p_daemon_bindings.utils import P2PDaemonError
from hivemind.proto import p2pd_pb2
from hivemind.utils.multiaddr import Multiaddr

from swarmnode.base.errors import RemoteFault, Unavailable
from swarmnode.base.identity import Identity, peer_id_bytes
from swarmnode.net.transport.address import numeric, parse_endpoint
from swarmnode.net.transport.dial_book import MET_PERIOD_S, MET_PORTS, PERIOD_S, DialBook
from tests.support.libp2p_node import node, until

HERE = "/ip4/127.0.0.1/tcp/0"


def test_a_stranger_is_dialled_once_a_minute_whatever_the_keys_ports_and_forms() -> None:
    book = DialBook()
    dials = [book.permit(host, port, 0.1 * tick)[0] for tick in range(600) for host, port in THIRD]
    assert sum(dials) == 1
    assert book.permit("93.184.215.14", 80, PERIOD_S)[0]


THIRD = [
    (host, port) for host in ("93.184.215.14", "::ffff:93.184.215.14", "2002:5db8:d70e::1") for port in (80, 81, 4001)
]


def test_a_peer_that_was_met_is_dialled_freely_and_its_neighbours_a_few_times() -> None:
    book = DialBook()
    book.meet("93.184.215.14", 4001)
    assert all(book.permit("93.184.215.14", 4001, 0.0)[0] for _ in range(100))
    assert sum(book.permit("93.184.215.14", 1000 + n, 0.0)[0] for n in range(100)) == MET_PORTS
    assert not book.permit("93.184.215.14", 1000, MET_PERIOD_S - 1.0)[0], "each port now and then"
    assert book.permit("93.184.215.14", 1000, MET_PERIOD_S)[0], "two that dialled each other at once both failed"


def test_the_local_network_is_dialled_where_the_swarm_lives_in_it() -> None:
    assert not DialBook().permit("192.168.1.1", 80, 0.0)[0]
    assert not DialBook().permit("127.0.0.1", 80, 0.0)[0]
    assert DialBook(lan=True).permit("192.168.1.7", 80, 0.0)[0]
    named = DialBook()
    named.name([parse_endpoint("/ip4/192.168.1.2/tcp/4001")])
    assert named.permit("192.168.1.7", 80, 0.0)[0] and named.permit("192.168.1.2", 4001, 0.0)[0]
    assert not named.permit("127.0.0.1", 80, 0.0)[0]
    met = DialBook()
    met.meet("192.168.1.7", 0)
    assert met.permit("192.168.1.7", 80, 0.0)[0]
    assert not DialBook([HERE], lan=True).permit("169.254.169.254", 80, 0.0)[0]


def test_one_machine_may_hold_a_swarm() -> None:
    book = DialBook([HERE])
    assert all(book.permit("127.0.0.1", port, 0.0)[0] for port in range(1000, 1100))
    assert not any(book.permit("127.0.0.1", port, MET_PERIOD_S - 1.0)[0] for port in range(1000, 1100))


def test_two_addresses_of_a_peer_are_tried() -> None:
    book = DialBook()
    told = [f"/ip4/{host}/tcp/1" for host in ("10.0.0.1", "1.1.1.1", "1.1.1.2", "1.1.1.3")]
    told += [f"/dns4/relay-{number}.example/tcp/1/p2p/R/p2p-circuit" for number in range(9)]
    book.meet("1.1.1.3", 0)
    assert book.choose(told) == ["/ip4/1.1.1.3/tcp/1", "/ip4/1.1.1.1/tcp/1", *told[4:6]]


def test_a_dial_that_did_not_happen_does_not_count() -> None:
    book = DialBook()
    assert book.permit("1.1.1.1", 1, 0.0)[0]
    book.revoke("1.1.1.1", 1)
    assert book.permit("1.1.1.1", 1, 0.0)[0]


async def test_names_become_addresses() -> None:
    assert await numeric(["/dns4/localhost/tcp/7", "/ip4/1.1.1.1/tcp/1"]) == [
        "/ip4/127.0.0.1/tcp/7",
        "/ip4/1.1.1.1/tcp/1",
    ]


@pytest.mark.live
@pytest.mark.loop("uvloop")
async def test_a_hundred_keys_make_nobody_dial_a_third_party() -> None:
    hits = 0
    packets = socket.socket(type=socket.SOCK_DGRAM)
    packets.bind(("127.0.0.1", 0))

    def hit(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal hits
        hits += 1

    third = await asyncio.start_server(hit, "127.0.0.1", 0)
    where = f"/ip4/127.0.0.1/tcp/{third.sockets[0].getsockname()[1]}"
    forms = [where, where.replace("/ip4/127.0.0.1", "/ip6/::ffff:127.0.0.1")]
    async with node() as (here, _), node() as (there, peer):
        for number in range(100):
            key = Identity.of_seed(bytes([number]) * 32).peer_id
            here.remember(key, forms)
            with pytest.raises((RemoteFault, Unavailable)):
                async with asyncio.timeout(60):
                    await here._daemon.dial(key, forms)
        await until(lambda: hits > 0)
        assert hits == 1
        quic = Multiaddr(f"/ip4/127.0.0.1/udp/{packets.getsockname()[1]}/quic-v1").to_bytes()  # as a peer identifies
        named = p2pd_pb2.ConnectRequest(peer=peer_id_bytes(key), addrs=[quic], timeout=3)
        with pytest.raises(P2PDaemonError, match="failed to dial"):
            await here._daemon._ask(p2pd_pb2.Request(type=p2pd_pb2.Request.CONNECT, connect=named), 30)
        with pytest.raises(BlockingIOError):
            packets.recv(1, socket.MSG_DONTWAIT)
        there.start()
        await here.connect(peer.peer_id, await there.addresses())  # who is there is reached meanwhile
    third.close()
    packets.close()
