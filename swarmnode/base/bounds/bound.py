"""The allowed range of a message field, and the check made from it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message

from swarmnode.base.errors import RemoteFault
from swarmnode.base.untrusted_text import printable

SHOWN_CHARACTERS_MAX = 60  # of a value in an error
MESSAGE = "a message"
FLAG = "yes or no"
CHOICE = "a value of the enumeration"


@dataclass(frozen=True, slots=True)
class Bound:
    """The range of one field. Numbers lie within [least, most]; texts and bytes have `least` to `most` characters or
    bytes; a repeated field or a map has at most `many` entries. `why` gives the origin of the range."""

    least: float
    most: float
    unit: str
    why: str
    many: int = 1
    step: str = ""  # "power of two": 0 and powers of two only
    # Only displayed, so it is cleaned instead of refused: a text is cut and its control characters are replaced, a
    # number out of range counts as missing.
    cleaned: bool = False
    other: int = 0  # of an enumeration: the value that one of a later version counts as

    def allowed(self) -> str:
        """The range as text for docs and errors."""
        if self.unit in (MESSAGE, FLAG, CHOICE):
            return f"{self.unit}, at most {self.many} of them" if self.many > 1 else self.unit
        span = f"{self.least:.16g} to {self.most:.16g}" if self.least != self.most else f"{self.most:.16g}"
        each = f", at most {self.many} of them" if self.many > 1 else ""
        return f"{span} {self.unit}".rstrip() + (f", {self.step}" if self.step else "") + each


def number(most: float, unit: str, why: str, *, least: float = 0.0, many: int = 1, step: str = "") -> Bound:
    """A number, integer or not."""
    return Bound(least, most, unit, why, many, step)


def name(most: int, why: str, *, many: int = 1) -> Bound:
    """A word compared by programs: printable characters only."""
    return Bound(0, most, "characters", why, many)


def words(most: int, why: str, *, many: int = 1) -> Bound:
    """A text for people. It is never refused: it is cut, and control characters are replaced (untrusted_text.py)."""
    return Bound(0, most, "characters", why, many, cleaned=True)


def opaque(most: int, why: str, *, many: int = 1) -> Bound:
    """Bytes: a key, a signature, a digest, or a message that is checked separately after its signature."""
    return Bound(0, most, "bytes", why, many)


def flag(why: str = "either") -> Bound:
    return Bound(0, 1, FLAG, why)


def choice(why: str = "one that this version does not know is unspecified", other: int = 0) -> Bound:
    """An enumeration. A value that this version does not know comes from a later one, and counts as `other`."""
    return Bound(0, math.inf, CHOICE, why, other=other)


def part(many: int = 1, why: str = "checked field by field") -> Bound:
    """A nested message."""
    return Bound(0, 0, MESSAGE, why, many)


KEY_CHARACTERS_MAX = 128  # guess: a metric's name with its labels

Tidy = Callable[[Message, Any], None]
"""Puts the value of a message's field right."""


@dataclass(frozen=True, slots=True)
class FieldCheck:
    """The check of one field, `where`, by its `bound`, which is refused out of range. `tidy` does all for fields that
    are put right instead. `sized`: of each value the length counts, of `text` that it is printable, too."""

    where: str
    bound: Bound
    repeated: bool
    nested: bool
    sized: bool
    text: bool
    tidy: Tidy | None


class Bounds:
    """All bounds, by "Message.field", and the checks made from them: one per message type, made on first use."""

    def __init__(self, table: Mapping[str, Bound]) -> None:
        self.table = table
        self._checks: dict[str, dict[str, FieldCheck]] = {}

    def check(self, message: Message) -> None:
        """Raises RemoteFault that names the field, its value and its range, unless every set field of `message` is in
        range.

        The cost depends on the number of fields and entries, not on their values. Displayed fields are cleaned in
        place.
        """
        descriptor: Any = message.DESCRIPTOR
        checks = self._checks.get(descriptor.full_name)
        if checks is None:
            checks = self._checks[descriptor.full_name] = self._made(descriptor)
        for field, value in message.ListFields():
            rule = checks[field.name]
            if rule.tidy is not None:
                rule.tidy(message, value)
                continue
            bound = rule.bound
            if rule.repeated and len(value) > bound.many:
                raise _too_many(rule.where, bound, value)
            for one in value if rule.repeated else (value,):
                if rule.nested:
                    self.check(one)
                    continue
                size = len(one) if rule.sized else one
                holds = bound.least <= size <= bound.most  # NaN is in no range
                if not holds or (rule.text and not one.isprintable()) or (bound.step and one & (one - 1)):
                    raise _fault(rule.where, one, "", bound.allowed())

    def _made(self, descriptor: Descriptor) -> dict[str, FieldCheck]:
        return {field.name: self._of(descriptor, field) for field in descriptor.fields}

    def _of(self, descriptor: Descriptor, field: FieldDescriptor) -> FieldCheck:
        where = f"{descriptor.name}.{field.name}"
        bound = self.table[where]
        text = field.type == FieldDescriptor.TYPE_STRING
        return FieldCheck(
            where,
            bound,
            repeated=bool(field.is_repeated),
            nested=field.message_type is not None,
            sized=text or field.type == FieldDescriptor.TYPE_BYTES,
            text=text,
            tidy=_tidy(where, bound, field),
        )


def _tidy(where: str, bound: Bound, field: FieldDescriptor) -> Tidy | None:
    """The function that puts a value of `field` right; None for fields that are refused out of range."""
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        return _of_map(where, bound, field)
    if bound.cleaned:
        return _cleaning(bound, field) if field.type == FieldDescriptor.TYPE_STRING else _clearing(bound, field)
    if field.enum_type is not None:
        return _of_choice(bound, field, frozenset(field.enum_type.values_by_number))
    return None


def _of_map(where: str, bound: Bound, field: FieldDescriptor) -> Tidy:
    entry: Any = field.message_type
    inner = entry.fields_by_name["value"]
    text = inner.type == FieldDescriptor.TYPE_STRING

    def check(_: Message, values: Any) -> None:
        if len(values) > bound.many:
            raise _too_many(where, bound, values)
        for key, value in list(values.items()):
            if len(key) > KEY_CHARACTERS_MAX or not key.isprintable():
                raise _fault(where, key, "a printable key of", f"{KEY_CHARACTERS_MAX} characters at most")
            if text:
                values[key] = printable(value, int(bound.most))
            elif not bound.least <= value <= bound.most:  # NaN is in no range
                del values[key]

    return check


def _too_many(where: str, bound: Bound, values: Any) -> RemoteFault:
    return RemoteFault(f"{where} with {len(values)} entries; at most {bound.many}")


def _fault(where: str, value: object, kind: str, allowed: str) -> RemoteFault:
    if isinstance(value, bytes) or (isinstance(value, str) and len(value) > SHOWN_CHARACTERS_MAX):
        said = f"of {len(value)} {'bytes' if isinstance(value, bytes) else 'characters'}"
    else:
        said = f"= {value!r}"
    return RemoteFault(f"{where} {said}; expected {kind} {allowed}".replace("  ", " "))


def _of_choice(bound: Bound, field: FieldDescriptor, known: frozenset[int]) -> Tidy:
    label = field.name
    other = bound.other
    assert not field.is_repeated, "no message here has several values of an enumeration in one field"

    def check(message: Message, value: Any) -> None:
        if value not in known:
            setattr(message, label, other)

    return check


def _clearing(bound: Bound, field: FieldDescriptor) -> Tidy:
    label = field.name

    def check(message: Message, value: Any) -> None:
        if not bound.least <= value <= bound.most:
            message.ClearField(label)

    return check


def _cleaning(bound: Bound, field: FieldDescriptor) -> Tidy:
    most = int(bound.most)
    label = field.name

    def clean(message: Message, value: Any) -> None:
        if not field.is_repeated:
            setattr(message, label, printable(value, most))
            return
        del value[bound.many :]
        for index, text in enumerate(value):
            value[index] = printable(text, most)

    return clean
