from swarmnode.base.wire import access_pb2 as _access_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class NodeState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    NODE_STATE_UNSPECIFIED: _ClassVar[NodeState]
    NODE_STATE_JOINING: _ClassVar[NodeState]
    NODE_STATE_SYNCING: _ClassVar[NodeState]
    NODE_STATE_TRAINING: _ClassVar[NodeState]
    NODE_STATE_DRAINING: _ClassVar[NodeState]
    NODE_STATE_LEFT: _ClassVar[NodeState]
    NODE_STATE_PAUSED: _ClassVar[NodeState]
NODE_STATE_UNSPECIFIED: NodeState
NODE_STATE_JOINING: NodeState
NODE_STATE_SYNCING: NodeState
NODE_STATE_TRAINING: NodeState
NODE_STATE_DRAINING: NodeState
NODE_STATE_LEFT: NodeState
NODE_STATE_PAUSED: NodeState

class Progress(_message.Message):
    __slots__ = ("feeders", "samples", "total", "owed")
    FEEDERS_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    TOTAL_FIELD_NUMBER: _ClassVar[int]
    OWED_FIELD_NUMBER: _ClassVar[int]
    feeders: _containers.RepeatedScalarFieldContainer[str]
    samples: _containers.RepeatedScalarFieldContainer[int]
    total: int
    owed: int
    def __init__(self, feeders: _Optional[_Iterable[str]] = ..., samples: _Optional[_Iterable[int]] = ..., total: _Optional[int] = ..., owed: _Optional[int] = ...) -> None: ...

class Blocks(_message.Message):
    __slots__ = ("finished_below", "finished")
    FINISHED_BELOW_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    finished_below: int
    finished: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, finished_below: _Optional[int] = ..., finished: _Optional[_Iterable[int]] = ...) -> None: ...

class Record(_message.Message):
    __slots__ = ("run_id", "peer_id", "sequence", "expires_unix_ms", "stage", "state", "addresses", "samples_per_second", "queue", "round", "joined_unix_ms", "version", "progress", "blocks", "state_digest", "boundary_digest", "allowance", "round_stride", "kept_round", "kept_samples", "lost_samples", "lost_at_samples", "saved_samples", "moving_to", "saves_checkpoints", "unable", "span", "stretch", "data_digest")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    PEER_ID_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    EXPIRES_UNIX_MS_FIELD_NUMBER: _ClassVar[int]
    STAGE_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    ADDRESSES_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    QUEUE_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    JOINED_UNIX_MS_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    STATE_DIGEST_FIELD_NUMBER: _ClassVar[int]
    BOUNDARY_DIGEST_FIELD_NUMBER: _ClassVar[int]
    PASS_FIELD_NUMBER: _ClassVar[int]
    ALLOWANCE_FIELD_NUMBER: _ClassVar[int]
    ROUND_STRIDE_FIELD_NUMBER: _ClassVar[int]
    KEPT_ROUND_FIELD_NUMBER: _ClassVar[int]
    KEPT_SAMPLES_FIELD_NUMBER: _ClassVar[int]
    LOST_SAMPLES_FIELD_NUMBER: _ClassVar[int]
    LOST_AT_SAMPLES_FIELD_NUMBER: _ClassVar[int]
    SAVED_SAMPLES_FIELD_NUMBER: _ClassVar[int]
    MOVING_TO_FIELD_NUMBER: _ClassVar[int]
    SAVES_CHECKPOINTS_FIELD_NUMBER: _ClassVar[int]
    UNABLE_FIELD_NUMBER: _ClassVar[int]
    SPAN_FIELD_NUMBER: _ClassVar[int]
    STRETCH_FIELD_NUMBER: _ClassVar[int]
    DATA_DIGEST_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    peer_id: str
    sequence: int
    expires_unix_ms: int
    stage: int
    state: NodeState
    addresses: _containers.RepeatedScalarFieldContainer[str]
    samples_per_second: float
    queue: int
    round: int
    joined_unix_ms: int
    version: str
    progress: Progress
    blocks: Blocks
    state_digest: bytes
    boundary_digest: bytes
    allowance: Allowance
    round_stride: int
    kept_round: int
    kept_samples: int
    lost_samples: int
    lost_at_samples: int
    saved_samples: int
    moving_to: int
    saves_checkpoints: bool
    unable: _containers.RepeatedScalarFieldContainer[int]
    span: int
    stretch: int
    data_digest: bytes
    def __init__(self, run_id: _Optional[str] = ..., peer_id: _Optional[str] = ..., sequence: _Optional[int] = ..., expires_unix_ms: _Optional[int] = ..., stage: _Optional[int] = ..., state: _Optional[_Union[NodeState, str]] = ..., addresses: _Optional[_Iterable[str]] = ..., samples_per_second: _Optional[float] = ..., queue: _Optional[int] = ..., round: _Optional[int] = ..., joined_unix_ms: _Optional[int] = ..., version: _Optional[str] = ..., progress: _Optional[_Union[Progress, _Mapping]] = ..., blocks: _Optional[_Union[Blocks, _Mapping]] = ..., state_digest: _Optional[bytes] = ..., boundary_digest: _Optional[bytes] = ..., allowance: _Optional[_Union[Allowance, _Mapping]] = ..., round_stride: _Optional[int] = ..., kept_round: _Optional[int] = ..., kept_samples: _Optional[int] = ..., lost_samples: _Optional[int] = ..., lost_at_samples: _Optional[int] = ..., saved_samples: _Optional[int] = ..., moving_to: _Optional[int] = ..., saves_checkpoints: _Optional[bool] = ..., unable: _Optional[_Iterable[int]] = ..., span: _Optional[int] = ..., stretch: _Optional[int] = ..., data_digest: _Optional[bytes] = ..., **kwargs) -> None: ...

class SignedRecord(_message.Message):
    __slots__ = ("record", "signature")
    RECORD_FIELD_NUMBER: _ClassVar[int]
    SIGNATURE_FIELD_NUMBER: _ClassVar[int]
    record: bytes
    signature: bytes
    def __init__(self, record: _Optional[bytes] = ..., signature: _Optional[bytes] = ...) -> None: ...

class SignedManifest(_message.Message):
    __slots__ = ("manifest", "owner", "signature", "amendments")
    MANIFEST_FIELD_NUMBER: _ClassVar[int]
    OWNER_FIELD_NUMBER: _ClassVar[int]
    SIGNATURE_FIELD_NUMBER: _ClassVar[int]
    AMENDMENTS_FIELD_NUMBER: _ClassVar[int]
    manifest: bytes
    owner: bytes
    signature: bytes
    amendments: _containers.RepeatedCompositeFieldContainer[_access_pb2.SignedAmendment]
    def __init__(self, manifest: _Optional[bytes] = ..., owner: _Optional[bytes] = ..., signature: _Optional[bytes] = ..., amendments: _Optional[_Iterable[_Union[_access_pb2.SignedAmendment, _Mapping]]] = ...) -> None: ...

class Allowance(_message.Message):
    __slots__ = ("up_bps", "down_bps", "pauses_unix_s", "resumes_unix_s")
    UP_BPS_FIELD_NUMBER: _ClassVar[int]
    DOWN_BPS_FIELD_NUMBER: _ClassVar[int]
    PAUSES_UNIX_S_FIELD_NUMBER: _ClassVar[int]
    RESUMES_UNIX_S_FIELD_NUMBER: _ClassVar[int]
    up_bps: int
    down_bps: int
    pauses_unix_s: int
    resumes_unix_s: int
    def __init__(self, up_bps: _Optional[int] = ..., down_bps: _Optional[int] = ..., pauses_unix_s: _Optional[int] = ..., resumes_unix_s: _Optional[int] = ...) -> None: ...
