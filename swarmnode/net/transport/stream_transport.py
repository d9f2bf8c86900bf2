"""Calls over the streams of any network: what all transports have in common."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import AsyncExitStack

from swarmnode.base.errors import Broken, Busy, PeerTimeout, RemoteFault, Unavailable, cause_of
from swarmnode.base.ids import PeerId, RunId, machine_of, part_of, short
from swarmnode.base.ports import BOTH_WAYS, Admit, Answer, Call, Handler, Telemetry
from swarmnode.base.remembered import Remembered
from swarmnode.base.uplink_scheduler import UplinkScheduler
from swarmnode.base.wire import access_pb2 as access
from swarmnode.base.wire import call_pb2 as wire
from swarmnode.net.transport import frame
from swarmnode.net.transport.address import Endpoint, dialable_of, ip_of, is_circuit, numeric, parse_endpoint
from swarmnode.net.transport.dial_book import DialBook
from swarmnode.net.transport.frame import FrameFlag, FrameKind
from swarmnode.net.transport.links import LinkBook
from swarmnode.net.transport.p2pd import NetworkMode
from swarmnode.net.transport.reachability import greets
from swarmnode.net.transport.serve import IDLE_S as SERVED_IDLE_S
from swarmnode.net.transport.serve import STREAMS_PER_PEER_MAX, ByteBudget, CallerGate, StreamServer
from swarmnode.net.transport.stream import P2pdStream
from swarmnode.net.transport.throttle import RateThrottle
from swarmnode.run.admission.admission import Admission

ADDRESSES_MAX = 6  # with the circuits as many as a record holds
STREAMS_MAX = 2048  # concurrent incoming streams: go-libp2p's SystemBaseLimit of streams, by default
INCOMING_BYTES_MAX = 2 << 30  # derived: two of the largest tensors a manifest allows


class StreamTransport:
    """Implements ports.Transport over streams that a subclass opens (`_reach`) and hands in (`_serve_stream`).

    Call `serve` for every method, then `start`. Calls that arrive before `start` wait for it, so no peer can come too
    early.
    """

    ip_protocol = "tcp"  # of its addresses
    can_relay = False  # whether a node that lets nothing in can be reached through others

    def __init__(self, peer_id: PeerId, run_id: RunId, telemetry: Telemetry | None) -> None:
        self._peer_id = peer_id
        self._run_id = run_id
        self._telemetry = telemetry
        versions = range(frame.VERSION, frame.LEAST - 1, -1)  # the newest that both sides speak is taken
        self._protocols = {f"/swarmnode/{version}/{run_id[:16]}": version for version in versions}
        self.traffic = Counter[tuple[str, str]]()  # as `bytes_by_method`
        self.links = LinkBook()
        self._budget = ByteBudget(INCOMING_BYTES_MAX)
        self.throttle = RateThrottle()
        self._scheduler = UplinkScheduler(lambda: self.throttle.up.total_nbytes)
        self._gate = CallerGate(self.throttle, self._cut_off)
        self._server = StreamServer(
            run_id, self._budget, self._scheduler, self.traffic, telemetry, self.links, self.throttle, self._gate
        )
        self._pool = StreamPool(self._open)
        self._calls = OutgoingCalls(run_id, self._pool, self._scheduler, self.traffic, self.links)
        self._known = Remembered[PeerId, tuple[str, ...]]()
        self._observed = Remembered[PeerId, str]()
        self._named: frozenset[PeerId] = frozenset()  # peers that this machine's user named
        self._incoming = 0
        self.own_pass: access.Pass | None = None  # sent first on every stream we open
        self._started = asyncio.Event()
        self.after_restart: list[Callable[[], Coroutine[object, object, None]]] = []
        self._tasks = TransportTasks()

    # What a subclass has.

    @property
    def listening(self) -> list[str]:
        """The addresses that it listens on, with the ports that it has."""
        raise NotImplementedError

    @property
    def book(self) -> DialBook:
        """The addresses that may be dialled."""
        raise NotImplementedError

    @property
    def network_mode(self) -> NetworkMode:
        """The reachability that this node has or wants."""
        raise NotImplementedError

    async def addresses(self) -> list[str]:
        """Multiaddrs (without /p2p/US) at which others reach this node. Raises Unavailable."""
        raise NotImplementedError

    async def stand(self, network_mode: NetworkMode, announce: Sequence[str] = ()) -> None:
        """Change the reachability. Raises Unavailable."""
        raise NotImplementedError

    async def connections(self) -> Mapping[PeerId, bool]:
        """Peers connected now: True for those reached only through relays. Raises Unavailable."""
        raise NotImplementedError

    async def connect(self, peer: PeerId, addresses: Sequence[str]) -> None:
        """See ports.Transport."""
        raise NotImplementedError

    async def greets(self, endpoint: Endpoint) -> bool:
        """Whether a node of this transport answers at `endpoint`."""
        return await greets(endpoint)

    async def close(self) -> None:
        """End all calls, streams and tasks. May be called repeatedly."""
        raise NotImplementedError

    def _work(self) -> list[Coroutine[object, object, None]]:
        """Tasks beside the calls, which `close` cancels."""
        raise NotImplementedError

    # Addresses of peers.

    async def _name(self, named: Sequence[tuple[PeerId, Sequence[str]]]) -> None:
        """Note the bootstraps that this machine's user named: they may be dialled wherever they are."""
        self._named = frozenset(peer for peer, _ in named)
        for peer, addresses in named:
            await self._usable(peer, addresses)

    async def _usable(self, peer: PeerId, addresses: Sequence[str]) -> list[str]:
        """The `addresses` at which `peer` can be dialled, host names as IP addresses."""
        is_named = peer in self._named
        dialable = dialable_of(addresses, names=is_named)
        usable = await numeric([one for one in dialable if f"/{self.ip_protocol}/" in one])
        if is_named:
            self.book.name(parse_endpoint(one) for one in usable if not is_circuit(one))
        return usable

    async def _remember(self, peer: PeerId, addresses: Sequence[str]) -> list[str]:
        """`_usable`, kept for later dials. Raises Unavailable if there are none."""
        usable = await self._usable(peer, addresses)
        if not usable:
            raise Unavailable(f"{short(peer)} announced no usable address")
        self._known[peer] = tuple(usable)
        return usable

    async def _reach(self, peer: PeerId) -> P2pdStream:
        """A new stream to `peer`. Raises RemoteFault, Unavailable."""
        raise NotImplementedError

    async def _disconnect(self, peer: PeerId) -> None:
        raise NotImplementedError

    def _cut_off(self, peer: PeerId) -> None:
        """Disconnect a stranger that keeps opening streams, and deny its address."""
        raise NotImplementedError

    async def _broke(self, method: str) -> None:
        """Raises Unavailable if a lost stream is this node's own fault."""

    async def _run(self) -> None:
        await self._tasks.start([self._sweep(), *self._work()])

    async def _end(self) -> None:
        await self._tasks.end()
        self._pool.close()

    def spawn(self, work: Coroutine[object, object, None]) -> asyncio.Task[None]:
        """Run `work` in this transport's group: `close` cancels it, and its failure fails the transport."""
        return self._tasks.spawn(work)

    async def wait_failed(self) -> None:
        """Wait for ever; raises LocalFault if this transport is broken beyond repair (p2pd keeps dying)."""
        await self._tasks.wait_failed()

    def let_in(self, admission: Admission) -> None:
        """Serve only peers that `admission` admits, and present its own pass to others. Call it before `start`."""
        self._gate.admission = admission
        self.own_pass = admission.mine

    def prefer(self, works: Callable[[PeerId], bool]) -> None:
        """Give peers for which `works` is true room for their calls beside a flood of calls of others."""
        self._gate.works = works

    def start(self) -> None:
        """Answer calls from now on; all handlers must be registered. `DhtDirectory.create` calls this, too."""
        self._started.set()

    # The port.

    @property
    def peer_id(self) -> PeerId:
        return self._peer_id

    def observed(self, peer: PeerId) -> str:
        """The IP address that `peer`'s latest stream came from; "" if it opened none or came through a relay."""
        return ip_of(self._observed.get(peer, ""))

    def remember(self, peer: PeerId, addresses: Sequence[str]) -> None:
        """Remember the addresses of `peer` in case p2pd loses them; dials nothing."""
        if peer != self._peer_id and addresses:
            self._known[peer] = tuple(addresses)

    def serve(self, method: str, handler: Handler, *, tensor_bytes_max: int, admit: Admit | None = None) -> None:
        """See ports.Transport. May be called before or after `start`."""
        self._server.register(method, handler, tensor_bytes_max, admit)

    def withdraw(self, method: str) -> None:
        """Serve `method` no longer."""
        self._server.withdraw(method)

    async def call(self, peer: PeerId, call: Call, *, timeout_s: float, reply_bytes_max: int) -> Answer:
        """See ports.Transport."""
        method = call.header.WhichOneof("body")
        assert method is not None, "a call needs a body"
        if (stage := part_of(peer)) is not None:
            call.header.to_part = stage + 1
            peer = machine_of(peer)
        self._tasks.check()
        try:
            async with asyncio.timeout(timeout_s):
                return await self._calls.call(peer, method, call, timeout_s, reply_bytes_max)
        except TimeoutError:
            self._pool.forget(peer)
            raise PeerTimeout(f"{short(peer)} did not answer {method} within {timeout_s:.1f} s") from None
        except ConnectionError as error:
            await self._broke(method)
            raise Broken(f"{short(peer)} died or disconnected during {method}: {cause_of(error)}") from None

    def bytes_by_method(self) -> dict[tuple[str, str], int]:
        """Payload and header bytes so far by (method, "sent" or "received"), of calls and answers."""
        return dict(self.traffic)

    @property
    def line_queue(self) -> int:
        return self._scheduler.waiting

    @property
    def line_bytes_per_s(self) -> float:
        return self._scheduler.line_bytes_per_s

    async def _open(self, peer: PeerId) -> P2pdStream:
        """A new stream to `peer`, with our pass sent on it."""
        stream = await self._reach(peer)
        stream.throttle = self.throttle
        admission = self._gate.admission
        if (shown := self.own_pass if admission is None else admission.mine) is not None:
            await stream.write(frame.seal_pass(shown, stream.version))
        return stream

    # Incoming calls.

    def _welcome(self, stream: P2pdStream, attend: Callable[[P2pdStream], Coroutine[object, object, None]]) -> None:
        if not self._tasks.running or self._incoming >= STREAMS_MAX:
            stream.abort()
            return
        self.spawn(attend(stream))

    async def _serve_stream(self, stream: P2pdStream, peer: PeerId) -> None:
        await self._started.wait()
        stream.throttle = self.throttle
        await self._server.attend(stream, peer)

    def _observe(self, peer: PeerId, address: str) -> None:
        """`peer` proved its key in a connection from `address`."""
        self._observed[peer] = address
        if host := self.observed(peer):
            self.book.meet(host, 0)

    def _friends(self) -> frozenset[str]:
        """The IP addresses of peers that may take part: observed on their streams, and announced by them."""
        admission = self._gate.admission
        here = {peer for peer in (*self._observed, *self._known) if admission is None or admission.judge(peer)[0]}
        hosts = (ip_of(address) for peer in here for address in self._known.get(peer, ()))
        return frozenset({*hosts, *map(self.observed, here)} - {""})

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(IDLE_S / 2)
            self._pool.sweep()

    def _event(self, event: str, level: str, **fields: object) -> None:
        if self._telemetry is not None:
            self._telemetry.event(event, level=level, **fields)


class TransportTasks:
    """The only TaskGroup of a transport, and the failure that ends it."""

    def __init__(self) -> None:
        self._group: asyncio.TaskGroup | None = None
        self._root: asyncio.Task[None] | None = None
        self._failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    @property
    def running(self) -> bool:
        return self._group is not None

    async def start(self, works: Sequence[Coroutine[object, object, None]]) -> None:
        """Run `works` until `end`. Returns as soon as `spawn` can be called."""
        ready = asyncio.Event()
        self._root = asyncio.get_running_loop().create_task(self._live(works, ready))
        self._root.add_done_callback(self._ended)
        await ready.wait()

    async def _live(self, works: Sequence[Coroutine[object, object, None]], ready: asyncio.Event) -> None:
        async with asyncio.TaskGroup() as self._group:
            for work in works:
                self._group.create_task(work)
            ready.set()

    def spawn(self, work: Coroutine[object, object, None]) -> asyncio.Task[None]:
        """Run `work`: `end` cancels it, and its failure ends all."""
        assert self._group is not None
        return self._group.create_task(work)

    async def end(self) -> None:
        """Cancel all."""
        if self._root is not None:
            self._root.cancel()
            with contextlib.suppress(asyncio.CancelledError, BaseExceptionGroup):
                await asyncio.shield(asyncio.gather(self._root, return_exceptions=True))

    def _ended(self, root: asyncio.Task[None]) -> None:
        if self._failure.done():
            return
        error = None if root.cancelled() else root.exception()
        cause: BaseException | None = error
        while isinstance(cause, BaseExceptionGroup):
            cause = cause.exceptions[0]
        if cause is None:
            self._failure.cancel()
        else:
            self._failure.set_exception(cause)
            self._failure.exception()  # mark as retrieved: without a waiter, `check` raises it

    def check(self) -> None:
        """Raises the failure, if there was one."""
        if self._failure.done() and not self._failure.cancelled():
            self._failure.result()

    async def wait_failed(self) -> None:
        """Wait for ever, or raise the failure."""
        await asyncio.shield(self._failure)


class OutgoingCalls:
    """Sends calls on streams of `pool`, each in its turn on the uplink, and receives their answers."""

    def __init__(
        self,
        run_id: RunId,
        pool: StreamPool,
        scheduler: UplinkScheduler,
        traffic: Counter[tuple[str, str]],
        links: LinkBook,
    ) -> None:
        self._run_id = run_id
        self._pool = pool
        self._scheduler = scheduler
        self._traffic = traffic
        self._links = links

    async def call(self, peer: PeerId, method: str, call: Call, timeout_s: float, reply_bytes_max: int) -> Answer:
        """The answer of `peer`, with a size of at most `reply_bytes_max`. Raises as ports.Transport's `call`, and
        ConnectionError if the stream is lost."""
        nbytes = sum(tensor.nbytes for tensor in call.tensors)
        stream = await self._pool.take(peer)
        bytes_in = stream.consumed
        bytes_out = stream.bytes_out
        try:
            call.header.both_ways = method in BOTH_WAYS
            async with AsyncExitStack() as turn:
                waited_s = await turn.enter_async_context(self._scheduler.turn(nbytes, timeout_s))
                header = frame.seal_request(
                    call.header, call.tensors, self._run_id, timeout_s - waited_s, stream.version
                )
                if call.header.both_ways:
                    answer, flags, in_step = await self._both_ways(stream, header, call, reply_bytes_max, turn)
                else:
                    in_step = await frame.send(stream, FrameKind.REQUEST, header, call.tensors)
                    await turn.aclose()
                    answer, flags = await self._receive(stream, reply_bytes_max)
        except BaseException as error:
            self._pool.drop(peer, stream, suspect=isinstance(error, RemoteFault | ConnectionError))
            raise
        finally:
            sent = stream.bytes_out - bytes_out
            received = stream.consumed - bytes_in
            self._traffic[method, "sent"] += sent
            self._traffic[method, "received"] += received
            self._links.record_bytes(peer, sent=sent, received=received, now_s=asyncio.get_running_loop().time())
        if in_step and not stream.buffered and FrameFlag.LAST not in flags:
            self._pool.give(peer, stream)
        else:
            self._pool.end(peer, stream)
        frame.raise_for(peer, answer.header)
        answer.waited_s = waited_s
        return answer

    async def _both_ways(
        self, stream: P2pdStream, header: bytes, call: Call, reply_bytes_max: int, turn: AsyncExitStack
    ) -> tuple[Answer, FrameFlag, bool]:
        """(the answer, which comes while the request is sent; its flags; whether the request was sent whole). A refusal
        ends the sending. The `turn` on the uplink ends as all is sent."""

        async def send() -> bool:
            whole = await frame.send(stream, FrameKind.REQUEST, header, call.tensors, beside=True)
            await turn.aclose()
            return whole

        sending = asyncio.get_running_loop().create_task(send())

        def end(sent: asyncio.Task[bool]) -> None:
            if not sent.cancelled() and sent.exception() is not None:
                stream.abort()  # else the answer would be waited for

        sending.add_done_callback(end)
        try:
            answer, flags = await self._receive(stream, reply_bytes_max)
            whole = sending.done() or (answer.header.status == wire.STATUS_OK and await sending)
            return answer, flags, whole
        except ConnectionError:
            if sending.done() and not sending.cancelled() and (error := sending.exception()) is not None:
                raise error from None
            raise
        finally:
            sending.cancel()
            await asyncio.gather(sending, return_exceptions=True)

    async def _receive(self, stream: P2pdStream, reply_bytes_max: int) -> tuple[Answer, FrameFlag]:
        raw, flags = await frame.receive_header(stream, FrameKind.REPLY)
        header = frame.open_reply(raw)
        # Not counted in the budget: we asked for it, with a size limit. If it had to wait for room that strangers use,
        # an honest peer would seem late.
        frame.check_tensors(header.tensors, reply_bytes_max)
        return Answer(header, await frame.receive_tensors(stream, header.tensors)), flags


IDLE_S = SERVED_IDLE_S / 6.0  # well before the server closes it
IDLE_MAX = 256  # guess: 256 sockets and 4 MiB of look-ahead
IN_USE_MAX = STREAMS_PER_PEER_MAX // 2  # calls in flight to one peer, and as many warm streams


class StreamPool:
    """Warm streams by peer; a stream carries one call at a time. `opener` opens a new one, which costs two round trips,
    so a used one is kept for the next call."""

    def __init__(self, opener: Callable[[PeerId], Awaitable[P2pdStream]]) -> None:
        self._opener = opener
        self._idle: dict[PeerId, deque[tuple[float, P2pdStream]]] = {}
        self.in_use: Counter[PeerId] = Counter()  # calls in flight
        self._idle_count = 0

    async def take(self, peer: PeerId) -> P2pdStream:
        """A stream to `peer`: the most recently used open one, else a new one. Return it by `give`, `drop` or `end`.

        Raises Busy if IN_USE_MAX calls to `peer` are in flight, and the errors of `opener`.
        """
        if self.in_use[peer] >= IN_USE_MAX:
            raise Busy(f"{IN_USE_MAX} calls to {short(peer)} are in flight already", 0.1)
        self.in_use[peer] += 1
        try:
            return self._warm(peer) or await self._opener(peer)
        except BaseException:
            self._release(peer)
            raise

    def _warm(self, peer: PeerId) -> P2pdStream | None:
        """The most recently used stream that is still open, or None. Nothing has been written yet, so a stale one costs
        nothing."""
        idle = self._idle.get(peer)
        while idle:
            _, stream = idle.pop()
            self._idle_count -= 1
            if not stream.lost and not stream.buffered:
                return stream
            stream.abort()
        self._idle.pop(peer, None)
        return None

    def give(self, peer: PeerId, stream: P2pdStream) -> None:
        """Keep `stream`, whose call is complete, for the next one."""
        self._release(peer)
        idle = self._idle.setdefault(peer, deque())
        if stream.lost or len(idle) >= IN_USE_MAX or self._idle_count >= IDLE_MAX:
            stream.close()
            return
        idle.append((asyncio.get_running_loop().time(), stream))
        self._idle_count += 1

    def drop(self, peer: PeerId, stream: P2pdStream, *, suspect: bool) -> None:
        """Abort `stream`, whose state is unknown. `suspect`: distrust the other streams to `peer`, too."""
        self._release(peer)
        stream.abort()
        if suspect:
            self.forget(peer)

    def end(self, peer: PeerId, stream: P2pdStream) -> None:
        """Close `stream` in order: the call is complete, and the peer reads no further one."""
        self._release(peer)
        stream.close()

    def forget(self, peer: PeerId) -> None:
        """Close the idle streams to `peer`."""
        for _, stream in self._idle.pop(peer, ()):
            self._idle_count -= 1
            stream.abort()

    def sweep(self) -> None:
        """Close streams idle for IDLE_S, and drop those closed by peers."""
        oldest = asyncio.get_running_loop().time() - IDLE_S
        for peer, idle in list(self._idle.items()):
            kept = deque(entry for entry in idle if entry[0] > oldest and not entry[1].lost)
            for entry in idle:
                if entry not in kept:
                    entry[1].close()
            self._idle_count -= len(idle) - len(kept)
            if kept:
                self._idle[peer] = kept
            else:
                del self._idle[peer]

    def close(self) -> None:
        """Close every idle stream."""
        for peer in list(self._idle):
            self.forget(peer)

    def _release(self, peer: PeerId) -> None:
        self.in_use[peer] -= 1
        if not self.in_use[peer]:
            del self.in_use[peer]
