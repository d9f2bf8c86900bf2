from swarmnode.base.wire import report_pb2 as _report_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class StatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class WatchRequest(_message.Message):
    __slots__ = ("every_s",)
    EVERY_S_FIELD_NUMBER: _ClassVar[int]
    every_s: float
    def __init__(self, every_s: _Optional[float] = ...) -> None: ...

class LeaveRequest(_message.Message):
    __slots__ = ("reason", "checkpoint", "stopping")
    REASON_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINT_FIELD_NUMBER: _ClassVar[int]
    STOPPING_FIELD_NUMBER: _ClassVar[int]
    reason: str
    checkpoint: str
    stopping: bool
    def __init__(self, reason: _Optional[str] = ..., checkpoint: _Optional[str] = ..., stopping: _Optional[bool] = ...) -> None: ...

class LeaveReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DrainRequest(_message.Message):
    __slots__ = ("notice_s", "reason")
    NOTICE_S_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    notice_s: float
    reason: str
    def __init__(self, notice_s: _Optional[float] = ..., reason: _Optional[str] = ...) -> None: ...

class DrainReply(_message.Message):
    __slots__ = ("held", "finished", "unsent", "sent", "successor", "cut", "seconds")
    HELD_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    UNSENT_FIELD_NUMBER: _ClassVar[int]
    SENT_FIELD_NUMBER: _ClassVar[int]
    SUCCESSOR_FIELD_NUMBER: _ClassVar[int]
    CUT_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    held: int
    finished: int
    unsent: int
    sent: int
    successor: str
    cut: _containers.RepeatedScalarFieldContainer[str]
    seconds: float
    def __init__(self, held: _Optional[int] = ..., finished: _Optional[int] = ..., unsent: _Optional[int] = ..., sent: _Optional[int] = ..., successor: _Optional[str] = ..., cut: _Optional[_Iterable[str]] = ..., seconds: _Optional[float] = ...) -> None: ...

class PauseRequest(_message.Message):
    __slots__ = ("for_s", "reason")
    FOR_S_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    for_s: float
    reason: str
    def __init__(self, for_s: _Optional[float] = ..., reason: _Optional[str] = ...) -> None: ...

class ResumeRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class FinishRequest(_message.Message):
    __slots__ = ("reason",)
    REASON_FIELD_NUMBER: _ClassVar[int]
    reason: str
    def __init__(self, reason: _Optional[str] = ...) -> None: ...

class FinishReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class LimitRequest(_message.Message):
    __slots__ = ("changed",)
    class ChangedEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    CHANGED_FIELD_NUMBER: _ClassVar[int]
    changed: _containers.ScalarMap[str, str]
    def __init__(self, changed: _Optional[_Mapping[str, str]] = ...) -> None: ...

class ConfigRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Setting(_message.Message):
    __slots__ = ("name", "value", "origin")
    NAME_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    ORIGIN_FIELD_NUMBER: _ClassVar[int]
    name: str
    value: str
    origin: str
    def __init__(self, name: _Optional[str] = ..., value: _Optional[str] = ..., origin: _Optional[str] = ...) -> None: ...

class ConfigReply(_message.Message):
    __slots__ = ("settings",)
    SETTINGS_FIELD_NUMBER: _ClassVar[int]
    settings: _containers.RepeatedCompositeFieldContainer[Setting]
    def __init__(self, settings: _Optional[_Iterable[_Union[Setting, _Mapping]]] = ...) -> None: ...

class ExamineRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class PeerExam(_message.Message):
    __slots__ = ("peer_id", "stage", "latency_s", "up_bps", "down_bps", "fault")
    PEER_ID_FIELD_NUMBER: _ClassVar[int]
    STAGE_FIELD_NUMBER: _ClassVar[int]
    LATENCY_S_FIELD_NUMBER: _ClassVar[int]
    UP_BPS_FIELD_NUMBER: _ClassVar[int]
    DOWN_BPS_FIELD_NUMBER: _ClassVar[int]
    FAULT_FIELD_NUMBER: _ClassVar[int]
    peer_id: str
    stage: int
    latency_s: float
    up_bps: float
    down_bps: float
    fault: str
    def __init__(self, peer_id: _Optional[str] = ..., stage: _Optional[int] = ..., latency_s: _Optional[float] = ..., up_bps: _Optional[float] = ..., down_bps: _Optional[float] = ..., fault: _Optional[str] = ...) -> None: ...

class ExamineReply(_message.Message):
    __slots__ = ("peers", "reach", "reason")
    PEERS_FIELD_NUMBER: _ClassVar[int]
    REACH_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    peers: _containers.RepeatedCompositeFieldContainer[PeerExam]
    reach: str
    reason: str
    def __init__(self, peers: _Optional[_Iterable[_Union[PeerExam, _Mapping]]] = ..., reach: _Optional[str] = ..., reason: _Optional[str] = ...) -> None: ...

class CopyRequest(_message.Message):
    __slots__ = ("older_s",)
    OLDER_S_FIELD_NUMBER: _ClassVar[int]
    older_s: float
    def __init__(self, older_s: _Optional[float] = ...) -> None: ...

class CopyReply(_message.Message):
    __slots__ = ("current", "status", "folder", "newest")
    CURRENT_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    FOLDER_FIELD_NUMBER: _ClassVar[int]
    NEWEST_FIELD_NUMBER: _ClassVar[int]
    current: bool
    status: str
    folder: str
    newest: str
    def __init__(self, current: _Optional[bool] = ..., status: _Optional[str] = ..., folder: _Optional[str] = ..., newest: _Optional[str] = ...) -> None: ...

class RunRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class RunReply(_message.Message):
    __slots__ = ("run_id", "name", "phase", "stages", "context", "parameters", "samples", "samples_target", "tokens", "tokens_per_s", "loss_train", "loss_validation", "round", "nodes", "serving", "replicas", "amendments", "method", "codec")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    PHASE_FIELD_NUMBER: _ClassVar[int]
    STAGES_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_FIELD_NUMBER: _ClassVar[int]
    PARAMETERS_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_TARGET_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_PER_S_FIELD_NUMBER: _ClassVar[int]
    LOSS_TRAIN_FIELD_NUMBER: _ClassVar[int]
    LOSS_VALIDATION_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    NODES_FIELD_NUMBER: _ClassVar[int]
    SERVING_FIELD_NUMBER: _ClassVar[int]
    REPLICAS_FIELD_NUMBER: _ClassVar[int]
    AMENDMENTS_FIELD_NUMBER: _ClassVar[int]
    METHOD_FIELD_NUMBER: _ClassVar[int]
    CODEC_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    name: str
    phase: str
    stages: int
    context: int
    parameters: int
    samples: int
    samples_target: int
    tokens: int
    tokens_per_s: float
    loss_train: float
    loss_validation: float
    round: int
    nodes: int
    serving: int
    replicas: _containers.RepeatedScalarFieldContainer[int]
    amendments: _containers.RepeatedScalarFieldContainer[str]
    method: str
    codec: str
    def __init__(self, run_id: _Optional[str] = ..., name: _Optional[str] = ..., phase: _Optional[str] = ..., stages: _Optional[int] = ..., context: _Optional[int] = ..., parameters: _Optional[int] = ..., samples: _Optional[int] = ..., samples_target: _Optional[int] = ..., tokens: _Optional[int] = ..., tokens_per_s: _Optional[float] = ..., loss_train: _Optional[float] = ..., loss_validation: _Optional[float] = ..., round: _Optional[int] = ..., nodes: _Optional[int] = ..., serving: _Optional[int] = ..., replicas: _Optional[_Iterable[int]] = ..., amendments: _Optional[_Iterable[str]] = ..., method: _Optional[str] = ..., codec: _Optional[str] = ...) -> None: ...

class MembersRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Member(_message.Message):
    __slots__ = ("peer", "name", "stage", "state", "speed", "queue", "round", "version", "rtt_ms", "loss", "steps", "memory", "why")
    PEER_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    STAGE_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    SPEED_FIELD_NUMBER: _ClassVar[int]
    QUEUE_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    RTT_MS_FIELD_NUMBER: _ClassVar[int]
    LOSS_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    MEMORY_FIELD_NUMBER: _ClassVar[int]
    WHY_FIELD_NUMBER: _ClassVar[int]
    peer: str
    name: str
    stage: int
    state: str
    speed: float
    queue: int
    round: int
    version: str
    rtt_ms: float
    loss: float
    steps: int
    memory: int
    why: str
    def __init__(self, peer: _Optional[str] = ..., name: _Optional[str] = ..., stage: _Optional[int] = ..., state: _Optional[str] = ..., speed: _Optional[float] = ..., queue: _Optional[int] = ..., round: _Optional[int] = ..., version: _Optional[str] = ..., rtt_ms: _Optional[float] = ..., loss: _Optional[float] = ..., steps: _Optional[int] = ..., memory: _Optional[int] = ..., why: _Optional[str] = ...) -> None: ...

class MembersReply(_message.Message):
    __slots__ = ("members",)
    MEMBERS_FIELD_NUMBER: _ClassVar[int]
    members: _containers.RepeatedCompositeFieldContainer[Member]
    def __init__(self, members: _Optional[_Iterable[_Union[Member, _Mapping]]] = ...) -> None: ...

class CurvesRequest(_message.Message):
    __slots__ = ("points",)
    POINTS_FIELD_NUMBER: _ClassVar[int]
    points: int
    def __init__(self, points: _Optional[int] = ...) -> None: ...

class CurvePoint(_message.Message):
    __slots__ = ("time_s", "samples", "tokens_per_s", "loss_train", "nodes", "serving", "round", "sent_nbytes", "gossip_nbytes")
    TIME_S_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    TOKENS_PER_S_FIELD_NUMBER: _ClassVar[int]
    LOSS_TRAIN_FIELD_NUMBER: _ClassVar[int]
    NODES_FIELD_NUMBER: _ClassVar[int]
    SERVING_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    SENT_NBYTES_FIELD_NUMBER: _ClassVar[int]
    GOSSIP_NBYTES_FIELD_NUMBER: _ClassVar[int]
    time_s: float
    samples: int
    tokens_per_s: float
    loss_train: float
    nodes: int
    serving: int
    round: int
    sent_nbytes: float
    gossip_nbytes: float
    def __init__(self, time_s: _Optional[float] = ..., samples: _Optional[int] = ..., tokens_per_s: _Optional[float] = ..., loss_train: _Optional[float] = ..., nodes: _Optional[int] = ..., serving: _Optional[int] = ..., round: _Optional[int] = ..., sent_nbytes: _Optional[float] = ..., gossip_nbytes: _Optional[float] = ...) -> None: ...

class Validation(_message.Message):
    __slots__ = ("samples", "time_s", "loss")
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    TIME_S_FIELD_NUMBER: _ClassVar[int]
    LOSS_FIELD_NUMBER: _ClassVar[int]
    samples: int
    time_s: float
    loss: float
    def __init__(self, samples: _Optional[int] = ..., time_s: _Optional[float] = ..., loss: _Optional[float] = ...) -> None: ...

class CurvesReply(_message.Message):
    __slots__ = ("run_id", "name", "context", "points", "validations")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_FIELD_NUMBER: _ClassVar[int]
    POINTS_FIELD_NUMBER: _ClassVar[int]
    VALIDATIONS_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    name: str
    context: int
    points: _containers.RepeatedCompositeFieldContainer[CurvePoint]
    validations: _containers.RepeatedCompositeFieldContainer[Validation]
    def __init__(self, run_id: _Optional[str] = ..., name: _Optional[str] = ..., context: _Optional[int] = ..., points: _Optional[_Iterable[_Union[CurvePoint, _Mapping]]] = ..., validations: _Optional[_Iterable[_Union[Validation, _Mapping]]] = ...) -> None: ...
