"""Our p2pd: hivemind's libp2p daemon as a child process, supervised and restarted when it dies.

hivemind's own P2P object ends with its daemon. `P2pdProcess` outlives it: it remembers the handlers, and offers the
interface that hivemind's DHT expects of a P2P object. DHT and transport notice only a short silence.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import os
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hivemind.p2p import PeerID
from hivemind.p2p.p2p_daemon_bindings.utils import P2PDaemonError
from hivemind.proto import p2pd_pb2
from hivemind.utils.multiaddr import Multiaddr

from swarmnode.base.errors import LocalFault, RemoteFault, Unavailable, UsageError, cause_of
from swarmnode.base.header import LEAST, VERSION
from swarmnode.base.identity import peer_id_bytes
from swarmnode.base.ids import PeerId, short
from swarmnode.net.membership.liveness import SMALL_CALL_S, TRIES
from swarmnode.net.transport import hivemind_patches
from swarmnode.net.transport.address import (
    Endpoint,
    check_listenable,
    ip_of,
    is_circuit,
    parse_bootstrap,
    parse_endpoint,
)
from swarmnode.net.transport.dial_book import DIRECT_MAX, DialBook
from swarmnode.net.transport.dial_filter import DialRequest, default_router
from swarmnode.net.transport.p2pd import CONTROL_SOCKET, NetworkMode, launch
from swarmnode.net.transport.socket_dir import SocketDir
from swarmnode.net.transport.stranger_limit import DhtLimit, RpcHandler
from swarmnode.net.transport.stream import P2pdStream

CONTROL_TIMEOUT_S = SMALL_CALL_S  # p2pd answers on its own machine within a millisecond
CONTROL_BYTES_MAX = 64 << 10  # guess: an error text, or a few hundred addresses
ERROR_CHARACTERS_MAX = 256
ASK_ATTEMPTS = TRIES
DIAL_TIMEOUT_S = DIRECT_MAX * 5.0  # derived: libp2p gives one address 5 s
PING_PERIOD_S = 2.0 * CONTROL_TIMEOUT_S
PINGS_MISSED_MAX = TRIES  # of CONTROL_TIMEOUT_S each: a busy machine is not a frozen daemon
RESTARTS_MAX = 5  # in RESTARTS_WINDOW_S: systemd's DefaultStartLimitBurst
RESTARTS_WINDOW_S = 60.0
RESTART_DELAY_S = 0.1
BOOK_PERIOD_S = 0.5  # guess: p2pd takes some milliseconds to list its connections
RESTART_WAIT_S = PINGS_MISSED_MAX * CONTROL_TIMEOUT_S  # so long calls wait for a restart; it takes 0.5 s and more
STREAM_SOCKET = "in"

# Codes of the multiaddr table.
_P2P = 421
_P2P_CIRCUIT = 290
_IDENTIFY = p2pd_pb2.Request(type=p2pd_pb2.Request.IDENTIFY)


@dataclass(slots=True)
class P2pdProcess:
    """A p2pd. `listen` are multiaddrs. Port 0 chooses any port, which is kept over restarts."""

    identity_path: Path
    sockets: SocketDir
    listen: Sequence[str]
    announce: Sequence[str] = ()
    network_mode: NetworkMode = NetworkMode()  # noqa: RUF009  frozen
    p2p: Any = None
    handlers: dict[str, tuple[Any, tuple[Any, ...], dict[str, Any]]] = field(default_factory=dict)
    protocols: Sequence[str] = ()  # of the streams that `listener` takes
    make_stream: Callable[[], asyncio.BaseProtocol] | None = None
    listener: asyncio.Server | None = None
    running: asyncio.Event = field(default_factory=asyncio.Event)
    changing: bool = False
    dht_limit: DhtLimit = field(default_factory=DhtLimit)
    traffic: Counter[tuple[str, str]] = field(default_factory=Counter)  # as Transport.bytes_by_method, of "dht" only
    book: DialBook = field(default_factory=DialBook)
    dials: int | None = None  # connections that p2pd opens wait there for a verdict; None: they do not wait

    async def start(self) -> None:
        """Start p2pd and register every handler. Raises UsageError (bad address, port in use), LocalFault (no p2pd)."""
        hivemind_patches.apply()
        logging.getLogger("hivemind").setLevel(logging.ERROR)
        for endpoint in map(parse_endpoint, self.listen):
            if endpoint.protocol != "tcp":
                raise UsageError(f"{endpoint}: libp2p listens on TCP; give /{endpoint.family}/{endpoint.host}/tcp/PORT")
            check_listenable(endpoint)
        self.sockets.renew()
        try:
            given = self.identity_path, self.sockets.path, self.listen, self.announce, self.network_mode
            self.p2p, self.dials = await launch(*given)
        except (P2PDaemonError, OSError) as error:
            raise LocalFault(f"p2pd does not start on {', '.join(self.listen)}: {cause_of(error)}") from error
        if self.dials is not None:
            self.book.router = "" if self.network_mode.kind == "local" else default_router()
            asyncio.get_running_loop().add_reader(self.dials, self._judge_dial)
        try:
            await self._take_streams()
            for name, (handler, args, kwargs) in self.handlers.items():
                await self.p2p.add_protobuf_handler(name, handler, *args, **kwargs)
        except (P2PDaemonError, OSError) as error:
            await self.p2p.shutdown()
            raise LocalFault(f"p2pd died while it was starting: {cause_of(error)}") from error
        self.listen = list(map(str, self.listening()))  # a p2pd started later keeps the port that others know
        self.running.set()

    async def stop(self) -> None:
        """Stop p2pd and wait until it has ended."""
        self.running.clear()
        p2p = self.p2p
        self.p2p = None
        if p2p is None:
            return
        self._judge_no_more()
        child = p2p._child
        try:
            async with asyncio.timeout(CONTROL_TIMEOUT_S):
                await p2p.shutdown()
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                child.kill()
            await child.wait()

    async def change(self, network_mode: NetworkMode, announce: Sequence[str]) -> None:
        """Restart p2pd with another reachability. Raises Unavailable."""
        self.network_mode = network_mode
        self.announce = tuple(announce)
        self.changing = True
        self.running.clear()
        self.p2p._reader_task.cancel()  # it would report the end that we ask for
        with contextlib.suppress(ProcessLookupError):
            self.p2p._child.terminate()
        await self._until_running()

    @property
    def pid(self) -> int:
        assert self.p2p is not None, "p2pd is not running"
        return int(self.p2p._child.pid)

    async def supervise(self, died: Callable[[int | None], None], restarted: Callable[[], Awaitable[None]]) -> None:
        """Restart p2pd whenever it dies, for ever. Raises LocalFault if it dies too often."""
        loop = asyncio.get_running_loop()
        deaths: list[float] = []
        while True:
            code = await self.p2p._child.wait()
            self.running.clear()
            if self.changing:
                self.changing = False
            else:
                died(code)
            deaths = [when for when in deaths if when > loop.time() - RESTARTS_WINDOW_S] + [loop.time()]
            if len(deaths) > RESTARTS_MAX:
                raise LocalFault(f"p2pd died {len(deaths)} times in {RESTARTS_WINDOW_S:.0f} s (exit code {code})")
            self._judge_no_more()
            await self.p2p.shutdown()
            await self._start_again()
            await restarted()

    def listening(self) -> list[Endpoint]:
        """The endpoints p2pd listens on. Port 0 becomes the assigned port, or stays 0 if that is unknown."""
        ports: dict[str, int] = {}
        for address in self.p2p._visible_maddrs or ():
            if "p2p-circuit" in address:
                continue  # its port is the relay's
            with contextlib.suppress(ValueError, KeyError):
                ports.setdefault("ip4" if "ip4" in address else "ip6", int(address["tcp"]))
        return [
            Endpoint(endpoint.family, endpoint.host, endpoint.port or ports.get(endpoint.family, 0))
            for endpoint in map(parse_endpoint, self.listen)
        ]

    async def _start_again(self) -> None:
        for attempt in range(RESTARTS_MAX):
            await asyncio.sleep(RESTART_DELAY_S * 2**attempt)
            try:
                return await self.start()
            except LocalFault:
                if attempt == RESTARTS_MAX - 1:
                    raise
        raise AssertionError("unreachable")

    async def keep_answering(self) -> None:
        """Kill a p2pd that is alive but does not answer, so that `supervise` restarts it; at once where a cleaner of
        temporary files has swept its sockets."""
        missed = 0
        while True:
            await asyncio.sleep(PING_PERIOD_S)
            if not self.running.is_set():
                missed = 0
                continue
            try:
                stream, _ = await self._ask_now(_IDENTIFY, CONTROL_TIMEOUT_S)
                stream.close()
                missed = 0
            except (OSError, P2PDaemonError):
                missed += 1
            if missed >= PINGS_MISSED_MAX or not self.sockets.whole(CONTROL_SOCKET, STREAM_SOCKET):
                missed = 0
                with contextlib.suppress(ProcessLookupError):
                    self.p2p._child.kill()

    # What p2pd may dial.

    def _judge_dial(self) -> None:
        assert self.dials is not None
        if self.p2p is None or self.p2p._child.returncode is not None:
            self._judge_no_more()
            return
        try:
            dial = DialRequest(self.dials, self.pid)
        except OSError:  # it was interrupted
            return
        permit = not dial.host or self.book.permit(dial.host, dial.port, asyncio.get_running_loop().time())[0]
        if not dial.answer(permit) and permit and dial.host:
            self.book.revoke(dial.host, dial.port)

    def _judge_no_more(self) -> None:
        """p2pd is to end, or has: connections that it still opens fail."""
        if self.dials is not None:
            asyncio.get_running_loop().remove_reader(self.dials)
            os.close(self.dials)
            self.dials = None

    async def keep_book(self) -> None:
        """Enter into the book where connections were authenticated, until cancelled."""
        while True:
            await asyncio.sleep(BOOK_PERIOD_S)
            await self._enter_met()

    async def _enter_met(self) -> None:
        if not self.running.is_set() or not self.book.take_news():
            return
        with contextlib.suppress(P2PDaemonError, OSError):
            async with asyncio.timeout(CONTROL_TIMEOUT_S):
                for info in await self.p2p.list_peers():
                    for address in filter(ip_of, map(str, info.addrs)):
                        self.book.meet(*_where(address))

    # Interface for the transport.

    async def serve_streams(self, protocols: Sequence[str], make_stream: Callable[[], asyncio.BaseProtocol]) -> None:
        """Make p2pd hand every incoming stream of `protocols` to a new protocol of `make_stream`, from each of its
        starts on."""
        self.protocols = protocols
        self.make_stream = make_stream
        await self._take_streams()

    def refuse_streams(self) -> None:
        """Take no further stream."""
        if self.listener is not None:
            self.listener.close()
            self.listener = None

    async def _take_streams(self) -> None:
        """Listen for streams at a new socket, and tell p2pd."""
        if self.make_stream is None:
            return
        self.refuse_streams()
        path = self.sockets.path / STREAM_SOCKET
        path.unlink(missing_ok=True)
        self.listener = await asyncio.get_running_loop().create_unix_server(self.make_stream, str(path))
        for protocol in self.protocols:
            await self._register_stream(protocol, path)

    async def _register_stream(self, protocol: str, socket: Path) -> None:
        handler = p2pd_pb2.StreamHandlerRequest(
            addr=Multiaddr(f"/unix{socket}").to_bytes(), proto=[protocol], balanced=False
        )
        request = p2pd_pb2.Request(type=p2pd_pb2.Request.STREAM_HANDLER, streamHandler=handler)
        stream, _ = await self._ask_now(request, CONTROL_TIMEOUT_S)  # before it counts as running
        stream.close()

    async def open_stream(self, peer: PeerId, protocols: Sequence[str], timeout_s: float) -> tuple[P2pdStream, str]:
        """A new stream to `peer`, and the first of `protocols` that it speaks. Raises RemoteFault if it cannot be
        reached or speaks none."""
        opening = p2pd_pb2.StreamOpenRequest(
            peer=peer_id_bytes(peer), proto=protocols, timeout=max(1, round(timeout_s))
        )
        try:
            request = p2pd_pb2.Request(type=p2pd_pb2.Request.STREAM_OPEN, streamOpen=opening)
            stream, answer = await self._ask(request, timeout_s + CONTROL_TIMEOUT_S)
        except P2PDaemonError as error:
            if "protocols not supported" in str(error):
                raise RemoteFault(
                    f"{short(peer)} does not serve this run: wrong run id, or a swarmnode of another protocol version"
                    f" (update the older of the two); this node speaks {LEAST} to {VERSION}"
                ) from None
            raise RemoteFault(f"{short(peer)} cannot be reached: {cause_of(error)}") from None
        return stream, answer.streamInfo.proto

    async def dial(self, peer: PeerId, addresses: Sequence[str]) -> None:
        """Connect to `peer` at one of `addresses`. Raises RemoteFault."""
        addresses = self.book.choose([one for one in addresses if "/udp/" not in one])
        if self.dials is None:  # nobody asks before p2pd dials
            now = asyncio.get_running_loop().time()
            addresses = [one for one in addresses if is_circuit(one) or self.book.permit(*_where(one), now)[0]]
        if not addresses:
            raise RemoteFault(f"{short(peer)} cannot be reached: its addresses are not to be dialled now")
        connecting = p2pd_pb2.ConnectRequest(
            peer=peer_id_bytes(peer), addrs=[_binary(a) for a in addresses], timeout=round(DIAL_TIMEOUT_S)
        )
        try:
            request = p2pd_pb2.Request(type=p2pd_pb2.Request.CONNECT, connect=connecting)
            stream, _ = await self._ask(request, DIAL_TIMEOUT_S + CONTROL_TIMEOUT_S)
        except P2PDaemonError as error:
            raise RemoteFault(f"{short(peer)} cannot be reached at {', '.join(addresses)}: {cause_of(error)}") from None
        stream.close()
        await self._enter_met()  # the connection may end before `keep_book` looks

    async def disconnect(self, peer: PeerId) -> None:
        """Close all connections to `peer`. Raises Unavailable."""
        request = p2pd_pb2.Request(
            type=p2pd_pb2.Request.DISCONNECT, disconnect=p2pd_pb2.DisconnectRequest(peer=peer_id_bytes(peer))
        )
        with contextlib.suppress(P2PDaemonError):  # already gone
            stream, _ = await self._ask(request, CONTROL_TIMEOUT_S)
            stream.close()

    async def addresses(self) -> list[str]:
        """Our multiaddrs as p2pd sees them now, circuits included. Raises Unavailable."""
        stream, response = await self._ask(_IDENTIFY, CONTROL_TIMEOUT_S)
        stream.close()
        return [str(Multiaddr(raw)) for raw in response.identify.addrs]

    async def connections(self) -> dict[PeerId, bool]:
        """Peers connected now: True for those reached only through relays. Raises Unavailable."""
        await self._until_running()
        connections: dict[PeerId, bool] = {}
        try:
            async with asyncio.timeout(CONTROL_TIMEOUT_S):
                for info in await self.p2p.list_peers():  # one entry per connection, with its remote address
                    peer = PeerId(info.peer_id.to_base58())
                    relayed = any("/p2p-circuit" in str(address) for address in info.addrs)
                    connections[peer] = connections.get(peer, True) and relayed
        except (P2PDaemonError, OSError) as error:  # TimeoutError is one
            raise Unavailable(f"our p2pd does not list its connections: {cause_of(error)}", 1.0) from None
        return connections

    async def answers(self) -> bool:
        """Whether p2pd accepts connections on its control socket now."""
        try:
            stream = await self._connect()
        except OSError:
            return False
        stream.abort()
        return True

    async def _ask(self, request: Any, timeout_s: float) -> tuple[P2pdStream, Any]:
        """Send one control request; return its stream and the response.

        Repeats the request after a restart if p2pd dies. Raises P2PDaemonError (p2pd refuses), Unavailable.
        """
        for attempt in range(ASK_ATTEMPTS):
            await self._until_running()
            try:
                return await self._ask_now(request, timeout_s)
            except OSError as error:
                if attempt == ASK_ATTEMPTS - 1 or isinstance(error, TimeoutError):
                    raise Unavailable(f"our p2pd does not answer: {cause_of(error)}", 0.5) from None
        raise AssertionError("unreachable")

    async def _ask_now(self, request: Any, timeout_s: float) -> tuple[P2pdStream, Any]:
        """Like `_ask`, without retry. Raises OSError (TimeoutError is one) if p2pd does not answer."""
        stream = None
        try:
            async with asyncio.timeout(timeout_s):
                stream = await self._connect()
                raw = request.SerializeToString()
                await stream.write(_varint(len(raw)) + raw)
                response = p2pd_pb2.Response.FromString(await read_delimited(stream, CONTROL_BYTES_MAX))
            if response.type == p2pd_pb2.Response.ERROR:
                raise P2PDaemonError(" ".join(response.error.msg.split())[:ERROR_CHARACTERS_MAX])
        except BaseException:
            if stream is not None:
                stream.abort()
            raise
        return stream, response

    async def _connect(self) -> P2pdStream:
        if self.p2p is None:
            raise ConnectionRefusedError("p2pd is stopped")
        path = self.p2p._daemon_listen_maddr["unix"]
        _, stream = await asyncio.get_running_loop().create_unix_connection(P2pdStream, path)
        return stream

    async def _until_running(self) -> None:
        """Wait for p2pd while it restarts. Raises Unavailable after RESTART_WAIT_S."""
        if self.p2p is None:
            raise Unavailable("our p2pd is stopped: this node is shutting down")
        asked = self.p2p
        if self.running.is_set() and not await self.answers() and self.p2p is asked:
            self.running.clear()  # it died, and `supervise` will notice soon; one restarted meanwhile runs
        try:
            async with asyncio.timeout(RESTART_WAIT_S):
                await self.running.wait()
        except TimeoutError:
            raise Unavailable("our p2pd is down; it is being restarted", 1.0) from None

    # Interface for hivemind's DHT, as of a P2P object.

    @property
    def peer_id(self) -> Any:
        return self.p2p.peer_id

    async def add_protobuf_handler(self, name: str, handler: Any, *args: Any, **kwargs: Any) -> None:
        handler = self._counted(self.dht_limit.limited(handler))
        self.handlers[name] = (handler, args, kwargs)
        await self.p2p.add_protobuf_handler(name, handler, *args, **kwargs)

    async def remove_protobuf_handler(self, name: str, **kwargs: Any) -> None:
        self.handlers.pop(name, None)
        if self.running.is_set():
            await self.p2p.remove_protobuf_handler(name, **kwargs)

    async def call_protobuf_handler(self, peer: Any, name: str, request: Any, *args: Any) -> Any:
        await self._until_running()
        self.traffic["dht", "sent"] += request.ByteSize()
        answer = await self.p2p.call_protobuf_handler(peer, name, request, *args)
        self.traffic["dht", "received"] += answer.ByteSize()
        return answer

    def _counted(self, handler: RpcHandler) -> RpcHandler:
        async def serve(request: Any, context: Any) -> Any:
            self.traffic["dht", "received"] += request.ByteSize()
            answer = await handler(request, context)
            self.traffic["dht", "sent"] += answer.ByteSize()
            return answer

        return serve

    async def get_visible_maddrs(self, latest: bool = False) -> Any:
        return await self.p2p.get_visible_maddrs(latest=latest)


async def read_delimited(stream: P2pdStream, nbytes_max: int) -> bytes:
    """A message prefixed with its length as a varint. Raises ConnectionResetError if it exceeds `nbytes_max`."""
    length = 0
    for shift in range(0, 35, 7):
        byte = (await stream.read(1))[0]
        length |= (byte & 0x7F) << shift
        if not byte & 0x80:
            break
    if length > nbytes_max:
        raise ConnectionResetError(f"p2pd announced a message of {length} bytes; at most {nbytes_max}")
    return await stream.read(length)


def _where(address: str) -> tuple[str, int]:
    endpoint = parse_endpoint(address.partition("/p2p/")[0])
    return endpoint.host, endpoint.port


def _binary(address: str) -> bytes:
    """`address` in libp2p's binary form. hivemind encodes the relay's id inside a circuit as a CID, which p2pd cannot
    read."""
    if not is_circuit(address):
        return bytes(Multiaddr(address).to_bytes())
    relay, endpoint = parse_bootstrap(address.removesuffix("/p2p-circuit"))
    raw = peer_id_bytes(relay)
    return bytes(Multiaddr(endpoint).to_bytes()) + _varint(_P2P) + _varint(len(raw)) + raw + _varint(_P2P_CIRCUIT)


def _varint(value: int) -> bytes:
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


@functools.lru_cache(maxsize=4096)
def peer_of(raw: bytes) -> PeerId:
    """The peer id of p2pd's 38 bytes. Raises RemoteFault for a key that is not Ed25519."""
    peer = PeerID(raw).to_base58()
    if peer_id_bytes(PeerId(peer)) != raw:
        raise RemoteFault(f"{peer} is not an Ed25519 peer id")
    return PeerId(peer)
