"""The answering side: requests on incoming streams, each passed to its handler, refused, or dropped."""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from swarmnode.base.errors import Busy, Forbidden, LocalFault, RemoteFault, Unavailable, cause_of
from swarmnode.base.header import HEADER_BYTES_MAX
from swarmnode.base.ids import PeerId, RunId, short
from swarmnode.base.ports import BOTH_WAYS, Admit, Answer, Call, Handler, Telemetry, WireTensor
from swarmnode.base.uplink_scheduler import SLOWEST_BYTES_PER_S, UplinkScheduler
from swarmnode.base.wire import call_pb2 as wire
from swarmnode.net.membership.liveness import AGAIN_S, PING_TIMEOUT_S, SMALL_CALL_S
from swarmnode.net.transport import frame
from swarmnode.net.transport.frame import PREAMBLE, FrameFlag, FrameKind
from swarmnode.net.transport.links import LinkBook
from swarmnode.net.transport.stranger_limit import StrangerRateLimiter
from swarmnode.net.transport.stream import LEAST_BYTES_PER_S, LEAST_SPAN_S, P2pdStream
from swarmnode.net.transport.throttle import STRANGERS, RateThrottle
from swarmnode.run.admission.admission import Admission
from swarmnode.run.manifest import PipelineSpec

IDLE_S = 180.0  # guess: some dozen announce periods; the caller closes an unused stream earlier
HEADER_TIMEOUT_S = HEADER_BYTES_MAX / SLOWEST_BYTES_PER_S
STRANGER_TIMEOUT_S = 2.0 * SMALL_CALL_S  # time for a peer to show its pass
TURN_S = PING_TIMEOUT_S / 2.0  # so that a ping may be one of the calls that wait
STREAMS_PER_PEER_MAX = 2 * PipelineSpec().window_max  # derived: a feeder's calls in flight, and as many warm streams
# Concurrent calls of one peer. An honest peer makes one at a time and may repeat it; their tensors wait for our
# boundary, or our uplink.
AT_ONCE_MAX = {"exchange": 2, "final_delta": 2, "fallback": 2, "handover": 1, "table": 1}


# Bound the tensor bytes being received at once, in total and per peer.
#
# Bytes count when they arrive, as parts of incomplete messages; an announcement reserves nothing. One peer has
# PEER_SHARE of the total, so fifteen others always find room beside it. A message larger than this share is admitted
# only alone for its peer, and all such messages together get half of the total.

PEER_SHARE = 16  # guess: one peer's part is a sixteenth of the total
LARGE_SHARE = 2  # guess: the other half is for messages that fit into a peer's share
RETRY_S = 0.1  # derived: a message of 1 MB at 100 Mbit/s


class ByteLease:
    """The received bytes of one message. `close` frees them and may be called repeatedly."""

    __slots__ = ("_budget", "_nbytes", "_peer", "large")

    def __init__(self, budget: ByteBudget, peer: PeerId, *, large: bool) -> None:
        self._budget = budget
        self._peer = peer
        self._nbytes = 0
        self.large = large

    def arrive(self, nbytes: int) -> None:
        """Take `nbytes` that are about to arrive. Raises Busy if there is no room."""
        self._budget.take(self._peer, nbytes, large=self.large)
        self._nbytes += nbytes

    def close(self) -> None:
        """Free the bytes: the message is complete, or never will be."""
        self._budget.give(self._peer, self._nbytes, lease=self)
        self._nbytes = 0


class ByteBudget:
    """Bytes of messages being received, by peer. A single large message always fits: its method has its own cap."""

    def __init__(self, total_bytes_max: int) -> None:
        assert total_bytes_max >= PEER_SHARE
        self._total_bytes_max = total_bytes_max
        self._used: Counter[PeerId] = Counter()  # of messages that fit into a peer's share
        self._large: dict[PeerId, ByteLease] = {}
        self._large_nbytes = 0

    @property
    def used_bytes(self) -> int:
        """Received bytes of all incomplete messages."""
        return self._used.total() + self._large_nbytes

    @property
    def peer_bytes_max(self) -> int:
        """A peer's share."""
        return self._total_bytes_max // PEER_SHARE

    def admit(self, peer: PeerId, nbytes: int) -> ByteLease:
        """A lease for a message of `nbytes`, before any of it has arrived. Raises Busy if it has no room now."""
        if nbytes <= self.peer_bytes_max:
            self._check(peer, nbytes)
            return ByteLease(self, peer, large=False)
        if peer in self._large:
            raise Busy("a large message of yours is being received already", RETRY_S)
        if self._large:
            self._check_large(nbytes)
        lease = self._large[peer] = ByteLease(self, peer, large=True)
        return lease

    def take(self, peer: PeerId, nbytes: int, *, large: bool) -> None:
        """Raises Busy if there is no room for `nbytes` more."""
        if large:
            if len(self._large) > 1:
                self._check_large(nbytes)
            self._large_nbytes += nbytes
        else:
            self._check(peer, nbytes)
            self._used[peer] += nbytes

    def give(self, peer: PeerId, nbytes: int, *, lease: ByteLease) -> None:
        """Free the bytes that `lease` took."""
        if lease.large:
            self._large_nbytes -= nbytes
            if self._large.get(peer) is lease:
                del self._large[peer]
            return
        self._used[peer] -= nbytes
        assert self._used[peer] >= 0, "more given back than taken"
        if not self._used[peer]:
            del self._used[peer]

    def _check(self, peer: PeerId, nbytes: int) -> None:
        if (mine := self._used[peer]) + nbytes > self.peer_bytes_max:
            raise Busy(f"{mine} bytes of yours are being received; a peer's share is {self.peer_bytes_max}", RETRY_S)
        if self._used.total() + nbytes > self._total_bytes_max - min(self._large_nbytes, self._large_bytes_max):
            raise Busy(f"{self.used_bytes} bytes are being received already", RETRY_S)

    def _check_large(self, nbytes: int) -> None:
        if self._large_nbytes + nbytes > self._large_bytes_max:
            raise Busy(f"{self._large_nbytes} bytes of large messages are being received already", RETRY_S)

    @property
    def _large_bytes_max(self) -> int:
        return self._total_bytes_max // LARGE_SHARE


@dataclass(frozen=True, slots=True)
class ServedMethod:
    """A method: its handler, its limit of tensor bytes, and its admission check."""

    handler: Handler
    tensor_bytes_max: int
    admit: Admit | None = None

    def check(self, peer: PeerId, request: wire.Request) -> None:
        """Raises Unavailable or RemoteFault if `peer` is not served."""
        if self.admit is not None:
            self.admit(peer, request)


async def answer(peer: PeerId, method: str, handler: Handler, call: Call, telemetry: Telemetry | None) -> Answer:
    """The answer of `handler`, or its refusal as a reply. Of a local fault the peer sees only the type name."""
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


async def _received(stream: P2pdStream, request: wire.Request, lease: ByteLease) -> Sequence[WireTensor]:
    """The tensors of `request`, within `lease`, which ends with them. Raises Busy, ConnectionError."""
    try:
        return await frame.receive_tensors(stream, request.tensors, lease.arrive)
    finally:
        lease.close()


class CallerGate:
    """Decides whose streams and calls are served: those of admitted peers, and few of those that do not work here."""

    def __init__(self, throttle: RateThrottle, cut_off: Callable[[PeerId], None]) -> None:
        """`cut_off` is called with a stranger, or a peer that sends noise, that keeps opening streams."""
        self._throttle = throttle
        self._cut_off = cut_off
        self._limit = StrangerRateLimiter()
        self.works: Callable[[PeerId], bool] = lambda peer: True
        """Whether a peer was seen at work here: it is served beside a flood of calls of others."""
        self.admission: Admission | None = None  # None while the manifest is unknown: nobody is served yet

    def judge_stream(self, peer: PeerId) -> tuple[bool, str] | None:
        """(whether `peer` may take part, the reason if not) as it opens a stream; None if the stream is to be dropped:
        it opens too many."""
        now = asyncio.get_running_loop().time()
        permit, reason = (True, "") if self.admission is None else self.admission.judge(peer)
        works = permit and self.works(peer)
        lasts = works or self._throttle.lasts(STRANGERS, now)
        limit = self._limit
        if lasts and (limit.stream(peer, now, works=works) if permit else limit.stranger(peer, now)):
            return permit, reason
        if limit.is_nuisance(peer):
            self._cut_off(peer)
        return None

    def broke(self, peer: PeerId) -> None:
        """Note that a request of `peer` broke the protocol."""
        self._limit.broke(peer, asyncio.get_running_loop().time())

    def spend(self, peer: PeerId, stream: P2pdStream, counted: int) -> int:
        """Count the bytes on `stream` of a peer that does not work here, since there were `counted`; return how many
        there are."""
        moved = stream.consumed + stream.bytes_out
        if not self.works(peer):
            self._throttle.spend_share(STRANGERS, moved - counted, asyncio.get_running_loop().time())
        return moved

    async def turn(self, peer: PeerId) -> None:
        """Wait until `peer` may make its call: beside a flood, a peer that does not work here yet is slowed down.
        Raises Forbidden, and Busy after TURN_S."""
        until_s = asyncio.get_running_loop().time() + TURN_S
        while True:
            try:
                return self._check(peer)
            except Busy:
                if self.works(peer) or asyncio.get_running_loop().time() >= until_s:
                    raise
                await asyncio.sleep(TURN_S / 4)

    def _check(self, peer: PeerId) -> None:
        """Check admission before each call: the owner's lists may have changed, or a pass expired. Raises Forbidden,
        Busy."""
        if self.admission is not None:
            permit, reason = self.admission.judge(peer)
            if not permit:
                raise self.admission.refusal(peer, reason)
        now = asyncio.get_running_loop().time()
        works = self.works(peer)
        if not self._limit.call(peer, now, works=works):
            raise Busy("more calls a second than one peer may make", 1.0)
        if not works and not self._throttle.lasts(STRANGERS, now):
            raise Busy("the share of a day's quota for peers that were not seen at work is used up", 60.0)


class StreamServer:
    """Answers incoming streams: one call at a time on each, many streams at once."""

    def __init__(
        self,
        run_id: RunId,
        budget: ByteBudget,
        scheduler: UplinkScheduler,
        traffic: Counter[tuple[str, str]],
        telemetry: Telemetry | None,
        links: LinkBook,
        throttle: RateThrottle,
        gate: CallerGate,
    ) -> None:
        self.gate = gate
        self._throttle = throttle
        self._links = links
        self._run_id = run_id
        self._budget = budget
        self._scheduler = scheduler
        self._traffic = traffic
        self._telemetry = telemetry
        self._served: dict[str, ServedMethod] = {}
        self._streams_of: Counter[PeerId] = Counter()
        self._under_way: Counter[tuple[PeerId, str]] = Counter()  # calls of the methods in AT_ONCE_MAX

    def register(self, method: str, handler: Handler, tensor_bytes_max: int, admit: Admit | None = None) -> None:
        assert method in wire.Request.DESCRIPTOR.fields_by_name, f"{method!r} is not a method of wire.Request"
        assert method not in self._served, f"{method!r} is served already"
        self._served[method] = ServedMethod(handler, tensor_bytes_max, admit)

    def withdraw(self, method: str) -> None:
        del self._served[method]

    async def attend(self, stream: P2pdStream, peer: PeerId) -> None:
        """Serve `stream` until its end. Raises only cancellation, which also comes when the peer disconnects."""
        self._streams_of[peer] += 1
        counted = 0
        stream.slowest = (LEAST_SPAN_S, int(LEAST_SPAN_S * LEAST_BYTES_PER_S))
        try:
            if self._streams_of[peer] > STREAMS_PER_PEER_MAX:
                await self._refuse(stream, Busy(f"more than {STREAMS_PER_PEER_MAX} streams from one peer", 1.0))
            elif (first := await self._enter(stream, peer)) is not None:
                while await self._serve_one(stream, peer, first):
                    first = None
                    counted = self.gate.spend(peer, stream, counted)
        except (ConnectionError, TimeoutError):
            pass
        except (MemoryError, LocalFault) as error:  # no memory for a tensor, or a tensor whose writer failed
            if self._telemetry is not None:
                self._telemetry.event(
                    "call.failed", level="error", peer=short(peer), error=type(error).__name__, why=cause_of(error)
                )
        finally:
            self.gate.spend(peer, stream, counted)
            self._streams_of[peer] -= 1
            if not self._streams_of[peer]:
                del self._streams_of[peer]
            stream.abort()  # an orderly end comes from the caller, so no data is in transit

    async def _enter(self, stream: P2pdStream, peer: PeerId) -> bytes | None:
        """The preamble of the first request, if `peer` may take part. Reads nothing longer than a pass before.

        None if it may not: it was told why, or dropped because it calls too often.
        """
        judged = self.gate.judge_stream(peer)
        if judged is None:
            return None
        permit, reason = judged
        admission = self.gate.admission
        try:
            async with asyncio.timeout(IDLE_S if permit else STRANGER_TIMEOUT_S):
                first = await stream.read(PREAMBLE.size)
                if frame.kind_of(first) == FrameKind.PASS:
                    shown = await frame.receive_pass(stream, first)
                    if admission is not None:
                        permit, reason = admission.judge(peer, shown)
                    if permit:
                        first = await stream.read(PREAMBLE.size)
            if not permit:
                raise Forbidden(reason) if admission is None else admission.refusal(peer, reason)
        except RemoteFault as refusal:
            await self._refuse(stream, refusal)
            return None
        return first

    async def _serve_one(self, stream: P2pdStream, peer: PeerId, first: bytes | None) -> bool:
        """Serve one request; `first` is its preamble if already read. Returns False if no further request can be read
        from this stream."""
        if first is None:
            async with asyncio.timeout(IDLE_S):
                first = await stream.read(PREAMBLE.size)
        bytes_in = stream.consumed - PREAMBLE.size
        bytes_out = stream.bytes_out
        try:
            method, request, served, lease = await self._admit(stream, peer, first)
        except (RemoteFault, Unavailable) as refusal:
            if isinstance(refusal, RemoteFault) and not isinstance(refusal, Forbidden):
                self.gate.broke(peer)
            await self._refuse(stream, refusal)
            return False
        under_way = peer, method
        self._under_way[under_way] += 1
        serve = self._serve_both_ways if request.both_ways and method in BOTH_WAYS else self._serve_in_turn
        try:
            async with asyncio.timeout(request.timeout_ms / 1000.0):
                return await serve(stream, peer, method, served.handler, request, lease)
        finally:
            self._under_way[under_way] -= 1
            if not self._under_way[under_way]:
                del self._under_way[under_way]
            received = stream.consumed - bytes_in
            sent = stream.bytes_out - bytes_out
            self._traffic[method, "received"] += received
            self._traffic[method, "sent"] += sent
            now_s = asyncio.get_running_loop().time()
            self._throttle.spend_share(method, received + sent, now_s)
            self._links.record_bytes(peer, sent=sent, received=received, now_s=now_s)

    async def _serve_in_turn(
        self, stream: P2pdStream, peer: PeerId, method: str, handler: Handler, request: wire.Request, lease: ByteLease
    ) -> bool:
        """Receive the tensors of `request`, then answer. Returns False if the stream cannot be read further."""
        begun = asyncio.get_running_loop().time()
        try:
            tensors = await _received(stream, request, lease)
        except Busy as refusal:
            await self._refuse(stream, refusal)
            return False
        call = Call(request, tensors, asyncio.get_running_loop().time() - begun)
        reply, nbytes = await self._handle(stream, peer, method, handler, call)
        del tensors
        try:
            if reply.before_end is not None:  # its caller is of an older version: all of the request is here
                await reply.before_end()
            await self._send(stream, reply.header, reply.tensors)
        except Unavailable as refusal:  # it ended meanwhile: the caller must not take ours
            await self._refuse(stream, refusal)
            return False
        finally:
            self._scheduler.give(nbytes)
        return True

    async def _serve_both_ways(
        self, stream: P2pdStream, peer: PeerId, method: str, handler: Handler, request: wire.Request, lease: ByteLease
    ) -> bool:
        """Answer while the tensors of `request` come in. The answer is never ahead of them: no greater share of it
        leaves than has come of them, and its last byte after all of them. Returns False if the stream cannot be read
        further."""
        loop = asyncio.get_running_loop()
        before = stream.consumed
        arriving = loop.create_task(_received(stream, request, lease))
        handling = loop.create_task(self._handle(stream, peer, method, handler, Call(request, arriving=arriving)))
        nbytes_in = sum(spec.nbytes for spec in request.tensors)
        nbytes = 0
        try:
            await asyncio.wait({arriving, handling}, return_when=asyncio.FIRST_COMPLETED)
            if not handling.done():
                arriving.result()  # raises: what the answer is for does not come
            reply, nbytes = await handling
            if reply.header.status != wire.STATUS_OK:
                return await self._decline(stream, reply.header, arriving)

            async def allowed(share: float) -> None:
                await stream.until_in(before + math.ceil(share * nbytes_in))
                if share >= 1.0:
                    await arriving
                    if reply.before_end is not None:
                        await reply.before_end()

            await frame.send_beside(stream, frame.seal_reply(reply.header, reply.tensors), reply.tensors, allowed)
            return True
        except Busy as refusal:
            if not handling.done():
                await self._refuse(stream, refusal)
            return False
        except Unavailable:
            return False  # it ended while the packets travelled: the caller must not take ours
        finally:
            self._scheduler.give(nbytes)
            for task in (arriving, handling):
                task.cancel()
            await asyncio.gather(arriving, handling, return_exceptions=True)

    async def _decline(
        self, stream: P2pdStream, header: wire.Reply, arriving: asyncio.Task[Sequence[WireTensor]]
    ) -> bool:
        """Send a refusal, and read on until the caller, who may still be sending, has it."""
        if arriving.done():
            await self._send(stream, header, ())
            return True
        async with asyncio.timeout(SMALL_CALL_S):
            await frame.send(stream, FrameKind.REPLY, frame.seal_reply(header, ()), flags=FrameFlag.LAST, beside=True)
            await arriving
            await stream.discard()
        return False

    async def _admit(
        self, stream: P2pdStream, peer: PeerId, first: bytes
    ) -> tuple[str, wire.Request, ServedMethod, ByteLease]:
        """The request, and room for its tensors, which are still unread. Raises RemoteFault, Unavailable."""
        async with asyncio.timeout(HEADER_TIMEOUT_S):
            raw, _ = await frame.receive_header(stream, FrameKind.REQUEST, first)
        await self.gate.turn(peer)
        method, request = frame.open_request(raw, self._run_id, stream.version)
        served = self._served.get(method)
        if served is None:
            raise RemoteFault(f"method {method!r} is not served here")
        if not self._throttle.lasts(method, asyncio.get_running_loop().time()):
            raise Busy(f"the share of a day's quota for {method} is used up", AGAIN_S)
        nbytes = frame.check_tensors(request.tensors, served.tensor_bytes_max)
        served.check(peer, request)
        if (count := self._under_way[peer, method]) >= AT_ONCE_MAX.get(method, STREAMS_PER_PEER_MAX):
            raise Busy(f"{count} of your calls of {method} are in flight", 1.0)
        return method, request, served, self._budget.admit(peer, nbytes)

    async def _handle(
        self, stream: P2pdStream, peer: PeerId, method: str, handler: Handler, call: Call
    ) -> tuple[Answer, int]:
        """The handler's answer and its bytes, once the uplink is free, or a refusal if it never is. Cancelled if the
        stream is lost because the caller gave up or died."""
        task = asyncio.current_task()
        assert task is not None
        stream.when_lost(task.cancel)
        try:
            done = await answer(peer, method, handler, call, self._telemetry)
            nbytes = sum(tensor.nbytes for tensor in done.tensors)
            timeout_s = call.header.timeout_ms / 1000.0  # bounds all of this
            done.header.waited_s = await self._scheduler.take(nbytes, timeout_s, urgent=done.urgent)
            return done, nbytes
        except Unavailable as refusal:
            return Answer(frame.reply_of(refusal)), 0
        finally:
            stream.when_lost(None)

    async def _send(self, stream: P2pdStream, header: wire.Reply, tensors: Sequence[WireTensor]) -> None:
        if not await frame.send(stream, FrameKind.REPLY, frame.seal_reply(header, tensors), tensors):
            raise ConnectionResetError("the peer sent more than one request at a time")

    async def _refuse(self, stream: P2pdStream, refusal: Unavailable | RemoteFault) -> None:
        """Send the refusal, and leave after the caller has: libp2p drops data in transit when a side closes."""
        header = frame.seal_reply(frame.reply_of(refusal), ())
        async with asyncio.timeout(SMALL_CALL_S):
            await frame.send(stream, FrameKind.REPLY, header, flags=FrameFlag.LAST)
            await stream.discard()
