"""Reads text from files and folders, or the demo corpus that comes with swarmnode.

The order of documents depends on names and contents only. Documents are cut into pieces that end with a line.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import os
import pathlib
import tarfile
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from swarmnode.data.root import DataRoot
from swarmnode.errors import DataError, os_errors
from swarmnode.ids import digest, digest64
from swarmnode.manifest import DataSpec

PRIVATE_KEYS = ("owner.key", "node.key")  # of runs and nodes: never text, whatever folder they lie in

PIECE_BYTES_MAX = 64 << 10
PIECE_BYTES_MIN = 1 << 10
PIECES_MIN = 64
"""Documents longer than 64 KiB (or a 64th of all text, if less) are cut, so that one long file also has pieces to hold
out (guess)."""

READ_BYTES = 1 << 20

PROBE_BYTES = 8 << 10


# The demo's text: a frozen copy of the standard library of CPython 3.11.7, so samples are the same on all machines.
#
# `demo_corpus.tar.gz` holds the sources without tests and build outputs. It is real text that a small model learns in
# minutes, and it does not depend on the Python that runs swarmnode. deploy/demo_corpus/generate.py makes it again.
# `DEMO_SHA256` is the hash of the uncompressed archive. Licence: PSF-2.0 (demo_corpus.LICENSE.txt, in the archive
# too). Third-party notices are in their files.

DEMO_ARCHIVE = pathlib.Path(__file__).with_name("demo_corpus.tar.gz")
DEMO_LICENSE = pathlib.Path(__file__).with_name("demo_corpus.LICENSE.txt")
DEMO_SHA256 = "c2fbecf9c355d2c54661c888b951472d8524b40b3d196fdc0175f8e85f54813d"
DEMO_NBYTES = 12_666_880
"""Size of the uncompressed archive."""


def demo_documents(archive: pathlib.Path = DEMO_ARCHIVE) -> Iterator[tuple[str, bytes]]:
    """Yields (name, text) of each document, sorted by name. Raises DataError unless `archive` matches `DEMO_SHA256`."""
    try:
        with gzip.open(archive) as file:
            raw = file.read(DEMO_NBYTES + 1)  # a limit, in case the file unpacks to more
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{archive}: the demo corpus cannot be read ({error}); install swarmnode again") from None
    if len(raw) != DEMO_NBYTES or hashlib.sha256(raw).hexdigest() != DEMO_SHA256:
        raise DataError(f"{archive}: not the demo corpus of this version: its hash differs; install swarmnode again")
    with tarfile.open(fileobj=io.BytesIO(raw), mode="r:") as opened:
        for member in opened:
            file_of = opened.extractfile(member) if member.name.endswith(".py") else None
            if file_of is not None:
                yield member.name, file_of.read()


@dataclass(frozen=True, slots=True)
class SourceFile:
    """One file to read. Files are sorted by `name`, which is the same on every machine."""

    name: str
    path: pathlib.Path


def source_files(spec: DataSpec, folder: DataRoot) -> list[SourceFile]:
    """Every file that `spec` names below `folder`, in order. Raises DataError when a path is missing or nothing is
    found, NotPermitted when a path or a link leads out of `folder`."""
    if spec.source == "demo":
        return [SourceFile("demo corpus", DEMO_ARCHIVE)]
    files = [file for file in _listed(spec, folder) if not _is_binary(file.path)]
    if not files:
        raise DataError(f"{', '.join(spec.paths)}: no text file found; data.paths names files or folders")
    return files


def cache_key(spec: DataSpec, files: list[SourceFile], tokenizer: bytes) -> str:
    """A key of 32 hex digits that changes with the files (name, path, size, modification time), tokenizer and split."""
    parts: list[str | bytes | int | float] = ["corpus", 4, spec.source, spec.validation_fraction, tokenizer]
    if spec.source == "demo":
        return digest(*parts, DEMO_SHA256).hex()[:32]
    for file in files:
        with os_errors(DataError, f"{file.path}: cannot be read"):
            status = file.path.stat()
        parts += [file.name, str(file.path), status.st_size, status.st_mtime_ns]
    return digest(*parts).hex()[:32]


def pieces(spec: DataSpec, files: list[SourceFile]) -> Iterator[str]:
    """The text of `files`, piece by piece. Raises DataError with the file at fault: no letter is replaced in
    silence."""
    if spec.source == "demo":
        for _, text in demo_documents():
            yield from (piece.decode() for piece in cut_lines([text], PIECE_BYTES_MAX))
        return
    try:
        total_nbytes = sum(file.path.stat().st_size for file in files)
        piece_nbytes = min(PIECE_BYTES_MAX, max(PIECE_BYTES_MIN, total_nbytes // PIECES_MIN))
        for file in files:
            for piece in cut_lines(_chunks(file), piece_nbytes):
                yield piece.decode()
    except UnicodeDecodeError as error:
        raise DataError(
            f"{file.path}: not UTF-8: {error.object[error.start : error.start + 16]!r}; convert it: iconv -f latin1 -t"
            " utf-8"
        ) from None
    except OSError as error:
        raise DataError(f"{error.filename}: cannot be read: {error.strerror}") from error


def rank(piece: str) -> float:
    """The hash of `piece` as a number in [0, 1). The lowest are held out, so nodes hold out the same pieces."""
    return (digest64("piece", piece.encode()) >> 11) / (1 << 53)


def _chunks(file: SourceFile) -> Iterator[bytes]:
    with file.path.open("rb") as stream:
        while chunk := stream.read(READ_BYTES):
            yield chunk


def cut_lines(chunks: Iterable[bytes], piece_nbytes: int) -> Iterator[bytes]:
    """Cut a document into pieces of at most `piece_nbytes`, each ending with a line or else a whole UTF-8 character."""
    held = b""
    for chunk in chunks:
        held += chunk
        start = 0
        while len(held) - start > piece_nbytes:
            end = held.rfind(b"\n", start, start + piece_nbytes) + 1
            if not end:
                end = start + piece_nbytes
                while end > start + piece_nbytes - 4 and held[end] & 0xC0 == 0x80:
                    end -= 1
            yield held[start:end]
            start = end
        held = held[start:]
    if held:
        yield held


def _listed(spec: DataSpec, folder: DataRoot) -> list[SourceFile]:
    files: list[SourceFile] = []
    for given in spec.paths:
        path = folder.find(given)
        if path.is_dir():
            files += _walk(path, given, folder.inside)
        elif path.is_file():
            files.append(SourceFile(given, path))
        else:
            raise DataError(f"{path}: no such file or folder; data.paths in the manifest names it")
    return files


def _walk(root: pathlib.Path, name: str, follow: Callable[[pathlib.Path], pathlib.Path]) -> list[SourceFile]:
    """All regular files below `root` that are neither hidden nor a node's or an owner's key, sorted by relative path.
    `follow` resolves links."""
    sources: list[SourceFile] = []
    for here, folders, files in os.walk(root):
        folders[:] = sorted(f for f in folders if not f.startswith("."))
        place = pathlib.Path(here)
        for file in files:
            path = place / file
            if not file.startswith(".") and file not in PRIVATE_KEYS and path.is_file():
                real = follow(path) if path.is_symlink() else path
                sources.append(SourceFile(f"{name}/{path.relative_to(root).as_posix()}", real))
    return sorted(sources, key=lambda file: file.name)


def _is_binary(path: pathlib.Path) -> bool:
    with os_errors(DataError, f"{path}: cannot be read"), path.open("rb") as file:
        return b"\0" in file.read(PROBE_BYTES)
