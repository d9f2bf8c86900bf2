"""Reads the input of `data make` in pieces of work: text folders, JSON lines, Parquet and Hugging Face data sets.

A computer tokenises a piece of work in some seconds. Finished pieces are kept when `data make` is killed. All of this
runs on the organiser's machine and reads only inputs that the organiser named.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, cast

from swarmnode.data.chat_template import Message, conversation
from swarmnode.data.source import PRIVATE_KEYS, PROBE_BYTES, READ_BYTES, SourceFile, cut_lines
from swarmnode.errors import DataError

WORK_BYTES = 32 << 20
"""Text in a piece of work (guess: ten seconds of a tokenizer)."""
DOCUMENT_BYTES_MAX = 1 << 20
"""Longer documents are cut at a line's end (guess: 250,000 tokens, more than a context)."""
LINE_BYTES_MAX = 64 << 20
HUB = "hf:"

Document = bytes | Sequence[Message]
"""Text in UTF-8, or a conversation."""


@dataclass(frozen=True, slots=True)
class Reading:
    """Options for turning records into documents. `field` names the key of the text, `messages` that of the
    conversation. Documents are cut to at most `cut_nbytes` bytes."""

    field: str = "text"
    messages: str = "messages"
    cut_nbytes: int = DOCUMENT_BYTES_MAX
    hub_split: str = "train"


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


def find_work(given: Sequence[str], reading: Reading) -> list[DocumentSpan]:
    """The pieces of work in `given`: paths of files or folders, `hf:NAME[@REVISION][#CONFIG]`, or fsspec URLs.

    Raises DataError when no text is found, or a path or a library is missing.
    """
    works: list[DocumentSpan] = []
    for source, name in enumerate(given):
        if name.startswith(HUB):
            found = _hub_work(source, name, reading)
        elif "://" in name:
            found = [DocumentSpan(source, _kind(name), name, (name,), 0, -1, 0, name)]
        else:
            found = _path_work(source, Path(name))
        if not found:
            raise DataError(f"{name}: no text found: .txt and other text files, .jsonl or .parquet are read")
        works += found
    return works


def documents(work: DocumentSpan, reading: Reading) -> Iterator[Document]:
    """The documents of `work`, in order, none empty. Raises DataError with the file and line or row at fault."""
    try:
        for found in _READERS[work.kind](work, reading):
            if isinstance(found, bytes):
                yield from (part for part in cut_lines([found], reading.cut_nbytes) if part.strip())
            else:
                yield found
    except OSError as error:
        raise DataError(f"{error.filename or work.name}: cannot be read: {error.strerror or error}") from error


def _path_work(source: int, path: Path) -> list[DocumentSpan]:
    if path.is_dir():
        files = [
            SourceFile(str(found.relative_to(path)), found)
            for here, folders, names in _walk(path)
            for found in (here / name for name in names)
        ]
    elif path.is_file():
        files = [SourceFile(path.name, path)]
    else:
        raise DataError(f"{path}: no such file or folder; --from names it")
    if keys := [file.name for file in files if file.path.name in PRIVATE_KEYS]:
        raise DataError(f"{path / keys[0]} is a private key, and a data set is for others to read: keep runs and nodes "
                        "out of the folder with the text")  # fmt: skip
    works, small = list[DocumentSpan](), list[SourceFile]()
    for file in sorted(files, key=lambda one: one.name):
        kind, nbytes = _kind(file.name), file.path.stat().st_size
        if kind == "text" and nbytes <= WORK_BYTES:
            if not _is_binary(file.path):
                small.append(file)
        elif kind == "parquet":
            works += _parquet_work(source, file)
        elif kind == "gzip":
            works.append(DocumentSpan(source, kind, file.name, (str(file.path),), 0, -1, nbytes, _version(file.path)))
        elif kind == "jsonl" or not _is_binary(file.path):
            for first in range(0, nbytes, WORK_BYTES):
                last = min(nbytes, first + WORK_BYTES)
                where = (str(file.path),)
                works.append(
                    DocumentSpan(source, kind, file.name, where, first, last, last - first, _version(file.path))
                )
    return works + _together(source, small)


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


def _read_files(work: DocumentSpan, reading: Reading) -> Iterator[Document]:
    for path in work.files:
        yield Path(path).read_bytes()


def _read_range(work: DocumentSpan, reading: Reading) -> Iterator[Document]:
    """Reads a range of one long text file, from the first line that begins in it. Ranges do not share documents."""
    with Path(work.files[0]).open("rb") as stream:
        stream.seek(max(0, work.first - 1))
        if work.first:
            stream.readline(LINE_BYTES_MAX)
        while stream.tell() < work.last and (part := stream.read(min(READ_BYTES, work.last - stream.tell()))):
            yield part if part.endswith(b"\n") else part + stream.readline(LINE_BYTES_MAX)


def _read_jsonl(work: DocumentSpan, reading: Reading) -> Iterator[Document]:
    with _opened(work) as stream:
        if work.first:
            stream.seek(work.first - 1)
            stream.readline(LINE_BYTES_MAX)
        number, at = 0, stream.tell() if work.first else 0
        while (work.last < 0 or at < work.last) and (line := stream.readline(LINE_BYTES_MAX + 1)):
            number, at = number + 1, at + len(line)
            where = f"{work.files[0]}:{number}" + (f" from byte {work.first}" if work.first else "")
            if len(line) > LINE_BYTES_MAX:
                raise DataError(f"{where}: line longer than {LINE_BYTES_MAX} bytes; split it")
            if not line.strip():
                continue
            try:
                value = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise DataError(f"{where}: not JSON ({str(error)[:80]}); correct or remove the line") from None
            yield _document(value, reading, where)


def _opened(work: DocumentSpan) -> BinaryIO:
    """Opens a local file, or one at a URL that the organiser named. Decompresses it if it is compressed."""
    path = work.files[0]
    if work.kind == "gzip" or "://" in path:
        import fsspec

        try:
            return cast(BinaryIO, fsspec.open(path, "rb", compression="infer").open())
        except (ImportError, ValueError) as error:
            raise DataError(f"{path}: cannot be opened: {str(error)[:150]}") from None
    return Path(path).open("rb")


def _document(value: Any, reading: Reading, where: str) -> Document:
    if isinstance(value, dict):
        if isinstance(text := value.get(reading.field), str):
            return text.encode(errors="replace")
        if reading.messages in value:
            if (found := conversation(value[reading.messages])) is not None:
                return found
            raise DataError(
                f'{where}: "{reading.messages}" is no list of objects with "role" and "content", one of them'
                ' "assistant"'
            )
    keys = ", ".join(map(str, list(value)[:8])) if isinstance(value, dict) else type(value).__name__
    raise DataError(f'{where}: no text under "{reading.field}" and no "{reading.messages}" ({keys}); see --field')


def _parquet_work(source: int, file: SourceFile) -> list[DocumentSpan]:
    parquet = _library("pyarrow.parquet", file.name)
    found = parquet.ParquetFile(file.path)
    works, first, nbytes = list[DocumentSpan](), 0, 0
    for group in range(found.num_row_groups):
        nbytes += found.metadata.row_group(group).total_byte_size
        if nbytes >= WORK_BYTES or group + 1 == found.num_row_groups:
            where, version = (str(file.path),), _version(file.path)
            works.append(DocumentSpan(source, "parquet", file.name, where, first, group + 1, nbytes, version))
            first, nbytes = group + 1, 0
    return works


def _read_parquet(work: DocumentSpan, reading: Reading) -> Iterator[Document]:
    parquet = _library("pyarrow.parquet", work.name)
    if "://" in work.files[0]:
        import fsspec

        found, groups = parquet.ParquetFile(fsspec.open(work.files[0], "rb").open()), None
    else:
        found, groups = parquet.ParquetFile(work.files[0]), range(work.first, work.last)
    wanted = [one for one in (reading.field, reading.messages) if one in found.schema_arrow.names]
    if not wanted:
        raise DataError(
            f'{work.files[0]}: no column "{reading.field}"; there are {", ".join(found.schema_arrow.names)[:200]};'
            " see --field"
        )
    for batch in found.iter_batches(1024, row_groups=groups, columns=wanted[:1]):
        for row in batch.to_pylist():
            if row[wanted[0]] is not None:
                yield _document(row, reading, work.files[0])


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


def _read_hub(work: DocumentSpan, reading: Reading) -> Iterator[Document]:
    found = _hub(work.name, reading)
    for row in found.shard(work.of, work.first) if work.of > 1 else found:
        yield _document(row, reading, work.name)


def _library(module: str, wanted_for: str) -> Any:
    import importlib

    try:
        return importlib.import_module(module)
    except ImportError:
        raise DataError(
            f"{wanted_for}: needs the library {module.partition('.')[0]}, which is not installed: pip install"
            f" {module.partition('.')[0]}"
        ) from None


_READERS = {
    "files": _read_files,
    "text": _read_range,
    "jsonl": _read_jsonl,
    "gzip": _read_jsonl,
    "parquet": _read_parquet,
    "hub": _read_hub,
}


def _kind(name: str) -> str:
    if name.endswith((".jsonl", ".ndjson")):
        return "jsonl"
    if name.endswith((".jsonl.gz", ".jsonl.zst", ".jsonl.bz2", ".jsonl.xz")):
        return "gzip"
    return "parquet" if name.endswith(".parquet") else "text"


def _walk(root: Path) -> Iterator[tuple[Path, list[str], list[str]]]:
    for here, folders, files in os.walk(root):
        folders[:] = sorted(folder for folder in folders if not folder.startswith("."))
        yield (
            Path(here),
            folders,
            [name for name in files if not name.startswith(".") and (Path(here) / name).is_file()],
        )


def _is_binary(path: Path) -> bool:
    with path.open("rb") as file:
        return b"\0" in file.read(PROBE_BYTES)


def _version(path: Path) -> str:
    status = path.stat()
    return f"{path.name} {status.st_size} {status.st_mtime_ns};"
