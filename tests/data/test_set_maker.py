"""`data make`: any text becomes one data set, the same whether or not it was killed on the way."""

import bz2
import csv
import gzip
import io
import json
import lzma
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as arrow
import pyarrow.parquet as parquet
import pytest
from click.testing import CliRunner
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Inner
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

from swarmnode.app.cli.data import command
from swarmnode.base.errors import DataError, UsageError
from swarmnode.data import document_source
from swarmnode.data.chat_template import ChatTemplate, Conversation
from swarmnode.data.document_row import BadRows, Reading
from swarmnode.data.document_source import HEAD_BYTES, documents, find_work
from swarmnode.data.index import Index, parse_index
from swarmnode.data.set_maker import Encoding, MakeOptions, make
from swarmnode.data.tokens import ByteTokenizer, HuggingFaceTokenizer

pytestmark = pytest.mark.node  # some seconds

BYTES = Encoding(ByteTokenizer(), ChatTemplate())


def made(out: Path, *sources: Path | str, encoding: Encoding = BYTES, **options: object) -> Index:
    given = MakeOptions(tuple(map(str, sources)), **{"chunk_tokens": 257, **options})  # type: ignore[arg-type]
    return make(out, given, encoding, lambda rendered: {}, lambda *told: None)[0]


def read(source: Path | str, reading: Reading = Reading(), bad: BadRows | None = None) -> list[bytes | Conversation]:
    """The documents of a source."""
    works = find_work([str(source)], reading, bad)
    given = [one.document for work in works for one in documents(work, reading, bad)]
    return [one.encode() if isinstance(one, str) else one for one in given]


def texts(out: Path, index: Index, split: str) -> list[bytes]:
    """The documents of a split, in order, as bytes."""
    raw = b"".join((out / shard.name).read_bytes() for shard in getattr(index, split).shards)
    tokens = np.frombuffer(raw, "<u2")
    return [part for part in tokens.astype(np.uint8).tobytes().split(b"\0") if part]


def split_documents(out: Path, index: Index, split: str) -> list[tuple[list[int], list[int]]]:
    """(ids, mask) of each document of a split with loss masks, without the token that ends it."""
    ids = list[int]()
    mask = list[int]()
    first, count = (0, index.train.count) if split == "train" else (index.train.count, index.validation.count)
    for number in range(first, first + count):
        chunk = index.chunk(number)
        data = (out / chunk.shard).read_bytes()[chunk.offset : chunk.offset + chunk.nbytes]
        ids += np.frombuffer(data, index.dtype, chunk.tokens).tolist()
        bits = np.unpackbits(
            np.frombuffer(data, np.uint8, offset=index.dtype.itemsize * chunk.tokens), bitorder="little"
        )
        mask += bits[: chunk.tokens].tolist()
    found = []
    begin = 0
    for end in [at for at, one in enumerate(ids) if one == index.end_token]:
        found.append((ids[begin:end], mask[begin : end + 1]))
        begin = end + 1
    return found


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
    (tmp_path / "poems" / ".hidden").write_text("hidden")
    index = made(tmp_path / "out", tmp_path / "poems", validation=0.1)
    train = texts(tmp_path / "out", index, "train")
    held_out = texts(tmp_path / "out", index, "validation")
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
        "from swarmnode.app.cli.main import main; import sys; sys.exit(main(sys.argv[1:]))"
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
            assert read(tmp_path / source) == expected
        found = read(long, Reading(cut_nbytes=500))
        assert b"".join(found) == long.read_bytes() and max(map(len, found)) <= 500  # type: ignore[arg-type]


def test_mixtures_copy_whole_documents(tmp_path: Path) -> None:
    first = poems(tmp_path / "a", 60)
    second = None
    (tmp_path / "b.jsonl").write_text("".join(json.dumps({"body": f"b {n} " * 30}) + "\n" for n in range(60)))
    second = [(f"b {n} " * 30).encode() for n in range(60)]
    sources = (tmp_path / "a", tmp_path / "b.jsonl")
    reading = Reading(field="body")
    index = made(tmp_path / "out", *sources, weights=(2.0, 0.5), reading=reading, validation=0.2)
    train = Counter(texts(tmp_path / "out", index, "train"))
    held_out = texts(tmp_path / "out", index, "validation")
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
    found = split_documents(tmp_path / "out", index, "train")
    given, counted = (
        b"".join(bytes(one for one, on in zip(ids, mask, strict=False) if on == counts) for ids, mask in found)
        for counts in (0, 1)
    )
    assert b"welcome<|im_end|>\n" in counted and b"plain text" in counted and b"answer " in counted
    assert b"how many " in given and b"<|im_start|>assistant\n" in given and b"be brief" in given
    assert b"how many" not in counted and b"welcome" not in given
    assert len(found) == index.train.documents and all(mask[-1] for _, mask in found), "the end of a document counts"


@pytest.mark.parametrize("last", ["user", "tool", "system"])
def test_the_end_of_a_conversation_counts_only_behind_an_answer(tmp_path: Path, last: str) -> None:
    """A model does not write the end of a question. Beside conversations that end with an answer, plain text, too."""
    asked = [
        {"role": "user", "content": "who"},
        {"role": "assistant", "content": "me"},
        {"role": last, "content": "and"},
    ]
    rows = [{"messages": [*asked[:2], {**asked[2], "content": f"why {n}"}]} for n in range(20)]
    rows += [{"messages": [{"role": "user", "content": f"when {n}"}, asked[1]]} for n in range(20)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "plain").mkdir()
    for number in range(20):
        (tmp_path / "plain" / f"{number}.txt").write_text(f"plain text {number}\n" * 3)
    index = made(tmp_path / "out", tmp_path / "a.jsonl", tmp_path / "plain", chunk_tokens=64)
    found = [one for split in ("train", "validation") for one in split_documents(tmp_path / "out", index, split)]
    ends = {True: set[int](), False: set[int]()}
    for ids, mask in found:
        ends[b"why" in bytes(ids)].add(mask[-1])
    assert len(found) == 60 and ends == {True: {0}, False: {1}}


def test_the_end_of_an_answer_of_weight_0_does_not_count(tmp_path: Path) -> None:
    rows = [
        [{"role": "user", "content": "who"}, {"role": "assistant", "content": f"me {n}", "weight": n % 2}]
        for n in range(20)
    ]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"messages": row}) + "\n" for row in rows))
    index = made(tmp_path / "out", tmp_path / "a.jsonl", chunk_tokens=64)
    found = [one for split in ("train", "validation") for one in split_documents(tmp_path / "out", index, split)]
    assert sorted((any(mask[:-1]), mask[-1]) for _, mask in found) == [(False, 0)] * 10 + [(True, 1)] * 10


def test_a_set_of_conversations_all_of_whose_text_counts_still_has_a_mask_for_their_ends(tmp_path: Path) -> None:
    """A template that shows answers alone: all that it writes counts, and the end of a conversation that asks not."""
    template = ChatTemplate(
        "{% for m in messages %}{% if m.role == 'assistant' %}{{ m.content }}{% endif %}{% endfor %}"
    )
    talks = [[{"role": "assistant", "content": f"aye {n}"}, {"role": "user", "content": "?"}] for n in range(20)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"messages": turns}) + "\n" for turns in talks))
    index = made(tmp_path / "out", tmp_path / "a.jsonl", encoding=Encoding(ByteTokenizer(), template), chunk_tokens=33)
    found = split_documents(tmp_path / "out", index, "train")
    assert index.loss_mask and all(all(mask[:-1]) and not mask[-1] for _, mask in found)


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("a.jsonl", '{"text": 1}\n', 'a.jsonl:1: no text under "text"'),
        ("a.jsonl", "{}\n[1]\n", "a.jsonl:1: no text"),
        ("a.jsonl", '{"text": "x"}\nnot json\n', "a.jsonl:2: not JSON"),
        ("a.jsonl", '{"messages": [{"role": "user", "content": "x"}]}\n', "assistant"),
        ("a.bin", "\0\0", "a.bin: neither text nor rows"),
        ("a.rtf", "{\\rtf1\\ansi It was {\\b dark}.}", "a.rtf: neither text nor rows"),
        ("CC-MAIN.wet", "WARC/1.0\r\nWARC-Type: conversion\r\n\r\nIt was dark.", r"take the text out of .*WET"),
        ("a.json", '{"rows": []}', "a.json"),
        ("a.json", "[1,", "a.json: not JSON"),
        ("a.csv", "text\n1,2\n", "a.csv:2: 2 columns where the first line names 1"),
        (
            "a.csv",
            'id,text\n1,"he said \\"hi\\" so"\n',
            r"a.csv:2: no CSV from this line on.*a quote within a text twice",
        ),
        ("a.csv", "title\nx\n", 'no column "text" or "messages"; there are title'),
        ("a.jsonl", '{"text": null}\n', "a.jsonl:1: no text"),
        ("a.jsonl", '{"text": "\\ud83d"}\n', "lone surrogate"),
        ("a.jsonl", '{"text": "x", "messages": [{"role": "assistant", "content": "y"}]}\n', "say --field"),
        ("a.txt", "", "no text found|too little text"),
        ("a.txt", "one", "too little text"),
    ],
)
def test_unreadable_input_is_reported_with_its_place(tmp_path: Path, name: str, content: str, reason: str) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / name).write_text(content)
    with pytest.raises(DataError, match=reason):
        made(tmp_path / "out", tmp_path / "in")


FORMS: dict[str, Callable[[str], bytes]] = {
    "utf8.txt": lambda text: text.encode(),
    "mark.txt": lambda text: b"\xef\xbb\xbf" + text.encode(),
    "utf16.txt": lambda text: text.encode("utf-16"),
    "utf32.md": lambda text: text.encode("utf-32"),
    "page.txt.gz": lambda text: gzip.compress(text.encode()),
    "page.txt.bz2": lambda text: bz2.compress(text.encode()),
    "page.txt.xz": lambda text: lzma.compress(text.encode()),
    "row.jsonl": lambda text: json.dumps({"text": text}).encode(),
    "ROW.JSONL": lambda text: b"\xef\xbb\xbf" + json.dumps({"text": text}).encode() + b"\r\n\r\n",
    "utf16.jsonl": lambda text: json.dumps({"text": text}, ensure_ascii=False).encode("utf-16"),
    "list.json": lambda text: json.dumps([{"text": text, "n": 1}], indent=1).encode(),
    "lines.json": lambda text: json.dumps({"text": text}).encode() + b"\n",
    "page.txt.zst": lambda text: arrow.compress(text.encode(), codec="zstd", asbytes=True),
    "by pzstd.zst": lambda text: b"\x50\x2a\x4d\x18\4\0\0\0size" + FORMS["page.txt.zst"](text),
    "seekable.zst": lambda text: b"\x5e\x2a\x4d\x18\4\0\0\0seek" + FORMS["page.txt.zst"](text),
    "skips.lz4": lambda text: b"\x51\x2a\x4d\x18\1\0\0\0a" * 2 + FORMS["a[1]::b.txt.lz4"](text),
    "streams.xz": lambda text: (
        lzma.compress(text[:1].encode()) + bytes(8) + lzma.compress(text[1:].encode()) + bytes(4)
    ),
    "streams.bz2": lambda text: bz2.compress(text[:1].encode()) + bz2.compress(text[1:].encode()),
    "a[1]::b.txt.lz4": lambda text: arrow.compress(text.encode(), codec="lz4", asbytes=True),
    "lines.txt": lambda text: (json.dumps({"text": text}) + "\n" + json.dumps({"text": " "})).encode(),
    "list.txt": lambda text: json.dumps([{"text": text}]).encode(),
    "columns.json": lambda text: json.dumps({"id": [1], "text": [text]}).encode(),
    "one.json": lambda text: json.dumps({"id": 1, "text": text}, indent=1).encode(),
    "noname": lambda text: json.dumps([{"text": text}]).encode(),
    "table.csv": lambda text: table(text, ",").encode("utf-8-sig"),
    "table.TSV": lambda text: table(text, "\t").encode(),
    "table.csv.gz": lambda text: gzip.compress(table(text, ";").encode()),
}


def table(text: str, delimiter: str) -> str:
    out = io.StringIO()
    csv.writer(out, delimiter=delimiter).writerows([["id", "text"], ["1", text]])
    return out.getvalue()


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    st.text(st.characters(codec="utf-8", exclude_characters="\0\r\ufeff"), min_size=1).filter(str.strip),
    st.sampled_from(sorted(FORMS)),
)
def test_a_text_is_the_same_in_whatever_form_it_comes(tmp_path: Path, text: str, name: str) -> None:
    (tmp_path / name).write_bytes(FORMS[name](text))
    found = b"".join(one for one in read(tmp_path / name) if isinstance(one, bytes))
    assert found.decode() == text
    (tmp_path / name).unlink()


@pytest.mark.parametrize("name", ["first.json", "first.json.gz", "first.txt", "noname"])
def test_a_long_first_line_does_not_hide_what_a_file_holds(tmp_path: Path, name: str) -> None:
    """C4 and Dolma call JSON lines .json.gz, and a document is often longer than what is read of a file to know it."""
    long = "word " * (HEAD_BYTES // 4)
    lines = "".join(json.dumps({"text": text}) + "\n" for text in (long, "b"))
    (tmp_path / name).write_bytes(gzip.compress(lines.encode()) if name.endswith("gz") else lines.encode())
    assert read(tmp_path / name) == [long.encode(), b"b"]
    (tmp_path / name).write_text(json.dumps([{"text": long}, {"text": "b"}]))
    assert read(tmp_path / name) == [long.encode(), b"b"]


def test_rows_are_those_of_datasets(tmp_path: Path) -> None:
    """The library that knows a form reads the same rows from it."""
    talk = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "tool_calls": [{"id": "1"}]}]
    rows = [dict[str, Any](id=n, messages=talk, text2=f'row {n}, "said"\nü') for n in range(9)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    parquet.write_table(arrow.Table.from_pylist(rows), tmp_path / "a.parquet", row_group_size=4)
    expected = [row["text2"].encode() for row in rows]
    for source in ("a.jsonl", "a.parquet"):
        assert read(tmp_path / source, Reading(field="text2")) == expected, source
        assert read(tmp_path / source) == [tuple(talk)] * 9, f"{source}: keys without a value are not there"
    with pytest.raises(DataError, match='no column "body"; there are id, messages, text2'):
        read(tmp_path / "a.parquet", Reading(field="body"))
    for suffix, builder in (("csv", "csv"), ("json", "json")):
        path = tmp_path / f"b.{suffix}"
        flat = [{"id": row["id"], "text": row["text2"]} for row in rows]
        if suffix == "csv":
            with path.open("w", newline="") as file:
                csv.DictWriter(file, ["id", "text"]).writerows([{"id": "id", "text": "text"}, *flat])
        else:
            path.write_text(json.dumps(flat))
        theirs = datasets.load_dataset(builder, data_files=str(path), split="train", cache_dir=str(tmp_path / "cache"))
        assert read(path) == [row["text"].encode() for row in theirs]


def test_nothing_is_left_out_in_silence(tmp_path: Path) -> None:
    folder = tmp_path / "in"
    poems(folder, 10)
    (folder / "picture.png").write_bytes(b"\x89PNG\0\0")
    (folder / "latin.txt").write_bytes("Straße\n".encode("latin-1"))
    (folder / "rows.jsonl").write_text('{"text": "a row of text"}\n{"text": null}\nno json\n{"text": ""}\n')
    bad = BadRows(4)
    assert len(read(folder, bad=bad)) == 11
    assert (bad.count, bad.empty) == (4, 1)
    told = "\n".join(bad.lines)
    for place in (
        "picture.png: neither",
        "latin.txt: not UTF-8 at byte 4",
        "rows.jsonl:2: no text",
        "rows.jsonl:3: not JSON",
    ):
        assert place in told
    with pytest.raises(DataError, match="4 are bad, and --skip-bad allows 3"):
        read(folder, bad=BadRows(3))
    with pytest.raises(DataError, match="latin.txt: not UTF-8|picture.png: neither"):
        made(tmp_path / "out", folder)
    index = made(tmp_path / "out2", folder, skip_bad=4)
    assert index.train.documents + index.validation.documents == 11
    with pytest.raises(DataError, match="--skip-bad allows 3"):
        made(tmp_path / "out3", folder, skip_bad=3)
    (folder / "picture.png").unlink()
    (folder / "rows.jsonl").unlink()
    assert "Straße\n".encode() in read(folder, Reading(encoding="latin-1"))


def test_damaged_files_are_left_out_by_name(tmp_path: Path) -> None:
    """Each library has errors of its own for them."""
    poems(tmp_path / "in", 2)
    table = arrow.table({"text": [f"row {n}" for n in range(99)]})
    parquet.write_table(table, tmp_path / "a.parquet")
    whole = {"a.parquet": (tmp_path / "a.parquet").read_bytes()}
    packed = os.urandom(5000).hex().encode()
    whole |= {"a.txt.gz": gzip.compress(packed), "a.txt.xz": lzma.compress(packed), "a.txt.bz2": bz2.compress(packed)}
    whole |= {"a.txt.zst": arrow.compress(packed, codec="zstd", asbytes=True)}
    for name, raw in whole.items():
        (tmp_path / "in" / name).write_bytes(raw[:-40])
    for name in ("a.txt.xz", "a.txt.bz2", "a.txt.gz"):  # the second stream is damaged where it begins
        (tmp_path / "in" / f"second.{name}").write_bytes(whole[name] + b"?" + whole[name][1:])
        whole[f"second.{name}"] = b""
    (tmp_path / "in" / "nowhere.txt").symlink_to("gone.txt")
    bad = BadRows(99)
    assert len(read(tmp_path / "in", bad=bad)) >= 2
    named = {line.split(": ")[0].rpartition("/")[2] for line in bad.lines}
    assert named == {*whole, "nowhere.txt"}
    with pytest.raises(DataError, match="--skip-bad allows 5"):
        made(tmp_path / "out", tmp_path / "in", skip_bad=5)


def test_a_window_of_zstd_that_no_library_reads_is_told(tmp_path: Path) -> None:
    """A frame as `zstd --long=31` writes it, of one raw block (RFC 8878): pyarrow speaks of memory."""
    window = (31 - 10) << 3
    block = (len(b"a dark night") << 3 | 1).to_bytes(3, "little") + b"a dark night"
    (tmp_path / "a.zst").write_bytes(b"\x28\xb5\x2f\xfd" + bytes([0, window]) + block)
    with pytest.raises(DataError, match=r"a.zst: cannot be read: packed by `zstd --long`.*zstd -d --long=31 FILE"):
        read(tmp_path / "a.zst")


def test_names_are_bytes_for_all_libraries(tmp_path: Path) -> None:
    table = arrow.table({"text": ["a row"]})
    parquet.write_table(table, tmp_path / "p")
    os.rename(tmp_path / "p", os.fsencode(tmp_path / "p") + b"\xff")
    assert read(tmp_path) == [b"a row"]


def test_folders_that_are_links_are_read_once(tmp_path: Path) -> None:
    poems(tmp_path / "far", 3)
    (tmp_path / "near").mkdir()
    (tmp_path / "near" / "more").symlink_to(tmp_path / "far")
    (tmp_path / "far" / "back").symlink_to(tmp_path / "near")
    assert len(read(tmp_path / "near")) == 3
    name = os.fsdecode(os.fsencode(tmp_path / "near") + b"/caf\xe9.txt")
    Path(name).write_text("a name in Latin-1\n" * 5)
    assert made(tmp_path / "out", tmp_path / "near", chunk_tokens=33).train.documents == 3


@pytest.mark.parametrize("first", range(8))
def test_copies_of_one_text_are_held_out_together_or_not_at_all(tmp_path: Path, first: int) -> None:
    rows = [f"text {first}"] * 9 + [f"text {first + n} of others" for n in range(1, 3)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": row}) + "\n" for row in rows))
    index = made(tmp_path / "out", tmp_path / "a.jsonl", validation=0.2, chunk_tokens=10_000)
    assert index.train.documents > 0 < index.validation.documents


@pytest.mark.parametrize("share", [0.01, 0.1, 0.3])
@pytest.mark.parametrize("count", [3, 40, 400])
def test_the_held_out_share_is_one_of_tokens_that_count(tmp_path: Path, share: float, count: int) -> None:
    answer = ["b " * (1 + n % 37) for n in range(count)]
    chats = [
        [{"role": "user", "content": f"question {n} " * 20}, {"role": "assistant", "content": said}]
        for n, said in enumerate(answer)
    ]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats))
    index = made(tmp_path / "out", tmp_path / "a.jsonl", validation=share, chunk_tokens=10_000)
    counts = [sum(mask) for _, mask in split_documents(tmp_path / "out", index, "validation")]
    every = sum(len(said) + len("<|im_end|>\n") + 1 for said in answer)
    largest = max(len(said) for said in answer) + 12
    assert 1 <= index.validation.documents < count
    assert share * every - largest <= sum(counts) <= share * every + largest


def test_documents_end_with_a_token_that_none_of_them_has(tmp_path: Path) -> None:
    """Turns that end with the end of text, as Zephyr's and Llama 2's, do not look like ends of documents."""
    inner = word_tokenizer(["one", "two", "</s>", "<pad>"])
    inner.add_special_tokens(["</s>", "<pad>"])
    tokenizer = HuggingFaceTokenizer(inner, b"t" * 32)
    template = ChatTemplate("{% for m in messages %}{{ m.content }} </s> {% endfor %}")
    (tmp_path / "plain").mkdir()
    for number in range(20):
        (tmp_path / "plain" / f"{number}.txt").write_text("one two </s> one " * (number + 5))
    index = made(tmp_path / "text", tmp_path / "plain", encoding=Encoding(tokenizer, template), chunk_tokens=33)
    assert index.end_token == tokenizer.separator, "a special token that is written in text is text"
    talks = [
        [{"role": "user", "content": "one " * (n + 1)}, {"role": "assistant", "content": "two"}] * 2 for n in range(20)
    ]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"messages": turns}) + "\n" for turns in talks))
    index = made(tmp_path / "talk", tmp_path / "a.jsonl", encoding=Encoding(tokenizer, template), chunk_tokens=33)
    assert index.end_token == inner.token_to_id("<pad>") and index.vocabulary == 5
    found = split_documents(tmp_path / "talk", index, "train") + split_documents(tmp_path / "talk", index, "validation")
    assert len(found) == 20 == index.train.documents + index.validation.documents
    assert all(mask[-1] == 0 and ids.count(3) == 4 for ids, mask in found), "what only ends documents is not learned"
    for more, expected in (("", (0, 5)), (" zzz", (5, 6))):
        every = ChatTemplate("{% for m in messages %}{{ m.content }} </s> <pad> {% endfor %}" + more)
        out = tmp_path / f"every{more}"
        index = made(out, tmp_path / "a.jsonl", encoding=Encoding(tokenizer, every), chunk_tokens=33)
        assert (index.end_token, index.vocabulary) == expected, "else another one that is free, or one more id"


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


def test_data_sets_of_the_hub_are_streamed(tmp_path: Path) -> None:
    """A folder is read as a data set of the hub would be, without a network."""
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


def test_show_prints_each_document_with_what_counts(tmp_path: Path) -> None:
    chats = [[{"role": "user", "content": f"q {n}"}, {"role": "assistant", "content": f"a {n}"}] for n in range(30)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats))
    index = made(tmp_path / "out", tmp_path / "a.jsonl", chunk_tokens=17)
    shown = []
    for split in ("train", "validation"):
        for row in range(getattr(index, split).documents):
            told = CliRunner().invoke(command, ["show", str(tmp_path / "out"), "--row", str(row), "--split", split])
            shown.append(told.stdout)
    form = "<|im_start|>user\nq {0}<|im_end|>\n<|im_start|>assistant\n«a {0}<|im_end|>\n[end 0]»\n"
    assert sorted(shown) == sorted(form.format(n) for n in range(30))
    with pytest.raises(UsageError, match="there are"):
        CliRunner().invoke(command, ["show", str(tmp_path / "out"), "--row", "99"], catch_exceptions=False)
