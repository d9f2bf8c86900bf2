"""The demo's text: a frozen copy of the standard library of CPython 3.11.7, so samples are the same on all machines.

`demo_corpus.tar.gz` holds the sources without tests and build outputs. It is real text that a small model learns in
minutes, and it does not depend on the Python that runs swarmnode. deploy/demo_corpus/generate.py makes it again.
`SHA256` is the hash of the uncompressed archive. Licence: PSF-2.0 (demo_corpus.LICENSE.txt, also in the archive).
Third-party notices are in their files.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import pathlib
import tarfile
import zlib
from collections.abc import Iterator

from swarmnode.errors import DataError

ARCHIVE = pathlib.Path(__file__).with_name("demo_corpus.tar.gz")
LICENSE = pathlib.Path(__file__).with_name("demo_corpus.LICENSE.txt")
SHA256 = "c2fbecf9c355d2c54661c888b951472d8524b40b3d196fdc0175f8e85f54813d"
NBYTES = 12_666_880
"""Size of the uncompressed archive."""


def documents(archive: pathlib.Path = ARCHIVE) -> Iterator[tuple[str, bytes]]:
    """Yields (name, text) of each document, sorted by name. Raises DataError unless `archive` matches `SHA256`."""
    try:
        with gzip.open(archive) as file:
            raw = file.read(NBYTES + 1)  # a limit, in case the file unpacks to more
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{archive}: the demo corpus cannot be read ({error}); install swarmnode again") from None
    if len(raw) != NBYTES or hashlib.sha256(raw).hexdigest() != SHA256:
        raise DataError(f"{archive}: not the demo corpus of this version: its hash differs; install swarmnode again")
    with tarfile.open(fileobj=io.BytesIO(raw), mode="r:") as opened:
        for member in opened:
            file_of = opened.extractfile(member) if member.name.endswith(".py") else None
            if file_of is not None:
                yield member.name, file_of.read()
