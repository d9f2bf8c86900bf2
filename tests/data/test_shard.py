"""Shards: what is written is read back, and whatever is damaged says so."""

import pathlib
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swarmnode.data.shard import ShardWriter, open_shard
from swarmnode.errors import DataError


def write(path: pathlib.Path, tokens: list[int], vocabulary: int = 256) -> None:
    with ShardWriter(path, vocabulary) as writer:
        writer.write(np.array(tokens[:3], dtype=np.uint32))
        writer.write(np.array(tokens[3:], dtype=np.uint32))


@given(tokens=st.lists(st.integers(0, 99_999), max_size=30), wide=st.booleans())
@settings(max_examples=40, deadline=None)
def test_round_trip(tmp_path_factory: pytest.TempPathFactory, tokens: list[int], wide: bool) -> None:
    vocabulary = 100_000 if wide else 256
    tokens = [token % vocabulary for token in tokens]
    path = tmp_path_factory.mktemp("shard") / "a.tokens"
    write(path, tokens, vocabulary)
    shard = open_shard(path, vocabulary)
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
        (lambda raw: b"", "cut short or damaged"),
        (lambda raw: raw[:-1], "cut short or damaged"),
        (lambda raw: raw[2:], "do not match their hash"),
        (damage_flip, "do not match their hash"),
    ],
)
def test_damage_is_named(tmp_path: pathlib.Path, damage, says: str) -> None:
    path = tmp_path / "a.tokens"
    write(path, list(range(200)))
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(DataError, match=says) as caught:
        open_shard(path, 256)
    assert str(caught.value).startswith(f"{path}: ")
    assert "\n" not in str(caught.value)


def test_missing_shard_and_folder(tmp_path: pathlib.Path) -> None:
    for path in (tmp_path / "none.tokens", tmp_path):
        with pytest.raises(DataError, match="cannot be read"):
            open_shard(path, 256)


KILLED = """
import os, pathlib, signal, sys
import numpy as np
from swarmnode.data.shard import ShardWriter
with ShardWriter(pathlib.Path(sys.argv[1]), 256) as writer:
    writer.write(np.zeros(100_000, dtype=np.uint16))
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_files_of_killed_writers_alone_are_swept(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "a.tokens"
    env = {"PYTHONPATH": ":".join(p for p in sys.path if p)}
    assert subprocess.run([sys.executable, "-c", KILLED, str(path)], env=env, timeout=150, check=False).returncode == -9
    assert len(list(tmp_path.iterdir())) == 1 and not path.exists()
    with ShardWriter(path, 256) as living:
        living.write(np.array([7], dtype=np.uint16))
        assert len(list(tmp_path.iterdir())) == 1
        write(path, [1, 2, 3])
        assert len(list(tmp_path.iterdir())) == 2
    assert open_shard(path, 256).tokens.tolist() == [7]
    assert list(tmp_path.iterdir()) == [path]


def test_folder_that_cannot_be_made_is_one_line(tmp_path: pathlib.Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(DataError, match=r"file: cannot be made"):
        write(tmp_path / "file" / "a.tokens", [1])
