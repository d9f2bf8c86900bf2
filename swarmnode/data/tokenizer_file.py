"""Finds a run's tokenizer beside its text or a model, to use it or to copy its file."""

from __future__ import annotations

from pathlib import Path

from swarmnode.data.chunk_store import find_index
from swarmnode.data.root import DataRoot
from swarmnode.data.tokens import ByteTokenizer, Tokenizer, open_tokenizer
from swarmnode.manifest import DataSpec


def tokenizer_file(folder: Path | None, data: DataSpec) -> Path | None:
    """The tokenizer's file, or None for "bytes"; raises as `run_tokenizer`."""
    return run_tokenizer(folder, data)[1]


def run_tokenizer(folder: Path | None, data: DataSpec) -> tuple[Tokenizer, Path | None]:
    """The tokenizer and its file, None for "bytes". The file lies in the run's data set if that is in `folder`, else in
    `folder` itself: at the path in the manifest or, if there is no such file, as `tokenizer.json` (an exported model).

    Raises NotPermitted when there is no folder or a link leads out of it, DataError when the file is not a tokenizer.
    """
    name = data.tokenizer
    if name == "bytes":
        return ByteTokenizer(), None
    if data.index and (found := find_index(folder, bytes.fromhex(data.index))) is not None:
        folder = found[0]
    root, kept = DataRoot(folder), "tokenizer.json"
    name = kept if not root.find(name).is_file() and root.find(kept).is_file() else name
    return open_tokenizer(name, root), root.find(name)
