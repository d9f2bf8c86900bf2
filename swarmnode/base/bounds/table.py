"""Every field of every message from another machine, with its allowed range.

The ranges are what is physically possible: for links, devices, manifests and dates. Checks
(`swarmnode.base.bounds.check`), docs/wire.md and the fuzzers (tests/support/messages.py) are made from this table.
net/membership/clock.py bounds values that depend on the run's progress. A field has the range of BY_FIELD, else that of
numbers that are only shown, that of BY_NAME, that of its type; without any the import of this module fails.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from google.protobuf.descriptor import FieldDescriptor

from swarmnode.base.bounds.bound import Bound, choice, flag, name, number, opaque, part, words
from swarmnode.base.wire import access_pb2, call_pb2, record_pb2, report_pb2

SAMPLES_MAX = 2**53  # exact as a float64; at a million samples a second, 285 years
STAGES_MAX = 512  # manifest: pipeline.stages
UNIX_S_MAX = 2**33  # the year 2242
SECONDS_MAX = 86_400.0  # manifest: every timeout
SPEED_MAX = 1e9  # as SPEED
QUEUE_MAX = 10**6  # as QUEUE
BPS_MAX = 10**15  # bits a second: ten times what a fibre carries today
NBYTES_MAX = 2**50  # a terabit a second for two hours
TENSOR_NBYTES_MAX = 2**40  # manifest: limits.frame_bytes_max
STRIDE_MAX = 1024  # train/gossip/round.py; above that, round_samples is set wrongly by orders of magnitude
CHUNKS_MAX = 1 << 14  # keep/transfer/snapshot.py
PEER_MAX = 64  # a base58 Ed25519 peer id has 52 characters
ADDRESS_MAX = 256  # /dns4/<a long name>/tcp/<port>
TIMEOUT_MS_MAX = 3_600_000  # header.py
SEQUENCE_MAX = 2**32  # an owner makes lists by hand
WATTS_MAX = 10_000
RIVALS_MAX = 4  # run/admission/amendment.py

MEMBERS_MAX = 1024  # guess: members of a stage that average gradients together; the words of a round grow with them
WORD_NBYTES_MAX = 384  # train/gossip/butterfly/word.py: a commit and its signature

ELEMENTS_MAX = NBYTES_MAX // 4
ELEMENTS_WHY = "float32 numbers in as many bytes as can be moved"

PEER = name(PEER_MAX, "a base58 peer id has 52 characters")
RUN = name(64, "hex digits of a run id")
ROUND = number(SAMPLES_MAX, "rounds", "a round has a sample at least")
SAMPLES = number(SAMPLES_MAX, "samples", "exact as a float64; at a million a second, 285 years")
TOKENS = number(SAMPLES_MAX, "tokens", "exact as a float64; at a million a second, 285 years")
STAGE = number(STAGES_MAX - 1, "", "manifest: pipeline.stages")
GIVEN_STAGE = number(2 * STAGES_MAX - 1, "", "manifest: pipeline.stages; from 512 on: as they were cut before")
PLACE = number(STAGES_MAX, "", "manifest: pipeline.stages; that number itself: an older version's node that only feeds")
STEPS = number(SAMPLES_MAX, "inner steps", "a step has a sample at least")
UNIX_S = number(UNIX_S_MAX, "s", "until the year 2242")
UNIX_MS = number(UNIX_S_MAX * 1000, "ms", "until the year 2242")
SECONDS = number(SECONDS_MAX, "s", "the longest timeout a manifest may have")
TIMEOUT_MS = number(TIMEOUT_MS_MAX, "ms", "nothing waits an hour for one call")
NBYTES = number(NBYTES_MAX, "bytes", "a terabit a second for two hours")
TENSOR_NBYTES = number(TENSOR_NBYTES_MAX, "bytes", "manifest: limits.frame_bytes_max")
COUNT = number(SAMPLES_MAX, "", "what a counter holds exactly as a float64")
QUEUE = number(QUEUE_MAX, "microbatches", "manifest: 65,536 at each position")
LOSS = number(1e15, "nats", "guess: a hundred nats a token over as many tokens as can be")
SPEED = number(SPEED_MAX, "samples/s", "guess: a hundred times the smallest model on the largest device")
BPS = number(BPS_MAX, "bit/s", "ten times what a fibre carries today")
SIGNATURE = opaque(64, "Ed25519")
KEY = opaque(32, "Ed25519")
DIGEST = opaque(32, "SHA-256")
SHORT_DIGEST = opaque(16, "train/gossip/butterfly/word.py")
PIECE_DIGESTS = opaque(16 * 64, "a packet has at most 64 pieces")
PIECE_LENGTHS = opaque(4 * 64, "a packet has at most 64 pieces")
MEMBER_BITS = opaque(MEMBERS_MAX // 8, "a bit a member")
ADDRESS = name(ADDRESS_MAX, "a multiaddr")
SHOWN = words(512, "only shown")
SECTIONS = name(32, "sections of a state", many=8)
ELEMENTS = number(ELEMENTS_MAX, "elements", ELEMENTS_WHY)
AMENDMENT = number(64, "", "run/admission/amendment.py: AMENDMENTS_MAX")
TENSORS = part(64, "a call has at most 64 tensors")


def shown(most: float, unit: str) -> Bound:
    """A number that is only displayed: out of range it counts as missing."""
    return Bound(-most, most, unit, "only shown; nothing where out of range", cleaned=True)


ONLY_SHOWN = (
    "StatusReply",
    "LimitsReply",
    "PeerStatus",
    "WorkReport",
    "Wait",
)  # their numbers, but for the stage, decide nothing
NUMBERS = (FieldDescriptor.TYPE_DOUBLE, FieldDescriptor.TYPE_UINT64, FieldDescriptor.TYPE_UINT32)

BY_NAME: Mapping[str, Bound] = {
    "samples": SAMPLES,
    "run_id": RUN,
    "peer_id": PEER,
    "sequence": COUNT,
    "stage": STAGE,
    "addresses": name(ADDRESS_MAX, "a multiaddr", many=8),
    "round": ROUND,
    "boundary_digest": opaque(8, "the first bytes of a digest"),
    "signature": SIGNATURE,
    "nbytes": TENSOR_NBYTES,
    "codec": name(32, "a codec's name"),
    "tensors": TENSORS,
    "microbatch_id": opaque(16, "ids.py"),
    "position": STAGE,
    "sections": SECTIONS,
    "index": number(CHUNKS_MAX - 1, "", "keep/transfer/snapshot.py"),
    "server": PEER,
    "client": PEER,
    "loss_sum": LOSS,
    "sent": DIGEST,
    "got": DIGEST,
    "mark": opaque(8, "the first bytes of a digest"),
    "reason": SHOWN,
    "incarnation": COUNT,
    "watts": number(WATTS_MAX, "W", "guess: a machine of eight cards takes 10 kW"),
    "unix_ms": UNIX_MS,
    "unix_s": UNIX_S,
    "bps": BPS,
    "ms": TIMEOUT_MS,
    "s": SECONDS,
    "after": COUNT,
    "serial": COUNT,
    "digest": DIGEST,
    "total": SAMPLES,
    "steps": STEPS,
    "sample": SAMPLES,
    "queue": QUEUE,
    "second": SPEED,
}
"""Of fields whose name ends with these words."""

BY_FIELD: Mapping[str, Bound] = {
    "Progress.feeders": name(PEER_MAX, "a base58 peer id has 52 characters", many=4096),
    "Progress.samples": number(SAMPLES_MAX, "samples", "exact as a float64", many=4096),
    "Progress.owed": SAMPLES,
    "Blocks.finished_below": number(SAMPLES_MAX, "blocks", "a block has a sample at least"),
    "Blocks.finished": number(SAMPLES_MAX + 2048, "blocks", "a block has a sample at least", many=1024),
    "Record.stage": PLACE,
    "Record.state": choice("one that this version does not know counts as paused", record_pb2.NODE_STATE_PAUSED),
    "Record.version": name(40, "a version of this program"),
    "Record.round_stride": number(STRIDE_MAX, "rounds", "train/gossip/round.py", step="power of two"),
    "Record.moving_to": STAGE,
    "Record.unable": number(
        STAGES_MAX - 1, "", "guess: a node that fits few of more than 64 stages moves to none", many=64
    ),
    "Record.span": number(STAGES_MAX, "stages", "manifest: pipeline.stages"),
    "Request.to_part": number(STAGES_MAX, "", "a stage and 1"),
    "Request.from_part": number(STAGES_MAX, "", "a stage and 1"),
    "Record.stretch": number(20, "", "net/membership/record.py: STRETCH_MAX"),
    "Record.data_digest": opaque(8, "the first bytes of a digest"),
    "SignedRecord.record": opaque(1280, "a record is small; checked by itself"),
    "SignedManifest.manifest": opaque(1 << 20, "what a header holds; checked by itself"),
    "SignedManifest.owner": KEY,
    "SignedManifest.amendments": part(64, "run/admission/amendment.py: AMENDMENTS_MAX, of at most 4 KiB each"),
    "Grant.delegate": KEY,
    "Grant.amendment": AMENDMENT,
    "Warrant.amendment": AMENDMENT,
    "Grant.machines_max": number(2**32 - 1, "machines", "the owner's word"),
    "AccessList.sequence": number(SEQUENCE_MAX, "", "run/admission/access.py: grows by SEQUENCE_STEP_MAX at most"),
    "AccessList.amendment": AMENDMENT,
    "AccessList.allowed": name(PEER_MAX, "a base58 peer id has 52 characters", many=10_000),
    "AccessList.banned": name(PEER_MAX, "a base58 peer id has 52 characters", many=10_000),
    "AccessList.least_version": name(40, "a version of this program"),
    "AccessList.revoked": opaque(8, "a grant's name", many=10_000),
    "SignedAccessList.list": opaque(256 << 10, "4,000 peer ids; checked by itself"),
    "SignedAccessList.rivals": part(
        2 * RIVALS_MAX, "run/admission/amendment.py: RIVALS_MAX and those here, of at most 4 KiB each"
    ),
    "SignedAccessList.amendments": part(64, "run/admission/amendment.py: AMENDMENTS_MAX, of at most 4 KiB each"),
    "Amendment.serial": number(64, "", "run/admission/amendment.py: AMENDMENTS_MAX"),
    "Amendment.previous": DIGEST,
    "Amendment.names": name(64, "a field of the manifest", many=32),
    "Amendment.values": name(4096, "checked as the manifest is", many=32),
    "Amendment.owners": opaque(32, "Ed25519", many=8),
    "Amendment.living": opaque(8, "a mark of a grant or warrant", many=256),
    "SignedAmendment.amendment": opaque(4096, "checked by itself"),
    "Invite.run_id": DIGEST,
    "Invite.owner": KEY,
    "Invite.meetings": part(64, "guess: bootstraps of one invite"),
    "Invite.secret": KEY,
    "Invite.machine": KEY,
    "Invite.amendment": AMENDMENT,
    "Invite.head": DIGEST,
    "Meeting.peer": KEY,
    "Meeting.addresses": opaque(ADDRESS_MAX, "an address or host name", many=64),
    "TensorSpec.dtype": name(8, "the longest name of a type"),
    "TensorSpec.shape": number(TENSOR_NBYTES_MAX, "elements", "one of them has a byte at least", many=8),
    "Request.version": number(2**16, "", "protocol versions"),
    "Reply.status": choice("one that this version does not know counts as unavailable", call_pb2.STATUS_UNAVAILABLE),
    "Ping.payload": opaque(1024, "echoed"),
    "Pong.payload": opaque(1024, "echoed"),
    "Process.feeder": PEER,
    "Process.samples": number(2**20, "samples", "manifest: inner.microbatch"),
    "Process.itinerary": number(STAGES_MAX - 1, "", "manifest: pipeline.stages", many=STAGES_MAX),
    "Process.deadline_ms": number(SECONDS_MAX * 1000, "ms", "manifest: limits.microbatch_timeout_s"),
    "Process.step": ROUND,
    "StepEnd.step": ROUND,
    "Reserved.ahead": QUEUE,
    "Processed.tokens": number(2**43, "tokens", "manifest: inner.microbatch x model.context"),
    "Processed.path": name(PEER_MAX, "a base58 peer id has 52 characters", many=STAGES_MAX),
    "Processed.retries": number(10**6, "", "guess: one a stage at a time, until the deadline"),
    "Processed.queued_s": number(STAGES_MAX * SECONDS_MAX, "s", "at every stage, the longest timeout"),
    "Statement.x": DIGEST,
    "Statement.tokens": DIGEST,
    "Statement.gradient": DIGEST,
    "Recompute.stage": STAGE,
    "Recompute.samples": number(2**20, "samples", "manifest: inner.microbatch"),
    "Accusation.samples": number(2**20, "samples", "manifest: inner.microbatch"),
    "SnapshotRequest.stage": GIVEN_STAGE,
    "SnapshotRequest.round_min": ROUND,
    "SnapshotRequest.first": ELEMENTS,
    "SnapshotRequest.count": ELEMENTS,
    "Snapshot.stage": GIVEN_STAGE,
    "Snapshot.id": DIGEST,
    "Snapshot.nbytes": NBYTES,
    "Snapshot.chunk_nbytes": number(1 << 24, "bytes", "keep/transfer/snapshot.py"),
    "Snapshot.hashes": opaque(32, "SHA-256", many=CHUNKS_MAX),
    "Snapshot.elements": number(ELEMENTS_MAX, "elements", ELEMENTS_WHY, many=8),
    "Snapshot.gradient_norm": number(3.5e38, "", "the largest float32"),
    "Snapshot.bump_steps": number(1 << 20, "inner steps", "keep/transfer/snapshot.py"),
    "ChunkRequest.stage": GIVEN_STAGE,
    "ChunkRequest.snapshot_id": DIGEST,
    "AccessListRequest.sequence": number(SEQUENCE_MAX, "", "as AccessList.sequence"),
    "AccessListRequest.head": DIGEST,
    "AccessListRequest.list_digest": opaque(8, "the first bytes of a digest"),
    "AccessListRequest.rivals": number(RIVALS_MAX, "", "run/admission/amendment.py: RIVALS_MAX"),
    "AccessListRequest.amendments": number(64, "", "as Amendment.serial"),
    "ReachRequest.addresses": name(ADDRESS_MAX, "a multiaddr", many=4),
    "Reached.reached": name(ADDRESS_MAX, "a multiaddr", many=4),
    "Reached.observed": ADDRESS,
    "Receipt.microbatches": SAMPLES,
    "Receipt.tokens": TOKENS,
    "Receipt.targets": TOKENS,
    "Measure.reply_nbytes": number(1 << 20, "bytes", "net/transport/capacity.py: SIZES"),
    "PacketReceipt.giver": PEER,
    "PacketReceipt.receiver": PEER,
    "PacketReceipt.keep": number(1.0, "", "a share"),
    "PacketReceipt.step": name(32, "a step of robust.py"),
    "PacketReceipt.reason": name(160, "signed, so it is refused where it is not printable"),
    "SignedWord.word": opaque(MEMBERS_MAX * WORD_NBYTES_MAX, "a roster has a commit a member; checked by itself"),
    "RoundWord.member": PEER,
    "PacketCommit.pieces": SHORT_DIGEST,
    "PacketCommit.before": SHORT_DIGEST,
    "PacketCommit.length": number(3.5e38, "", "the largest float32"),
    "PacketCommit.targets": TOKENS,
    "Roster.attempt": number(MEMBERS_MAX, "", "a member each"),
    "Roster.commits": opaque(WORD_NBYTES_MAX, "a SignedWord; checked by itself", many=MEMBERS_MAX),
    "Roster.owners": MEMBER_BITS,
    "Roster.elsewhere": MEMBER_BITS,
    "PieceMeans.roster": SHORT_DIGEST,
    "PieceMeans.means": SHORT_DIGEST,
    "PieceMeans.taken": MEMBER_BITS,
    "PieceMeans.agreements": opaque(4 * MEMBERS_MAX, "a float32 a member"),
    "RoundClose.roster": SHORT_DIGEST,
    "RoundClose.means": opaque(16 * MEMBERS_MAX, "a digest a member"),
    "RoundHold.close": SHORT_DIGEST,
    "GivenPieces.roster": SHORT_DIGEST,
    "GivenPieces.digests": PIECE_DIGESTS,
    "GivenPieces.lengths": PIECE_LENGTHS,
    "GivenMeans.digests": PIECE_DIGESTS,
    "PieceRequest.owner": PEER,
    "PieceRequest.pieces": number(63, "", "a packet has at most 64 pieces", many=64),
    "FalseMean.digests": PIECE_DIGESTS,
    "FalseMean.piece": number(63, "", "a packet has at most 64 pieces"),
    "FalseMean.sizes": number(TENSOR_NBYTES_MAX, "bytes", "manifest: limits.frame_bytes_max", many=MEMBERS_MAX + 1),
    "FalseMean.lists": opaque(20 * 64, "a digest and a length of each of 64 pieces", many=MEMBERS_MAX),
    "ButterflyAnswer.digests": PIECE_DIGESTS,
    "ButterflyAnswer.lengths": PIECE_LENGTHS,
    "ButterflyAnswer.holds": part(MEMBERS_MAX, "a hold a member"),
    "RecordsRequest.place": PLACE,
    "RecordsRequest.peers": number(2**32 - 1, "", "the first bytes of a digest", many=8192),
    "RecordsRequest.expires_unix_ms": number(UNIX_S_MAX * 1000, "ms", "until the year 2242", many=8192),
    "RecordsRequest.most": number(256, "records", "net/transport/record_book.py: as many as one answer holds"),
    "Silence.peer": PEER,
    "Silence.hops": number(8, "", "train/node/failure_detector.py: HOPS_MAX"),
    "Records.records": part(256, "net/transport/record_book.py: as many as one answer holds"),
    "DataChunkRequest.sha256": DIGEST,
    "DataChunkRequest.index": DIGEST,
    "DataChunkRequest.offset": number(1 << 25, "bytes", "data/index.py: the longest index"),
    "DataChunkRequest.nbytes": number(1 << 19, "bytes", "keep/transfer/chunk_set.py: a piece"),
    "DataChunk.nbytes": number(1 << 25, "bytes", "data/index.py: the longest index"),
    "DataChunk.held": opaque(1 << 17, "data/index.py: a million chunks"),
    "ReportRequest.page_port": number(65_535, "", "a TCP port"),
    "LinkReport.sent_nbytes": NBYTES,
    "LinkReport.received_nbytes": NBYTES,
    "LinkReport.latency_s": shown(3600.0, "s"),
    "EventReport.event": name(64, "a name of base/metrics/event.py"),
    "EventReport.level": name(16, "a level of base/metrics/event.py"),
    "EventReport.stage": number(STAGES_MAX - 1, "", "manifest: pipeline.stages; -1: none", least=-1),
    "EventReport.fields": words(512, "only shown", many=64),
    "Report.name": words(64, "only shown"),
    "Report.links": part(256, "a node tells 64"),
    "Report.events": part(256, "a node tells 64"),
    "Report.receipts": opaque(1024, "a Receipt; checked by itself", many=64),
    "StatusReply.run_name": words(128, "only shown"),
    "StatusReply.version": words(40, "only shown"),
    "StatusReply.stages": number(STAGES_MAX, "", "manifest: pipeline.stages"),
    "StatusReply.counters": Bound(
        -(2.0**53), 2.0**53, "each", "only shown; nothing where out of range", 1024, "", True
    ),
    "StatusReply.peers": part(0, "a report has none"),
    "StatusReply.metrics_address": words(ADDRESS_MAX, "only shown"),
    "StatusReply.home": words(4096, "only shown"),
    "StatusReply.page": words(ADDRESS_MAX, "only shown"),
    "StatusReply.clock": SHOWN,
    "StatusReply.amendments": words(512, "only shown", many=64),
    "StatusReply.least_version": words(40, "only shown"),
    "StatusReply.waits": part(32, "train/node/waiting.py: each cause once"),
    "Wait.cause": words(40, "only shown"),
    "Wait.says": SHOWN,
    "Wait.can_do": SHOWN,
    "LimitsReply.limits": words(512, "only shown", many=64),
}


def _bound(message: str, field: FieldDescriptor) -> Bound:
    if (bound := BY_FIELD.get(f"{message}.{field.name}")) is not None:
        return bound
    if message in ONLY_SHOWN and field.type in NUMBERS and field.name != "stage":
        return shown(2**31 if field.type == FieldDescriptor.TYPE_UINT32 else 2**53, "")
    words_of_name = field.name.split("_")
    for first in range(len(words_of_name)):
        if (bound := BY_NAME.get("_".join(words_of_name[first:]))) is not None:
            return bound
    assert not field.is_repeated, f"{message}.{field.name} has no bound in this table"
    if field.type == FieldDescriptor.TYPE_BOOL:
        return flag()
    assert field.message_type is not None or field.enum_type is not None, f"{message}.{field.name} has no bound"
    return part() if field.enum_type is None else choice()


def _fields() -> Iterator[tuple[str, Bound]]:
    for file in (record_pb2, access_pb2, call_pb2, report_pb2):
        for message, descriptor in file.DESCRIPTOR.message_types_by_name.items():
            for field in descriptor.fields:
                yield f"{message}.{field.name}", _bound(message, field)


FIELDS: Mapping[str, Bound] = dict(_fields())
