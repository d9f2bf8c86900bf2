from swarmnode.base.wire import access_pb2 as _access_pb2
from swarmnode.base.wire import record_pb2 as _record_pb2
from swarmnode.base.wire import report_pb2 as _report_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Status(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    STATUS_UNSPECIFIED: _ClassVar[Status]
    STATUS_OK: _ClassVar[Status]
    STATUS_BUSY: _ClassVar[Status]
    STATUS_UNAVAILABLE: _ClassVar[Status]
    STATUS_REFUSED: _ClassVar[Status]
    STATUS_FAULT: _ClassVar[Status]
    STATUS_FORBIDDEN: _ClassVar[Status]

class Purpose(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    PURPOSE_UNSPECIFIED: _ClassVar[Purpose]
    PURPOSE_TRAIN: _ClassVar[Purpose]
    PURPOSE_VALIDATE: _ClassVar[Purpose]
STATUS_UNSPECIFIED: Status
STATUS_OK: Status
STATUS_BUSY: Status
STATUS_UNAVAILABLE: Status
STATUS_REFUSED: Status
STATUS_FAULT: Status
STATUS_FORBIDDEN: Status
PURPOSE_UNSPECIFIED: Purpose
PURPOSE_TRAIN: Purpose
PURPOSE_VALIDATE: Purpose

class TensorSpec(_message.Message):
    __slots__ = ("dtype", "shape", "nbytes", "codec")
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    NBYTES_FIELD_NUMBER: _ClassVar[int]
    CODEC_FIELD_NUMBER: _ClassVar[int]
    dtype: str
    shape: _containers.RepeatedScalarFieldContainer[int]
    nbytes: int
    codec: str
    def __init__(self, dtype: _Optional[str] = ..., shape: _Optional[_Iterable[int]] = ..., nbytes: _Optional[int] = ..., codec: _Optional[str] = ...) -> None: ...

class Request(_message.Message):
    __slots__ = ("version", "run_id", "timeout_ms", "tensors", "progress", "record", "both_ways", "to_part", "from_part", "ping", "process", "exchange", "commit", "snapshot", "chunk", "manifest", "fallback", "reserve", "opening", "recompute", "accusation", "final_delta", "handover", "access_list", "reach", "receipt", "measure", "packet_receipt", "step_end", "butterfly", "data_chunk", "table", "report", "records", "silence")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_MS_FIELD_NUMBER: _ClassVar[int]
    TENSORS_FIELD_NUMBER: _ClassVar[int]
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    RECORD_FIELD_NUMBER: _ClassVar[int]
    BOTH_WAYS_FIELD_NUMBER: _ClassVar[int]
    TO_PART_FIELD_NUMBER: _ClassVar[int]
    FROM_PART_FIELD_NUMBER: _ClassVar[int]
    PING_FIELD_NUMBER: _ClassVar[int]
    PROCESS_FIELD_NUMBER: _ClassVar[int]
    EXCHANGE_FIELD_NUMBER: _ClassVar[int]
    COMMIT_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    MANIFEST_FIELD_NUMBER: _ClassVar[int]
    FALLBACK_FIELD_NUMBER: _ClassVar[int]
    RESERVE_FIELD_NUMBER: _ClassVar[int]
    OPENING_FIELD_NUMBER: _ClassVar[int]
    RECOMPUTE_FIELD_NUMBER: _ClassVar[int]
    ACCUSATION_FIELD_NUMBER: _ClassVar[int]
    FINAL_DELTA_FIELD_NUMBER: _ClassVar[int]
    HANDOVER_FIELD_NUMBER: _ClassVar[int]
    ACCESS_LIST_FIELD_NUMBER: _ClassVar[int]
    REACH_FIELD_NUMBER: _ClassVar[int]
    RECEIPT_FIELD_NUMBER: _ClassVar[int]
    MEASURE_FIELD_NUMBER: _ClassVar[int]
    PACKET_RECEIPT_FIELD_NUMBER: _ClassVar[int]
    STEP_END_FIELD_NUMBER: _ClassVar[int]
    BUTTERFLY_FIELD_NUMBER: _ClassVar[int]
    DATA_CHUNK_FIELD_NUMBER: _ClassVar[int]
    TABLE_FIELD_NUMBER: _ClassVar[int]
    REPORT_FIELD_NUMBER: _ClassVar[int]
    RECORDS_FIELD_NUMBER: _ClassVar[int]
    SILENCE_FIELD_NUMBER: _ClassVar[int]
    version: int
    run_id: str
    timeout_ms: int
    tensors: _containers.RepeatedCompositeFieldContainer[TensorSpec]
    progress: _record_pb2.Progress
    record: _record_pb2.SignedRecord
    both_ways: bool
    to_part: int
    from_part: int
    ping: Ping
    process: Process
    exchange: Exchange
    commit: Commit
    snapshot: SnapshotRequest
    chunk: ChunkRequest
    manifest: ManifestRequest
    fallback: FallbackRequest
    reserve: Reserve
    opening: Opening
    recompute: Recompute
    accusation: Accusation
    final_delta: FinalDelta
    handover: Handover
    access_list: AccessListRequest
    reach: ReachRequest
    receipt: ReceiptRequest
    measure: Measure
    packet_receipt: PacketReceipt
    step_end: StepEnd
    butterfly: Butterfly
    data_chunk: DataChunkRequest
    table: TableRequest
    report: _report_pb2.ReportRequest
    records: RecordsRequest
    silence: Silence
    def __init__(self, version: _Optional[int] = ..., run_id: _Optional[str] = ..., timeout_ms: _Optional[int] = ..., tensors: _Optional[_Iterable[_Union[TensorSpec, _Mapping]]] = ..., progress: _Optional[_Union[_record_pb2.Progress, _Mapping]] = ..., record: _Optional[_Union[_record_pb2.SignedRecord, _Mapping]] = ..., both_ways: _Optional[bool] = ..., to_part: _Optional[int] = ..., from_part: _Optional[int] = ..., ping: _Optional[_Union[Ping, _Mapping]] = ..., process: _Optional[_Union[Process, _Mapping]] = ..., exchange: _Optional[_Union[Exchange, _Mapping]] = ..., commit: _Optional[_Union[Commit, _Mapping]] = ..., snapshot: _Optional[_Union[SnapshotRequest, _Mapping]] = ..., chunk: _Optional[_Union[ChunkRequest, _Mapping]] = ..., manifest: _Optional[_Union[ManifestRequest, _Mapping]] = ..., fallback: _Optional[_Union[FallbackRequest, _Mapping]] = ..., reserve: _Optional[_Union[Reserve, _Mapping]] = ..., opening: _Optional[_Union[Opening, _Mapping]] = ..., recompute: _Optional[_Union[Recompute, _Mapping]] = ..., accusation: _Optional[_Union[Accusation, _Mapping]] = ..., final_delta: _Optional[_Union[FinalDelta, _Mapping]] = ..., handover: _Optional[_Union[Handover, _Mapping]] = ..., access_list: _Optional[_Union[AccessListRequest, _Mapping]] = ..., reach: _Optional[_Union[ReachRequest, _Mapping]] = ..., receipt: _Optional[_Union[ReceiptRequest, _Mapping]] = ..., measure: _Optional[_Union[Measure, _Mapping]] = ..., packet_receipt: _Optional[_Union[PacketReceipt, _Mapping]] = ..., step_end: _Optional[_Union[StepEnd, _Mapping]] = ..., butterfly: _Optional[_Union[Butterfly, _Mapping]] = ..., data_chunk: _Optional[_Union[DataChunkRequest, _Mapping]] = ..., table: _Optional[_Union[TableRequest, _Mapping]] = ..., report: _Optional[_Union[_report_pb2.ReportRequest, _Mapping]] = ..., records: _Optional[_Union[RecordsRequest, _Mapping]] = ..., silence: _Optional[_Union[Silence, _Mapping]] = ...) -> None: ...

class Reply(_message.Message):
    __slots__ = ("status", "reason", "retry_after_ms", "tensors", "progress", "record", "waited_s", "start_anew", "pong", "processed", "exchanged", "committed", "snapshot", "chunk", "manifest", "reserved", "opening", "recompute", "accusation", "final_delta_taken", "handed", "access_list", "reach", "receipt", "measure", "packet_receipt", "step_end", "butterfly", "data_chunk", "table", "report", "records")
    STATUS_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    RETRY_AFTER_MS_FIELD_NUMBER: _ClassVar[int]
    TENSORS_FIELD_NUMBER: _ClassVar[int]
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    RECORD_FIELD_NUMBER: _ClassVar[int]
    WAITED_S_FIELD_NUMBER: _ClassVar[int]
    START_ANEW_FIELD_NUMBER: _ClassVar[int]
    PONG_FIELD_NUMBER: _ClassVar[int]
    PROCESSED_FIELD_NUMBER: _ClassVar[int]
    EXCHANGED_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    MANIFEST_FIELD_NUMBER: _ClassVar[int]
    RESERVED_FIELD_NUMBER: _ClassVar[int]
    OPENING_FIELD_NUMBER: _ClassVar[int]
    RECOMPUTE_FIELD_NUMBER: _ClassVar[int]
    ACCUSATION_FIELD_NUMBER: _ClassVar[int]
    FINAL_DELTA_TAKEN_FIELD_NUMBER: _ClassVar[int]
    HANDED_FIELD_NUMBER: _ClassVar[int]
    ACCESS_LIST_FIELD_NUMBER: _ClassVar[int]
    REACH_FIELD_NUMBER: _ClassVar[int]
    RECEIPT_FIELD_NUMBER: _ClassVar[int]
    MEASURE_FIELD_NUMBER: _ClassVar[int]
    PACKET_RECEIPT_FIELD_NUMBER: _ClassVar[int]
    STEP_END_FIELD_NUMBER: _ClassVar[int]
    BUTTERFLY_FIELD_NUMBER: _ClassVar[int]
    DATA_CHUNK_FIELD_NUMBER: _ClassVar[int]
    TABLE_FIELD_NUMBER: _ClassVar[int]
    REPORT_FIELD_NUMBER: _ClassVar[int]
    RECORDS_FIELD_NUMBER: _ClassVar[int]
    status: Status
    reason: str
    retry_after_ms: int
    tensors: _containers.RepeatedCompositeFieldContainer[TensorSpec]
    progress: _record_pb2.Progress
    record: _record_pb2.SignedRecord
    waited_s: float
    start_anew: bool
    pong: Pong
    processed: Processed
    exchanged: Exchanged
    committed: Committed
    snapshot: Snapshot
    chunk: Chunk
    manifest: _record_pb2.SignedManifest
    reserved: Reserved
    opening: Opened
    recompute: Recomputed
    accusation: AccusationTaken
    final_delta_taken: FinalDeltaTaken
    handed: Handed
    access_list: _access_pb2.SignedAccessList
    reach: Reached
    receipt: Receipt
    measure: Measured
    packet_receipt: PacketReceiptTaken
    step_end: StepEndTaken
    butterfly: ButterflyAnswer
    data_chunk: DataChunk
    table: TablePart
    report: _report_pb2.Report
    records: Records
    def __init__(self, status: _Optional[_Union[Status, str]] = ..., reason: _Optional[str] = ..., retry_after_ms: _Optional[int] = ..., tensors: _Optional[_Iterable[_Union[TensorSpec, _Mapping]]] = ..., progress: _Optional[_Union[_record_pb2.Progress, _Mapping]] = ..., record: _Optional[_Union[_record_pb2.SignedRecord, _Mapping]] = ..., waited_s: _Optional[float] = ..., start_anew: _Optional[bool] = ..., pong: _Optional[_Union[Pong, _Mapping]] = ..., processed: _Optional[_Union[Processed, _Mapping]] = ..., exchanged: _Optional[_Union[Exchanged, _Mapping]] = ..., committed: _Optional[_Union[Committed, _Mapping]] = ..., snapshot: _Optional[_Union[Snapshot, _Mapping]] = ..., chunk: _Optional[_Union[Chunk, _Mapping]] = ..., manifest: _Optional[_Union[_record_pb2.SignedManifest, _Mapping]] = ..., reserved: _Optional[_Union[Reserved, _Mapping]] = ..., opening: _Optional[_Union[Opened, _Mapping]] = ..., recompute: _Optional[_Union[Recomputed, _Mapping]] = ..., accusation: _Optional[_Union[AccusationTaken, _Mapping]] = ..., final_delta_taken: _Optional[_Union[FinalDeltaTaken, _Mapping]] = ..., handed: _Optional[_Union[Handed, _Mapping]] = ..., access_list: _Optional[_Union[_access_pb2.SignedAccessList, _Mapping]] = ..., reach: _Optional[_Union[Reached, _Mapping]] = ..., receipt: _Optional[_Union[Receipt, _Mapping]] = ..., measure: _Optional[_Union[Measured, _Mapping]] = ..., packet_receipt: _Optional[_Union[PacketReceiptTaken, _Mapping]] = ..., step_end: _Optional[_Union[StepEndTaken, _Mapping]] = ..., butterfly: _Optional[_Union[ButterflyAnswer, _Mapping]] = ..., data_chunk: _Optional[_Union[DataChunk, _Mapping]] = ..., table: _Optional[_Union[TablePart, _Mapping]] = ..., report: _Optional[_Union[_report_pb2.Report, _Mapping]] = ..., records: _Optional[_Union[Records, _Mapping]] = ...) -> None: ...

class RecordsRequest(_message.Message):
    __slots__ = ("place", "peers", "expires_unix_ms", "announces", "most")
    PLACE_FIELD_NUMBER: _ClassVar[int]
    PEERS_FIELD_NUMBER: _ClassVar[int]
    EXPIRES_UNIX_MS_FIELD_NUMBER: _ClassVar[int]
    ANNOUNCES_FIELD_NUMBER: _ClassVar[int]
    MOST_FIELD_NUMBER: _ClassVar[int]
    place: int
    peers: _containers.RepeatedScalarFieldContainer[int]
    expires_unix_ms: _containers.RepeatedScalarFieldContainer[int]
    announces: bool
    most: int
    def __init__(self, place: _Optional[int] = ..., peers: _Optional[_Iterable[int]] = ..., expires_unix_ms: _Optional[_Iterable[int]] = ..., announces: _Optional[bool] = ..., most: _Optional[int] = ...) -> None: ...

class Records(_message.Message):
    __slots__ = ("records", "kept", "unix_ms")
    RECORDS_FIELD_NUMBER: _ClassVar[int]
    KEPT_FIELD_NUMBER: _ClassVar[int]
    UNIX_MS_FIELD_NUMBER: _ClassVar[int]
    records: _containers.RepeatedCompositeFieldContainer[_record_pb2.SignedRecord]
    kept: bool
    unix_ms: int
    def __init__(self, records: _Optional[_Iterable[_Union[_record_pb2.SignedRecord, _Mapping]]] = ..., kept: _Optional[bool] = ..., unix_ms: _Optional[int] = ...) -> None: ...

class Silence(_message.Message):
    __slots__ = ("peer", "hops")
    PEER_FIELD_NUMBER: _ClassVar[int]
    HOPS_FIELD_NUMBER: _ClassVar[int]
    peer: str
    hops: int
    def __init__(self, peer: _Optional[str] = ..., hops: _Optional[int] = ...) -> None: ...

class Ping(_message.Message):
    __slots__ = ("payload",)
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    payload: bytes
    def __init__(self, payload: _Optional[bytes] = ...) -> None: ...

class Pong(_message.Message):
    __slots__ = ("payload", "samples")
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    payload: bytes
    samples: int
    def __init__(self, payload: _Optional[bytes] = ..., samples: _Optional[int] = ...) -> None: ...

class Process(_message.Message):
    __slots__ = ("microbatch_id", "feeder", "samples", "purpose", "itinerary", "position", "deadline_ms", "boundary_digest", "first_sample", "feed_signature", "mark_position", "inner_steps", "mark", "step")
    MICROBATCH_ID_FIELD_NUMBER: _ClassVar[int]
    FEEDER_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    PURPOSE_FIELD_NUMBER: _ClassVar[int]
    ITINERARY_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_MS_FIELD_NUMBER: _ClassVar[int]
    BOUNDARY_DIGEST_FIELD_NUMBER: _ClassVar[int]
    FIRST_SAMPLE_FIELD_NUMBER: _ClassVar[int]
    FEED_SIGNATURE_FIELD_NUMBER: _ClassVar[int]
    MARK_POSITION_FIELD_NUMBER: _ClassVar[int]
    INNER_STEPS_FIELD_NUMBER: _ClassVar[int]
    MARK_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    microbatch_id: bytes
    feeder: str
    samples: int
    purpose: Purpose
    itinerary: _containers.RepeatedScalarFieldContainer[int]
    position: int
    deadline_ms: int
    boundary_digest: bytes
    first_sample: int
    feed_signature: bytes
    mark_position: int
    inner_steps: int
    mark: bytes
    step: int
    def __init__(self, microbatch_id: _Optional[bytes] = ..., feeder: _Optional[str] = ..., samples: _Optional[int] = ..., purpose: _Optional[_Union[Purpose, str]] = ..., itinerary: _Optional[_Iterable[int]] = ..., position: _Optional[int] = ..., deadline_ms: _Optional[int] = ..., boundary_digest: _Optional[bytes] = ..., first_sample: _Optional[int] = ..., feed_signature: _Optional[bytes] = ..., mark_position: _Optional[int] = ..., inner_steps: _Optional[int] = ..., mark: _Optional[bytes] = ..., step: _Optional[int] = ...) -> None: ...

class StepEnd(_message.Message):
    __slots__ = ("step",)
    STEP_FIELD_NUMBER: _ClassVar[int]
    step: int
    def __init__(self, step: _Optional[int] = ...) -> None: ...

class StepEndTaken(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Reserve(_message.Message):
    __slots__ = ("hold_ms",)
    HOLD_MS_FIELD_NUMBER: _ClassVar[int]
    hold_ms: int
    def __init__(self, hold_ms: _Optional[int] = ...) -> None: ...

class Reserved(_message.Message):
    __slots__ = ("granted", "ahead")
    GRANTED_FIELD_NUMBER: _ClassVar[int]
    AHEAD_FIELD_NUMBER: _ClassVar[int]
    granted: bool
    ahead: int
    def __init__(self, granted: _Optional[bool] = ..., ahead: _Optional[int] = ...) -> None: ...

class Processed(_message.Message):
    __slots__ = ("loss_sum", "tokens", "path", "retries", "onward_s", "queued_s", "received_s", "sent", "got", "signature", "inner_steps", "mark")
    LOSS_SUM_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    RETRIES_FIELD_NUMBER: _ClassVar[int]
    ONWARD_S_FIELD_NUMBER: _ClassVar[int]
    QUEUED_S_FIELD_NUMBER: _ClassVar[int]
    RECEIVED_S_FIELD_NUMBER: _ClassVar[int]
    SENT_FIELD_NUMBER: _ClassVar[int]
    GOT_FIELD_NUMBER: _ClassVar[int]
    SIGNATURE_FIELD_NUMBER: _ClassVar[int]
    INNER_STEPS_FIELD_NUMBER: _ClassVar[int]
    MARK_FIELD_NUMBER: _ClassVar[int]
    loss_sum: float
    tokens: int
    path: _containers.RepeatedScalarFieldContainer[str]
    retries: int
    onward_s: float
    queued_s: float
    received_s: float
    sent: bytes
    got: bytes
    signature: bytes
    inner_steps: int
    mark: bytes
    def __init__(self, loss_sum: _Optional[float] = ..., tokens: _Optional[int] = ..., path: _Optional[_Iterable[str]] = ..., retries: _Optional[int] = ..., onward_s: _Optional[float] = ..., queued_s: _Optional[float] = ..., received_s: _Optional[float] = ..., sent: _Optional[bytes] = ..., got: _Optional[bytes] = ..., signature: _Optional[bytes] = ..., inner_steps: _Optional[int] = ..., mark: _Optional[bytes] = ...) -> None: ...

class Statement(_message.Message):
    __slots__ = ("run_id", "microbatch_id", "stage", "position", "server", "client", "x", "tokens", "gradient", "loss_sum", "sent", "got", "signature", "inner_steps", "mark")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    MICROBATCH_ID_FIELD_NUMBER: _ClassVar[int]
    STAGE_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    SERVER_FIELD_NUMBER: _ClassVar[int]
    CLIENT_FIELD_NUMBER: _ClassVar[int]
    X_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    GRADIENT_FIELD_NUMBER: _ClassVar[int]
    LOSS_SUM_FIELD_NUMBER: _ClassVar[int]
    SENT_FIELD_NUMBER: _ClassVar[int]
    GOT_FIELD_NUMBER: _ClassVar[int]
    SIGNATURE_FIELD_NUMBER: _ClassVar[int]
    INNER_STEPS_FIELD_NUMBER: _ClassVar[int]
    MARK_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    microbatch_id: bytes
    stage: int
    position: int
    server: str
    client: str
    x: bytes
    tokens: bytes
    gradient: bytes
    loss_sum: float
    sent: bytes
    got: bytes
    signature: bytes
    inner_steps: int
    mark: bytes
    def __init__(self, run_id: _Optional[str] = ..., microbatch_id: _Optional[bytes] = ..., stage: _Optional[int] = ..., position: _Optional[int] = ..., server: _Optional[str] = ..., client: _Optional[str] = ..., x: _Optional[bytes] = ..., tokens: _Optional[bytes] = ..., gradient: _Optional[bytes] = ..., loss_sum: _Optional[float] = ..., sent: _Optional[bytes] = ..., got: _Optional[bytes] = ..., signature: _Optional[bytes] = ..., inner_steps: _Optional[int] = ..., mark: _Optional[bytes] = ...) -> None: ...

class Opening(_message.Message):
    __slots__ = ("microbatch_id", "position")
    MICROBATCH_ID_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    microbatch_id: bytes
    position: int
    def __init__(self, microbatch_id: _Optional[bytes] = ..., position: _Optional[int] = ...) -> None: ...

class Opened(_message.Message):
    __slots__ = ("next",)
    NEXT_FIELD_NUMBER: _ClassVar[int]
    next: Statement
    def __init__(self, next: _Optional[_Union[Statement, _Mapping]] = ...) -> None: ...

class Recompute(_message.Message):
    __slots__ = ("stage", "samples", "boundary_digest", "first_sample", "microbatch_id", "position", "marks")
    STAGE_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    BOUNDARY_DIGEST_FIELD_NUMBER: _ClassVar[int]
    FIRST_SAMPLE_FIELD_NUMBER: _ClassVar[int]
    MICROBATCH_ID_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    MARKS_FIELD_NUMBER: _ClassVar[int]
    stage: int
    samples: int
    boundary_digest: bytes
    first_sample: int
    microbatch_id: bytes
    position: int
    marks: bool
    def __init__(self, stage: _Optional[int] = ..., samples: _Optional[int] = ..., boundary_digest: _Optional[bytes] = ..., first_sample: _Optional[int] = ..., microbatch_id: _Optional[bytes] = ..., position: _Optional[int] = ..., marks: _Optional[bool] = ...) -> None: ...

class Recomputed(_message.Message):
    __slots__ = ("loss_sum", "signature", "inner_steps", "mark")
    LOSS_SUM_FIELD_NUMBER: _ClassVar[int]
    SIGNATURE_FIELD_NUMBER: _ClassVar[int]
    INNER_STEPS_FIELD_NUMBER: _ClassVar[int]
    MARK_FIELD_NUMBER: _ClassVar[int]
    loss_sum: float
    signature: bytes
    inner_steps: int
    mark: bytes
    def __init__(self, loss_sum: _Optional[float] = ..., signature: _Optional[bytes] = ..., inner_steps: _Optional[int] = ..., mark: _Optional[bytes] = ...) -> None: ...

class Accusation(_message.Message):
    __slots__ = ("statement", "samples", "boundary_digest", "next")
    STATEMENT_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    BOUNDARY_DIGEST_FIELD_NUMBER: _ClassVar[int]
    NEXT_FIELD_NUMBER: _ClassVar[int]
    statement: Statement
    samples: int
    boundary_digest: bytes
    next: Statement
    def __init__(self, statement: _Optional[_Union[Statement, _Mapping]] = ..., samples: _Optional[int] = ..., boundary_digest: _Optional[bytes] = ..., next: _Optional[_Union[Statement, _Mapping]] = ...) -> None: ...

class AccusationTaken(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Exchange(_message.Message):
    __slots__ = ("round", "stage", "samples", "newcomer")
    ROUND_FIELD_NUMBER: _ClassVar[int]
    STAGE_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    NEWCOMER_FIELD_NUMBER: _ClassVar[int]
    round: int
    stage: int
    samples: int
    newcomer: bool
    def __init__(self, round: _Optional[int] = ..., stage: _Optional[int] = ..., samples: _Optional[int] = ..., newcomer: _Optional[bool] = ...) -> None: ...

class Exchanged(_message.Message):
    __slots__ = ("round", "samples", "newcomer", "held_s")
    ROUND_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    NEWCOMER_FIELD_NUMBER: _ClassVar[int]
    HELD_S_FIELD_NUMBER: _ClassVar[int]
    round: int
    samples: int
    newcomer: bool
    held_s: float
    def __init__(self, round: _Optional[int] = ..., samples: _Optional[int] = ..., newcomer: _Optional[bool] = ..., held_s: _Optional[float] = ...) -> None: ...

class FallbackRequest(_message.Message):
    __slots__ = ("round", "stage")
    ROUND_FIELD_NUMBER: _ClassVar[int]
    STAGE_FIELD_NUMBER: _ClassVar[int]
    round: int
    stage: int
    def __init__(self, round: _Optional[int] = ..., stage: _Optional[int] = ...) -> None: ...

class TableRequest(_message.Message):
    __slots__ = ("round",)
    ROUND_FIELD_NUMBER: _ClassVar[int]
    round: int
    def __init__(self, round: _Optional[int] = ...) -> None: ...

class TablePart(_message.Message):
    __slots__ = ("round",)
    ROUND_FIELD_NUMBER: _ClassVar[int]
    round: int
    def __init__(self, round: _Optional[int] = ...) -> None: ...

class Commit(_message.Message):
    __slots__ = ("round", "apply")
    ROUND_FIELD_NUMBER: _ClassVar[int]
    APPLY_FIELD_NUMBER: _ClassVar[int]
    round: int
    apply: bool
    def __init__(self, round: _Optional[int] = ..., apply: _Optional[bool] = ...) -> None: ...

class Committed(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class SnapshotRequest(_message.Message):
    __slots__ = ("stage", "round_min", "sections", "first", "count", "nobody_waits", "warrant")
    STAGE_FIELD_NUMBER: _ClassVar[int]
    ROUND_MIN_FIELD_NUMBER: _ClassVar[int]
    SECTIONS_FIELD_NUMBER: _ClassVar[int]
    FIRST_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    NOBODY_WAITS_FIELD_NUMBER: _ClassVar[int]
    WARRANT_FIELD_NUMBER: _ClassVar[int]
    stage: int
    round_min: int
    sections: _containers.RepeatedScalarFieldContainer[str]
    first: int
    count: int
    nobody_waits: bool
    warrant: _access_pb2.Warrant
    def __init__(self, stage: _Optional[int] = ..., round_min: _Optional[int] = ..., sections: _Optional[_Iterable[str]] = ..., first: _Optional[int] = ..., count: _Optional[int] = ..., nobody_waits: _Optional[bool] = ..., warrant: _Optional[_Union[_access_pb2.Warrant, _Mapping]] = ...) -> None: ...

class Snapshot(_message.Message):
    __slots__ = ("id", "stage", "round", "nbytes", "chunk_nbytes", "hashes", "elements", "sections", "inner_steps", "progress", "gradient_norm", "bump_steps", "warrant", "lost_samples", "lost_at_samples")
    ID_FIELD_NUMBER: _ClassVar[int]
    STAGE_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    NBYTES_FIELD_NUMBER: _ClassVar[int]
    CHUNK_NBYTES_FIELD_NUMBER: _ClassVar[int]
    HASHES_FIELD_NUMBER: _ClassVar[int]
    ELEMENTS_FIELD_NUMBER: _ClassVar[int]
    SECTIONS_FIELD_NUMBER: _ClassVar[int]
    INNER_STEPS_FIELD_NUMBER: _ClassVar[int]
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    GRADIENT_NORM_FIELD_NUMBER: _ClassVar[int]
    BUMP_STEPS_FIELD_NUMBER: _ClassVar[int]
    WARRANT_FIELD_NUMBER: _ClassVar[int]
    LOST_SAMPLES_FIELD_NUMBER: _ClassVar[int]
    LOST_AT_SAMPLES_FIELD_NUMBER: _ClassVar[int]
    id: bytes
    stage: int
    round: int
    nbytes: int
    chunk_nbytes: int
    hashes: _containers.RepeatedScalarFieldContainer[bytes]
    elements: _containers.RepeatedScalarFieldContainer[int]
    sections: _containers.RepeatedScalarFieldContainer[str]
    inner_steps: int
    progress: _record_pb2.Progress
    gradient_norm: float
    bump_steps: int
    warrant: _access_pb2.Warrant
    lost_samples: int
    lost_at_samples: int
    def __init__(self, id: _Optional[bytes] = ..., stage: _Optional[int] = ..., round: _Optional[int] = ..., nbytes: _Optional[int] = ..., chunk_nbytes: _Optional[int] = ..., hashes: _Optional[_Iterable[bytes]] = ..., elements: _Optional[_Iterable[int]] = ..., sections: _Optional[_Iterable[str]] = ..., inner_steps: _Optional[int] = ..., progress: _Optional[_Union[_record_pb2.Progress, _Mapping]] = ..., gradient_norm: _Optional[float] = ..., bump_steps: _Optional[int] = ..., warrant: _Optional[_Union[_access_pb2.Warrant, _Mapping]] = ..., lost_samples: _Optional[int] = ..., lost_at_samples: _Optional[int] = ...) -> None: ...

class ChunkRequest(_message.Message):
    __slots__ = ("snapshot_id", "index", "stage")
    SNAPSHOT_ID_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    STAGE_FIELD_NUMBER: _ClassVar[int]
    snapshot_id: bytes
    index: int
    stage: int
    def __init__(self, snapshot_id: _Optional[bytes] = ..., index: _Optional[int] = ..., stage: _Optional[int] = ...) -> None: ...

class Chunk(_message.Message):
    __slots__ = ("index",)
    INDEX_FIELD_NUMBER: _ClassVar[int]
    index: int
    def __init__(self, index: _Optional[int] = ...) -> None: ...

class ManifestRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class AccessListRequest(_message.Message):
    __slots__ = ("sequence", "amendments", "head", "list_digest", "rivals")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    AMENDMENTS_FIELD_NUMBER: _ClassVar[int]
    HEAD_FIELD_NUMBER: _ClassVar[int]
    LIST_DIGEST_FIELD_NUMBER: _ClassVar[int]
    RIVALS_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    amendments: int
    head: bytes
    list_digest: bytes
    rivals: int
    def __init__(self, sequence: _Optional[int] = ..., amendments: _Optional[int] = ..., head: _Optional[bytes] = ..., list_digest: _Optional[bytes] = ..., rivals: _Optional[int] = ...) -> None: ...

class ReachRequest(_message.Message):
    __slots__ = ("addresses",)
    ADDRESSES_FIELD_NUMBER: _ClassVar[int]
    addresses: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, addresses: _Optional[_Iterable[str]] = ...) -> None: ...

class Reached(_message.Message):
    __slots__ = ("reached", "observed")
    REACHED_FIELD_NUMBER: _ClassVar[int]
    OBSERVED_FIELD_NUMBER: _ClassVar[int]
    reached: _containers.RepeatedScalarFieldContainer[str]
    observed: str
    def __init__(self, reached: _Optional[_Iterable[str]] = ..., observed: _Optional[str] = ...) -> None: ...

class Receipt(_message.Message):
    __slots__ = ("run_id", "server", "client", "microbatches", "samples", "from_unix_s", "until_unix_s", "signature", "tokens", "targets")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    SERVER_FIELD_NUMBER: _ClassVar[int]
    CLIENT_FIELD_NUMBER: _ClassVar[int]
    MICROBATCHES_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    FROM_UNIX_S_FIELD_NUMBER: _ClassVar[int]
    UNTIL_UNIX_S_FIELD_NUMBER: _ClassVar[int]
    SIGNATURE_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    TARGETS_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    server: str
    client: str
    microbatches: int
    samples: int
    from_unix_s: int
    until_unix_s: int
    signature: bytes
    tokens: int
    targets: int
    def __init__(self, run_id: _Optional[str] = ..., server: _Optional[str] = ..., client: _Optional[str] = ..., microbatches: _Optional[int] = ..., samples: _Optional[int] = ..., from_unix_s: _Optional[int] = ..., until_unix_s: _Optional[int] = ..., signature: _Optional[bytes] = ..., tokens: _Optional[int] = ..., targets: _Optional[int] = ...) -> None: ...

class ReceiptRequest(_message.Message):
    __slots__ = ("receipt",)
    RECEIPT_FIELD_NUMBER: _ClassVar[int]
    receipt: Receipt
    def __init__(self, receipt: _Optional[_Union[Receipt, _Mapping]] = ...) -> None: ...

class Measure(_message.Message):
    __slots__ = ("reply_nbytes",)
    REPLY_NBYTES_FIELD_NUMBER: _ClassVar[int]
    reply_nbytes: int
    def __init__(self, reply_nbytes: _Optional[int] = ...) -> None: ...

class Measured(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class PacketReceipt(_message.Message):
    __slots__ = ("run_id", "stage", "round", "giver", "receiver", "accepted", "keep", "step", "reason", "samples", "nbytes", "signature")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    STAGE_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    GIVER_FIELD_NUMBER: _ClassVar[int]
    RECEIVER_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    KEEP_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    NBYTES_FIELD_NUMBER: _ClassVar[int]
    SIGNATURE_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    stage: int
    round: int
    giver: str
    receiver: str
    accepted: bool
    keep: float
    step: str
    reason: str
    samples: int
    nbytes: int
    signature: bytes
    def __init__(self, run_id: _Optional[str] = ..., stage: _Optional[int] = ..., round: _Optional[int] = ..., giver: _Optional[str] = ..., receiver: _Optional[str] = ..., accepted: _Optional[bool] = ..., keep: _Optional[float] = ..., step: _Optional[str] = ..., reason: _Optional[str] = ..., samples: _Optional[int] = ..., nbytes: _Optional[int] = ..., signature: _Optional[bytes] = ...) -> None: ...

class PacketReceiptTaken(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class FinalDelta(_message.Message):
    __slots__ = ("round", "stage", "codec", "samples")
    ROUND_FIELD_NUMBER: _ClassVar[int]
    STAGE_FIELD_NUMBER: _ClassVar[int]
    CODEC_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    round: int
    stage: int
    codec: str
    samples: int
    def __init__(self, round: _Optional[int] = ..., stage: _Optional[int] = ..., codec: _Optional[str] = ..., samples: _Optional[int] = ...) -> None: ...

class FinalDeltaTaken(_message.Message):
    __slots__ = ("round", "again")
    ROUND_FIELD_NUMBER: _ClassVar[int]
    AGAIN_FIELD_NUMBER: _ClassVar[int]
    round: int
    again: bool
    def __init__(self, round: _Optional[int] = ..., again: _Optional[bool] = ...) -> None: ...

class Handover(_message.Message):
    __slots__ = ("stage",)
    STAGE_FIELD_NUMBER: _ClassVar[int]
    stage: int
    def __init__(self, stage: _Optional[int] = ...) -> None: ...

class Handed(_message.Message):
    __slots__ = ("round",)
    ROUND_FIELD_NUMBER: _ClassVar[int]
    round: int
    def __init__(self, round: _Optional[int] = ...) -> None: ...

class DataChunkRequest(_message.Message):
    __slots__ = ("sha256", "offset", "nbytes", "index")
    SHA256_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    NBYTES_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    sha256: bytes
    offset: int
    nbytes: int
    index: bytes
    def __init__(self, sha256: _Optional[bytes] = ..., offset: _Optional[int] = ..., nbytes: _Optional[int] = ..., index: _Optional[bytes] = ...) -> None: ...

class DataChunk(_message.Message):
    __slots__ = ("nbytes", "held")
    NBYTES_FIELD_NUMBER: _ClassVar[int]
    HELD_FIELD_NUMBER: _ClassVar[int]
    nbytes: int
    held: bytes
    def __init__(self, nbytes: _Optional[int] = ..., held: _Optional[bytes] = ...) -> None: ...

class SignedWord(_message.Message):
    __slots__ = ("word", "signature")
    WORD_FIELD_NUMBER: _ClassVar[int]
    SIGNATURE_FIELD_NUMBER: _ClassVar[int]
    word: bytes
    signature: bytes
    def __init__(self, word: _Optional[bytes] = ..., signature: _Optional[bytes] = ...) -> None: ...

class RoundWord(_message.Message):
    __slots__ = ("round", "stage", "member", "incarnation", "commit", "roster", "means", "close", "hold")
    ROUND_FIELD_NUMBER: _ClassVar[int]
    STAGE_FIELD_NUMBER: _ClassVar[int]
    MEMBER_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    COMMIT_FIELD_NUMBER: _ClassVar[int]
    ROSTER_FIELD_NUMBER: _ClassVar[int]
    MEANS_FIELD_NUMBER: _ClassVar[int]
    CLOSE_FIELD_NUMBER: _ClassVar[int]
    HOLD_FIELD_NUMBER: _ClassVar[int]
    round: int
    stage: int
    member: str
    incarnation: int
    commit: PacketCommit
    roster: Roster
    means: PieceMeans
    close: RoundClose
    hold: RoundHold
    def __init__(self, round: _Optional[int] = ..., stage: _Optional[int] = ..., member: _Optional[str] = ..., incarnation: _Optional[int] = ..., commit: _Optional[_Union[PacketCommit, _Mapping]] = ..., roster: _Optional[_Union[Roster, _Mapping]] = ..., means: _Optional[_Union[PieceMeans, _Mapping]] = ..., close: _Optional[_Union[RoundClose, _Mapping]] = ..., hold: _Optional[_Union[RoundHold, _Mapping]] = ...) -> None: ...

class PacketCommit(_message.Message):
    __slots__ = ("pieces", "length", "targets", "samples", "newcomer", "before")
    PIECES_FIELD_NUMBER: _ClassVar[int]
    LENGTH_FIELD_NUMBER: _ClassVar[int]
    TARGETS_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    NEWCOMER_FIELD_NUMBER: _ClassVar[int]
    BEFORE_FIELD_NUMBER: _ClassVar[int]
    pieces: bytes
    length: float
    targets: int
    samples: int
    newcomer: bool
    before: bytes
    def __init__(self, pieces: _Optional[bytes] = ..., length: _Optional[float] = ..., targets: _Optional[int] = ..., samples: _Optional[int] = ..., newcomer: _Optional[bool] = ..., before: _Optional[bytes] = ...) -> None: ...

class Roster(_message.Message):
    __slots__ = ("attempt", "commits", "owners", "elsewhere")
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    COMMITS_FIELD_NUMBER: _ClassVar[int]
    OWNERS_FIELD_NUMBER: _ClassVar[int]
    ELSEWHERE_FIELD_NUMBER: _ClassVar[int]
    attempt: int
    commits: _containers.RepeatedScalarFieldContainer[bytes]
    owners: bytes
    elsewhere: bytes
    def __init__(self, attempt: _Optional[int] = ..., commits: _Optional[_Iterable[bytes]] = ..., owners: _Optional[bytes] = ..., elsewhere: _Optional[bytes] = ...) -> None: ...

class PieceMeans(_message.Message):
    __slots__ = ("roster", "means", "taken", "agreements")
    ROSTER_FIELD_NUMBER: _ClassVar[int]
    MEANS_FIELD_NUMBER: _ClassVar[int]
    TAKEN_FIELD_NUMBER: _ClassVar[int]
    AGREEMENTS_FIELD_NUMBER: _ClassVar[int]
    roster: bytes
    means: bytes
    taken: bytes
    agreements: bytes
    def __init__(self, roster: _Optional[bytes] = ..., means: _Optional[bytes] = ..., taken: _Optional[bytes] = ..., agreements: _Optional[bytes] = ...) -> None: ...

class RoundClose(_message.Message):
    __slots__ = ("roster", "means")
    ROSTER_FIELD_NUMBER: _ClassVar[int]
    MEANS_FIELD_NUMBER: _ClassVar[int]
    roster: bytes
    means: bytes
    def __init__(self, roster: _Optional[bytes] = ..., means: _Optional[bytes] = ...) -> None: ...

class RoundHold(_message.Message):
    __slots__ = ("close",)
    CLOSE_FIELD_NUMBER: _ClassVar[int]
    close: bytes
    def __init__(self, close: _Optional[bytes] = ...) -> None: ...

class Butterfly(_message.Message):
    __slots__ = ("word", "pieces", "means", "wanted", "false_mean", "contradiction")
    WORD_FIELD_NUMBER: _ClassVar[int]
    PIECES_FIELD_NUMBER: _ClassVar[int]
    MEANS_FIELD_NUMBER: _ClassVar[int]
    WANTED_FIELD_NUMBER: _ClassVar[int]
    FALSE_MEAN_FIELD_NUMBER: _ClassVar[int]
    CONTRADICTION_FIELD_NUMBER: _ClassVar[int]
    word: SignedWord
    pieces: GivenPieces
    means: GivenMeans
    wanted: PieceRequest
    false_mean: FalseMean
    contradiction: Contradiction
    def __init__(self, word: _Optional[_Union[SignedWord, _Mapping]] = ..., pieces: _Optional[_Union[GivenPieces, _Mapping]] = ..., means: _Optional[_Union[GivenMeans, _Mapping]] = ..., wanted: _Optional[_Union[PieceRequest, _Mapping]] = ..., false_mean: _Optional[_Union[FalseMean, _Mapping]] = ..., contradiction: _Optional[_Union[Contradiction, _Mapping]] = ...) -> None: ...

class GivenPieces(_message.Message):
    __slots__ = ("round", "stage", "roster", "digests", "lengths")
    ROUND_FIELD_NUMBER: _ClassVar[int]
    STAGE_FIELD_NUMBER: _ClassVar[int]
    ROSTER_FIELD_NUMBER: _ClassVar[int]
    DIGESTS_FIELD_NUMBER: _ClassVar[int]
    LENGTHS_FIELD_NUMBER: _ClassVar[int]
    round: int
    stage: int
    roster: bytes
    digests: bytes
    lengths: bytes
    def __init__(self, round: _Optional[int] = ..., stage: _Optional[int] = ..., roster: _Optional[bytes] = ..., digests: _Optional[bytes] = ..., lengths: _Optional[bytes] = ...) -> None: ...

class GivenMeans(_message.Message):
    __slots__ = ("word", "digests")
    WORD_FIELD_NUMBER: _ClassVar[int]
    DIGESTS_FIELD_NUMBER: _ClassVar[int]
    word: SignedWord
    digests: bytes
    def __init__(self, word: _Optional[_Union[SignedWord, _Mapping]] = ..., digests: _Optional[bytes] = ...) -> None: ...

class PieceRequest(_message.Message):
    __slots__ = ("round", "stage", "owner", "pieces")
    ROUND_FIELD_NUMBER: _ClassVar[int]
    STAGE_FIELD_NUMBER: _ClassVar[int]
    OWNER_FIELD_NUMBER: _ClassVar[int]
    PIECES_FIELD_NUMBER: _ClassVar[int]
    round: int
    stage: int
    owner: str
    pieces: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, round: _Optional[int] = ..., stage: _Optional[int] = ..., owner: _Optional[str] = ..., pieces: _Optional[_Iterable[int]] = ...) -> None: ...

class FalseMean(_message.Message):
    __slots__ = ("roster", "means", "digests", "piece", "sizes", "lists")
    ROSTER_FIELD_NUMBER: _ClassVar[int]
    MEANS_FIELD_NUMBER: _ClassVar[int]
    DIGESTS_FIELD_NUMBER: _ClassVar[int]
    PIECE_FIELD_NUMBER: _ClassVar[int]
    SIZES_FIELD_NUMBER: _ClassVar[int]
    LISTS_FIELD_NUMBER: _ClassVar[int]
    roster: SignedWord
    means: SignedWord
    digests: bytes
    piece: int
    sizes: _containers.RepeatedScalarFieldContainer[int]
    lists: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, roster: _Optional[_Union[SignedWord, _Mapping]] = ..., means: _Optional[_Union[SignedWord, _Mapping]] = ..., digests: _Optional[bytes] = ..., piece: _Optional[int] = ..., sizes: _Optional[_Iterable[int]] = ..., lists: _Optional[_Iterable[bytes]] = ...) -> None: ...

class Contradiction(_message.Message):
    __slots__ = ("one", "other")
    ONE_FIELD_NUMBER: _ClassVar[int]
    OTHER_FIELD_NUMBER: _ClassVar[int]
    one: SignedWord
    other: SignedWord
    def __init__(self, one: _Optional[_Union[SignedWord, _Mapping]] = ..., other: _Optional[_Union[SignedWord, _Mapping]] = ...) -> None: ...

class ButterflyAnswer(_message.Message):
    __slots__ = ("word", "roster", "digests", "lengths", "holds")
    WORD_FIELD_NUMBER: _ClassVar[int]
    ROSTER_FIELD_NUMBER: _ClassVar[int]
    DIGESTS_FIELD_NUMBER: _ClassVar[int]
    LENGTHS_FIELD_NUMBER: _ClassVar[int]
    HOLDS_FIELD_NUMBER: _ClassVar[int]
    word: SignedWord
    roster: SignedWord
    digests: bytes
    lengths: bytes
    holds: _containers.RepeatedCompositeFieldContainer[SignedWord]
    def __init__(self, word: _Optional[_Union[SignedWord, _Mapping]] = ..., roster: _Optional[_Union[SignedWord, _Mapping]] = ..., digests: _Optional[bytes] = ..., lengths: _Optional[bytes] = ..., holds: _Optional[_Iterable[_Union[SignedWord, _Mapping]]] = ...) -> None: ...
