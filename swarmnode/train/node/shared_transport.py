"""One transport for all members that a machine is in a run: its own node, and a part for each further stage.

A call to a part goes to its machine; the header says which part is called and which one calls. So one key, one port and
one p2pd serve them all, and the stream's key vouches for the caller. A call from one member of this machine to another
is a local one: nothing is copied, encoded or sent.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from swarmnode.base.errors import PeerTimeout, Refused, RemoteFault, Unavailable
from swarmnode.base.ids import PeerId, machine_of, part_id, part_of, short, stage_name
from swarmnode.base.ports import Admit, Answer, Call, Handler, Transport
from swarmnode.base.wire import call_pb2 as wire


@dataclass(frozen=True, slots=True)
class _Served:
    handler: Handler
    admit: Admit | None


class SharedTransport:
    """The members of one machine, behind its `transport`. `member` gives the transport of one of them."""

    def __init__(self, transport: Transport) -> None:
        self.transport = transport
        self._served: dict[str, dict[int, _Served]] = {}  # by method, then by the part that is called

    def member(self, peer: PeerId) -> MemberTransport:
        """The transport of `peer`: this machine, or a part of it."""
        assert machine_of(peer) == self.transport.peer_id, f"{peer} is no part of {self.transport.peer_id}"
        return MemberTransport(self, peer)

    def serve(self, part: int, method: str, served: _Served, tensor_bytes_max: int) -> None:
        """Answer calls of `method` to `part`."""
        known = self._served.get(method)
        if known is None:
            known = self._served[method] = {}
            admit = partial(_admit, known, method)
            self.transport.serve(method, partial(_serve, known, method), tensor_bytes_max=tensor_bytes_max, admit=admit)
        known[part] = served

    def withdraw(self, part: int) -> None:
        """Answer no calls to `part` any more."""
        for known in self._served.values():
            known.pop(part, None)

    async def call_here(self, caller: PeerId, callee: PeerId, method: str, call: Call, timeout_s: float) -> Answer:
        """The answer of `callee`, another member of this machine. Raises as ports.Transport's `call`."""
        try:
            if method == "ping" and any(_field(callee) in known for known in self._served.values()):
                return Answer(wire.Reply(pong=wire.Pong(payload=call.header.ping.payload)))
            served = self._served.get(method, {}).get(_field(callee))
            if served is None:
                raise _nobody(method, _field(callee))
            header = wire.Request()
            header.CopyFrom(call.header)
            if served.admit is not None:
                served.admit(caller, header)
            async with asyncio.timeout(timeout_s) as limit:
                return await served.handler(caller, Call(header, call.tensors))
        except TimeoutError:
            if not limit.expired():
                raise
            raise PeerTimeout(f"{short(callee)} did not answer {method} within {timeout_s:.1f} s") from None
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


def _caller(machine: PeerId, header: wire.Request) -> PeerId:
    """The part of `machine` that calls."""
    return part_id(machine, header.from_part - 1)


def _nobody(method: str, part: int) -> Unavailable:
    what = f"part for {stage_name(part - 1)}" if part else "node"
    return Unavailable(f"this machine has no {what} that answers {method}")


def _admit(known: Mapping[int, _Served], method: str, machine: PeerId, header: wire.Request) -> None:
    """Check the call of a member among the `known`, by part. Raises Unavailable where there is none."""
    served = known.get(header.to_part)
    if served is None:
        raise _nobody(method, header.to_part)
    if served.admit is not None:
        served.admit(_caller(machine, header) if header.from_part else machine, header)


def _serve(known: Mapping[int, _Served], method: str, machine: PeerId, call: Call) -> Awaitable[Answer]:
    """The answer of a member among the `known`, by part. Raises Unavailable where there is none."""
    served = known.get(call.header.to_part)
    if served is None:
        raise _nobody(method, call.header.to_part)
    return served.handler(_caller(machine, call.header) if call.header.from_part else machine, call)
