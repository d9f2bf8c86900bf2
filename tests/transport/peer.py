"""A peer in a process of its own: `python -m tests.transport.peer KEYFILE RUN LISTEN [BOOTSTRAP...]`.

Says who it is in one JSON line; with bootstraps it joins the directory, announces itself and says whom it sees. Ends
when its standard input does.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import uvloop

from swarmnode.ids import PeerId, RunId
from swarmnode.membership.record import sign_record
from swarmnode.ports import Answer, Call
from swarmnode.transport.address import parse_bootstraps
from swarmnode.transport.directory import DhtDirectory
from swarmnode.transport.identity import load_or_create
from swarmnode.transport.libp2p import Libp2pTransport
from swarmnode.wire import call_pb2 as wire

from .contract import Hanging, echo, pong, record_of

JOIN = "--join"


def say(**fields: object) -> None:
    print(json.dumps(fields), flush=True)


async def main(key: str, run: str, listen: str, *bootstraps: str) -> None:
    path, run_id = Path(key), RunId(run)
    identity = load_or_create(path)
    transport = await Libp2pTransport.create(path, identity, run_id, [listen])
    hanging, cancelled = Hanging(), 0

    async def count(peer: PeerId, call: Call) -> Answer:
        return Answer(wire.Reply(committed=wire.Committed(round=cancelled)))

    async def hang(peer: PeerId, call: Call) -> Answer:
        nonlocal cancelled
        try:
            return await hanging(peer, call)
        except asyncio.CancelledError:
            cancelled += 1
            raise

    async def back(peer: PeerId, call: Call) -> Answer:
        answer = await transport.call(peer, Call(wire.Request(ping=wire.Ping())), timeout_s=10, reply_bytes_max=0)
        return Answer(wire.Reply(pong=answer.header.pong))

    transport.serve("ping", pong, tensor_bytes_max=0)
    transport.serve("process", echo, tensor_bytes_max=64 << 20)
    transport.serve("exchange", hang, tensor_bytes_max=0)
    transport.serve("commit", count, tensor_bytes_max=0)
    transport.serve("manifest", back, tensor_bytes_max=0)
    directory = None
    if bootstraps:
        known = parse_bootstraps([b for b in bootstraps if b != JOIN])
        directory = await DhtDirectory.create(transport, known, run_id, 2)
    transport.start()
    addresses = await transport.addresses()
    sockets = str(transport._sockets.path)
    say(peer=transport.peer_id, addresses=addresses, pid=os.getpid(), p2pd=transport.daemon.pid, sockets=sockets)
    if directory is not None:
        assert await directory.announce(sign_record(record_of(identity, time.time(), ttl_s=60), identity))
        say(announced=True)
    lines = asyncio.get_running_loop().run_in_executor
    while await lines(None, sys.stdin.readline):  # each line asks for one lookup
        assert directory is not None
        found = await directory.lookup(0)
        say(seen=sorted(wire_record(signed.record) for signed in found))
    if directory is not None:
        await directory.close()
    await transport.close()
    say(tasks=len(asyncio.all_tasks()))


def wire_record(raw: bytes) -> str:
    from swarmnode.wire import record_pb2

    return record_pb2.Record.FromString(raw).peer_id


class PeerProcess:
    """The test's hold on a peer."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.said: dict[str, Any] = {}

    @property
    def peer_id(self) -> PeerId:
        return PeerId(self.said["peer"])

    @property
    def addresses(self) -> list[str]:
        return list(self.said["addresses"])

    @property
    def bootstraps(self) -> list[str]:
        return [f"{address}/p2p/{self.peer_id}" for address in self.addresses]

    async def line(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        async with asyncio.timeout(60):
            raw = await self.process.stdout.readline()
        assert raw, "the peer ended"
        answer: dict[str, Any] = json.loads(raw)
        return answer

    async def look(self) -> list[str]:
        assert self.process.stdin is not None
        self.process.stdin.write(b"look\n")
        return list((await self.line())["seen"])

    async def end(self) -> None:
        """Ask it to leave, and wait."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        async with asyncio.timeout(60):
            await self.process.wait()


@asynccontextmanager
async def peer_process(
    key: Path, run_id: RunId, listen: str = "/ip4/127.0.0.1/tcp/0", bootstraps: Sequence[str] = ()
) -> AsyncIterator[PeerProcess]:
    """A running peer; killed at the end if it still lives."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "tests.transport.peer",
        str(key),
        run_id,
        listen,
        *bootstraps,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        cwd=Path(__file__).parents[2],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    peer = PeerProcess(process)
    try:
        peer.said = await peer.line()
        yield peer
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


if __name__ == "__main__":
    uvloop.run(main(*sys.argv[1:]))
