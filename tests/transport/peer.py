"""A peer in a process of its own: joins, serves, and does what the test asks of it through a pipe.

Peers are forked from a server that has imported hivemind once (two CPU seconds), and never from the test itself.
"""

import asyncio
import multiprocessing
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import uvloop

from swarmnode.base.ids import PeerId, RunId
from swarmnode.base.ports import Answer, Call
from swarmnode.base.wire import call_pb2 as wire
from swarmnode.base.wire import record_pb2
from swarmnode.net.membership.record import sign_record
from swarmnode.net.transport.address import parse_bootstraps
from swarmnode.net.transport.directory import DhtDirectory
from swarmnode.net.transport.key_file import load_or_create
from swarmnode.net.transport.libp2p import Libp2pTransport
from tests.support.transport_contract import Hanging, echo, pong, record_of

STAGES = 2
LINE_TIMEOUT_S = 90.0


def peer_main(pipe: Connection, key: str, run: str, listen: str, bootstraps: list[str]) -> None:
    uvloop.run(live(pipe, Path(key), RunId(run), listen, bootstraps))


def serve(transport: Libp2pTransport) -> None:
    """ping, process (echo), exchange (hangs), manifest (calls back)."""

    async def back(peer: PeerId, call: Call) -> Answer:
        answer = await transport.call(peer, Call(wire.Request(ping=wire.Ping())), timeout_s=60, reply_bytes_max=0)
        return Answer(wire.Reply(pong=answer.header.pong))

    transport.serve("ping", pong, tensor_bytes_max=0)
    transport.serve("process", echo, tensor_bytes_max=64 << 20)
    transport.serve("exchange", Hanging(), tensor_bytes_max=0)
    transport.serve("manifest", back, tensor_bytes_max=0)


async def live(pipe: Connection, path: Path, run_id: RunId, listen: str, bootstraps: list[str]) -> None:
    identity = load_or_create(path)
    transport = await Libp2pTransport.create(path, identity, run_id, [listen])
    serve(transport)
    directory = await DhtDirectory.create(transport, parse_bootstraps(bootstraps), run_id, STAGES, unix_s=time.time)
    pipe.send(
        {
            "peer": transport.peer_id,
            "addresses": await transport.addresses(),
            "p2pd": transport.daemon.pid,
            "sockets": str(transport._sockets.path),
        }
    )
    loop = asyncio.get_running_loop()
    while (asked := await loop.run_in_executor(None, pipe.recv)) != "end":
        if asked == "announce":
            record = record_of(identity, time.time(), ttl_s=60)
            pipe.send((await directory.announce(sign_record(record, identity))).stored)
        else:
            found = await directory.lookup(0)
            pipe.send(sorted(record_pb2.Record.FromString(signed.record).peer_id for signed in found))
    await directory.close()
    await transport.close()
    pipe.send(len(asyncio.all_tasks()))


class PeerProcess:
    """The test's hold on a peer."""

    def __init__(self, process: BaseProcess, pipe: Connection) -> None:
        self.process = process
        self._pipe = pipe
        self.said: dict[str, Any] = {}

    @property
    def pid(self) -> int:
        assert self.process.pid is not None
        return self.process.pid

    @property
    def peer_id(self) -> PeerId:
        return PeerId(self.said["peer"])

    @property
    def addresses(self) -> list[str]:
        return list(self.said["addresses"])

    @property
    def bootstraps(self) -> list[str]:
        return [f"{address}/p2p/{self.peer_id}" for address in self.addresses]

    async def answer(self) -> Any:
        def wait() -> Any:
            assert self._pipe.poll(LINE_TIMEOUT_S), "the peer says nothing"
            return self._pipe.recv()

        return await asyncio.get_running_loop().run_in_executor(None, wait)

    async def ask(self, what: str) -> Any:
        """announce | lookup | end"""
        self._pipe.send(what)
        return await self.answer()

    async def ended(self) -> None:
        await asyncio.get_running_loop().run_in_executor(None, self.process.join, LINE_TIMEOUT_S)
        assert self.process.exitcode is not None


@asynccontextmanager
async def peer_process(
    key: Path, run_id: RunId, listen: str = "/ip4/127.0.0.1/tcp/0", bootstraps: Sequence[str] = ()
) -> AsyncIterator[PeerProcess]:
    """A running peer; killed at the end if it still lives."""
    root = str(Path(__file__).parents[2])
    if root not in sys.path:
        sys.path.insert(0, root)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    ours, theirs = context.Pipe()
    process = context.Process(target=peer_main, args=(theirs, str(key), run_id, listen, list(bootstraps)))
    process.start()
    theirs.close()
    peer = PeerProcess(process, ours)
    try:
        peer.said = await peer.answer()
        yield peer
    finally:
        if process.is_alive():
            process.kill()
        await peer.ended()
        ours.close()
