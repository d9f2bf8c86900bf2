"""The demo corpus that comes with swarmnode, cut into pieces that end with a line."""

from __future__ import annotations

import gzip
import hashlib
import io
import pathlib
import tarfile
import zlib
from collections.abc import Iterable, Iterator

from swarmnode.base.errors import DataError
from swarmnode.base.ids import digest64

PIECE_BYTES_MAX = 64 << 10
"""Longer documents of the demo are cut, so that what is held out is of many of them (guess)."""

HELD_OUT = 0.02  # guess: of the pieces, by their `rank`: never trained on

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


def demo_pieces() -> Iterator[str]:
    """The demo corpus, piece by piece."""
    for _, text in demo_documents():
        yield from (piece.decode() for piece in cut_lines([text], PIECE_BYTES_MAX))


def rank(piece: str) -> float:
    """The hash of `piece` as a number in [0, 1). The lowest are held out, so nodes hold out the same pieces."""
    return (digest64("piece", piece.encode()) >> 11) / (1 << 53)


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
