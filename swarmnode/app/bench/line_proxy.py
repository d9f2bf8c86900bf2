"""Lines of stated rate, delay and loss in front of node processes, without root: a TCP proxy for each node.

A node listens at a port of its own and announces its proxy's. It calls others from the port that it listens at, as
libp2p does. So each connection goes through the caller's line and through that of the called node, and all connections
of a node share its line (tcp_flow.py).
"""

from __future__ import annotations

import asyncio
import socket
from collections import deque
from collections.abc import Coroutine
from dataclasses import dataclass, field

from swarmnode.app.bench.tcp_flow import Flow, Line
from swarmnode.base.ids import seeded

HOST = "127.0.0.1"
CHUNK = 16 << 10  # bytes that are passed on at once: 7 ms at 20 Mbit/s
SOCKET_NBYTES = 128 << 10  # guess: of a connection's bytes that wait for the line; a kernel would take megabytes


@dataclass(frozen=True, slots=True)
class LineSpec:
    """A home line: `up_bps` and `down_bps` bits a second, `delay_s` one way between two nodes, `loss` of segments."""

    up_bps: float
    down_bps: float
    delay_s: float
    loss: float = 0.0


@dataclass(eq=False, slots=True)
class ShapedNode:
    """A node behind its proxy: it listens at `port`, and others reach it at `announced`."""

    name: str
    spec: LineSpec
    listener: socket.socket
    port: int
    up: Line
    down: Line

    @property
    def announced(self) -> int:
        port: int = self.listener.getsockname()[1]
        return port


@dataclass(eq=False)
class LineProxies:
    """The proxies of a swarm, in this process's event loop. `unknown` counts callers at a port of no node that sent
    something: the called node's line alone shapes them."""

    seed: int
    nodes: dict[str, ShapedNode] = field(default_factory=dict)
    unknown: int = 0

    def __post_init__(self) -> None:
        self._flows = 0
        self._tasks = set[asyncio.Task[None]]()

    def add(self, name: str, spec: LineSpec) -> ShapedNode:
        """A node of this name, behind a proxy that serves from now on. Raises OSError if the system has no port."""
        listener = socket.create_server((HOST, 0), backlog=128)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SOCKET_NBYTES)
        listener.setblocking(False)
        with socket.create_server((HOST, 0)) as free:
            port = free.getsockname()[1]
        node = ShapedNode(name, spec, listener, port, Line(spec.up_bps), Line(spec.down_bps))
        self.nodes[name] = node
        self._spawn(self._serve(node))
        return node

    async def close(self) -> None:
        """End all connections and close all ports."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for node in self.nodes.values():
            node.listener.close()

    def _spawn(self, work: Coroutine[object, object, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, node: ShapedNode) -> None:
        loop = asyncio.get_running_loop()
        while True:
            taken, address = await loop.sock_accept(node.listener)
            self._spawn(self._pass_on(node, taken, address[1]))

    async def _pass_on(self, called: ShapedNode, taken: socket.socket, port: int) -> None:
        """Pass bytes both ways between a caller at `port` and `called`, until either end closes."""
        loop = asyncio.get_running_loop()
        with taken, socket.socket() as onward:
            onward.setblocking(False)
            onward.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SOCKET_NBYTES)
            for end in (taken, onward):
                end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            caller = next((node for node in self.nodes.values() if node.port == port), None)
            there = self._flow(caller, called)
            back = self._flow(called, caller)
            try:
                await asyncio.sleep(there.delay_s + back.delay_s)  # the handshake
                await loop.sock_connect(onward, (HOST, called.port))
                async with asyncio.TaskGroup() as group:
                    group.create_task(pump(taken, onward, there))
                    group.create_task(pump(onward, taken, back))
            except (OSError, ExceptionGroup):  # an end was closed
                pass
            finally:
                self.unknown += caller is None and there.segments > 0

    def _flow(self, sender: ShapedNode | None, receiver: ShapedNode | None) -> Flow:
        self._flows += 1
        specs = [node.spec for node in (sender, receiver) if node is not None]
        return Flow(
            sender.up if sender else Line(specs[0].up_bps),
            receiver.down if receiver else Line(specs[0].down_bps),
            max(spec.delay_s for spec in specs),
            max(spec.loss for spec in specs),
            seeded(self.seed, "line", self._flows),
        )


async def pump(source: socket.socket, sink: socket.socket, flow: Flow) -> None:
    """Pass the bytes of `source` on to `sink` when `flow` has carried them, until `source` ends. Raises OSError."""
    loop = asyncio.get_running_loop()
    under_way = deque[tuple[float, bytes]]()
    more = asyncio.Event()

    async def deliver() -> None:
        while True:
            while not under_way:
                more.clear()
                await more.wait()
            due_s, data = under_way.popleft()
            await asyncio.sleep(max(0.0, due_s - loop.time()))
            if not data:
                sink.shutdown(socket.SHUT_WR)
                return
            await loop.sock_sendall(sink, data)

    async with asyncio.TaskGroup() as group:
        group.create_task(deliver())
        while True:
            data = await loop.sock_recv(source, min(await _room(flow), CHUNK))
            under_way.append((flow.send(loop.time(), len(data)), data))
            more.set()
            if not data:
                return


async def _room(flow: Flow) -> int:
    """Wait until `flow` takes bytes; how many."""
    loop = asyncio.get_running_loop()
    while True:
        if room := flow.room(loop.time()):
            return room
        await asyncio.sleep(max(0.0, flow.next_s(loop.time()) - loop.time()))
