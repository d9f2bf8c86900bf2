"""Rows of JSON, CSV and Parquet files and of the hub as documents: a text, or a conversation."""

from __future__ import annotations

import bz2
import codecs
import contextlib
import csv
import gzip
import importlib
import io
import itertools
import json
import lzma
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, BinaryIO, cast

from swarmnode.data.chat_template import Conversation, conversation
from swarmnode.errors import DataError

DOCUMENT_BYTES_MAX = 1 << 20
"""Longer documents are cut at a line's end (derived: 250,000 tokens, more than a context)."""
LINE_BYTES_MAX = 64 << 20
JSON_BYTES_MAX = 2 << 30
"""An array of JSON is read whole; a longer one should be lines (guess)."""
HEADER_BYTES_MAX = 64 << 10
NAMED_MAX = 20
TEXT, MESSAGES = "text", "messages"

Document = str | Conversation
"""A text, or a conversation."""


@dataclass(frozen=True, slots=True)
class Placed:
    """A document, and the file and line or row it comes from."""

    document: Document
    where: str


@dataclass(slots=True)
class BadRows:
    """The files and rows that are left out: at most `limit`. Empty rows are only counted."""

    limit: int = 0
    count: int = 0
    empty: int = 0
    lines: list[str] = field(default_factory=list)
    """The first NAMED_MAX of them, with the reason."""

    def add(self, where: str, why: str) -> None:
        """Leave out what is at `where`. Raises DataError when that is one too many."""
        self.count += 1
        if len(self.lines) < NAMED_MAX:
            self.lines.append(f"{where}: {why}")
        if self.count > self.limit:
            more = f"; with this one {self.count} are bad, and --skip-bad allows {self.limit}" if self.limit else ""
            raise DataError(f"{where}: {why}{more}")

    def merge(self, other: BadRows) -> None:
        """Count those of `other`, too. Raises DataError as `add`."""
        self.count += other.count
        self.empty += other.empty
        self.lines += other.lines[: NAMED_MAX - len(self.lines)]
        if self.count > self.limit:
            raise DataError(f"{other.lines[0]}; {self.count} files or rows are bad, and --skip-bad allows {self.limit}")


@dataclass(frozen=True, slots=True)
class Reading:
    """Options for turning records into documents. `field` names the key of the text, `messages` that of the
    conversation; None: the usual one. Documents are cut to at most `cut_nbytes` bytes. `encoding` is that of files
    that are not UTF-8 and have no mark of their own. `split` is that of a set which has several."""

    field: str | None = None
    messages: str | None = None
    cut_nbytes: int = DOCUMENT_BYTES_MAX
    split: str = "train"
    encoding: str = ""

    @property
    def keys(self) -> tuple[str, str]:
        """The keys of text and conversation that may be read; "" for one that may not."""
        if self.field is None and self.messages is None:
            return TEXT, MESSAGES
        return self.field or "", self.messages or ""


@dataclass(frozen=True, slots=True)
class DocumentSpan:
    """A piece of work: some documents of one source. `first` and `last` bound bytes for text and jsonl (documents that
    begin in [first, last)), row groups for Parquet, and a shard out of `of` for a hub data set. Kind `files` is several
    whole text files. `version` changes with the input."""

    source: int
    kind: str
    name: str
    files: tuple[str, ...]
    first: int = 0
    last: int = -1
    nbytes: int = 0
    version: str = ""
    of: int = 1
    compression: str = ""
    encoding: str = ""

    @property
    def remote(self) -> bool:
        """Whether it lies behind a network."""
        return self.kind == "hub"


def shown(name: str | os.PathLike[str]) -> str:
    """`name` of a file as text, also where it is no UTF-8."""
    return os.fsencode(name).decode(errors="backslashreplace")


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
    with opened(work) as raw:
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
    """A list of objects, each a row; an object, which is one row; or an object with a list for each column."""
    name = shown(work.files[0])
    with opened(work) as stream:
        raw = stream.read(JSON_BYTES_MAX + 1)
    if len(raw) > JSON_BYTES_MAX:
        raise DataError(f"{name}: longer than {JSON_BYTES_MAX} bytes; write one object a line (.jsonl)")
    try:
        tree = json.loads(raw.decode(work.encoding) if work.encoding else raw)
    except (ValueError, RecursionError) as error:
        bad.add(name, f"not JSON ({str(error)[:80]})")
        return
    rows: Iterable[Any] = tree if isinstance(tree, list) else [tree]
    if isinstance(tree, dict) and isinstance(tree.get(reading.keys[0]), list):
        columns = {key: column for key, column in tree.items() if isinstance(column, list)}
        rows = (dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True))
    for number, value in enumerate(rows):
        yield from row_document(value, reading, f"{name} item {number}", bad)


def read_csv(work: DocumentSpan, reading: Reading, bad: BadRows) -> Iterator[Placed]:
    """A table whose first line names the columns."""
    name = shown(work.files[0])
    csv.field_size_limit(LINE_BYTES_MAX)
    with opened(work) as raw:
        text = io.TextIOWrapper(raw, encoding=work.encoding or "utf-8-sig", newline="")
        first = text.readline(HEADER_BYTES_MAX)
        delimiter = max("\t,;|" if ".tsv" in name.lower() else ",;\t|", key=first.count)
        rows = csv.reader(itertools.chain([first], text), delimiter=delimiter, strict=True)
        columns = next(rows, [])
        if not _wanted_columns(columns, reading, name, bad):
            return
        for row in rows:
            where = f"{name}:{rows.line_num}"
            if not row:
                continue
            if len(row) != len(columns):
                bad.add(where, f"{len(row)} columns where the first line names {len(columns)}")
                continue
            yield from row_document(dict(zip(columns, row, strict=True)), reading, where, bad, columnar=True)


def read_parquet(work: DocumentSpan, reading: Reading, bad: BadRows) -> Iterator[Placed]:
    with opened(work) as file:
        table = library("pyarrow.parquet", work.name).ParquetFile(file)
        groups = range(work.first, work.last if work.last >= 0 else table.num_row_groups)
        columns = _wanted_columns(table.schema_arrow.names, reading, shown(work.files[0]), bad)
        before = sum(table.metadata.row_group(at).num_rows for at in range(work.first))
        if columns:
            batches = table.iter_batches(1024, row_groups=groups, columns=columns)
            yield from _batches(batches, reading, work, bad, before)


def _batches(batches: Any, reading: Reading, work: DocumentSpan, bad: BadRows, before: int = 0) -> Iterator[Placed]:
    number = before
    for batch in batches:
        for row in batch.to_pylist():
            number += 1
            yield from row_document(row, reading, f"{shown(work.files[0])} row {number}", bad, columnar=True)


def _wanted_columns(names: Sequence[str], reading: Reading, where: str, bad: BadRows) -> list[str]:
    """The columns to read; none where the table is left out as `bad`. Raises DataError where it is not clear which."""
    wanted = [one for one in reading.keys if one and one in names]
    if not wanted:
        asked = " or ".join(f'"{one}"' for one in reading.keys if one)
        bad.add(where, f"no column {asked}; there are {', '.join(names)[:200]}; see --field and --messages")
        return []
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
        else:
            bad.add(where, f'"{messages}" is no list of objects with "role" and "content", one of them "assistant"')
    elif isinstance(told, str):
        yield Placed(told, where)
    else:
        asked, keys = (
            " and no ".join(f'"{one}"' for one in (text, messages) if one),
            ", ".join(map(str, list(value)[:8])),
        )
        how = "--field or --messages names the key"
        bad.add(where, f"no text under {asked} ({keys[:100]}); {how}")


def _filled(value: Any) -> Any:
    """`value` without the keys that have no value, except `content`."""
    if isinstance(value, list):
        return [_filled(one) for one in value]
    if isinstance(value, dict):
        return {key: _filled(one) for key, one in value.items() if one is not None or key == "content"}
    return value


def opened(work: DocumentSpan) -> BinaryIO:
    """Opens the file of `work`, decompressed."""
    return decompressed(work.files[0], work.compression)


def decompressed(path: str, compression: str) -> BinaryIO:
    """The local file `path`, whose name is not looked at."""
    if (module := {"gzip": gzip, "bz2": bz2, "xz": lzma}.get(compression)) is not None:
        return cast(BinaryIO, module.open(path, "rb"))
    file = open(path, "rb")  # noqa: SIM115  the caller closes it
    if not compression:
        return file
    return cast(BinaryIO, io.BufferedReader(library("pyarrow", path).CompressedInputStream(file, compression)))


def library(module: str, wanted_for: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError:
        package = module.partition(".")[0]
        raise DataError(
            f"{shown(wanted_for)}: needs the library {package}, which is not installed: pip install {package}"
        ) from None
