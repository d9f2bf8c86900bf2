"""What any member answers before it has a part in training: pings, the run's signed manifest, its guest list."""

from __future__ import annotations

from swarmnode.errors import RemoteFault
from swarmnode.ids import PeerId
from swarmnode.membership.door import Door
from swarmnode.ports import Answer, Call, Transport
from swarmnode.wire import access_pb2, record_pb2
from swarmnode.wire import call_pb2 as wire

PING_BYTES_MAX = 1024


class Greeting:
    """Handlers of "ping", "manifest" and, where there is a door, "guests"."""

    def __init__(self, signed: record_pb2.SignedManifest, door: Door | None = None) -> None:
        self._signed = signed
        self._door = door

    def serve(self, transport: Transport) -> None:
        """Register them."""
        transport.serve("ping", self.ping, tensor_bytes_max=0)
        transport.serve("manifest", self.manifest, tensor_bytes_max=0)
        if self._door is not None:
            transport.serve("guests", self.guests, tensor_bytes_max=0)

    async def ping(self, peer: PeerId, call: Call) -> Answer:
        """Echo. Raises RemoteFault for a payload over PING_BYTES_MAX."""
        payload = call.header.ping.payload
        if len(payload) > PING_BYTES_MAX:
            raise RemoteFault(f"ping of {len(payload)} bytes; at most {PING_BYTES_MAX}")
        return Answer(wire.Reply(pong=wire.Pong(payload=payload)))

    async def manifest(self, peer: PeerId, call: Call) -> Answer:
        """The signed manifest of this run; the asker checks signature and hash."""
        return Answer(wire.Reply(manifest=self._signed))

    async def guests(self, peer: PeerId, call: Call) -> Answer:
        """The owner's guest list, unless the asker has it already."""
        signed = self._door.signed if self._door is not None else None
        if signed is None or self._door is None or self._door.rules.guests.sequence <= call.header.guests.sequence:
            signed = access_pb2.SignedGuestList()
        return Answer(wire.Reply(guests=signed))
