"""Bundle logs of nodes on this machine into one file for analysis, without private data."""

from __future__ import annotations

import getpass
import gzip
import io
import json
import platform
import socket
import tarfile
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

from swarmnode import __version__
from swarmnode.atomic_file import atomic_file, write_fault
from swarmnode.errors import UsageError
from swarmnode.local.redact import Redactor

# An explicit list, so that no key, weights or cache gets in by accident.
FILES = ("events.jsonl.1", "events.jsonl", "stderr.log", "stdout.log", "status.json")
FILE_BYTES_MAX = 32 << 20
PACKAGES = ("torch", "hivemind", "numpy", "grpcio", "aiohttp")


def homes(folders: Sequence[Path]) -> list[Path]:
    """The nodes' homes in `folders` or directly below. Raises UsageError if there is none."""
    globs = ("events.jsonl", "*/events.jsonl")
    found = sorted({log.parent for folder in folders for glob in globs for log in folder.glob(glob)})
    if not found:
        raise UsageError(f"no log of a node in {', '.join(map(str, folders))}; give its --home")
    return found


def redactor() -> Redactor:
    """A redactor for the names of this machine and its user."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):
        user = ""
    home = str(Path.home())
    words = [(home, "~"), (socket.gethostname(), "thishost")]
    if user not in ("root", "user"):
        words.append((user, "user"))
    return Redactor([(word, name) for word, name in words if word not in ("/", "localhost")])


def about() -> dict[str, object]:
    """Versions of this machine's system and packages."""
    versions = {"swarmnode": __version__}
    for package in PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return {"python": platform.python_version(), "system": platform.platform(), "packages": versions}


def write(out: Path, nodes: Sequence[Path], hide: Redactor | None) -> list[str]:
    """Bundle the logs of `nodes` (homes) into `out`, a .tar.gz; return the names inside. Raises LocalFault if it cannot
    be written."""
    inside: list[str] = []

    def add(bundle: tarfile.TarFile, name: str, text: str) -> None:
        data = (text if hide is None else hide.text(text)).encode()
        row = tarfile.TarInfo(name)
        row.size, row.mode = len(data), 0o600
        bundle.addfile(row, io.BytesIO(data))
        inside.append(name)

    try:
        with (
            atomic_file(out) as raw,
            gzip.GzipFile("", "wb", 6, raw, 0) as packed,
            tarfile.open(fileobj=packed, mode="w") as bundle,
        ):
            add(bundle, "about.json", json.dumps(about(), indent=1))
            for index, home in enumerate(nodes):
                for name in FILES:
                    if (home / name).is_file():
                        add(bundle, f"{index:02d}-{home.name}/{name}", _tail(home / name))
    except OSError as error:
        raise write_fault(out, error, advice="free space there, or give another --out") from None
    return inside


def _tail(path: Path) -> str:
    """The text of `path`; of a long file only whole lines at its end."""
    with path.open("rb") as file:
        size = file.seek(0, io.SEEK_END)
        file.seek(max(0, size - FILE_BYTES_MAX))
        data = file.read()
    if size > FILE_BYTES_MAX:
        data = data.partition(b"\n")[2]
    return data.decode(errors="replace")
