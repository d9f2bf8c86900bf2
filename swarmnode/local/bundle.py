"""One file with what helps to understand what nodes did on this machine, without what is nobody's business."""

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
from swarmnode.errors import LocalFault, UsageError
from swarmnode.local.redact import Redactor

# Named one by one: keys, weights and caches never get in by being forgotten here.
FILES = ("events.jsonl.1", "events.jsonl", "stderr.log", "stdout.log", "status.json")
FILE_BYTES_MAX = 32 << 20
PACKAGES = ("torch", "hivemind", "numpy", "grpcio", "aiohttp")


def homes(folders: Sequence[Path]) -> list[Path]:
    """The nodes' homes in `folders`, themselves or below. Raises UsageError when there is none."""
    globs = ("events.jsonl", "*/events.jsonl")
    found = sorted({log.parent for folder in folders for glob in globs for log in folder.glob(glob)})
    if not found:
        raise UsageError(f"no node has left a log in {', '.join(map(str, folders))}; give its --home")
    return found


def redactor() -> Redactor:
    """Of this machine's and its user's names."""
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
    """This machine and what is installed."""
    versions = {"swarmnode": __version__}
    for package in PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return {"python": platform.python_version(), "system": platform.platform(), "packages": versions}


def write(out: Path, nodes: Sequence[Path], hide: Redactor | None) -> list[str]:
    """Bundle the logs of `nodes` (homes) into `out`, a .tar.gz; returns the names inside. Raises LocalFault when it
    cannot be written."""
    inside: list[str] = []

    def add(bundle: tarfile.TarFile, name: str, text: str) -> None:
        data = (text if hide is None else hide.text(text)).encode()
        row = tarfile.TarInfo(name)
        row.size, row.mode = len(data), 0o600
        bundle.addfile(row, io.BytesIO(data))
        inside.append(name)

    part = out.with_name(out.name + ".part")
    try:
        with (
            part.open("wb") as raw,
            gzip.GzipFile("", "wb", 6, raw, 0) as packed,
            tarfile.open(fileobj=packed, mode="w") as bundle,
        ):
            add(bundle, "about.json", json.dumps(about(), indent=1))
            for index, home in enumerate(nodes):
                for name in FILES:
                    if (home / name).is_file():
                        add(bundle, f"{index:02d}-{home.name}/{name}", _tail(home / name))
        part.replace(out)
    except OSError as error:
        part.unlink(missing_ok=True)
        raise LocalFault(f"cannot write {out}: {error.strerror or error}; give another --out") from None
    return inside


def _tail(path: Path) -> str:
    """The text of `path`, of a long one the end from a line's beginning on."""
    with path.open("rb") as file:
        size = file.seek(0, io.SEEK_END)
        file.seek(max(0, size - FILE_BYTES_MAX))
        data = file.read()
    if size > FILE_BYTES_MAX:
        data = data.partition(b"\n")[2]
    return data.decode(errors="replace")
