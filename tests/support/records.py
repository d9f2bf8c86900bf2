"""Records that nodes announce, and members as a router knows them, made by hand."""

import itertools

from swarmnode.base.identity import Identity
from swarmnode.base.ids import PeerId
from swarmnode.base.wire import record_pb2
from swarmnode.net.membership.record import sign_record
from swarmnode.net.membership.swarm import Member
from tests.support.village import RUN, LoopClock

ME = Identity.of_seed(bytes([7] * 32))
OTHER = Identity.of_seed(bytes([8] * 32))
SEQUENCE = itertools.count(1)


def resigned(record: record_pb2.Record, identity: Identity = ME) -> record_pb2.SignedRecord:
    """Signed without our own checks: what a dishonest node sends."""
    raw = record.SerializeToString()
    return record_pb2.SignedRecord(record=raw, signature=identity.sign(b"swarmnode/record/v1\0" + raw))


def record(identity: Identity, stage: int, speed: float = 10.0) -> record_pb2.SignedRecord:
    """What a key says of itself: nobody has seen it work."""
    return sign_record(
        record_pb2.Record(
            run_id=RUN,
            peer_id=identity.peer_id,
            sequence=next(SEQUENCE),
            expires_unix_ms=int((LoopClock().unix_s() + 4.0) * 1000),
            stage=stage,
            state=record_pb2.NODE_STATE_TRAINING,
            addresses=["/dns/nowhere/tcp/1"],
            samples_per_second=speed,
            round_stride=1,
            joined_unix_ms=int(LoopClock().unix_s() * 1000),
            version="0.1.0",
        ),
        identity,
    )


def member(name: str, sequence: int = 1, samples_per_second: float = 0.0) -> Member:
    return Member(
        peer=PeerId(name),
        stage=1,
        state=record_pb2.NODE_STATE_TRAINING,
        sequence=sequence,
        expires_unix_s=1e12,
        samples_per_second=samples_per_second,
        queue=0,
        round_index=0,
    )
