"""Proxies that shape connections, with real sockets: bytes, their lines and the least time they take."""

import asyncio
import os
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from swarmnode.app.bench.line_proxy import HOST, LineProxies, LineSpec, ShapedNode

BOUND_S = 60.0


@asynccontextmanager
async def echoing(node: ShapedNode) -> AsyncIterator[None]:
    """A server in the node's place, which sends back what it gets."""

    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()
        writer.close()

    async with await asyncio.start_server(echo, HOST, node.port):
        yield


async def sent_and_back(proxies: LineProxies, caller: ShapedNode | None, called: ShapedNode, data: bytes) -> bytes:
    """What comes back of `data`, called from the port that `caller` listens at."""
    local = None if caller is None else (HOST, caller.port)
    reader, writer = await asyncio.open_connection(HOST, called.announced, local_addr=local)
    writer.write(data)
    writer.write_eof()
    back = await asyncio.wait_for(reader.read(-1), BOUND_S)
    writer.close()
    return back


async def test_a_connection_goes_through_both_lines_and_takes_its_time() -> None:
    loop = asyncio.get_running_loop()
    proxies = LineProxies(1)
    data = os.urandom(300_000)
    one, other = (proxies.add(name, LineSpec(8e6, 16e6, 0.05)) for name in ("one", "other"))
    async with echoing(other):
        begun_s = loop.time()
        assert await sent_and_back(proxies, one, other, data) == data
        took_s = loop.time() - begun_s
    # The handshake's round trip, one more for the bytes and their echo, and 0.3 s of bytes on the thinner line.
    assert took_s >= 0.1 + 0.1 + 8 * len(data) / 8e6
    assert (one.up.nbytes, other.down.nbytes, other.up.nbytes, one.down.nbytes) == (len(data),) * 4
    assert proxies.unknown == 0
    await proxies.close()


async def test_a_caller_at_no_nodes_port_is_shaped_by_the_called_line() -> None:
    proxies = LineProxies(1)
    data = os.urandom(1000)
    one = proxies.add("one", LineSpec(1e9, 1e9, 0.0))
    async with echoing(one):
        assert await sent_and_back(proxies, None, one, data) == data
    await proxies.close()
    assert one.down.nbytes == one.up.nbytes == len(data) and proxies.unknown == 1


async def test_nothing_is_left_after_the_end() -> None:
    proxies = LineProxies(1)
    node = proxies.add("one", LineSpec(1e6, 1e6, 0.0))
    port = node.announced
    with socket.create_server((HOST, node.port)):
        _, writer = await asyncio.open_connection(HOST, port)
        writer.write(b"x")
        while not node.down.nbytes:
            await asyncio.sleep(0.001)
        await proxies.close()
        writer.close()
    with socket.create_server((HOST, port)):
        pass
    assert asyncio.all_tasks() == {asyncio.current_task()}


async def test_a_node_that_does_not_listen_ends_the_connection() -> None:
    proxies = LineProxies(1)
    node = proxies.add("one", LineSpec(1e6, 1e6, 0.0))
    reader, writer = await asyncio.open_connection(HOST, node.announced)
    with suppress(ConnectionResetError):
        assert await asyncio.wait_for(reader.read(1), BOUND_S) == b""
    writer.close()
    await proxies.close()
