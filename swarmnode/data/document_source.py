"""Reads the input of `data make` in pieces of work: text, JSON, CSV and Parquet files, and sets of the hub.

What a file holds is told by its content, its name where the content cannot tell (CSV). Nothing is left out in silence:
a file or row that cannot be read is an error with its place, or is counted where the organiser allows some
(`BadRows`). A computer tokenises a piece of work in some seconds. Finished pieces are kept when `data make` is killed.
All of this runs on the organiser's machine and reads only inputs that the organiser named.
"""

from __future__ import annotations

import codecs
import json
import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from swarmnode.base.errors import DataError, cause_of
from swarmnode.data.arrow_row import ARROW_FILE, ARROW_STREAM, BATCH_ROWS, read_arrow, read_parquet, table_rows
from swarmnode.data.document_row import (
    LINE_BYTES_MAX,
    BadRows,
    DocumentSpan,
    Placed,
    Reading,
    decompressed,
    library,
    read_csv,
    read_json,
    read_jsonl,
    shown,
)
from swarmnode.data.input_folder import PARQUET, files_below, is_hub_folder, refuse_table
from swarmnode.data.lfs_pointer import refuse_pointer
from swarmnode.data.source import cut_lines

WORK_BYTES = 32 << 20
"""Text in a piece of work (guess: ten seconds of a tokenizer)."""
HEAD_BYTES = 64 << 10
READ_BYTES = 1 << 20
HUB = "hf:"
PRIVATE_KEYS = ("owner.key", "node.key")  # of runs and nodes: never text, whatever folder they lie in

COMPRESSIONS = {
    b"\x1f\x8b": "gzip",
    b"BZh": "bz2",
    b"\xfd7zXZ\0": "xz",
    b"\x28\xb5\x2f\xfd": "zstd",
    b"\x04\x22\x4d\x18": "lz4",
}
SUFFIXES = (".gz", ".bz2", ".xz", ".zst", ".zstd", ".lz4")
SKIPPED = re.compile(rb"[\x50-\x5f]\x2a\x4d\x18")
"""Begins a frame without text in zstd and lz4; four bytes with its length follow (RFC 8878, 3.1.2). Tools begin with
one (pzstd 1.5.4), or keep a table of places in it."""
NO_TEXT = re.compile(r"%PDF-|%!PS-|\{\\rtf|WARC/\d|Obj\x01|.*\0", re.DOTALL)
"""PDF, PostScript, RTF, WARC and Common Crawl's WET, Avro, and whatever has a zero byte."""
NO_FORM = "neither text nor rows of a kind that is read (take the text out of PDF, RTF, WARC, WET and archives first)"
MARKS = (
    (codecs.BOM_UTF8, "utf-8-sig"),
    (codecs.BOM_UTF32_LE, "utf-32"),  # before UTF-16, whose mark it begins with
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)
KINDS = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".jsonlines": "jsonl",
    ".jl": "jsonl",
    ".json": "json",
    ".csv": "csv",
    ".tsv": "csv",
    ".parquet": "parquet",
}


@dataclass(frozen=True, slots=True)
class FileForm:
    """The content of a file: `kind` of _READERS, its compression and the encoding of its text ("": UTF-8)."""

    kind: str
    compression: str = ""
    encoding: str = ""


@dataclass(frozen=True, slots=True)
class SourceFile:
    """One file to read, and its name below the folder that was given."""

    name: str
    path: Path


def find_work(given: Sequence[str], reading: Reading, bad: BadRows | None = None) -> list[DocumentSpan]:
    """The pieces of work in `given`: paths of files or folders, or `hf:NAME[@REVISION][#CONFIG]`.

    Raises DataError when no text is found, a path or a library is missing, or more files than `bad` allows are no text.
    """
    bad = BadRows() if bad is None else bad
    works: list[DocumentSpan] = []
    for source, name in enumerate(given):
        if name.startswith(HUB):
            work = _hub_work(source, name, reading)
        else:
            work = _path_work(source, Path(name), reading, bad)
        if not work:
            raise DataError(f"{name}: no text found: text, JSON lines, JSON arrays, CSV and Parquet files are read")
        works += work
    return works


def documents(work: DocumentSpan, reading: Reading, bad: BadRows | None = None) -> Iterator[Placed]:
    """The documents of `work`, in order, none empty. Raises DataError with the file and line or row at fault, once
    there are more than `bad` allows, and when what lies behind a network cannot be read."""
    bad = BadRows() if bad is None else bad
    try:
        for placed in _READERS[work.kind](work, reading, bad):
            if not isinstance(placed.document, str):
                yield placed
                continue
            try:
                raw = placed.document.encode()
            except UnicodeEncodeError:
                bad.add(placed.where, "text with half a character (a lone surrogate)")
                continue
            if not placed.document.strip():
                bad.empty += 1
            elif len(raw) <= reading.cut_nbytes:
                yield placed
            else:
                parts = (part.decode() for part in cut_lines([raw], reading.cut_nbytes))
                yield from (Placed(part, placed.where) for part in parts if part.strip())
    except (DataError, MemoryError):
        raise
    except Exception as error:  # noqa: BLE001  each library has errors of its own for a file that is damaged
        why = f"cannot be read: {_reason(error)}"
        if work.remote:
            raise DataError(f"{work.name}: {why}") from None
        bad.add(shown(work.files[0]), why)


def _reason(error: Exception) -> str:
    if "requires too much memory" in str(error):  # libzstd, of a window that only `zstd --long` writes
        return "packed by `zstd --long` with a window above 128 MiB: unpack it (zstd -d --long=31 FILE)"
    return cause_of(error)[:150] if isinstance(error, OSError) else f"{type(error).__name__}: {cause_of(error)[:150]}"


def _path_work(source: int, path: Path, reading: Reading, bad: BadRows) -> list[DocumentSpan]:
    for folder in path.resolve().parents:
        refuse_table(folder)
    if path.is_dir() and is_hub_folder(path):
        return _hub_work(source, f"{HUB}{path}", reading)
    if path.is_dir():
        files = [SourceFile(str(found.relative_to(path)), found) for found in files_below(path, reading.split)]
    elif path.is_file():
        files = [SourceFile(path.name, path)]
    else:
        raise DataError(f"{shown(path)}: no such file or folder; --from names it")
    if keys := [file.name for file in files if file.path.name in PRIVATE_KEYS]:
        raise DataError(f"{path / keys[0]} is a private key, and a data set is for others to read: keep runs and nodes "
                        "out of the folder with the text")  # fmt: skip
    works = list[DocumentSpan]()
    small = list[SourceFile]()
    for file in sorted(files, key=lambda one: os.fsencode(one.name)):
        try:
            if not file.path.is_file():
                bad.add(shown(file.path), "no regular file, or a link to nowhere")
                continue
            form = _form_of(file.path, reading)
            if form is None:
                bad.add(shown(file.path), NO_FORM)
            elif form == FileForm("text") and file.path.stat().st_size <= WORK_BYTES:
                small.append(file)
            else:
                works += _file_work(source, file, form)
        except (DataError, MemoryError):
            raise
        except Exception as error:  # noqa: BLE001  as `documents`
            bad.add(shown(file.path), f"cannot be read: {_reason(error)}")
    return works + _together(source, small)


def _file_work(source: int, file: SourceFile, form: FileForm) -> list[DocumentSpan]:
    """The spans of one file: of WORK_BYTES where it can be read from any line on, else of the whole file."""
    if form == FileForm("parquet"):
        return _parquet_work(source, file)
    where = (str(file.path),)
    nbytes = file.path.stat().st_size
    version = _version(file.path)
    if form not in (FileForm("text"), FileForm("jsonl")):
        kind = "files" if form.kind == "text" else form.kind
        more = (form.compression, form.encoding)
        return [DocumentSpan(source, kind, file.name, where, 0, -1, nbytes, version, 1, *more)]
    ends = [min(nbytes, first + WORK_BYTES) for first in range(0, nbytes, WORK_BYTES)]
    return [
        DocumentSpan(source, form.kind, file.name, where, first, last, last - first, version)
        for first, last in zip(range(0, nbytes, WORK_BYTES), ends, strict=True)
    ]


def _form_of(path: Path, reading: Reading) -> FileForm | None:
    """The form of the file at `path`; None when it is nothing that is read. Raises what reading it raises."""
    head = _head(path, "", HEAD_BYTES)
    compression = _compression(path, head)
    if compression:
        head = _head(path, compression, HEAD_BYTES)
    name = _uncompressed(path.name)
    if head.startswith(PARQUET):
        return FileForm("parquet", compression)
    if head.startswith((ARROW_FILE, ARROW_STREAM)):
        return FileForm("arrow", compression)
    encoding = next((codec for mark, codec in MARKS if head.startswith(mark)), "")
    if not encoding and reading.encoding and not _is_utf8(path, compression):
        encoding = reading.encoding
    text = _decoded(head, encoding)
    if NO_TEXT.match(text):
        return None
    refuse_pointer(head, shown(path))
    kind = KINDS.get(os.path.splitext(name)[1], "text")
    if kind in ("text", "json"):
        if len(head) == HEAD_BYTES and text.lstrip().startswith(("{", "[")) and "\n" not in text.strip():
            text = _decoded(_head(path, compression, LINE_BYTES_MAX), encoding)  # the first line is longer
        kind = _json_kind(text, reading, kind)
    return FileForm(kind, compression, encoding)


def _compression(path: Path, head: bytes) -> str:
    """The compression of the file that begins with `head`, one of COMPRESSIONS; "" for none."""
    if SKIPPED.match(head):
        with path.open("rb") as file:
            while SKIPPED.match(head := file.read(8)):
                file.seek(int.from_bytes(head[4:], "little"), os.SEEK_CUR)
    return next((kind for magic, kind in COMPRESSIONS.items() if head.startswith(magic)), "")


def _head(path: Path, compression: str, most: int) -> bytes:
    """The first bytes of a file, decompressed."""
    with decompressed(str(path), compression) as stream:
        return stream.read(most)


def _decoded(head: bytes, encoding: str) -> str:
    """The text of the first bytes of a file, which may end within a letter."""
    return codecs.getincrementaldecoder(encoding or "utf-8")("replace").decode(head)


def _uncompressed(name: str) -> str:
    """`name` in small letters, without the ending that says how it is compressed."""
    stem, end = os.path.splitext(name.lower())
    return stem if end in SUFFIXES else name.lower()


def _is_utf8(path: Path, compression: str) -> bool:
    """Whether all of the file is."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    with decompressed(str(path), compression) as stream:
        try:
            while part := stream.read(READ_BYTES):
                if "\0" in decoder.decode(part):
                    return False  # as UTF-16 without a mark has it
            decoder.decode(b"", final=True)
        except UnicodeDecodeError:
            return False
    return True


def _json_kind(head: str, reading: Reading, kind: str) -> str:
    """The kind of a file that begins with `head` and whose name says "text" or "json": "jsonl" if its first line is
    an object and more follow, "json" for a list of objects. An object of a file that is not named so has one of the
    keys that are read."""
    begin = head.lstrip()
    listed = begin.startswith("[")
    try:
        first, end = json.JSONDecoder().raw_decode(begin[1:].lstrip() if listed else begin)
    except (ValueError, RecursionError):
        return kind
    if not isinstance(first, dict) or (kind == "text" and not any(key in first for key in reading.keys)):
        return kind
    rest = begin[end:].lstrip(" \t\r")
    return "jsonl" if not listed and "\n" not in begin[:end] and rest.startswith("\n") and rest.strip() else "json"


def _together(source: int, files: Sequence[SourceFile]) -> list[DocumentSpan]:
    """Group small text files into pieces of work."""
    works = list[DocumentSpan]()
    group = list[SourceFile]()
    nbytes = 0
    for number, file in enumerate(files):
        group.append(file)
        nbytes += file.path.stat().st_size
        if nbytes >= WORK_BYTES or number + 1 == len(files):
            paths = tuple(str(one.path) for one in group)
            version = "".join(_version(one.path) for one in group)
            works.append(DocumentSpan(source, "files", group[0].name, paths, 0, -1, nbytes, version))
            group = []
            nbytes = 0
    return works


# ---- text


def _read_files(work: DocumentSpan, reading: Reading, bad: BadRows) -> Iterator[Placed]:
    """Each file is a document."""
    for path in work.files:
        try:
            with decompressed(path, work.compression) as stream:
                text = stream.read().decode(work.encoding or "utf-8")
        except UnicodeDecodeError as error:
            bad.add(shown(path), _undecoded(error))
        except Exception as error:  # noqa: BLE001  as `documents`
            bad.add(shown(path), f"cannot be read: {_reason(error)}")
        else:
            yield Placed(text, shown(path))


def _undecoded(error: UnicodeDecodeError) -> str:
    return f"not {error.encoding.upper()} at byte {error.start}; convert it, or name its --encoding"


def _read_range(work: DocumentSpan, reading: Reading, bad: BadRows) -> Iterator[Placed]:
    """Reads a range of one long text file, from the first line that begins in it. Ranges do not share documents."""
    with Path(work.files[0]).open("rb") as stream:
        stream.seek(max(0, work.first - 1))
        if work.first:
            stream.readline(LINE_BYTES_MAX)
        while stream.tell() < work.last and (part := stream.read(min(READ_BYTES, work.last - stream.tell()))):
            whole = part if part.endswith(b"\n") else part + stream.readline(LINE_BYTES_MAX)
            where = f"{shown(work.files[0])} before byte {stream.tell()}"
            try:
                yield Placed(whole.decode(), where)
            except UnicodeDecodeError as error:
                bad.add(where, _undecoded(error))


# ---- where it lies


def _parquet_work(source: int, file: SourceFile) -> list[DocumentSpan]:
    metadata = library("pyarrow.parquet", file.name).read_metadata(file.path.open("rb"))
    works = list[DocumentSpan]()
    first = 0
    nbytes = 0
    where = (str(file.path),)
    for group in range(metadata.num_row_groups):
        nbytes += metadata.row_group(group).total_byte_size
        if nbytes >= WORK_BYTES or group + 1 == metadata.num_row_groups:
            works.append(
                DocumentSpan(source, "parquet", file.name, where, first, group + 1, nbytes, _version(file.path))
            )
            first = group + 1
            nbytes = 0
    return works


def _hub_work(source: int, name: str, reading: Reading) -> list[DocumentSpan]:
    shards = max(1, int(getattr(_hub(name, reading), "num_shards", 1)))
    version = name
    folder = Path(_hub_place(name)[0])
    if folder.is_dir():
        version += "".join(_version(path) for path in sorted(folder.rglob("*")) if path.is_file())
    return [DocumentSpan(source, "hub", name, (name,), shard, shard + 1, 0, version, shards) for shard in range(shards)]


def _hub_place(name: str) -> tuple[str, str, str]:
    """The path, revision and config of hf:NAME[@REVISION][#CONFIG], or of hf:FOLDER[#CONFIG]. Folders may have any
    name."""
    whole = name.removeprefix(HUB)
    if Path(whole).is_dir():
        return whole, "", ""
    rest, _, config = whole.partition("#")
    if Path(rest).is_dir():
        return rest, "", config
    path, _, revision = rest.partition("@")
    return path, revision, config


def _hub(name: str, reading: Reading) -> Any:
    """Opens hf:NAME[@REVISION][#CONFIG], or hf:FOLDER[#CONFIG], as a stream."""
    datasets = library("datasets", name)
    path, revision, config = _hub_place(name)
    try:
        return datasets.load_dataset(
            path, config or None, split=reading.split, revision=revision or None, streaming=True
        )
    except Exception as error:  # noqa: BLE001  datasets raises errors of many libraries
        raise DataError(f"{name}: {type(error).__name__}: {cause_of(error)[:200]}") from None


def _read_hub(work: DocumentSpan, reading: Reading, bad: BadRows) -> Iterator[Placed]:
    rows = _hub(work.name, reading)
    part = f" shard {work.first}" if work.of > 1 else ""
    rows = rows.shard(work.of, work.first) if work.of > 1 else rows
    tables = rows.with_format("arrow").iter(BATCH_ROWS)  # typed, so that `arrow_row.py` reads them as files
    yield from table_rows(tables, reading, f"{work.name}{part}", bad)


_READERS: dict[str, Callable[[DocumentSpan, Reading, BadRows], Iterator[Placed]]] = {
    "files": _read_files,
    "text": _read_range,
    "jsonl": read_jsonl,
    "json": read_json,
    "csv": read_csv,
    "parquet": read_parquet,
    "arrow": read_arrow,
    "hub": _read_hub,
}


def _version(path: Path) -> str:
    status = path.stat()
    return f"{path.name} {status.st_size} {status.st_mtime_ns};"
