from swarmnode.wire import control_pb2 as _control_pb2
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
    __slots__ = ("incarnation", "unix_ms", "name", "status", "links", "events", "receipts", "receipts_serial")
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    UNIX_MS_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    LINKS_FIELD_NUMBER: _ClassVar[int]
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    RECEIPTS_FIELD_NUMBER: _ClassVar[int]
    RECEIPTS_SERIAL_FIELD_NUMBER: _ClassVar[int]
    incarnation: int
    unix_ms: int
    name: str
    status: _control_pb2.StatusReply
    links: _containers.RepeatedCompositeFieldContainer[LinkReport]
    events: _containers.RepeatedCompositeFieldContainer[EventReport]
    receipts: _containers.RepeatedScalarFieldContainer[bytes]
    receipts_serial: int
    def __init__(self, incarnation: _Optional[int] = ..., unix_ms: _Optional[int] = ..., name: _Optional[str] = ..., status: _Optional[_Union[_control_pb2.StatusReply, _Mapping]] = ..., links: _Optional[_Iterable[_Union[LinkReport, _Mapping]]] = ..., events: _Optional[_Iterable[_Union[EventReport, _Mapping]]] = ..., receipts: _Optional[_Iterable[bytes]] = ..., receipts_serial: _Optional[int] = ...) -> None: ...
