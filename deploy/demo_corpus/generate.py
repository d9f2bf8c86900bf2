"""Make swarmnode/data/demo_corpus.tar.gz again: the standard library's sources, the same bytes from any copy of them.

    python deploy/demo_corpus/generate.py FOLDER   # Lib/ of the sources of CPython 3.11.7, or lib/python3.11 installed

FOLDER is compared with the pinned hash; nothing is written when it differs. `--pin` prints the hash of another one.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import io
import os
import pathlib
import sys
import tarfile

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from swarmnode.data.source import DEMO_ARCHIVE, DEMO_LICENSE, DEMO_NBYTES, DEMO_SHA256  # noqa: E402

PREFIX = "python3.11"
SKIPPED = frozenset({"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"})
"""Tests are half of the standard library and say little that the rest does not."""


def sources(folder: pathlib.Path) -> list[tuple[str, bytes]]:
    """(name in the archive, text) of each source below `folder`, by name; without what a build on one machine wrote."""
    found = []
    for here, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if name not in SKIPPED and not name.startswith((".", "config-"))]
        for name in files:
            if name.endswith(".py") and not name.startswith((".", "_sysconfigdata")):
                path = pathlib.Path(here, name)
                found.append((f"{PREFIX}/{path.relative_to(folder).as_posix()}", path.read_bytes()))
    return sorted(found)


def archive(folder: pathlib.Path) -> bytes:
    """The uncompressed archive: the licence, then the sources; no times, owners or modes of this machine."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:", format=tarfile.USTAR_FORMAT) as opened:
        for name, text in [("LICENSE.txt", DEMO_LICENSE.read_bytes()), *sources(folder)]:
            member = tarfile.TarInfo(name)
            member.size = len(text)
            opened.addfile(member, io.BytesIO(text))
    return out.getvalue()


def main() -> int:
    parser = argparse.ArgumentParser(description="Make the demo corpus again.")
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("--pin", action="store_true", help="write it whatever its hash, and print what to pin")
    options = parser.parse_args()
    raw = archive(options.folder)
    found = hashlib.sha256(raw).hexdigest()
    if not options.pin and (found, len(raw)) != (DEMO_SHA256, DEMO_NBYTES):
        sys.stderr.write(
            f"{options.folder}: {found}, {len(raw)} bytes; pinned are {DEMO_SHA256}, {DEMO_NBYTES} bytes\n"
        )
        return 1
    DEMO_ARCHIVE.write_bytes(gzip.compress(raw, 9, mtime=0))
    sys.stdout.write(f'DEMO_SHA256 = "{found}"\nNBYTES = {len(raw)}\n')
    return 0


if __name__ == "__main__":
    sys.exit(main())
