"""A data set's index: one content has one hash, and nothing in it is believed unchecked."""

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from swarmnode.base.errors import DataError
from swarmnode.data.index import INDEX_NBYTES_MAX, parse_index
from tests.support.data_sets import data_set


def test_an_index_says_where_each_chunk_is(tmp_path: Path) -> None:
    index = data_set(tmp_path, chunks=10, loss_mask=True)
    assert (index.count, index.train.count, index.validation.count) == (12, 10, 2)
    for number in range(index.count):
        chunk = index.chunk(number)
        data = (tmp_path / chunk.shard).read_bytes()[chunk.offset : chunk.offset + chunk.nbytes]
        assert hashlib.sha256(data).digest() == chunk.sha256, chunk
    first = np.frombuffer((tmp_path / index.chunk(9).shard).read_bytes(), "<u2", 1025, index.chunk(9).offset)
    assert first.tolist() == (np.arange(9 * 1025, 10 * 1025) * 7 % 256).tolist()
    for wrong in (-1, 12):
        with pytest.raises(IndexError):
            index.chunk(wrong)


def changed(raw: bytes, **values: Any) -> bytes:
    return json.dumps({**json.loads(raw), **values}, sort_keys=True, separators=(",", ":")).encode()


def shard(raw: bytes, **values: Any) -> bytes:
    tree = json.loads(raw)
    tree["train"]["shards"][0].update(values)
    return json.dumps(tree, sort_keys=True, separators=(",", ":")).encode()


def test_an_index_that_is_wrong_is_refused(tmp_path: Path) -> None:
    data_set(tmp_path)
    raw = (tmp_path / "index.json").read_bytes()
    assert parse_index(raw, hashlib.sha256(raw).digest()).digest == hashlib.sha256(raw).digest()
    with pytest.raises(DataError, match="SHA-256"):
        parse_index(raw, b"\0" * 32)
    with pytest.raises(DataError, match="at most"):
        parse_index(b" " * (INDEX_NBYTES_MAX + 1))
    train = json.loads(raw)["train"]
    cases: dict[bytes, str] = {
        b"\xff": "not JSON",
        b"[" * 100_000: "not JSON",
        b"[]": "no index of format",
        raw + b"\n": "canonical",
        raw.replace(b'"vocabulary":256', b'"vocabulary":2.56e2'): "vocabulary",
        changed(raw, format="swarmnode-data-2"): "no index of format",
        changed(raw, more=1): "no index of format",
        changed(raw, vocabulary=1 << 30): "vocabulary",
        changed(raw, vocabulary=True): "vocabulary",
        changed(raw, end_token=256): "end_token",
        changed(raw, end_token=-1): "end_token",
        changed(raw, loss_mask=1): "loss_mask",
        changed(raw, tokenizer="zz" * 32): "SHA-256",
        changed(raw, train=7): "train",
        changed(raw, train={**train, "chunk_tokens": 1 << 22}): "hashes|larger|short",
        changed(raw, train={**train, "chunk_tokens": 1}): "chunk_tokens",
        changed(raw, train={**train, "documents": -1}): "documents",
        changed(raw, train={**train, "shards": [{}] * 70_000}): "at most",
        changed(raw, validation=train): "two shards of one name",
        shard(raw, tokens=1 << 60): "tokens",
        shard(raw, tokens=4101): "short|hashes",
        shard(raw, sha256=["0" * 64]): "hashes",
        shard(raw, sha256=["0" * 63] * 4): "SHA-256",
        **{
            shard(raw, name=name): "no name like"
            for name in ("../../.ssh/id", "/etc/passwd", "train-00000.bin/", "a\\b", "", "train-00000.bin\n", 7, None)
        },
    }
    for given, reason in cases.items():
        with pytest.raises(DataError, match=reason):
            parse_index(given)
