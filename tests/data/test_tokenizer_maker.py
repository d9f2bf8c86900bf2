"""A tokenizer of one's own text: it loses nothing, knows the special tokens of conversations, and refuses nonsense."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from swarmnode.app.cli.main import main
from swarmnode.data.chat_template import conversation, tokenizer_and_template
from swarmnode.data.root import DataRoot
from swarmnode.data.tokenizer_file import stops_of
from swarmnode.data.tokenizer_maker import SPECIAL, VOCABULARY_MAX, VOCABULARY_MIN
from swarmnode.data.tokens import open_tokenizer

TEXT = "The rain in Spain stays mainly in the plain.\n" * 40 + "def read(path):\n    return path\n" * 40
DATA_ERROR = 78
TALK = [{"role": "user", "content": "Where is the rain?"}, {"role": "assistant", "content": "In Spain."}]


@pytest.fixture
def text(tmp_path: Path) -> Path:
    folder = tmp_path / "text"
    folder.mkdir()
    (folder / "a.txt").write_text(TEXT)
    (folder / "b.jsonl").write_text(json.dumps({"messages": TALK}) + "\n")
    return folder


def test_text_comes_back_and_fewer_tokens_than_bytes(text: Path, tmp_path: Path) -> None:
    out = tmp_path / "tokenizer"
    assert main(["data", "tokenizer", str(out), "--from", str(text), "--vocabulary", "300"]) == 0
    opened = open_tokenizer("tokenizer.json", DataRoot(out))
    (ids,) = opened.encode_all([TEXT + "\u00e4\u6f22"])
    assert opened.decode(ids) == TEXT + "\u00e4\u6f22"
    assert len(ids) < 0.6 * len(TEXT) and VOCABULARY_MIN < opened.vocabulary <= 300


def test_the_same_text_and_seed_make_the_same_tokenizer(text: Path, tmp_path: Path) -> None:
    for name in ("one", "two"):
        assert main(["data", "tokenizer", str(tmp_path / name), "--from", str(text), "--vocabulary", "300"]) == 0
    one, two = ((tmp_path / name / "tokenizer.json").read_bytes() for name in ("one", "two"))
    assert one == two


def test_only_answers_of_a_conversation_count_and_its_end_stops_the_model(text: Path, tmp_path: Path) -> None:
    out = tmp_path / "tokenizer"
    assert main(["data", "tokenizer", str(out), "--from", str(text), "--vocabulary", "300"]) == 0
    assert main(["data", "make", str(tmp_path / "set"), "--from", str(text), "--tokenizer", str(out)]) == 0
    path = tmp_path / "set" / "tokenizer.json"
    opened, _, template = tokenizer_and_template(path, open_tokenizer(path.name, DataRoot(path.parent)))
    talk = conversation(TALK, None)
    assert talk is not None
    _, ids, mask = template.encode(talk, opened)
    assert opened.decode(ids[mask == 1]).startswith("In Spain.<|im_end|>")
    ends = {opened.decode([token]) for token in stops_of(opened, path)}
    assert ends == {SPECIAL[0], SPECIAL[2]}


@pytest.mark.parametrize("size", [VOCABULARY_MIN, VOCABULARY_MAX + 1])
def test_a_size_that_no_tokenizer_has_is_refused(
    text: Path, tmp_path: Path, size: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["data", "tokenizer", str(tmp_path / "t"), "--from", str(text), "--vocabulary", str(size)]) == 2
    assert f"--vocabulary {size}: allowed is 260 to 262144" in capsys.readouterr().err
    assert not (tmp_path / "t").exists()


def test_a_text_without_a_pair_that_comes_twice_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.txt").write_text("x")
    given = ["data", "tokenizer", str(tmp_path / "t"), "--from", str(tmp_path / "a.txt")]
    assert main(given) == DATA_ERROR
    assert "too little text for a tokenizer; use bytes" in capsys.readouterr().err


def test_a_model_folder_names_its_tokenizer(text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = ["data", "make", str(tmp_path / "set"), "--from", str(text), "--tokenizer", str(tmp_path / "none")]
    assert main(given) == DATA_ERROR
    assert "tokenizer cannot be read" in capsys.readouterr().err
    assert main([*given[:-1], "hf://nobody"]) == 2
    assert "--tokenizer hf://nobody: allowed is a folder" in capsys.readouterr().err
