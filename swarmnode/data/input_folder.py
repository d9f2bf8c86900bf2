"""The files to read in a folder that an organiser gives, also one of a set that the library `datasets` saved there."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from swarmnode.data.base_index import object_of
from swarmnode.data.chunk_store import read_regular
from swarmnode.data.document_row import shown
from swarmnode.errors import DataError

SAVED_SET = "dataset_info.json"
SAVED_SPLITS = "dataset_dict.json"
SAVED_STATE = "state.json"
"""What `save_to_disk` writes beside the rows of a set, and above the folders of its splits."""
STATE_NBYTES_MAX = 64 << 20


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
        folders[:] = sorted((folder for folder in folders if not folder.startswith(".")), key=os.fsencode)
        if SAVED_SPLITS in files:
            if split not in folders:
                raise DataError(f"{shown(here)}: no split {split}; there are {', '.join(map(shown, folders))}: --split")
            folders[:] = [split]
            continue
        if SAVED_SET in files and SAVED_STATE in files:
            files = _saved_rows(Path(here))
        yield from (Path(here) / name for name in files if not name.startswith("."))


def _saved_rows(folder: Path) -> list[str]:
    """The files that hold the rows of a set which `datasets` saved in `folder`. Raises DataError."""
    path = folder / SAVED_STATE
    state = object_of(read_regular(path, STATE_NBYTES_MAX) or b"", shown(path))
    try:
        return [Path(str(each["filename"])).name for each in state["_data_files"]]
    except (KeyError, TypeError):
        raise DataError(f"{shown(path)}: it names no _data_files") from None
