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
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, BinaryIO, cast

from swarmnode.base.errors import DataError
from swarmnode.data.chat_template import Conversation, conversation

DOCUMENT_BYTES_MAX = 1 << 20
"""Longer documents are cut at a line's end (derived: 250,000 tokens, more than a context)."""
LINE_BYTES_MAX = 64 << 20
JSON_BYTES_MAX = 2 << 30
"""An array of JSON is read whole; a longer one should be lines (guess)."""
HEADER_BYTES_MAX = 64 << 10
PACKED_BYTES = 64 << 10
NAMED_MAX = 20
TEXT = "text"
MESSAGES = "messages"
TOOLS = "tools"

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
        number = 0
        at = stream.tell() if work.first else 0
        while (work.last < 0 or at < work.last) and (line := stream.readline(LINE_BYTES_MAX + 1)):
            number += 1
            at += len(line)
            yield number, line.removeprefix(codecs.BOM_UTF8) if number == 1 and not work.first else line


def read_json(work: DocumentSpan, reading: Reading, bad: BadRows) -> Iterator[Placed]:
    """A list of texts, or of objects, each a row; an object, which is one row; or an object with a list or an object
    (as pandas writes it) for each column."""
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
    for number, value in enumerate(_rows_of(tree, reading)):
        yield from row_document(value, reading, f"{name} item {number}", bad)


def _rows_of(tree: Any, reading: Reading) -> Iterable[Any]:
    if isinstance(tree, list):
        return ({reading.keys[0]: one} if isinstance(one, str) else one for one in tree)
    columns = dict[str, list[Any]]()
    for key, column in tree.items() if isinstance(tree, dict) else ():
        if isinstance(column, list | dict):
            columns[key] = list(column.values()) if isinstance(column, dict) else column
    text, messages = (columns.get(key, []) for key in reading.keys)
    if not text and not any(
        isinstance(talk, list | str) for talk in messages
    ):  # else the messages are one conversation
        return [tree]
    return (dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True))


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
        if not wanted_columns(columns, reading, name, bad):
            return
        for row in _csv_rows(rows, name, bad):
            where = f"{name}:{rows.line_num}"
            if not row:
                continue
            if len(row) != len(columns):
                bad.add(where, f"{len(row)} columns where the first line names {len(columns)}")
                continue
            yield from row_document(dict(zip(columns, row, strict=True)), reading, where, bad)


def _csv_rows(rows: Any, name: str, bad: BadRows) -> Iterator[list[str]]:
    """The rows of the reader `rows`, up to one that is no CSV (RFC 4180), which leaves out the rest as `bad`."""
    try:
        yield from rows
    except csv.Error as error:
        how = "write a quote within a text twice (Spark: option escape '\"'; MySQL: ESCAPED BY '\"'), or JSON lines"
        bad.add(f"{name}:{rows.line_num}", f"no CSV from this line on ({error}); {how}")


def wanted_columns(names: Sequence[str], reading: Reading, where: str, bad: BadRows) -> list[str]:
    """The columns to read; none where the table is left out as `bad`. Raises DataError where it is not clear which."""
    wanted = [one for one in reading.keys if one and one in names]
    if not wanted:
        asked = " or ".join(f'"{one}"' for one in reading.keys if one)
        bad.add(where, f"no column {asked}; there are {', '.join(names)[:200]}; see --field and --messages")
        return []
    if len(wanted) == 2 and reading.field is None and reading.messages is None:
        raise DataError(f"{where}: {_BOTH}")
    return [*wanted, *([TOOLS] if TOOLS in names else [])]


_BOTH = f'both "{TEXT}" and "{MESSAGES}" are there: say --field {TEXT} or --messages {MESSAGES}'


def row_document(value: Any, reading: Reading, where: str, bad: BadRows) -> Iterator[Placed]:
    """The document of a row, which is left out as `bad` when it has none."""
    if not isinstance(value, dict):
        bad.add(where, f"no text: not an object but {type(value).__name__}")
        return
    text, messages = reading.keys
    told = value.get(text)
    talk = value.get(messages)
    if told is not None and talk is not None and reading.field is None and reading.messages is None:
        raise DataError(f"{where}: {_BOTH}")
    if messages and talk is not None:
        try:
            talk, tools = _unfilled(_talk_of(talk), _tools_of(value.get(TOOLS)))
        except RecursionError:
            bad.add(where, f'"{messages}" or "{TOOLS}" is nested too deeply')
            return
        if (said := conversation(talk, tools)) is not None:
            yield Placed(said, where)
        else:
            bad.add(where, f'"{messages}" is no list of objects with "role" and "content", one of them "assistant"')
    elif isinstance(told, str):
        yield Placed(told, where)
    else:
        asked = " and no ".join(f'"{one}"' for one in (text, messages) if one)
        keys = ", ".join(map(str, list(value)[:8]))
        how = "--field or --messages names the key"
        bad.add(where, f"no text under {asked} ({keys[:100]}); {how}")


def _from_text(value: Any) -> Any:
    """`value`, or what it says in JSON, as tables often hold it."""
    with contextlib.suppress(ValueError, RecursionError):
        return json.loads(value) if isinstance(value, str) else value
    return value


def _tools_of(value: Any) -> Any:
    tools = _from_text(value)
    return [_from_text(tool) for tool in tools] if isinstance(tools, list) else tools


def _talk_of(value: Any) -> Any:
    talk = _from_text(value)
    return [_with_text(message) for message in talk] if isinstance(talk, list) else talk


def _with_text(message: Any) -> Any:
    """`message`, its content as the text that it was. Writers that take a text for JSON make numbers, lists and objects
    of some (`to_json` of `datasets`); parts are objects with a type."""
    content = message.get("content") if isinstance(message, dict) else None
    if content is None or isinstance(content, str) or content == [] or are_parts(content):
        return message
    return {**message, "content": json.dumps(content, ensure_ascii=False)}


def are_parts(content: Any) -> bool:
    """Whether `content` of a message is parts: some objects, each with a type."""
    return (
        isinstance(content, list) and content != [] and all(isinstance(one, dict) and "type" in one for one in content)
    )


def _unfilled(talk: Any, tools: Any) -> tuple[Any, Any]:
    """Messages and tools without the keys that a writer with one type for all rows (polars, duckdb) fills up with null.
    All objects at one place then have the same keys. Elsewhere a null is what the row says."""
    if not (isinstance(talk, list) and _alike(talk) and _alike([tools])):
        return talk, tools
    said = [
        {key: _without_nulls(one) for key, one in message.items() if one is not None or key == "content"}
        if isinstance(message, dict)
        else message
        for message in talk
    ]
    return said, _without_nulls(tools)


def _alike(values: Sequence[Any]) -> bool:
    """Whether in `values` all objects at the same place have the same keys."""
    objects = [one for one in values if isinstance(one, dict)]
    items = [item for one in values if isinstance(one, list) for item in one]
    keys = objects[0].keys() if objects else ()
    if any(one.keys() != keys for one in objects):
        return False
    return (not items or _alike(items)) and all(_alike([one[key] for one in objects]) for key in keys)


def _without_nulls(value: Any) -> Any:
    if isinstance(value, list):
        return [_without_nulls(one) for one in value]
    if isinstance(value, dict):
        return {key: _without_nulls(one) for key, one in value.items() if one is not None}
    return value


def opened(work: DocumentSpan) -> BinaryIO:
    """Opens the file of `work`, decompressed."""
    return decompressed(work.files[0], work.compression)


class PackedStreams(io.RawIOBase):
    """The content of a file that holds one packed stream or several, with zeros between them. `bz2.open` and
    `lzma.open` end at such zeros, and at a damaged stream behind a whole one, without a word (CPython 3.11)."""

    def __init__(self, file: BinaryIO, start: Callable[[], Any]) -> None:
        """`start` makes what unpacks one stream, `bz2.BZ2Decompressor` or `lzma.LZMADecompressor`."""
        self._file = file
        self._start = start
        self._stream = start()

    def readable(self) -> bool:
        return True

    def close(self) -> None:
        self._file.close()
        super().close()

    def readinto(self, buffer: Any) -> int:
        """Fill `buffer`; returns the number of bytes, 0 at the end. Raises EOFError for a file that is cut off, the
        decompressor's own error for a damaged one."""
        data = b""
        while not data:
            packed = b""
            if self._stream.eof:
                if not (packed := self._behind(self._stream.unused_data)):
                    return 0
                self._stream = self._start()
            elif self._stream.needs_input and not (packed := self._file.read(PACKED_BYTES)):
                raise EOFError("it is cut off")
            data = self._stream.decompress(packed, len(buffer))
        buffer[: len(data)] = data
        return len(data)

    def _behind(self, packed: bytes) -> bytes:
        """The bytes behind a stream, from the first that is not zero on; `packed` are the first of them."""
        while not (packed := packed.lstrip(b"\0")) and (packed := self._file.read(PACKED_BYTES)):
            pass
        return packed


def decompressed(path: str, compression: str) -> BinaryIO:
    """The local file `path`, whose name is not looked at."""
    if compression == "gzip":
        return cast(BinaryIO, gzip.open(path, "rb"))
    file = open(path, "rb")  # noqa: SIM115  the caller closes it
    if not compression:
        return file
    if (start := {"bz2": bz2.BZ2Decompressor, "xz": lzma.LZMADecompressor}.get(compression)) is not None:
        return cast(BinaryIO, io.BufferedReader(PackedStreams(file, start)))
    return cast(BinaryIO, io.BufferedReader(library("pyarrow", path).CompressedInputStream(file, compression)))


def library(module: str, wanted_for: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError:
        package = module.partition(".")[0]
        raise DataError(
            f"{shown(wanted_for)}: needs the library {package}, which is not installed: pip install {package}"
        ) from None
