"""A disk that is really full: a file system of 256 KiB, in a namespace of its own, and everything we write there."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

FULL_NBYTES = 256 << 10
WRITERS = """
import asyncio, sys
from pathlib import Path
import numpy as np
from swarmnode.base.atomic_file import check_free, check_writable
from swarmnode.base.errors import SwarmnodeError
from swarmnode.data.set_maker import WORK_FOLDER
place = Path(sys.argv[1])

def checkpoint():
    from swarmnode.app.machine.folder_store import FolderStore
    asyncio.run(FolderStore(place / "checkpoints").write("run/theta", [bytes(1 << 20)]))

def cache():
    from swarmnode.data.corpus import write_shard
    write_shard(place / "cache" / "a.tokens", np.zeros(1 << 20, np.uint8))

def model():
    from swarmnode.model.export import _write
    _write(place / "model.safetensors", bytes(1 << 20))

def archive():
    from swarmnode.app.machine.slow_copy import SlowCopy
    from swarmnode.base.wire import call_pb2
    offer = call_pb2.Snapshot(nbytes=1 << 20, chunk_nbytes=1 << 20, hashes=[b""])
    SlowCopy("peer", offer, place / "copy")._write(0, bytes(1 << 20))

def manifest():
    from swarmnode.base.atomic_file import write_whole
    write_whole(place / "manifest.signed", bytes(1 << 20))

def data_set():
    from swarmnode.data.chat_template import ChatTemplate
    from swarmnode.data.set_maker import MakeOptions, make
    from swarmnode.data.set_maker import Encoding
    from swarmnode.data.tokens import ByteTokenizer
    options = MakeOptions((sys.argv[2],), chunk_tokens=257)
    make(place / "set", options, Encoding(ByteTokenizer(), ChatTemplate()), lambda rendered: {}, lambda *told: None)

def shard():
    from swarmnode.base.atomic_file import write_whole
    write_whole(place / "set" / "train-00000.bin", lambda file: file.write(bytes(1 << 20)))

def before():
    check_free(place / "not" / "yet", 1 << 30, "a checkpoint")

for writer in (checkpoint, cache, model, archive, manifest, data_set, shard, before):
    try:
        writer()
    except SwarmnodeError as error:
        print(writer.__name__, error.exit_code, error, sep="|")
print(*sorted(str(p.relative_to(place)) for p in place.rglob("*") if p.is_file() and p.name != "copy"
  and not p.is_relative_to(place / "set" / WORK_FOLDER)), sep=";")
"""


def test_a_full_disk_is_called_a_full_disk_wherever_we_write(tmp_path: Path) -> None:
    place = tmp_path / "small"
    place.mkdir()
    text = tmp_path / "books.txt"
    text.write_text("A book that is larger than the disk. " * 20_000)
    mount = f"mount -t tmpfs -o size={FULL_NBYTES} tmpfs {place} && exec {sys.executable} -c '{WRITERS}' {place} {text}"
    unshare = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", mount]
    done = subprocess.run(unshare, env={**os.environ}, capture_output=True, text=True, timeout=120, check=False)
    if "unshare:" in done.stderr or "mount:" in done.stderr:
        if "CI" in os.environ:
            pytest.fail(f"no file system of our own here: {done.stderr}")
        pytest.skip(f"no file system of our own here: {done.stderr.strip()[:200]}")
    assert done.returncode == 0, done.stderr
    *rows, left = done.stdout.splitlines()
    told = {name: (code, text) for name, code, text in (row.split("|", 2) for row in rows)}
    assert set(told) == {"checkpoint", "cache", "model", "archive", "manifest", "data_set", "shard", "before"}
    for name, (code, text) in told.items():  # type: ignore[assignment]
        assert code == "74" and text.startswith("the disk is full"), f"{name}: {text}"  # type: ignore[attr-defined]
        assert str(place) in text and " bytes" in text and "free" in text, f"{name}: {text}"  # type: ignore[operator]
    for name in ("checkpoint", "model", "archive", "manifest"):
        assert f"needs {1 << 20} bytes" in told[name][1], told[name]
    assert left == "", f"nothing half-written stays: {left}"
