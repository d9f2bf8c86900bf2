"""The real Transport: calls between nodes over libp2p, through hivemind's p2pd, in this process and its event loop."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter, OrderedDict
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path

from hivemind.proto import p2pd_pb2
from hivemind.utils.multiaddr import Multiaddr

from swarmnode.errors import Broken, Busy, LocalFault, PeerTimeout, RemoteFault, Unavailable, UsageError
from swarmnode.identity import Identity
from swarmnode.ids import PeerId, RunId, short
from swarmnode.membership.door import Door
from swarmnode.metrics import name
from swarmnode.ports import Admit, Answer, Call, Handler, Telemetry
from swarmnode.transport import frame
from swarmnode.transport.address import dialable, dialable_of, ip_of, is_circuit, parse_endpoint
from swarmnode.transport.budget import Budget
from swarmnode.transport.daemon import CONTROL_BYTES_MAX, DIAL_TIMEOUT_S, Daemon, peer_of, read_delimited
from swarmnode.transport.frame import Flag, Kind
from swarmnode.transport.gate import Gate
from swarmnode.transport.guard import Guard
from swarmnode.transport.links import LinkBook
from swarmnode.transport.p2pd import Footing
from swarmnode.transport.pool import IDLE_S, Pool
from swarmnode.transport.serve import HEADER_TIMEOUT_S, Server
from swarmnode.transport.socketdir import SocketDir
from swarmnode.transport.stream import Stream
from swarmnode.transport.throttle import Throttle
from swarmnode.turns import Turns
from swarmnode.wire import access_pb2 as access

ADDRESSES_MAX = 6  # with the circuits as many as a record holds
CIRCUITS_MAX = 2  # each is 90 characters of a record of 1 KiB
CONNECT_ATTEMPTS = 3  # guess; the caller of `connect` has a bound of its own
CONNECT_DELAY_S = 0.2
KNOWN_PEERS_MAX = 1024  # peers whose addresses are remembered; guess: above the replicas of a few stages
STREAMS_MAX = 2048  # incoming streams at once; guess
INCOMING_BYTES_MAX = 2 << 30  # guess: as much as two of the largest tensors a manifest allows


class Libp2pTransport:
    """Implements ports.Transport. `create` starts it, `close` ends it and everything it started.

    Between the two: `serve` every method, then `start`. Calls that arrive before `start` wait for it, so no peer can
    come too early.
    """

    def __init__(self, daemon: Daemon, sockets: SocketDir, peer_id: PeerId, run_id: RunId, telemetry: Telemetry | None):
        self._daemon = daemon
        self._sockets = sockets
        self._peer_id = peer_id
        self._run_id = run_id
        self._telemetry = telemetry
        self._protocol = f"/swarmnode/{frame.VERSION}/{run_id[:16]}"
        self._traffic: Counter[tuple[str, str]] = Counter()
        self.links = LinkBook()
        self._budget = Budget(INCOMING_BYTES_MAX)
        self.throttle = Throttle()
        self._turns = Turns(lambda: self.throttle.up.total_nbytes)
        self._server = Server(run_id, self._budget, self._turns, self._traffic, telemetry, self.links)
        self._pool = Pool(self._open)
        self._known: OrderedDict[PeerId, tuple[str, ...]] = OrderedDict()
        self._observed: OrderedDict[PeerId, str] = OrderedDict()
        self._incoming = 0
        self._guard = Guard(daemon, self._friends, self._guarded)
        self._server.cut_off = self._cut_off
        self.own_pass: access.Pass | None = None  # shown first on every stream we open
        self._started = asyncio.Event()
        self._listener: asyncio.Server | None = None
        self._group: asyncio.TaskGroup | None = None
        self._root: asyncio.Task[None] | None = None
        self.after_restart: list[Callable[[], Coroutine[object, object, None]]] = []
        self._failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    @classmethod
    async def create(
        cls,
        identity_path: Path,
        identity: Identity,
        run_id: RunId,
        listen: Sequence[str] = ("/ip4/127.0.0.1/tcp/0",),
        *,
        announce: Sequence[str] = (),
        footing: Footing | None = None,
        telemetry: Telemetry | None = None,
    ) -> Libp2pTransport:
        """A transport that can call others, and answers them after `start`.

        `identity_path` is the key file of `identity` (transport/identity.py), which p2pd reads itself; `announce`
        replaces the addresses others are told; `footing` says how p2pd stands in the network.

        Raises UsageError (a bad address), LocalFault (a port in use, no p2pd).
        """
        for text in (*listen, *announce):
            parse_endpoint(text)
        if not listen:
            raise UsageError("no address to listen on; give at least one, such as /ip4/127.0.0.1/tcp/0")
        sockets = SocketDir()
        daemon = Daemon(identity_path, sockets.path, tuple(listen), tuple(announce), footing or Footing())
        transport = cls(daemon, sockets, identity.peer_id, run_id, telemetry)
        try:
            await daemon.start()
            if str(daemon.peer_id) != identity.peer_id:
                raise LocalFault(f"{identity_path} holds the key of {daemon.peer_id}, not of {identity.peer_id}")
            await transport._run()
            await transport._listen()
        except BaseException:
            await transport.close()
            raise
        return transport

    async def _run(self) -> None:
        ready = asyncio.Event()
        self._root = asyncio.get_running_loop().create_task(self._live(ready))
        self._root.add_done_callback(self._ended)
        await ready.wait()

    async def _live(self, ready: asyncio.Event) -> None:
        """The one TaskGroup of this transport; `close` cancels it."""
        async with asyncio.TaskGroup() as self._group:
            self._group.create_task(self._daemon.supervise(self._p2pd_died, self._p2pd_restarted))
            self._group.create_task(self._daemon.keep_answering())
            self._group.create_task(self._sweep())
            self._group.create_task(self._guard.watch())
            ready.set()

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
            self._failure.exception()  # who does not wait for it meets it in `call`

    def spawn(self, work: Coroutine[object, object, None]) -> asyncio.Task[None]:
        """Run `work` in this transport's group: it is cancelled by `close`, and its failure fails the transport."""
        assert self._group is not None
        return self._group.create_task(work)

    async def wait_failed(self) -> None:
        """Returns never; raises LocalFault when this transport is broken beyond repair (p2pd dies again and again)."""
        await asyncio.shield(self._failure)

    async def _listen(self) -> None:
        path = self._sockets.path / "in"
        self._listener = await asyncio.get_running_loop().create_unix_server(lambda: Stream(self._accept), str(path))
        await self._daemon.serve_streams(self._protocol, path)

    def let_in(self, door: Door) -> None:
        """Serve only whom `door` permits, and show others its own pass. Before `start`; without it all are served."""
        self._server.door = door
        self.own_pass = door.mine

    def start(self) -> None:
        """Answer calls from now on: every handler is registered. `DhtDirectory.create` does it, too."""
        self._started.set()

    async def close(self) -> None:
        """End every call, stream, task and p2pd; remove the sockets. Twice is as good as once."""
        if self._listener is not None:
            self._listener.close()
        if self._root is not None:
            self._root.cancel()
            with contextlib.suppress(asyncio.CancelledError, BaseExceptionGroup):
                await asyncio.shield(asyncio.gather(self._root, return_exceptions=True))
        self._pool.close()
        self._guard.release()
        await self._daemon.stop()
        self._sockets.remove()

    # The port.

    @property
    def peer_id(self) -> PeerId:
        return self._peer_id

    @property
    def daemon(self) -> Daemon:
        """The p2pd behind it, which the directory shares."""
        return self._daemon

    async def addresses(self) -> list[str]:
        """Multiaddrs (without /p2p/US) at which others reach this node: direct ones over TCP, then at most CIRCUITS_MAX
        through relays. Raises Unavailable (p2pd is down)."""
        direct: list[str] = []
        circuits: list[str] = []
        for text in await self._daemon.addresses():
            with contextlib.suppress(UsageError):
                address = dialable(text)
                (circuits if is_circuit(address) else direct).append(address)
        return list(dict.fromkeys(direct))[:ADDRESSES_MAX] + list(dict.fromkeys(circuits))[:CIRCUITS_MAX]

    async def stand(self, footing: Footing, announce: Sequence[str] = ()) -> None:
        """Stand differently in the network from now on: p2pd starts again (0.5 s). Raises Unavailable."""
        await self._daemon.change(footing, announce)

    def observed(self, peer: PeerId) -> str:
        """The IP address that the latest stream of `peer` to us came from, "" when none did or it came by a relay."""
        return ip_of(self._observed.get(peer, ""))

    def remember(self, peer: PeerId, addresses: Sequence[str]) -> None:
        """Where `peer` says it is, for the day when p2pd has lost it; nothing is dialled."""
        if peer != self._peer_id and addresses:
            self._remember(peer, tuple(addresses))

    def serve(self, method: str, handler: Handler, *, tensor_bytes_max: int, admit: Admit | None = None) -> None:
        """See ports.Transport. Before `start`, or later."""
        self._server.register(method, handler, tensor_bytes_max, admit)

    async def connect(self, peer: PeerId, addresses: Sequence[str]) -> None:
        """Make `peer` reachable at `addresses`, which are remembered. Raises Unavailable after CONNECT_ATTEMPTS."""
        usable = dialable_of(addresses)
        if not usable:
            raise Unavailable(f"{short(peer)} gave no address that can be used")
        self._remember(peer, tuple(usable))
        for attempt in range(CONNECT_ATTEMPTS):
            try:
                await self._daemon.dial(peer, usable)
                return
            except RemoteFault as fault:
                if attempt == CONNECT_ATTEMPTS - 1:
                    raise Unavailable(str(fault), CONNECT_DELAY_S * 2**attempt) from None
            await asyncio.sleep(CONNECT_DELAY_S * 2**attempt)

    async def call(self, peer: PeerId, call: Call, *, timeout_s: float, reply_bytes_max: int) -> Answer:
        """See ports.Transport."""
        method = call.header.WhichOneof("body")
        assert method is not None, "a call without a body asks for nothing"
        if self._failure.done() and not self._failure.cancelled():
            self._failure.result()
        try:
            async with asyncio.timeout(timeout_s):
                return await self._call(peer, method, call, timeout_s, reply_bytes_max)
        except TimeoutError:
            self._pool.forget(peer)
            raise PeerTimeout(f"{short(peer)} did not answer {method} within {timeout_s:.1f} s") from None
        except ConnectionError as error:
            if not await self._daemon.answers():
                raise Unavailable(f"our p2pd died during {method}; it is being restarted", 0.5) from None
            raise Broken(f"{short(peer)} died or went away during {method}: {error}") from None

    def bytes_by_method(self) -> dict[tuple[str, str], int]:
        """Payload and header bytes so far by (method, "sent" or "received"), of calls and of answers alike."""
        return dict(self._traffic)

    @property
    def line_queue(self) -> int:
        return self._turns.waiting

    async def _call(self, peer: PeerId, method: str, call: Call, timeout_s: float, reply_bytes_max: int) -> Answer:
        nbytes = sum(tensor.nbytes for tensor in call.tensors)
        stream = await self._pool.take(peer)
        bytes_in, bytes_out = stream.consumed, stream.bytes_out
        try:
            async with self._turns.turn(nbytes, timeout_s) as waited_s:
                header = frame.seal_request(call.header, call.tensors, self._run_id, timeout_s - waited_s)
                in_step = await frame.send(stream, Kind.REQUEST, header, call.tensors)
            answer, flags = await self._receive(stream, reply_bytes_max)
        except BaseException as error:
            self._pool.drop(peer, stream, suspect=isinstance(error, RemoteFault | ConnectionError))
            raise
        finally:
            sent, received = stream.bytes_out - bytes_out, stream.consumed - bytes_in
            self._traffic[method, "sent"] += sent
            self._traffic[method, "received"] += received
            self.links.moved(peer, sent=sent, received=received, now_s=asyncio.get_running_loop().time())
        if in_step and not stream.buffered and Flag.LAST not in flags:
            self._pool.give(peer, stream)
        else:
            self._pool.end(peer, stream)
        frame.raise_for(peer, answer.header)
        answer.waited_s = waited_s
        return answer

    async def _receive(self, stream: Stream, reply_bytes_max: int) -> tuple[Answer, Flag]:
        raw, flags = await frame.receive_header(stream, Kind.REPLY)
        header = frame.open_reply(raw)
        # Not counted in the budget: we asked for it, and said how much. If it had to wait for room that strangers take,
        # an honest peer would seem late.
        frame.check_tensors(header.tensors, reply_bytes_max)
        return Answer(header, await frame.receive_tensors(stream, header.tensors)), flags

    async def _open(self, peer: PeerId) -> Stream:
        """A new stream, our pass shown on it."""
        stream = await self._reach(peer)
        stream.throttle = self.throttle
        if self.own_pass is not None:
            await stream.write(frame.seal_pass(self.own_pass))
        return stream

    async def _reach(self, peer: PeerId) -> Stream:
        """A new stream; when p2pd has lost the peer's addresses or connection, once more after dialling again."""
        try:
            return await self._daemon.open_stream(peer, self._protocol, DIAL_TIMEOUT_S)
        except RemoteFault as fault:
            known = dialable_of(self._known.get(peer, ()))
            if not known or "cannot be reached" not in str(fault):
                raise
            await self._daemon.dial(peer, known)
            return await self._daemon.open_stream(peer, self._protocol, DIAL_TIMEOUT_S)

    def _remember(self, peer: PeerId, addresses: tuple[str, ...]) -> None:
        self._known[peer] = addresses
        self._known.move_to_end(peer)
        if len(self._known) > KNOWN_PEERS_MAX:
            self._known.popitem(last=False)

    # Being called.

    def _accept(self, stream: Stream) -> None:
        if self._group is None or self._incoming >= STREAMS_MAX:
            stream.abort()
            return
        self._group.create_task(self._attend(stream))

    async def _attend(self, stream: Stream) -> None:
        self._incoming += 1
        try:
            async with asyncio.timeout(HEADER_TIMEOUT_S):
                info = p2pd_pb2.StreamInfo.FromString(await read_delimited(stream, CONTROL_BYTES_MAX))
            peer = peer_of(info.peer)
            self._observe(peer, info.addr)
            await self._started.wait()
            stream.throttle = self.throttle
            await self._server.attend(stream, peer)
        except (ConnectionError, TimeoutError, RemoteFault):
            pass
        finally:
            self._incoming -= 1
            stream.abort()

    def _observe(self, peer: PeerId, raw: bytes) -> None:
        try:
            self._observed[peer] = str(Multiaddr(raw))
        except ValueError:
            self._observed[peer] = ""
        self._observed.move_to_end(peer)
        if len(self._observed) > KNOWN_PEERS_MAX:
            self._observed.popitem(last=False)

    def _friends(self) -> frozenset[str]:
        """The IP addresses of peers that may take part: where their streams came from, and where they say they are."""
        door = self._server.door
        here = {peer for peer in (*self._observed, *self._known) if door is None or door.judge(peer)[0]}
        told = (ip_of(address) for peer in here for address in self._known.get(peer, ()))
        return frozenset({*told, *map(self.observed, here)} - {""})

    def _cut_off(self, peer: PeerId) -> None:
        """End the connection of a stranger that opens stream after stream, and keep its address away."""
        self._guard.deny(self.observed(peer))
        self.spawn(self._disconnect(peer))

    async def _disconnect(self, peer: PeerId) -> None:
        with contextlib.suppress(Unavailable):
            await self._daemon.disconnect(peer)

    def _guarded(self, reason: str, gate: Gate) -> None:
        share = round(gate.share, 3)
        self._event("gate.changed", "warning", reason=reason, strangers_share=share, denied=len(gate.denied))

    # Keeping alive.

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(IDLE_S / 2)
            self._pool.sweep()

    def _p2pd_died(self, code: int | None) -> None:
        self._pool.close()
        self._guard.release()
        self._event("p2pd.died", "warning", exit_code=code)

    async def _p2pd_restarted(self) -> None:
        self._event("p2pd.restarted", "info", p2pd=self._daemon.pid)
        if self._telemetry is not None:
            self._telemetry.count(name.P2PD_RESTARTS)
        for peer, addresses in list(self._known.items()):
            self.spawn(self._redial(peer, addresses))
        for work in self.after_restart:
            self.spawn(work())

    async def _redial(self, peer: PeerId, addresses: tuple[str, ...]) -> None:
        with contextlib.suppress(RemoteFault, Unavailable, Busy):  # the next call to it will say
            await self._daemon.dial(peer, addresses)

    def _event(self, event: str, level: str, **fields: object) -> None:
        if self._telemetry is not None:
            self._telemetry.event(event, level=level, **fields)
