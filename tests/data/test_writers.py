"""Conversations as public libraries write them, against the JSON lines that they came from: each writer, each place
where rows differ. Equal means every key, value and order."""

import datetime
import decimal
import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pandas
import pyarrow as arrow
import pytest
import tokenizers
import transformers
from pyarrow import feather, parquet

from swarmnode.base.errors import DataError
from swarmnode.data.chat_template import ChatTemplate, Conversation, conversation
from swarmnode.data.document_row import BadRows, Placed, Reading
from swarmnode.data.document_source import documents, find_work
from swarmnode.data.message import with_objects
from swarmnode.data.tokens import ByteTokenizer

datasets.disable_progress_bars()

Rows = list[dict[str, Any]]
KEYS = ("messages", "tools")
SHOWS = (
    "{% if tools %}{{ tools | tojson }}{% endif %}"
    "{% for message in messages %}<|{{ message.role }}|>{{ message | tojson }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
"""Shows all that a message and the tools say."""


def user(content: Any, **more: Any) -> dict[str, Any]:
    return {"role": "user", "content": content, **more}


def answer(content: Any, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **more}


def call(arguments: Any) -> list[dict[str, Any]]:
    return [{"type": "function", "function": {"name": "f", "arguments": arguments}}]


def tool(name: str, properties: dict[str, Any]) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties, "required": list(properties)}
    return {"type": "function", "function": {"name": name, "description": f"{name}/x", "parameters": parameters}}


TOOLS = [tool("f", {"city": {"type": "string"}}), tool("g", {"n": {"type": "integer", "minimum": 0}})]
JSON = arrow.json_()
PART = {"type": "text", "text": 'a part: "ü"/1'}


def places() -> dict[str, Rows]:
    """Rows that differ at one place each."""

    def of(*talks: list[dict[str, Any]]) -> Rows:
        return [{"messages": talk} for talk in talks * 3]

    said = answer('yes, "he" said\n{{ }} ü/1')
    return {
        "alike": of([user("a"), said], [user("b"), said]),
        "a key that some messages lack": of([user("a", name="n"), said], [user("b"), answer("c", name="m")]),
        "thoughts": of([user("a"), answer("b", reasoning_content="hm")], [user("a"), said]),
        "text or parts": of([user([PART]), said], [user("b"), said], [user([PART, PART]), answer([PART])]),
        "parts of two kinds": of([user([PART, {"type": "image"}]), answer([PART])], [user([PART]), answer([PART])]),
        "texts that read as JSON": of(
            [user([PART]), answer("42")],
            [user('{"a": 1}'), answer("[1, 2]")],
            [user("true"), answer('[{"a": 1.50}]')],
        ),
        "arguments of other keys": of(
            [user("a"), answer(None, tool_calls=call({"city": "x"})), {"role": "tool", "content": "1"}, said],
            [user("a"), answer(None, tool_calls=call({"day": "2024-05-17", "n": 3})), said],
            [user("a"), said],
        ),
        "arguments as text": of([user("a"), answer("", tool_calls=call('{"a":  1}'))], [user("a"), said]),
        "arguments as text or object": of(
            [user("a"), answer("", tool_calls=call('{"a":  1}'))], [user("a"), answer("", tool_calls=call({"a": 1}))]
        ),
        "arguments in arguments": of(
            [user("a"), answer("", tool_calls=call({"in": {"a": [1, 2]}}))],
            [user("a"), answer("", tool_calls=call({"in": {"b": {"c": "d"}}}))],
        ),
        "tools": [{"messages": [user("a"), said], "tools": TOOLS[: 1 + row % 2]} for row in range(4)],
        "tools in some rows": [
            {"messages": [user("a"), said], **({"tools": TOOLS} if row % 2 else {})} for row in range(4)
        ],
        "both as JSON text": [
            {"messages": json.dumps([user("a"), said]), "tools": json.dumps(TOOLS[: 1 + row % 2])} for row in range(4)
        ],
    }


PLACES = places()


@functools.cache
def of_datasets(lines: Path) -> Any:
    return datasets.load_dataset("json", data_files=str(lines), split="train", cache_dir=str(lines.parent / "cache"))


def polars() -> Any:
    return pytest.importorskip("polars", reason="polars is not installed: pip install polars")


def duckdb(lines: Path, out: Path, form: str) -> None:
    library = pytest.importorskip("duckdb", reason="duckdb is not installed: pip install duckdb")
    with library.connect() as base:
        base.sql(f"copy (select * from read_json_auto('{lines}')) to '{out}' ({form})")


def frame(lines: Path) -> Any:
    return pandas.DataFrame([json.loads(line) for line in lines.read_text().splitlines()])


WRITERS: dict[str, Callable[[Path, Path], Any]] = {
    "datasets to_parquet": lambda lines, out: of_datasets(lines).to_parquet(out),
    "datasets to_json": lambda lines, out: of_datasets(lines).to_json(out),
    "datasets save_to_disk": lambda lines, out: of_datasets(lines).save_to_disk(str(out)),
    "datasets save_to_disk of splits": lambda lines, out: datasets.DatasetDict(
        train=of_datasets(lines), test=datasets.Dataset.from_dict({"messages": ["not to be read"]})
    ).save_to_disk(str(out)),
    "polars parquet": lambda lines, out: polars().read_ndjson(lines).write_parquet(out),
    "polars ipc": lambda lines, out: polars().read_ndjson(lines).write_ipc(out, compression="zstd"),
    "polars ipc stream": lambda lines, out: polars().read_ndjson(lines).write_ipc_stream(out),
    "polars ndjson": lambda lines, out: polars().read_ndjson(lines).write_ndjson(out),
    "polars json": lambda lines, out: polars().read_ndjson(lines).write_json(out),
    "duckdb parquet": lambda lines, out: duckdb(lines, out, "format parquet"),
    "duckdb json": lambda lines, out: duckdb(lines, out, "format json"),
    "duckdb json array": lambda lines, out: duckdb(lines, out, "format json, array true"),
    "pandas parquet": lambda lines, out: frame(lines).to_parquet(out),
    "pandas feather": lambda lines, out: frame(lines).to_feather(out),
    "pandas json": lambda lines, out: frame(lines).to_json(out),
    "pandas json records": lambda lines, out: frame(lines).to_json(out, orient="records"),
    "pandas json lines": lambda lines, out: frame(lines).to_json(out, orient="records", lines=True),
}
POLARS = [name for name in WRITERS if name.startswith("polars")]
TWO_KINDS = ("text or parts", "texts that read as JSON", "arguments as text or object")
LOST = {
    **{(name, place): "polars makes text of values of two kinds" for name in POLARS for place in TWO_KINDS},
    **{(f"pandas {form}", place): "Arrow refuses two kinds" for form in ("parquet", "feather") for place in TWO_KINDS},
    ("datasets to_json", "texts that read as JSON"): "1.50 becomes 1.5",
}
"""What a writer does not write at all, or not as it was."""


@pytest.fixture(scope="module")
def given(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The JSON lines of a place."""

    @functools.cache
    def written(place: str) -> Path:
        path = tmp_path_factory.mktemp("place") / "given.jsonl"
        path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in PLACES[place]))
        return path

    return written


def read(source: Path | str, reading: Reading = Reading(), bad: BadRows | None = None) -> list[Placed]:
    """The documents of a source."""
    return [one for work in find_work([str(source)], reading, bad) for one in documents(work, reading, bad)]


def shown(source: Path | str) -> list[str]:
    """Each conversation of a source, with its tools and the order of its keys."""
    found = [one.document for one in read(source)]
    return [json.dumps([list(talk), getattr(talk, "tools", None)], ensure_ascii=False) for talk in found]


@pytest.mark.parametrize("writer", WRITERS)
@pytest.mark.parametrize("place", PLACES)
def test_files_of_a_library_are_read_as_the_lines_they_came_from(
    tmp_path: Path, given: Callable[[str], Path], writer: str, place: str
) -> None:
    if (why := LOST.get((writer, place))) is not None:
        pytest.skip(why)
    lines = given(place)
    out = tmp_path / ("written.json" if "json" in writer else "written")
    WRITERS[writer](lines, out)
    assert shown(out) == shown(lines)


@pytest.mark.parametrize("place", PLACES)
def test_sets_of_the_hub_are_read_as_the_lines_that_they_hold(
    tmp_path: Path, given: Callable[[str], Path], place: str
) -> None:
    """A folder is read as a data set of the hub would be, without a network."""
    of_datasets(given(place)).to_parquet(tmp_path / "train.parquet")
    assert shown(f"hf:{tmp_path}") == shown(given(place))


@pytest.mark.parametrize("place", [place for place in PLACES if place != "texts that read as JSON"])
def test_tokens_are_those_of_transformers_for_rows_of_datasets(
    tmp_path: Path, given: Callable[[str], Path], place: str
) -> None:
    """`datasets` reads its own Parquet, transformers renders each row, and the tokens are those of `data make`. Two
    differences: a text such as 42 is a number there, and arguments in JSON text stay text."""
    of_datasets(given(place)).to_parquet(tmp_path / "rows.parquet")
    rows = datasets.load_dataset(
        "parquet", data_files=str(tmp_path / "rows.parquet"), split="train", cache_dir=str(tmp_path / "cache")
    )
    hub = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizers.Tokenizer(tokenizers.models.WordLevel({"": 0}, unk_token=""))
    )
    template = ChatTemplate(SHOWS)
    for row, placed in zip(rows, read(tmp_path / "rows.parquet"), strict=True):
        assert isinstance(placed.document, Conversation)
        text, ids, _ = template.encode(placed.document, ByteTokenizer())
        messages, tools = (json.loads(row[key]) if isinstance(row.get(key), str) else row.get(key) for key in KEYS)
        messages = [dict(with_objects(one)) for one in messages]
        theirs = hub.apply_chat_template(messages, tools=tools, chat_template=SHOWS, tokenize=False)
        assert text == theirs
        assert bytes(ids.astype(np.uint8)) == theirs.encode()


def test_chatml_writes_the_text_of_parts(tmp_path: Path) -> None:
    talk = [user([PART, PART]), answer("yes"), user("a"), answer([PART])]
    said = conversation(talk)
    image = conversation([user([{"type": "image"}]), answer("yes")])
    assert said is not None and image is not None
    template = ChatTemplate()
    text, _, mask = template.encode(said, ByteTokenizer())
    plain = [user(PART["text"] * 2), answer("yes"), user("a"), answer(PART["text"])]
    again = conversation(plain)
    assert again is not None
    expected, _, counted = template.encode(again, ByteTokenizer())
    assert text == expected and mask.tolist() == counted.tolist() and mask.any()
    with pytest.raises(DataError, match="ChatML has no parts of type image"):
        template.encode(image, ByteTokenizer())


def stored(kind: arrow.DataType) -> arrow.DataType:
    """`kind` with JSON as text: Arrow makes no nested arrays of it from values."""
    if kind == JSON:
        return arrow.string()
    if arrow.types.is_map(kind):
        return arrow.map_(kind.key_type, stored(kind.item_type))
    if arrow.types.is_struct(kind):
        return arrow.struct([arrow.field(each.name, stored(each.type)) for each in kind])
    if arrow.types.is_list(kind):
        return arrow.list_(stored(kind.value_type))
    return kind


def typed(array: Any, kind: arrow.DataType) -> Any:
    """`array` of the type `stored(kind)` as one of `kind`."""
    if kind == JSON:
        return arrow.ExtensionArray.from_storage(kind, array)
    if arrow.types.is_map(kind):
        return arrow.MapArray.from_arrays(array.offsets, array.keys, typed(array.items, kind.item_type))
    if arrow.types.is_struct(kind):
        fields = [typed(array.field(each.name), each.type) for each in kind]
        return arrow.StructArray.from_arrays(fields, fields=list(kind), mask=array.is_null())
    if arrow.types.is_list(kind):
        values = typed(array.values, kind.value_type)
        return arrow.ListArray.from_arrays(array.offsets, values, mask=array.is_null())
    return array


def written_table(folder: Path, kind: arrow.DataType, values: list[Any], column: str) -> list[Path]:
    """A column as Parquet, an Arrow stream and a Feather file."""
    table = arrow.table({column: typed(arrow.array(values, stored(kind)), kind)})
    paths = [folder / name for name in ("rows", "stream", "file")]
    parquet.write_table(table, paths[0])
    with arrow.ipc.new_stream(paths[1], table.schema) as stream:
        stream.write_table(table, max_chunksize=2)
    feather.write_feather(table, paths[2], compression="lz4")
    return paths


TEXT_TYPES = [
    (arrow.string(), ["a", None, "b"], ["a", "b"]),
    (arrow.large_string(), ["a", "b"], ["a", "b"]),
    (arrow.string_view(), ["a", "b"], ["a", "b"]),
    (arrow.binary(), [b"a", "ü".encode()], ["a", "ü"]),
    (arrow.dictionary(arrow.int8(), arrow.string()), ["a", "b", "a"], ["a", "b", "a"]),
    (JSON, ['"a"', "42", '{"a":  1}', "no JSON"], ["a", "42", '{"a":  1}', "no JSON"]),
]


@pytest.mark.parametrize(("kind", "values", "expected"), TEXT_TYPES, ids=[str(one[0]) for one in TEXT_TYPES])
def test_texts_of_every_type_of_arrow(
    tmp_path: Path, kind: arrow.DataType, values: list[Any], expected: list[str]
) -> None:
    for path in written_table(tmp_path, kind, values, "text"):
        assert [one.document for one in read(path, bad=BadRows(1))] == expected, path.name


ARGUMENTS = [
    (arrow.map_(arrow.string(), arrow.int64()), {"a": 1, "b": None}, {"a": 1, "b": None}),
    (arrow.map_(arrow.string(), JSON), {"a": "[1]", "b": '{"c": null}'}, {"a": [1], "b": {"c": None}}),
    (arrow.struct([("a", JSON), ("b", arrow.int8())]), {"a": '{"c": ["d"]}'}, {"a": {"c": ["d"]}}),
    (arrow.struct([("a", arrow.list_(JSON))]), {"a": ["1", '"b"', None]}, {"a": [1, "b", None]}),
    (arrow.struct([("content", JSON), ("name", JSON)]), {"content": "42"}, {"content": 42}),
    (arrow.struct([("day", arrow.timestamp("s"))]), {"day": datetime.datetime(2024, 5, 17)}, {"day": "2024-05-17"}),
    (arrow.struct([("day", arrow.date32())]), {"day": datetime.date(2024, 5, 17)}, {"day": "2024-05-17"}),
    (
        arrow.struct([("at", arrow.timestamp("us", "UTC"))]),
        {"at": datetime.datetime(2024, 5, 17, 8, 30, tzinfo=datetime.UTC)},
        {"at": "2024-05-17T08:30:00Z"},
    ),
    (arrow.struct([("n", arrow.decimal128(9, 2))]), {"n": decimal.Decimal("1.50")}, {"n": 1.5}),
    (arrow.struct([("b", arrow.bool_()), ("s", arrow.binary())]), {"b": True, "s": b"s"}, {"b": True, "s": "s"}),
    (arrow.struct([("d", arrow.dictionary(arrow.int8(), arrow.string()))]), {"d": "x"}, {"d": "x"}),
    (arrow.struct([("l", arrow.list_(arrow.struct([("a", arrow.int8()), ("b", arrow.int8())])))]),
     {"l": [{"a": 1}, {"b": 2}]}, {"l": [{"a": 1}, {"b": 2}]}),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "value", "expected"), ARGUMENTS, ids=[str(one[0])[:60] for one in ARGUMENTS])
def test_arguments_of_every_type_of_arrow(
    tmp_path: Path, kind: arrow.DataType, value: dict[str, Any], expected: dict[str, Any]
) -> None:
    called = arrow.struct([("function", arrow.struct([("name", arrow.string()), ("arguments", kind)]))])
    message = arrow.struct([("role", arrow.string()), ("content", arrow.string()), ("tool_calls", arrow.list_(called))])
    given = list(value.items()) if arrow.types.is_map(kind) else value
    talk = [user("a"), answer(None, tool_calls=[{"function": {"name": "f", "arguments": given}}])]
    wanted = (user("a"), answer(None, tool_calls=[{"function": {"name": "f", "arguments": expected}}]))
    for path in written_table(tmp_path, arrow.list_(message), [talk] * 3, "messages"):
        assert [one.document for one in read(path)] == [wanted] * 3, path.name


@pytest.mark.parametrize("packed", ["gzip", "bz2", "zstd", "lz4"])
def test_packed_tables_are_read(tmp_path: Path, packed: str) -> None:
    for path in written_table(tmp_path, arrow.string(), ["a", "b"], "text"):
        raw = path.read_bytes()
        with arrow.CompressedOutputStream(path, packed) as file:
            file.write(raw)
        assert [one.document for one in read(path)] == ["a", "b"], path.name


def test_a_null_that_a_row_says_stays(tmp_path: Path) -> None:
    """Only a writer with one type for all rows gives all objects the same keys."""
    said = [user("a"), answer(None, tool_calls=call({"city": None})), {"role": "tool", "content": "b"}, answer("c")]
    (tmp_path / "rows.jsonl").write_text(json.dumps({"messages": said}) + "\n")
    filled = [{"role": "user", "content": "a", "name": None}, {"role": "assistant", "content": None, "name": None}]
    (tmp_path / "rows.json").write_text(json.dumps([{"messages": filled, "tools": None}]))
    assert read(tmp_path / "rows.jsonl")[0].document == tuple(said)
    assert read(tmp_path / "rows.json")[0].document == (user("a"), answer(None))


def test_a_list_of_texts_is_read_as_by_datasets(tmp_path: Path) -> None:
    path = tmp_path / "texts.json"
    path.write_text(json.dumps(["a text", "another"]))
    theirs = datasets.load_dataset("json", data_files=str(path), split="train", cache_dir=str(tmp_path / "cache"))
    assert [one.document for one in read(path)] == theirs["text"][:] == ["a text", "another"]


def test_saved_sets_name_their_splits_and_rows(tmp_path: Path) -> None:
    train, test = (datasets.Dataset.from_dict({"text": [name * 9] * 3}) for name in ("train", "test"))
    datasets.DatasetDict(train=train, test=test).save_to_disk(str(tmp_path / "set"))
    (tmp_path / "set" / "train" / "cache-1.arrow").write_bytes(b"a cache of datasets")
    assert {one.document for one in read(tmp_path / "set")} == {"train" * 9}
    assert {one.document for one in read(tmp_path / "set", Reading(split="test"))} == {"test" * 9}
    with pytest.raises(DataError, match="no split dev; there are test, train: --split"):
        read(tmp_path / "set", Reading(split="dev"))


def test_damaged_arrow_files_end_with_their_name(tmp_path: Path) -> None:
    """Offsets that lead out of a batch are found before they are followed."""
    _, stream, file = written_table(tmp_path, arrow.string(), ["a text " * 50, "b" * 300], "text")
    for path in (stream, file):
        whole = path.read_bytes()
        for raw in (whole[: len(whole) // 2], whole[:8], whole[:-40] + bytes(40)):
            path.write_bytes(raw)
            bad = BadRows(1)
            assert len(read(path, bad=bad)) <= 2
    batch = arrow.record_batch({"text": ["abc", "def"]})
    with arrow.ipc.new_stream(stream, batch.schema) as writer:
        writer.write_batch(batch)
    good, wrong = (np.array([0, 3, end], np.int32).tobytes() for end in (6, 1 << 20))
    assert stream.read_bytes().count(good) == 1
    stream.write_bytes(stream.read_bytes().replace(good, wrong))
    with pytest.raises(DataError, match="stream: cannot be read: ArrowInvalid"):
        read(stream)
