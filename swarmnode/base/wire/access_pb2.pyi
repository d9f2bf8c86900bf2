from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Grant(_message.Message):
    __slots__ = ("delegate", "expires_unix_s", "machines_max", "signature", "amendment")
    DELEGATE_FIELD_NUMBER: _ClassVar[int]
    EXPIRES_UNIX_S_FIELD_NUMBER: _ClassVar[int]
    MACHINES_MAX_FIELD_NUMBER: _ClassVar[int]
    SIGNATURE_FIELD_NUMBER: _ClassVar[int]
    AMENDMENT_FIELD_NUMBER: _ClassVar[int]
    delegate: bytes
    expires_unix_s: int
    machines_max: int
    signature: bytes
    amendment: int
    def __init__(self, delegate: _Optional[bytes] = ..., expires_unix_s: _Optional[int] = ..., machines_max: _Optional[int] = ..., signature: _Optional[bytes] = ..., amendment: _Optional[int] = ...) -> None: ...

class Pass(_message.Message):
    __slots__ = ("grant", "expires_unix_s", "signature")
    GRANT_FIELD_NUMBER: _ClassVar[int]
    EXPIRES_UNIX_S_FIELD_NUMBER: _ClassVar[int]
    SIGNATURE_FIELD_NUMBER: _ClassVar[int]
    grant: Grant
    expires_unix_s: int
    signature: bytes
    def __init__(self, grant: _Optional[_Union[Grant, _Mapping]] = ..., expires_unix_s: _Optional[int] = ..., signature: _Optional[bytes] = ...) -> None: ...

class Warrant(_message.Message):
    __slots__ = ("expires_unix_s", "signature", "amendment")
    EXPIRES_UNIX_S_FIELD_NUMBER: _ClassVar[int]
    SIGNATURE_FIELD_NUMBER: _ClassVar[int]
    AMENDMENT_FIELD_NUMBER: _ClassVar[int]
    expires_unix_s: int
    signature: bytes
    amendment: int
    def __init__(self, expires_unix_s: _Optional[int] = ..., signature: _Optional[bytes] = ..., amendment: _Optional[int] = ...) -> None: ...

class AccessList(_message.Message):
    __slots__ = ("run_id", "sequence", "allowed", "banned", "revoked", "least_version", "amendment")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    ALLOWED_FIELD_NUMBER: _ClassVar[int]
    BANNED_FIELD_NUMBER: _ClassVar[int]
    REVOKED_FIELD_NUMBER: _ClassVar[int]
    LEAST_VERSION_FIELD_NUMBER: _ClassVar[int]
    AMENDMENT_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    sequence: int
    allowed: _containers.RepeatedScalarFieldContainer[str]
    banned: _containers.RepeatedScalarFieldContainer[str]
    revoked: _containers.RepeatedScalarFieldContainer[bytes]
    least_version: str
    amendment: int
    def __init__(self, run_id: _Optional[str] = ..., sequence: _Optional[int] = ..., allowed: _Optional[_Iterable[str]] = ..., banned: _Optional[_Iterable[str]] = ..., revoked: _Optional[_Iterable[bytes]] = ..., least_version: _Optional[str] = ..., amendment: _Optional[int] = ...) -> None: ...

class SignedAccessList(_message.Message):
    __slots__ = ("list", "signature", "amendments", "rivals")
    LIST_FIELD_NUMBER: _ClassVar[int]
    SIGNATURE_FIELD_NUMBER: _ClassVar[int]
    AMENDMENTS_FIELD_NUMBER: _ClassVar[int]
    RIVALS_FIELD_NUMBER: _ClassVar[int]
    list: bytes
    signature: bytes
    amendments: _containers.RepeatedCompositeFieldContainer[SignedAmendment]
    rivals: _containers.RepeatedCompositeFieldContainer[SignedAmendment]
    def __init__(self, list: _Optional[bytes] = ..., signature: _Optional[bytes] = ..., amendments: _Optional[_Iterable[_Union[SignedAmendment, _Mapping]]] = ..., rivals: _Optional[_Iterable[_Union[SignedAmendment, _Mapping]]] = ...) -> None: ...

class Amendment(_message.Message):
    __slots__ = ("run_id", "serial", "previous", "from_round", "names", "values", "owners", "living")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    SERIAL_FIELD_NUMBER: _ClassVar[int]
    PREVIOUS_FIELD_NUMBER: _ClassVar[int]
    FROM_ROUND_FIELD_NUMBER: _ClassVar[int]
    NAMES_FIELD_NUMBER: _ClassVar[int]
    VALUES_FIELD_NUMBER: _ClassVar[int]
    OWNERS_FIELD_NUMBER: _ClassVar[int]
    LIVING_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    serial: int
    previous: bytes
    from_round: int
    names: _containers.RepeatedScalarFieldContainer[str]
    values: _containers.RepeatedScalarFieldContainer[str]
    owners: _containers.RepeatedScalarFieldContainer[bytes]
    living: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, run_id: _Optional[str] = ..., serial: _Optional[int] = ..., previous: _Optional[bytes] = ..., from_round: _Optional[int] = ..., names: _Optional[_Iterable[str]] = ..., values: _Optional[_Iterable[str]] = ..., owners: _Optional[_Iterable[bytes]] = ..., living: _Optional[_Iterable[bytes]] = ...) -> None: ...

class SignedAmendment(_message.Message):
    __slots__ = ("amendment", "signature")
    AMENDMENT_FIELD_NUMBER: _ClassVar[int]
    SIGNATURE_FIELD_NUMBER: _ClassVar[int]
    amendment: bytes
    signature: bytes
    def __init__(self, amendment: _Optional[bytes] = ..., signature: _Optional[bytes] = ...) -> None: ...

class Invite(_message.Message):
    __slots__ = ("run_id", "owner", "meetings", "grant", "secret", "machine", "amendment", "head")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    OWNER_FIELD_NUMBER: _ClassVar[int]
    MEETINGS_FIELD_NUMBER: _ClassVar[int]
    GRANT_FIELD_NUMBER: _ClassVar[int]
    SECRET_FIELD_NUMBER: _ClassVar[int]
    PASS_FIELD_NUMBER: _ClassVar[int]
    MACHINE_FIELD_NUMBER: _ClassVar[int]
    AMENDMENT_FIELD_NUMBER: _ClassVar[int]
    HEAD_FIELD_NUMBER: _ClassVar[int]
    run_id: bytes
    owner: bytes
    meetings: _containers.RepeatedCompositeFieldContainer[Meeting]
    grant: Grant
    secret: bytes
    machine: bytes
    amendment: int
    head: bytes
    def __init__(self, run_id: _Optional[bytes] = ..., owner: _Optional[bytes] = ..., meetings: _Optional[_Iterable[_Union[Meeting, _Mapping]]] = ..., grant: _Optional[_Union[Grant, _Mapping]] = ..., secret: _Optional[bytes] = ..., machine: _Optional[bytes] = ..., amendment: _Optional[int] = ..., head: _Optional[bytes] = ..., **kwargs) -> None: ...

class Meeting(_message.Message):
    __slots__ = ("peer", "addresses")
    PEER_FIELD_NUMBER: _ClassVar[int]
    ADDRESSES_FIELD_NUMBER: _ClassVar[int]
    peer: bytes
    addresses: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, peer: _Optional[bytes] = ..., addresses: _Optional[_Iterable[bytes]] = ...) -> None: ...
