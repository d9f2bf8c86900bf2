"""Why a joiner gets no manifest: each cause is told apart, with what answered, what did not, and how large it was."""

import asyncio
import contextlib
import math
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import pytest

from swarmnode.app.daemon import manifest_source
from swarmnode.app.daemon.manifest_source import fetch_manifest
from swarmnode.base.errors import Forbidden, NotPermitted, Unreachable
from swarmnode.base.identity import Identity
from swarmnode.base.ids import PeerId
from swarmnode.base.ports import Answer, Call
from swarmnode.base.wire import call_pb2 as wire
from swarmnode.net.transport.address import parse_endpoint
from swarmnode.net.transport.libp2p import Libp2pTransport
from tests.support.libp2p_node import node
from tests.support.transport_contract import RUN

pytestmark = [pytest.mark.node, pytest.mark.loop("uvloop")]  # real processes of p2pd


@asynccontextmanager
async def black_hole(address: str, nbytes_max: int) -> AsyncIterator[str]:
    """The address of a path to `address` on which what is written at once beyond `nbytes_max` never arrives, nor
    anything after it, as TCP keeps the order."""
    target = parse_endpoint(address)
    tasks = set[asyncio.Task[None]]()

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(1 << 16):
                if len(data) > nbytes_max:
                    await asyncio.Event().wait()
                writer.write(data)
                await writer.drain()
            writer.close()

    async def carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection(target.host, target.port)
        for ends in ((reader, back), (there, writer)):
            tasks.add(asyncio.get_running_loop().create_task(pump(*ends)))

    server = await asyncio.start_server(carry, "127.0.0.1", 0)
    try:
        yield f"/ip4/127.0.0.1/tcp/{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()
        for task in tasks:
            task.cancel()


async def large(peer: PeerId, call: Call) -> Answer:
    reply = wire.Reply()
    reply.manifest.manifest = bytes(range(256)) * 24
    return Answer(reply)


async def pong(peer: PeerId, call: Call) -> Answer:
    return Answer(wire.Reply(pong=wire.Pong(payload=call.header.ping.payload)))


async def reason(here: Libp2pTransport, peer: PeerId, address: str) -> str:
    with pytest.raises(Unreachable) as caught:
        await fetch_manifest(here, [(peer, [address])], RUN)
    return str(caught.value)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manifest_source, "JOIN_TIMEOUT_S", 12.0)


@pytest.mark.parametrize("nbytes_max", [1300, pytest.param(500, marks=pytest.mark.nightly)])
async def test_a_path_that_drops_large_packets_is_told_as_such(nbytes_max: int) -> None:
    async with node() as (there, _), node() as (here, _):
        there.serve("manifest", large, tensor_bytes_max=0)
        there.serve("ping", pong, tensor_bytes_max=0)
        there.start()
        [address] = await there.addresses()
        async with black_hole(address, nbytes_max) as path:
            said = await reason(here, there.peer_id, path)
    assert "drops large packets" in said and "1280" in said
    assert "a ping of 64 bytes is answered" in said or "accepts connections" in said or "answers no ping" in said


async def test_a_port_that_refuses_one_that_is_mute_and_a_name_that_nobody_has() -> None:
    async with node() as (there, _), node() as (here, _):
        with socket.socket() as mute:
            mute.bind(("127.0.0.1", 0))
            port = mute.getsockname()[1]
            refused = await reason(here, there.peer_id, f"/ip4/127.0.0.1/tcp/{port}")
            assert f"nothing listens at /ip4/127.0.0.1/tcp/{port} (connection refused)" in refused
            mute.listen()
            assert "accepts connections, but no handshake is done" in await reason(
                here, there.peer_id, f"/ip4/127.0.0.1/tcp/{port}"
            )
        nobody = await reason(here, there.peer_id, "/dns4/nobody.invalid/tcp/4001")
        assert "the name nobody.invalid does not resolve" in nobody


async def test_a_refusal_does_not_wait_for_a_meeting_point_that_is_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manifest_source, "JOIN_TIMEOUT_S", math.inf)

    async def refuse(peer: PeerId, call: Call) -> Answer:
        raise Forbidden("this run is by invitation")

    async with node() as (there, _), node() as (here, _):
        there.serve("manifest", refuse, tensor_bytes_max=0)
        there.serve("ping", pong, tensor_bytes_max=0)
        there.start()
        silent = Identity.of_seed(bytes(32)).peer_id
        connect = here.connect

        async def connected(peer: PeerId, addresses: Sequence[str]) -> None:
            await (asyncio.Event().wait() if peer == silent else connect(peer, addresses))

        monkeypatch.setattr(here, "connect", connected)
        addresses = await there.addresses()
        with pytest.raises(NotPermitted, match="by invitation"):
            await fetch_manifest(here, [(silent, addresses), (there.peer_id, addresses)], RUN)
