"""An organiser's run on a data set: the manifest names it by content, and the run's folder leads to it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from swarmnode.data.chunk_store import read_regular
from swarmnode.data.index import INDEX_FILE, INDEX_NBYTES_MAX, TOKENIZER_FILE, Index, parse_index
from swarmnode.errors import DataError, NotPermitted, UsageError
from swarmnode.manifest import Manifest
from swarmnode.manifest.spec import BY_NAME

FOLDER = "data"


def index_of(folder: Path) -> Index:
    """The index of the data set in `folder`. Raises DataError."""
    raw = read_regular(folder / INDEX_FILE, INDEX_NBYTES_MAX + 1)
    if raw is None:
        raise DataError(f"{folder}: no {INDEX_FILE} there; `swarmnode data make {folder} --from ...` makes a data set")
    return parse_index(raw, origin=str(folder / INDEX_FILE))


def on_data_set(manifest: Manifest, folder: Path, locations: Sequence[str]) -> Manifest:
    """`manifest` on the data set in `folder`, its vocabulary and tokenizer with it. Raises DataError; UsageError for a
    location that no manifest may name."""
    index, check = index_of(folder), BY_NAME["data.locations"].check
    if check.accept(list(locations)) is None:
        raise UsageError(f"--location {', '.join(locations)[:200]}: allowed is {check.allowed}")
    is_bytes = not (folder / TOKENIZER_FILE).is_file()
    data = replace(
        manifest.data,
        source="index",
        paths=(),
        index=index.digest.hex(),
        locations=tuple(locations),
        end_token=index.end_token,
        tokenizer="bytes" if is_bytes else TOKENIZER_FILE,
    )
    return replace(manifest, data=data, model=replace(manifest.model, vocabulary=index.vocabulary))


def link(run: Path, folder: Path) -> Path:
    """`run`/data, which leads to `folder`; it may be there already, or be the data set itself. Raises NotPermitted."""
    place = run / FOLDER
    if place.exists() and os.path.samefile(place, folder):
        return place
    try:
        place.symlink_to(folder.resolve(), target_is_directory=True)
    except OSError as error:
        raise NotPermitted(f"{place} cannot be made to lead to {folder}: {error.strerror}") from error
    return place
