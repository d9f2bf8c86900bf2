"""Chunks on disk: verified, bounded, and nothing opened that the index does not name by content."""

from __future__ import annotations

import hashlib
import os
import threading
from pathlib import Path

import numpy as np
import pytest

from swarmnode.base.errors import DataError
from swarmnode.data.chunk_store import ChunkCache, ChunkStore, find_index, other_set, read_regular
from swarmnode.data.index import Index
from tests.support.data_sets import data_set


def blob(number: int, nbytes: int = 1000) -> tuple[bytes, bytes]:
    data = bytes([number]) * nbytes
    return hashlib.sha256(data).digest(), data


def test_the_cache_is_bounded_and_forgets_what_was_not_used_for_longest(tmp_path: Path) -> None:
    cache = ChunkCache(tmp_path / "cache", 3500)
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "notes.txt").write_text("not ours")
    for number in range(3):
        assert cache.write(*blob(number)) is None
        os.utime(tmp_path / "cache" / blob(number)[0].hex(), ns=(number, number))
    assert cache.read(blob(0)[0], 1000) == blob(0)[1], "now the one used last"
    assert cache.write(*blob(3)) is None
    assert [cache.read(blob(n)[0], 1000) is not None for n in range(4)] == [True, False, True, True]
    assert sum(one.nbytes for one in cache.held().values()) <= 3500
    assert (tmp_path / "cache" / "notes.txt").exists()
    reason = cache.write(*blob(9, 4000))
    assert reason is not None and "--data-cache" in reason


def test_a_damaged_blob_is_not_used(tmp_path: Path) -> None:
    cache = ChunkCache(tmp_path)
    sha256, data = blob(1)
    cache.write(sha256, data)
    (tmp_path / sha256.hex()).write_bytes(data[:-1] + b"x")
    assert cache.read(sha256, 1000) is None and not (tmp_path / sha256.hex()).exists()
    cache.write(sha256, data)
    assert cache.read(sha256, 999) is None, "longer than it may be"


def test_processes_share_a_cache(tmp_path: Path) -> None:
    def work(first: int) -> None:
        for number in range(first, first + 40):
            assert ChunkCache(tmp_path, 20_000).write(*blob(number % 50)) is None

    threads = [threading.Thread(target=work, args=(10 * n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    cache = ChunkCache(tmp_path, 20_000)
    held = cache.held()
    assert all(hashlib.sha256((tmp_path / name).read_bytes()).hexdigest() == name for name in held)
    assert not list(tmp_path.glob(".*.tmp"))


def test_files_of_a_killed_writer_are_removed(tmp_path: Path) -> None:
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)
    left = tmp_path / f".{'ab' * 32}.{pid}.1.tmp"
    alive = tmp_path / f".{'ab' * 32}.{os.getpid()}.1.tmp"
    left.write_bytes(b"half")
    alive.write_bytes(b"half")
    ChunkCache(tmp_path).write(*blob(1))
    assert not left.exists() and alive.exists()


def test_a_full_disk_is_said_and_the_chunk_is_used(tmp_path: Path) -> None:
    index = data_set(tmp_path / "data")
    blocked = tmp_path / "file"
    blocked.write_text("a file where the cache's folder should be")
    store = ChunkStore(index, ChunkCache(blocked / "cache"))
    chunk = index.chunk(2)
    data = (tmp_path / "data" / chunk.shard).read_bytes()[chunk.offset : chunk.offset + chunk.nbytes]
    reason = store.put(2, data)
    assert reason is not None and str(blocked) in reason
    assert store.read(2) == data


def test_a_store_gives_only_what_matches_its_hash(tmp_path: Path) -> None:
    index: Index = data_set(tmp_path / "data")
    store = ChunkStore(index, ChunkCache(tmp_path / "cache"), tmp_path / "data")
    assert np.unpackbits(np.frombuffer(store.held_bits(), np.uint8), bitorder="little")[:10].tolist() == [1] * 10
    shard = tmp_path / "data" / index.chunk(5).shard
    raw = bytearray(shard.read_bytes())
    raw[index.chunk(5).offset] ^= 1
    shard.write_bytes(raw)
    assert store.read(5) is None and store.read(6) is not None
    assert not store.held_bits()[0] >> 5 & 1
    for wrong in (b"", bytes(index.chunk(5).nbytes), b"x" * (index.chunk(5).nbytes + 1)):
        with pytest.raises(DataError, match="does not match"):
            store.put(5, wrong)
    assert store.number_of(index.chunk(7).sha256) == 7 and store.number_of(b"\0" * 32) is None


def test_links_pipes_devices_and_folders_leak_nothing(tmp_path: Path) -> None:
    """A shard's name in the user's own folder may be a link: what it leads to has to have the hash."""
    index = data_set(tmp_path / "data")
    secret = tmp_path / "secret"
    secret.write_bytes(b"k" * 10_000)
    shard = tmp_path / "data" / index.chunk(0).shard
    for make in (
        lambda: shard.symlink_to(secret),
        lambda: os.mkfifo(shard),
        lambda: shard.symlink_to("/dev/zero"),
        shard.mkdir,
        lambda: None,
    ):
        shard.unlink(missing_ok=True)
        make()
        store = ChunkStore(index, ChunkCache(tmp_path / "cache"), tmp_path / "data")
        assert store.read(0) is None
        if shard.is_dir():
            shard.rmdir()
    assert read_regular(Path("/dev/zero"), 10) is None and read_regular(tmp_path, 10) is None
    assert find_index(tmp_path, b"\0" * 32) is None and find_index(None, index.digest) is None
    assert find_index(tmp_path, index.digest) is not None, "also in its folder data"


def test_a_folder_with_another_data_set_is_named_with_both_hashes(tmp_path: Path) -> None:
    index = data_set(tmp_path / "run" / "data")
    other = data_set(tmp_path / "other", chunks=3)
    assert other_set(tmp_path / "run", index.digest) is None
    reason = other_set(tmp_path / "other", index.digest)
    assert reason is not None and index.digest.hex()[:16] in reason and other.digest.hex()[:16] in reason
    assert "holds no data set" in str(other_set(tmp_path, index.digest))
