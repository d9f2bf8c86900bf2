from swarmnode.base.wire import record_pb2 as _record_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class LinkKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    LINK_KIND_UNSPECIFIED: _ClassVar[LinkKind]
    LINK_KIND_DIRECT: _ClassVar[LinkKind]
    LINK_KIND_RELAYED: _ClassVar[LinkKind]
LINK_KIND_UNSPECIFIED: LinkKind
LINK_KIND_DIRECT: LinkKind
LINK_KIND_RELAYED: LinkKind

class ReportRequest(_message.Message):
    __slots__ = ("incarnation", "events_after", "receipts_after", "page_port")
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    EVENTS_AFTER_FIELD_NUMBER: _ClassVar[int]
    RECEIPTS_AFTER_FIELD_NUMBER: _ClassVar[int]
    PAGE_PORT_FIELD_NUMBER: _ClassVar[int]
    incarnation: int
    events_after: int
    receipts_after: int
    page_port: int
    def __init__(self, incarnation: _Optional[int] = ..., events_after: _Optional[int] = ..., receipts_after: _Optional[int] = ..., page_port: _Optional[int] = ...) -> None: ...

class LinkReport(_message.Message):
    __slots__ = ("peer_id", "sent_nbytes", "received_nbytes", "latency_s", "kind")
    PEER_ID_FIELD_NUMBER: _ClassVar[int]
    SENT_NBYTES_FIELD_NUMBER: _ClassVar[int]
    RECEIVED_NBYTES_FIELD_NUMBER: _ClassVar[int]
    LATENCY_S_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    peer_id: str
    sent_nbytes: int
    received_nbytes: int
    latency_s: float
    kind: LinkKind
    def __init__(self, peer_id: _Optional[str] = ..., sent_nbytes: _Optional[int] = ..., received_nbytes: _Optional[int] = ..., latency_s: _Optional[float] = ..., kind: _Optional[_Union[LinkKind, str]] = ...) -> None: ...

class EventReport(_message.Message):
    __slots__ = ("serial", "unix_ms", "event", "level", "stage", "fields")
    class FieldsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    SERIAL_FIELD_NUMBER: _ClassVar[int]
    UNIX_MS_FIELD_NUMBER: _ClassVar[int]
    EVENT_FIELD_NUMBER: _ClassVar[int]
    LEVEL_FIELD_NUMBER: _ClassVar[int]
    STAGE_FIELD_NUMBER: _ClassVar[int]
    FIELDS_FIELD_NUMBER: _ClassVar[int]
    serial: int
    unix_ms: int
    event: str
    level: str
    stage: int
    fields: _containers.ScalarMap[str, str]
    def __init__(self, serial: _Optional[int] = ..., unix_ms: _Optional[int] = ..., event: _Optional[str] = ..., level: _Optional[str] = ..., stage: _Optional[int] = ..., fields: _Optional[_Mapping[str, str]] = ...) -> None: ...

class Report(_message.Message):
    __slots__ = ("incarnation", "unix_ms", "name", "status", "links", "events", "receipts", "receipts_serial", "credited", "watts")
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    UNIX_MS_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    LINKS_FIELD_NUMBER: _ClassVar[int]
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    RECEIPTS_FIELD_NUMBER: _ClassVar[int]
    RECEIPTS_SERIAL_FIELD_NUMBER: _ClassVar[int]
    CREDITED_FIELD_NUMBER: _ClassVar[int]
    WATTS_FIELD_NUMBER: _ClassVar[int]
    incarnation: int
    unix_ms: int
    name: str
    status: StatusReply
    links: _containers.RepeatedCompositeFieldContainer[LinkReport]
    events: _containers.RepeatedCompositeFieldContainer[EventReport]
    receipts: _containers.RepeatedScalarFieldContainer[bytes]
    receipts_serial: int
    credited: bool
    watts: int
    def __init__(self, incarnation: _Optional[int] = ..., unix_ms: _Optional[int] = ..., name: _Optional[str] = ..., status: _Optional[_Union[StatusReply, _Mapping]] = ..., links: _Optional[_Iterable[_Union[LinkReport, _Mapping]]] = ..., events: _Optional[_Iterable[_Union[EventReport, _Mapping]]] = ..., receipts: _Optional[_Iterable[bytes]] = ..., receipts_serial: _Optional[int] = ..., credited: _Optional[bool] = ..., watts: _Optional[int] = ...) -> None: ...

class PeerStatus(_message.Message):
    __slots__ = ("peer_id", "stage", "state", "samples_per_second", "queue", "round", "latency_s", "banned", "resumes_s")
    PEER_ID_FIELD_NUMBER: _ClassVar[int]
    STAGE_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    QUEUE_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    LATENCY_S_FIELD_NUMBER: _ClassVar[int]
    BANNED_FIELD_NUMBER: _ClassVar[int]
    RESUMES_S_FIELD_NUMBER: _ClassVar[int]
    peer_id: str
    stage: int
    state: _record_pb2.NodeState
    samples_per_second: float
    queue: int
    round: int
    latency_s: float
    banned: bool
    resumes_s: float
    def __init__(self, peer_id: _Optional[str] = ..., stage: _Optional[int] = ..., state: _Optional[_Union[_record_pb2.NodeState, str]] = ..., samples_per_second: _Optional[float] = ..., queue: _Optional[int] = ..., round: _Optional[int] = ..., latency_s: _Optional[float] = ..., banned: _Optional[bool] = ..., resumes_s: _Optional[float] = ...) -> None: ...

class StatusReply(_message.Message):
    __slots__ = ("run_id", "run_name", "peer_id", "version", "stage", "stages", "state", "uptime_s", "samples_total", "tokens_total", "round", "tokens_per_second", "loss_train", "loss_validation", "loss_validation_first", "inner_steps", "counters", "peers", "addresses", "metrics_address", "resident_nbytes", "loss_validation_samples", "limits", "home", "trains_nothing", "amendments", "least_version", "tokens_given", "page", "clock", "given", "run_tokens_per_second", "tokens_given_before", "meets_every_steps", "meets_every_steps_planned", "given_tokens_per_second", "waits")
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
    GIVEN_FIELD_NUMBER: _ClassVar[int]
    RUN_TOKENS_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    TOKENS_GIVEN_BEFORE_FIELD_NUMBER: _ClassVar[int]
    MEETS_EVERY_STEPS_FIELD_NUMBER: _ClassVar[int]
    MEETS_EVERY_STEPS_PLANNED_FIELD_NUMBER: _ClassVar[int]
    GIVEN_TOKENS_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    WAITS_FIELD_NUMBER: _ClassVar[int]
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
    given: WorkReport
    run_tokens_per_second: float
    tokens_given_before: int
    meets_every_steps: float
    meets_every_steps_planned: float
    given_tokens_per_second: float
    waits: _containers.RepeatedCompositeFieldContainer[Wait]
    def __init__(self, run_id: _Optional[str] = ..., run_name: _Optional[str] = ..., peer_id: _Optional[str] = ..., version: _Optional[str] = ..., stage: _Optional[int] = ..., stages: _Optional[int] = ..., state: _Optional[_Union[_record_pb2.NodeState, str]] = ..., uptime_s: _Optional[float] = ..., samples_total: _Optional[int] = ..., tokens_total: _Optional[int] = ..., round: _Optional[int] = ..., tokens_per_second: _Optional[float] = ..., loss_train: _Optional[float] = ..., loss_validation: _Optional[float] = ..., loss_validation_first: _Optional[float] = ..., inner_steps: _Optional[int] = ..., counters: _Optional[_Mapping[str, float]] = ..., peers: _Optional[_Iterable[_Union[PeerStatus, _Mapping]]] = ..., addresses: _Optional[_Iterable[str]] = ..., metrics_address: _Optional[str] = ..., resident_nbytes: _Optional[int] = ..., loss_validation_samples: _Optional[float] = ..., limits: _Optional[_Union[LimitsReply, _Mapping]] = ..., home: _Optional[str] = ..., trains_nothing: _Optional[bool] = ..., amendments: _Optional[_Iterable[str]] = ..., least_version: _Optional[str] = ..., tokens_given: _Optional[int] = ..., page: _Optional[str] = ..., clock: _Optional[str] = ..., given: _Optional[_Union[WorkReport, _Mapping]] = ..., run_tokens_per_second: _Optional[float] = ..., tokens_given_before: _Optional[int] = ..., meets_every_steps: _Optional[float] = ..., meets_every_steps_planned: _Optional[float] = ..., given_tokens_per_second: _Optional[float] = ..., waits: _Optional[_Iterable[_Union[Wait, _Mapping]]] = ...) -> None: ...

class Wait(_message.Message):
    __slots__ = ("cause", "says", "can_do", "for_s", "stops")
    CAUSE_FIELD_NUMBER: _ClassVar[int]
    SAYS_FIELD_NUMBER: _ClassVar[int]
    CAN_DO_FIELD_NUMBER: _ClassVar[int]
    FOR_S_FIELD_NUMBER: _ClassVar[int]
    STOPS_FIELD_NUMBER: _ClassVar[int]
    cause: str
    says: str
    can_do: str
    for_s: float
    stops: bool
    def __init__(self, cause: _Optional[str] = ..., says: _Optional[str] = ..., can_do: _Optional[str] = ..., for_s: _Optional[float] = ..., stops: _Optional[bool] = ...) -> None: ...

class WorkReport(_message.Message):
    __slots__ = ("samples", "tokens", "targets")
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    TARGETS_FIELD_NUMBER: _ClassVar[int]
    samples: int
    tokens: int
    targets: int
    def __init__(self, samples: _Optional[int] = ..., tokens: _Optional[int] = ..., targets: _Optional[int] = ...) -> None: ...

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
