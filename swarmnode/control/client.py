"""Client of a daemon on this machine: query its status, or make it leave."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import grpc
import grpc.aio
from google.protobuf.message import Message

from swarmnode.control import socket_path
from swarmnode.errors import LocalFault, SwarmnodeError, Unavailable, UsageError
from swarmnode.wire import control_pb2, control_pb2_grpc

TIMEOUT_S = 5.0
"""Timeout of one call. A daemon answers within its loop's lag, a few milliseconds; a swapping machine takes longer."""

OPTIONS = [
    ("grpc.enable_http_proxy", 0),
    ("grpc.max_receive_message_length", 16 << 20),
    ("grpc.default_authority", "localhost"),
]


def status(home: Path, *, timeout_s: float = TIMEOUT_S) -> control_pb2.StatusReply:
    """The status of the daemon of `home`.

    Raises NoDaemon if none answers, NotPermitted if it belongs to another user, Unavailable after `timeout_s`.
    """
    with grpc.insecure_channel(f"unix:{socket_path.find(home)}", options=OPTIONS) as channel:
        stub = control_pb2_grpc.ControlStub(channel)
        try:
            reply: control_pb2.StatusReply = stub.Status(control_pb2.StatusRequest(), timeout=timeout_s)
        except grpc.RpcError as error:
            raise _explain(error, home, timeout_s) from None
    return reply


def leave(home: Path, reason: str, *, timeout_s: float = TIMEOUT_S) -> None:
    """Ask the daemon of `home` to leave in order; return when leaving has begun. Raises as `status`."""
    with grpc.insecure_channel(f"unix:{socket_path.find(home)}", options=OPTIONS) as channel:
        stub = control_pb2_grpc.ControlStub(channel)
        try:
            stub.Leave(control_pb2.LeaveRequest(reason=reason), timeout=timeout_s)
        except grpc.RpcError as error:
            raise _explain(error, home, timeout_s) from None


def drain(home: Path, notice_s: float, reason: str) -> control_pb2.DrainReply:
    """Tell the daemon of `home` that its machine will be taken away in `notice_s`; return the result of its drain.
    Raises as `status`, and Unavailable if it has not left by then."""
    with grpc.insecure_channel(f"unix:{socket_path.find(home)}", options=OPTIONS) as channel:
        stub = control_pb2_grpc.ControlStub(channel)
        request = control_pb2.DrainRequest(notice_s=notice_s, reason=reason)
        try:
            reply: control_pb2.DrainReply = stub.Drain(request, timeout=notice_s + TIMEOUT_S)
        except grpc.RpcError as error:
            raise _explain(error, home, notice_s + TIMEOUT_S) from None
    return reply


def ask(home: Path, method: str, request: Message, *, timeout_s: float = TIMEOUT_S) -> Any:
    """The reply of the daemon of `home` to `method` of the Control service.

    Raises as `status`, UsageError if the daemon rejects the request, Unavailable if it cannot serve it now.
    """
    with grpc.insecure_channel(f"unix:{socket_path.find(home)}", options=OPTIONS) as channel:
        stub = control_pb2_grpc.ControlStub(channel)
        try:
            return getattr(stub, method)(request, timeout=timeout_s)
        except grpc.RpcError as error:
            raise _explain(error, home, timeout_s) from None


class ControlClient:
    """Asynchronous client with `status` and `leave`, over one connection that stays open until `close`."""

    def __init__(self, home: Path) -> None:
        """Raises NoDaemon and NotPermitted as `status`."""
        self._home = home
        self._channel = grpc.aio.insecure_channel(f"unix:{socket_path.find(home)}", options=OPTIONS)
        self._stub = control_pb2_grpc.ControlStub(self._channel)

    async def status(self, *, timeout_s: float = TIMEOUT_S) -> control_pb2.StatusReply:
        try:
            reply: control_pb2.StatusReply = await self._stub.Status(control_pb2.StatusRequest(), timeout=timeout_s)
        except grpc.RpcError as error:
            raise _explain(error, self._home, timeout_s) from None
        return reply

    async def leave(
        self, reason: str, checkpoint: str = "", *, stopping: bool = False, timeout_s: float = TIMEOUT_S
    ) -> None:
        """See `leave`. `checkpoint`: label under which it saves its stage first; `stopping`: the whole run is being
        stopped."""
        request = control_pb2.LeaveRequest(reason=reason, checkpoint=checkpoint, stopping=stopping)
        try:
            await self._stub.Leave(request, timeout=timeout_s)
        except grpc.RpcError as error:
            raise _explain(error, self._home, timeout_s) from None

    async def close(self) -> None:
        await self._channel.close(None)


def _explain(error: grpc.RpcError, home: Path, timeout_s: float) -> SwarmnodeError:
    assert isinstance(error, grpc.Call | grpc.aio.AioRpcError)
    match error.code():
        case grpc.StatusCode.UNAVAILABLE | grpc.StatusCode.CANCELLED:
            return socket_path.no_daemon(home)
        case grpc.StatusCode.DEADLINE_EXCEEDED:
            return Unavailable(f"the daemon at {home} did not answer within {timeout_s:g} s: frozen, or too busy")
        case grpc.StatusCode.INVALID_ARGUMENT:
            return UsageError(error.details() or "the daemon does not accept that")
        case grpc.StatusCode.FAILED_PRECONDITION:
            return Unavailable(error.details() or "not now")
        case grpc.StatusCode.UNIMPLEMENTED:
            return LocalFault(f"the daemon at {home} has another version: restart it")
        case _:
            return LocalFault(f"the daemon at {home} failed: {error.details()}; see its log")
