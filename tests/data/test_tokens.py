"""Tokenizers: the bytes built in, and a Hugging Face one trained here."""

import json
import pathlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarmnode.base.errors import DataError
from swarmnode.data.root import DataRoot
from swarmnode.data.tokens import ByteTokenizer, HuggingFaceTokenizer, dtype_of, open_tokenizer
from tests.support.tokenizer import train_tokenizer

HERE = pathlib.Path()


@pytest.mark.node
@given(st.text())
def test_bytes_round_trip(text: str) -> None:
    tokenizer = ByteTokenizer()
    tokens = tokenizer.encode(text)
    raw = text.encode(errors="replace")
    assert tokens.dtype == np.uint16
    assert tokens.tolist() == list(raw)
    assert tokenizer.decode(tokens) == raw.decode()


def test_hugging_face_round_trip(tmp_path: pathlib.Path) -> None:
    train_tokenizer(tmp_path / "tokenizer.json")
    tokenizer = open_tokenizer("tokenizer.json", DataRoot(tmp_path))
    assert isinstance(tokenizer, HuggingFaceTokenizer)
    assert tokenizer.vocabulary == 400
    assert tokenizer.separator == 0
    text = "def test(path: str) -> None:  # äöü 漢字 🙂\n"
    tokens = tokenizer.encode(text)
    assert tokens.dtype == np.uint16
    assert tokens.size < len(text.encode())
    assert tokens.max() < tokenizer.vocabulary
    assert tokenizer.decode(tokens) == text
    assert tokenizer.encode_all(["a", ""])[1].size == 0
    assert open_tokenizer("tokenizer.json", DataRoot(tmp_path)).digest == tokenizer.digest


def test_a_text_has_the_same_ids_each_time(tmp_path: pathlib.Path) -> None:
    """tokenizers 0.23.3 leaves merges out by lot where tokenizer.json has a dropout, as BPE-dropout asks in training;
    a set that was killed and goes on would end with other bytes."""
    path = train_tokenizer(tmp_path / "tokenizer.json")
    (plain,) = open_tokenizer(path.name, DataRoot(tmp_path)).encode_all(["def test(path): return path"])
    tree = json.loads(path.read_text())
    tree["model"]["dropout"] = 0.5
    path.write_text(json.dumps(tree))
    tokenizer = open_tokenizer(path.name, DataRoot(tmp_path))
    for _ in range(9):
        assert tokenizer.encode_all(["def test(path): return path"])[0].tolist() == plain.tolist()
        assert tokenizer.encode("def test(path): return path").tolist() == plain.tolist()


def test_tokenizers_are_told_apart(tmp_path: pathlib.Path) -> None:
    one = open_tokenizer(train_tokenizer(tmp_path / "1.json", 300).name, DataRoot(tmp_path))
    two = open_tokenizer(train_tokenizer(tmp_path / "2.json", 301).name, DataRoot(tmp_path))
    assert len({one.digest, two.digest, ByteTokenizer().digest}) == 3


@pytest.mark.parametrize("content", [b"", b"{}", b"not json", b"\xff\xfe", b'{"version": "1.0", "model": null}'])
def test_a_malformed_tokenizer_is_refused(tmp_path: pathlib.Path, content: bytes) -> None:
    (tmp_path / "tokenizer.json").write_bytes(content)
    with pytest.raises(DataError, match=r"tokenizer\.json: not a Hugging Face tokenizer"):
        open_tokenizer("tokenizer.json", DataRoot(tmp_path))


def test_missing_tokenizer_names_the_field(tmp_path: pathlib.Path) -> None:
    with pytest.raises(DataError, match=r"none\.json: tokenizer cannot be read: No such file.*data\.tokenizer"):
        open_tokenizer("none.json", DataRoot(tmp_path))


def test_dtype_is_the_smallest_that_fits() -> None:
    assert dtype_of(1 << 16) == np.uint16
    assert dtype_of((1 << 16) + 1) == np.uint32
