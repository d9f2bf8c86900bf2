"""The transport over iroh, beside its contract: deaths, doors, dials, and what is said where it cannot be."""

import asyncio
import contextlib
import os
import socket
import sys
import time
from pathlib import Path

import psutil
import pytest

from swarmnode.base.errors import PeerTimeout, RemoteFault, Unavailable, UsageError, cause_of
from swarmnode.base.identity import Identity
from swarmnode.base.ids import PeerId, RunId
from swarmnode.base.ports import Call
from swarmnode.base.wire import call_pb2 as wire
from swarmnode.base.wire.record_pb2 import Record
from swarmnode.net.membership.record import sign_record
from swarmnode.net.transport.address import Endpoint, parse_endpoint
from swarmnode.net.transport.call_directory import CallDirectory
from swarmnode_methods import iroh_transport
from swarmnode_methods.iroh_socket import close_spare
from swarmnode_methods.iroh_transport import STRANGERS_BURST, IrohTransport, StrangerDoor, speaks_quic
from tests.support.iroh_node import NEEDS_IROH, iroh_node
from tests.support.transport_contract import RUN, ping, pong, record_of

HANG = Call(wire.Request(exchange=wire.Exchange()))


def test_a_door_lets_in_whom_it_knows_and_some_strangers() -> None:
    door = StrangerDoor()
    door.meet("1.1.1.1")
    verdicts = [door.judge(f"2.2.2.{number % 250}", False, 0.0) for number in range(1000)]
    assert verdicts[:30] == ["accept"] * 30
    assert set(verdicts[40:]) == {"retry"}  # forged sources get no further
    assert [door.judge("2.2.2.2", True, 0.0) for _ in range(1000)].count("accept") < STRANGERS_BURST
    assert door.judge("1.1.1.1", True, 0.0) == "accept"
    assert door.judge("1.1.1.1", False, 0.0) == "retry"  # the flood may name a friend's address
    door.deny("2.2.2.2", 0.0)
    door.deny("1.1.1.1", 0.0)
    assert door.judge("2.2.2.2", True, 100.0) == "ignore"
    assert door.judge("1.1.1.1", True, 100.0) == "accept"
    assert door.judge("2.2.2.2", True, 1000.0) == "accept"


async def test_without_the_package_it_is_said_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(iroh_transport, "PACKAGE", "iroh_that_nobody_has")
    with pytest.raises(UsageError, match="pip install iroh"):
        await IrohTransport.create(Path(), Identity.of_seed(bytes(32)), RUN)


@NEEDS_IROH
@pytest.mark.parametrize("listen", ["/ip4/127.0.0.1/tcp/0", ""])
async def test_it_listens_on_udp_only(listen: str) -> None:
    with pytest.raises(UsageError, match=r"/udp/"):
        await IrohTransport.create(Path(), Identity.of_seed(bytes(32)), RUN, [listen] if listen else [])


def udp_sockets() -> set[tuple[str, int]]:
    """Addresses of this process's UDP sockets, as the kernel lists them."""
    return {(one.laddr.ip, one.laddr.port) for one in psutil.Process().net_connections(kind="udp") if one.laddr}


@NEEDS_IROH
@pytest.mark.parametrize("hosts", [["127.0.0.1"], ["::1"], ["::"], ["0.0.0.0"], ["127.0.0.1", "::1"]])
async def test_it_opens_exactly_the_addresses_that_were_told(hosts: list[str]) -> None:
    """iroh opens a socket of each family; for the first second it also asks a router for a port."""
    before = udp_sockets()
    listen = [f"/ip{6 if ':' in host else 4}/{host}/udp/0" for host in hosts]
    async with iroh_node(1, listen=listen) as here, iroh_node(2, listen=listen) as there:
        told = {(one.host, one.port) for node in (here, there) for one in map(parse_endpoint, node.listening)}
        assert [host for host, _ in sorted(told)] == sorted(2 * hosts)
        async with asyncio.timeout(60):
            while udp_sockets() - before != told:
                await asyncio.sleep(0.05)
        families = {"ip6" if ":" in host else "ip4" for host in hosts}
        addresses = await there.addresses()
        assert {parse_endpoint(one).family for one in addresses} <= families
        if "::" not in hosts and "0.0.0.0" not in hosts:
            there.serve("ping", pong, tensor_bytes_max=0)
            there.start()
            await here.connect(there.peer_id, addresses)
            await here.call(there.peer_id, ping(), timeout_s=60, reply_bytes_max=0)


def test_a_spare_socket_is_closed_and_no_other_descriptor_comes_or_goes() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as spare, socket.socket() as other, open(os.devnull):
        spare.bind(("127.0.0.1", 0))
        other.bind(("127.0.0.1", 0))
        where = spare.getsockname()
        listening = other.getsockname()
        before = set(os.listdir("/dev/fd"))
        close_spare([Endpoint("ip4", host, port, "udp") for host, port in (where, listening)])
        assert set(os.listdir("/dev/fd")) == before
        assert where not in udp_sockets()
        assert other.getsockname() == listening
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as again:
            again.bind(where)


@NEEDS_IROH
async def test_two_addresses_of_a_family_are_refused() -> None:
    with pytest.raises(UsageError, match="one address of each family"):
        async with iroh_node(1, listen=["/ip4/127.0.0.1/udp/0", "/ip4/127.0.0.2/udp/0"]):
            pass


@NEEDS_IROH
async def test_an_error_of_iroh_says_what_is_wrong() -> None:
    """Its text is empty in Python: the message is behind a method."""
    import iroh

    builder = iroh.EndpointBuilder()
    builder.apply_minimal()
    builder.bind_addr("127.0.0.1:0")
    with pytest.raises(iroh.IrohError) as caught:
        builder.bind_addr("127.0.0.2:0")
    assert str(caught.value) == ""
    assert "single default address" in cause_of(caught.value)


@NEEDS_IROH
async def test_a_port_in_use_is_said() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as taken:
        taken.bind(("127.0.0.1", 0))
        with pytest.raises(UsageError, match="in use"):
            where = f"/ip4/127.0.0.1/udp/{taken.getsockname()[1]}"
            await IrohTransport.create(Path(), Identity.of_seed(bytes(32)), RUN, [where])


@NEEDS_IROH
async def test_another_key_or_run_is_not_reached() -> None:
    async with iroh_node(1) as here, iroh_node(2) as there, iroh_node(3, RunId("cd" * 32)) as other:
        for peer, addresses in (
            (Identity.of_seed(bytes([9] * 32)).peer_id, await there.addresses()),
            (other.peer_id, await other.addresses()),
        ):
            with pytest.raises(Unavailable, match="cannot be reached"):
                await here.connect(peer, addresses)
            assert not await here.connections()


@NEEDS_IROH
async def test_a_hundred_keys_make_nobody_dial_a_third_party() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as third:
        third.bind(("127.0.0.1", 0))
        third.setblocking(False)
        where = [f"/ip4/127.0.0.1/udp/{third.getsockname()[1]}"]
        async with iroh_node(1) as here:
            for number in range(100, 200):
                key = Identity.of_seed(bytes([number]) * 32).peer_id
                here.remember(key, where)
                if number == 100:
                    dial = asyncio.get_running_loop().create_task(here.connect(key, where))
                    assert await asyncio.get_running_loop().sock_recv(third, 2000)
                    continue
                with pytest.raises(RemoteFault, match="to be dialled now"):
                    await here.call(key, ping(), timeout_s=60, reply_bytes_max=0)
            dial.cancel()
        with pytest.raises(BlockingIOError):
            third.recv(2000)


@NEEDS_IROH
async def test_a_closed_port_is_told_from_quic_and_from_silence() -> None:
    async with iroh_node(1) as here:
        [where] = map(parse_endpoint, await here.addresses())
        assert await speaks_quic(where, 60.0) is True
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as mute:
        mute.bind(("127.0.0.1", 0))
        silent = Endpoint("ip4", "127.0.0.1", mute.getsockname()[1], "udp")
        assert await speaks_quic(silent, 0.2) is None
    assert await speaks_quic(silent, 60.0) is False


@NEEDS_IROH
@pytest.mark.loop("uvloop")
async def test_members_find_each_other_when_the_meeting_point_is_gone() -> None:
    first, second = (Identity.of_seed(bytes([seed] * 32)) for seed in (1, 2))
    async with iroh_node(1) as here, iroh_node(2) as there, iroh_node(3) as meeting:
        point = await CallDirectory.create(meeting, [], RUN, 2, unix_s=time.time)
        known = [(meeting.peer_id, await meeting.addresses())]
        one = await CallDirectory.create(here, known, RUN, 2, unix_s=time.time)
        other = await CallDirectory.create(there, known, RUN, 2, unix_s=time.time)

        async def told(sequence: int) -> list[PeerId]:
            """The peers of stage 0 that `other` sees with a record of this `sequence`, announced now."""
            for directory, me, transport in ((one, first, here), (other, second, there)):
                record = record_of(me, time.time(), ttl_s=60 + sequence, sequence=sequence)
                del record.addresses[:]
                record.addresses.extend(await transport.addresses())
                assert (await directory.announce(sign_record(record, me))).stored
            seen = [Record.FromString(one.record) for [found] in [await other.refresh([0])] for one in found]
            return sorted(PeerId(record.peer_id) for record in seen if record.sequence == sequence)

        assert first.peer_id in await told(1)
        assert await one.lookup(0)  # both know both
        await point.close()
        await meeting.close()
        assert await told(2) == sorted([first.peer_id, second.peer_id])
        ahead_s = await other.clocks_ahead()
        assert ahead_s
        assert all(abs(one) < 60 for one in ahead_s)
        await one.close()
        await other.close()


@NEEDS_IROH
@pytest.mark.nightly
async def test_a_peer_makes_a_node_send_little_to_third_parties() -> None:
    """iroh sends small datagrams to addresses that a connected peer names, to come through NATs, and has no switch for
    it (docs/p2pd.md): some dozens to each of 32 addresses."""
    with contextlib.ExitStack() as stack:
        thirds = [stack.enter_context(socket.socket(socket.AF_INET, socket.SOCK_DGRAM)) for _ in range(60)]
        async with iroh_node(1) as here, iroh_node(2) as liar:
            [port] = [parse_endpoint(one).port for one in await here.addresses()]
            for third in thirds:
                third.bind(("127.0.0.1", 0))
                third.setblocking(False)
                await liar._endpoint.add_external_addr(f"127.0.0.1:{third.getsockname()[1]}")
            await liar.connect(here.peer_id, await here.addresses())
            await asyncio.sleep(10.0)
            heard: dict[int, list[int]] = {}
            for index, third in enumerate(thirds):
                with contextlib.suppress(BlockingIOError):
                    while True:
                        data, (_, source) = third.recvfrom(2000)
                        if source == port:
                            heard.setdefault(index, []).append(len(data))
        assert 0 < len(heard) <= 32  # 0: iroh has become better, say so in docs/p2pd.md
        assert max(map(len, heard.values())) <= 50
        assert max(map(max, heard.values())) <= 64


@NEEDS_IROH
@pytest.mark.live
@pytest.mark.loop("uvloop")
async def test_a_peer_killed_mid_call_is_a_fault_at_once() -> None:
    child = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "tests.transport.test_iroh", stdout=asyncio.subprocess.PIPE
    )
    try:
        assert child.stdout is not None
        peer, address = (await child.stdout.readline()).decode().split()
        async with iroh_node(1) as here:
            await here.connect(PeerId(peer), [address])
            await here.call(PeerId(peer), ping(), timeout_s=60, reply_bytes_max=0)
            call = asyncio.get_running_loop().create_task(
                here.call(PeerId(peer), HANG, timeout_s=25, reply_bytes_max=0)
            )
            await asyncio.sleep(0)
            child.kill()
            with pytest.raises(RemoteFault) as caught:
                await call
            assert not isinstance(caught.value, PeerTimeout)
    finally:
        with contextlib.suppress(ProcessLookupError):
            child.kill()
        await child.wait()


async def _serve() -> None:
    async with iroh_node(2) as transport:
        transport.serve("ping", pong, tensor_bytes_max=0)
        transport.serve("exchange", lambda peer, call: asyncio.Event().wait(), tensor_bytes_max=0)  # type: ignore[arg-type,return-value]
        transport.start()
        print(transport.peer_id, (await transport.addresses())[0], flush=True)
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(_serve())
