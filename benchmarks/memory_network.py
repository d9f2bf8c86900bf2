"""Transport and Directory inside one process: real headers, copies and cancellation, but no sockets and no p2pd.

For tests and benchmarks of node code. It shares framing checks and error mapping with the real transport, and passes
the same contract suite (tests/support/transport_contract.py). A link hook can delay, fail or cut messages.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence

from swarmnode.base.errors import Broken, LocalFault, PeerTimeout, RemoteFault, Unavailable
from swarmnode.base.ids import PeerId, RunId, short
from swarmnode.base.ports import Admit, Announced, Answer, Call, Clock, Handler, Telemetry, WireTensor
from swarmnode.base.wire import call_pb2 as wire
from swarmnode.base.wire import record_pb2
from swarmnode.net.membership.record import check_record, open_record
from swarmnode.net.transport import frame
from swarmnode.net.transport.serve import ServedMethod, answer

Link = Callable[[PeerId, PeerId, int], Awaitable[None]]
"""Awaited with (from, to, bytes) before a message arrives: sleep to delay it, raise RemoteFault to lose it."""

TTL_MAX_S = 300.0  # as net/transport/directory.py


class MemoryNetwork:
    """All transports that can reach each other, and their published records."""

    def __init__(self, link: Link | None = None) -> None:
        self.link = link
        self.nodes: dict[PeerId, MemoryTransport] = {}
        self.records: dict[tuple[RunId, int], dict[PeerId, record_pb2.SignedRecord]] = {}

    async def carry(self, sender: PeerId, receiver: PeerId, nbytes: int) -> None:
        if self.link is not None:
            await self.link(sender, receiver, nbytes)


class MemoryTransport:
    """Implements ports.Transport. `close` is abrupt: calls in flight fail as if the node had died."""

    def __init__(
        self, network: MemoryNetwork, peer_id: PeerId, run_id: RunId, *, telemetry: Telemetry | None = None
    ) -> None:
        self._network = network
        self._peer_id = peer_id
        self._run_id = run_id
        self._telemetry = telemetry
        self._served: dict[str, ServedMethod] = {}
        self._working: set[asyncio.Task[Answer]] = set()
        self._traffic: Counter[tuple[str, str]] = Counter()
        network.nodes[peer_id] = self

    @property
    def peer_id(self) -> PeerId:
        return self._peer_id

    async def addresses(self) -> list[str]:
        return [f"/dns/{short(self._peer_id)}/tcp/1"]

    def serve(self, method: str, handler: Handler, *, tensor_bytes_max: int, admit: Admit | None = None) -> None:
        assert method in wire.Request.DESCRIPTOR.fields_by_name, f"{method!r} is not a method of wire.Request"
        assert method not in self._served, f"{method!r} is served already"
        self._served[method] = ServedMethod(handler, tensor_bytes_max, admit)

    async def connect(self, peer: PeerId, addresses: Sequence[str]) -> None:
        if peer not in self._network.nodes:
            raise Unavailable(f"{short(peer)} cannot be reached")

    @property
    def line_queue(self) -> int:
        return 0  # messages are not queued here

    @property
    def line_bytes_per_s(self) -> float:
        return 0.0  # there is no line

    def bytes_by_method(self) -> dict[tuple[str, str], int]:
        return dict(self._traffic)

    async def close(self) -> None:
        """Leave at once: running handlers are cancelled and their callers get a RemoteFault."""
        self._network.nodes.pop(self._peer_id, None)
        working = list(self._working)
        for task in working:
            task.cancel()
        await asyncio.gather(*working, return_exceptions=True)

    async def call(self, peer: PeerId, call: Call, *, timeout_s: float, reply_bytes_max: int) -> Answer:
        """See ports.Transport."""
        method = call.header.WhichOneof("body")
        assert method is not None, "a call needs a body"
        try:
            async with asyncio.timeout(timeout_s):
                done = await self._call(peer, method, call, timeout_s, reply_bytes_max)
        except TimeoutError:
            raise PeerTimeout(f"{short(peer)} did not answer {method} within {timeout_s:.1f} s") from None
        frame.raise_for(peer, done.header)
        return done

    async def _call(self, peer: PeerId, method: str, call: Call, timeout_s: float, reply_bytes_max: int) -> Answer:
        header = frame.seal_request(call.header, call.tensors, self._run_id, timeout_s)
        nbytes = _nbytes(header, call.tensors)
        self._traffic[method, "sent"] += nbytes
        loop = asyncio.get_running_loop()
        begun = loop.time()
        await self._network.carry(self._peer_id, peer, nbytes)
        await _complete(call.tensors)
        carried_s = loop.time() - begun
        other = self._network.nodes.get(peer)
        if other is None:
            raise RemoteFault(f"{short(peer)} cannot be reached")
        task = loop.create_task(other._answer(self._peer_id, header, call.tensors, carried_s))
        other._working.add(task)
        try:
            done = await asyncio.shield(task)
        except asyncio.CancelledError:
            if not task.cancelled():  # we were cancelled, not the handler: cancel it
                task.cancel()
                raise
            raise Broken(f"{short(peer)} died or disconnected during {method}") from None
        finally:
            other._working.discard(task)
        raw = frame.seal_reply(done.header, done.tensors)
        nbytes = _nbytes(raw, done.tensors)
        await self._network.carry(peer, self._peer_id, nbytes)
        try:
            await _complete(done.tensors)
        except LocalFault:
            raise Broken(f"{short(peer)} died or disconnected during {method}") from None
        self._traffic[method, "received"] += nbytes
        reply = frame.open_reply(raw)
        frame.check_tensors(reply.tensors, reply_bytes_max)
        return Answer(reply, _copies(done.tensors))

    async def _answer(self, peer: PeerId, raw: bytes, tensors: Sequence[WireTensor], carried_s: float) -> Answer:
        try:
            method, request = frame.open_request(raw, self._run_id)
            served = self._served.get(method)
            if served is None:
                raise RemoteFault(f"method {method!r} is not served here")
            frame.check_tensors(request.tensors, served.tensor_bytes_max)
            served.check(peer, request)
        except (RemoteFault, Unavailable) as refusal:
            return Answer(frame.reply_of(refusal))
        nbytes = _nbytes(raw, tensors)
        self._traffic[method, "received"] += nbytes
        done = await answer(peer, method, served.handler, Call(request, _copies(tensors), carried_s), self._telemetry)
        if done.before_end is not None:
            try:
                await done.before_end()
            except Unavailable:
                raise Broken(f"{short(self._peer_id)} gave {method} up") from None
        self._traffic[method, "sent"] += _nbytes(frame.seal_reply(done.header, done.tensors), done.tensors)
        return done


class MemoryDirectory:
    """Implements ports.Directory on a MemoryNetwork. `fails` may make an announce or lookup fail."""

    def __init__(
        self,
        network: MemoryNetwork,
        run_id: RunId,
        clock: Clock,
        *,
        ttl_max_s: float = TTL_MAX_S,
        fails: Callable[[], bool] = lambda: False,
    ) -> None:
        self._network = network
        self._run_id = run_id
        self._clock = clock
        self._ttl_max_s = ttl_max_s
        self._fails = fails
        self.remembered = 0  # what meeting points would say of the run

    async def announce(self, record: record_pb2.SignedRecord) -> Announced:
        """Store the record only if it expires later than the previous one, as in the DHT."""
        own = check_record(record, run_id=self._run_id)
        if self._fails() or own.expires_unix_ms / 1000.0 > self._clock.unix_s() + self._ttl_max_s:
            return Announced(False)
        stored = self._network.records.setdefault((self._run_id, own.stage), {})
        before = stored.get(PeerId(own.peer_id))
        others = [] if before is None else [before]
        if before is not None and check_record(before, run_id=self._run_id).expires_unix_ms >= own.expires_unix_ms:
            return Announced(False, others)
        stored[PeerId(own.peer_id)] = record
        return Announced(True, others)

    async def lookup(self, stage: int) -> list[record_pb2.SignedRecord]:
        if self._fails():
            return []
        now = self._clock.unix_s()
        found = []
        for _, signed in sorted(self._network.records.get((self._run_id, stage), {}).items()):
            with contextlib.suppress(RemoteFault):
                open_record(signed, run_id=self._run_id, now_unix_s=now, ttl_max_s=self._ttl_max_s)
                found.append(signed)
        return found

    async def lookups(self, stages: Sequence[int]) -> list[list[record_pb2.SignedRecord]]:
        return [await self.lookup(stage) for stage in stages]

    refresh = lookups

    async def claimed(self) -> int:
        return self.remembered


def _nbytes(header: bytes, tensors: Sequence[WireTensor]) -> int:
    return frame.PREAMBLE.size + len(header) + sum(tensor.nbytes for tensor in tensors)


async def _complete(tensors: Sequence[WireTensor]) -> None:
    """Wait until all tensors are complete. Raises LocalFault if a writer failed."""
    for tensor in tensors:
        if tensor.watermark is not None:
            await tensor.watermark.until(tensor.nbytes)


def _copies(tensors: Sequence[WireTensor]) -> list[WireTensor]:
    """Copies in separate memory, as after a real transfer: writing to them does not change the sender's."""
    return [WireTensor(t.dtype, t.shape, memoryview(bytearray(t.data)), t.codec) for t in tensors]
