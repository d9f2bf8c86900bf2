"""Nodes in virtual time that give each other states, with faults."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace

from swarmnode.base.errors import PeerTimeout, RemoteFault
from swarmnode.base.ids import PeerId, RunId, digest
from swarmnode.base.ports import Admit, Answer, Call, Handler, State
from swarmnode.base.wire import call_pb2 as wire
from swarmnode.keep.transfer.donor import DonorLimits, SnapshotDonor
from swarmnode.keep.transfer.snapshot import Snapshot, StateSlice
from swarmnode.net.membership.progress import to_message
from tests.support.fake_telemetry import Quiet
from tests.support.sections import PACKED_ITEMSIZE, SECTIONS

RUN = RunId("ef" * 32)

ME, A, B, C = (PeerId(name) for name in ("me", "peerA", "peerB", "peerC"))

PARAMETERS = 168  # 2016 bytes

SIZES = dict.fromkeys(SECTIONS, PARAMETERS)

CHUNK = 64

CHUNKS = 32

Next = Callable[[], Awaitable[Answer]]
Fault = Callable[[str, int, Next], Awaitable[Answer]]


class Link:
    """One node's transport in a world of handlers; `faults` sees every call before its handler does."""

    def __init__(self, world: World, me: PeerId) -> None:
        self.world = world
        self.peer_id = me

    async def addresses(self) -> list[str]:
        return []

    def serve(self, method: str, handler: Handler, *, tensor_bytes_max: int, admit: Admit | None = None) -> None:
        self.world.handlers[self.peer_id, method] = handler

    async def connect(self, peer: PeerId, addresses: Sequence[str]) -> None: ...

    line_queue = 0
    line_bytes_per_s = 0.0

    def bytes_by_method(self) -> dict[tuple[str, str], int]:
        return {}

    async def call(self, peer: PeerId, call: Call, *, timeout_s: float, reply_bytes_max: int) -> Answer:
        return await self.world.call(self.peer_id, peer, call, timeout_s, reply_bytes_max)


async def _pong(peer: PeerId, call: Call) -> Answer:
    return Answer(wire.Reply())


class World:
    def __init__(self) -> None:
        self.handlers: dict[tuple[PeerId, str], Handler] = {}
        self.faults: dict[PeerId, Fault] = {}
        self.asked: dict[tuple[PeerId, str], int] = {}
        self.under_way = 0
        self.under_way_max = 0

    async def call(self, source: PeerId, peer: PeerId, call: Call, timeout_s: float, reply_bytes_max: int) -> Answer:
        method = call.header.WhichOneof("body") or ""
        self.asked[peer, method] = self.asked.get((peer, method), 0) + 1
        serial = self.asked[peer, method]
        self.under_way += 1
        self.under_way_max = max(self.under_way_max, self.under_way)
        try:
            async with asyncio.timeout(timeout_s):
                await asyncio.sleep(0.01)
                handler = self.handlers.get((peer, method))
                if method == "ping" and any(who == peer for who, _ in self.handlers):
                    handler = _pong
                if handler is None:
                    raise RemoteFault(f"{peer} is not there")

                async def go() -> Answer:
                    return await handler(source, call)

                fault = self.faults.get(peer)
                answer = await (fault(method, serial, go) if fault else go())
                assert sum(tensor.nbytes for tensor in answer.tensors) <= reply_bytes_max
                return answer
        except TimeoutError:
            raise PeerTimeout(f"{peer} did not answer within {timeout_s:g} s") from None
        finally:
            self.under_way -= 1


def state(seed: int) -> State:
    sections = {
        name: memoryview(b"".join(digest(seed, name, i) for i in range(21))[: size * PARAMETERS])
        for name, size in PACKED_ITEMSIZE.items()
    }
    return State(sections, inner_steps=seed, gradient_norm=0.25, packed=True)


class Giver:
    """A node with a state that changes each round."""

    def __init__(self, world: World, peer: PeerId, seed: int, limits: DonorLimits | None = None) -> None:
        self.peer = peer
        self.seed = seed
        self.round_index = 5
        self.taken = self.offloaded = 0
        self.said = Quiet()
        self.donor = SnapshotDonor(RUN, 1, self.take, self.offload, self.said, limits or DonorLimits())
        self.donor.serve(Link(world, peer))

    async def take(self, cut: StateSlice) -> Snapshot:
        await asyncio.sleep(0.05)
        self.taken += 1
        progress = to_message({"feeder": 1000 * self.round_index})
        return Snapshot.of(state(self.seed + self.round_index), 1, self.round_index, progress, CHUNK)

    async def offload(self, work: Callable[[], wire.Snapshot]) -> wire.Snapshot:
        await asyncio.sleep(0.05)
        self.offloaded += 1
        return work()


def ask(round_min: int = 0, *, run: RunId = RUN, stage: int = 1, slowly: bool = False) -> Call:
    """For an offer of a state; `slowly`: as one that nobody waits for."""
    wanted = wire.SnapshotRequest(stage=stage, round_min=round_min, nobody_waits=slowly)
    return Call(wire.Request(run_id=run, snapshot=wanted))


def ask_chunk(snapshot_id: bytes, index: int) -> Call:
    return Call(wire.Request(run_id=RUN, chunk=wire.ChunkRequest(snapshot_id=snapshot_id, index=index)))


def give(world: World, *seeds: int) -> list[Giver]:
    """A, B, C, as many as there are seeds."""
    return [Giver(world, peer, seed) for peer, seed in zip((A, B, C), seeds, strict=False)]


def same(found: State, expected: State) -> bool:
    return {k: bytes(v) for k, v in found.sections.items()} == {k: bytes(v) for k, v in expected.sections.items()}


async def altered(go: Next, change: Callable[[Answer], None]) -> Answer:
    given = await go()
    answer = Answer(wire.Reply(), given.tensors)
    answer.header.CopyFrom(given.header)
    change(answer)
    return answer


def slow_chunks(chunk_s: float, limit: float = float("inf"), error: Exception | None = None) -> Fault:
    """Chunks take `chunk_s`; after `limit` of them `error`, or never an answer."""

    async def fault(method: str, serial: int, go: Next) -> Answer:
        if method == "chunk":
            if serial > limit:
                if error is None:
                    await asyncio.sleep(1e6)
                else:
                    raise error
            await asyncio.sleep(chunk_s)
        return await go()

    return fault


def flip(answer: Answer) -> None:
    data = bytearray(answer.tensors[0].data)
    data[-1] ^= 1
    answer.tensors = [replace(answer.tensors[0], data=bytes(data))]
