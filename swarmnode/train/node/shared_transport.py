"""One transport for all members that a machine is in a run: its own node, and a part for each further stage.

A call to a part goes to its machine; the header says which part is called and which one calls. So one key, one port and
one p2pd serve them all, and the stream's key vouches for the caller. A call from one member of this machine to another
is a local one: nothing is copied, encoded or sent.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any

from swarmnode.base.errors import PeerTimeout, Refused, RemoteFault, Unavailable
from swarmnode.base.ids import PeerId, machine_of, part_id, part_of, short, stage_name
from swarmnode.base.ports import Admit, Answer, Call, Handler, Transport
from swarmnode.base.wire import call_pb2 as wire


@dataclass(frozen=True, slots=True)
class _Served:
    handler: Handler
    admit: Admit | None


@dataclass(frozen=True, slots=True)
class _Method:
    """The members that answer calls of the method `name`, by the part that is called."""

    name: str
    members: dict[int, _Served] = field(default_factory=dict)

    def admit(self, machine: PeerId, header: wire.Request) -> None:
        """Check a call from `machine`. Raises Unavailable where no member answers it."""
        served = self.member(header.to_part)
        if served.admit is not None:
            served.admit(_caller(machine, header), header)

    def serve(self, machine: PeerId, call: Call) -> Awaitable[Answer]:
        """The answer to a call from `machine`. Raises Unavailable where no member answers it."""
        return self.member(call.header.to_part).handler(_caller(machine, call.header), call)

    def member(self, part: int) -> _Served:
        """The member that is called as `part`. Raises Unavailable where there is none."""
        served = self.members.get(part)
        if served is None:
            what = f"part for {stage_name(part - 1)}" if part else "node"
            raise Unavailable(f"this machine has no {what} that answers {self.name}")
        return served


def _caller(machine: PeerId, header: wire.Request) -> PeerId:
    """The member of `machine` that calls: its own node, or a part."""
    return part_id(machine, header.from_part - 1) if header.from_part else machine


class SharedTransport:
    """The members of one machine, behind its `transport`. `member` gives the transport of one of them."""

    def __init__(self, transport: Transport) -> None:
        self.transport = transport
        self._methods: dict[str, _Method] = {}

    def member(self, peer: PeerId) -> MemberTransport:
        """The transport of `peer`: this machine, or a part of it."""
        assert machine_of(peer) == self.transport.peer_id, f"{peer} is no part of {self.transport.peer_id}"
        return MemberTransport(self, peer)

    def serve(self, part: int, name: str, served: _Served, tensor_bytes_max: int) -> None:
        """Answer calls of the method `name` to `part`."""
        method = self._methods.get(name)
        if method is None:
            method = self._methods[name] = _Method(name)
            self.transport.serve(name, method.serve, tensor_bytes_max=tensor_bytes_max, admit=method.admit)
        method.members[part] = served

    def withdraw(self, part: int) -> None:
        """Answer no calls to `part` any more."""
        for method in self._methods.values():
            method.members.pop(part, None)

    async def call_here(self, caller: PeerId, callee: PeerId, name: str, call: Call, timeout_s: float) -> Answer:
        """The answer of `callee`, another member of this machine. Raises as ports.Transport's `call`."""
        part = _field(callee)
        try:
            if name == "ping" and any(part in method.members for method in self._methods.values()):
                return Answer(wire.Reply(pong=wire.Pong(payload=call.header.ping.payload)))
            served = self._methods.get(name, _Method(name)).member(part)
            header = wire.Request()
            header.CopyFrom(call.header)
            if served.admit is not None:
                served.admit(caller, header)
            async with asyncio.timeout(timeout_s) as limit:
                return await served.handler(caller, Call(header, call.tensors))
        except TimeoutError:
            if not limit.expired():
                raise
            raise PeerTimeout(f"{short(callee)} did not answer {name} within {timeout_s:.1f} s") from None
        except Refused:
            raise
        except RemoteFault as fault:  # what the other side of a line would say of our request
            raise Refused(f"{short(callee)} refused: {fault}") from None


class MemberTransport:
    """Implements ports.Transport for one member of a machine."""

    def __init__(self, shared: SharedTransport, peer: PeerId) -> None:
        self._shared = shared
        self._transport = shared.transport
        self._peer = peer
        self._part = _field(peer)

    @property
    def peer_id(self) -> PeerId:
        return self._peer

    @property
    def line_queue(self) -> int:
        return self._transport.line_queue

    @property
    def line_bytes_per_s(self) -> float:
        return self._transport.line_bytes_per_s

    async def addresses(self) -> list[str]:
        return await self._transport.addresses()

    def bytes_by_method(self) -> dict[tuple[str, str], int]:
        return self._transport.bytes_by_method()

    async def connect(self, peer: PeerId, addresses: Sequence[str]) -> None:
        if machine_of(peer) != self._transport.peer_id:
            await self._transport.connect(machine_of(peer), addresses)

    def serve(self, method: str, handler: Handler, *, tensor_bytes_max: int, admit: Admit | None = None) -> None:
        self._shared.serve(self._part, method, _Served(handler, admit), tensor_bytes_max)

    def withdraw(self) -> None:
        """Answer no calls to this member any more."""
        self._shared.withdraw(self._part)

    def call(self, peer: PeerId, call: Call, *, timeout_s: float, reply_bytes_max: int) -> Coroutine[Any, Any, Answer]:
        machine = machine_of(peer)
        if machine == self._transport.peer_id and peer != self._peer:
            method = call.header.WhichOneof("body")
            assert method is not None, "a call needs a body"
            return self._shared.call_here(self._peer, peer, method, call, timeout_s)
        call.header.to_part = _field(peer)
        call.header.from_part = self._part
        return self._transport.call(machine, call, timeout_s=timeout_s, reply_bytes_max=reply_bytes_max)


def _field(peer: PeerId) -> int:
    """The number that stands for `peer` in a header: its part's stage + 1, or 0 for a machine's own node."""
    stage = part_of(peer)
    return 0 if stage is None else stage + 1
