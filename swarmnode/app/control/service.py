"""The daemon's control API: its verbs on two unix sockets in its home that only its owner can open.

By gRPC on grpc.sock (grpc_server.py, and on TCP where asked for), and as JSON over HTTP on control.sock:

curl --unix-socket HOME/control.sock -d '{"for_s": 60}' http://localhost/v1/pause
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from aiohttp import web

from swarmnode.app.control import socket_path, token_file
from swarmnode.app.control.verb import REQUEST_BYTES_MAX, VERBS, arguments, to_json
from swarmnode.app.control.watchers import SlowReader, Watchers, write
from swarmnode.base.errors import LocalFault, Unavailable, UsageError
from swarmnode.base.wire.report_pb2 import StatusReply

if TYPE_CHECKING:
    from swarmnode.app.control.grpc_server import GrpcServer

STOP_GRACE_S = 0.5
"""Time for calls in flight to finish, often the one that asked the daemon to leave. Guess."""


class DaemonApi(Protocol):
    """The answers of a daemon: a method for each verb, of the fields of its request, which returns its reply, nothing,
    or an awaitable of these (app/daemon/control_api.py)."""

    def status(self) -> StatusReply: ...


class ControlServer:
    """Serves the verbs of proto/swarmnode/v1/control.proto, methods of `api`, for the daemon of `home`."""

    def __init__(
        self, home: Path, api: DaemonApi, lock: int | None = None, ready: Callable[[], bool] = lambda: True
    ) -> None:
        """`lock` is that of `take_home`, if the home is held already; `ready` tells whether the daemon does its work,
        for probes."""
        self._home = home
        self._api = api
        self._ready = ready
        self._runner: web.AppRunner | None = None
        self._path: Path | None = None
        self._grpc: list[GrpcServer] = []
        self._lock = lock
        self.address = ""  # host:port on TCP
        self.watchers = Watchers(api.status)

    def hold(self) -> None:
        """Lock `home` until `stop` or the end of the process. A daemon does this before it touches a file there.

        Raises UsageError if another daemon holds it, LocalFault if it cannot be written.
        """
        if self._lock is None:
            self._home.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._lock = socket_path.take_home(self._home)

    async def start(self, listen: tuple[str, int] | None = None) -> Path:
        """Listen, after `hold`, on both unix sockets (permissions 0600), and by gRPC on a host and port with the home's
        token; return the path of the JSON's socket.

        Raises as `hold`, LocalFault if a socket cannot be made, UsageError if the port cannot be had, NotPermitted for
        a token that others can read.
        """
        self.hold()
        try:
            path = self._home.resolve() / socket_path.SOCKET_NAME
            path.unlink(missing_ok=True)  # left by a killed daemon: we hold the lock, so nobody listens there
            listening = _bind(self._home)
            app = web.Application(client_max_size=REQUEST_BYTES_MAX)
            app.router.add_post("/v1/{verb}", self._answer)
            self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=STOP_GRACE_S)
            await self._runner.setup()
            await web.SockSite(self._runner, listening).start()
            self._path = path
            await self._grpc_server().start_unix(self._home)
            if listen is not None:
                server = self._grpc_server(token_file.load_or_create(self._home))
                self.address = await server.start_tcp(*listen, "--control-listen")
        except BaseException:
            await self.stop()
            raise
        return path

    async def stop(self) -> None:
        """End watches, finish calls in flight and remove the sockets. Does nothing if not started."""
        self.watchers.stop()
        async with asyncio.TaskGroup() as tasks:
            for server in self._grpc:
                tasks.create_task(server.stop(STOP_GRACE_S))
            if self._runner is not None:
                tasks.create_task(self._runner.cleanup())
        self._runner = None
        self._grpc.clear()
        if self._path is not None:
            self._path.unlink(missing_ok=True)
            self._path = None
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _grpc_server(self, token: str = "") -> GrpcServer:
        from swarmnode.app.control.grpc_server import GrpcServer  # after the fork: fork servers import this module

        server = GrpcServer(self._api, self.watchers, self._ready, token)
        self._grpc.append(server)
        return server

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        verb = VERBS.get(request.match_info["verb"])
        if verb is None:
            return _error(404, f"unknown verb {request.match_info['verb'][:40]!r}")
        try:
            if verb.streams:
                return await self._push(request, **arguments(verb.from_json(await request.read())))
            return web.json_response(to_json(await verb.ask(self._api, verb.from_json(await request.read()))))
        except UsageError as error:
            return _error(400, str(error))
        except Unavailable as error:
            return _error(503, str(error))

    async def _push(self, request: web.Request, every_s: float) -> web.StreamResponse:
        """A line of JSON for each status, until the daemon ends or the client goes. Raises as `Watchers.watch` where
        none comes."""
        response = web.StreamResponse(headers={"Content-Type": "application/x-ndjson"})
        async with contextlib.aclosing(self.watchers.watch(every_s)) as statuses:
            async for status in statuses:
                if not response.prepared:
                    await response.prepare(request)
                try:
                    await write(response.write(json.dumps(to_json(status)).encode() + b"\n"))
                except (SlowReader, ConnectionError):
                    break
        return response


def _error(status: int, message: str) -> web.Response:
    return web.json_response({"error": message}, status=status)


def _bind(home: Path) -> socket.socket:
    """A socket in `home` that only this user can open. Raises LocalFault."""
    listening = socket.socket(socket.AF_UNIX)
    before = os.umask(0o177)
    try:
        with socket_path.short_folder(home) as folder:
            listening.bind(str(folder / socket_path.SOCKET_NAME))
    except OSError as error:
        listening.close()
        why = error.strerror or error
        raise LocalFault(f"cannot make a control socket in {home} ({why}): give another, shorter --home") from None
    finally:
        os.umask(before)
    return listening
