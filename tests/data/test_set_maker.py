"""`data make`: any text becomes one data set, the same whether or not it was killed on the way."""

from __future__ import annotations

import gzip
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from tokenizers import Tokenizer as Inner
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

from swarmnode.cli.data import command
from swarmnode.data import document_source
from swarmnode.data.chat_template import ChatTemplate, conversation
from swarmnode.data.document_source import Reading, documents, find_work
from swarmnode.data.index import Index, parse_index
from swarmnode.data.set_maker import MakeOptions, make
from swarmnode.data.token_parts import Encoding
from swarmnode.data.tokens import ByteTokenizer, HuggingFaceTokenizer
from swarmnode.errors import DataError, UsageError

pytestmark = pytest.mark.node  # some seconds

BYTES = Encoding(ByteTokenizer(), ChatTemplate())


def made(out: Path, *sources: Path | str, encoding: Encoding = BYTES, **options: object) -> Index:
    given = MakeOptions(tuple(map(str, sources)), **{"chunk_tokens": 257, **options})  # type: ignore[arg-type]
    return make(out, given, encoding, None, lambda *told: None)


def texts(out: Path, index: Index, split: str) -> list[bytes]:
    """The documents of a split, in order, as bytes."""
    raw = b"".join((out / shard.name).read_bytes() for shard in getattr(index, split).shards)
    tokens = np.frombuffer(raw, "<u2")
    return [part for part in tokens.astype(np.uint8).tobytes().split(b"\0") if part]


def poems(folder: Path, count: int = 40) -> list[bytes]:
    folder.mkdir(parents=True)
    written = []
    for number in range(count):
        text = f"Poem {number}\n".encode() + bytes(65 + (number + at) % 26 for at in range(300)) + b"\n"
        (folder / f"{number:02}.txt").write_bytes(text)
        written.append(text)
    return written


def test_every_document_is_there_once_shuffled_and_whole(tmp_path: Path) -> None:
    written = poems(tmp_path / "poems")
    (tmp_path / "poems" / "picture.png").write_bytes(b"\x89PNG\0\0")
    (tmp_path / "poems" / ".hidden").write_text("hidden")
    index = made(tmp_path / "out", tmp_path / "poems", validation=0.1)
    train, held_out = texts(tmp_path / "out", index, "train"), texts(tmp_path / "out", index, "validation")
    assert Counter(train) + Counter(held_out) == Counter(written)
    assert (len(train), len(held_out)) == (index.train.documents, index.validation.documents) and held_out
    assert train != sorted(train), "in another order than in the folder"
    assert (index.end_token, index.vocabulary, index.loss_mask) == (0, 256, False)
    other = made(tmp_path / "other", tmp_path / "poems", validation=0.1, seed=5)
    again = texts(tmp_path / "other", other, "train")
    assert sorted(again) == sorted(train) and again != train, "the seed orders, and holds out the same"


def test_a_killed_make_goes_on_and_ends_with_the_same_bytes(tmp_path: Path) -> None:
    poems(tmp_path / "poems", 400)
    environment = {**os.environ, "PYTHONPATH": os.getcwd()}
    program = (
        "import swarmnode.data.document_source as d; d.WORK_BYTES = 4000\n"
        "from swarmnode.cli.main import main; import sys; sys.exit(main(sys.argv[1:]))"
    )

    def call(out: str, *more: str) -> list[str]:
        made = ["data", "make", out, "--from", "poems", "--chunk-tokens", "257"]
        return [sys.executable, "-c", program, *made, *more]

    def run(out: str, *more: str) -> subprocess.CompletedProcess[bytes]:
        return subprocess.run(call(out, *more), cwd=tmp_path, env=environment, capture_output=True, check=False)

    whole = run("whole")
    assert whole.returncode == 0, whole.stderr
    process = subprocess.Popen(call("out"), cwd=tmp_path, env=environment, stderr=subprocess.PIPE)
    parts = tmp_path / "out" / ".parts"
    while process.poll() is None and len(list(parts.glob("*.npy"))) < 3:
        time.sleep(0.001)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert list(parts.glob("*.npy")) and not (tmp_path / "out" / "index.json").exists(), "killed in the midst of it"
    other = run("out", "--seed", "9")
    assert other.returncode == 2 and b"beginning of another data set" in other.stderr
    done = run("out")
    assert (done.returncode, done.stdout) == (0, whole.stdout)
    assert not parts.exists()
    for path in (tmp_path / "whole").iterdir():
        assert (tmp_path / "out" / path.name).read_bytes() == path.read_bytes()
    again = run("out")
    assert again.returncode == 2 and b"holds a data set already" in again.stderr


def test_lines_of_long_files_are_read_once_whatever_the_ranges(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [{"text": f"row {number} " + "x" * (number % 50)} for number in range(200)]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    expected = [row["text"].encode() for row in rows]
    with gzip.open(tmp_path / "packed.jsonl.gz", "wt") as file:
        file.write(path.read_text())
    long = tmp_path / "long.txt"
    long.write_text("".join(f"line {number}\n" * 3 for number in range(300)))
    for nbytes in (1, 7, 64, 100, 1000, 1 << 20):
        monkeypatch.setattr(document_source, "WORK_BYTES", nbytes)
        for source in ("rows.jsonl", "packed.jsonl.gz"):
            works = find_work([str(tmp_path / source)], Reading())
            assert [one for work in works for one in documents(work, Reading())] == expected
        found = [one for work in find_work([str(long)], Reading()) for one in documents(work, Reading(cut_nbytes=500))]
        assert b"".join(found) == long.read_bytes() and max(map(len, found)) <= 500  # type: ignore[arg-type]


def test_mixtures_copy_whole_documents(tmp_path: Path) -> None:
    first, second = poems(tmp_path / "a", 60), None
    (tmp_path / "b.jsonl").write_text("".join(json.dumps({"body": f"b {n} " * 30}) + "\n" for n in range(60)))
    second = [(f"b {n} " * 30).encode() for n in range(60)]
    sources = (tmp_path / "a", tmp_path / "b.jsonl")
    reading = Reading(field="body")
    index = made(tmp_path / "out", *sources, weights=(2.0, 0.5), reading=reading, validation=0.05)
    train, held_out = Counter(texts(tmp_path / "out", index, "train")), texts(tmp_path / "out", index, "validation")
    assert all(train[text] == (0 if text in held_out else 2) for text in first)
    count = sum(train[text] for text in second) + sum(text in second for text in held_out)
    assert 15 <= count <= 45 and max(train[text] for text in second) == 1
    assert not set(train) & set(held_out), "nothing held out is trained on, in no copy"
    with pytest.raises(UsageError, match="give one each"):
        made(tmp_path / "bad", *sources, weights=(1.0,), reading=reading)


def word_tokenizer(words: list[str]) -> Inner:
    inner = Inner(WordLevel({word: number for number, word in enumerate(["[UNK]", *words])}, unk_token="[UNK]"))
    inner.pre_tokenizer = Whitespace()
    return inner


def test_conversations_count_what_the_assistant_says(tmp_path: Path) -> None:
    chats = [
        [
            {"role": "system", "content": "be brief"},
            {"role": "user", "content": f"how many {number}"},
            {"role": "assistant", "content": f"answer {number}"},
            {"role": "user", "content": "thanks"},
            {"role": "assistant", "content": "welcome"},
        ]
        for number in range(30)
    ]
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats))
    (tmp_path / "plain").mkdir()
    for number in range(30):
        (tmp_path / "plain" / f"{number}.txt").write_text(f"plain text {number}\n" * 9)
    index = made(tmp_path / "out", tmp_path / "chats.jsonl", tmp_path / "plain", chunk_tokens=64)
    assert index.loss_mask
    counted, given = b"", b""
    for number in range(index.train.count):
        chunk = index.chunk(number)
        data = (tmp_path / "out" / chunk.shard).read_bytes()[chunk.offset : chunk.offset + chunk.nbytes]
        ids = np.frombuffer(data, "<u2", chunk.tokens).astype(np.uint8)
        bits = np.unpackbits(np.frombuffer(data, np.uint8, offset=2 * chunk.tokens), bitorder="little")
        mask = bits[: chunk.tokens]
        counted += ids[mask == 1].tobytes()
        given += ids[mask == 0].tobytes()
    assert b"welcome<|im_end|>\n" in counted and b"plain text" in counted and b"answer " in counted
    assert b"how many " in given and b"<|im_start|>assistant\n" in given and b"be brief" in given
    assert b"how many" not in counted and b"welcome" not in given
    assert counted.count(b"\0") >= index.train.documents - 1, "the end of a document counts"


def test_templates_of_tokenizers(tmp_path: Path) -> None:
    template = ChatTemplate(
        "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %}[assistant]{% endif %}",
        {"bos_token": "<s>"},
    )
    said = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}]
    assert template.segments(said) == [("<s>[user]a[assistant]", False), ("b", True), ("[user]c", False)]
    with pytest.raises(DataError, match="chat template"):
        ChatTemplate("{% for %}").segments(said)
    refusing = ChatTemplate("{{ raise_exception('no system role') }}")
    with pytest.raises(DataError, match="no system role"):
        refusing.segments(said)
    forgetful = ChatTemplate("{{ messages[-1].content }}")
    with pytest.raises(DataError, match="changes what was said"):
        forgetful.segments(said)
    sandboxed = ChatTemplate("{{ messages.__class__.__mro__[1].__subclasses__() }}")
    with pytest.raises(DataError):
        sandboxed.segments(said)
    for wrong in (None, [], "text", [{"role": "user"}], [{"role": "user", "content": 7}], [said[0]]):
        assert conversation(wrong) is None


def test_a_tokenizer_without_an_end_gets_one_more_id(tmp_path: Path) -> None:
    inner = word_tokenizer(["one", "two", "three"])
    encoding = Encoding(HuggingFaceTokenizer(inner, b"t" * 32), ChatTemplate())
    for number in range(20):
        (tmp_path / f"{number:02}.txt").write_text("one two three two " * (number + 5))
    index = made(tmp_path / "out", tmp_path, encoding=encoding, chunk_tokens=33)
    assert (index.vocabulary, index.end_token) == (5, 4)
    raw = b"".join((tmp_path / "out" / shard.name).read_bytes() for shard in index.train.shards)
    tokens = np.frombuffer(raw, "<u2")
    ends = np.flatnonzero(tokens == 4)
    assert ends.size == index.train.documents and tokens[-1] == 4
    assert all(tokens[begin + 1 : begin + 5].tolist() == [1, 2, 3, 2] for begin in ends[:-1])


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("a.jsonl", '{"text": 1}\n', 'a.jsonl:1: no text under "text"'),
        ("a.jsonl", "{}\n[1]\n", "a.jsonl:1: no text"),
        ("a.jsonl", '{"text": "x"}\nnot json\n', "a.jsonl:2: not JSON"),
        ("a.jsonl", '{"messages": [{"role": "user", "content": "x"}]}\n', "assistant"),
        ("a.bin", "\0\0", "no text found"),
        ("a.txt", "", "no text found|too little text"),
        ("a.txt", "one", "too little text"),
    ],
)
def test_what_cannot_be_read_is_said_with_its_place(tmp_path: Path, name: str, content: str, reason: str) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / name).write_text(content)
    with pytest.raises(DataError, match=reason):
        made(tmp_path / "out", tmp_path / "in")


def test_missing_sources_and_libraries_are_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DataError, match="no such file or folder"):
        made(tmp_path / "out", tmp_path / "nowhere")
    monkeypatch.setitem(sys.modules, "datasets", None)
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(DataError, match="pip install datasets"):
        made(tmp_path / "out", "hf:me/text")
    (tmp_path / "a.parquet").write_bytes(b"PAR1")
    with pytest.raises(DataError, match="pip install pyarrow"):
        made(tmp_path / "out", tmp_path / "a.parquet")


def test_parquet(tmp_path: Path) -> None:
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    rows = [f"row {number} of a table " * 20 for number in range(50)]
    parquet.write_table(arrow.table({"text": rows, "id": list(range(50))}), tmp_path / "a.parquet", row_group_size=10)
    index = made(tmp_path / "out", tmp_path / "a.parquet")
    found = texts(tmp_path / "out", index, "train") + texts(tmp_path / "out", index, "validation")
    assert Counter(found) == Counter(row.encode() for row in rows)
    with pytest.raises(DataError, match='no column "body"; there are text, id'):
        made(tmp_path / "bad", tmp_path / "a.parquet", reading=Reading(field="body"))


def test_data_sets_of_the_hub_are_streamed(tmp_path: Path) -> None:
    """A folder is read as a data set of the hub would be, without a network."""
    pytest.importorskip("datasets")
    rows = [f"row {number} of a set " * 20 for number in range(50)]
    (tmp_path / "set").mkdir()
    for part in range(2):
        lines = [json.dumps({"text": row}) for row in rows[25 * part : 25 * part + 25]]
        (tmp_path / "set" / f"train-{part}.jsonl").write_text("\n".join(lines))
    index = made(tmp_path / "out", f"hf:{tmp_path / 'set'}")
    found = texts(tmp_path / "out", index, "train") + texts(tmp_path / "out", index, "validation")
    assert Counter(found) == Counter(row.encode() for row in rows)
    plain = made(tmp_path / "plain", tmp_path / "set")
    assert plain.digest == index.digest, "the same documents are the same data set, however they came"
    with pytest.raises(DataError, match="hf:"):
        made(tmp_path / "bad", f"hf:{tmp_path / 'nowhere'}")


def test_the_verb_makes_checks_and_finds_what_changed(tmp_path: Path) -> None:
    poems(tmp_path / "poems")
    run = CliRunner()
    out = tmp_path / "out"
    done = run.invoke(command, ["make", str(out), "--from", str(tmp_path / "poems")], catch_exceptions=False)
    assert done.exit_code == 0
    digest = done.stdout.strip()
    assert parse_index((out / "index.json").read_bytes()).digest.hex() == digest
    assert run.invoke(command, ["check", str(out)], catch_exceptions=False).stdout.strip() == digest
    shard = out / "train-00000.bin"
    shard.write_bytes(b"x" + shard.read_bytes()[1:])
    with pytest.raises(DataError, match="are not those of the index"):
        run.invoke(command, ["check", str(out)], catch_exceptions=False)
