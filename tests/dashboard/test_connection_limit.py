"""Strangers' connections take no file descriptors from the process that shows the page."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import cast

import pytest
import uvloop

from swarmnode.base.metrics import http_server
from swarmnode.base.metrics.http_server import ConnectionLimit


class Echo(asyncio.Protocol):
    """Answers each line, and calls it a request."""

    limit: ConnectionLimit

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        if data.endswith(b"\n"):
            self.limit.requested(self.transport)
            self.transport.write(data)


@contextlib.asynccontextmanager
async def serving(first_s: float) -> AsyncIterator[tuple[ConnectionLimit, int]]:
    Echo.limit = limit = ConnectionLimit(Echo, first_s=first_s)
    server = await asyncio.get_running_loop().create_server(limit, "127.0.0.1", 0)
    try:
        yield limit, server.sockets[0].getsockname()[1]
    finally:
        server.close()


async def ended(reader: asyncio.StreamReader) -> bool:
    try:
        return await asyncio.wait_for(reader.read(1), 60) == b""
    except ConnectionResetError:
        return True


async def test_a_connection_without_a_request_is_closed_and_one_with_a_request_stays() -> None:
    async with serving(0.2) as (limit, port):
        silent, _ = await asyncio.open_connection("127.0.0.1", port)
        partial, partly = await asyncio.open_connection("127.0.0.1", port)
        partly.write(b"GET / HT")
        served, asking = await asyncio.open_connection("127.0.0.1", port)
        asking.write(b"one\n")
        assert await served.readline() == b"one\n"
        assert await ended(silent) and await ended(partial)
        asking.write(b"two\n")
        assert await served.readline() == b"two\n"
        assert limit.open.total() == 1
        asking.close()


@pytest.mark.parametrize("nearby", [False, True])
async def test_connections_are_few_in_all_and_of_one_address(nearby: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "ADDRESS_MAX", 3)
    if not nearby:
        monkeypatch.setattr(http_server, "NEARBY", ())
    async with serving(600.0) as (limit, port):
        limit.most = 5
        found = [await asyncio.open_connection("127.0.0.1", port) for _ in range(8)]
        most = 5 if nearby else 3
        for reader, _ in found[most:]:
            assert await ended(reader)
        assert limit.open.total() == most
        found[0][1].close()
        async with asyncio.timeout(60):
            while limit.open.total() == most:
                await asyncio.sleep(0.01)
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"room\n")
        assert await reader.readline() == b"room\n"
        for _, writer in found:
            writer.transport.abort()


def test_nodes_run_on_another_loop() -> None:
    """uvloop's transports have no class in common with asyncio's."""

    async def ask() -> bytes:
        async with serving(600.0) as (limit, port):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"page\n")
            found = await asyncio.wait_for(reader.readline(), 60)
            assert limit.open.total() == 1
            writer.close()
            return found

    assert uvloop.run(ask()) == b"page\n"
