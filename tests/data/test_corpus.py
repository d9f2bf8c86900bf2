"""The demo becomes a corpus: the same on every node, held-out text apart."""

import dataclasses
import gzip
import hashlib
import importlib.util
import pathlib
from typing import Any

import numpy as np
import pytest

from swarmnode.base.errors import DataError
from swarmnode.data import source
from swarmnode.data.corpus import open_corpus, open_shard
from swarmnode.data.root import DataRoot
from swarmnode.data.sample import IGNORED
from swarmnode.data.tokens import open_tokenizer
from swarmnode.run.manifest import DataSpec, Manifest, ModelSpec
from tests.support.tokenizer import train_tokenizer

pytestmark = pytest.mark.node  # some seconds

ROOT = pathlib.Path(__file__).resolve().parents[2]


def manifest_of(vocabulary: int = 256, context: int = 16, **data) -> Manifest:
    return Manifest(model=ModelSpec(context=context, vocabulary=vocabulary), data=DataSpec(**data))


def test_the_demo_is_all_there_and_split_by_hash(tmp_path: pathlib.Path) -> None:
    corpus = open_corpus(manifest_of(), None, tmp_path)
    whole = sorted(piece for piece in source.demo_pieces())
    shards = {p.name.rpartition("-")[2]: np.fromfile(p, np.uint16)[:-16] for p in tmp_path.iterdir()}
    train = shards["train.tokens"]
    validation = shards["validation.tokens"]
    found = [piece for t in (train, validation) for piece in t.astype(np.uint8).tobytes().split(b"\0") if piece]
    assert sorted(piece.decode() for piece in found) == whole
    assert 0.01 < validation.size / (train.size + validation.size) < 0.03
    assert (corpus.train.count, corpus.validation.count) == ((train.size - 1) // 16, (validation.size - 1) // 16)
    assert corpus.batch([0, 1, 2]).tokens.shape == (3, 17)


def test_second_opening_is_cached_and_the_same(tmp_path: pathlib.Path) -> None:
    first = open_corpus(manifest_of(), None, tmp_path)
    files = {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    second = open_corpus(manifest_of(), None, tmp_path)
    assert files == {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    assert first.digest == second.digest
    assert np.array_equal(first.batch(range(50)).tokens, second.batch(range(50)).tokens)


def test_a_damaged_cache_is_made_again(tmp_path: pathlib.Path) -> None:
    first = open_corpus(manifest_of(), None, tmp_path)
    path = max(tmp_path.iterdir(), key=lambda one: one.stat().st_size)
    good = path.read_bytes()
    damaged = {
        b"": "cut short or damaged: 0 bytes",
        good[:-1]: "cut short or damaged",
        good[2:]: "do not match their hash",
        good[:-1] + bytes([good[-1] ^ 1]): "do not match their hash",
    }
    for raw, says in damaged.items():
        path.write_bytes(raw)
        with pytest.raises(DataError, match=says):
            open_shard(path, 256)
    assert open_corpus(manifest_of(), None, tmp_path).digest == first.digest and path.read_bytes() == good
    path.unlink()
    path.mkdir()
    with pytest.raises(DataError, match=r"train\.tokens: cannot be written"):
        open_corpus(manifest_of(), None, tmp_path)


def test_too_little_text_says_how_much_there_is(tmp_path: pathlib.Path) -> None:
    with pytest.raises(DataError, match=r"has \d+ tokens to train on and \d+ held out, and each needs more than"):
        open_corpus(manifest_of(context=1 << 20), None, tmp_path)


def test_lines_without_end_are_cut_between_characters() -> None:
    text = "漢字🙂é" * 40_000
    found = [piece.decode() for piece in source.cut_lines([text.encode()], 64 << 10)]
    assert "".join(found) == text
    assert max(map(len, found)) <= 64 << 10


def test_hugging_face_tokenizer_and_vocabulary(tmp_path: pathlib.Path) -> None:
    train_tokenizer(tmp_path / "tokenizer.json")
    with pytest.raises(DataError, match=r"tokenizer has 400 ids, but model\.vocabulary is 256"):
        open_corpus(manifest_of(tokenizer="tokenizer.json"), tmp_path, tmp_path)
    given: dict[str, Any] = {"tokenizer": "tokenizer.json", "vocabulary": 512, "documents": "masked"}
    separator = open_tokenizer("tokenizer.json", DataRoot(tmp_path)).separator
    with pytest.raises(DataError, match=rf"ends documents with token {separator}; data\.end_token is 7"):
        open_corpus(manifest_of(end_token=7, **given), tmp_path, tmp_path)
    assert separator is not None
    corpus = open_corpus(manifest_of(end_token=separator, **given), tmp_path, tmp_path)
    tokenizer = open_tokenizer("tokenizer.json", DataRoot(tmp_path))
    assert "import" in tokenizer.decode(corpus.batch(range(500)).tokens.reshape(-1))


def test_validation_is_fixed_and_apart_from_training(tmp_path: pathlib.Path) -> None:
    corpus = open_corpus(manifest_of(), None, tmp_path)
    all_at_once = corpus.validation_batch(0, 20, 20).tokens
    assert all_at_once.shape == (20, 17)
    in_parts = np.concatenate([corpus.validation_batch(first, 8, 20).tokens for first in range(0, 24, 8)])
    assert np.array_equal(all_at_once, in_parts)
    reseeded = open_corpus(dataclasses.replace(manifest_of(), seed=99), None, tmp_path)
    assert np.array_equal(reseeded.validation_batch(0, 20, 20).tokens, all_at_once)
    assert not np.array_equal(reseeded.batch(range(20)).tokens, corpus.batch(range(20)).tokens)


def test_documents_end_with_the_token_that_parts_them(tmp_path: pathlib.Path) -> None:
    manifest = manifest_of(documents="masked", context=2048)
    assert manifest.data.document_end == 0
    batch = open_corpus(manifest, None, tmp_path).batch(range(500))
    ends = batch.tokens[:, 1:] == 0
    assert ends.sum() > 20 and (batch.tokens[:, :-1][ends] == ord("\n")).all()
    targets = batch.targets(0)
    assert ((targets == IGNORED) == (batch.tokens[:, :-1] == 0)).all(), "no piece is to be foretold from the one before"
    assert (batch.targets() != IGNORED).all()


def test_the_demo_is_one_text_on_all_machines(tmp_path: pathlib.Path) -> None:
    """Written down: whatever Python runs this, and wherever, sample 7 of the demo is these bytes."""
    corpus = open_corpus(Manifest(), None, tmp_path / "cache")
    sample = bytes(corpus.batch([7]).tokens[0].astype(np.uint8))
    assert hashlib.sha256(sample).hexdigest() == "df90486c99d79409274d51affc4168ba0d4a13a50d57ad8dc9daaa5bf9730b77"
    assert corpus.digest.hex() == "dc8472ee111dc6c455c1bb4e7fd602e23bf93b9e3cd5b08d2eb0ed039e267900"
    assert sample.decode().count("\n") > 1


def test_the_demo_corpus_can_be_made_again_to_the_byte(tmp_path: pathlib.Path) -> None:
    spec = importlib.util.spec_from_file_location("generate", ROOT / "deploy" / "demo_corpus" / "generate.py")
    assert spec is not None and spec.loader is not None
    generate = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(generate)
    for name, text in source.demo_documents():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text)
    lib = tmp_path / "python3.11"
    for name in ("_sysconfigdata_linux.py", "test/test_this.py", "site-packages/other.py", "config-3.11-linux/made.py"):
        (lib / name).parent.mkdir(exist_ok=True)
        (lib / name).write_text("not part of it")
    raw = generate.archive(lib)
    assert (hashlib.sha256(raw).hexdigest(), len(raw)) == (source.DEMO_SHA256, source.DEMO_NBYTES)


@pytest.mark.parametrize("fault", ["cut", "bit", "other", "empty", "gone", "bomb"])
def test_another_demo_corpus_is_refused(tmp_path: pathlib.Path, fault: str) -> None:
    good = source.DEMO_ARCHIVE.read_bytes()
    path = tmp_path / "demo_corpus.tar.gz"
    made = {
        "cut": good[:-1000],
        "bit": good[:1_000_000] + bytes([good[1_000_000] ^ 1]) + good[1_000_001:],
        "other": gzip.compress(bytes(source.DEMO_NBYTES), 1),
        "empty": b"",
        "gone": None,
        "bomb": gzip.compress(bytes(4 * source.DEMO_NBYTES), 1),
    }[fault]
    if made is not None:
        path.write_bytes(made)
    with pytest.raises(DataError, match=r"demo_corpus\.tar\.gz: .*demo corpus.*; install swarmnode again"):
        list(source.demo_documents(path))
