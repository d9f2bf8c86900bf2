"""Rows of Arrow tables (Parquet, Arrow IPC, `datasets`) as the JSON values that they were made of.

A table has one type for all rows. Writers fit rows that differ into it in two ways, and both are undone here: values of
several kinds are JSON text of the type `arrow.json` (`datasets`' Json, duckdb's JSON), and keys that a row lacks are
null (structs of polars, duckdb and pandas). Days, times and bytes become the text that JSON has for them.
"""

from __future__ import annotations

import contextlib
import datetime
import decimal
import functools
import json
import mmap
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, BinaryIO, cast

from swarmnode.data.document_row import (
    BadRows,
    DocumentSpan,
    Placed,
    Reading,
    are_parts,
    library,
    opened,
    row_document,
    shown,
    wanted_columns,
)

ARROW_FILE = b"ARROW1\0\0"
ARROW_STREAM = b"\xff\xff\xff\xff"
"""Begins a message of the stream format; four bytes with its length follow."""

Place = tuple[str, ...]
"""The keys that lead to a value, from its column on, and ITEM for those of a list."""

ITEM = "[]"

Read = Callable[[Any], Any]
"""Makes the JSON value of a value that is not null."""

JSON_TYPE = "arrow.json"
BATCH_ROWS = 1024
TEXT_KEYS = ("role", "content", "name", "tool_call_id", "reasoning_content", "reasoning", "thinking")
"""Keys of a message whose value is a text, or parts."""


class ArrowRows:
    """Makes the rows of tables of one schema, whose columns `text` and `talk` hold texts and conversations."""

    def __init__(self, schema: Any, text: str, talk: str) -> None:
        self._message = (talk, ITEM)
        self._texts = {(text,), *((talk, ITEM, key) for key in TEXT_KEYS), (talk, ITEM, "content", ITEM, "text")}
        self._columns = {field.name: self._reader(field, (field.name,)) for field in schema}

    def rows(self, batch: Any) -> Iterator[dict[str, Any]]:
        """The rows of a record batch or table."""
        for first in range(0, batch.num_rows, BATCH_ROWS):
            for row in batch.slice(first, BATCH_ROWS).to_pylist():
                yield {key: _valued(self._columns[key], value) for key, value in row.items()}

    def _reader(self, field: Any, place: Place) -> Read:
        """Reads the values of a field of a schema."""
        import pyarrow
        from pyarrow import types

        kind = field.type
        # A pyarrow that does not know the type gives its storage, and names the type beside it.
        name = getattr(kind, "extension_name", (field.metadata or {}).get(b"ARROW:extension:name", b"").decode())
        if name == JSON_TYPE:
            return functools.partial(_parsed, is_text=place in self._texts)
        if name == "arrow.uuid":
            return str
        if isinstance(kind, pyarrow.BaseExtensionType):
            kind = kind.storage_type
        if types.is_dictionary(kind) or types.is_run_end_encoded(kind):
            return self._reader(pyarrow.field(field.name, kind.value_type), place)
        if types.is_map(kind):
            return functools.partial(_of_map, self._reader(kind.item_field, place))
        if types.is_nested(kind) and hasattr(kind, "value_field"):
            return functools.partial(_of_list, self._reader(kind.value_field, (*place, ITEM)))
        if types.is_struct(kind):
            readers = {each.name: self._reader(each, (*place, each.name)) for each in kind}
            kept = "content" if place == self._message else ""
            return functools.partial(_of_struct, readers, kept)
        return _plain


def _valued(read: Read, value: Any) -> Any:
    return None if value is None else read(value)


def _of_list(read: Read, values: list[Any]) -> list[Any]:
    return [_valued(read, value) for value in values]


def _of_map(read: Read, items: list[tuple[Any, Any]]) -> dict[str, Any]:
    return {str(key): _valued(read, value) for key, value in items}


def _of_struct(readers: Mapping[str, Read], kept: str, value: Mapping[str, Any]) -> dict[str, Any]:
    """`value` without the keys that have none, except the one `kept`."""
    return {key: _valued(readers[key], one) for key, one in value.items() if one is not None or key == kept}


def _parsed(raw: str, *, is_text: bool) -> Any:
    """The value of a JSON text. A text that reads as a number, a list or an object stands there without quotes in files
    of `datasets` (`json_encode_field`): where a text `is_text`, all but texts and parts are `raw` itself."""
    try:
        value = json.loads(raw)
    except (ValueError, RecursionError):
        return raw
    if is_text and not (value is None or isinstance(value, str) or are_parts(value)):
        return raw
    return value


def _plain(value: Any) -> Any:
    match value:
        case bytes():
            with contextlib.suppress(UnicodeDecodeError):
                return value.decode()
        case datetime.datetime():
            # JSON readers make timestamps of days, too; a day is more frequent than a midnight.
            day = value.tzinfo is None and value.time() == datetime.time()
            return value.date().isoformat() if day else value.isoformat().replace("+00:00", "Z")
        case datetime.date() | datetime.time():
            return value.isoformat()
        case decimal.Decimal():
            return int(value) if value == value.to_integral_value() else float(value)
        case datetime.timedelta():
            return str(value)
    return value


# ---- files


def read_parquet(work: DocumentSpan, reading: Reading, bad: BadRows) -> Iterator[Placed]:
    with _unpacked(work) as file:
        table = library("pyarrow.parquet", work.name).ParquetFile(file)
        groups = range(work.first, work.last if work.last >= 0 else table.num_row_groups)
        columns = wanted_columns(table.schema_arrow.names, reading, shown(work.files[0]), bad)
        before = sum(table.metadata.row_group(at).num_rows for at in range(work.first))
        if columns:
            batches = table.iter_batches(BATCH_ROWS, row_groups=groups, columns=columns)
            yield from table_rows(batches, reading, shown(work.files[0]), bad, before)


def read_arrow(work: DocumentSpan, reading: Reading, bad: BadRows) -> Iterator[Placed]:
    """Arrow's IPC formats: the stream, as `datasets` saves it, and the file, which is Feather."""
    name = shown(work.files[0])
    arrow = library("pyarrow", work.name)
    with _unpacked(work) as file:
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)  # no size in it reaches further
        is_file = mapped[: len(ARROW_FILE)] == ARROW_FILE
        reader = arrow.BufferReader(arrow.py_buffer(mapped))
        table = arrow.ipc.open_file(reader) if is_file else arrow.ipc.open_stream(reader)
        columns = wanted_columns(table.schema.names, reading, name, bad)
        if columns:
            batches = (table.get_batch(at) for at in range(table.num_record_batches)) if is_file else table
            yield from table_rows(_checked(batches, columns), reading, name, bad)


@contextlib.contextmanager
def _unpacked(work: DocumentSpan) -> Iterator[BinaryIO]:
    """The file of `work` on a disk, where any place of it can be read."""
    with contextlib.ExitStack() as stack:
        file = stack.enter_context(opened(work))
        if work.compression:
            unpacked = stack.enter_context(tempfile.TemporaryFile())
            shutil.copyfileobj(file, unpacked)
            unpacked.seek(0)
            file = cast(BinaryIO, unpacked)
        yield file


def _checked(batches: Iterable[Any], columns: list[str]) -> Iterator[Any]:
    """The `columns` of each batch, whose offsets lie in it."""
    for batch in batches:
        chosen = batch.select(columns)
        chosen.validate(full=True)
        yield chosen


def table_rows(batches: Iterable[Any], reading: Reading, where: str, bad: BadRows, before: int = 0) -> Iterator[Placed]:
    """The rows of the record batches of a table, numbered from `before` on."""
    number = before
    rows: ArrowRows | None = None
    for batch in batches:
        rows = rows or ArrowRows(batch.schema, *reading.keys)
        for row in rows.rows(batch):
            number += 1
            yield from row_document(row, reading, f"{where} row {number}", bad)
