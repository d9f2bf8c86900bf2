"""Asking a daemon on this machine: what it does, or to leave."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import grpc
import grpc.aio
from google.protobuf.message import Message

from swarmnode.control import address
from swarmnode.errors import LocalFault, SwarmnodeError, Unavailable, UsageError
from swarmnode.wire import control_pb2, control_pb2_grpc

TIMEOUT_S = 5.0
"""For one call. A daemon answers within its loop's lag, a few milliseconds; a machine that is swapping takes longer."""

OPTIONS = [
    ("grpc.enable_http_proxy", 0),
    ("grpc.max_receive_message_length", 16 << 20),
    ("grpc.default_authority", "localhost"),
]


def status(home: Path, *, timeout_s: float = TIMEOUT_S) -> control_pb2.StatusReply:
    """What the daemon of `home` says of itself.

    Raises NoDaemon when none answers, NotPermitted when it is another user's, Unavailable after `timeout_s`."""
    with grpc.insecure_channel(f"unix:{address.find(home)}", options=OPTIONS) as channel:
        stub = control_pb2_grpc.ControlStub(channel)
        try:
            reply: control_pb2.StatusReply = stub.Status(control_pb2.StatusRequest(), timeout=timeout_s)
        except grpc.RpcError as error:
            raise _explain(error, home, timeout_s) from None
    return reply


def leave(home: Path, reason: str, *, timeout_s: float = TIMEOUT_S) -> None:
    """Ask the daemon of `home` to leave cleanly; returns when leaving has begun. Raises as `status` does."""
    with grpc.insecure_channel(f"unix:{address.find(home)}", options=OPTIONS) as channel:
        stub = control_pb2_grpc.ControlStub(channel)
        try:
            stub.Leave(control_pb2.LeaveRequest(reason=reason), timeout=timeout_s)
        except grpc.RpcError as error:
            raise _explain(error, home, timeout_s) from None


def drain(home: Path, notice_s: float, reason: str) -> control_pb2.DrainReply:
    """Tell the daemon of `home` that its machine will be taken away in `notice_s`; returns how it left. Raises as
    `status` does, Unavailable when it has not left by then."""
    with grpc.insecure_channel(f"unix:{address.find(home)}", options=OPTIONS) as channel:
        stub = control_pb2_grpc.ControlStub(channel)
        request = control_pb2.DrainRequest(notice_s=notice_s, reason=reason)
        try:
            reply: control_pb2.DrainReply = stub.Drain(request, timeout=notice_s + TIMEOUT_S)
        except grpc.RpcError as error:
            raise _explain(error, home, notice_s + TIMEOUT_S) from None
    return reply


def ask(home: Path, method: str, request: Message, *, timeout_s: float = TIMEOUT_S) -> Any:
    """The daemon of `home`'s reply to `method` of the Control service.

    Raises as `status` does, UsageError for a request the daemon does not accept, Unavailable for one it cannot serve
    now.
    """
    with grpc.insecure_channel(f"unix:{address.find(home)}", options=OPTIONS) as channel:
        stub = control_pb2_grpc.ControlStub(channel)
        try:
            return getattr(stub, method)(request, timeout=timeout_s)
        except grpc.RpcError as error:
            raise _explain(error, home, timeout_s) from None


class ControlClient:
    """The same two calls from an event loop, over one connection that is kept until `close`."""

    def __init__(self, home: Path) -> None:
        """Raises NoDaemon and NotPermitted as `status` does."""
        self._home = home
        self._channel = grpc.aio.insecure_channel(f"unix:{address.find(home)}", options=OPTIONS)
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
        """As above; `checkpoint` is the label under which it saves its stage before it goes; `stopping`: so does the
        whole run."""
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
            return address.no_daemon(home)
        case grpc.StatusCode.DEADLINE_EXCEEDED:
            return Unavailable(f"the daemon at {home} did not answer within {timeout_s:g} s: frozen, or too busy")
        case grpc.StatusCode.INVALID_ARGUMENT:
            return UsageError(error.details() or "the daemon does not accept that")
        case grpc.StatusCode.FAILED_PRECONDITION:
            return Unavailable(error.details() or "not now")
        case grpc.StatusCode.UNIMPLEMENTED:
            return LocalFault(f"the daemon at {home} is another version: restart it")
        case _:
            return LocalFault(f"the daemon at {home} failed: {error.details()}; its log says more")
