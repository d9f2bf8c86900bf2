"""An attacker on the resources of nodes, as its own process (`bench attack --attacks silent`): a peer of an open run
with its own key, which announces itself as a replica and then wastes what others have.

    silent      streams that announce tensors of up to 1 GiB and send none of their bytes; each is opened again at once
    records     valid signed records of ever new keys that claim to train, on calls and in the DHT
    keys        valid records of ever new keys, all stored under the keys of the DHT that the nodes read
    malformed   frames that do not parse, sizes that contradict each other, small packets that decode to gigabytes
    events      an eternal JOINING that answers pings, signs receipts and forges evidence, each of which would be logged

`python -m benchmarks.attack.flooder WAY` reads one JSON object (`Order`) from stdin, then lines "on",
"off" and "sent", and answers each with the number of messages it has sent so far. After "off" it uses as much processor
time for nothing as it did during the attack, so that a victim on the same machine loses by both what it loses to a busy
processor, and the difference is the attack's.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import uvloop

from swarmnode.base.errors import RemoteFault, Unavailable
from swarmnode.base.header import HEADER_BYTES_MAX, VERSION, seal_request
from swarmnode.base.identity import Identity
from swarmnode.base.ids import PeerId, RunId, seeded
from swarmnode.base.ports import Answer, Call, Packet, Verdict
from swarmnode.base.wire import call_pb2 as wire
from swarmnode.base.wire import record_pb2
from swarmnode.net.membership.record import sign_record
from swarmnode.net.transport import frame
from swarmnode.net.transport.directory import DhtDirectory
from swarmnode.net.transport.key_file import create
from swarmnode.net.transport.libp2p import Libp2pTransport
from swarmnode.net.transport.p2pd_process import DIAL_TIMEOUT_S
from swarmnode.net.transport.stream import P2pdStream
from swarmnode.train.gossip.acceptance import bare, receipt

GIB = 1 << 30
SIZES = (GIB, 64 << 20, 8 << 20, 1 << 20, 128 << 10)  # announced in turn: some method here takes each of the smaller
STREAMS = 2  # silent ones of one attacker to each node; two attackers have four
CALL_TIMEOUT_S = 5.0
TTL_S = 50.0
JOIN_MAX_S = 110.0  # guess: at the lowest priority, on a machine that others load
LOWEST = 19  # niceness
SLICE_S = 0.002  # of processor time used for nothing at a time
PAUSE_S = 0.02  # guess: between two streams, so that a refusal is not a busy loop here


@dataclass(frozen=True, slots=True)
class Order:
    """The target: the run, a folder for the key, messages a second to each node, and the nodes: peer id, stage and
    addresses."""

    run_id: str
    folder: str
    stages: int
    rate: float
    targets: Sequence[tuple[str, int, list[str]]]


class ResourceAttacker:
    """One attacking peer. `sent` counts its messages."""

    def __init__(self, transport: Libp2pTransport, identity: Identity, order: Order) -> None:
        self._transport = transport
        self._identity = identity
        self._order = order
        self._run_id = RunId(order.run_id)
        self._numbers = itertools.count(1)
        self._random = seeded("attacker", identity.seed.hex())
        self._directory: DhtDirectory | None = None
        self.sent = 0

    def record(self, identity: Identity, stage: int, state: record_pb2.NodeState) -> record_pb2.SignedRecord:
        """A valid record of `identity`."""
        now_ms = int(time.time() * 1000)  # noqa: TID251  an attacker's own clock
        found = record_pb2.Record(
            run_id=self._run_id,
            peer_id=identity.peer_id,
            sequence=now_ms + next(self._numbers),
            expires_unix_ms=now_ms + int(TTL_S * 1000),
            stage=stage,
            state=state,
            addresses=["/ip4/127.0.0.1/tcp/9"],
            samples_per_second=1e4,
            joined_unix_ms=now_ms,
        )
        return sign_record(found, identity)

    # ---- the ways

    async def silent(self, peer: PeerId, stage: int) -> None:
        """STREAMS streams that each announce a message and never send it."""
        async with asyncio.TaskGroup() as tasks:
            for first in range(STREAMS):
                tasks.create_task(self._silent(peer, stage, first))

    async def _silent(self, peer: PeerId, stage: int, first: int) -> None:
        before = (stage - 1) % self._order.stages
        for number in itertools.count(first):
            nbytes = SIZES[number % len(SIZES)]
            header = wire.Request(
                process=wire.Process(microbatch_id=self._random.randbytes(16), feeder=self._identity.peer_id)
            )
            header.process.itinerary.extend((before, stage))
            header.process.position = 1
            header.process.samples = 8
            if number % 2:
                header = wire.Request(exchange=wire.Exchange(round=number, stage=stage, samples=8))
                before = stage
            spec = wire.TensorSpec(dtype="u8", shape=[nbytes], nbytes=nbytes)
            await self._raw(peer, before, header, [spec], b"")

    async def records(self, peer: PeerId, stage: int) -> None:
        """A record of a key that was made for it, on a call or in the DHT, or one more of our own, ever elsewhere."""
        kind = next(self._numbers) % 3
        at = self._random.randrange(self._order.stages)
        whose = self._identity if kind == 0 else Identity.generate()
        told = self.record(whose, at, record_pb2.NODE_STATE_TRAINING)
        if kind < 2:
            opening = wire.Opening(microbatch_id=self._random.randbytes(16), position=1)
            await self._call(peer, wire.Request(opening=opening, record=told))
        elif self._directory is not None:
            self.sent += 1
            await self._directory.announce(told)

    async def keys(self, peer: PeerId, stage: int) -> None:
        """A record of a key that was made for it, stored in the DHT at `peer`."""
        told = self.record(Identity.generate(), stage, record_pb2.NODE_STATE_TRAINING)
        assert self._directory is not None
        self.sent += 1
        await self._directory._store_at(peer, record_pb2.Record.FromString(told.record), told)

    async def malformed(self, peer: PeerId, stage: int) -> None:
        """One of the frames that a parser could fall over."""
        kind = self._random.randrange(6)
        noise = self._random.randbytes
        before = (stage - 1) % self._order.stages
        if kind == 0:
            await self._bytes(peer, noise(4096))
        elif kind == 1:  # the largest header, of noise
            await self._bytes(peer, frame.preamble(frame.FrameKind.REQUEST, HEADER_BYTES_MAX) + noise(HEADER_BYTES_MAX))
        elif kind == 2:  # the largest header that parses: many tensors
            specs = [wire.TensorSpec(dtype="f32", shape=[1], nbytes=4)] * 50_000
            await self._raw(peer, before, wire.Request(process=wire.Process()), specs, b"")
        elif kind == 3:  # sizes that contradict each other
            spec = wire.TensorSpec(dtype="f32", shape=[2**62, 2**62], nbytes=8)
            await self._raw(peer, before, wire.Request(process=wire.Process()), [spec], noise(8))
        elif kind == 4:  # a small packet that says it decodes to 4 GiB
            codec = self._random.choice(["modular4", "topk", "int8", "ternary"])
            spec = wire.TensorSpec(dtype="f32", shape=[GIB], nbytes=64, codec=codec)
            body = wire.Exchange(round=next(self._numbers), stage=stage, samples=8)
            await self._raw(peer, stage, wire.Request(exchange=body), [spec], noise(64))
        else:  # a microbatch of noise
            process = wire.Process(
                microbatch_id=self._random.randbytes(16), feeder=self._identity.peer_id, samples=8, position=1
            )
            process.itinerary.extend((before, stage))
            specs = [wire.TensorSpec(dtype="u8", shape=[65536], nbytes=65536)] * 2
            await self._raw(peer, before, wire.Request(process=process), specs, noise(131072))

    async def events(self, peer: PeerId, stage: int) -> None:
        """One message that the victim would write into its log, from a JOINING of its stage."""
        joining = self.record(self._identity, stage, record_pb2.NODE_STATE_JOINING)
        number = next(self._numbers)
        reason = "\x1b[2J" + "x" * 150
        packet = Packet(1.0, 8, ())
        given = receipt(self._identity, self._run_id, stage, number, peer, packet, Verdict(0.0, "norm", reason))
        await self._call(peer, wire.Request(record=joining, packet_receipt=bare(given)))

    # ---- how they travel

    async def _call(self, peer: PeerId, request: wire.Request) -> None:
        self.sent += 1
        with contextlib.suppress(RemoteFault, Unavailable):
            await self._transport.call(peer, Call(request), timeout_s=CALL_TIMEOUT_S, reply_bytes_max=1 << 20)

    async def _raw(
        self, peer: PeerId, as_stage: int, request: wire.Request, specs: Sequence[wire.TensorSpec], body: bytes
    ) -> None:
        """A request with `specs` that need not fit `body`, from an alleged replica of `as_stage`."""
        request.record.CopyFrom(self.record(self._identity, as_stage, record_pb2.NODE_STATE_TRAINING))
        seal_request(request, (), self._run_id, 60.0)
        assert request.version == VERSION
        request.tensors.extend(specs)
        header = request.SerializeToString()
        await self._bytes(peer, frame.preamble(frame.FrameKind.REQUEST, len(header)) + header + body)

    async def _bytes(self, peer: PeerId, data: bytes) -> None:
        """Send `data` on a stream of its own, and leave once anything comes back or the other side leaves."""
        self.sent += 1
        stream: P2pdStream | None = None
        try:
            stream, _ = await self._transport.daemon.open_stream(peer, [self._transport.protocol], DIAL_TIMEOUT_S)
            await stream.write(data)
            await stream.read(1)
        except (RemoteFault, Unavailable, ConnectionError):
            await asyncio.sleep(PAUSE_S)
        finally:
            if stream is not None:
                stream.abort()

    # ---- when

    async def prepare(self, way: str) -> None:
        """Join the DHT, where the attack needs it. It cannot be cancelled and begun again."""
        if way in ("records", "keys"):
            known = [(PeerId(peer), addresses) for peer, _, addresses in self._order.targets]
            here = self._transport, known, self._run_id, self._order.stages
            self._directory = await DhtDirectory.create(
                *here,
                unix_s=time.time,  # noqa: TID251  an attacker's own clock
                ttl_max_s=TTL_S,
                join_timeout_s=JOIN_MAX_S,
            )

    async def attack(self, way: str) -> None:
        """Attack all targets until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            for peer, stage, addresses in self._order.targets:
                await self._until_connected(PeerId(peer), addresses)
                one: Callable[[PeerId, int], Awaitable[None]] = getattr(self, way)
                if way == "silent":
                    tasks.create_task(self.silent(PeerId(peer), stage))
                else:
                    tasks.create_task(self._keep_rate(one, PeerId(peer), stage))

    async def _until_connected(self, peer: PeerId, addresses: Sequence[str]) -> None:
        while True:
            try:
                return await self._transport.connect(peer, addresses)
            except Unavailable:  # a busy machine
                await asyncio.sleep(PAUSE_S)

    async def _keep_rate(self, one: Callable[[PeerId, int], Awaitable[None]], peer: PeerId, stage: int) -> None:
        """`one` at the ordered rate, as many at once as that takes; with an answer late, up to a second's worth."""
        loop = asyncio.get_running_loop()
        at_once = asyncio.Semaphore(max(1, round(self._order.rate)))

        async def bounded() -> None:
            try:
                async with asyncio.timeout(CALL_TIMEOUT_S):
                    await one(peer, stage)
            except TimeoutError:
                pass
            finally:
                at_once.release()

        begun = loop.time()
        made = 0
        async with asyncio.TaskGroup() as tasks:
            while True:
                due = int((loop.time() - begun) * self._order.rate)
                for _ in range(made, due):
                    await at_once.acquire()
                    tasks.create_task(bounded())
                made = due
                await asyncio.sleep(0.01)


WAYS = ("silent", "records", "keys", "malformed", "events")


async def _pong(peer: PeerId, call: Call) -> Answer:
    return Answer(wire.Reply(pong=wire.Pong(payload=call.header.ping.payload)))


def _lowest_priority(pid: int) -> None:
    """Let all others go before the process `pid` and its session: Linux shares processors among sessions first, and
    only within one by the niceness of its processes."""
    os.setpriority(os.PRIO_PROCESS, pid, LOWEST)
    with contextlib.suppress(OSError):  # a system without autogroups
        Path(f"/proc/{pid}/autogroup").write_text(str(LOWEST), encoding="ascii")


async def _burn(share: float) -> None:
    """Use a `share` of one processor for nothing, until cancelled."""
    if share <= 0.0:
        return
    loop = asyncio.get_running_loop()
    begun_s = loop.time()
    before_s = time.process_time()
    while True:
        slice_s = time.process_time()
        while time.process_time() - slice_s < SLICE_S:
            pass
        ahead_s = (time.process_time() - before_s) / share - (loop.time() - begun_s)
        await asyncio.sleep(max(0.0, ahead_s))


async def _serve(way: str) -> None:
    _lowest_priority(os.getpid())
    loop = asyncio.get_running_loop()
    order = Order(**json.loads(await loop.run_in_executor(None, sys.stdin.readline)))
    key = Path(order.folder) / "node.key"
    identity = create(key)
    transport = await Libp2pTransport.create(key, identity, RunId(order.run_id))
    _lowest_priority(transport.daemon.pid)
    transport.serve("ping", _pong, tensor_bytes_max=0)
    transport.start()
    attacker = ResourceAttacker(transport, identity, order)
    task = None
    p2pd = psutil.Process(transport.daemon.pid)

    def used_s() -> float:
        """Processor time of this process and its p2pd so far."""
        return time.process_time() + sum(p2pd.cpu_times()[:2])

    await attacker.prepare(way)
    begun_s = loop.time()
    before_s = used_s()
    attacking = False
    try:
        while line := (await loop.run_in_executor(None, sys.stdin.readline)).strip():
            if line == "sent":
                _tell({"sent": attacker.sent})
                continue
            if task is not None:
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await task
            share = (used_s() - before_s) / max(1e-9, loop.time() - begun_s) if attacking else 0.0
            begun_s = loop.time()
            before_s = used_s()
            attacking = line == "on"
            task = loop.create_task(attacker.attack(way) if attacking else _burn(share))
            _tell({"sent": attacker.sent})
    finally:
        if task is not None:
            task.cancel()
        await transport.close()


def _tell(said: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(said) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    uvloop.run(_serve(sys.argv[1]))
