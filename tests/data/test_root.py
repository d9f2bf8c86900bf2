"""A manifest of a stranger opens no file of this machine; with a folder that the user named, none outside it."""

from pathlib import Path

import pytest

from swarmnode.base.errors import NotPermitted
from swarmnode.data.corpus import open_corpus
from swarmnode.data.root import DataRoot
from swarmnode.data.tokens import open_tokenizer
from swarmnode.run.manifest import DataSpec, Manifest, ModelSpec

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


@pytest.mark.parametrize("path", [".ssh/id", "taxes.txt", "/etc/passwd", "../x"])
def test_a_strangers_manifest_opens_nothing(user: Path, monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    monkeypatch.chdir(user)
    monkeypatch.setenv("HOME", str(user))
    run = Manifest(model=ModelSpec(context=16), data=DataSpec(tokenizer=path))
    with pytest.raises(NotPermitted, match="--data-root"):
        open_corpus(run, None, user / "cache")
    assert not (user / "cache").exists()


@pytest.mark.parametrize(
    "path", ["../taxes.txt", "../.ssh", "books/../../taxes.txt", "/etc/passwd", ".", "books/.draft"]
)
def test_nothing_outside_the_folder_named(user: Path, path: str) -> None:
    with pytest.raises(NotPermitted, match="is not a path below"):
        open_tokenizer(path, DataRoot(user / "text"))


def test_links_do_not_lead_out(user: Path) -> None:
    books = user / "text" / "books"
    root = DataRoot(user / "text")
    for target in (user / "taxes.txt", user / ".ssh", books / ".draft"):
        (books / "link").symlink_to(target)
        with pytest.raises(NotPermitted, match="symbolic link"):
            open_tokenizer("books/link", root)
        (books / "link").unlink()
    (user / "link").symlink_to(user / "text")  # of the user: the folder itself
    (books / "same.txt").symlink_to(books / "one.txt")
    assert DataRoot(user / "link").find("./books/same.txt") == books / "one.txt"
