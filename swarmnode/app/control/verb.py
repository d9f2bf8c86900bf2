"""The verbs of the control API: the methods of the services in proto/swarmnode/v1/control.proto.

The descriptor is the only list. Names, arguments and types of both doors come from it, and the checks here hold for
both: the JSON of curl (service.py) and gRPC (grpc_server.py).
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from google.protobuf import json_format, message_factory
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from swarmnode.base import bounds
from swarmnode.base.errors import RemoteFault, UsageError
from swarmnode.base.wire import control_pb2

REQUEST_BYTES_MAX = 64 << 10
"""Guess: all limits of a volunteer, in words, are below a thousand bytes."""

REASON_CHARACTERS_MAX = 200
SECONDS_MAX = 366 * 86400.0

MARK = "swarmnode-error"
"""In a gRPC error's trailing metadata: the daemon says so, and not the library between."""

IS_NO_TIME = "at most a year, in seconds"
FAULTS = {
    FieldDescriptor.TYPE_STRING: "not a text",
    FieldDescriptor.TYPE_DOUBLE: IS_NO_TIME,
    FieldDescriptor.TYPE_BOOL: "not true or false",
    FieldDescriptor.TYPE_UINT32: "not a whole number from 0 on",
}

SERVICES = tuple(control_pb2.DESCRIPTOR.services_by_name.values())


@dataclass(frozen=True, slots=True)
class Verb:
    """A method of a service. `streams`: it answers more than once."""

    name: str  # in lower case: the JSON's path, and the method of daemon.control_api.ControlApi
    method: str
    service: str
    request: type[Message]
    reply: type[Message]
    streams: bool

    def from_json(self, raw: bytes) -> Message:
        """The request of a JSON object, checked; keys that are unknown here are left out. Raises UsageError."""
        try:
            given = json.loads(raw or b"{}")
        except (ValueError, RecursionError):
            raise UsageError("not JSON") from None
        if not isinstance(given, dict):
            raise UsageError("not a JSON object")
        request = self.request()
        for field in request.DESCRIPTOR.fields:
            if field.name in given:
                _take(request, field, given[field.name])
        return checked(request)

    def from_wire(self, raw: bytes) -> Message:
        """The request of a protobuf message, checked. Raises UsageError."""
        try:
            return checked(bounds.parse(self.request, raw, "a request"))
        except RemoteFault:
            raise UsageError(f"not a {self.request.DESCRIPTOR.full_name}") from None

    async def ask(self, api: object, request: Message) -> Message:
        """The reply of `api` to a checked request. Raises what its method of this name raises."""
        answer = getattr(api, self.name)(**arguments(request))
        if inspect.isawaitable(answer):
            answer = await answer
        if answer is None:
            return self.reply()
        assert isinstance(answer, self.reply), f"{self.name} answered with {type(answer).__name__}"
        return answer


def _verbs() -> Iterator[Verb]:
    for method in (method for service in SERVICES for method in service.methods):
        request = message_factory.GetMessageClass(method.input_type)
        reply = message_factory.GetMessageClass(method.output_type)
        service = method.containing_service.full_name
        yield Verb(method.name.lower(), method.name, service, request, reply, method.server_streaming)


VERBS: Mapping[str, Verb] = {verb.name: verb for verb in _verbs()}


def arguments(request: Message) -> dict[str, Any]:
    """The fields of `request` by name, maps as dictionaries."""
    values = ((field, getattr(request, field.name)) for field in request.DESCRIPTOR.fields)
    return {field.name: dict(value) if _is_map(field) else value for field, value in values}


def to_json(reply: Message) -> dict[str, Any]:
    """`reply` as the JSON door shows it: all fields by their names in proto, also those that are 0 or empty."""
    shown: dict[str, Any] = json_format.MessageToDict(
        reply, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
    )
    return shown


def checked(request: Message) -> Message:
    """`request` with its texts cut. Raises UsageError for a number that is no time."""
    for field in request.DESCRIPTOR.fields:
        value = getattr(request, field.name)
        if field.type == FieldDescriptor.TYPE_STRING:
            setattr(request, field.name, value[:REASON_CHARACTERS_MAX])
        elif field.type == FieldDescriptor.TYPE_DOUBLE and not 0.0 <= value <= SECONDS_MAX:
            raise UsageError(f"{field.name}: {IS_NO_TIME}")
    return request


def _take(request: Message, field: Any, value: object) -> None:
    """Set `field` of `request` to a value of JSON. Raises UsageError, also where json_format would take a value of
    another type: a text for a number, true for 1, null for nothing."""
    fault = "not an object of texts" if _is_map(field) else FAULTS[field.type]
    is_text = isinstance(value, str)
    is_bool = isinstance(value, bool)
    alike = is_text == (field.type == FieldDescriptor.TYPE_STRING) and is_bool == (
        field.type == FieldDescriptor.TYPE_BOOL
    )
    try:
        if value is None or not alike:
            raise json_format.ParseError(fault)
        json_format.ParseDict({field.name: value}, request)
    except (json_format.ParseError, OverflowError):
        raise UsageError(f"{field.name}: {fault}") from None


def _is_map(field: Any) -> bool:
    return field.message_type is not None and bool(field.message_type.GetOptions().map_entry)
