"""Shards: what is written is read back, and whatever is damaged says so."""

import pathlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swarmnode.data.corpus import open_shard, write_shard
from swarmnode.data.tokens import dtype_of
from swarmnode.errors import DataError


def write(path: pathlib.Path, tokens: list[int], vocabulary: int = 256) -> None:
    write_shard(path, np.array(tokens, dtype_of(vocabulary)))


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


def test_folder_that_cannot_be_made_is_one_line(tmp_path: pathlib.Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(DataError, match=r"a\.tokens: cannot be written"):
        write(tmp_path / "file" / "a.tokens", [1])
