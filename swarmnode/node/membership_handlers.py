"""Handlers that every member serves before it takes part in training: pings, the signed manifest, the access list."""

from __future__ import annotations

from collections.abc import Callable

from swarmnode.errors import RemoteFault
from swarmnode.ids import PeerId
from swarmnode.membership.admission import Admission
from swarmnode.ports import Answer, Call, Transport
from swarmnode.wire import call_pb2 as wire
from swarmnode.wire import record_pb2

PING_BYTES_MAX = 1024


class MembershipHandlers:
    """Handlers of "ping", "manifest" and, where there is a door, "access_list"."""

    def __init__(
        self,
        signed: record_pb2.SignedManifest,
        admission: Admission | None = None,
        samples: Callable[[], int] = lambda: 0,
    ) -> None:
        """`samples` of the run, as far as this node knows from earlier."""
        self._signed = signed
        self._admission = admission
        self._samples = samples

    def serve(self, transport: Transport) -> None:
        """Register them."""
        transport.serve("ping", self.ping, tensor_bytes_max=0)
        transport.serve("manifest", self.manifest, tensor_bytes_max=0)
        if self._admission is not None:
            transport.serve("access_list", self.access_list, tensor_bytes_max=0)

    async def ping(self, peer: PeerId, call: Call) -> Answer:
        """Echo, and tell how far the run was known to be. Raises RemoteFault for a payload over PING_BYTES_MAX."""
        payload = call.header.ping.payload
        if len(payload) > PING_BYTES_MAX:
            raise RemoteFault(f"ping of {len(payload)} bytes; at most {PING_BYTES_MAX}")
        return Answer(wire.Reply(pong=wire.Pong(payload=payload, samples=self._samples())))

    async def manifest(self, peer: PeerId, call: Call) -> Answer:
        """The signed manifest of this run; the asker checks signature and hash."""
        signed = record_pb2.SignedManifest()
        signed.CopyFrom(self._signed)
        if self._admission is not None and self._admission.amendments is not None:
            del signed.amendments[:]
            signed.amendments.extend(self._admission.amendments.signed)
        return Answer(wire.Reply(manifest=signed))

    async def access_list(self, peer: PeerId, call: Call) -> Answer:
        """The owner's access list and amendments, as far as the asker has not them already."""
        assert self._admission is not None
        asked = call.header.access_list
        return Answer(wire.Reply(access_list=self._admission.news(asked.sequence, asked.amendments)))
