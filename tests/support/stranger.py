"""A peer that is no node: it signs and says whatever a test wants, and answers what the test gives it handlers for."""

import asyncio

from benchmarks.memory_network import MemoryTransport
from swarmnode.base.identity import Identity
from swarmnode.base.ids import PeerId
from swarmnode.base.ports import Call
from swarmnode.base.wire import call_pb2, record_pb2
from swarmnode.train.node.membership_handlers import MembershipHandlers
from tests.support.village import RUN, LoopClock, Village

LIVES_S = 40.0  # of a record; the village's nodes accept ten times their own time to live


class Stranger:
    """One key of an attacker in `v`, with a transport that answers pings."""

    def __init__(self, v: Village, number: int) -> None:
        self.identity = Identity.of_seed(bytes([200, number % 256, number // 256]) + bytes(29))
        self.me: PeerId = self.identity.peer_id
        self.transport = MemoryTransport(v.network, self.me, RUN)
        MembershipHandlers(record_pb2.SignedManifest()).serve(self.transport)
        self._network = v.network
        self._sequence = 0

    def record(self, **fields: object) -> record_pb2.SignedRecord:
        """Signed without our own checks. What is not given is that of an idle replica of stage 0 that serves."""
        self._sequence += 1
        plain: dict[str, object] = {
            "run_id": RUN,
            "peer_id": self.me,
            "sequence": self._sequence,
            "expires_unix_ms": int((LoopClock().unix_s() + LIVES_S) * 1000) + self._sequence,
            "state": record_pb2.NODE_STATE_TRAINING,
            "samples_per_second": 1.0,
            "addresses": ["/ip4/127.0.0.1/tcp/1"],
        }
        return self.signed(record_pb2.Record(**(plain | fields)))  # type: ignore[arg-type]

    def signed(self, record: record_pb2.Record) -> record_pb2.SignedRecord:
        raw = record.SerializeToString(deterministic=True)
        return record_pb2.SignedRecord(record=raw, signature=self.identity.sign(b"swarmnode/record/v1\0" + raw))

    def publish(self, signed: record_pb2.SignedRecord) -> None:
        """Put it where all look, under the stage it names."""
        stage = record_pb2.Record.FromString(signed.record).stage
        self._network.records.setdefault((RUN, stage), {})[self.me] = signed

    async def tell(self, peer: PeerId, signed: record_pb2.SignedRecord) -> None:
        """Let it ride on a ping."""
        header = call_pb2.Request(run_id=RUN, ping=call_pb2.Ping(), record=signed)
        await self.transport.call(peer, Call(header), timeout_s=60.0, reply_bytes_max=0)

    async def say(self, v: Village, **fields: object) -> None:
        """Publish a record and tell it everybody."""
        signed = self.record(**fields)
        self.publish(signed)
        await asyncio.gather(*(self.tell(p.node.me, signed) for p in v.people), return_exceptions=True)


__all__ = ["Stranger"]
