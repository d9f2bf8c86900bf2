"""What peers that may not take part cost a node: connection attempts at a steady rate, in three ways, while its own CPU
and memory are read from outside. `swarmnode bench knock` prints the table.

* streams: a peer with a key of its own, connected, opens stream after stream and shows no pass;
* forged: the same, and every stream shows a forged pass;
* handshakes: it connects anew each time, so that p2pd does the whole cryptographic handshake;
* garbage: raw TCP connections that send nonsense.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import psutil
import uvloop
from hivemind.proto import p2pd_pb2

from swarmnode.errors import RemoteFault
from swarmnode.identity import Identity, peer_id_bytes
from swarmnode.ids import PeerId, RunId
from swarmnode.membership.access import Rules
from swarmnode.membership.door import Door
from swarmnode.ports import Answer, Call
from swarmnode.transport import frame
from swarmnode.transport.address import parse_endpoint
from swarmnode.transport.daemon import DIAL_TIMEOUT_S
from swarmnode.transport.identity import create
from swarmnode.transport.libp2p import Libp2pTransport
from swarmnode.wire import access_pb2
from swarmnode.wire import call_pb2 as wire

PER_MINUTE = 10_000
SECONDS = 20.0
WARM_UP_S = 3.0  # buckets empty, caches fill
TARGET_SHARE = 0.05

_RUN = RunId("be" * 32)
_OWNER = Identity.of_seed(b"o" * 32)


class _Noon:
    def unix_s(self) -> float:
        return 1e9


def run(per_minute: int = PER_MINUTE, seconds: float = SECONDS) -> dict[str, Any]:
    """{"attempts": [{"way", "attempts_per_minute", "node_share", "p2pd_share", "rss_growth_kib"}], "target_share"}.

    Shares are of one core, spent by the victim's own process and by its p2pd; memory is of both.
    """
    result: dict[str, Any] = uvloop.run(_measure(per_minute, seconds))
    return result


async def _measure(per_minute: int, seconds: float) -> dict[str, Any]:
    async with _victim() as (pid, peer, addresses), _attacker() as transport:
        await transport.connect(peer, addresses)
        forged = frame.seal_pass(
            access_pb2.Pass(
                grant=access_pb2.Grant(delegate=b"d" * 32, expires_unix_s=1 << 40, signature=b"s" * 64),
                expires_unix_s=1 << 40,
                signature=b"s" * 64,
            )
        )
        ways: dict[str, Callable[[], Awaitable[None]]] = {
            "streams": lambda: _stream(transport, peer, b""),
            "forged": lambda: _stream(transport, peer, forged),
            "garbage": lambda: _garbage(addresses[0]),
            "handshakes": lambda: _handshake(transport, peer, addresses),
        }
        rows = [await _attack(name, way, pid, per_minute, seconds) for name, way in ways.items()]
    return {"attempts": rows, "target_share": TARGET_SHARE}


async def _attack(
    name: str, way: Callable[[], Awaitable[None]], pid: int, per_minute: int, seconds: float
) -> dict[str, Any]:
    loop, node = asyncio.get_running_loop(), psutil.Process(pid)
    p2pd = node.children()[0]
    async with asyncio.TaskGroup() as tasks:
        await _keep_rate(tasks, way, per_minute, WARM_UP_S)
        before = [sum(process.cpu_times()[:2]) for process in (node, p2pd)]
        rss = sum(process.memory_info().rss for process in (node, p2pd))
        began = loop.time()
        made = await _keep_rate(tasks, way, per_minute, seconds)
        took_s = loop.time() - began
    after = [sum(process.cpu_times()[:2]) for process in (node, p2pd)]
    grown = sum(process.memory_info().rss for process in (node, p2pd)) - rss
    return {
        "way": name,
        "attempts_per_minute": round(60 * made / took_s),
        "node_share": (after[0] - before[0]) / took_s,
        "p2pd_share": (after[1] - before[1]) / took_s,
        "rss_growth_kib": grown // 1024,
    }


async def _keep_rate(
    tasks: asyncio.TaskGroup, way: Callable[[], Awaitable[None]], per_minute: int, seconds: float
) -> int:
    async def once() -> None:
        with contextlib.suppress(RemoteFault, OSError, TimeoutError):
            await way()

    loop = asyncio.get_running_loop()
    began, made = loop.time(), 0
    while (passed := loop.time() - began) < seconds:
        for _ in range(made, int(passed * per_minute / 60)):
            tasks.create_task(once())
            made += 1
        await asyncio.sleep(0.01)
    return made


async def _stream(transport: Libp2pTransport, peer: PeerId, first: bytes) -> None:
    stream = await transport.daemon.open_stream(peer, transport._protocol, DIAL_TIMEOUT_S)
    header = frame.seal_request(wire.Request(ping=wire.Ping()), (), _RUN, 1.0)
    try:
        async with asyncio.timeout(5.0):
            await stream.write(first + frame.preamble(frame.Kind.REQUEST, len(header)) + header)
            await stream.discard()
    finally:
        stream.abort()


async def _garbage(address: str) -> None:
    endpoint = parse_endpoint(address)
    _, writer = await asyncio.open_connection(endpoint.host, endpoint.port)
    writer.write(b"GET / HTTP/1.1\r\n\r\n")
    await asyncio.sleep(0.1)
    writer.close()


async def _handshake(transport: Libp2pTransport, peer: PeerId, addresses: list[str]) -> None:
    leaving = p2pd_pb2.Request(
        type=p2pd_pb2.Request.DISCONNECT, disconnect=p2pd_pb2.DisconnectRequest(peer=peer_id_bytes(peer))
    )
    stream, _ = await transport.daemon._ask(leaving, DIAL_TIMEOUT_S)
    stream.close()
    await transport.daemon.dial(peer, addresses)


@asynccontextmanager
async def _attacker() -> AsyncIterator[Libp2pTransport]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "node.key"
        transport = await Libp2pTransport.create(path, create(path), _RUN)
        try:
            yield transport
        finally:
            await transport.close()


@asynccontextmanager
async def _victim() -> AsyncIterator[tuple[int, PeerId, list[str]]]:
    """A node that lets nobody in, in a process of its own."""
    process = await asyncio.create_subprocess_exec(
        *[sys.executable, "-m", "swarmnode.bench.knock", "victim"],
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    assert process.stdout is not None and process.stdin is not None
    said = json.loads(await process.stdout.readline())
    try:
        yield process.pid, PeerId(said["peer"]), said["addresses"]
    finally:
        process.stdin.close()
        await process.wait()


async def _be_victim() -> None:
    async with _attacker() as transport:
        transport.let_in(Door(Rules(_RUN, _OWNER.public_key, is_open=False), _Noon()))
        transport.serve("ping", _pong, tensor_bytes_max=0)
        transport.start()
        sys.stdout.write(json.dumps({"peer": transport.peer_id, "addresses": await transport.addresses()}) + "\n")
        sys.stdout.flush()
        await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)


async def _pong(peer: PeerId, call: Call) -> Answer:
    return Answer(wire.Reply(pong=wire.Pong()))


if __name__ == "__main__":
    uvloop.run(_be_victim())
