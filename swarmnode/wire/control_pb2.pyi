from swarmnode.wire import record_pb2 as _record_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class StatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

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

class PeerStatus(_message.Message):
    __slots__ = ("peer_id", "stage", "state", "samples_per_second", "queue", "round", "latency_s", "banned")
    PEER_ID_FIELD_NUMBER: _ClassVar[int]
    STAGE_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    QUEUE_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    LATENCY_S_FIELD_NUMBER: _ClassVar[int]
    BANNED_FIELD_NUMBER: _ClassVar[int]
    peer_id: str
    stage: int
    state: _record_pb2.NodeState
    samples_per_second: float
    queue: int
    round: int
    latency_s: float
    banned: bool
    def __init__(self, peer_id: _Optional[str] = ..., stage: _Optional[int] = ..., state: _Optional[_Union[_record_pb2.NodeState, str]] = ..., samples_per_second: _Optional[float] = ..., queue: _Optional[int] = ..., round: _Optional[int] = ..., latency_s: _Optional[float] = ..., banned: _Optional[bool] = ...) -> None: ...

class StatusReply(_message.Message):
    __slots__ = ("run_id", "run_name", "peer_id", "version", "stage", "stages", "state", "uptime_s", "samples_total", "tokens_total", "round", "tokens_per_second", "loss_train", "loss_validation", "loss_validation_first", "inner_steps", "counters", "peers", "addresses", "metrics_address", "resident_nbytes", "loss_validation_samples", "limits", "home", "trains_nothing", "amendments", "least_version", "tokens_given", "page", "clock")
    class CountersEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    RUN_NAME_FIELD_NUMBER: _ClassVar[int]
    PEER_ID_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    STAGE_FIELD_NUMBER: _ClassVar[int]
    STAGES_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    UPTIME_S_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_TOTAL_FIELD_NUMBER: _ClassVar[int]
    TOKENS_TOTAL_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    TOKENS_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    LOSS_TRAIN_FIELD_NUMBER: _ClassVar[int]
    LOSS_VALIDATION_FIELD_NUMBER: _ClassVar[int]
    LOSS_VALIDATION_FIRST_FIELD_NUMBER: _ClassVar[int]
    INNER_STEPS_FIELD_NUMBER: _ClassVar[int]
    COUNTERS_FIELD_NUMBER: _ClassVar[int]
    PEERS_FIELD_NUMBER: _ClassVar[int]
    ADDRESSES_FIELD_NUMBER: _ClassVar[int]
    METRICS_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    RESIDENT_NBYTES_FIELD_NUMBER: _ClassVar[int]
    LOSS_VALIDATION_SAMPLES_FIELD_NUMBER: _ClassVar[int]
    LIMITS_FIELD_NUMBER: _ClassVar[int]
    HOME_FIELD_NUMBER: _ClassVar[int]
    TRAINS_NOTHING_FIELD_NUMBER: _ClassVar[int]
    AMENDMENTS_FIELD_NUMBER: _ClassVar[int]
    LEAST_VERSION_FIELD_NUMBER: _ClassVar[int]
    TOKENS_GIVEN_FIELD_NUMBER: _ClassVar[int]
    PAGE_FIELD_NUMBER: _ClassVar[int]
    CLOCK_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    run_name: str
    peer_id: str
    version: str
    stage: int
    stages: int
    state: _record_pb2.NodeState
    uptime_s: float
    samples_total: int
    tokens_total: int
    round: int
    tokens_per_second: float
    loss_train: float
    loss_validation: float
    loss_validation_first: float
    inner_steps: int
    counters: _containers.ScalarMap[str, float]
    peers: _containers.RepeatedCompositeFieldContainer[PeerStatus]
    addresses: _containers.RepeatedScalarFieldContainer[str]
    metrics_address: str
    resident_nbytes: int
    loss_validation_samples: float
    limits: LimitsReply
    home: str
    trains_nothing: bool
    amendments: _containers.RepeatedScalarFieldContainer[str]
    least_version: str
    tokens_given: int
    page: str
    clock: str
    def __init__(self, run_id: _Optional[str] = ..., run_name: _Optional[str] = ..., peer_id: _Optional[str] = ..., version: _Optional[str] = ..., stage: _Optional[int] = ..., stages: _Optional[int] = ..., state: _Optional[_Union[_record_pb2.NodeState, str]] = ..., uptime_s: _Optional[float] = ..., samples_total: _Optional[int] = ..., tokens_total: _Optional[int] = ..., round: _Optional[int] = ..., tokens_per_second: _Optional[float] = ..., loss_train: _Optional[float] = ..., loss_validation: _Optional[float] = ..., loss_validation_first: _Optional[float] = ..., inner_steps: _Optional[int] = ..., counters: _Optional[_Mapping[str, float]] = ..., peers: _Optional[_Iterable[_Union[PeerStatus, _Mapping]]] = ..., addresses: _Optional[_Iterable[str]] = ..., metrics_address: _Optional[str] = ..., resident_nbytes: _Optional[int] = ..., loss_validation_samples: _Optional[float] = ..., limits: _Optional[_Union[LimitsReply, _Mapping]] = ..., home: _Optional[str] = ..., trains_nothing: _Optional[bool] = ..., amendments: _Optional[_Iterable[str]] = ..., least_version: _Optional[str] = ..., tokens_given: _Optional[int] = ..., page: _Optional[str] = ..., clock: _Optional[str] = ...) -> None: ...

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

class LimitsReply(_message.Message):
    __slots__ = ("limits", "running", "reason", "until_s", "quota_used_nbytes", "up_bps", "down_bps", "temperature_c")
    class LimitsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    LIMITS_FIELD_NUMBER: _ClassVar[int]
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    UNTIL_S_FIELD_NUMBER: _ClassVar[int]
    QUOTA_USED_NBYTES_FIELD_NUMBER: _ClassVar[int]
    UP_BPS_FIELD_NUMBER: _ClassVar[int]
    DOWN_BPS_FIELD_NUMBER: _ClassVar[int]
    TEMPERATURE_C_FIELD_NUMBER: _ClassVar[int]
    limits: _containers.ScalarMap[str, str]
    running: bool
    reason: str
    until_s: float
    quota_used_nbytes: int
    up_bps: int
    down_bps: int
    temperature_c: float
    def __init__(self, limits: _Optional[_Mapping[str, str]] = ..., running: _Optional[bool] = ..., reason: _Optional[str] = ..., until_s: _Optional[float] = ..., quota_used_nbytes: _Optional[int] = ..., up_bps: _Optional[int] = ..., down_bps: _Optional[int] = ..., temperature_c: _Optional[float] = ...) -> None: ...

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

class ExamineRequest(_message.Message):
    __slots__ = ("peers_max",)
    PEERS_MAX_FIELD_NUMBER: _ClassVar[int]
    peers_max: int
    def __init__(self, peers_max: _Optional[int] = ...) -> None: ...

class PeerExam(_message.Message):
    __slots__ = ("peer_id", "stage", "latency_s", "down_bps", "fault", "up_bps")
    PEER_ID_FIELD_NUMBER: _ClassVar[int]
    STAGE_FIELD_NUMBER: _ClassVar[int]
    LATENCY_S_FIELD_NUMBER: _ClassVar[int]
    DOWN_BPS_FIELD_NUMBER: _ClassVar[int]
    FAULT_FIELD_NUMBER: _ClassVar[int]
    UP_BPS_FIELD_NUMBER: _ClassVar[int]
    peer_id: str
    stage: int
    latency_s: float
    down_bps: float
    fault: str
    up_bps: float
    def __init__(self, peer_id: _Optional[str] = ..., stage: _Optional[int] = ..., latency_s: _Optional[float] = ..., down_bps: _Optional[float] = ..., fault: _Optional[str] = ..., up_bps: _Optional[float] = ...) -> None: ...

class ExamineReply(_message.Message):
    __slots__ = ("peers", "reach", "reason")
    PEERS_FIELD_NUMBER: _ClassVar[int]
    REACH_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    peers: _containers.RepeatedCompositeFieldContainer[PeerExam]
    reach: str
    reason: str
    def __init__(self, peers: _Optional[_Iterable[_Union[PeerExam, _Mapping]]] = ..., reach: _Optional[str] = ..., reason: _Optional[str] = ...) -> None: ...
