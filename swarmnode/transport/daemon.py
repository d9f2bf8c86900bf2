"""Our p2pd: hivemind's libp2p daemon as a child process, watched and started again when it dies.

hivemind's own P2P object ends with its daemon. `Daemon` outlives it: it remembers the handlers, and offers what
hivemind's DHT asks of a P2P object, so that neither the DHT nor the transport notices more than a short silence.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import os
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hivemind import hivemind_cli
from hivemind.p2p import P2P, PeerID
from hivemind.p2p.p2p_daemon_bindings.p2pclient import Client
from hivemind.p2p.p2p_daemon_bindings.utils import P2PDaemonError
from hivemind.proto import p2pd_pb2
from hivemind.utils.multiaddr import Multiaddr

from swarmnode.errors import LocalFault, RemoteFault, Unavailable
from swarmnode.identity import peer_id_bytes
from swarmnode.ids import PeerId, short
from swarmnode.transport import patches
from swarmnode.transport.address import Endpoint, check_listenable, parse_endpoint
from swarmnode.transport.stream import Stream

STARTUP_TIMEOUT_S = 60.0  # guess: eight nodes starting on two busy cores; alone it takes 0.15 s (hivemind.md)
CONTROL_TIMEOUT_S = 5.0  # guess: p2pd answers its own machine within a millisecond
CONTROL_BYTES_MAX = 64 << 10  # guess: an error text, or a few hundred addresses
ERROR_CHARACTERS_MAX = 256
DIAL_TIMEOUT_S = 10.0  # guess: libp2p gives one address 5 s
UNARY_BYTES_MAX = 4 << 20  # hivemind's default: what a DHT message may hold
RESTARTS_MAX = 5  # in RESTARTS_WINDOW_S; guess
RESTARTS_WINDOW_S = 60.0
RESTART_DELAY_S = 0.1


async def launch(identity_path: Path, sockets: Path, listen: Sequence[str], announce: Sequence[str]) -> Any:
    """A running hivemind P2P. Raises P2PDaemonError, OSError.

    `P2P.create` puts its sockets in /tmp and leaves p2pd in our process group, where Ctrl-C kills it before the node
    could say goodbye; this does the same with private sockets and a session of its own.
    """
    (sockets / "p2pd").unlink(missing_ok=True)  # what a killed one left
    p2p = P2P()
    p2p._daemon_listen_maddr = Multiaddr(f"/unix{sockets}/p2pd")
    p2p._client_listen_maddr = Multiaddr(f"/unix{sockets}/client")
    try:
        async with asyncio.timeout(STARTUP_TIMEOUT_S):
            await _start_child(p2p, _arguments(identity_path, p2p._daemon_listen_maddr, listen, announce))
            p2p._client = await Client.create(
                control_maddr=p2p._daemon_listen_maddr,
                listen_maddr=p2p._client_listen_maddr,
                persistent_conn_max_msg_size=UNARY_BYTES_MAX,
            )
            await p2p._ping_daemon()
    except TimeoutError:
        await p2p.shutdown()
        raise P2PDaemonError(f"not ready after {STARTUP_TIMEOUT_S:.0f} s") from None
    except BaseException:
        await p2p.shutdown()
        raise
    return p2p


def _arguments(identity_path: Path, control: Any, listen: Sequence[str], announce: Sequence[str]) -> list[str]:
    options = {
        "id": str(identity_path),
        "listen": control,
        "hostAddrs": ",".join(listen),
        "dhtServer": True,
        "b": False,
        "connManager": True,
        "autonat": False,
        "natPortMap": False,
        "relay": False,
        "tls": True,
        "idleTimeout": f"{STARTUP_TIMEOUT_S:.0f}s",  # without the node's connection it ends by itself
        "persistentConnMaxMsgSize": UNARY_BYTES_MAX,
    }
    if announce:
        options["announceAddrs"] = ",".join(announce)
    binary = Path(hivemind_cli.__file__).with_name("p2pd")
    return list(P2P._make_process_args(str(binary), **options))


async def _start_child(p2p: Any, arguments: Sequence[str]) -> None:
    """Start p2pd and wait for the line that says it is ready."""
    loop = asyncio.get_running_loop()
    ready = loop.create_future()
    p2p._child = await asyncio.create_subprocess_exec(
        *arguments,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        env=os.environ | {"GOLOG_LOG_LEVEL": "error", "GOLOG_LOG_FMT": "json"},
        start_new_session=True,
    )
    p2p._alive = True
    p2p._reader_task = loop.create_task(p2p._read_outputs(ready))  # `P2P.shutdown` cancels it
    await ready


@dataclass(slots=True)
class Daemon:
    """One p2pd. `listen` are multiaddrs; port 0 takes any, and the one taken is kept over restarts."""

    identity_path: Path
    sockets: Path
    listen: Sequence[str]
    announce: Sequence[str] = ()
    p2p: Any = None
    handlers: dict[str, tuple[Any, tuple[Any, ...], dict[str, Any]]] = field(default_factory=dict)
    stream_handlers: dict[str, Path] = field(default_factory=dict)
    running: asyncio.Event = field(default_factory=asyncio.Event)

    async def start(self) -> None:
        """Start p2pd and register every handler. Raises UsageError (bad address), LocalFault (port in use, no p2pd)."""
        patches.apply()
        logging.getLogger("hivemind").setLevel(logging.ERROR)
        for endpoint in map(parse_endpoint, self.listen):
            check_listenable(endpoint)
        try:
            self.p2p = await launch(self.identity_path, self.sockets, self.listen, self.announce)
        except (P2PDaemonError, OSError) as error:
            raise LocalFault(f"p2pd does not start on {', '.join(self.listen)}: {error}") from error
        for name, socket in self.stream_handlers.items():
            await self._register_stream(name, socket)
        for name, (handler, args, kwargs) in self.handlers.items():
            await self.p2p.add_protobuf_handler(name, handler, *args, **kwargs)
        self.running.set()

    async def stop(self) -> None:
        """End p2pd and wait for its death."""
        self.running.clear()
        p2p, self.p2p = self.p2p, None
        if p2p is None:
            return
        child = p2p._child
        try:
            async with asyncio.timeout(CONTROL_TIMEOUT_S):
                await p2p.shutdown()
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                child.kill()
            await child.wait()

    @property
    def pid(self) -> int:
        assert self.p2p is not None, "p2pd is not running"
        return int(self.p2p._child.pid)

    async def supervise(self, died: Callable[[int | None], None], restarted: Callable[[], Awaitable[None]]) -> None:
        """Wait for p2pd's death and start it again, for ever. Raises LocalFault when it dies too often."""
        loop = asyncio.get_running_loop()
        deaths: list[float] = []
        while True:
            code = await self.p2p._child.wait()
            self.running.clear()
            died(code)
            deaths = [when for when in deaths if when > loop.time() - RESTARTS_WINDOW_S] + [loop.time()]
            if len(deaths) > RESTARTS_MAX:
                raise LocalFault(f"p2pd died {len(deaths)} times in {RESTARTS_WINDOW_S:.0f} s (exit code {code})")
            self._keep_ports()
            await self.p2p.shutdown()
            await self._start_again()
            await restarted()

    def _keep_ports(self) -> None:
        """Listen next time where others know us: a port 0 becomes the port it was given."""
        ports: dict[str, int] = {}
        for address in self.p2p._visible_maddrs or ():
            with contextlib.suppress(ValueError, KeyError):
                ports.setdefault("ip4" if "ip4" in address else "ip6", int(address["tcp"]))
        kept = []
        for endpoint in map(parse_endpoint, self.listen):
            port = endpoint.port or ports.get(endpoint.family, 0)
            kept.append(str(Endpoint(endpoint.family, endpoint.host, port)))
        self.listen = kept

    async def _start_again(self) -> None:
        for attempt in range(RESTARTS_MAX):
            await asyncio.sleep(RESTART_DELAY_S * 2**attempt)
            try:
                return await self.start()
            except (LocalFault, Unavailable, P2PDaemonError, OSError):
                if attempt == RESTARTS_MAX - 1:
                    raise
        raise AssertionError("unreachable")

    # What the transport asks of p2pd.

    async def serve_streams(self, protocol: str, socket: Path) -> None:
        """Let p2pd hand every incoming stream of `protocol` to the unix socket `socket`."""
        self.stream_handlers[protocol] = socket
        await self._register_stream(protocol, socket)

    async def _register_stream(self, protocol: str, socket: Path) -> None:
        handler = p2pd_pb2.StreamHandlerRequest(
            addr=Multiaddr(f"/unix{socket}").to_bytes(), proto=[protocol], balanced=False
        )
        request = p2pd_pb2.Request(type=p2pd_pb2.Request.STREAM_HANDLER, streamHandler=handler)
        stream = await self._ask_now(request, CONTROL_TIMEOUT_S)  # before it counts as running
        stream.close()

    async def open_stream(self, peer: PeerId, protocol: str, timeout_s: float) -> Stream:
        """A new stream to `peer`. Raises RemoteFault when it cannot be reached or does not speak `protocol`."""
        opening = p2pd_pb2.StreamOpenRequest(
            peer=peer_id_bytes(peer), proto=[protocol], timeout=max(1, round(timeout_s))
        )
        try:
            return await self._ask(
                p2pd_pb2.Request(type=p2pd_pb2.Request.STREAM_OPEN, streamOpen=opening), timeout_s + CONTROL_TIMEOUT_S
            )
        except P2PDaemonError as error:
            if "protocols not supported" in str(error):
                raise RemoteFault(f"{short(peer)} does not serve this run: wrong run id, or not a swarmnode") from None
            raise RemoteFault(f"{short(peer)} cannot be reached: {error}") from None

    async def dial(self, peer: PeerId, addresses: Sequence[str]) -> None:
        """Connect to `peer` at one of `addresses`. Raises RemoteFault."""
        connecting = p2pd_pb2.ConnectRequest(
            peer=peer_id_bytes(peer), addrs=[Multiaddr(a).to_bytes() for a in addresses], timeout=round(DIAL_TIMEOUT_S)
        )
        try:
            stream = await self._ask(
                p2pd_pb2.Request(type=p2pd_pb2.Request.CONNECT, connect=connecting), DIAL_TIMEOUT_S + CONTROL_TIMEOUT_S
            )
        except P2PDaemonError as error:
            raise RemoteFault(f"{short(peer)} cannot be reached at {', '.join(addresses)}: {error}") from None
        stream.close()

    async def addresses(self) -> list[str]:
        """Our multiaddrs as p2pd sees them now. Raises Unavailable."""
        await self._until_running()
        try:
            async with asyncio.timeout(CONTROL_TIMEOUT_S):
                _, found = await self.p2p._client.identify()
        except (OSError, EOFError, P2PDaemonError):
            raise Unavailable("our p2pd does not answer; it is being restarted", 0.5) from None
        return [str(address).partition("/p2p/")[0] for address in found]

    async def answers(self) -> bool:
        """Whether p2pd accepts connections on its control socket right now."""
        try:
            stream = await self._connect()
        except OSError:
            return False
        stream.abort()
        return True

    async def _ask(self, request: Any, timeout_s: float) -> Stream:
        """Send one control request; the stream it was sent on. Raises P2PDaemonError (p2pd says no), Unavailable."""
        await self._until_running()
        return await self._ask_now(request, timeout_s)

    async def _ask_now(self, request: Any, timeout_s: float) -> Stream:
        stream = None
        try:
            async with asyncio.timeout(timeout_s):
                stream = await self._connect()
                raw = request.SerializeToString()
                await stream.write(_varint(len(raw)) + raw)
                response = p2pd_pb2.Response.FromString(await read_delimited(stream, CONTROL_BYTES_MAX))
        except (OSError, TimeoutError) as error:
            if stream is not None:
                stream.abort()
            raise Unavailable(f"our p2pd does not answer ({error or 'timeout'}); it is being restarted", 0.5) from None
        except BaseException:
            if stream is not None:
                stream.abort()
            raise
        if response.type == p2pd_pb2.Response.ERROR:
            stream.abort()
            raise P2PDaemonError(" ".join(response.error.msg.split())[:ERROR_CHARACTERS_MAX])
        return stream

    async def _connect(self) -> Stream:
        path = self.p2p._daemon_listen_maddr["unix"]
        _, stream = await asyncio.get_running_loop().create_unix_connection(Stream, path)
        return stream

    async def _until_running(self) -> None:
        try:
            async with asyncio.timeout(CONTROL_TIMEOUT_S):
                await self.running.wait()
        except TimeoutError:
            raise Unavailable("our p2pd is down; it is being restarted", 1.0) from None

    # What hivemind's DHT asks of a P2P object.

    @property
    def peer_id(self) -> Any:
        return self.p2p.peer_id

    async def add_protobuf_handler(self, name: str, handler: Any, *args: Any, **kwargs: Any) -> None:
        self.handlers[name] = (handler, args, kwargs)
        await self.p2p.add_protobuf_handler(name, handler, *args, **kwargs)

    async def remove_protobuf_handler(self, name: str, **kwargs: Any) -> None:
        self.handlers.pop(name, None)
        if self.running.is_set():
            await self.p2p.remove_protobuf_handler(name, **kwargs)

    async def call_protobuf_handler(self, peer: Any, name: str, *args: Any) -> Any:
        await self._until_running()
        return await self.p2p.call_protobuf_handler(peer, name, *args)

    async def get_visible_maddrs(self, latest: bool = False) -> Any:
        return await self.p2p.get_visible_maddrs(latest=latest)


async def read_delimited(stream: Stream, nbytes_max: int) -> bytes:
    """One message behind its length as a varint. Raises ConnectionResetError for one above `nbytes_max`."""
    length = 0
    for shift in range(0, 35, 7):
        byte = (await stream.read(1))[0]
        length |= (byte & 0x7F) << shift
        if not byte & 0x80:
            break
    if length > nbytes_max:
        raise ConnectionResetError(f"p2pd announced a message of {length} bytes; at most {nbytes_max}")
    return await stream.read(length)


def _varint(value: int) -> bytes:
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


@functools.lru_cache(maxsize=4096)
def peer_of(raw: bytes) -> PeerId:
    """The peer id whose 38 bytes p2pd gives. Raises RemoteFault for a key that is not Ed25519."""
    peer = PeerID(raw).to_base58()
    if peer_id_bytes(PeerId(peer)) != raw:
        raise RemoteFault(f"{peer} is not an Ed25519 peer id")
    return PeerId(peer)
