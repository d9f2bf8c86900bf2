"""The real Transport: calls between nodes over libp2p, through hivemind's p2pd, in this process's event loop."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Coroutine, Mapping, Sequence
from pathlib import Path

from hivemind.utils.multiaddr import Multiaddr

from swarmnode.base.errors import Busy, LocalFault, RemoteFault, Unavailable, UsageError
from swarmnode.base.identity import Identity
from swarmnode.base.ids import PeerId, RunId
from swarmnode.base.metrics import name
from swarmnode.base.ports import Telemetry
from swarmnode.net.membership.liveness import TRIES
from swarmnode.net.transport.address import dialable, dialable_of, is_circuit, parse_endpoint
from swarmnode.net.transport.dial_book import DialBook
from swarmnode.net.transport.flood_guard import FloodGate, FloodGuard
from swarmnode.net.transport.p2pd import NetworkMode
from swarmnode.net.transport.p2pd_control import peer_of, read_stream_info
from swarmnode.net.transport.p2pd_process import DIAL_TIMEOUT_S, P2pdProcess, P2pdSupervisor
from swarmnode.net.transport.serve import HEADER_TIMEOUT_S
from swarmnode.net.transport.socket_dir import SocketDir
from swarmnode.net.transport.stream import P2pdStream
from swarmnode.net.transport.stream_transport import ADDRESSES_MAX, StreamTransport

CIRCUITS_MAX = 2  # each takes 90 characters of a record of 1 KiB
CONNECT_DELAY_S = 0.2


class Libp2pTransport(StreamTransport):
    """Implements ports.Transport. `create` starts it; `close` ends it and everything it started."""

    can_relay = True

    def __init__(
        self, daemon: P2pdProcess, sockets: SocketDir, peer_id: PeerId, run_id: RunId, telemetry: Telemetry | None
    ):
        super().__init__(peer_id, run_id, telemetry)
        self._daemon = daemon
        self._sockets = sockets
        self._guard = FloodGuard(daemon, self._friends, self._guarded)

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
        book: DialBook | None = None,
    ) -> Libp2pTransport:
        """A transport that can call others at once, and answers them after `start`.

        `identity_path` is the key file of `identity` (net/transport/key_file.py), which p2pd reads itself. `announce`
        replaces the addresses announced to others. `network_mode` sets p2pd's reachability. `named`: the bootstraps,
        which may have host names and lie in the local network; `lan`: so may others. `book`: of the transport that this
        one replaces: where peers were met they may be dialled again and again.

        Raises UsageError (a bad address, a port in use), LocalFault (no p2pd).
        """
        for text in (*listen, *announce):
            parse_endpoint(text)
        if not listen:
            raise UsageError("no address to listen on; give at least one, such as /ip4/127.0.0.1/tcp/0")
        sockets = SocketDir()
        mode = network_mode or NetworkMode()
        book = book or DialBook([*listen, *announce], lan=lan)
        daemon = P2pdProcess(identity_path, sockets, tuple(listen), tuple(announce), mode, book=book)
        transport = cls(daemon, sockets, identity.peer_id, run_id, telemetry)
        await transport._name(named)
        try:
            await daemon.start()
            if str(daemon.peer_id) != identity.peer_id:
                raise LocalFault(f"{identity_path} holds the key of {daemon.peer_id}, not of {identity.peer_id}")
            await transport._run()
            await daemon.serve_streams(tuple(transport._protocols), lambda: P2pdStream(transport._accept))
        except BaseException:
            await transport.close()
            raise
        return transport

    def _work(self) -> list[Coroutine[object, object, None]]:
        supervisor = P2pdSupervisor(self._daemon, self._p2pd_died, self._p2pd_restarted)
        return [supervisor.keep_running(), supervisor.keep_answering(), self._daemon.keep_book(), self._guard.watch()]

    async def close(self) -> None:
        """End all calls, streams, tasks and p2pd; remove the sockets. May be called repeatedly."""
        self._daemon.refuse_streams()
        await self._end()
        self._guard.release()
        await self._daemon.stop()
        self._sockets.remove()

    # The port.

    @property
    def protocol(self) -> str:
        """The name under which p2pd knows streams of this run, in the newest version of the wire."""
        return next(iter(self._protocols))

    @property
    def daemon(self) -> P2pdProcess:
        """This transport's p2pd, which the directory shares."""
        return self._daemon

    @property
    def listening(self) -> list[str]:
        return list(self._daemon.listen)

    @property
    def book(self) -> DialBook:
        return self._daemon.book

    @property
    def network_mode(self) -> NetworkMode:
        return self._daemon.network_mode

    async def connections(self) -> Mapping[PeerId, bool]:
        return await self._daemon.connections()

    async def addresses(self) -> list[str]:
        """Multiaddrs (without /p2p/US) at which others reach this node: direct ones over TCP, then at most CIRCUITS_MAX
        relayed ones. Raises Unavailable (p2pd is down)."""
        direct = list[str]()
        circuits = list[str]()
        for text in await self._daemon.addresses():
            with contextlib.suppress(UsageError):
                address = dialable(text)
                (circuits if is_circuit(address) else direct).append(address)
        return list(dict.fromkeys(direct))[:ADDRESSES_MAX] + list(dict.fromkeys(circuits))[:CIRCUITS_MAX]

    async def stand(self, network_mode: NetworkMode, announce: Sequence[str] = ()) -> None:
        """Change p2pd's reachability: it restarts (0.5 s). Raises Unavailable."""
        await self._daemon.change(network_mode, announce)

    async def connect(self, peer: PeerId, addresses: Sequence[str]) -> None:
        """Make `peer` reachable at `addresses` and remember them. Raises Unavailable after TRIES."""
        usable = await self._remember(peer, addresses)
        why = ""
        for attempt in range(TRIES):
            await asyncio.sleep(CONNECT_DELAY_S * attempt)
            try:
                await self._daemon.dial(peer, usable)
                return
            except RemoteFault as fault:
                why = why or str(fault)  # of the later ones libp2p says "dial backoff" only
        raise Unavailable(why, CONNECT_DELAY_S * TRIES)

    async def _broke(self, method: str) -> None:
        if not await self._daemon.answers():
            raise Unavailable(f"our p2pd died during {method}; it is being restarted", 0.5) from None

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
        self._welcome(stream, self._attend)

    async def _attend(self, stream: P2pdStream) -> None:
        self._incoming += 1
        try:
            async with asyncio.timeout(HEADER_TIMEOUT_S):
                info = await read_stream_info(stream)
            peer = peer_of(info.peer)
            stream.version = self._protocols[info.proto]
            try:
                self._observe(peer, str(Multiaddr(info.addr)))
            except ValueError:
                self._observe(peer, "")
            await self._serve_stream(stream, peer)
        except (ConnectionError, TimeoutError, RemoteFault):
            pass
        finally:
            self._incoming -= 1
            stream.abort()

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
