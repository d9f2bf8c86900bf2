"""A manifest of a stranger opens no file of this machine; with a folder that the user named, none outside it."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from swarmnode.data.corpus import open_corpus
from swarmnode.data.root import DataRoot
from swarmnode.data.source import source_files
from swarmnode.data.tokens import open_tokenizer
from swarmnode.errors import NotPermitted
from swarmnode.manifest import DataSpec, Manifest, ModelSpec
from tests.support.tokenizer import train_tokenizer

SECRET = "-----BEGIN OPENSSH PRIVATE KEY-----\nthe secret of this user\n"
TEXT = "".join(f"line {number} of the text that is meant, {number * number}\n" for number in range(999))


@pytest.fixture
def user(tmp_path: Path) -> Path:
    """A home with secrets, and a folder of text in it that the user lets the run have."""
    (tmp_path / ".ssh").mkdir()
    (tmp_path / ".ssh" / "id").write_text(SECRET * 99)
    (tmp_path / "taxes.txt").write_text(SECRET * 99)
    (tmp_path / "text" / "books").mkdir(parents=True)
    (tmp_path / "text" / "books" / "one.txt").write_text(TEXT)
    (tmp_path / "text" / "books" / ".draft").write_text(SECRET * 99)
    return tmp_path


def run_on(*paths: str, source: str = "text", tokenizer: str = "bytes") -> Manifest:
    return Manifest(model=ModelSpec(context=16), data=DataSpec(source=source, paths=paths, tokenizer=tokenizer))


@pytest.mark.parametrize("paths", [(".ssh",), (".ssh", ".bashrc", "."), ("taxes.txt",), ("/etc/passwd",), ("../x",)])
def test_a_strangers_manifest_opens_nothing(
    user: Path, monkeypatch: pytest.MonkeyPatch, paths: tuple[str, ...]
) -> None:
    monkeypatch.chdir(user)
    monkeypatch.setenv("HOME", str(user))
    with pytest.raises(NotPermitted, match="--data-root"):
        open_corpus(run_on(*paths), None, user / "cache")
    assert not (user / "cache").exists()


@pytest.mark.parametrize(
    "path", ["../taxes.txt", "../.ssh", "books/../../taxes.txt", "/etc/passwd", ".", "books/.draft"]
)
def test_nothing_outside_the_folder_named(user: Path, path: str) -> None:
    with pytest.raises(NotPermitted, match="is not a path below"):
        open_corpus(run_on(path), user / "text", user / "cache")
    with pytest.raises(NotPermitted, match="is not a path below"):
        open_tokenizer(path, DataRoot(user / "text"))


def test_links_do_not_lead_out(user: Path) -> None:
    books, root = user / "text" / "books", DataRoot(user / "text")
    for link, target in {
        "file.txt": user / "taxes.txt",
        "folder": user / ".ssh",
        "hidden.txt": books / ".draft",
    }.items():
        place = user / "text" / link
        place.symlink_to(target)
        with pytest.raises(NotPermitted, match="symbolic link"):
            source_files(run_on(link).data, root)
        place.unlink()
        inner = books / link
        inner.symlink_to(target)
        if target.is_dir():  # never entered
            assert [file.name for file in source_files(run_on("books").data, root)] == ["books/one.txt"]
        else:
            with pytest.raises(NotPermitted, match="symbolic link"):
                source_files(run_on("books").data, root)
        inner.unlink()
    (user / "link").symlink_to(user / "text")  # of the user: the folder itself
    (books / "same.txt").symlink_to(books / "one.txt")
    found = source_files(run_on("./books").data, DataRoot(user / "link"))
    assert [file.path for file in found] == [books / "one.txt", books / "one.txt"]


def test_other_things_than_files_are_not_opened(user: Path) -> None:
    """A pipe would hold the reader for ever."""
    os.mkfifo(user / "text" / "books" / "pipe")
    assert [file.name for file in source_files(run_on("books").data, DataRoot(user / "text"))] == ["books/one.txt"]


def test_a_tokenizer_is_a_file_of_the_folder(user: Path) -> None:
    train_tokenizer(user / "text" / "tokenizer.json")
    run = replace(run_on("books", tokenizer="tokenizer.json"), model=ModelSpec(context=16, vocabulary=512))
    assert open_corpus(run, user / "text", user / "cache").tokenizer.vocabulary == 400
    with pytest.raises(NotPermitted, match="--data-root"):
        open_corpus(replace(run, data=replace(run.data, source="demo", paths=())), None, user / "cache")
