"""The control API by gRPC: the verbs, grpc.health.v1 for probes, and reflection for grpcurl.

On HOME/grpc.sock it answers whoever may open the socket. On TCP it answers whoever has the token, and everybody's
Health.Check: kubelet has no token, and learns no more than from /healthz and /readyz.
"""

from __future__ import annotations

import contextlib
import hmac
import logging
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any, TypeAlias

from swarmnode.app.control import socket_path
from swarmnode.app.control.grpc_library import grpc, health_pb2, health_pb2_grpc, reflection
from swarmnode.app.control.verb import MARK, REQUEST_BYTES_MAX, SERVICES, VERBS, Verb, arguments
from swarmnode.app.control.watchers import SlowReader, TooManyWatchers, Watchers, write
from swarmnode.base.errors import LocalFault, Unavailable, UsageError

CALLS_MAX = 64  # guess; of these at most WATCHERS_MAX are streams of statuses or of health
CONNECTIONS_MAX = 32  # guess: a tool opens one
HANDSHAKE_S = 5.0  # guess: a connection that speaks no HTTP/2 by then is closed
IDLE_S = 60.0  # guess: and one without a call for so long; a client opens another by itself
ERROR_CHARACTERS_MAX = 1000  # of a status, which travels in a header
OPTIONS = [
    ("grpc.max_receive_message_length", REQUEST_BYTES_MAX),
    ("grpc.max_concurrent_streams", CALLS_MAX),
    ("grpc.max_allowed_incoming_connections", CONNECTIONS_MAX),
    ("grpc.server_handshake_timeout_ms", int(1000 * HANDSHAKE_S)),
    ("grpc.max_connection_idle_ms", int(1000 * IDLE_S)),
    ("grpc.http2.min_ping_interval_without_data_ms", 5000),  # our own client asks every 10 s whether we live
    ("grpc.so_reuseport", 0),  # else two daemons share a port, and a caller meets either
]

NAMES = tuple(service.full_name for service in SERVICES)
HEALTH = health_pb2.DESCRIPTOR.services_by_name["Health"].full_name
READINESS = "readiness"
LIVENESS = "liveness"
"""What a probe may ask for: that the daemon does its work (as /readyz), that its event loop turns (as /healthz). No
name, and a service's of ours, mean readiness."""

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"
Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"

_LOG = logging.getLogger(__name__)


class GrpcServer:
    """Answers the verbs from `api` on one socket. Made in a running event loop."""

    def __init__(self, api: object, watchers: Watchers, ready: Callable[[], bool], token: str = "") -> None:
        """`ready` tells whether the daemon does its work. With a `token` only its bearers are answered."""
        guards = [_TokenGuard(token)] if token else []
        self._server = grpc.aio.server(interceptors=guards, options=OPTIONS, maximum_concurrent_rpcs=CALLS_MAX)
        self._held = contextlib.ExitStack()
        for service in NAMES:
            handlers = {v.method: _handler(v, api, watchers) for v in VERBS.values() if v.service == service}
            self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, handlers),))
        health_pb2_grpc.add_HealthServicer_to_server(HealthService(watchers, ready), self._server)
        reflection.enable_server_reflection((*NAMES, HEALTH, reflection.SERVICE_NAME), self._server)

    async def start_unix(self, home: Path) -> None:
        """Listen on a socket in `home` that only this user can open; one that a killed daemon left is replaced. Raises
        LocalFault."""
        folder = self._held.enter_context(socket_path.short_folder(home))  # until gRPC removes the socket by this path
        before = os.umask(0o177)
        try:
            self._server.add_insecure_port(f"unix:{folder / socket_path.GRPC_SOCKET_NAME}")
        except RuntimeError as error:
            raise LocalFault(f"cannot make a gRPC socket in {home} ({error}): give another, shorter --home") from None
        finally:
            os.umask(before)
        await self._server.start()

    async def start_tcp(self, host: str, port: int, flag: str) -> str:
        """Listen on `host`:`port` (0: any free one), which the user gave as `flag`; returns the address. Raises
        UsageError."""
        shown = f"[{host}]" if ":" in host else host
        try:
            bound = self._server.add_insecure_port(f"{shown}:{port}")
        except RuntimeError:
            raise UsageError(f"{flag} {shown}:{port} is in use or not of this machine: give another") from None
        await self._server.start()
        return f"{shown}:{bound}"

    async def stop(self, grace_s: float) -> None:
        """Give calls in flight `grace_s` to finish, and close the socket."""
        await self._server.stop(grace_s)
        self._held.close()


def _handler(verb: Verb, api: object, watchers: Watchers) -> Handler:
    """The handler of a method. It takes bytes: gRPC would report a message that is none as an error of this process."""

    async def answer(raw: bytes, context: Context) -> bytes:
        reply = verb.reply()
        async with _as_codes(verb, context):
            reply = await verb.ask(api, verb.from_wire(raw))
        return reply.SerializeToString()

    async def stream(raw: bytes, context: Context) -> None:
        async with _as_codes(verb, context), contextlib.AsyncExitStack() as stack:
            watching = watchers.watch(**arguments(verb.from_wire(raw)))
            statuses = await stack.enter_async_context(contextlib.aclosing(watching))
            async for status in statuses:
                await write(context.write(status.SerializeToString()))

    if verb.streams:
        return grpc.unary_stream_rpc_method_handler(stream)
    return grpc.unary_unary_rpc_method_handler(answer)


@contextlib.asynccontextmanager
async def _as_codes(verb: Verb, context: Context) -> AsyncIterator[None]:
    """Answer our own errors with a code, by which a client knows what to do."""
    try:
        yield
    except UsageError as error:
        await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error)[:ERROR_CHARACTERS_MAX])
    except (TooManyWatchers, SlowReader) as error:
        await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, str(error))
    except Unavailable as error:
        await context.abort(grpc.StatusCode.UNAVAILABLE, str(error)[:ERROR_CHARACTERS_MAX], ((MARK, "unavailable"),))
    except grpc.aio.BaseError:  # the client is gone
        raise
    except Exception:
        _LOG.exception("the control API's %s failed", verb.name)
        raise


class HealthService(health_pb2_grpc.HealthServicer):
    """The standard health service, https://github.com/grpc/grpc/blob/master/doc/health-checking.md."""

    def __init__(self, watchers: Watchers, ready: Callable[[], bool]) -> None:
        self._watchers = watchers
        self._ready = ready

    def _of(self, service: str) -> Any:
        """The status of a service; None for an unknown one."""
        kinds = health_pb2.HealthCheckResponse
        if service == LIVENESS:
            return kinds.SERVING
        if service in ("", READINESS, *NAMES):
            return kinds.SERVING if self._ready() else kinds.NOT_SERVING
        return None

    async def Check(self, request: health_pb2.HealthCheckRequest, context: Context) -> health_pb2.HealthCheckResponse:
        """The health of a service now; NOT_FOUND for an unknown one."""
        if (status := self._of(request.service)) is None:
            await context.abort(grpc.StatusCode.NOT_FOUND, f"services: {READINESS}, {LIVENESS}")
        return health_pb2.HealthCheckResponse(status=status)

    async def Watch(self, request: health_pb2.HealthCheckRequest, context: Context) -> None:
        """The health of a service now, and whenever it changes."""
        told = None
        try:
            async with contextlib.aclosing(self._watchers.ticks()) as ticks:
                async for _ in ticks:
                    status = self._of(request.service) or health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
                    if status != told:
                        await write(context.write(health_pb2.HealthCheckResponse(status=status)))
                    told = status
        except (TooManyWatchers, SlowReader) as error:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, str(error))


class _TokenGuard(grpc.aio.ServerInterceptor):
    """Refuses a call without `authorization: Bearer TOKEN`, all but Health.Check."""

    def __init__(self, token: str) -> None:
        self._wanted = f"Bearer {token}".encode()

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """The handler of the call, or one that refuses it."""
        details = handler_call_details
        given = next((value for key, value in details.invocation_metadata or () if key == "authorization"), "")
        raw = given if isinstance(given, bytes) else given.encode()
        if hmac.compare_digest(raw, self._wanted) or details.method == f"/{HEALTH}/Check":
            return await continuation(details)
        return grpc.stream_stream_rpc_method_handler(_refuse)  # of any kind: it waits for no message


async def _refuse(messages: object, context: Context) -> None:
    await context.abort(
        grpc.StatusCode.UNAUTHENTICATED,
        "give the token in HOME/control.token as metadata: `authorization: Bearer TOKEN`",
    )
