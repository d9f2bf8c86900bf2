"""The files to read in a folder that an organiser gives, also one of a set that the library `datasets` saved there.

A program that reads all Parquet files of a table's folder reads rows that the table no longer has (Delta, Iceberg), or
has twice (a Spark job that failed). A repository of the Hugging Face hub holds its card and all splits beside each
other. Such folders are told by their layout; versions seen: deltalake 1.6.6, pyiceberg 0.12.0, pylance 14.0.2,
fastparquet 2026.9.0, datasets 5.2.0.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from swarmnode.base.errors import DataError
from swarmnode.data.base_index import object_of
from swarmnode.data.chunk_store import read_regular
from swarmnode.data.document_row import shown

SAVED_SET = "dataset_info.json"
SAVED_SPLITS = "dataset_dict.json"
SAVED_STATE = "state.json"
"""What `save_to_disk` writes beside the rows of a set, and above the folders of its splits."""
STATE_NBYTES_MAX = 64 << 20
CARD = "README.md"
CARD_NBYTES_MAX = 64 << 10
CARD_KEYS = re.compile(r"^(configs|dataset_info|task_categories|size_categories|source_datasets|viewer):", re.MULTILINE)
"""Keys in the front matter of a data set's card (huggingface.co/docs/hub/datasets-cards). Other programs' pages have
front matter, too."""
PARQUET = b"PAR1"
PARQUET_SUMMARIES = ("_metadata", "_common_metadata")
"""Footers of a folder's other Parquet files, without rows (parquet.apache.org; fastparquet and Dask write them)."""
DONE_MARK = "_SUCCESS"  # an empty file that Hadoop's committer leaves
UNFINISHED = "_temporary"  # where tasks of a Spark or Hadoop job write until the job has ended


def files_below(root: Path, split: str) -> Iterator[Path]:
    """All files below `root` that are not hidden; of a set that `datasets` saved, the rows of `split`. Links are
    followed, each folder once. Raises DataError for a folder that cannot be read, and a set without the split."""

    def refuse(error: OSError) -> None:
        raise DataError(f"{shown(error.filename)}: cannot be read: {error.strerror}") from None

    seen = set[tuple[int, int]]()
    for here, folders, files in os.walk(root, onerror=refuse, followlinks=True):
        status = os.stat(here)
        if (status.st_dev, status.st_ino) in seen:
            folders[:] = []
            continue
        seen.add((status.st_dev, status.st_ino))
        refuse_table(Path(here))
        _refuse_part(Path(here), folders, files)
        folders[:] = sorted((folder for folder in folders if not folder.startswith(".")), key=os.fsencode)
        if SAVED_SPLITS in files:
            if split not in folders:
                raise DataError(f"{shown(here)}: no split {split}; there are {', '.join(map(shown, folders))}: --split")
            folders[:] = [split]
            continue
        if SAVED_SET in files and SAVED_STATE in files:
            files = _saved_rows(Path(here))
        marks = _marks(here, files)
        yield from (Path(here) / name for name in files if not name.startswith(".") and name not in marks)


def table_of(folder: Path) -> str:
    """The kind of table whose log lies in `folder`; "" if it is none."""
    if (folder / "_delta_log").is_dir():
        return "a Delta table"
    if (folder / ".hoodie").is_dir():
        return "a Hudi table"
    if any((folder / "metadata").glob("*.metadata.json")):
        return "an Iceberg table"
    if any((folder / "_versions").glob("*.manifest")):
        return "a Lance table"
    return ""


def refuse_table(folder: Path) -> None:
    """Raises DataError if `folder` is the folder of a table whose log says which rows it has."""
    if kind := table_of(folder):
        raise DataError(
            f"{shown(folder)} is {kind}: its files also hold rows that it has deleted or replaced. Write the table's "
            "rows as Parquet or JSON lines by its own library, and give --from that file"
        )


def is_hub_folder(folder: Path) -> bool:
    """Whether `folder` is a repository of a data set of the Hugging Face hub, by its card."""
    try:
        card = (read_regular(folder / CARD, CARD_NBYTES_MAX) or b"").decode(errors="replace")
    except (DataError, OSError):
        return False
    front, mark, _ = card.removeprefix("---").partition("\n---")
    return card.startswith("---\n") and bool(mark) and CARD_KEYS.search(front) is not None


def _refuse_part(here: Path, folders: Sequence[str], files: Sequence[str]) -> None:
    """Raises DataError if the files in `here` are not all of what they belong to, or not only that."""
    if UNFINISHED in folders and any(child.name.isdigit() for child in (here / UNFINISHED).iterdir()):
        raise DataError(
            f"{shown(here / UNFINISHED)} is of a Spark or Hadoop job that has not ended, or failed: rows may lie there "
            "and beside it. Let the job end, or delete this folder if nothing writes to it any more"
        )
    if SAVED_SET in files and SAVED_STATE not in files and any(name.endswith(".arrow") for name in files):
        raise DataError(
            f"{shown(here)} is a cache of the library datasets, with all splits beside each other: give hf:NAME, or "
            "a folder that `save_to_disk` wrote"
        )
    if is_hub_folder(here):
        raise DataError(f"{shown(here)} is a data set of the Hugging Face hub inside another folder: give it a --from "
                        "of its own")  # fmt: skip


def _marks(here: str, files: Sequence[str]) -> set[str]:
    """The names of `files` that say something about the others, and hold no rows."""
    names = {name for name in PARQUET_SUMMARIES if name in files and _is_parquet(Path(here, name))}
    if DONE_MARK in files and not os.path.getsize(Path(here, DONE_MARK)):
        names.add(DONE_MARK)
    return names


def _is_parquet(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(len(PARQUET)) == PARQUET


def _saved_rows(folder: Path) -> list[str]:
    """The files that hold the rows of a set which `datasets` saved in `folder`. Raises DataError."""
    path = folder / SAVED_STATE
    state = object_of(read_regular(path, STATE_NBYTES_MAX) or b"", shown(path))
    try:
        return [Path(str(each["filename"])).name for each in state["_data_files"]]
    except (KeyError, TypeError):
        raise DataError(f"{shown(path)}: it names no _data_files") from None
