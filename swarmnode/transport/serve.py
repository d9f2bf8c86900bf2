"""The answering side: requests on streams that others opened, each given to its handler, refused, or dropped."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from swarmnode.errors import Busy, Forbidden, LocalFault, RemoteFault, Unavailable
from swarmnode.ids import PeerId, RunId, short
from swarmnode.membership.door import Door
from swarmnode.ports import Admit, Answer, Call, Handler, Telemetry, WireTensor
from swarmnode.transport import frame
from swarmnode.transport.budget import Budget, Lease
from swarmnode.transport.frame import PREAMBLE, Flag, Kind
from swarmnode.transport.knocking import Knocking
from swarmnode.transport.links import LinkBook
from swarmnode.transport.stream import LEAST_BYTES_PER_S, LEAST_SPAN_S, Stream
from swarmnode.turns import Turns
from swarmnode.wire import call_pb2 as wire

IDLE_S = 180.0  # guess: well above pool.IDLE_S, so that it is the caller who closes a stream nobody uses
HEADER_TIMEOUT_S = 20.0  # guess: 1 MiB at 0.5 Mbit/s
GOODBYE_TIMEOUT_S = 5.0  # guess: how long a refused caller may take to end the stream
STRANGER_TIMEOUT_S = 10.0  # guess: what a peer may take to show its pass
STREAMS_PER_PEER_MAX = 128  # guess: twice pool.IN_USE_MAX
# Calls of one peer under way at once, where an honest one makes one at a time and may repeat it: their tensors wait for
# our boundary, or our line.
AT_ONCE_MAX = {"exchange": 2, "bequest": 2, "standin": 2, "handover": 1}


@dataclass(frozen=True, slots=True)
class Served:
    """One method: who answers it, how many bytes of tensors it takes at most, and of whom."""

    handler: Handler
    tensor_bytes_max: int
    admit: Admit | None = None

    def check(self, peer: PeerId, request: wire.Request) -> None:
        """Raises Unavailable or RemoteFault when `peer` is not served."""
        if self.admit is not None:
            self.admit(peer, request)


async def answer(peer: PeerId, method: str, handler: Handler, call: Call, telemetry: Telemetry | None) -> Answer:
    """What `handler` answers, or its refusal as a reply. A fault of ours is told to the peer by its type name only."""
    try:
        done = await handler(peer, call)
    except (Unavailable, RemoteFault) as refusal:
        return Answer(frame.reply_of(refusal))
    except Exception as error:  # noqa: BLE001  the border between a peer's call and the rest of this node
        if telemetry is not None:
            telemetry.event(
                "call.failed",
                level="error",
                method=method,
                peer=short(peer),
                error=type(error).__name__,
                why=str(error),
            )
        return Answer(wire.Reply(status=wire.STATUS_FAULT, reason=type(error).__name__))
    if done.header.status == wire.STATUS_UNSPECIFIED:
        done.header.status = wire.STATUS_OK
    return done


class Server:
    """Answers what comes in on streams. One call at a time on each; many streams at once."""

    def __init__(
        self,
        run_id: RunId,
        budget: Budget,
        turns: Turns,
        traffic: Counter[tuple[str, str]],
        telemetry: Telemetry | None,
        links: LinkBook | None = None,
    ) -> None:
        self._links = links or LinkBook()
        self._run_id = run_id
        self._budget = budget
        self._turns = turns
        self._traffic = traffic
        self._telemetry = telemetry
        self._served: dict[str, Served] = {}
        self._streams_of: Counter[PeerId] = Counter()
        self._under_way: Counter[tuple[PeerId, str]] = Counter()  # calls of the methods in AT_ONCE_MAX
        self.cut_off: Callable[[PeerId], None] | None = None  # told of a stranger that opens stream after stream
        self.door: Door | None = None  # None while the manifest is not known: nobody is served yet
        self.knocking = Knocking()

    def register(self, method: str, handler: Handler, tensor_bytes_max: int, admit: Admit | None = None) -> None:
        assert method in wire.Request.DESCRIPTOR.fields_by_name, f"{method!r} is not a method of wire.Request"
        assert method not in self._served, f"{method!r} is served already"
        self._served[method] = Served(handler, tensor_bytes_max, admit)

    async def attend(self, stream: Stream, peer: PeerId) -> None:
        """Serve `stream` until its end. Raises nothing but cancellation, which also comes when the peer goes away."""
        self._streams_of[peer] += 1
        stream.slowest = (LEAST_SPAN_S, int(LEAST_SPAN_S * LEAST_BYTES_PER_S))
        try:
            if self._streams_of[peer] > STREAMS_PER_PEER_MAX:
                await self._refuse(stream, Busy(f"more than {STREAMS_PER_PEER_MAX} streams from one peer", 1.0))
            elif (first := await self._enter(stream, peer)) is not None:
                while await self._serve_one(stream, peer, first):
                    first = None
        except (ConnectionError, TimeoutError):
            pass
        except (MemoryError, LocalFault) as error:  # a tensor that there is no room for, or that was never finished
            if self._telemetry is not None:
                self._telemetry.event(
                    "call.failed", level="error", peer=short(peer), error=type(error).__name__, why=str(error)
                )
        finally:
            self._streams_of[peer] -= 1
            if not self._streams_of[peer]:
                del self._streams_of[peer]
            stream.abort()  # a peaceful end comes from the caller, so nothing of value is on its way

    async def _enter(self, stream: Stream, peer: PeerId) -> bytes | None:
        """The preamble of the first request, when `peer` may take part; nothing longer than a pass is read before.

        None when it may not: it was told why, or was dropped when it knocks too often.
        """
        now, door = asyncio.get_running_loop().time(), self.door
        permit, reason = (True, "") if door is None else door.judge(peer)
        if not (self.knocking.stream(peer, now) if permit else self.knocking.stranger(peer, now)):
            if not permit and self.cut_off is not None and self.knocking.is_nuisance(peer):
                self.cut_off(peer)
            return None
        try:
            async with asyncio.timeout(IDLE_S if permit else STRANGER_TIMEOUT_S):
                first = await stream.read(PREAMBLE.size)
                if frame.kind_of(first) == Kind.PASS:
                    shown = await frame.receive_pass(stream, first)
                    if door is not None:
                        permit, reason = door.judge(peer, shown)
                    if permit:
                        first = await stream.read(PREAMBLE.size)
            if not permit:
                raise Forbidden(reason) if door is None else door.refusal(peer, reason)
        except RemoteFault as refusal:
            await self._refuse(stream, refusal)
            return None
        return first

    async def _serve_one(self, stream: Stream, peer: PeerId, first: bytes | None) -> bool:
        """One request and its reply; `first` is its preamble when it was read already. False when nothing more can be
        read from this stream."""
        if first is None:
            async with asyncio.timeout(IDLE_S):
                first = await stream.read(PREAMBLE.size)
        bytes_in, bytes_out = stream.consumed - PREAMBLE.size, stream.bytes_out
        try:
            method, request, served, lease = await self._admit(stream, peer, first)
        except (RemoteFault, Unavailable) as refusal:
            await self._refuse(stream, refusal)
            return False
        under_way = peer, method
        self._under_way[under_way] += 1
        try:
            async with asyncio.timeout(request.timeout_ms / 1000.0):
                begun = asyncio.get_running_loop().time()
                try:
                    tensors = await frame.receive_tensors(stream, request.tensors, lease.arrive)
                except Busy as refusal:
                    await self._refuse(stream, refusal)
                    return False
                finally:
                    lease.close()
                call = Call(request, tensors, asyncio.get_running_loop().time() - begun)
                reply, nbytes = await self._handle(stream, peer, method, served.handler, call)
                del tensors
                try:
                    await self._send(stream, reply.header, reply.tensors)
                finally:
                    self._turns.give(nbytes)
        finally:
            self._under_way[under_way] -= 1
            if not self._under_way[under_way]:
                del self._under_way[under_way]
            received, sent = stream.consumed - bytes_in, stream.bytes_out - bytes_out
            self._traffic[method, "received"] += received
            self._traffic[method, "sent"] += sent
            self._links.moved(peer, sent=sent, received=received, now_s=asyncio.get_running_loop().time())
        return True

    async def _admit(self, stream: Stream, peer: PeerId, first: bytes) -> tuple[str, wire.Request, Served, Lease]:
        """What is asked for, and room for its tensors, of which none is read yet. Raises RemoteFault, Unavailable."""
        async with asyncio.timeout(HEADER_TIMEOUT_S):
            raw, _ = await frame.receive_header(stream, Kind.REQUEST, first)
        self._check(peer)
        method, request = frame.open_request(raw, self._run_id)
        served = self._served.get(method)
        if served is None:
            raise RemoteFault(f"method {method!r} is not served here")
        nbytes = frame.check_tensors(request.tensors, served.tensor_bytes_max)
        served.check(peer, request)
        if (count := self._under_way[peer, method]) >= AT_ONCE_MAX.get(method, STREAMS_PER_PEER_MAX):
            raise Busy(f"{count} calls of {method} by you are under way", 1.0)
        return method, request, served, self._budget.admit(peer, nbytes)

    def _check(self, peer: PeerId) -> None:
        """Before each call: the owner's words may have changed, a pass run out. Raises Forbidden, Busy."""
        if self.door is not None:
            permit, reason = self.door.judge(peer)
            if not permit:
                raise self.door.refusal(peer, reason)
        if not self.knocking.call(peer, asyncio.get_running_loop().time()):
            raise Busy("more calls a second than one peer may make", 1.0)

    async def _handle(
        self, stream: Stream, peer: PeerId, method: str, handler: Handler, call: Call
    ) -> tuple[Answer, int]:
        """The handler's answer as soon as it is its turn, and its bytes, or a refusal if that does not come; cancelled
        as soon as the stream is lost: the caller gave up, or died."""
        task = asyncio.current_task()
        assert task is not None
        stream.when_lost(task.cancel)
        try:
            done = await answer(peer, method, handler, call, self._telemetry)
            nbytes = sum(tensor.nbytes for tensor in done.tensors)
            timeout_s = call.header.timeout_ms / 1000.0  # which bounds all of this
            done.header.waited_s = await self._turns.take(nbytes, timeout_s, urgent=done.urgent)
            return done, nbytes
        except Unavailable as refusal:
            return Answer(frame.reply_of(refusal)), 0
        finally:
            stream.when_lost(None)

    async def _send(self, stream: Stream, header: wire.Reply, tensors: Sequence[WireTensor]) -> None:
        if not await frame.send(stream, Kind.REPLY, frame.seal_reply(header, tensors), tensors):
            raise ConnectionResetError("the peer sent more than one request at a time")

    async def _refuse(self, stream: Stream, refusal: Unavailable | RemoteFault) -> None:
        """Say why, and leave when the caller has: libp2p drops what is under way when a side closes."""
        header = frame.seal_reply(frame.reply_of(refusal), ())
        async with asyncio.timeout(GOODBYE_TIMEOUT_S):
            await frame.send(stream, Kind.REPLY, header, flags=Flag.LAST)
            await stream.discard()
