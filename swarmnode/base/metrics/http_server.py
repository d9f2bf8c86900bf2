"""A web server of a node or a coordinator: an aiohttp application on a port, with bounded connections.

ConnectionLimit bounds them: in all, of one address, and how long one may be open without a request. aiohttp has no such
bounds. Each connection is a file descriptor of the process: without them a stranger's idle connections leave none for
the archive, the history and libp2p.
"""

from __future__ import annotations

import asyncio
import errno
import resource
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import cast

from aiohttp import web

from swarmnode.base.errors import UsageError, cause_of

IN_ALL_MAX = 512  # derived: pages open at once, 20 MB and 1 % of a core (40 kB and 20 us a second each, measured)
DESCRIPTORS_SHARE = 0.25  # guess: of the process's file descriptors, at most
ADDRESS_MAX = 32  # derived: five browsers behind one address, each opens six
FIRST_REQUEST_S = 20.0  # also between two requests: Apache's RequestReadTimeout for a header, by default
NEARBY = ("127.0.0.1", "::1")  # of this machine, also a proxy's: bounded in all only


class ConnectionLimit:
    """Makes the protocol of each connection, for `loop.create_server`."""

    def __init__(self, protocol: Callable[[], asyncio.Protocol], *, first_s: float = FIRST_REQUEST_S) -> None:
        """`protocol` makes what serves a connection."""
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        self.most = min(IN_ALL_MAX, int(DESCRIPTORS_SHARE * soft)) if soft > 0 else IN_ALL_MAX
        self.open: Counter[str] = Counter()
        self.first_s = first_s
        self._protocol = protocol
        self._waiting: dict[asyncio.BaseTransport, asyncio.TimerHandle] = {}

    def __call__(self) -> asyncio.Protocol:
        return _Connection(self, self._protocol())

    def requested(self, transport: asyncio.BaseTransport | None) -> None:
        """A whole request came by `transport`: it may stay open."""
        if transport is not None and (timer := self._waiting.pop(transport, None)) is not None:
            timer.cancel()

    def takes(self, address: str, transport: asyncio.Transport) -> bool:
        """Count a new connection, which has to be closed unless there is room for it."""
        full = address not in NEARBY and self.open[address] >= ADDRESS_MAX
        if full or self.open.total() >= self.most:
            return False
        self.open[address] += 1
        self._waiting[transport] = asyncio.get_running_loop().call_later(self.first_s, transport.abort)
        return True

    def on_connection_lost(self, address: str, transport: asyncio.BaseTransport) -> None:
        """The end of a connection that was counted."""
        self.requested(transport)
        self.open[address] -= 1
        if self.open[address] <= 0:
            del self.open[address]


class _Connection(asyncio.Protocol):
    """One connection, served by `inner` if there is room for it."""

    def __init__(self, limit: ConnectionLimit, inner: asyncio.Protocol) -> None:
        self._limit = limit
        self._inner = inner
        self._counted: tuple[str, asyncio.Transport] | None = None

    def connection_made(self, given: asyncio.BaseTransport) -> None:
        transport = cast("asyncio.Transport", given)  # uvloop's is none by its class
        name = transport.get_extra_info("peername")
        address = str(name[0]) if name else ""
        if not self._limit.takes(address, transport):
            transport.abort()
            return
        self._counted = address, transport
        self._inner.connection_made(transport)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._counted is not None:
            self._limit.on_connection_lost(*self._counted)
            self._inner.connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._counted is not None:
            self._inner.data_received(data)

    def eof_received(self) -> bool | None:
        return self._inner.eof_received() if self._counted is not None else None

    def pause_writing(self) -> None:
        self._inner.pause_writing()

    def resume_writing(self) -> None:
        self._inner.resume_writing()


SHUTDOWN_S = 1.0  # for responses under way; one takes milliseconds


class HttpServer:
    """Serves `app` from `start` to `close`."""

    def __init__(self, app: web.Application) -> None:
        app.middlewares.append(self._on_request)
        self._runner = web.AppRunner(
            app,
            access_log=None,
            shutdown_timeout=SHUTDOWN_S,
            handle_signals=False,
            keepalive_timeout=FIRST_REQUEST_S,
        )
        self._listener: asyncio.Server | None = None
        self.limit: ConnectionLimit | None = None

    async def start(self, host: str, port: int, flag: str) -> int:
        """Listen on `host`:`port` (0: any free one), which the user gave as `flag`; returns the port. Raises
        UsageError."""
        await self._runner.setup()
        assert self._runner.server is not None
        self.limit = ConnectionLimit(self._runner.server)
        try:
            loop = asyncio.get_running_loop()
            self._listener = await loop.create_server(self.limit, host, port, backlog=256, reuse_address=True)
        except (OSError, OverflowError) as error:
            await self._runner.cleanup()
            busy = isinstance(error, OSError) and error.errno == errno.EADDRINUSE
            reason = "is in use" if busy else f"is not available ({cause_of(error)})"
            raise UsageError(f"{flag} {port}: {host}:{port} {reason}; give another, or 0 for any free one") from None
        bound: int = self._listener.sockets[0].getsockname()[1]
        return bound

    async def close(self) -> None:
        """Stop listening and end the connections. A second call does nothing."""
        if self._listener is not None:
            self._listener.close()
            self._listener = None
            await self._runner.cleanup()

    @web.middleware
    async def _on_request(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        assert self.limit is not None
        self.limit.requested(request.transport)
        return await handler(request)
