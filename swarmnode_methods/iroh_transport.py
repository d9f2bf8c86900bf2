"""Calls over iroh: QUIC in this process, without p2pd and without a relay or a discovery service of anybody.

iroh's Python package (`pip install iroh`) is optional. A node's endpoint id is the public key inside its
peer id, so identities, invites and receipts are the same over both transports. One connection with a peer carries the
calls of both directions; whoever dialled it, both open streams on it.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import importlib
import ipaddress
import struct
from collections import deque
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from swarmnode.base.errors import LocalFault, RemoteFault, Unavailable, UsageError, cause_of
from swarmnode.base.identity import Identity, peer_id_of, public_key_of
from swarmnode.base.ids import PeerId, RunId, short
from swarmnode.base.ports import Telemetry
from swarmnode.base.remembered import Remembered
from swarmnode.base.token_bucket import TokenBucket
from swarmnode.net.membership.liveness import PING_TIMEOUT_S
from swarmnode.net.transport.address import Endpoint, parse_endpoint
from swarmnode.net.transport.dial_book import DialBook
from swarmnode.net.transport.flood_guard import ADMIT_PER_S, DENIED_S
from swarmnode.net.transport.p2pd import NetworkMode
from swarmnode.net.transport.reachability import PROBE_TIMEOUT_S
from swarmnode.net.transport.serve import STREAMS_PER_PEER_MAX
from swarmnode.net.transport.stream import LOOKAHEAD_BYTES, P2pdStream
from swarmnode.net.transport.stream_transport import ADDRESSES_MAX, StreamTransport
from swarmnode_methods.iroh_socket import bound_to, bracketed, close_spare, endpoint_of

PACKAGE = "iroh"
DIAL_TIMEOUT_S = 5.0  # as libp2p gives an address: to its answer, and to the end of the handshake
CLOSE_TIMEOUT_S = PING_TIMEOUT_S  # tells connected peers that this node goes
SILENT_S = PING_TIMEOUT_S / 2.0  # a peer that owes an answer and sent nothing for so long is looked after
READ_BYTES = 256 << 10  # guess: of one read; QUIC's stream window is 1.25 MB here
UNREAD_BYTES_MAX = 64 << 20  # guess: of one connection; beside it each stream has at most its window
CONNECTIONS_MAX = 900  # as p2pd's connection manager keeps
STRANGERS_BURST = 64.0  # guess: handshakes at once of addresses where no member was met
_PROBE = b"\xc0\x0a\x0a\x0a\x0a\x08swarmnod\x08probe..."  # RFC 9000, 17.2: a version that no QUIC speaks


def library() -> Any:
    """The package iroh. Raises UsageError with the remedy where it is not installed."""
    try:
        iroh = importlib.import_module(PACKAGE)
    except ImportError as error:
        raise UsageError(
            f"this run talks over iroh, whose package is not usable here ({error}): pip install iroh"
        ) from None
    _write_whole(importlib.import_module(f"{PACKAGE}.iroh_ffi"))
    return iroh


def _write_whole(binding: Any) -> None:
    """Make the package copy bytes as a block. Its generated code writes one after another: 4 MB/s (measured)."""

    def write(self: Any, value: bytes | memoryview) -> None:
        if self.rbuf.len + len(value) > self.rbuf.capacity:
            self.rbuf = binding._UniffiRustBuffer.reserve(self.rbuf, len(value))
        start = cast(int, ctypes.cast(self.rbuf.data, ctypes.c_void_p).value)
        whole = (ctypes.c_char * (self.rbuf.len + len(value))).from_address(start)
        memoryview(whole).cast("B")[self.rbuf.len :] = value
        self.rbuf.len += len(value)

    builder = binding._UniffiRustBufferBuilder
    builder.write = write
    builder._pack_into = lambda self, size, form, value: write(self, struct.pack(form, value))


class StrangerDoor:
    """Which handshakes to take part in while many come. One costs about a millisecond, and keys cost nothing."""

    def __init__(self) -> None:
        self._strangers = TokenBucket.full(ADMIT_PER_S, STRANGERS_BURST)
        self._friends = Remembered[str, None]()
        self._denied = Remembered[str, float]()

    def meet(self, host: str) -> None:
        """A peer that may take part was met at `host`."""
        self._friends[host] = None

    def deny(self, host: str, now_s: float) -> None:
        if host and host not in self._friends:
            self._denied[host] = now_s + DENIED_S

    def judge(self, host: str, proven: bool, now_s: float) -> str:
        """ "accept"; "retry": the source, which may be forged, shall first prove its address; or "ignore"."""
        if self._denied.get(host, 0.0) > now_s:
            return "ignore"
        if host in self._friends and proven:
            return "accept"
        if not proven and (host in self._friends or self._strangers.fill(now_s) < STRANGERS_BURST / 2):
            return "retry"
        return "accept" if self._strangers.take(now_s) else "ignore"


class IrohPipe:
    """The asyncio transport beneath a stream: the two halves of one of iroh's."""

    def __init__(self, iroh: Any, stream: P2pdStream, halves: Any, transport: IrohTransport) -> None:
        self._iroh = iroh
        self._stream = stream
        self._receive = halves.recv()
        self._send = halves.send()
        self._queue = deque[bytes | memoryview]()
        self._queued = 0
        self._limits = 0, 0
        self._ending = False
        self._readable = asyncio.Event()
        self._writable = asyncio.Event()
        self._readable.set()
        stream.connection_made(cast(asyncio.BaseTransport, self))
        self._tasks = transport.spawn(self._read()), transport.spawn(self._write())

    async def _read(self) -> None:
        """Pass what arrives to the stream, as fast as it wants."""
        stream = self._stream
        receive = self._receive
        try:
            while True:
                await self._readable.wait()
                wanted = min(max(len(stream.get_buffer(0)), LOOKAHEAD_BYTES), READ_BYTES)
                part = memoryview(await receive.read(wanted))
                if not part:
                    stream.eof_received()
                    return
                while part:
                    await self._readable.wait()
                    room = stream.get_buffer(len(part))
                    nbytes = min(len(room), len(part))
                    room[:nbytes] = part[:nbytes]
                    part = part[nbytes:]
                    stream.buffer_updated(nbytes)
        except asyncio.CancelledError:
            with contextlib.suppress(self._iroh.IrohError):
                await receive.stop(0)
            raise
        except self._iroh.IrohError as error:
            stream.connection_lost(ConnectionResetError(cause_of(error)))

    async def _write(self) -> None:
        send = self._send
        try:
            while not (self._ending and not self._queue):
                self._writable.clear()
                while self._queue:
                    part = self._queue.popleft()
                    await send.write_all(part)
                    self._queued -= len(part)
                    if self._queued <= self._limits[0]:
                        self._stream.resume_writing()
                if not self._ending:
                    await self._writable.wait()
            await send.finish()
            self._tasks[0].cancel()
        except asyncio.CancelledError:
            with contextlib.suppress(self._iroh.IrohError):
                await send.reset(0)
            raise
        except self._iroh.IrohError as error:
            self._stream.connection_lost(ConnectionResetError(cause_of(error)))

    # As asyncio.Transport.

    def set_write_buffer_limits(self, high: int, low: int) -> None:
        self._limits = low, high

    def write(self, data: bytes | memoryview) -> None:
        self._queue.append(data)
        self._queued += len(data)
        self._writable.set()
        if self._queued > self._limits[1]:
            self._stream.pause_writing()

    def pause_reading(self) -> None:
        self._readable.clear()

    def resume_reading(self) -> None:
        self._readable.set()

    def close(self) -> None:
        """End once all is written."""
        self._ending = True
        self._writable.set()

    def abort(self) -> None:
        for task in self._tasks:
            task.cancel()


class IrohTransport(StreamTransport):
    """Implements ports.Transport. `create` starts it; `close` ends it and everything it started."""

    ip_protocol = "udp"

    def __init__(self, iroh: Any, peer_id: PeerId, run_id: RunId, telemetry: Telemetry | None, book: DialBook) -> None:
        super().__init__(peer_id, run_id, telemetry)
        self._iroh = iroh
        self._book = book
        self._mode = NetworkMode()
        self._listening = list[str]()
        self._families = set[str]()  # in which this node listens: "ip4", "ip6"
        self._announce: tuple[str, ...] = ()
        self._endpoint: Any = None
        self._connections: dict[PeerId, Any] = {}
        self._dials = Remembered[PeerId, asyncio.Lock]()
        self._door = StrangerDoor()
        self._heard: dict[PeerId, int] = {}  # datagrams of those that owe an answer

    @classmethod
    async def create(
        cls,
        identity_path: Path,
        identity: Identity,
        run_id: RunId,
        listen: Sequence[str] = ("/ip4/127.0.0.1/udp/0",),
        *,
        announce: Sequence[str] = (),
        network_mode: NetworkMode | None = None,
        telemetry: Telemetry | None = None,
        named: Sequence[tuple[PeerId, Sequence[str]]] = (),
        lan: bool = False,
        book: DialBook | None = None,
    ) -> IrohTransport:
        """A transport, for the arguments of Libp2pTransport.create.

        Raises UsageError (a bad address, a port in use, no iroh), LocalFault.
        """
        iroh = library()
        transport = cls(iroh, identity.peer_id, run_id, telemetry, book or DialBook([*listen, *announce], lan=lan))
        transport._mode = network_mode or NetworkMode()
        transport._announce = tuple(announce)
        await transport._name(named)
        builder = iroh.EndpointBuilder()
        builder.apply_minimal()  # no discovery service
        builder.relay_mode(iroh.RelayMode.disabled())
        builder.secret_key(identity.seed)
        builder.alpns([protocol.encode() for protocol in transport._protocols])
        try:
            for where in bound_to(listen):
                builder.bind_addr(where)
            transport._endpoint = await builder.bind()
        except iroh.IrohError as error:
            raise LocalFault(f"iroh does not listen on {', '.join(listen)}: {cause_of(error)}") from None
        transport._families = {parse_endpoint(one).family for one in listen}
        sockets = list(map(endpoint_of, transport._endpoint.bound_sockets()))
        close_spare([one for one in sockets if one.family not in transport._families])
        bound = {one.family: one.port for one in sockets}
        transport._listening = [str(replace(one, port=bound[one.family])) for one in map(parse_endpoint, listen)]
        await transport._run()
        return transport

    def _work(self) -> list[Coroutine[object, object, None]]:
        return [self._listen(), self._look_after()]

    async def close(self) -> None:
        """End all calls, streams and tasks; tell connected peers. May be called repeatedly."""
        endpoint = self._endpoint
        self._endpoint = None
        await self._end()
        self._connections.clear()
        if endpoint is not None:
            with contextlib.suppress(TimeoutError, self._iroh.IrohError):
                async with asyncio.timeout(CLOSE_TIMEOUT_S):
                    await endpoint.close()

    # The port.

    @property
    def listening(self) -> list[str]:
        return self._listening

    @property
    def book(self) -> DialBook:
        return self._book

    @property
    def network_mode(self) -> NetworkMode:
        return self._mode

    async def addresses(self) -> list[str]:
        if self._endpoint is None:
            raise Unavailable("this node is shutting down")
        seen = [*self._endpoint.bound_sockets(), *self._endpoint.addr().direct_addresses()]
        here = [one for one in map(endpoint_of, seen) if one.family in self._families]
        here = [one for one in here if not ipaddress.ip_address(one.host).is_unspecified]
        outer = [one for one in here if not ipaddress.ip_address(one.host).is_loopback]
        return list(dict.fromkeys([*self._announce, *map(str, outer or here)]))[:ADDRESSES_MAX]

    async def stand(self, network_mode: NetworkMode, announce: Sequence[str] = ()) -> None:
        self._mode = network_mode
        self._announce = tuple(announce)

    async def greets(self, endpoint: Endpoint) -> bool:
        return await speaks_quic(endpoint, PROBE_TIMEOUT_S) is True

    async def connections(self) -> Mapping[PeerId, bool]:
        return dict.fromkeys(self._connections, False)

    async def connect(self, peer: PeerId, addresses: Sequence[str]) -> None:
        """Make `peer` reachable at `addresses` and remember them. Raises Unavailable."""
        await self._remember(peer, addresses)
        try:
            await self._connected(peer)
        except RemoteFault as fault:
            raise Unavailable(str(fault)) from None

    # Connections.

    async def _reach(self, peer: PeerId) -> P2pdStream:
        for last in (False, True):
            connection = await self._connected(peer)
            try:
                async with asyncio.timeout(DIAL_TIMEOUT_S):
                    halves = await connection.open_bi()
            except (self._iroh.IrohError, TimeoutError) as error:
                self._drop(peer, connection)
                if last:
                    raise RemoteFault(f"{short(peer)} cannot be reached: {cause_of(error)}") from None
                continue
            return self._stream_of(connection, halves)
        raise AssertionError("unreachable")

    def _stream_of(self, connection: Any, halves: Any) -> P2pdStream:
        stream = P2pdStream()
        stream.version = self._protocols[connection.alpn().decode()]
        IrohPipe(self._iroh, stream, halves, self)
        return stream

    async def _connected(self, peer: PeerId) -> Any:
        """The connection with `peer`; dials if there is none. Raises RemoteFault."""
        async with self._dials.setdefault(peer, asyncio.Lock()):
            connection = self._connections.get(peer)
            return connection if connection is not None else await self._dial(peer)

    async def _dial(self, peer: PeerId) -> Any:
        iroh = self._iroh
        now_s = asyncio.get_running_loop().time()
        here = [parse_endpoint(one) for one in self._book.choose(self._known.get(peer, ()))]
        here = [one for one in here if self._book.permit(one.host, one.port, now_s)[0]]
        if not here or self._endpoint is None:
            raise RemoteFault(f"{short(peer)} cannot be reached: no address of it is known or to be dialled now")
        # iroh takes 30 s to say that nobody is there, and as long to pass on a refusal.
        answers = await asyncio.gather(*(speaks_quic(one, DIAL_TIMEOUT_S) for one in here))
        there = [f"{bracketed(one.host)}:{one.port}" for one, said in zip(here, answers, strict=True) if said]
        if not there:
            raise RemoteFault(f"{short(peer)} cannot be reached: nothing answers at {', '.join(map(str, here))}")
        try:
            key = iroh.EndpointId.from_bytes(public_key_of(peer))
            async with asyncio.timeout(DIAL_TIMEOUT_S):
                protocol = next(iter(self._protocols)).encode()
                connection = await self._endpoint.connect(iroh.EndpointAddr(key, None, there), protocol)
        except (iroh.IrohError, TimeoutError) as error:
            raise RemoteFault(
                f"{short(peer)} cannot be reached at {', '.join(there)}: {cause_of(error)} (another key or run, or a"
                " swarmnode of another protocol version)"
            ) from None
        self._keep(peer, connection)
        return connection

    def _keep(self, peer: PeerId, connection: Any) -> None:
        """Use `connection` from now on, and serve the streams that `peer` opens on it."""
        connection.set_max_concurrent_bi_streams(STREAMS_PER_PEER_MAX)
        connection.set_max_concurrent_uni_streams(0)
        connection.set_receive_window(UNREAD_BYTES_MAX)
        if peer in self._connections:
            self._pool.forget(peer)  # the peer has started again, or dials while we do
        self._connections[peer] = connection
        for where in (endpoint_of(path.remote_addr) for path in connection.paths() if path.is_ip):
            self._book.meet(where.host, where.port)
            self._observe(peer, str(where))
            if self._gate.admission is None or self._gate.admission.judge(peer)[0]:
                self._door.meet(where.host)
        self.spawn(self._serve_connection(peer, connection))

    def _drop(self, peer: PeerId, connection: Any) -> None:
        connection.close(0, b"")
        if self._connections.get(peer) is connection:
            del self._connections[peer]
            self._pool.forget(peer)

    async def _listen(self) -> None:
        while self._endpoint is not None and (incoming := await self._endpoint.accept_next()) is not None:
            self.spawn(self._enter(incoming))

    async def _enter(self, incoming: Any) -> None:
        """Take part in a handshake, if the door lets it in."""
        try:
            async with asyncio.timeout(DIAL_TIMEOUT_S):
                where = await incoming.remote_addr()
                host = endpoint_of(where.addr).host if where.is_ip() else ""
                proven = await incoming.remote_addr_validated()
                verdict = self._door.judge(host, proven, asyncio.get_running_loop().time())
                if verdict == "retry":
                    await incoming.retry()
                    return
                if verdict == "ignore" or len(self._connections) >= CONNECTIONS_MAX:
                    await incoming.ignore()
                    return
                connection = await (await incoming.accept()).connect()
        except (self._iroh.IrohError, TimeoutError):
            return
        self._keep(peer_id_of(connection.remote_id().to_bytes()), connection)

    async def _serve_connection(self, peer: PeerId, connection: Any) -> None:
        try:
            while True:
                halves = await connection.accept_bi()
                self._welcome(self._stream_of(connection, halves), lambda stream: self._attend(stream, peer))
        except self._iroh.IrohError:
            self._drop(peer, connection)

    async def _attend(self, stream: P2pdStream, peer: PeerId) -> None:
        self._incoming += 1
        try:
            await self._serve_stream(stream, peer)
        finally:
            self._incoming -= 1
            stream.abort()

    def _cut_off(self, peer: PeerId) -> None:
        self._door.deny(self.observed(peer), asyncio.get_running_loop().time())
        if (connection := self._connections.get(peer)) is not None:
            self._drop(peer, connection)

    async def _look_after(self) -> None:
        """End connections whose peer owes an answer and whose process has died: its kernel says so at once, QUIC after
        30 s of silence."""
        while True:
            await asyncio.sleep(SILENT_S)
            owing = [(peer, one) for peer, one in self._connections.items() if self._pool.in_use[peer]]
            before = self._heard
            self._heard = {peer: one.stats().udp_rx_datagrams for peer, one in owing}
            silent = [(peer, one) for peer, one in owing if before.get(peer) == self._heard[peer]]
            await asyncio.gather(*(self._probe(peer, one) for peer, one in silent))

    async def _probe(self, peer: PeerId, connection: Any) -> None:
        paths = [endpoint_of(path.remote_addr) for path in connection.paths() if path.is_ip]
        said = await asyncio.gather(*(speaks_quic(one, SILENT_S) for one in paths))
        if said and all(one is False for one in said):
            self._drop(peer, connection)


class _Probe(asyncio.DatagramProtocol):
    def __init__(self) -> None:
        self.answer: asyncio.Future[bool] = asyncio.get_running_loop().create_future()

    def datagram_received(self, data: bytes, addr: tuple[str, int]) -> None:
        self._tell(data[1:5] == bytes(4) and _PROBE[6:14] in data[:32])

    def error_received(self, exc: Exception) -> None:
        self._tell(False)

    def _tell(self, speaks: bool) -> None:
        if not self.answer.done():
            self.answer.set_result(speaks)


async def speaks_quic(endpoint: Endpoint, timeout_s: float) -> bool | None:
    """Whether QUIC is spoken at `endpoint`, which has numbers: a server answers any unknown version with those that it
    has (RFC 9000, 6.1). False: the port is closed, as its kernel says; None: silence, as of a firewall."""
    loop = asyncio.get_running_loop()
    try:
        transport, probe = await loop.create_datagram_endpoint(_Probe, remote_addr=(endpoint.host, endpoint.port))
    except OSError:
        return None
    try:
        for _ in range(2):  # a datagram may be lost
            transport.sendto(_PROBE.ljust(1200, b"\0"))  # shorter ones are not answered
            done, _ = await asyncio.wait([probe.answer], timeout=timeout_s / 2)
            if done:
                return probe.answer.result()
        return None
    finally:
        transport.close()
