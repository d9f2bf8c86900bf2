"""What any member answers before it has a part in training: pings, and the run's signed manifest."""

from __future__ import annotations

from swarmnode.errors import RemoteFault
from swarmnode.ids import PeerId
from swarmnode.ports import Answer, Call, Transport
from swarmnode.wire import call_pb2 as wire
from swarmnode.wire import record_pb2

PING_BYTES_MAX = 1024


class Greeting:
    """Handlers of "ping" and "manifest"."""

    def __init__(self, signed: record_pb2.SignedManifest) -> None:
        self._signed = signed

    def serve(self, transport: Transport) -> None:
        """Register both."""
        transport.serve("ping", self.ping, tensor_bytes_max=0)
        transport.serve("manifest", self.manifest, tensor_bytes_max=0)

    async def ping(self, peer: PeerId, call: Call) -> Answer:
        """Echo. Raises RemoteFault for a payload over PING_BYTES_MAX."""
        payload = call.header.ping.payload
        if len(payload) > PING_BYTES_MAX:
            raise RemoteFault(f"ping of {len(payload)} bytes; at most {PING_BYTES_MAX}")
        return Answer(wire.Reply(pong=wire.Pong(payload=payload)))

    async def manifest(self, peer: PeerId, call: Call) -> Answer:
        """The signed manifest of this run; the asker checks signature and hash."""
        return Answer(wire.Reply(manifest=self._signed))
