"""Every field of every message from another machine, with its allowed range.

The ranges are what is physically possible: for links, devices, manifests and dates. Checks (`swarmnode.bounds.check`),
docs/wire.md and the fuzzers (tests/support/messages.py) are made from this table. membership/clock.py bounds
values that depend on the run's progress.
"""

from __future__ import annotations

from collections.abc import Mapping

from swarmnode.bounds.bound import Bound, choice, flag, name, number, opaque, part, words
from swarmnode.wire import call_pb2, record_pb2

SAMPLES_MAX = 2**53  # exact as a float64; at a million samples a second, 285 years
STAGES_MAX = 512  # manifest: pipeline.stages
UNIX_S_MAX = 2**33  # the year 2242
SECONDS_MAX = 86_400.0  # manifest: every timeout
SPEED_MAX = 1e9  # guess: samples a second; the smallest model on the largest device does less than a hundredth of it
QUEUE_MAX = 10**6  # guess: manifest, 65,536 microbatches at each of some positions
BPS_MAX = 10**15  # bits a second: ten times what a fibre carries today
NBYTES_MAX = 2**50  # a terabit a second for two hours
TENSOR_NBYTES_MAX = 2**40  # manifest: limits.frame_bytes_max
PARAMETERS_MAX = 2**48  # guess: a model a hundred times the largest today
STRIDE_MAX = 1024  # gossip/round.py; above that, round_samples is set wrongly by orders of magnitude
CHUNKS_MAX = 1 << 14  # transfer/snapshot.py
PEER_MAX = 64  # a base58 Ed25519 peer id has 52 characters
ADDRESS_MAX = 256  # /dns4/<a long name>/tcp/<port>
TIMEOUT_MS_MAX = 3_600_000  # header.py

PEER = name(PEER_MAX, "a base58 peer id has 52 characters")
RUN = name(64, "hex digits of a run id")
ROUND = number(SAMPLES_MAX, "rounds", "a round has a sample at least")
SAMPLES = number(SAMPLES_MAX, "samples", "exact as a float64; at a million a second, 285 years")
STAGE = number(STAGES_MAX - 1, "", "manifest: pipeline.stages")
PLACE = number(STAGES_MAX, "", "manifest: pipeline.stages; that number itself: a feeder without a stage")
STEPS = number(SAMPLES_MAX, "inner steps", "a step has a sample at least")
UNIX_S = number(UNIX_S_MAX, "s", "until the year 2242")
UNIX_MS = number(UNIX_S_MAX * 1000, "ms", "until the year 2242")
SECONDS = number(SECONDS_MAX, "s", "the longest timeout a manifest may have")
TIMEOUT_MS = number(TIMEOUT_MS_MAX, "ms", "nothing waits an hour for one call")
NBYTES = number(NBYTES_MAX, "bytes", "a terabit a second for two hours")
TENSOR_NBYTES = number(TENSOR_NBYTES_MAX, "bytes", "manifest: limits.frame_bytes_max")
COUNT = number(SAMPLES_MAX, "", "what a counter holds exactly as a float64")
QUEUE = number(QUEUE_MAX, "microbatches", "guess: manifest, 65,536 at each of some positions")
LOSS = number(1e15, "nats", "guess: a hundred nats a token over as many tokens as can be")
SPEED = number(SPEED_MAX, "samples/s", "guess: a hundred times the smallest model on the largest device")
BPS = number(BPS_MAX, "bit/s", "ten times what a fibre carries today")
SIGNATURE = opaque(64, "Ed25519")
KEY = opaque(32, "Ed25519")
DIGEST = opaque(32, "SHA-256")
ADDRESS = name(ADDRESS_MAX, "a multiaddr")
SHOWN = words(512, "only shown")
SECTIONS = name(32, "sections of a state", many=8)
TENSORS = part(64, "a call has at most 64 tensors")


def shown(most: float, unit: str) -> Bound:
    """A number that is only displayed: out of range it counts as missing."""
    return Bound(-most, most, unit, "only shown; nothing where out of range", cleaned=True)


RECORD: Mapping[str, Bound] = {
    "Progress.feeders": name(PEER_MAX, "a base58 peer id has 52 characters", many=4096),
    "Progress.samples": number(SAMPLES_MAX, "samples", "exact as a float64", many=4096),
    "Progress.total": SAMPLES,
    "Progress.owed": SAMPLES,
    "Blocks.finished_below": number(SAMPLES_MAX, "blocks", "a block has a sample at least"),
    "Blocks.finished": number(SAMPLES_MAX + 2048, "blocks", "a block has a sample at least", many=1024),
    "Record.run_id": RUN,
    "Record.peer_id": PEER,
    "Record.sequence": COUNT,
    "Record.expires_unix_ms": UNIX_MS,
    "Record.stage": PLACE,
    "Record.state": choice("one that this version does not know counts as paused", record_pb2.NODE_STATE_PAUSED),
    "Record.addresses": name(ADDRESS_MAX, "a multiaddr", many=8),
    "Record.samples_per_second": SPEED,
    "Record.queue": QUEUE,
    "Record.round": ROUND,
    "Record.joined_unix_ms": UNIX_MS,
    "Record.version": name(40, "a version of this program"),
    "Record.progress": part(),
    "Record.blocks": part(),
    "Record.state_digest": DIGEST,
    "Record.boundary_digest": opaque(8, "the first bytes of a digest"),
    "Record.pass": part(),
    "Record.allowance": part(),
    "Record.round_stride": number(STRIDE_MAX, "rounds", "gossip/round.py", step="power of two"),
    "Record.kept_round": ROUND,
    "Record.kept_steps": STEPS,
    "Record.saved_samples": SAMPLES,
    "Record.moving_to": STAGE,
    "Record.saves_checkpoints": flag(),
    "Record.unable": number(
        STAGES_MAX - 1, "", "guess: a node that fits few of more than 64 stages moves to none", many=64
    ),
    "Record.stretch": number(20, "", "membership/record.py: STRETCH_MAX"),
    "Record.data_digest": opaque(8, "the first bytes of a digest"),
    "SignedRecord.record": opaque(1280, "a record is small; checked by itself"),
    "SignedRecord.signature": SIGNATURE,
    "SignedManifest.manifest": opaque(1 << 20, "what a header holds; checked by itself"),
    "SignedManifest.owner": KEY,
    "SignedManifest.signature": SIGNATURE,
    "SignedManifest.amendments": part(64, "guess: the owner's word, of at most 4 KiB each"),
    "Allowance.up_bps": BPS,
    "Allowance.down_bps": BPS,
    "Allowance.pauses_unix_s": UNIX_S,
    "Allowance.resumes_unix_s": UNIX_S,
}

ACCESS: Mapping[str, Bound] = {
    "Grant.delegate": KEY,
    "Grant.expires_unix_s": UNIX_S,
    "Grant.machines_max": number(2**32 - 1, "machines", "the owner's word"),
    "Grant.signature": SIGNATURE,
    "Pass.grant": part(),
    "Pass.expires_unix_s": UNIX_S,
    "Pass.signature": SIGNATURE,
    "Warrant.expires_unix_s": UNIX_S,
    "Warrant.signature": SIGNATURE,
    "AccessList.run_id": RUN,
    "AccessList.sequence": number(2**64 - 1, "", "the owner's word"),
    "AccessList.allowed": name(PEER_MAX, "a base58 peer id has 52 characters", many=10_000),
    "AccessList.banned": name(PEER_MAX, "a base58 peer id has 52 characters", many=10_000),
    "AccessList.least_version": name(40, "a version of this program"),
    "AccessList.revoked": opaque(8, "a grant's name", many=10_000),
    "SignedAccessList.list": opaque(256 << 10, "4,000 peer ids; checked by itself"),
    "SignedAccessList.signature": SIGNATURE,
    "SignedAccessList.amendments": part(64, "guess: the owner's word, of at most 4 KiB each"),
    "Amendment.run_id": RUN,
    "Amendment.serial": number(64, "", "guess: changes of one run"),
    "Amendment.previous": DIGEST,
    "Amendment.from_round": ROUND,
    "Amendment.names": name(64, "a field of the manifest", many=32),
    "Amendment.values": name(4096, "checked as the manifest is", many=32),
    "Amendment.owners": opaque(32, "Ed25519", many=8),
    "SignedAmendment.amendment": opaque(4096, "checked by itself"),
    "SignedAmendment.signature": SIGNATURE,
    "Invite.run_id": DIGEST,
    "Invite.owner": KEY,
    "Invite.meetings": part(64, "guess: bootstraps of one invite"),
    "Invite.grant": part(),
    "Invite.secret": KEY,
    "Invite.pass": part(),
    "Invite.machine": KEY,
    "Meeting.peer": KEY,
    "Meeting.addresses": opaque(ADDRESS_MAX, "an address or host name", many=64),
}

BODIES = (
    "data_chunk",
    *("ping", "process", "exchange", "commit", "snapshot", "chunk", "manifest", "fallback", "reserve", "opening"),
    *("recompute", "suspicion", "accusation", "final_delta", "handover", "access_list", "reach", "receipt", "measure"),
    *("packet_receipt", "report", "table", "records"),
)
ANSWERS = (
    "data_chunk",
    *("pong", "processed", "exchanged", "committed", "snapshot", "chunk", "manifest", "reserved", "opening"),
    *(
        "recompute",
        "suspicion",
        "accusation",
        "final_delta_taken",
        "handed",
        "access_list",
        "reach",
        "receipt",
        "measure",
    ),
    *("packet_receipt", "report", "table", "records"),
)

CALL: Mapping[str, Bound] = {
    "TensorSpec.dtype": name(8, "the longest name of a type"),
    "TensorSpec.shape": number(TENSOR_NBYTES_MAX, "elements", "one of them has a byte at least", many=8),
    "TensorSpec.nbytes": TENSOR_NBYTES,
    "TensorSpec.codec": name(32, "a codec's name"),
    "Request.version": number(2**16, "", "protocol versions"),
    "Request.run_id": RUN,
    "Request.timeout_ms": TIMEOUT_MS,
    "Request.tensors": TENSORS,
    "Request.progress": part(),
    "Request.record": part(),
    **{f"Request.{body}": part() for body in BODIES},
    "Reply.status": choice("one that this version does not know counts as unavailable", call_pb2.STATUS_UNAVAILABLE),
    "Reply.reason": SHOWN,
    "Reply.retry_after_ms": TIMEOUT_MS,
    "Reply.tensors": TENSORS,
    "Reply.progress": part(),
    "Reply.record": part(),
    "Reply.waited_s": SECONDS,
    "Reply.start_anew": flag(),
    **{f"Reply.{body}": part() for body in ANSWERS},
    "Ping.payload": opaque(1024, "echoed"),
    "Pong.payload": opaque(1024, "echoed"),
    "Pong.samples": SAMPLES,
    "Process.microbatch_id": opaque(16, "ids.py"),
    "Process.feeder": PEER,
    "Process.samples": number(2**20, "samples", "manifest: inner.microbatch"),
    "Process.purpose": choice(),
    "Process.itinerary": number(STAGES_MAX - 1, "", "manifest: pipeline.stages", many=STAGES_MAX),
    "Process.position": STAGE,
    "Process.deadline_ms": number(SECONDS_MAX * 1000, "ms", "manifest: limits.microbatch_timeout_s"),
    "Process.boundary_digest": opaque(8, "the first bytes of a digest"),
    "Process.first_sample": SAMPLES,
    "Process.feed_signature": SIGNATURE,
    "Reserve.hold_ms": TIMEOUT_MS,
    "Reserved.granted": flag(),
    "Reserved.ahead": QUEUE,
    "Processed.loss_sum": LOSS,
    "Processed.tokens": number(2**43, "tokens", "manifest: inner.microbatch x model.context"),
    "Processed.path": name(PEER_MAX, "a base58 peer id has 52 characters", many=STAGES_MAX),
    "Processed.retries": number(10**6, "", "guess: one a stage at a time, until the deadline"),
    "Processed.onward_s": SECONDS,
    "Processed.queued_s": number(STAGES_MAX * SECONDS_MAX, "s", "at every stage, the longest timeout"),
    "Processed.received_s": SECONDS,
    "Processed.sent": DIGEST,
    "Processed.got": DIGEST,
    "Processed.signature": SIGNATURE,
    "Processed.inner_steps": STEPS,
    "Statement.run_id": RUN,
    "Statement.microbatch_id": opaque(16, "ids.py"),
    "Statement.stage": STAGE,
    "Statement.position": STAGE,
    "Statement.server": PEER,
    "Statement.client": PEER,
    "Statement.x": DIGEST,
    "Statement.tokens": DIGEST,
    "Statement.gradient": DIGEST,
    "Statement.loss_sum": LOSS,
    "Statement.sent": DIGEST,
    "Statement.got": DIGEST,
    "Statement.signature": SIGNATURE,
    "Statement.inner_steps": STEPS,
    "Opening.microbatch_id": opaque(16, "ids.py"),
    "Opening.position": STAGE,
    "Opened.next": part(),
    "Recompute.stage": PLACE,
    "Recompute.samples": number(2**20, "samples", "manifest: inner.microbatch"),
    "Recompute.boundary_digest": opaque(8, "the first bytes of a digest"),
    "Recompute.first_sample": SAMPLES,
    "Recompute.microbatch_id": opaque(16, "ids.py"),
    "Recompute.position": STAGE,
    "Recomputed.loss_sum": LOSS,
    "Recomputed.signature": SIGNATURE,
    "Recomputed.inner_steps": STEPS,
    "Suspicion.statement": part(),
    "Accusation.statement": part(),
    "Accusation.samples": number(2**20, "samples", "manifest: inner.microbatch"),
    "Accusation.boundary_digest": opaque(8, "the first bytes of a digest"),
    "Accusation.next": part(),
    "Exchange.round": ROUND,
    "Exchange.stage": STAGE,
    "Exchange.samples": SAMPLES,
    "Exchange.newcomer": flag(),
    "Exchanged.round": ROUND,
    "Exchanged.samples": SAMPLES,
    "Exchanged.newcomer": flag(),
    "FallbackRequest.round": ROUND,
    "FallbackRequest.stage": STAGE,
    "TableRequest.round": ROUND,
    "TablePart.round": ROUND,
    "Commit.round": ROUND,
    "Commit.apply": flag(),
    "SnapshotRequest.stage": STAGE,
    "SnapshotRequest.round_min": ROUND,
    "SnapshotRequest.sections": SECTIONS,
    "SnapshotRequest.first": number(PARAMETERS_MAX, "elements", "guess: a model a hundred times the largest today"),
    "SnapshotRequest.count": number(PARAMETERS_MAX, "elements", "guess: a model a hundred times the largest today"),
    "SnapshotRequest.nobody_waits": flag(),
    "SnapshotRequest.warrant": part(),
    "Snapshot.warrant": part(),
    "Snapshot.id": DIGEST,
    "Snapshot.stage": STAGE,
    "Snapshot.round": ROUND,
    "Snapshot.nbytes": NBYTES,
    "Snapshot.chunk_nbytes": number(1 << 24, "bytes", "transfer/snapshot.py"),
    "Snapshot.hashes": opaque(32, "SHA-256", many=CHUNKS_MAX),
    "Snapshot.elements": number(PARAMETERS_MAX, "elements", "guess: a model a hundred times the largest today", many=8),
    "Snapshot.sections": SECTIONS,
    "Snapshot.inner_steps": STEPS,
    "Snapshot.progress": part(),
    "Snapshot.gradient_norm": number(3.5e38, "", "the largest float32"),
    "Snapshot.bump_steps": number(1 << 20, "inner steps", "transfer/snapshot.py"),
    "ChunkRequest.snapshot_id": DIGEST,
    "ChunkRequest.index": number(CHUNKS_MAX - 1, "", "transfer/snapshot.py"),
    "ChunkRequest.stage": STAGE,
    "Chunk.index": number(CHUNKS_MAX - 1, "", "transfer/snapshot.py"),
    "AccessListRequest.sequence": number(2**64 - 1, "", "the owner's word"),
    "AccessListRequest.amendments": number(64, "", "as Amendment.serial"),
    "ReachRequest.addresses": name(ADDRESS_MAX, "a multiaddr", many=4),
    "Reached.reached": name(ADDRESS_MAX, "a multiaddr", many=4),
    "Reached.observed": ADDRESS,
    "Receipt.run_id": RUN,
    "Receipt.server": PEER,
    "Receipt.client": PEER,
    "Receipt.microbatches": SAMPLES,
    "Receipt.samples": SAMPLES,
    "Receipt.from_unix_s": UNIX_S,
    "Receipt.until_unix_s": UNIX_S,
    "Receipt.signature": SIGNATURE,
    "Measure.reply_nbytes": number(1 << 24, "bytes", "guess: a second at 100 Mbit/s; fewer are sent"),
    "PacketReceipt.run_id": RUN,
    "PacketReceipt.stage": STAGE,
    "PacketReceipt.round": ROUND,
    "PacketReceipt.giver": PEER,
    "PacketReceipt.receiver": PEER,
    "PacketReceipt.accepted": flag(),
    "PacketReceipt.keep": number(1.0, "", "a share"),
    "PacketReceipt.step": name(32, "a step of robust.py"),
    "PacketReceipt.reason": name(160, "signed, so it is refused where it is not printable"),
    "PacketReceipt.samples": SAMPLES,
    "PacketReceipt.nbytes": TENSOR_NBYTES,
    "PacketReceipt.signature": SIGNATURE,
    "RecordsRequest.place": PLACE,
    "RecordsRequest.peers": number(2**32 - 1, "", "the first bytes of a digest", many=8192),
    "RecordsRequest.expires_unix_ms": number(UNIX_S_MAX * 1000, "ms", "until the year 2242", many=8192),
    "Records.records": part(256, "transport/record_book.py: as many as one answer holds"),
    "DataChunkRequest.sha256": DIGEST,
    "DataChunkRequest.index": DIGEST,
    "DataChunkRequest.offset": number(1 << 25, "bytes", "data/index.py: the longest index"),
    "DataChunkRequest.nbytes": number(1 << 19, "bytes", "transfer/chunk_server.py: a piece"),
    "DataChunk.nbytes": number(1 << 25, "bytes", "data/index.py: the longest index"),
    "DataChunk.held": opaque(1 << 17, "data/index.py: a million chunks"),
    "FinalDelta.round": ROUND,
    "FinalDelta.stage": STAGE,
    "FinalDelta.codec": name(32, "a codec's name"),
    "FinalDelta.samples": SAMPLES,
    "FinalDeltaTaken.round": ROUND,
    "FinalDeltaTaken.again": flag(),
    "Handover.stage": STAGE,
    "Handed.round": ROUND,
}

REPORT: Mapping[str, Bound] = {
    "ReportRequest.incarnation": COUNT,
    "ReportRequest.events_after": COUNT,
    "ReportRequest.receipts_after": COUNT,
    "ReportRequest.page_port": number(65_535, "", "a TCP port"),
    "LinkReport.peer_id": PEER,
    "LinkReport.sent_nbytes": NBYTES,
    "LinkReport.received_nbytes": NBYTES,
    "LinkReport.latency_s": shown(3600.0, "s"),
    "LinkReport.kind": choice(),
    "EventReport.serial": COUNT,
    "EventReport.unix_ms": UNIX_MS,
    "EventReport.event": name(64, "a name of metrics/event.py"),
    "EventReport.level": name(16, "a level of metrics/event.py"),
    "EventReport.stage": number(STAGES_MAX - 1, "", "manifest: pipeline.stages; -1: none", least=-1),
    "EventReport.fields": words(512, "only shown", many=64),
    "Report.incarnation": COUNT,
    "Report.unix_ms": UNIX_MS,
    "Report.name": words(64, "only shown"),
    "Report.status": part(),
    "Report.links": part(256, "a node tells 64"),
    "Report.events": part(256, "a node tells 64"),
    "Report.receipts": opaque(1024, "a Receipt; checked by itself", many=64),
    "Report.receipts_serial": COUNT,
    "PeerStatus.peer_id": PEER,
    "PeerStatus.stage": STAGE,
    "PeerStatus.state": choice(),
    "PeerStatus.samples_per_second": shown(SPEED_MAX, "samples/s"),
    "PeerStatus.queue": shown(QUEUE_MAX, "microbatches"),
    "PeerStatus.round": shown(SAMPLES_MAX, "rounds"),
    "PeerStatus.latency_s": shown(SECONDS_MAX, "s"),
    "PeerStatus.banned": flag(),
    "StatusReply.run_id": RUN,
    "StatusReply.run_name": words(128, "only shown"),
    "StatusReply.peer_id": PEER,
    "StatusReply.version": words(40, "only shown"),
    "StatusReply.stage": STAGE,
    "StatusReply.stages": number(STAGES_MAX, "", "manifest: pipeline.stages"),
    "StatusReply.state": choice(),
    "StatusReply.uptime_s": shown(UNIX_S_MAX, "s"),
    "StatusReply.samples_total": shown(SAMPLES_MAX, "samples"),
    "StatusReply.tokens_total": shown(2**63, "tokens"),
    "StatusReply.round": shown(SAMPLES_MAX, "rounds"),
    "StatusReply.tokens_per_second": shown(1e15, "tokens/s"),
    "StatusReply.loss_train": shown(SAMPLES_MAX, "nats"),
    "StatusReply.loss_validation": shown(SAMPLES_MAX, "nats"),
    "StatusReply.loss_validation_first": shown(SAMPLES_MAX, "nats"),
    "StatusReply.inner_steps": shown(SAMPLES_MAX, "inner steps"),
    "StatusReply.counters": Bound(
        -(2.0**53), 2.0**53, "each", "only shown; nothing where out of range", 1024, "", True
    ),
    "StatusReply.peers": part(0, "a report has none"),
    "StatusReply.addresses": name(ADDRESS_MAX, "a multiaddr", many=8),
    "StatusReply.metrics_address": words(ADDRESS_MAX, "only shown"),
    "StatusReply.resident_nbytes": shown(NBYTES_MAX, "bytes"),
    "StatusReply.loss_validation_samples": shown(SAMPLES_MAX, "samples"),
    "StatusReply.limits": part(),
    "StatusReply.home": words(4096, "only shown"),
    "StatusReply.trains_nothing": flag(),
    "StatusReply.tokens_given": shown(2**63, "tokens"),
    "StatusReply.page": words(ADDRESS_MAX, "only shown"),
    "StatusReply.clock": SHOWN,
    "StatusReply.amendments": words(512, "only shown", many=64),
    "StatusReply.least_version": words(40, "only shown"),
    "LimitsReply.limits": words(512, "only shown", many=64),
    "LimitsReply.running": flag(),
    "LimitsReply.reason": SHOWN,
    "LimitsReply.until_s": shown(UNIX_S_MAX, "s"),
    "LimitsReply.quota_used_nbytes": shown(NBYTES_MAX, "bytes"),
    "LimitsReply.up_bps": shown(BPS_MAX, "bit/s"),
    "LimitsReply.down_bps": shown(BPS_MAX, "bit/s"),
    "LimitsReply.temperature_c": shown(1000.0, "degrees Celsius"),
}

FIELDS: Mapping[str, Bound] = {**RECORD, **ACCESS, **CALL, **REPORT}
