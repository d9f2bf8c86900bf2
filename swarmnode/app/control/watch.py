"""Client of a daemon for more than one answer: its statuses as it pushes them, by gRPC's Watch."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncGenerator, Generator
from pathlib import Path
from typing import Any

from swarmnode.app.control import socket_path
from swarmnode.app.control.client import TIMEOUT_S, other_version
from swarmnode.app.control.verb import MARK
from swarmnode.app.control.watchers import EVERY_MAX_S, EVERY_MIN_S
from swarmnode.base.errors import LocalFault, NoDaemon, SwarmnodeError, Unavailable, UsageError
from swarmnode.base.wire.control_pb2 import WatchRequest
from swarmnode.base.wire.report_pb2 import StatusReply

REPLY_BYTES_MAX = 16 << 20  # guess: a status with a thousand peers has 100 kB
PING_S = 10.0  # guess; a daemon that answers no ping within TIMEOUT_S is frozen
OPTIONS = (
    ("grpc.enable_http_proxy", 0),
    ("grpc.max_receive_message_length", REPLY_BYTES_MAX),
    ("grpc.min_reconnect_backoff_ms", int(1000 * TIMEOUT_S)),  # also the time that a connection may take
    ("grpc.keepalive_time_ms", int(1000 * PING_S)),
    ("grpc.keepalive_timeout_ms", int(1000 * TIMEOUT_S)),
)


async def watch(home: Path, every_s: float) -> AsyncGenerator[StatusReply, None]:
    """The statuses of the daemon of `home`: now, at changes, and every `every_s` (the nearest from .1 s to an hour).

    Ends by an error: NoDaemon if none answers or when it ends, NotPermitted if it belongs to another user, Unavailable
    if it does not answer, or cannot now.
    """
    from swarmnode.app.control.grpc_library import control_pb2_grpc, grpc

    _check(home)
    every_s = _nearest(every_s)
    with socket_path.short_folder(home) as folder:
        async with grpc.aio.insecure_channel(_target(folder), options=OPTIONS) as channel:
            call = control_pb2_grpc.ControlStub(channel).Watch(WatchRequest(every_s=every_s))
            begun = False
            try:
                while True:
                    async with asyncio.timeout(every_s + TIMEOUT_S):
                        status = await call.read()
                    if not isinstance(status, StatusReply):  # grpc.aio.EOF
                        break
                    begun = True
                    yield status
            except grpc.aio.AioRpcError as error:
                raise await asyncio.to_thread(_explained, error, home, begun) from None
            except TimeoutError:
                raise await asyncio.to_thread(_lost, home, begun) from None
    raise NoDaemon(f"the daemon at {home} has ended")


def watch_here(home: Path, every_s: float) -> Generator[StatusReply, None, None]:
    """`watch` for a program without an event loop, or with another's. Closing it ends the watch."""
    from swarmnode.app.control.grpc_library import control_pb2_grpc, grpc

    _check(home)
    request = WatchRequest(every_s=_nearest(every_s))
    with (
        socket_path.short_folder(home) as folder,
        grpc.insecure_channel(_target(folder), options=OPTIONS) as channel,
    ):
        begun = False
        try:
            for status in control_pb2_grpc.ControlStub(channel).Watch(request):
                begun = True
                yield status
        except grpc.RpcError as error:
            raise _explained(error, home, begun) from None
    raise NoDaemon(f"the daemon at {home} has ended")


def _check(home: Path) -> None:
    """Raises as socket_path.check, and LocalFault for a daemon from before this socket."""
    try:
        socket_path.check(home, socket_path.GRPC_SOCKET_NAME)
    except NoDaemon:
        socket_path.check(home)
        raise other_version(home) from None


def _target(folder: Path) -> str:
    return f"unix:{folder / socket_path.GRPC_SOCKET_NAME}"


def _nearest(every_s: float) -> float:
    return min(max(every_s, EVERY_MIN_S), EVERY_MAX_S)


def _explained(error: Any, home: Path, begun: bool) -> SwarmnodeError:
    """Our error for one of gRPC, of either kind of its client. A code without our mark comes from the library, which
    did not reach the daemon. `begun`: a status has come already."""
    marked = any(key == MARK for key, _ in error.trailing_metadata() or ())
    text = error.details() or ""
    match error.code().name:
        case "INVALID_ARGUMENT":
            return UsageError(text)
        case "RESOURCE_EXHAUSTED":
            return Unavailable(text)
        case "UNAVAILABLE" if marked:
            return Unavailable(text)
        case "UNAVAILABLE" | "CANCELLED":
            return _lost(home, begun)
        case "UNIMPLEMENTED":
            return other_version(home)
        case _:
            return LocalFault(f"the daemon at {home} failed: see its log")


def _lost(home: Path, begun: bool) -> SwarmnodeError:
    """The error for a daemon that is silent: it does not run on, it has ended, or there is none. One that is being
    killed closes a connection; one that is there greets it, or keeps it. Takes TIMEOUT_S at most."""
    try:
        with socket_path.short_folder(home) as folder, socket.socket(socket.AF_UNIX) as trying:
            trying.settimeout(TIMEOUT_S)
            trying.connect(str(folder / socket_path.GRPC_SOCKET_NAME))
            there = trying.recv(1) != b""
    except TimeoutError:
        there = True
    except OSError:
        there = False
    if there:
        return Unavailable(f"the daemon at {home} does not answer: frozen, or too busy")
    return NoDaemon(f"the daemon at {home} has ended") if begun else socket_path.no_daemon(home)
