"""Shards: what is written is read back, and whatever is damaged says so."""

import pathlib
import struct
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swarmnode.data.shard import HEADER, ShardWriter, open_shard
from swarmnode.data.tokens import ByteTokenizer
from swarmnode.errors import DataError

BYTES = ByteTokenizer()


def write(path: pathlib.Path, tokens: list[int], vocabulary: int = 256, tokenizer: bytes = BYTES.digest) -> None:
    with ShardWriter(path, vocabulary, tokenizer) as writer:
        writer.write(np.array(tokens[:3], dtype=np.uint32))
        writer.write(np.array(tokens[3:], dtype=np.uint32))


@given(tokens=st.lists(st.integers(0, 99_999), max_size=30), wide=st.booleans())
@settings(max_examples=40, deadline=None)
def test_round_trip(tmp_path_factory: pytest.TempPathFactory, tokens: list[int], wide: bool) -> None:
    vocabulary = 100_000 if wide else 256
    tokens = [token % vocabulary for token in tokens]
    path = tmp_path_factory.mktemp("shard") / "a.tokens"
    write(path, tokens, vocabulary)
    shard = open_shard(path, tokenizer=BYTES.digest, vocabulary=vocabulary)
    assert shard.tokens.tolist() == tokens
    assert shard.tokens.dtype == (np.uint32 if wide else np.uint16)
    assert not tokens or not shard.tokens.flags.writeable
    assert [p.name for p in path.parent.iterdir()] == ["a.tokens"]


def test_id_outside_the_vocabulary_is_not_written(tmp_path: pathlib.Path) -> None:
    with pytest.raises(DataError, match="token 256 is outside the vocabulary of 256"):
        write(tmp_path / "a.tokens", [1, 256])
    assert list(tmp_path.iterdir()) == []


def damage_flip(raw: bytes) -> bytes:
    return raw[:-1] + bytes([raw[-1] ^ 1])


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda raw: b"", "not a token shard"),
        (lambda raw: b"x" * 4096, "not a token shard"),
        (lambda raw: raw[:100], "not a token shard"),
        (lambda raw: raw[:-1], "cut short or damaged"),
        (lambda raw: raw + b"x", "cut short or damaged"),
        (damage_flip, "do not match the hash"),
        (lambda raw: raw[:8] + struct.pack("<I", 2) + raw[12:], "shard of version 2"),
        (lambda raw: raw[:12] + struct.pack("<I", 8) + raw[16:], "corrupt header: 8 bytes a token"),
        (lambda raw: raw[:24] + struct.pack("<Q", 1 << 60) + raw[32:], "cut short or damaged"),
        (lambda raw: raw[:16] + struct.pack("<Q", 512) + raw[24:], "ids up to 511, but model.vocabulary is 256"),
        (lambda raw: raw[:32] + bytes(32) + raw[64:], "another tokenizer"),
    ],
)
def test_damage_is_named(tmp_path: pathlib.Path, damage, says: str) -> None:
    path = tmp_path / "a.tokens"
    write(path, list(range(200)))
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(DataError, match=says) as caught:
        open_shard(path, tokenizer=BYTES.digest, vocabulary=256)
    assert str(caught.value).startswith(f"{path}: ")
    assert "\n" not in str(caught.value)


def test_missing_shard_and_folder(tmp_path: pathlib.Path) -> None:
    for path in (tmp_path / "none.tokens", tmp_path):
        with pytest.raises(DataError, match="cannot be read"):
            open_shard(path, tokenizer=BYTES.digest, vocabulary=256)


def test_large_shards_are_hashed_only_on_demand(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "a.tokens"
    write(path, [1, 2, 3])
    path.write_bytes(damage_flip(path.read_bytes()))
    open_shard(path, tokenizer=BYTES.digest, vocabulary=256, verify=False)
    with pytest.raises(DataError):
        open_shard(path, tokenizer=BYTES.digest, vocabulary=256, verify=True)


KILLED = """
import os, pathlib, signal, sys
import numpy as np
from swarmnode.data.shard import ShardWriter
with ShardWriter(pathlib.Path(sys.argv[1]), 256, bytes(32)) as writer:
    writer.write(np.zeros(100_000, dtype=np.uint16))
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_files_of_killed_writers_alone_are_swept(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "a.tokens"
    env = {"PYTHONPATH": ":".join(p for p in sys.path if p)}
    assert subprocess.run([sys.executable, "-c", KILLED, str(path)], env=env, timeout=150, check=False).returncode == -9
    assert len(list(tmp_path.iterdir())) == 1 and not path.exists()
    with ShardWriter(path, 256, BYTES.digest) as living:
        living.write(np.array([7], dtype=np.uint16))
        assert len(list(tmp_path.iterdir())) == 1
        write(path, [1, 2, 3])
        assert len(list(tmp_path.iterdir())) == 2
    assert open_shard(path, tokenizer=BYTES.digest, vocabulary=256).tokens.tolist() == [7]
    assert list(tmp_path.iterdir()) == [path]


def test_folder_that_cannot_be_made_is_one_line(tmp_path: pathlib.Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(DataError, match=r"file: cannot be made"):
        write(tmp_path / "file" / "a.tokens", [1])
    assert HEADER.size == 128
