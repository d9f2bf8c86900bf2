"""Cost to a node of connection attempts by peers without access: its CPU and memory at a steady rate of attempts, read
from outside, including the seconds before it reacts. `swarmnode bench knock` prints the table.

* streams: a connected peer with its own key opens many streams and shows no pass;
* forged: the same, but every stream shows a forged pass;
* handshakes: the peer reconnects each time, so that p2pd does the whole cryptographic handshake;
* garbage: raw TCP connections from one address send random bytes;
* spread: the same, each from another address.

During each attack an invited newcomer joins from another address than the attacker's: `newcomer_s` is the time to its
first answer. Without `net/transport/flood_guard.py` streams cost p2pd 8 to 10 % of a core. Go's settings did not bring
that below 5 % (GOGC=400, or off with a GOMEMLIMIT: 8 to 9 %, and 60 MB more memory; GOMAXPROCS=1: 6 to 8.5 %).
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import sys
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import psutil
import uvloop
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from swarmnode.base.errors import RemoteFault, Unavailable
from swarmnode.base.identity import Identity
from swarmnode.base.ids import PeerId, RunId
from swarmnode.base.ports import Answer, Call
from swarmnode.base.wire import access_pb2
from swarmnode.base.wire import call_pb2 as wire
from swarmnode.net.transport import frame
from swarmnode.net.transport.address import parse_endpoint
from swarmnode.net.transport.key_file import create
from swarmnode.net.transport.libp2p import Libp2pTransport
from swarmnode.net.transport.p2pd_process import DIAL_TIMEOUT_S
from swarmnode.run import owner
from swarmnode.run.admission.access import AccessRules, sign_grant, sign_pass
from swarmnode.run.admission.admission import Admission

PER_MINUTE = 10_000
SECONDS = 30.0
FIRST_S = 8.0  # time for buckets to empty, caches to fill and the gate to react
TARGET_SHARE = 0.05

_RUN = RunId("be" * 32)
_OWNER = Ed25519PrivateKey.from_private_bytes(b"o" * 32)
_DELEGATE = Identity.of_seed(b"d" * 32)
_RULES = AccessRules(_RUN, owner.public_bytes(_OWNER), is_open=False)
ATTACKER = "127.0.0.2"
NEWCOMER = "127.0.0.3"


class _Noon:
    def unix_s(self) -> float:
        return 1e9


def run(per_minute: int = PER_MINUTE, seconds: float = SECONDS) -> dict[str, Any]:
    """{"attempts": [{"way", "attempts_per_minute", "node_share", "p2pd_share", "later_share", "rss_growth_kib",
    "newcomer_s"}], "target_share"}.

    Shares are of one core, spent by the victim's own process and by its p2pd from the first attempt on; `later_share`
    (of both together) and the growth of both memories are counted after FIRST_S.
    """
    result: dict[str, Any] = uvloop.run(_measure(per_minute, seconds))
    return result


async def _measure(per_minute: int, seconds: float) -> dict[str, Any]:
    rows = [await _attack(way, per_minute, seconds) for way in ("streams", "forged", "handshakes", "garbage", "spread")]
    return {"attempts": rows, "target_share": TARGET_SHARE}


async def _attack(name: str, per_minute: int, seconds: float) -> dict[str, Any]:
    """Run one kind of attack against a fresh node, so that knowledge of one attacker does not help against the next."""
    loop = asyncio.get_running_loop()
    async with (
        _victim() as (pid, peer, addresses),
        _peer(ATTACKER) as transport,
        _peer(ATTACKER) as second,
        asyncio.TaskGroup() as tasks,
    ):
        for attacker in (transport, second):
            await attacker.connect(peer, addresses)
        way = _way(name, (transport, second), peer, addresses)
        node = psutil.Process(pid)
        p2pd = node.children()[0]
        marks = [_mark(node, p2pd, loop.time())]
        made = await _keep_rate(tasks, way, per_minute, FIRST_S)
        marks.append(_mark(node, p2pd, loop.time()))
        joining = tasks.create_task(_join(peer, addresses))
        made += await _keep_rate(tasks, way, per_minute, seconds - FIRST_S)
        marks.append(_mark(node, p2pd, loop.time()))
    first, begun, ended = marks
    took_s = ended[0] - first[0]
    later_s = ended[0] - begun[0]
    return {
        "way": name,
        "attempts_per_minute": round(60 * made / took_s),
        "node_share": (ended[1] - first[1]) / took_s,
        "p2pd_share": (ended[2] - first[2]) / took_s,
        "later_share": (ended[1] + ended[2] - begun[1] - begun[2]) / later_s,
        "rss_growth_kib": (ended[3] - begun[3]) // 1024,
        "newcomer_s": joining.result(),
    }


def _mark(node: psutil.Process, p2pd: psutil.Process, now: float) -> tuple[float, float, float, int]:
    spent = [sum(process.cpu_times()[:2]) for process in (node, p2pd)]
    return now, spent[0], spent[1], sum(process.memory_info().rss for process in (node, p2pd))


def _way(
    name: str, attackers: Sequence[Libp2pTransport], peer: PeerId, addresses: list[str]
) -> Callable[[], Awaitable[None]]:
    transport = attackers[0]
    turns = itertools.cycle([(one, asyncio.Lock()) for one in attackers])
    forged = frame.seal_pass(
        access_pb2.Pass(
            grant=access_pb2.Grant(delegate=b"d" * 32, expires_unix_s=1 << 40, signature=b"s" * 64),
            expires_unix_s=1 << 40,
            signature=b"s" * 64,
        )
    )
    hosts = (f"127.{n % 250}.{n // 250 % 250}.{2 + n % 97}" for n in itertools.count(1))
    return {
        "streams": lambda: _stream(transport, peer, b""),
        "forged": lambda: _stream(transport, peer, forged),
        "handshakes": lambda: _handshake(*next(turns), peer, addresses),
        "garbage": lambda: _garbage(addresses[0], ATTACKER),
        "spread": lambda: _garbage(addresses[0], next(hosts)),
    }[name]


async def _join(peer: PeerId, addresses: list[str]) -> float:
    """Seconds until a newcomer with access, at its own address, has its first answer."""
    loop = asyncio.get_running_loop()
    began = loop.time()
    async with _peer(NEWCOMER, _invited) as transport:
        while True:
            with contextlib.suppress(RemoteFault, Unavailable):
                await transport.connect(peer, addresses)
                ping = Call(wire.Request(ping=wire.Ping()))
                await transport.call(peer, ping, timeout_s=5.0, reply_bytes_max=0)
                return loop.time() - began
            await asyncio.sleep(0.5)


async def _keep_rate(
    tasks: asyncio.TaskGroup, way: Callable[[], Awaitable[None]], per_minute: int, seconds: float
) -> int:
    async def once() -> None:
        with contextlib.suppress(RemoteFault, OSError, TimeoutError):
            await way()

    loop = asyncio.get_running_loop()
    began = loop.time()
    made = 0
    while (passed := loop.time() - began) < seconds:
        for _ in range(made, int(passed * per_minute / 60)):
            tasks.create_task(once())
            made += 1
        await asyncio.sleep(0.01)
    return made


async def _stream(transport: Libp2pTransport, peer: PeerId, first: bytes) -> None:
    stream, _ = await transport.daemon.open_stream(peer, [transport.protocol], DIAL_TIMEOUT_S)
    header = frame.seal_request(wire.Request(ping=wire.Ping()), (), _RUN, 1.0)
    try:
        async with asyncio.timeout(5.0):
            await stream.write(first + frame.preamble(frame.FrameKind.REQUEST, len(header)) + header)
            await stream.discard()
    finally:
        stream.abort()


async def _garbage(address: str, host: str) -> None:
    endpoint = parse_endpoint(address)
    async with asyncio.timeout(2.0):
        _, writer = await asyncio.open_connection(endpoint.host, endpoint.port, local_addr=(host, 0))
    writer.write(b"GET / HTTP/1.1\r\n\r\n")
    await asyncio.sleep(0.1)
    writer.close()


async def _handshake(transport: Libp2pTransport, one: asyncio.Lock, peer: PeerId, addresses: list[str]) -> None:
    async with one:
        await transport.daemon.dial(peer, addresses)
        await transport.daemon.disconnect(peer)


def _invited(machine: PeerId) -> Admission:
    until = 2_000_000_000
    granted = sign_pass(_DELEGATE, _RUN, sign_grant(_OWNER, _RUN, _DELEGATE, until), machine, until)
    return Admission(_RULES, _Noon(), granted)


def _closed(machine: PeerId) -> Admission:
    return Admission(_RULES, _Noon())


@asynccontextmanager
async def _peer(host: str, admission: Callable[[PeerId], Admission] = _closed) -> AsyncIterator[Libp2pTransport]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "node.key"
        transport = await Libp2pTransport.create(path, create(path), _RUN, (f"/ip4/{host}/tcp/0",))
        try:
            transport.let_in(admission(transport.peer_id))
            transport.serve("ping", _pong, tensor_bytes_max=0)
            transport.start()
            yield transport
        finally:
            await transport.close()


@asynccontextmanager
async def _victim() -> AsyncIterator[tuple[int, PeerId, list[str]]]:
    """A node that admits no peer, in its own process."""
    process = await asyncio.create_subprocess_exec(
        *[sys.executable, "-m", "benchmarks.micro.connection_flood", "victim"],
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
    async with _peer("0.0.0.0") as transport:
        port = parse_endpoint((await transport.addresses())[0]).port
        said = {"peer": transport.peer_id, "addresses": [f"/ip4/127.0.0.1/tcp/{port}"]}
        sys.stdout.write(json.dumps(said) + "\n")
        sys.stdout.flush()
        await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)


async def _pong(peer: PeerId, call: Call) -> Answer:
    return Answer(wire.Reply(pong=wire.Pong()))


if __name__ == "__main__":
    uvloop.run(_be_victim())
