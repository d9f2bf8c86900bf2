"""Sources become a corpus: the same on every node, held-out text apart, faults named with file and line."""

import dataclasses
import gzip
import hashlib
import importlib.util
import pathlib
from typing import Any

import numpy as np
import pytest

from swarmnode.data import source
from swarmnode.data.corpus import open_corpus
from swarmnode.data.root import DataRoot
from swarmnode.data.sample import IGNORED
from swarmnode.data.source import pieces, source_files
from swarmnode.data.tokens import open_tokenizer
from swarmnode.errors import DataError
from swarmnode.manifest import DataSpec, Manifest, ModelSpec
from tests.support.tokenizer import train_tokenizer

pytestmark = pytest.mark.node  # some seconds

ROOT = pathlib.Path(__file__).resolve().parents[2]
LINES = [f"line {i} of a text that goes on and on, number {i * i}\n" for i in range(3000)]


def manifest_of(source: str, *paths: str, vocabulary: int = 256, context: int = 16, **data) -> Manifest:
    return Manifest(
        model=ModelSpec(context=context, vocabulary=vocabulary), data=DataSpec(source=source, paths=paths, **data)
    )


@pytest.fixture
def folder(tmp_path: pathlib.Path) -> pathlib.Path:
    (tmp_path / "text" / "b").mkdir(parents=True)
    (tmp_path / "text" / "a.txt").write_text("".join(LINES[:1000]))
    (tmp_path / "text" / "b" / "c.txt").write_text("".join(LINES[1000:]))
    (tmp_path / "text" / "picture.png").write_bytes(b"\x89PNG\0\0\0")
    (tmp_path / "text" / ".hidden").write_text("secret")
    return tmp_path


def test_text_folder_is_all_there_and_split_by_hash(folder: pathlib.Path) -> None:
    manifest = manifest_of("text", "text", validation_fraction=0.1)
    corpus = open_corpus(manifest, folder, folder / "cache")
    whole = "".join(LINES)
    shards = {p.name.rpartition("-")[2]: np.fromfile(p, np.uint16)[:-16] for p in (folder / "cache").iterdir()}
    train, validation = shards["train.tokens"], shards["validation.tokens"]
    found = [
        piece + "\n" for t in (train, validation) for piece in bytes(t.astype(np.uint8)).decode().split("\0") if piece
    ]
    assert sorted(line for line in "".join(found).splitlines() if line) == sorted(line.strip() for line in LINES)
    assert 0.02 < validation.size / len(whole) < 0.25
    assert corpus.tokens_train == train.size and corpus.tokens_validation == validation.size
    assert corpus.train.count == (train.size - 1) // 16
    assert corpus.sample(3).shape == (17,)
    assert corpus.batch([0, 1, 2]).tokens.shape == (3, 17)


def test_second_opening_is_cached_and_the_same(folder: pathlib.Path) -> None:
    manifest = manifest_of("text", "text")
    first = open_corpus(manifest, folder, folder / "cache")
    second = open_corpus(manifest, folder, folder / "cache")
    assert (first.note, second.note) == ("2 files", "2 files, cached")
    assert first.digest == second.digest
    assert np.array_equal(first.batch(range(50)).tokens, second.batch(range(50)).tokens)
    (folder / "text" / "a.txt").write_text("".join(LINES[:999]))
    third = open_corpus(manifest, folder, folder / "cache")
    assert third.note == "2 files" and third.digest != first.digest


def test_damaged_cache_is_made_again(folder: pathlib.Path) -> None:
    manifest = manifest_of("text", "text")
    first = open_corpus(manifest, folder, folder / "cache")
    (path,) = (folder / "cache").glob("*-train.tokens")
    path.write_bytes(path.read_bytes()[:-2])
    second = open_corpus(manifest, folder, folder / "cache")
    assert "cache made again" in second.note and "damaged" in second.note
    assert second.digest == first.digest


def test_one_short_text_has_something_held_out(tmp_path: pathlib.Path) -> None:
    (tmp_path / "short.txt").write_text("".join(LINES[:60]))
    corpus = open_corpus(manifest_of("text", "short.txt"), tmp_path, tmp_path / "cache")
    assert corpus.train.count > 50 and corpus.validation.count >= 1


@pytest.mark.parametrize("text", ["", "tiny", "x" * 1000])
def test_too_little_text_says_how_much_there_is(tmp_path: pathlib.Path, text: str) -> None:
    (tmp_path / "short.txt").write_text(text)
    with pytest.raises(DataError, match=r"too little text: \d+ tokens to train on and \d+ held out"):
        open_corpus(manifest_of("text", "short.txt"), tmp_path, tmp_path / "cache")


def test_missing_and_empty_sources(tmp_path: pathlib.Path) -> None:
    with pytest.raises(DataError, match=r"gone: no such file or folder; data\.paths"):
        open_corpus(manifest_of("text", "gone"), tmp_path, tmp_path / "cache")
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=r"empty: no text file found"):
        open_corpus(manifest_of("text", "empty"), tmp_path, tmp_path / "cache")


def test_lines_without_end_are_cut_between_characters(tmp_path: pathlib.Path) -> None:
    text = "漢字🙂é" * 40_000
    (tmp_path / "long.txt").write_text(text)
    spec = manifest_of("text", "long.txt").data
    found = list(pieces(spec, source_files(spec, DataRoot(tmp_path))))
    assert "".join(found) == text
    assert max(map(len, found)) <= 64 << 10


def test_hugging_face_tokenizer_and_vocabulary(folder: pathlib.Path) -> None:
    train_tokenizer(folder / "tokenizer.json")
    with pytest.raises(DataError, match=r"tokenizer has 400 ids, but model\.vocabulary is 256"):
        open_corpus(manifest_of("text", "text", tokenizer="tokenizer.json"), folder, folder / "cache")
    corpus = open_corpus(
        manifest_of("text", "text", tokenizer="tokenizer.json", vocabulary=512), folder, folder / "cache"
    )
    assert "text that goes" in corpus.tokenizer.decode(corpus.batch(range(50)).tokens.reshape(-1))


def test_validation_is_fixed_and_apart_from_training(folder: pathlib.Path) -> None:
    corpus = open_corpus(manifest_of("text", "text", validation_fraction=0.1), folder, folder / "cache")
    all_at_once = corpus.validation_batch(0, 20, 20).tokens
    assert all_at_once.shape == (20, 17)
    in_parts = np.concatenate([corpus.validation_batch(first, 8, 20).tokens for first in range(0, 24, 8)])
    assert np.array_equal(all_at_once, in_parts)
    other = dataclasses.replace(manifest_of("text", "text", validation_fraction=0.1), seed=99)
    reseeded = open_corpus(other, folder, folder / "cache")
    assert reseeded.note.endswith("cached")
    assert np.array_equal(reseeded.validation_batch(0, 20, 20).tokens, all_at_once)
    assert not np.array_equal(reseeded.batch(range(20)).tokens, corpus.batch(range(20)).tokens)


def test_documents_end_with_the_token_that_parts_them(folder: pathlib.Path) -> None:
    """What is read apart are the documents that there are: each file is one."""
    (folder / "lines").mkdir()
    for number, line in enumerate(LINES):
        (folder / "lines" / f"{number}.txt").write_text(line)
    manifest = manifest_of("text", "lines", documents="masked")
    assert manifest.data.document_end == 0
    corpus = open_corpus(manifest, folder, folder / "cache")
    batch = corpus.batch(range(100))
    ends = batch.tokens[:, 1:] == 0
    assert ends.sum() > 20 and (batch.tokens[:, :-1][ends] == ord("\n")).all()
    targets = batch.targets(0)
    assert ((targets == IGNORED) == (batch.tokens[:, :-1] == 0)).all(), "no line is to be foretold from the one before"
    assert (batch.targets() != IGNORED).all()


def test_a_tokenizer_that_ends_documents_otherwise_is_refused(folder: pathlib.Path) -> None:
    train_tokenizer(folder / "tokenizer.json")
    given: dict[str, Any] = {"tokenizer": "tokenizer.json", "vocabulary": 512, "documents": "masked"}
    separator = open_tokenizer("tokenizer.json", DataRoot(folder)).separator
    with pytest.raises(DataError, match=rf"ends documents with token {separator}; data\.end_token is 7"):
        open_corpus(manifest_of("text", "text", end_token=7, **given), folder, folder / "cache")
    assert separator is not None
    corpus = open_corpus(manifest_of("text", "text", end_token=separator, **given), folder, folder / "cache")
    assert corpus.train.count > 0


def test_the_demo_is_one_text_on_all_machines(tmp_path: pathlib.Path) -> None:
    """Written down: whatever Python runs this, and wherever, sample 7 of the demo is these bytes."""
    corpus = open_corpus(Manifest(), None, tmp_path / "cache")
    sample = bytes(corpus.sample(7).astype(np.uint8))
    assert hashlib.sha256(sample).hexdigest() == "df90486c99d79409274d51affc4168ba0d4a13a50d57ad8dc9daaa5bf9730b77"
    assert corpus.digest.hex() == "dc8472ee111dc6c455c1bb4e7fd602e23bf93b9e3cd5b08d2eb0ed039e267900"
    assert corpus.note == "the demo corpus"
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
    good, path = source.DEMO_ARCHIVE.read_bytes(), tmp_path / "demo_corpus.tar.gz"
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
