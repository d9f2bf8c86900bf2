"""Messages made from the table of bounds (swarmnode/base/bounds/table.py): what passes its check, the edges first."""

import random
from collections.abc import Mapping
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from hypothesis import strategies as st

from swarmnode.base.bounds import FIELDS, Bound
from swarmnode.base.bounds.bound import FLAG, MESSAGE

ENTRIES_MAX = 4  # of a list, so that examples stay small; the edges of lists are the table's own test
_TEXT = "aZ09/:-. \u00e4\u4e16"


def fields_of(descriptor: Any) -> dict[str, tuple[FieldDescriptor, Bound]]:
    """Every field of a message type, and its bound."""
    return {field.name: (field, FIELDS[f"{descriptor.name}.{field.name}"]) for field in descriptor.fields}


def value_of(field: FieldDescriptor, bound: Bound, rng: random.Random) -> Any:
    """One value in range: an edge half of the time."""
    if field.enum_type is not None:
        return rng.choice(sorted(field.enum_type.values_by_number))
    match field.type:
        case FieldDescriptor.TYPE_STRING:
            length = rng.choice([0, 1, int(bound.most), rng.randint(0, int(min(bound.most, 64)))])
            return "".join(rng.choices(_TEXT, k=length))
        case FieldDescriptor.TYPE_BYTES:
            return rng.randbytes(int(rng.choice([0, min(bound.most, 300), rng.uniform(0, min(bound.most, 64))])))
        case FieldDescriptor.TYPE_BOOL:
            return rng.random() < 0.5
    if bound.step:
        return rng.choice([0, 1, 2, int(bound.most)])
    most = bound.most if field.type == FieldDescriptor.TYPE_DOUBLE else min(int(bound.most), _width(field))
    least = max(bound.least, 0.0) if field.type != FieldDescriptor.TYPE_DOUBLE else bound.least
    value = rng.choice([least, most, most, least + 1, most / 2, 10.0 ** rng.uniform(-3, 15)])
    value = min(most, max(least, value))
    return value if field.type == FieldDescriptor.TYPE_DOUBLE else int(value)


def _width(field: FieldDescriptor) -> int:
    small = (FieldDescriptor.TYPE_UINT32, FieldDescriptor.TYPE_INT32)
    return 2**31 - 1 if field.type in small else 2**63 - 1


def fill(message: Message, rng: random.Random, share: float = 0.7, depth: int = 0) -> None:
    """Give `share` of the fields of `message` values that pass its check; of a oneof, one."""
    descriptor = message.DESCRIPTOR
    chosen = {one.name: rng.choice(list[Any](one.fields)).name for one in descriptor.oneofs}
    for name, (field, bound) in fields_of(descriptor).items():
        one = field.containing_oneof
        if rng.random() > share or (one is not None and chosen[one.name] != name):
            continue
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            _fill_map(getattr(message, name), field, bound, rng)
        elif field.message_type is not None and field.is_repeated:
            for _ in range(min(bound.many, rng.randint(0, ENTRIES_MAX))):
                fill(getattr(message, name).add(), rng, share, depth + 1)
        elif field.message_type is not None:
            getattr(message, name).SetInParent()
            fill(getattr(message, name), rng, share, depth + 1)
        elif field.is_repeated:
            getattr(message, name).extend(
                value_of(field, bound, rng) for _ in range(min(bound.many, rng.randint(0, ENTRIES_MAX)))
            )
        else:
            setattr(message, name, value_of(field, bound, rng))


def _fill_map(values: Any, field: FieldDescriptor, bound: Bound, rng: random.Random) -> None:
    inner = field.message_type.fields_by_name["value"]
    for key in range(min(bound.many, rng.randint(0, ENTRIES_MAX))):
        values[f"key{key}"] = value_of(inner, bound, rng)


def messages(kind: type[Message], **fixed: Any) -> st.SearchStrategy[Any]:
    """Messages of `kind` that pass their check, with the fields `fixed` as they are."""

    def make(seed: int) -> Message:
        message = kind()
        fill(message, random.Random(seed))
        for name, value in fixed.items():
            setattr(message, name, value)
        return message

    return st.integers(0, 2**32).map(make)


def out_of_range(bound: Bound, field: FieldDescriptor) -> Mapping[str, Any]:
    """Values of `field` just beyond its bound, by what is wrong with them; none where the wire has no such value."""
    if bound.unit in (MESSAGE, FLAG):
        return {}
    if field.enum_type is not None:
        return {"unknown": max(field.enum_type.values_by_number) + 1}
    if field.type == FieldDescriptor.TYPE_STRING:
        return {"long": "x" * (int(bound.most) + 1), "control": "\x1b]0;owned\a"}
    if field.type == FieldDescriptor.TYPE_BYTES:
        return {"long": bytes(int(bound.most) + 1)}
    if field.type == FieldDescriptor.TYPE_DOUBLE:
        return {"nan": float("nan"), "inf": float("inf"), "above": bound.most * 1.001 + 1}
    wide = _width(field) > 2**31 and field.type != FieldDescriptor.TYPE_FIXED32
    found = {"above": int(bound.most) + 1} if bound.most < (2**64 - 1 if wide else 2**32 - 1) else {}
    return found | ({"step": 3} if bound.step else {})


__all__ = ["fields_of", "fill", "messages", "out_of_range", "value_of"]
