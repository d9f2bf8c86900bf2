"""The real Transport: calls between nodes over libp2p, through hivemind's p2pd, in this process's event loop."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import shutil
import tempfile
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from pathlib import Path

from hivemind.proto import p2pd_pb2
from hivemind.utils.multiaddr import Multiaddr

from swarmnode.errors import Broken, Busy, LocalFault, PeerTimeout, RemoteFault, Unavailable, UsageError
from swarmnode.identity import Identity
from swarmnode.ids import PeerId, RunId, short
from swarmnode.membership.admission import Admission
from swarmnode.metrics import name
from swarmnode.ports import Admit, Answer, Call, Handler, Telemetry
from swarmnode.remembered import Remembered
from swarmnode.transport import frame
from swarmnode.transport.address import dialable, dialable_of, ip_of, is_circuit, numeric, parse_endpoint
from swarmnode.transport.budget import ByteBudget
from swarmnode.transport.dial_book import DialBook
from swarmnode.transport.flood_guard import FloodGate, FloodGuard
from swarmnode.transport.frame import FrameFlag, FrameKind
from swarmnode.transport.links import LinkBook
from swarmnode.transport.p2pd import NetworkMode
from swarmnode.transport.p2pd_process import CONTROL_BYTES_MAX, DIAL_TIMEOUT_S, P2pdProcess, peer_of, read_delimited
from swarmnode.transport.serve import HEADER_TIMEOUT_S, STREAMS_PER_PEER_MAX, StreamServer
from swarmnode.transport.serve import IDLE_S as SERVED_IDLE_S
from swarmnode.transport.stream import P2pdStream
from swarmnode.transport.throttle import RateThrottle
from swarmnode.uplink_scheduler import UplinkScheduler
from swarmnode.wire import access_pb2 as access

PREFIX = "swarmnode-p2p-"
_PATH_BYTES_MAX = 100  # of 108 that a unix socket's address holds on Linux, 104 on macOS
_SOCKET_NAME_CHARACTERS = 24  # "p2pclient-" and eleven more, as hivemind names them


class SocketDir:
    """A folder `/tmp/swarmnode-p2p-<pid>-<random>` (mode 0700), locked while this process lives."""

    def __init__(self, parent: Path | None = None) -> None:
        """Remove the folders of dead nodes and make a new one. Raises LocalFault if that fails."""
        parent = Path(tempfile.gettempdir()) if parent is None else parent
        if len(os.fsencode(parent)) + len(PREFIX) + 20 + _SOCKET_NAME_CHARACTERS > _PATH_BYTES_MAX:
            parent = Path("/tmp")  # a unix socket's path is short, TMPDIR may not be
        sweep(parent)
        try:
            self.path = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{os.getpid()}-", dir=parent))
            self._lock = os.open(self.path / "lock", os.O_CREAT | os.O_RDWR, 0o600)
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise LocalFault(f"no folder for sockets can be made in {parent}: {error.strerror}") from error

    def remove(self) -> None:
        """Remove the folder and the sockets in it."""
        shutil.rmtree(self.path, ignore_errors=True)
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


def sweep(parent: Path) -> list[Path]:
    """Remove our user's socket folders whose process is dead; return them.

    A process is dead if nobody has its pid *and* nobody holds its lock: pids repeat in containers that share a /tmp,
    and a new folder has no lock for a moment.
    """
    swept = []
    for path in sorted(parent.glob(f"{PREFIX}*")):
        pid = path.name.removeprefix(PREFIX).partition("-")[0]
        try:
            ours = pid.isdigit() and path.stat().st_uid == os.geteuid()
            if not ours or _alive(int(pid)) or not _unlocked(path):
                continue
        except OSError:
            continue  # another process is removing it
        shutil.rmtree(path, ignore_errors=True)
        swept.append(path)
    return swept


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def _unlocked(path: Path) -> bool:
    try:
        lock = os.open(path / "lock", os.O_RDWR)
    except FileNotFoundError:
        return True
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(lock)
    return True


ADDRESSES_MAX = 6  # with the circuits as many as a record holds
CIRCUITS_MAX = 2  # each takes 90 characters of a record of 1 KiB
CONNECT_ATTEMPTS = 3  # guess; the caller of `connect` has its own timeout
CONNECT_DELAY_S = 0.2
STREAMS_MAX = 2048  # guess: concurrent incoming streams
INCOMING_BYTES_MAX = 2 << 30  # guess: two of the largest tensors a manifest allows


class Libp2pTransport:
    """Implements ports.Transport. `create` starts it; `close` ends it and everything it started.

    Call `serve` for every method, then `start`. Calls that arrive before `start` wait for it, so no peer can come too
    early.
    """

    def __init__(
        self, daemon: P2pdProcess, sockets: SocketDir, peer_id: PeerId, run_id: RunId, telemetry: Telemetry | None
    ):
        self._daemon = daemon
        self._sockets = sockets
        self._peer_id = peer_id
        self._run_id = run_id
        self._telemetry = telemetry
        versions = range(frame.VERSION, frame.LEAST - 1, -1)  # libp2p takes the first that both sides speak
        self._protocols = {f"/swarmnode/{version}/{run_id[:16]}": version for version in versions}
        self._traffic = daemon.traffic
        self.links = LinkBook()
        self._budget = ByteBudget(INCOMING_BYTES_MAX)
        self.throttle = RateThrottle()
        self._scheduler = UplinkScheduler(lambda: self.throttle.up.total_nbytes)
        self._server = StreamServer(
            run_id, self._budget, self._scheduler, self._traffic, telemetry, self.links, self.throttle
        )
        self._pool = StreamPool(self._open)
        self._known = Remembered[PeerId, tuple[str, ...]]()
        self._observed = Remembered[PeerId, str]()
        self._named: frozenset[PeerId] = frozenset()  # peers that this machine's user named
        self._incoming = 0
        self._guard = FloodGuard(daemon, self._friends, self._guarded)
        self._server.cut(self._cut_off)
        self.own_pass: access.Pass | None = None  # sent first on every stream we open
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
        network_mode: NetworkMode | None = None,
        telemetry: Telemetry | None = None,
        named: Sequence[tuple[PeerId, Sequence[str]]] = (),
        lan: bool = False,
    ) -> Libp2pTransport:
        """A transport that can call others at once, and answers them after `start`.

        `identity_path` is the key file of `identity` (transport/key_file.py), which p2pd reads itself. `announce`
        replaces the addresses announced to others. `network_mode` sets p2pd's reachability. `named`: the bootstraps,
        which may have host names and lie in the local network; `lan`: so may others.

        Raises UsageError (a bad address, a port in use), LocalFault (no p2pd).
        """
        for text in (*listen, *announce):
            parse_endpoint(text)
        if not listen:
            raise UsageError("no address to listen on; give at least one, such as /ip4/127.0.0.1/tcp/0")
        sockets = SocketDir()
        mode, book = network_mode or NetworkMode(), DialBook([*listen, *announce], lan=lan)
        daemon = P2pdProcess(identity_path, sockets.path, tuple(listen), tuple(announce), mode, book=book)
        transport = cls(daemon, sockets, identity.peer_id, run_id, telemetry)
        transport._named = frozenset(peer for peer, _ in named)
        for _, addresses in named:
            direct = [one for one in await numeric(dialable_of(addresses, names=True)) if not is_circuit(one)]
            book.name(map(parse_endpoint, direct))
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
        """Run this transport's only TaskGroup; `close` cancels it."""
        async with asyncio.TaskGroup() as self._group:
            self._group.create_task(self._daemon.supervise(self._p2pd_died, self._p2pd_restarted))
            self._group.create_task(self._daemon.keep_answering())
            self._group.create_task(self._daemon.keep_book())
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
            self._failure.exception()  # mark as retrieved: without a waiter, `call` raises it

    def spawn(self, work: Coroutine[object, object, None]) -> asyncio.Task[None]:
        """Run `work` in this transport's group: `close` cancels it, and its failure fails the transport."""
        assert self._group is not None
        return self._group.create_task(work)

    async def wait_failed(self) -> None:
        """Wait for ever; raises LocalFault if this transport is broken beyond repair (p2pd keeps dying)."""
        await asyncio.shield(self._failure)

    async def _listen(self) -> None:
        path = self._sockets.path / "in"
        make = asyncio.get_running_loop().create_unix_server
        self._listener = await make(lambda: P2pdStream(self._accept), str(path))
        for protocol in self._protocols:
            await self._daemon.serve_streams(protocol, path)

    def let_in(self, admission: Admission) -> None:
        """Serve only peers that `admission` admits, and present its own pass to others. Call it before `start`."""
        self._server.admission = admission
        self.own_pass = admission.mine

    def prefer(self, works: Callable[[PeerId], bool]) -> None:
        """Give peers for which `works` is true room for their calls beside a flood of calls of others."""
        self._server.prefer(works)

    def start(self) -> None:
        """Answer calls from now on; all handlers must be registered. `DhtDirectory.create` calls this, too."""
        self._started.set()

    async def close(self) -> None:
        """End all calls, streams, tasks and p2pd; remove the sockets. May be called repeatedly."""
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
    def protocol(self) -> str:
        """The name under which p2pd knows streams of this run, in the newest version of the wire."""
        return next(iter(self._protocols))

    @property
    def daemon(self) -> P2pdProcess:
        """This transport's p2pd, which the directory shares."""
        return self._daemon

    async def addresses(self) -> list[str]:
        """Multiaddrs (without /p2p/US) at which others reach this node: direct ones over TCP, then at most CIRCUITS_MAX
        relayed ones. Raises Unavailable (p2pd is down)."""
        direct, circuits = list[str](), list[str]()
        for text in await self._daemon.addresses():
            with contextlib.suppress(UsageError):
                address = dialable(text)
                (circuits if is_circuit(address) else direct).append(address)
        return list(dict.fromkeys(direct))[:ADDRESSES_MAX] + list(dict.fromkeys(circuits))[:CIRCUITS_MAX]

    async def stand(self, network_mode: NetworkMode, announce: Sequence[str] = ()) -> None:
        """Change p2pd's reachability: it restarts (0.5 s). Raises Unavailable."""
        await self._daemon.change(network_mode, announce)

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

    async def connect(self, peer: PeerId, addresses: Sequence[str]) -> None:
        """Make `peer` reachable at `addresses` and remember them. Raises Unavailable after CONNECT_ATTEMPTS."""
        usable = await numeric(dialable_of(addresses, names=peer in self._named))
        if peer in self._named:
            self._daemon.book.name(parse_endpoint(one) for one in usable if not is_circuit(one))
        if not usable:
            raise Unavailable(f"{short(peer)} announced no usable address")
        self._known[peer] = tuple(usable)
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
        assert method is not None, "a call needs a body"
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
            raise Broken(f"{short(peer)} died or disconnected during {method}: {error}") from None

    def bytes_by_method(self) -> dict[tuple[str, str], int]:
        """Payload and header bytes so far by (method, "sent" or "received"), of calls and answers."""
        return dict(self._traffic)

    @property
    def line_queue(self) -> int:
        return self._scheduler.waiting

    async def _call(self, peer: PeerId, method: str, call: Call, timeout_s: float, reply_bytes_max: int) -> Answer:
        nbytes = sum(tensor.nbytes for tensor in call.tensors)
        stream = await self._pool.take(peer)
        bytes_in, bytes_out = stream.consumed, stream.bytes_out
        try:
            async with self._scheduler.turn(nbytes, timeout_s) as waited_s:
                header = frame.seal_request(
                    call.header, call.tensors, self._run_id, timeout_s - waited_s, stream.version
                )
                in_step = await frame.send(stream, FrameKind.REQUEST, header, call.tensors)
            answer, flags = await self._receive(stream, reply_bytes_max)
        except BaseException as error:
            self._pool.drop(peer, stream, suspect=isinstance(error, RemoteFault | ConnectionError))
            raise
        finally:
            sent, received = stream.bytes_out - bytes_out, stream.consumed - bytes_in
            self._traffic[method, "sent"] += sent
            self._traffic[method, "received"] += received
            self.links.record_bytes(peer, sent=sent, received=received, now_s=asyncio.get_running_loop().time())
        if in_step and not stream.buffered and FrameFlag.LAST not in flags:
            self._pool.give(peer, stream)
        else:
            self._pool.end(peer, stream)
        frame.raise_for(peer, answer.header)
        answer.waited_s = waited_s
        return answer

    async def _receive(self, stream: P2pdStream, reply_bytes_max: int) -> tuple[Answer, FrameFlag]:
        raw, flags = await frame.receive_header(stream, FrameKind.REPLY)
        header = frame.open_reply(raw)
        # Not counted in the budget: we asked for it, with a size limit. If it had to wait for room that strangers use,
        # an honest peer would seem late.
        frame.check_tensors(header.tensors, reply_bytes_max)
        return Answer(header, await frame.receive_tensors(stream, header.tensors)), flags

    async def _open(self, peer: PeerId) -> P2pdStream:
        """A new stream to `peer`, with our pass sent on it."""
        stream = await self._reach(peer)
        stream.throttle = self.throttle
        if self.own_pass is not None:
            await stream.write(frame.seal_pass(self.own_pass, stream.version))
        return stream

    async def _reach(self, peer: PeerId) -> P2pdStream:
        """A new stream; dials once more if p2pd has lost the peer's addresses or connection."""
        try:
            return await self._agree(peer)
        except RemoteFault as fault:
            known = dialable_of(self._known.get(peer, ()))
            if not known or "cannot be reached" not in str(fault):
                raise
            await self._daemon.dial(peer, known)
            return await self._agree(peer)

    async def _agree(self, peer: PeerId) -> P2pdStream:
        """A new stream in the newest version of the wire that both sides speak."""
        stream, protocol = await self._daemon.open_stream(peer, list(self._protocols), DIAL_TIMEOUT_S)
        stream.version = self._protocols[protocol]
        return stream

    # Incoming calls.

    def _accept(self, stream: P2pdStream) -> None:
        if self._group is None or self._incoming >= STREAMS_MAX:
            stream.abort()
            return
        self._group.create_task(self._attend(stream))

    async def _attend(self, stream: P2pdStream) -> None:
        self._incoming += 1
        try:
            async with asyncio.timeout(HEADER_TIMEOUT_S):
                info = p2pd_pb2.StreamInfo.FromString(await read_delimited(stream, CONTROL_BYTES_MAX))
            peer = peer_of(info.peer)
            stream.version = self._protocols[info.proto]
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
        if host := self.observed(peer):
            self._daemon.book.meet(host, 0)

    def _friends(self) -> frozenset[str]:
        """The IP addresses of peers that may take part: observed on their streams, and announced by them."""
        admission = self._server.admission
        here = {peer for peer in (*self._observed, *self._known) if admission is None or admission.judge(peer)[0]}
        hosts = (ip_of(address) for peer in here for address in self._known.get(peer, ()))
        return frozenset({*hosts, *map(self.observed, here)} - {""})

    def _cut_off(self, peer: PeerId) -> None:
        """Disconnect a stranger that keeps opening streams, and deny its address."""
        self._guard.deny(self.observed(peer))
        self.spawn(self._disconnect(peer))

    async def _disconnect(self, peer: PeerId) -> None:
        with contextlib.suppress(Unavailable):
            await self._daemon.disconnect(peer)

    def _guarded(self, reason: str, gate: FloodGate) -> None:
        share = round(gate.share, 3)
        self._event("gate.changed", "warning", reason=reason, strangers_share=share, denied=len(gate.denied))

    # Maintenance.

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
        with contextlib.suppress(RemoteFault, Unavailable, Busy):  # the next call to it will report the error
            await self._daemon.dial(peer, addresses)

    def _event(self, event: str, level: str, **fields: object) -> None:
        if self._telemetry is not None:
            self._telemetry.event(event, level=level, **fields)


IDLE_S = SERVED_IDLE_S / 6.0  # well before the server closes it
IDLE_PER_PEER_MAX = 8  # guess: overlapping calls to one peer in a steady pipeline
IDLE_MAX = 256  # guess: 256 sockets and 4 MiB of look-ahead
IN_USE_MAX = STREAMS_PER_PEER_MAX // 2  # calls in flight to one peer


class StreamPool:
    """Warm streams by peer; a stream carries one call at a time. `opener` opens a new one, which costs two round trips,
    so a used one is kept for the next call."""

    def __init__(self, opener: Callable[[PeerId], Awaitable[P2pdStream]]) -> None:
        self._opener = opener
        self._idle: dict[PeerId, deque[tuple[float, P2pdStream]]] = {}
        self._in_use: Counter[PeerId] = Counter()
        self._idle_count = 0

    async def take(self, peer: PeerId) -> P2pdStream:
        """A stream to `peer`: the most recently used open one, else a new one. Return it by `give`, `drop` or `end`.

        Raises Busy if IN_USE_MAX calls to `peer` are in flight, and the errors of `opener`.
        """
        if self._in_use[peer] >= IN_USE_MAX:
            raise Busy(f"{IN_USE_MAX} calls to {short(peer)} are in flight already", 0.1)
        self._in_use[peer] += 1
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
        if stream.lost or len(idle) >= IDLE_PER_PEER_MAX or self._idle_count >= IDLE_MAX:
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
        self._in_use[peer] -= 1
        if not self._in_use[peer]:
            del self._in_use[peer]
