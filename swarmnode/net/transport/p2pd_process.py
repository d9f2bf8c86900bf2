"""Our p2pd: hivemind's libp2p daemon as a child process, supervised and restarted when it dies.

hivemind's own P2P object ends with its daemon. `P2pdProcess` outlives it: it has p2pd's streams handed to it anew, and
tells hivemind's DHT of each start (directory.py). The transport notices only a short silence.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from asyncio.subprocess import Process
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hivemind.p2p.p2p_daemon_bindings.utils import P2PDaemonError
from hivemind.utils.multiaddr import Multiaddr

from swarmnode.base.errors import LocalFault, RemoteFault, Unavailable, UsageError, cause_of
from swarmnode.base.header import LEAST, VERSION
from swarmnode.base.ids import PeerId, short
from swarmnode.net.membership.liveness import TRIES
from swarmnode.net.transport import hivemind_patches
from swarmnode.net.transport import p2pd_control as control
from swarmnode.net.transport.address import (
    Endpoint,
    check_listenable,
    ip_of,
    is_circuit,
    parse_endpoint,
)
from swarmnode.net.transport.dial_book import DIRECT_MAX, DialBook
from swarmnode.net.transport.dial_filter import DialRequest, default_router
from swarmnode.net.transport.p2pd import CONTROL_SOCKET, NetworkMode, launch
from swarmnode.net.transport.p2pd_control import CONTROL_TIMEOUT_S
from swarmnode.net.transport.socket_dir import SocketDir
from swarmnode.net.transport.stream import P2pdStream

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


class DialGate:
    """Asks `book` about each connection that a p2pd opens. It waits for the verdict where the kernel makes it wait
    (dial_filter.py)."""

    def __init__(self, book: DialBook) -> None:
        self._book = book
        self._dials: int | None = None
        self._child: Process | None = None

    @property
    def is_open(self) -> bool:
        """Whether p2pd dials unasked: then its callers ask the book."""
        return self._dials is None

    def watch(self, dials: int | None, child: Process, *, local: bool) -> None:
        """Judge the dials of `child`, a p2pd, which come on the listener `dials`; None: they do not come. `local`: it
        asks no router for a port."""
        self._dials = dials
        self._child = child
        if dials is not None:
            self._book.router = "" if local else default_router()
            asyncio.get_running_loop().add_reader(dials, self._judge)

    def close(self) -> None:
        """p2pd is to end, or has: connections that it still opens fail."""
        if self._dials is not None:
            asyncio.get_running_loop().remove_reader(self._dials)
            os.close(self._dials)
            self._dials = None

    def _judge(self) -> None:
        assert self._dials is not None
        assert self._child is not None
        if self._child.returncode is not None:
            self.close()
            return
        try:
            dial = DialRequest(self._dials, self._child.pid)
        except OSError:  # it was interrupted
            return
        permit = not dial.host or self._book.permit(dial.host, dial.port, asyncio.get_running_loop().time())[0]
        if not dial.answer(permit) and permit and dial.host:
            self._book.revoke(dial.host, dial.port)


class StreamListener:
    """Makes a protocol by `make_stream` for each incoming stream of `protocols`."""

    def __init__(self, protocols: Sequence[str], make_stream: Callable[[], asyncio.BaseProtocol]) -> None:
        self.protocols = protocols
        self._make_stream = make_stream
        self._server: asyncio.Server | None = None

    async def listen(self, path: Path) -> None:
        """Take streams at a new socket, and at no former one."""
        self.close()
        path.unlink(missing_ok=True)  # noqa: ASYNC240  a socket of this process
        self._server = await asyncio.get_running_loop().create_unix_server(self._make_stream, str(path))

    def close(self) -> None:
        """Take no further stream."""
        if self._server is not None:
            self._server.close()
            self._server = None


@dataclass(slots=True)
class P2pdProcess:
    """A p2pd. `listen` are multiaddrs. Port 0 chooses any port, which is kept over restarts."""

    identity_path: Path
    sockets: SocketDir
    listen: Sequence[str]
    announce: Sequence[str] = ()
    network_mode: NetworkMode = NetworkMode()  # noqa: RUF009  frozen
    p2p: Any = None
    on_start: Callable[[Any], Awaitable[None]] | None = None  # called with hivemind's P2P of each p2pd
    streams: StreamListener | None = None
    running: asyncio.Event = field(default_factory=asyncio.Event)
    changing: bool = False
    book: DialBook = field(default_factory=DialBook)
    _gate: DialGate = field(init=False)

    def __post_init__(self) -> None:
        self._gate = DialGate(self.book)

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
            self.p2p, dials = await launch(*given)
        except (P2PDaemonError, OSError) as error:
            raise LocalFault(f"p2pd does not start on {', '.join(self.listen)}: {cause_of(error)}") from error
        self._gate.watch(dials, self.p2p._child, local=self.network_mode.kind == "local")
        try:
            await self._take_streams()
            if self.on_start is not None:
                await self.on_start(self.p2p)
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
        self._gate.close()
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
        await self.until_running()

    @property
    def pid(self) -> int:
        assert self.p2p is not None, "p2pd is not running"
        return int(self.p2p._child.pid)

    async def ended(self) -> tuple[int | None, bool]:
        """Wait until p2pd ends; (its exit code, whether `change` asked for that)."""
        code = await self.p2p._child.wait()
        self.running.clear()
        was_asked = self.changing
        self.changing = False
        return code, was_asked

    async def clear_up(self) -> None:
        """Drop what is left of a p2pd that has ended, for the next `start`."""
        self._gate.close()
        await self.p2p.shutdown()

    async def responds(self) -> bool:
        """Whether p2pd answers a request now."""
        try:
            stream, _ = await self._ask_now(control.IDENTIFY, CONTROL_TIMEOUT_S)
        except (OSError, P2PDaemonError):
            return False
        stream.close()
        return True

    @property
    def has_sockets(self) -> bool:
        """Whether the sockets between p2pd and this process are there."""
        return self.sockets.whole(CONTROL_SOCKET, STREAM_SOCKET)

    def kill(self) -> None:
        """Kill p2pd."""
        with contextlib.suppress(ProcessLookupError):
            self.p2p._child.kill()

    def listening(self) -> list[Endpoint]:
        """The endpoints p2pd listens on. Port 0 becomes the assigned port, or stays 0 if that is unknown."""
        return with_ports(map(parse_endpoint, self.listen), self.p2p._visible_maddrs or ())

    async def keep_book(self) -> None:
        """Enter into the book where connections were authenticated, until cancelled."""
        while True:
            await asyncio.sleep(BOOK_PERIOD_S)
            await self._enter_met()

    async def _enter_met(self) -> None:
        if not self.running.is_set() or not self.book.take_news():
            return
        with contextlib.suppress(P2PDaemonError, OSError):
            for _, addresses in await control.connections(self.p2p):
                for address in filter(ip_of, addresses):
                    self.book.meet(*_where(address))

    # Interface for the transport.

    async def serve_streams(self, protocols: Sequence[str], make_stream: Callable[[], asyncio.BaseProtocol]) -> None:
        """Make p2pd hand every incoming stream of `protocols` to a new protocol of `make_stream`, from each of its
        starts on."""
        self.streams = StreamListener(protocols, make_stream)
        await self._take_streams()

    def refuse_streams(self) -> None:
        """Take no further stream."""
        if self.streams is not None:
            self.streams.close()

    async def _take_streams(self) -> None:
        if self.streams is None:
            return
        path = self.sockets.path / STREAM_SOCKET
        await self.streams.listen(path)
        for protocol in self.streams.protocols:  # before it counts as running
            stream, _ = await self._ask_now(control.serve_streams(protocol, path), CONTROL_TIMEOUT_S)
            stream.close()

    async def open_stream(self, peer: PeerId, protocols: Sequence[str], timeout_s: float) -> tuple[P2pdStream, str]:
        """A new stream to `peer`, and the first of `protocols` that it speaks. Raises RemoteFault if it cannot be
        reached or speaks none."""
        request = control.open_stream(peer, protocols, timeout_s)
        try:
            stream, answer = await self._ask(request, timeout_s + CONTROL_TIMEOUT_S)
        except P2PDaemonError as error:
            raise unreachable(peer, error) from None
        return stream, answer.streamInfo.proto

    async def dial(self, peer: PeerId, addresses: Sequence[str]) -> None:
        """Connect to `peer` at one of `addresses`. Raises RemoteFault."""
        addresses = self.book.choose([one for one in addresses if "/udp/" not in one])
        if self._gate.is_open:
            now = asyncio.get_running_loop().time()
            addresses = [one for one in addresses if is_circuit(one) or self.book.permit(*_where(one), now)[0]]
        if not addresses:
            raise RemoteFault(f"{short(peer)} cannot be reached: its addresses are not to be dialled now")
        request = control.connect(peer, addresses, DIAL_TIMEOUT_S)
        try:
            stream, _ = await self._ask(request, DIAL_TIMEOUT_S + CONTROL_TIMEOUT_S)
        except P2PDaemonError as error:
            raise RemoteFault(f"{short(peer)} cannot be reached at {', '.join(addresses)}: {cause_of(error)}") from None
        stream.close()
        await self._enter_met()  # the connection may end before `keep_book` looks

    async def disconnect(self, peer: PeerId) -> None:
        """Close all connections to `peer`. Raises Unavailable."""
        with contextlib.suppress(P2PDaemonError):  # already gone
            stream, _ = await self._ask(control.disconnect(peer), CONTROL_TIMEOUT_S)
            stream.close()

    async def addresses(self) -> list[str]:
        """Our multiaddrs as p2pd sees them now, circuits included. Raises Unavailable."""
        stream, response = await self._ask(control.IDENTIFY, CONTROL_TIMEOUT_S)
        stream.close()
        return [str(Multiaddr(raw)) for raw in response.identify.addrs]

    async def connections(self) -> dict[PeerId, bool]:
        """Peers connected now: True for those reached only through relays. Raises Unavailable."""
        await self.until_running()
        connections: dict[PeerId, bool] = {}
        try:
            for peer, addresses in await control.connections(self.p2p):
                relayed = any("/p2p-circuit" in address for address in addresses)
                connections[peer] = connections.get(peer, True) and relayed
        except (P2PDaemonError, OSError) as error:  # TimeoutError is one
            raise Unavailable(f"our p2pd does not list its connections: {cause_of(error)}", 1.0) from None
        return connections

    async def answers(self) -> bool:
        """Whether p2pd accepts connections on its control socket now."""
        try:
            stream = await control.open_connection(self._control())
        except OSError:
            return False
        stream.abort()
        return True

    async def _ask(self, request: Any, timeout_s: float) -> tuple[P2pdStream, Any]:
        """Send one control request; return its stream and the response.

        Repeats the request after a restart if p2pd dies. Raises P2PDaemonError (p2pd refuses), Unavailable.
        """
        for attempt in range(ASK_ATTEMPTS):
            await self.until_running()
            try:
                return await self._ask_now(request, timeout_s)
            except OSError as error:
                if attempt == ASK_ATTEMPTS - 1 or isinstance(error, TimeoutError):
                    raise Unavailable(f"our p2pd does not answer: {cause_of(error)}", 0.5) from None
        raise AssertionError("unreachable")

    async def _ask_now(self, request: Any, timeout_s: float) -> tuple[P2pdStream, Any]:
        """Like `_ask`, without retry. Raises OSError (TimeoutError is one) if p2pd does not answer."""
        return await control.ask(self._control(), request, timeout_s)

    def _control(self) -> Path:
        """p2pd's control socket. Raises OSError if p2pd is stopped."""
        if self.p2p is None:
            raise ConnectionRefusedError("p2pd is stopped")
        return Path(self.p2p._daemon_listen_maddr["unix"])

    async def until_running(self) -> None:
        """Wait for p2pd while it restarts. Raises Unavailable after RESTART_WAIT_S."""
        if self.p2p is None:
            raise Unavailable("our p2pd is stopped: this node is shutting down")
        asked = self.p2p
        if self.running.is_set() and not await self.answers() and self.p2p is asked:
            self.running.clear()  # it died, and its supervisor will notice soon; one restarted meanwhile runs
        try:
            async with asyncio.timeout(RESTART_WAIT_S):
                await self.running.wait()
        except TimeoutError:
            raise Unavailable("our p2pd is down; it is being restarted", 1.0) from None

    @property
    def peer_id(self) -> Any:
        """hivemind's name of this node."""
        return self.p2p.peer_id


class P2pdSupervisor:
    """Supervises `p2pd`. `died` is called with the exit code of one that nobody ended, `restarted` when it is back."""

    def __init__(
        self, p2pd: P2pdProcess, died: Callable[[int | None], None], restarted: Callable[[], Awaitable[None]]
    ) -> None:
        self._p2pd = p2pd
        self._died = died
        self._restarted = restarted

    async def keep_running(self) -> None:
        """Restart p2pd whenever it ends, for ever. Raises LocalFault if it ends too often."""
        loop = asyncio.get_running_loop()
        ends: list[float] = []
        while True:
            code, was_asked = await self._p2pd.ended()
            if not was_asked:
                self._died(code)
            ends = [when for when in ends if when > loop.time() - RESTARTS_WINDOW_S] + [loop.time()]
            if len(ends) > RESTARTS_MAX:
                raise LocalFault(f"p2pd died {len(ends)} times in {RESTARTS_WINDOW_S:.0f} s (exit code {code})")
            await self._p2pd.clear_up()
            await self._start_again()
            await self._restarted()

    async def _start_again(self) -> None:
        for attempt in range(RESTARTS_MAX):
            await asyncio.sleep(RESTART_DELAY_S * 2**attempt)
            try:
                return await self._p2pd.start()
            except LocalFault:
                if attempt == RESTARTS_MAX - 1:
                    raise
        raise AssertionError("unreachable")

    async def keep_answering(self) -> None:
        """Kill a p2pd that is alive but does not answer, so that `keep_running` restarts it; at once where a cleaner of
        temporary files has swept its sockets."""
        missed = 0
        while True:
            await asyncio.sleep(PING_PERIOD_S)
            if not self._p2pd.running.is_set():
                missed = 0
                continue
            missed = 0 if await self._p2pd.responds() else missed + 1
            if missed >= PINGS_MISSED_MAX or not self._p2pd.has_sockets:
                missed = 0
                self._p2pd.kill()


def unreachable(peer: PeerId, error: P2PDaemonError) -> RemoteFault:
    """p2pd's `error` of opening a stream to `peer`, in words for the user."""
    if "protocols not supported" not in str(error):
        return RemoteFault(f"{short(peer)} cannot be reached: {cause_of(error)}")
    return RemoteFault(
        f"{short(peer)} does not serve this run: wrong run id, or a swarmnode of another protocol version"
        f" (update the older of the two); this node speaks {LEAST} to {VERSION}"
    )


def with_ports(endpoints: Iterable[Endpoint], visible: Iterable[Any]) -> list[Endpoint]:
    """The `endpoints`, with ports of the multiaddrs `visible` for their port 0."""
    ports: dict[str, int] = {}
    for address in visible:
        if "p2p-circuit" in address:
            continue  # its port is the relay's
        with contextlib.suppress(ValueError, KeyError):
            ports.setdefault("ip4" if "ip4" in address else "ip6", int(address["tcp"]))
    return [Endpoint(one.family, one.host, one.port or ports.get(one.family, 0)) for one in endpoints]


def _where(address: str) -> tuple[str, int]:
    endpoint = parse_endpoint(address.partition("/p2p/")[0])
    return endpoint.host, endpoint.port
