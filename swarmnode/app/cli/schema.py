"""`swarmnode schema VERB`: the JSON Schema of what a verb prints with --json."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import click

from swarmnode.base.errors import UsageError

if TYPE_CHECKING:
    from google.protobuf.descriptor import Descriptor, FieldDescriptor

Schema = Mapping[str, Any]

TEXT: Schema = {"type": "string"}
COUNT: Schema = {"type": "integer", "minimum": 0}
NUMBER: Schema = {"type": "number"}
YES_OR_NO: Schema = {"type": "boolean"}
OBJECT: Schema = {"type": "object"}


def _or_none(schema: Schema) -> Schema:
    return {"anyOf": [schema, {"type": "null"}]}


def _rows(item: Schema) -> Schema:
    return {"type": "array", "items": item}


def _object(*, more: bool = False, **fields: Schema) -> dict[str, Any]:
    """An object that has all of `fields`, and with `more` others."""
    return {"type": "object", "required": [*fields], "properties": fields, "additionalProperties": more}


_CHECK = _object(name=TEXT, ok=_or_none(YES_OR_NO), says=TEXT, fix=TEXT, exit_code=COUNT)
_WEIGHTS = {"kind": TEXT, "round": COUNT, "samples": COUNT}
_TRACE = _object(path=TEXT, what=TEXT, nbytes=COUNT, holder=_or_none(TEXT))
_RECEIPT = _object(more=True, run=TEXT, client=TEXT, server=TEXT, samples=COUNT, signature=TEXT)
_EVENT = _object(ts=TEXT, level=TEXT, event=TEXT, run=TEXT, node=TEXT, stage=_or_none(COUNT), fields=OBJECT)
_AMENDMENT = _object(serial=COUNT, from_round=COUNT, values=OBJECT, owners=_rows(TEXT), text=TEXT)
_RECIPE = _object(name=TEXT, title=TEXT, about=TEXT, needs=TEXT, takes=TEXT, text=TEXT, samples=COUNT, nodes=COUNT)
_DIFFERENCE: Schema = {"type": "array", "minItems": 2, "maxItems": 2}

MESSAGES: Mapping[str, str] = {
    "status": "StatusReply",
    "limit": "LimitsReply",
    "pause": "LimitsReply",
    "resume": "LimitsReply",
    "leave": "DrainReply",
}
"""Verbs that print a reply of the control API, as it is."""

SCHEMAS: Mapping[str, Schema] = {
    "up": _object(more=True, samples=COUNT, wall_s=NUMBER, tokens_per_s=NUMBER),
    "quickstart": _rows(_RECIPE),
    "doctor": _object(more=True, checks=_rows(_CHECK), verdict=TEXT, exit_code=COUNT),
    "logs": _EVENT,
    "receipts": _RECEIPT,
    "uninstall": _rows(_TRACE),
    "config show": {"type": "object", "additionalProperties": _object(value=TEXT, origin=TEXT)},
    "manifest diff": {"type": "object", "additionalProperties": _DIFFERENCE},
    "amend": _rows(_AMENDMENT),
    "access": _object(allowed=_rows(TEXT), banned=_rows(TEXT), revoked=_rows(TEXT), least_version=TEXT, sequence=COUNT),
    "generate": _object(more=True, text=TEXT, tokens=COUNT, tokens_per_s=NUMBER, **_WEIGHTS),
    "export": _object(more=True, model=TEXT, validation=_or_none(NUMBER), **_WEIGHTS),
    "eval": _object(more=True, tokens=COUNT, merged=OBJECT, replicas=_rows(OBJECT), **_WEIGHTS),
    "plan": OBJECT,
    "simulate": {"anyOf": [OBJECT, _rows(OBJECT)]},
    "bench": OBJECT,
}
"""By verb. `logs` and `receipts` print such an object a line; `bench` has the tables of its page by name."""


@click.command(short_help="the JSON Schema of what a verb prints with --json")
@click.argument("words", metavar="[VERB]...", nargs=-1)
def command(words: tuple[str, ...]) -> None:
    """Print the JSON Schema of what VERB prints with --json; without VERB, which verbs have one.

    `logs` and `receipts` print such an object a line.
    """
    if not words:
        click.echo("\n".join(sorted({*SCHEMAS, *MESSAGES, "manifest show"})))
        return
    click.echo(json.dumps(schema_of(" ".join(words)), indent=1))


def schema_of(verb: str) -> Schema:
    """The schema of what `verb` prints with --json. Raises UsageError where it has none."""
    if verb == "manifest show":
        from swarmnode.run.manifest.text import schema as of_manifests

        return dict(json.loads(of_manifests()))
    if verb in MESSAGES:
        from swarmnode.base.wire import control_pb2, report_pb2

        name = MESSAGES[verb]
        return _of_message(
            (control_pb2 if hasattr(control_pb2, name) else report_pb2).DESCRIPTOR.message_types_by_name[name]
        )
    found = SCHEMAS.get("bench" if verb.startswith("bench ") else verb)
    if found is None:
        raise UsageError(f"{verb[:60]}: it prints no JSON; `swarmnode schema` lists the verbs that do")
    return found


def _of_message(message: Descriptor) -> Schema:
    """All fields of `message`, as JSON of protobuf has them."""
    fields = {field.name: _of_field(field) for field in message.fields}
    required = [field.name for field in message.fields if not field.has_presence]
    return {"type": "object", "required": required, "properties": fields, "additionalProperties": False}


def _of_field(field: FieldDescriptor) -> Schema:
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        return {"type": "object", "additionalProperties": _of_value(field.message_type.fields_by_name["value"])}
    return _rows(_of_value(field)) if field.is_repeated else _of_value(field)


def _of_value(field: FieldDescriptor) -> Schema:
    if field.message_type is not None:
        return _of_message(field.message_type)
    if field.cpp_type in (field.CPPTYPE_DOUBLE, field.CPPTYPE_FLOAT):
        return {"anyOf": [NUMBER, {"enum": ["Infinity", "-Infinity", "NaN"]}]}
    if field.cpp_type == field.CPPTYPE_BOOL:
        return YES_OR_NO
    if field.cpp_type in (field.CPPTYPE_INT32, field.CPPTYPE_UINT32):
        return {"type": "integer"}
    return TEXT  # names of enums, and numbers of 64 bits, too
