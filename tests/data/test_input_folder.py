"""Folders that other programs made: rows are read once, rows that a table no longer has are not read, and files that
only say something about others are no text. Layouts are those of deltalake 1.6.6, pyiceberg 0.12.0, pylance 14.0.2,
fastparquet 2026.9.0, Spark's committer and the Hugging Face hub."""

from __future__ import annotations

from pathlib import Path

import pyarrow as arrow
import pyarrow.parquet as parquet
import pytest

from swarmnode.app.local.pretrained import FolderFiles
from swarmnode.base.errors import DataError
from swarmnode.data.base_maker import stored_tensors
from swarmnode.data.document_row import Reading
from swarmnode.data.document_source import documents, find_work
from swarmnode.data.tokens import huggingface_tokenizer

POINTER = f"version https://git-lfs.github.com/spec/v1\noid sha256:{7:064d}\nsize 12345\n"
CARD = """---
license: mit
configs:
- config_name: default
  data_files:
  - split: train
    path: data/train-*
  - split: test
    path: data/test-*
---
# Books
"""


def read(given: Path | str, split: str = "train") -> list[object]:
    reading = Reading(split=split)
    return [one.document for work in find_work([str(given)], reading) for one in documents(work, reading)]


def write_rows(path: Path, *texts: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    parquet.write_table(arrow.table({"text": list(texts)}), path)
    return path


@pytest.mark.parametrize(
    ("log", "kind"),
    [
        ("_delta_log/00000000000000000000.json", "a Delta table"),
        ("metadata/00000-f021.metadata.json", "an Iceberg table"),
        ("_versions/18446744073709551613.manifest", "a Lance table"),
        (".hoodie/hoodie.properties", "a Hudi table"),
    ],
)
def test_a_table_with_a_log_is_refused_by_its_kind(tmp_path: Path, log: str, kind: str) -> None:
    """Its files hold rows that it deleted, also where a folder or a file below it is given."""
    rows = write_rows(tmp_path / "table" / "data" / "k=1" / "part-0.parquet", "deleted", "kept")
    (tmp_path / "table" / log).parent.mkdir(parents=True)
    (tmp_path / "table" / log).write_text("{}")
    for given in (tmp_path / "table", tmp_path, rows.parent, rows):
        with pytest.raises(DataError, match=f"table is {kind}: its files also hold rows that it has deleted"):
            read(given)


def test_summaries_of_a_folder_of_parquet_files_are_no_rows(tmp_path: Path) -> None:
    collected = list[parquet.FileMetaData]()
    table = arrow.table({"text": ["a", "b"]})
    parquet.write_table(table, tmp_path / "part.0.parquet", metadata_collector=collected)
    collected[0].set_file_path("part.0.parquet")
    parquet.write_metadata(table.schema, tmp_path / "_metadata", metadata_collector=collected)
    parquet.write_metadata(table.schema, tmp_path / "_common_metadata")
    (tmp_path / "_SUCCESS").touch()
    assert read(tmp_path) == ["a", "b"]


def test_texts_with_such_names_are_read(tmp_path: Path) -> None:
    for name in ("_metadata", "_common_metadata", "_SUCCESS"):
        (tmp_path / name).write_text(name)
    (tmp_path / "_temporary").mkdir()
    (tmp_path / "_temporary" / "a.txt").write_text("a text")
    assert sorted(map(str, read(tmp_path))) == ["_SUCCESS", "_common_metadata", "_metadata", "a text"]


def test_a_job_that_has_not_ended_is_told(tmp_path: Path) -> None:
    write_rows(tmp_path / "part-00000.parquet", "a")
    write_rows(tmp_path / "_temporary" / "0" / "task_1" / "part-00000.parquet", "a")
    with pytest.raises(DataError, match="_temporary is of a Spark or Hadoop job that has not ended, or failed"):
        read(tmp_path)


@pytest.mark.parametrize("name", ["books", "books@main", "books#1"])
def test_a_repository_of_the_hub_gives_one_split_and_no_card(tmp_path: Path, name: str) -> None:
    write_rows(tmp_path / name / "data" / "train-00000-of-00001.parquet", "learn this")
    write_rows(tmp_path / name / "data" / "test-00000-of-00001.parquet", "be asked this")
    (tmp_path / name / "README.md").write_text(CARD)
    assert read(tmp_path / name) == ["learn this"]
    assert read(f"hf:{tmp_path / name}", split="test") == ["be asked this"]
    with pytest.raises(DataError, match="is a data set of the Hugging Face hub inside another folder"):
        read(tmp_path)


def test_a_page_with_front_matter_of_another_program_is_a_text(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("---\ntitle: A page\n---\nconfigs: none")
    assert read(tmp_path) == ["---\ntitle: A page\n---\nconfigs: none"]


def test_the_cache_of_datasets_is_refused(tmp_path: Path) -> None:
    (tmp_path / "dataset_info.json").write_text("{}")
    for split in ("train", "test"):
        with arrow.ipc.new_stream(tmp_path / f"books-{split}.arrow", arrow.schema([("text", arrow.string())])):
            pass
    with pytest.raises(DataError, match="is a cache of the library datasets"):
        read(tmp_path)


@pytest.mark.parametrize("name", ["a.parquet", "a.txt", "a.jsonl", "a"])
def test_a_pointer_of_git_lfs_is_no_text(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text(POINTER)
    with pytest.raises(DataError, match=f"{name} is a pointer of Git LFS, not the file: `git lfs pull`"):
        read(tmp_path)


def test_pointers_of_a_model_are_told(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_text(POINTER)
    with pytest.raises(DataError, match=r"model\.safetensors is a pointer of Git LFS"):
        stored_tensors(FolderFiles(tmp_path))
    with pytest.raises(DataError, match=r"tokenizer\.json is a pointer of Git LFS"):
        huggingface_tokenizer(POINTER.encode(), "tokenizer.json")
