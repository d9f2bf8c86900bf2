"""Manifests as people write them: read TOML, write commented TOML."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import json
import re
import textwrap
import tomllib
from collections.abc import Mapping, Sequence
from typing import Any, cast

from swarmnode.base.errors import ManifestError, UsageError
from swarmnode.base.untrusted_text import printable
from swarmnode.run.manifest.check import Value
from swarmnode.run.manifest.cross_field import ACROSS
from swarmnode.run.manifest.spec import BY_NAME, CONSTANTS, FIELDS, TABLES, Field, Manifest

MANIFEST_BYTES_MAX = 64 << 10
SHOWN_MAX = 60
MISTAKES_MAX = 50
COMMENT_COLUMNS = 110
SCHEMA_FILE = "manifest.schema.json"
_CHOICES = re.compile(r'"[^"]*"( or "[^"]*")*\Z')


def parse(text: str, origin: str) -> Manifest:
    """The manifest in `text` (TOML), with defaults for missing fields.

    Raises ManifestError with every mistake at once, one per line: origin, field, value, allowed values.
    """
    if len(text.encode(errors="replace")) > MANIFEST_BYTES_MAX:
        raise ManifestError(f"{origin}: longer than {MANIFEST_BYTES_MAX} bytes; is this a manifest?")
    try:
        tree = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ManifestError(f"{origin}: not TOML: {error}") from None
    except RecursionError:
        raise ManifestError(f"{origin}: not a manifest: nested too deeply") from None
    return from_tree(tree, origin)


def from_tree(tree: Mapping[str, Any], origin: str) -> Manifest:
    """The manifest in nested dictionaries (of TOML or JSON). Raises ManifestError as `parse`."""
    mistakes: list[str] = []
    raw = _flatten(tree, mistakes)
    if raw.get("data.source") == "text":  # of earlier versions
        raise ManifestError(
            f'{origin}: data.source = "text": a run reads no folder of text by itself: `swarmnode data make OUT --from'
            " FOLDER` makes a data set of it, then `swarmnode init RUN --data OUT` a run on that"
        )
    values: dict[str, Value] = {}
    for name, given in raw.items():
        if (constant := CONSTANTS.get(name)) is not None:
            if (tuple(given) if isinstance(given, list) else given) != constant.value:
                mistakes.append(
                    f"{name} = {_shown(given)}: it is {_shown(constant.value)} in every run: delete the line"
                )
            continue
        field = BY_NAME.get(name)
        if field is None:
            mistakes.append(_unknown(name, given))
            continue
        value = field.check.accept(given)
        if value is None:
            mistakes.append(f"{name} = {_shown(given)}: allowed is {field.check.allowed}")
        else:
            values[name] = value
    manifest = build(values)
    wrong = (raw.keys() & BY_NAME.keys()) - values.keys()
    for across in ACROSS:
        if wrong.isdisjoint(across.names) and not across.holds(manifest):
            name = across.names[0]
            mistakes.append(f"{name} = {_shown(value_of(manifest, name))}: allowed is {across.allowed(manifest)}")
    if mistakes:
        raise ManifestError(_report(mistakes, origin))
    return manifest


def build(values: Mapping[str, Value]) -> Manifest:
    """A manifest of `values` by field name, with defaults for the rest, unchecked."""
    manifest = Manifest()
    top: dict[str, Any] = {f.key: values[f.name] for f in FIELDS if not f.table and f.name in values}
    for table in TABLES:
        changed = {f.key: values[f.name] for f in FIELDS if f.table == table and f.name in values}
        top[table] = dataclasses.replace(getattr(manifest, table), **changed)
    return dataclasses.replace(manifest, **top)


def value_of(manifest: Manifest, name: str) -> Value:
    """The value of the field called `name` ("model.layers")."""
    table, _, key = name.rpartition(".")
    return cast(Value, getattr(getattr(manifest, table) if table else manifest, key))


def tree_of(manifest: Manifest) -> dict[str, Any]:
    """All fields in nested dictionaries, as `from_tree` reads them; without constants."""
    tree: dict[str, Any] = {}
    for field in FIELDS:
        table, _, key = field.name.rpartition(".")
        (tree.setdefault(table, {}) if table else tree)[key] = value_of(manifest, field.name)
    return tree


def differing(before: Manifest, after: Manifest) -> list[str]:
    """The names of the fields that differ."""
    return [field.name for field in FIELDS if value_of(before, field.name) != value_of(after, field.name)]


def difference(before: Manifest, after: Manifest) -> list[str]:
    """The fields that differ, one line each: name, old value, new value."""
    names = differing(before, after)
    return [f"{name}: {_shown(value_of(before, name))} -> {_shown(value_of(after, name))}" for name in names]


def template(manifest: Manifest | None = None) -> str:
    """A manifest as commented TOML: every field with its meaning, allowed values and the origin of its default.

    `parse(template(m), ...)` equals `m`.
    """
    manifest = manifest or Manifest()
    lines = [
        "# A swarmnode manifest: one training job. Once signed it is frozen; its hash is the run's id.",
        "# Every field is optional; a missing one has the value shown here.",
    ]
    table = ""
    for field in FIELDS:
        if field.table != table:
            table = field.table
            lines += ["", f"[{table}]", f"# {TABLES[table]}"]
        lines += [
            "",
            *_comment(field),
            f"{field.key} = {_toml(value_of(manifest, field.name))}",
        ]
    return "\n".join(lines) + "\n"


QUESTIONS = (  # tables, and the fields that are shown even with their defaults
    ("What is trained?", ("model", "training", "base"), ("model.layers", "model.width", "model.context")),
    ("On what?", ("data",), ("data.source",)),
    (
        "How long, by how many, how fast?",
        ("inner", "pipeline", "gossip"),
        (
            "inner.optimizer",
            "inner.learning_rate",
            "inner.muon_learning_rate",
            "inner.decay_samples",
            "pipeline.stages",
        ),
    ),
    ("Who may take part?", ("access",), ("access.mode",)),
)


def brief(manifest: Manifest, origins: Mapping[str, str]) -> str:
    """A manifest as TOML in the order of an organiser's four questions: the fields asked first, and all that differ
    from their defaults, with the `origins` of these values.

    `parse(brief(m, {}), ...)` equals `m`.
    """
    lines = [
        f"#:schema ./{SCHEMA_FILE}",
        "# A swarmnode manifest: one training job. `swarmnode manifest explain FIELD` tells of any field; those that",
        "# are not here have their defaults (`swarmnode manifest show`). Once signed it is frozen.",
        *_brief_table(manifest, origins, "", ("name",)),
    ]
    asked_for = [table for _, tables, _ in QUESTIONS for table in tables]
    rest = tuple(table for table in TABLES if table not in asked_for)
    for question, tables, always in (*QUESTIONS, ("And besides", rest, ())):
        text_lines = [line for table in tables for line in _brief_table(manifest, origins, table, always)]
        lines += ["", f"# {question}", *text_lines] if text_lines else []
    return "\n".join(lines) + "\n"


def _brief_table(manifest: Manifest, origins: Mapping[str, str], table: str, always: Sequence[str]) -> list[str]:
    default = Manifest()
    lines = []
    for field in FIELDS:
        value = value_of(manifest, field.name)
        if field.table != table or (field.name not in always and value == value_of(default, field.name)):
            continue
        if field.name in origins:
            lines += textwrap.wrap(f"# Here: {origins[field.name]}.", COMMENT_COLUMNS, subsequent_indent="# ")
        text = f"{field.key} = {_toml(value)}"
        room = COMMENT_COLUMNS - max(28, len(text)) - 4
        meaning = textwrap.shorten(field.meaning.partition(". ")[0].rstrip("."), max(20, room), placeholder=" ...")
        lines.append(f"{text:<28}  # {meaning}")
    return [f"[{table}]", *lines] if lines and table else lines


def explained(name: str) -> str:
    """Meaning, allowed values and default of a field, or of all fields of a table. Raises UsageError."""
    fields = [field for field in FIELDS if name in (field.name, field.table)]
    fields = fields or [field for field in FIELDS if field.key == name]
    if not name or not fields:
        raise UsageError(_unknown(name, "").replace(' = ""', ""))
    return "\n\n".join("\n".join([field.name, *(line[2:] for line in _comment(field))]) for field in fields)


def with_value(text: str, name: str, value: str) -> str:
    """Manifest `text` with the field `name` set to `value` (TOML), all other lines as they are, unchecked."""
    table, _, key = name.rpartition(".")
    lines = text.splitlines()
    here = ""
    end = 0 if not table else None
    for number, line in enumerate(lines):
        if header := re.match(r"\[([^\]]*)\]", line):
            here = header[1].strip()
        if here != table:
            continue
        if old := re.match(rf"{re.escape(key)}\s*=.*?(\s+#[^\"']*)?\Z", line):
            lines[number] = f"{key} = {value}{old[1] or ''}"
            return "\n".join(lines) + "\n"
        if line.strip() and not line.startswith("#"):
            end = number + 1
    if end is None:
        lines += ["", f"[{table}]"]
        end = len(lines)
    return "\n".join([*lines[:end], f"{key} = {value}", *lines[end:]]) + "\n"


def schema() -> str:
    """The JSON Schema of manifests: types, choices, defaults and meanings, for editors. `parse` checks more."""
    tables: dict[str, dict[str, Any]] = {table: {} for table in ("", *TABLES)}
    for field in FIELDS:
        tables[field.table][field.key] = _schema_of(field)
    whole = tables.pop("") | {
        table: {"type": "object", "description": TABLES[table], "additionalProperties": False, "properties": fields}
        for table, fields in tables.items()
    }
    head = {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "A manifest of swarmnode"}
    return json.dumps(head | {"type": "object", "additionalProperties": False, "properties": whole}, indent=1) + "\n"


def _schema_of(field: Field) -> dict[str, Any]:
    default = value_of(Manifest(), field.name)
    described: dict[str, Any] = {"description": f"{field.meaning} Allowed: {field.check.allowed}.", "default": default}
    kinds = {bool: "boolean", int: "integer", float: "number", tuple: "array"}
    if _CHOICES.match(field.check.allowed):
        described["enum"] = json.loads(f"[{field.check.allowed.replace(' or ', ', ')}]")
    elif type(default) in kinds:
        described["type"] = kinds[type(default)]
    return described


@functools.cache
def _comment(field: Field) -> list[str]:
    default = _toml(value_of(Manifest(), field.name))
    says = f"{field.meaning} Allowed: {field.check.allowed}. Default: {default} ({field.origin})."
    return textwrap.wrap(
        says,
        COMMENT_COLUMNS,
        initial_indent="# ",
        subsequent_indent="# ",
        break_long_words=False,
        break_on_hyphens=False,
    )


def _toml(value: Value) -> str:
    match value:
        case tuple():
            return "[" + ", ".join(_toml(item) for item in value) + "]"
        case str() | bool():
            return json.dumps(value, ensure_ascii=False)
        case int():
            return f"{value:_}" if value >= 10_000 else str(value)
        case float():
            return repr(value)


def _flatten(tree: Mapping[str, Any], mistakes: list[str]) -> dict[str, Any]:
    """Values by dotted name, one level of tables deep."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        if key not in TABLES:
            flat[key] = value
        elif isinstance(value, Mapping):
            flat |= {f"{key}.{inner}": item for inner, item in value.items()}
        else:
            mistakes.append(f"{key} = {_shown(value)}: allowed is a table, written [{key}]")
    return flat


def _unknown(name: str, value: Any) -> str:
    if isinstance(value, Mapping) and "." not in name:
        close = difflib.get_close_matches(name, TABLES, n=1)
        hint = f"did you mean [{close[0]}]?" if close else "tables are " + ", ".join(f"[{t}]" for t in TABLES)
        return f"[{_clean(name)}]: unknown table; {hint}"
    table, _, key = name.rpartition(".")
    close = difflib.get_close_matches(name, BY_NAME, n=1, cutoff=0.7)
    elsewhere = [field.name for field in FIELDS if field.key == key]
    if elsewhere or close:
        hint = f"did you mean {(elsewhere or close)[0]}?"
    else:
        hint = "allowed are " + ", ".join(field.key for field in FIELDS if field.table == table)
    return f"{_clean(name)} = {_shown(value)}: unknown field; {hint}"


def _report(mistakes: list[str], origin: str) -> str:
    if len(mistakes) == 1:
        return f"{origin}: {mistakes[0]}"
    shown = mistakes[:MISTAKES_MAX]
    if len(mistakes) > len(shown):
        shown.append(f"and {len(mistakes) - len(shown)} more")
    return f"{origin}: {len(mistakes)} mistakes\n" + "\n".join(f"  {line}" for line in shown)


def _shown(value: Any) -> str:
    """`value` as shown in an error: one line, short, no control characters."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        value = list(value)
    return _clean(json.dumps(value, ensure_ascii=False, default=str) if isinstance(value, str | list) else str(value))


def _clean(text: str) -> str:
    text = printable(text, SHOWN_MAX + 1)
    return text if len(text) <= SHOWN_MAX else text[: SHOWN_MAX - 3] + "..."
