"""Rows of JSON, CSV, Parquet and Arrow files and of the hub as documents: a text, or a conversation."""

from __future__ import annotations

import codecs
import contextlib
import csv
import importlib
import io
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, cast

from swarmnode.data.chat_template import conversation
from swarmnode.data.document_span import MESSAGES, TEXT, BadRows, DocumentSpan, Placed, Reading, shown
from swarmnode.errors import DataError

LINE_BYTES_MAX = 64 << 20
JSON_BYTES_MAX = 2 << 30
"""An array of JSON is read whole; a longer one should be lines (guess)."""
HEADER_BYTES_MAX = 64 << 10


def read_jsonl(work: DocumentSpan, reading: Reading, bad: BadRows) -> Iterator[Placed]:
    name = shown(work.files[0])
    for number, line in _lines(work):
        where = f"{name}:{number}" + (f" from byte {work.first}" if work.first else "")
        if len(line) > LINE_BYTES_MAX:
            raise DataError(f"{where}: line longer than {LINE_BYTES_MAX} bytes; split it")
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except (ValueError, RecursionError) as error:
            bad.add(where, f"not JSON ({str(error)[:80]}); correct or remove the line")
            continue
        yield from row_document(value, reading, where, bad)


def _lines(work: DocumentSpan) -> Iterator[tuple[int, bytes]]:
    """Lines in UTF-8 that begin in [first, last) of the file, numbered from its first one."""
    with opened(work, work.files[0]) as raw:
        stream = raw
        if work.encoding not in ("", "utf-8-sig"):
            text = io.TextIOWrapper(raw, encoding=work.encoding)
            stream = cast(BinaryIO, io.BytesIO(text.read().encode(errors="surrogatepass")))
        if work.first:
            stream.seek(work.first - 1)
            stream.readline(LINE_BYTES_MAX)
        number, at = 0, stream.tell() if work.first else 0
        while (work.last < 0 or at < work.last) and (line := stream.readline(LINE_BYTES_MAX + 1)):
            number, at = number + 1, at + len(line)
            yield number, line.removeprefix(codecs.BOM_UTF8) if number == 1 and not work.first else line


def read_json(work: DocumentSpan, reading: Reading, bad: BadRows) -> Iterator[Placed]:
    """A list of objects, each a row."""
    name = shown(work.files[0])
    with opened(work, work.files[0]) as stream:
        raw = stream.read(JSON_BYTES_MAX + 1)
    if len(raw) > JSON_BYTES_MAX:
        raise DataError(f"{name}: longer than {JSON_BYTES_MAX} bytes; write one object a line (.jsonl)")
    try:
        tree = json.loads(raw.decode(work.encoding) if work.encoding else raw)
    except (ValueError, RecursionError) as error:
        bad.add(name, f"not JSON ({str(error)[:80]})")
        return
    if not isinstance(tree, list):
        bad.add(name, "one JSON value; rows are a list of objects, or one object a line")
        return
    for number, value in enumerate(tree):
        yield from row_document(value, reading, f"{name} item {number}", bad)


def read_csv(work: DocumentSpan, reading: Reading, bad: BadRows) -> Iterator[Placed]:
    """A table whose first line names the columns."""
    name = shown(work.files[0])
    csv.field_size_limit(LINE_BYTES_MAX)
    with opened(work, work.files[0]) as raw:
        text = io.TextIOWrapper(raw, encoding=work.encoding or "utf-8-sig", newline="")
        try:
            first = text.readline(HEADER_BYTES_MAX)
            delimiter = max("\t,;|" if ".tsv" in name.lower() else ",;\t|", key=first.count)
            columns = next(csv.reader([first], delimiter=delimiter), [])
            _check_columns(columns, reading, name)
            rows = csv.reader(text, delimiter=delimiter, strict=True)
            for row in rows:
                where = f"{name}:{rows.line_num + 1}"
                if not row:
                    continue
                if len(row) != len(columns):
                    bad.add(where, f"{len(row)} columns where the first line names {len(columns)}")
                    continue
                yield from row_document(dict(zip(columns, row, strict=True)), reading, where, bad, columnar=True)
        except (csv.Error, UnicodeError) as error:
            raise DataError(f"{name}: no table of text in {text.encoding}: {error}; see --encoding") from None


def read_parquet(work: DocumentSpan, reading: Reading, bad: BadRows) -> Iterator[Placed]:
    parquet = library("pyarrow.parquet", work.name)
    if "://" in work.files[0]:
        import fsspec

        table, groups = parquet.ParquetFile(fsspec.open(work.files[0], "rb").open()), None
    else:
        table, groups = arrow_file(parquet.ParquetFile, work.files[0]), range(work.first, work.last)
    columns = _check_columns(table.schema_arrow.names, reading, shown(work.files[0]))
    before = sum(table.metadata.row_group(at).num_rows for at in range(work.first)) if groups is not None else 0
    yield from _batches(table.iter_batches(1024, row_groups=groups, columns=columns), reading, work, bad, before)


def read_arrow(work: DocumentSpan, reading: Reading, bad: BadRows) -> Iterator[Placed]:
    """A file or a stream of Arrow's IPC format."""
    arrow = library("pyarrow", work.name)
    library("pyarrow.ipc", work.name)
    with arrow.memory_map(work.files[0]) as raw:
        is_file = raw.read(6) == b"ARROW1"
        raw.seek(0)
        opened = arrow_file(arrow.ipc.open_file if is_file else arrow.ipc.open_stream, raw)
        columns = _check_columns(opened.schema.names, reading, shown(work.files[0]))
        batches = (opened.get_batch(at) for at in range(opened.num_record_batches)) if is_file else iter(opened)
        yield from _batches((batch.select(columns) for batch in batches), reading, work, bad)


def arrow_file(opened: Callable[[Any], Any], file: Any) -> Any:
    try:
        return opened(file)
    except (ValueError, OSError) as error:  # pyarrow's errors are kinds of these
        raise DataError(f"{shown(str(file))}: damaged or of another kind: {str(error)[:150]}") from None


def _batches(batches: Any, reading: Reading, work: DocumentSpan, bad: BadRows, before: int = 0) -> Iterator[Placed]:
    number = before
    for batch in batches:
        for row in batch.to_pylist():
            number += 1
            yield from row_document(row, reading, f"{shown(work.files[0])} row {number}", bad, columnar=True)


def _check_columns(names: Sequence[str], reading: Reading, where: str) -> list[str]:
    """The columns to read. Raises DataError where the wanted ones are not among `names`, or it is not clear which."""
    wanted = [one for one in reading.keys if one and one in names]
    if not wanted:
        asked = " or ".join(f'"{one}"' for one in reading.keys if one)
        raise DataError(f"{where}: no column {asked}; there are {', '.join(names)[:200]}; see --field and --messages")
    if len(wanted) == 2 and reading.field is None and reading.messages is None:
        raise DataError(f"{where}: {_BOTH}")
    return [*wanted, *(["tools"] if "tools" in names else [])]


_BOTH = f'both "{TEXT}" and "{MESSAGES}" are there: say --field {TEXT} or --messages {MESSAGES}'


def row_document(value: Any, reading: Reading, where: str, bad: BadRows, *, columnar: bool = False) -> Iterator[Placed]:
    """The document of a row, which is left out as `bad` when it has none. In `columnar` forms each row has all keys: a
    key without a value is as if it were not there."""
    if not isinstance(value, dict):
        bad.add(where, f"no text: not an object but {type(value).__name__}")
        return
    text, messages = reading.keys
    told, talk = value.get(text), value.get(messages)
    if told is not None and talk is not None and reading.field is None and reading.messages is None:
        raise DataError(f"{where}: {_BOTH}")
    if messages and talk is not None:
        tools = value.get("tools")
        with contextlib.suppress(ValueError, RecursionError):  # tables often hold them as text
            talk = json.loads(talk) if isinstance(talk, str) else talk
            tools = json.loads(tools) if isinstance(tools, str) else tools
        if columnar:
            talk = _filled(talk)
            tools = _filled(tools)
        if (said := conversation(talk, tools)) is not None:
            yield Placed(said, where)
            return
        bad.add(where, f'"{messages}" is no list of objects with "role" and "content", one of them "assistant"')
        return
    if isinstance(told, str):
        try:
            yield Placed(told.encode(), where)
        except UnicodeEncodeError:
            bad.add(where, "text with half a character (a lone surrogate)")
        return
    asked = " and no ".join(f'"{one}"' for one in (text, messages) if one)
    bad.add(where, f"no text under {asked} ({', '.join(map(str, list(value)[:8]))[:100]}); see --field and --messages")


def _filled(value: Any) -> Any:
    """`value` without the keys that have no value, except `content`."""
    if isinstance(value, list):
        return [_filled(one) for one in value]
    if isinstance(value, dict):
        return {key: _filled(one) for key, one in value.items() if one is not None or key == "content"}
    return value


def opened(work: DocumentSpan, path: str) -> BinaryIO:
    """Opens a local file, or one at a URL that the organiser named, and decompresses it."""
    if "://" in path:
        return decompressed(path, "infer")
    return decompressed(path, work.compression) if work.compression else Path(path).open("rb")


def decompressed(path: str, compression: str) -> BinaryIO:
    import fsspec

    try:
        return cast(BinaryIO, fsspec.open(path, "rb", compression=compression).open())
    except (ImportError, ValueError) as error:
        needs = ": pip install zstandard" if compression == "zstd" else ""
        raise DataError(f"{shown(path)}: cannot be opened: {str(error)[:150]}{needs}") from None


def library(module: str, wanted_for: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError:
        raise DataError(
            f"{wanted_for}: needs the library {module.partition('.')[0]}, which is not installed: pip install"
            f" {module.partition('.')[0]}"
        ) from None
