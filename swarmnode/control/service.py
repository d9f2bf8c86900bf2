"""The daemon's local API: gRPC on a unix socket that only its owner can open."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Protocol, TypeVar

import grpc
import grpc.aio

from swarmnode.control import socket_path
from swarmnode.errors import LocalFault, Unavailable, UsageError
from swarmnode.wire import control_pb2, control_pb2_grpc

REQUEST_BYTES_MAX = 64 << 10
CALLS_MAX = 32
"""Bounds of the server, guess: requests are tiny and answered at once."""

STOP_GRACE_S = 0.5
"""Time for calls in flight to finish, often the one that asked the daemon to leave. Guess."""

REASON_CHARACTERS_MAX = 200
PAUSE_MAX_S = 366 * 86400.0
EXAMINED_MAX = 16  # guess: peers asked in one examination, which takes a few seconds

T = TypeVar("T")


class Context(Protocol):
    """The part of grpc.aio's context used here."""

    async def abort(self, code: grpc.StatusCode, details: str) -> None: ...


class Api(Protocol):
    """Interface of the daemon. Runs on the event loop and does not wait: `leave` only starts leaving."""

    def status(self) -> control_pb2.StatusReply: ...

    def leave(self, reason: str, checkpoint: str, stopping: bool) -> None: ...

    async def drain(self, notice_s: float, reason: str) -> control_pb2.DrainReply:
        """Waits until this node has left; the only call besides `examine` that waits."""
        ...

    def pause(self, for_s: float, reason: str) -> control_pb2.LimitsReply: ...

    def resume(self) -> control_pb2.LimitsReply: ...

    def finish(self, reason: str) -> None: ...

    def change(self, changed: Mapping[str, str]) -> control_pb2.LimitsReply: ...

    def config(self) -> control_pb2.ConfigReply: ...

    async def examine(self, peers_max: int) -> control_pb2.ExamineReply: ...

    def copy(self, older_s: float) -> control_pb2.CopyReply: ...


class ControlServer:
    """Serves the Control service for the daemon of `home`."""

    def __init__(self, home: Path, api: Api, lock: int | None = None) -> None:
        """`lock` is that of `take_home`, if the home is held already."""
        self._home = home
        self._servicer = _Servicer(api)
        self._server: grpc.aio.Server | None = None
        self._path: Path | None = None
        self._lock = lock

    def hold(self) -> None:
        """Lock `home` until `stop` or the end of the process. A daemon does this before it touches a file there.

        Raises UsageError if another daemon holds it, LocalFault if it cannot be written.
        """
        if self._lock is None:
            self._home.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._lock = socket_path.take_home(self._home)

    async def start(self) -> Path:
        """Listen, after `hold`; return the socket's path (permissions 0600).

        Raises as `hold`, and LocalFault if the socket cannot be made.
        """
        self.hold()
        try:
            path = socket_path.choose(self._home)
            path.unlink(missing_ok=True)  # left by a killed daemon: we hold the lock, so nobody listens there
            server = grpc.aio.server(
                options=[("grpc.max_receive_message_length", REQUEST_BYTES_MAX)], maximum_concurrent_rpcs=CALLS_MAX
            )
            control_pb2_grpc.add_ControlServicer_to_server(self._servicer, server)
            before = os.umask(0o177)
            try:
                server.add_insecure_port(f"unix:{path}")
            except RuntimeError as error:
                raise LocalFault(f"cannot listen on {path}: {error}") from None
            finally:
                os.umask(before)
            await server.start()
            socket_path.publish(self._home, path)
        except BaseException:
            self._release()
            raise
        self._server, self._path = server, path
        return path

    async def stop(self) -> None:
        """Finish calls in flight and remove the socket. Does nothing if not started."""
        if self._server is not None:
            await self._server.stop(STOP_GRACE_S)
            self._server = None
        if self._path is not None:
            socket_path.forget(self._home, self._path)
            self._path = None
        self._release()

    def _release(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


class _Servicer(control_pb2_grpc.ControlServicer):
    def __init__(self, api: Api) -> None:
        self._api = api

    async def Status(self, request: control_pb2.StatusRequest, context: object) -> control_pb2.StatusReply:
        return self._api.status()

    async def Leave(self, request: control_pb2.LeaveRequest, context: object) -> control_pb2.LeaveReply:
        reason, checkpoint = request.reason[:REASON_CHARACTERS_MAX], request.checkpoint[:REASON_CHARACTERS_MAX]
        self._api.leave(reason, checkpoint, request.stopping)
        return control_pb2.LeaveReply()

    async def Drain(self, request: control_pb2.DrainRequest, context: object) -> control_pb2.DrainReply:
        return await self._api.drain(max(0.0, request.notice_s), request.reason[:REASON_CHARACTERS_MAX])

    async def Pause(self, request: control_pb2.PauseRequest, context: Context) -> control_pb2.LimitsReply:
        if not (math.isfinite(request.for_s) and 0 <= request.for_s <= PAUSE_MAX_S):
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "a pause lasts at most a year; 0: until resume")
        reason = request.reason[:REASON_CHARACTERS_MAX]
        return await _told(lambda: self._api.pause(request.for_s, reason), context)

    async def Resume(self, request: control_pb2.ResumeRequest, context: Context) -> control_pb2.LimitsReply:
        return await _told(self._api.resume, context)

    async def Finish(self, request: control_pb2.FinishRequest, context: Context) -> control_pb2.LeaveReply:
        await _told(lambda: self._api.finish(request.reason[:REASON_CHARACTERS_MAX]), context)
        return control_pb2.LeaveReply()

    async def Limit(self, request: control_pb2.LimitRequest, context: Context) -> control_pb2.LimitsReply:
        return await _told(lambda: self._api.change(dict(request.changed)), context)

    async def Config(self, request: control_pb2.ConfigRequest, context: Context) -> control_pb2.ConfigReply:
        return await _told(self._api.config, context)

    async def Examine(self, request: control_pb2.ExamineRequest, context: Context) -> control_pb2.ExamineReply:
        return await self._api.examine(min(request.peers_max or EXAMINED_MAX, EXAMINED_MAX))

    async def Copy(self, request: control_pb2.CopyRequest, context: Context) -> control_pb2.CopyReply:
        return await _told(lambda: self._api.copy(max(0.0, request.older_s)), context)


async def _told(answer: Callable[[], T], context: Context) -> T:
    """The value of `answer`; our own errors become the status from which the client restores them."""
    try:
        return answer()
    except UsageError as error:
        await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
    except Unavailable as error:
        await context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(error))
    raise AssertionError("abort raises")
