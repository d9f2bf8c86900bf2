"""Reads the input of `data make` in pieces of work: text, JSON, CSV, Parquet and Arrow files, and sets of the hub.

What a file holds is told by its content, its name where the content cannot tell (CSV). Nothing is left out in silence:
a file or row that cannot be read is an error with its place, or is counted where the organiser allows some
(`BadRows`). A computer tokenises a piece of work in some seconds. Finished pieces are kept when `data make` is killed.
All of this runs on the organiser's machine and reads only inputs that the organiser named.
"""

from __future__ import annotations

import codecs
import contextlib
import csv
import io
import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, cast

from swarmnode.data.chat_template import Conversation, conversation
from swarmnode.data.source import PRIVATE_KEYS, READ_BYTES, SourceFile, cut_lines
from swarmnode.errors import DataError

WORK_BYTES = 32 << 20
"""Text in a piece of work (guess: ten seconds of a tokenizer)."""
DOCUMENT_BYTES_MAX = 1 << 20
"""Longer documents are cut at a line's end (guess: 250,000 tokens, more than a context)."""
LINE_BYTES_MAX = 64 << 20
JSON_BYTES_MAX = 2 << 30
"""An array of JSON is read whole; a longer one should be lines (guess)."""
HEAD_BYTES = 64 << 10
NAMED_MAX = 20
HUB = "hf:"

MAGIC = {
    b"PAR1": "parquet",
    b"ARROW1": "arrow",
    b"\xff\xff\xff\xff": "arrow",  # a stream, as the library datasets writes it
}
COMPRESSIONS = {b"\x1f\x8b": "gzip", b"BZh": "bz2", b"\xfd7zXZ\0": "xz", b"\x28\xb5\x2f\xfd": "zstd"}
SUFFIXES = {"gzip": (".gz",), "bz2": (".bz2",), "xz": (".xz",), "zstd": (".zst", ".zstd")}
MARKS = (
    (codecs.BOM_UTF8, "utf-8-sig"),
    (codecs.BOM_UTF32_LE, "utf-32"),  # before UTF-16, whose mark it begins with
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)
URL_KINDS = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "json",
    ".csv": "csv",
    ".tsv": "csv",
    ".parquet": "parquet",
}
BESIDE_ARROW = ("dataset_info.json", "dataset_dict.json", "state.json")  # what datasets' save_to_disk writes
TEXT, MESSAGES = "text", "messages"

Document = bytes | Conversation
"""Text in UTF-8, or a conversation."""


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
    that are not UTF-8 and have no mark of their own."""

    field: str | None = None
    messages: str | None = None
    cut_nbytes: int = DOCUMENT_BYTES_MAX
    hub_split: str = "train"
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
    first: int
    last: int
    nbytes: int
    version: str
    of: int = 1
    compression: str = ""
    encoding: str = ""


@dataclass(frozen=True, slots=True)
class FileForm:
    """What a file holds: `kind` of _READERS, its compression and the encoding of its text ("": UTF-8)."""

    kind: str
    compression: str = ""
    encoding: str = ""


def find_work(given: Sequence[str], reading: Reading, bad: BadRows | None = None) -> list[DocumentSpan]:
    """The pieces of work in `given`: paths of files or folders, `hf:NAME[@REVISION][#CONFIG]`, or fsspec URLs.

    Raises DataError when no text is found, a path or a library is missing, or more files than `bad` allows are no text.
    """
    bad = BadRows() if bad is None else bad
    works: list[DocumentSpan] = []
    for source, name in enumerate(given):
        if name.startswith(HUB):
            found = _hub_work(source, name, reading)
        elif "://" in name:
            found = [_url_work(source, name)]
        else:
            found = _path_work(source, Path(name), reading, bad)
        if not found:
            raise DataError(
                f"{name}: no text found: text, JSON lines, JSON arrays, CSV, Parquet and Arrow files are read"
            )
        works += found
    return works


def documents(work: DocumentSpan, reading: Reading, bad: BadRows | None = None) -> Iterator[Placed]:
    """The documents of `work`, in order, none empty. Raises DataError with the file and line or row at fault, once
    there are more than `bad` allows."""
    bad = BadRows() if bad is None else bad
    try:
        for placed in _READERS[work.kind](work, reading, bad):
            if not isinstance(placed.document, bytes):
                yield placed
                continue
            try:
                placed.document.decode()
            except UnicodeDecodeError as error:
                bad.add(placed.where, f"not UTF-8 at byte {error.start}; convert it, or name its --encoding")
                continue
            if not placed.document.strip():
                bad.empty += 1
            for part in cut_lines([placed.document], reading.cut_nbytes):
                if part.strip():
                    yield Placed(part, placed.where)
    except OSError as error:
        raise DataError(f"{shown(error.filename or work.name)}: cannot be read: {error.strerror or error}") from error
    except EOFError as error:
        raise DataError(f"{shown(work.files[0])}: damaged: {error}") from None


def shown(name: str | os.PathLike[str]) -> str:
    """`name` of a file as text, also where it is no UTF-8."""
    return os.fsencode(name).decode(errors="backslashreplace")


def _path_work(source: int, path: Path, reading: Reading, bad: BadRows) -> list[DocumentSpan]:
    if path.is_dir():
        files = [SourceFile(str(found.relative_to(path)), found) for found in _walk(path)]
    elif path.is_file():
        files = [SourceFile(path.name, path)]
    else:
        raise DataError(f"{shown(path)}: no such file or folder; --from names it")
    if keys := [file.name for file in files if file.path.name in PRIVATE_KEYS]:
        raise DataError(f"{path / keys[0]} is a private key, and a data set is for others to read: keep runs and nodes "
                        "out of the folder with the text")  # fmt: skip
    works, small = list[DocumentSpan](), list[SourceFile]()
    for file in sorted(files, key=lambda one: os.fsencode(one.name)):
        try:
            nbytes, form = file.path.stat().st_size, _form_of(file.path, reading)
        except OSError as error:
            raise DataError(f"{shown(file.path)}: cannot be read: {error.strerror or error}") from None
        if form is None:
            bad.add(shown(file.path), "neither text nor rows of a kind that is read")
        elif form == FileForm("text") and nbytes <= WORK_BYTES:
            small.append(file)
        elif form.kind == "parquet":
            works += _parquet_work(source, file)
        elif form in (FileForm("text"), FileForm("jsonl")):
            for first in range(0, nbytes, WORK_BYTES):
                last = min(nbytes, first + WORK_BYTES)
                where = (str(file.path),)
                works.append(
                    DocumentSpan(source, form.kind, file.name, where, first, last, last - first, _version(file.path))
                )
        else:
            kind, where = "files" if form.kind == "text" else form.kind, (str(file.path),)
            version = _version(file.path)
            works.append(
                DocumentSpan(source, kind, file.name, where, 0, -1, nbytes, version, 1, form.compression, form.encoding)
            )
    return works + _together(source, small)


def _form_of(path: Path, reading: Reading) -> FileForm | None:
    """What the file at `path` holds; None when it is nothing that is read. Raises OSError."""
    with path.open("rb") as file:
        head = file.read(HEAD_BYTES)
    name, compression = (
        path.name.lower(),
        next((kind for raw, kind in COMPRESSIONS.items() if head.startswith(raw)), ""),
    )
    if compression:
        with _decompressed(str(path), compression) as stream:
            head = stream.read(HEAD_BYTES)
        for suffix in SUFFIXES[compression]:
            name = name.removesuffix(suffix)
    for magic, kind in MAGIC.items():
        if head.startswith(magic):
            return None if compression else FileForm(kind)
    encoding = next((codec for mark, codec in MARKS if head.startswith(mark)), "")
    if not encoding and b"\0" in head:
        return None
    if not encoding and reading.encoding and not _is_utf8(head):
        encoding = reading.encoding
    if name.endswith((".jsonl", ".ndjson")):
        kind = "jsonl"
    elif name.endswith((".csv", ".tsv")):
        kind = "csv"
    elif name.endswith(".json") or "." not in name:
        kind = _json_kind(head.decode(encoding or "utf-8", "replace"), named=name.endswith(".json"))
    else:
        kind = "text"
    return FileForm(kind, compression, encoding)


def _is_utf8(head: bytes) -> bool:
    try:
        codecs.getincrementaldecoder("utf-8")().decode(head)
    except UnicodeDecodeError:
        return False
    return True


def _json_kind(head: str, *, named: bool) -> str:
    """`jsonl` if the text begins with a line that is an object, `json` if it is `named` so or begins as a list of
    objects, else `text`."""
    begin = head.lstrip()
    first = begin.partition("\n")[0].strip()
    if begin.startswith("{"):
        with contextlib.suppress(ValueError, RecursionError):
            json.loads(first)
            return "jsonl"
    listed = begin.startswith("[") and begin[1:].lstrip().startswith("{")
    return "json" if named or listed else "text"


def _together(source: int, files: Sequence[SourceFile]) -> list[DocumentSpan]:
    """Group small text files into pieces of work."""
    works, group, nbytes = list[DocumentSpan](), list[SourceFile](), 0
    for number, file in enumerate(files):
        group.append(file)
        nbytes += file.path.stat().st_size
        if nbytes >= WORK_BYTES or number + 1 == len(files):
            paths, version = tuple(str(one.path) for one in group), "".join(_version(one.path) for one in group)
            works.append(DocumentSpan(source, "files", group[0].name, paths, 0, -1, nbytes, version))
            group, nbytes = [], 0
    return works


# ---- text


def _read_files(work: DocumentSpan, reading: Reading, bad: BadRows) -> Iterator[Placed]:
    """Each file is a document."""
    for path in work.files:
        with _opened(work, path) as stream:
            raw = stream.read()
        if work.encoding:
            try:
                raw = raw.decode(work.encoding).encode()
            except (UnicodeError, LookupError) as error:
                bad.add(shown(path), f"not {work.encoding}: {error}")
                continue
        yield Placed(raw, shown(path))


def _read_range(work: DocumentSpan, reading: Reading, bad: BadRows) -> Iterator[Placed]:
    """Reads a range of one long text file, from the first line that begins in it. Ranges do not share documents."""
    with Path(work.files[0]).open("rb") as stream:
        stream.seek(max(0, work.first - 1))
        if work.first:
            stream.readline(LINE_BYTES_MAX)
        while stream.tell() < work.last and (part := stream.read(min(READ_BYTES, work.last - stream.tell()))):
            whole = part if part.endswith(b"\n") else part + stream.readline(LINE_BYTES_MAX)
            yield Placed(whole, f"{shown(work.files[0])} before byte {stream.tell()}")


# ---- rows


def _read_jsonl(work: DocumentSpan, reading: Reading, bad: BadRows) -> Iterator[Placed]:
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
        yield from _row(value, reading, where, bad)


def _lines(work: DocumentSpan) -> Iterator[tuple[int, bytes]]:
    """Lines in UTF-8 that begin in [first, last) of the file, numbered from its first one."""
    with _opened(work, work.files[0]) as raw:
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


def _read_json(work: DocumentSpan, reading: Reading, bad: BadRows) -> Iterator[Placed]:
    """A list of objects, each a row."""
    name = shown(work.files[0])
    with _opened(work, work.files[0]) as stream:
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
        yield from _row(value, reading, f"{name} item {number}", bad)


def _read_csv(work: DocumentSpan, reading: Reading, bad: BadRows) -> Iterator[Placed]:
    """A table whose first line names the columns."""
    name = shown(work.files[0])
    csv.field_size_limit(LINE_BYTES_MAX)
    with _opened(work, work.files[0]) as raw:
        text = io.TextIOWrapper(raw, encoding=work.encoding or "utf-8-sig", newline="")
        try:
            first = text.readline(HEAD_BYTES)
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
                yield from _row(dict(zip(columns, row, strict=True)), reading, where, bad, columnar=True)
        except (csv.Error, UnicodeError) as error:
            raise DataError(f"{name}: no table of text in {text.encoding}: {error}; see --encoding") from None


def _read_parquet(work: DocumentSpan, reading: Reading, bad: BadRows) -> Iterator[Placed]:
    parquet = _library("pyarrow.parquet", work.name)
    if "://" in work.files[0]:
        import fsspec

        table, groups = parquet.ParquetFile(fsspec.open(work.files[0], "rb").open()), None
    else:
        table, groups = _arrow_file(parquet.ParquetFile, work.files[0]), range(work.first, work.last)
    columns = _check_columns(table.schema_arrow.names, reading, shown(work.files[0]))
    before = sum(table.metadata.row_group(at).num_rows for at in range(work.first)) if groups is not None else 0
    yield from _batches(table.iter_batches(1024, row_groups=groups, columns=columns), reading, work, bad, before)


def _read_arrow(work: DocumentSpan, reading: Reading, bad: BadRows) -> Iterator[Placed]:
    """A file or a stream of Arrow's IPC format."""
    arrow = _library("pyarrow", work.name)
    _library("pyarrow.ipc", work.name)
    with arrow.memory_map(work.files[0]) as raw:
        is_file = raw.read(6) == b"ARROW1"
        raw.seek(0)
        opened = _arrow_file(arrow.ipc.open_file if is_file else arrow.ipc.open_stream, raw)
        columns = _check_columns(opened.schema.names, reading, shown(work.files[0]))
        batches = (opened.get_batch(at) for at in range(opened.num_record_batches)) if is_file else iter(opened)
        yield from _batches((batch.select(columns) for batch in batches), reading, work, bad)


def _arrow_file(opened: Callable[[Any], Any], file: Any) -> Any:
    try:
        return opened(file)
    except (ValueError, OSError) as error:  # pyarrow's errors are kinds of these
        raise DataError(f"{shown(str(file))}: damaged or of another kind: {str(error)[:150]}") from None


def _batches(batches: Any, reading: Reading, work: DocumentSpan, bad: BadRows, before: int = 0) -> Iterator[Placed]:
    number = before
    for batch in batches:
        for row in batch.to_pylist():
            number += 1
            yield from _row(row, reading, f"{shown(work.files[0])} row {number}", bad, columnar=True)


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


def _row(value: Any, reading: Reading, where: str, bad: BadRows, *, columnar: bool = False) -> Iterator[Placed]:
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


# ---- where it lies


def _opened(work: DocumentSpan, path: str) -> BinaryIO:
    """Opens a local file, or one at a URL that the organiser named, and decompresses it."""
    if "://" in path:
        return _decompressed(path, "infer")
    return _decompressed(path, work.compression) if work.compression else Path(path).open("rb")


def _decompressed(path: str, compression: str) -> BinaryIO:
    import fsspec

    try:
        return cast(BinaryIO, fsspec.open(path, "rb", compression=compression).open())
    except (ImportError, ValueError) as error:
        needs = ": pip install zstandard" if compression == "zstd" else ""
        raise DataError(f"{shown(path)}: cannot be opened: {str(error)[:150]}{needs}") from None


def _url_work(source: int, url: str) -> DocumentSpan:
    name = url.partition("?")[0].lower()
    for suffixes in SUFFIXES.values():
        for suffix in suffixes:
            name = name.removesuffix(suffix)
    kind = next((kind for suffix, kind in URL_KINDS.items() if name.endswith(suffix)), None)
    if kind is None:
        raise DataError(f"{url}: of URLs, {', '.join(URL_KINDS)} files are read, also compressed")
    return DocumentSpan(source, kind, url, (url,), 0, -1, 0, url)


def _parquet_work(source: int, file: SourceFile) -> list[DocumentSpan]:
    parquet = _library("pyarrow.parquet", file.name)
    table = _arrow_file(parquet.ParquetFile, file.path)
    works, first, nbytes = list[DocumentSpan](), 0, 0
    for group in range(table.num_row_groups):
        nbytes += table.metadata.row_group(group).total_byte_size
        if nbytes >= WORK_BYTES or group + 1 == table.num_row_groups:
            where, version = (str(file.path),), _version(file.path)
            works.append(DocumentSpan(source, "parquet", file.name, where, first, group + 1, nbytes, version))
            first, nbytes = group + 1, 0
    return works


def _hub_work(source: int, name: str, reading: Reading) -> list[DocumentSpan]:
    shards = max(1, int(getattr(_hub(name, reading), "num_shards", 1)))
    return [DocumentSpan(source, "hub", name, (name,), shard, shard + 1, 0, name, shards) for shard in range(shards)]


def _hub(name: str, reading: Reading) -> Any:
    """Opens hf:NAME[@REVISION][#CONFIG] as a stream."""
    datasets = _library("datasets", name)
    rest, _, config = name.removeprefix(HUB).partition("#")
    path, _, revision = rest.partition("@")
    try:
        return datasets.load_dataset(
            path, config or None, split=reading.hub_split, revision=revision or None, streaming=True
        )
    except Exception as error:  # noqa: BLE001  datasets raises errors of many libraries
        raise DataError(f"{name}: {type(error).__name__}: {str(error)[:200]}") from None


def _read_hub(work: DocumentSpan, reading: Reading, bad: BadRows) -> Iterator[Placed]:
    rows = _hub(work.name, reading)
    part = f" of shard {work.first}" if work.of > 1 else ""
    for number, row in enumerate(rows.shard(work.of, work.first) if work.of > 1 else rows):
        yield from _row(row, reading, f"{work.name} row {number + 1}{part}", bad, columnar=True)


def _library(module: str, wanted_for: str) -> Any:
    import importlib

    try:
        return importlib.import_module(module)
    except ImportError:
        raise DataError(
            f"{wanted_for}: needs the library {module.partition('.')[0]}, which is not installed: pip install"
            f" {module.partition('.')[0]}"
        ) from None


_READERS: dict[str, Callable[[DocumentSpan, Reading, BadRows], Iterator[Placed]]] = {
    "files": _read_files,
    "text": _read_range,
    "jsonl": _read_jsonl,
    "json": _read_json,
    "csv": _read_csv,
    "parquet": _read_parquet,
    "arrow": _read_arrow,
    "hub": _read_hub,
}


def _walk(root: Path) -> Iterator[Path]:
    """All files below `root` that are not hidden. Links are followed, each folder once. Raises DataError for a folder
    that cannot be read."""

    def refuse(error: OSError) -> None:
        raise DataError(f"{shown(error.filename)}: cannot be read: {error.strerror}") from None

    seen = set[tuple[int, int]]()
    for here, folders, files in os.walk(root, onerror=refuse, followlinks=True):
        status = os.stat(here)
        if (status.st_dev, status.st_ino) in seen:
            folders[:] = []
            continue
        seen.add((status.st_dev, status.st_ino))
        folders[:] = sorted((folder for folder in folders if not folder.startswith(".")), key=os.fsencode)
        arrow = any(name.endswith(".arrow") for name in files) or "dataset_dict.json" in files
        for name in files:
            if not name.startswith(".") and not (arrow and name in BESIDE_ARROW) and (Path(here) / name).is_file():
                yield Path(here) / name


def _version(path: Path) -> str:
    status = path.stat()
    return f"{path.name} {status.st_size} {status.st_mtime_ns};"
