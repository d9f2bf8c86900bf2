"""A folder of this machine with the files of a run's base model: whether it can be what its user says."""

from __future__ import annotations

import json
import stat
from pathlib import Path

from swarmnode.data.base_index import BASE_INDEX_FILE, BaseIndex, parse_base
from swarmnode.data.chunk_store import find_index, read_regular
from swarmnode.data.index import INDEX_NBYTES_MAX
from swarmnode.errors import DataError

FOLDER = "base"  # in the organiser's folder of the run
CONFIG, TOKENIZER = "config.json", "tokenizer.json"
SMALL_FILES = (
    CONFIG,
    TOKENIZER,
    "tokenizer_config.json",
    "special_tokens_map.json",
    "generation_config.json",
    "chat_template.jinja",
    "chat_template.json",
)
"""Files of a model besides its weights that exports of the run carry on."""
SMALL_NBYTES_MAX = 64 << 20


def written_anew(raw: bytes, path: str) -> bytes:
    """A small file of a model that a stranger made: JSON parsed and written again, a template as the text it is. Raises
    DataError for anything else under these names."""
    try:
        if not path.endswith(".json"):
            return raw.decode().encode()
        tree = json.loads(raw)
        anew = json.dumps(tree, indent=2, ensure_ascii=False).encode() + b"\n"
    except (ValueError, RecursionError):
        raise DataError(f"{path}: not {'JSON' if path.endswith('.json') else 'UTF-8'}") from None
    if not isinstance(tree, dict):
        raise DataError(f"{path}: not a JSON object")
    return anew


def small_files(folder: Path | None, index: str) -> dict[str, bytes]:
    """The small files of the base model whose index has the SHA-256 `index` (hex) in `folder`, by name; none when it is
    not there."""
    if folder is None or not index or find_index(folder, bytes.fromhex(index), BASE_INDEX_FILE) is None:
        return {}
    return {name: raw for name in SMALL_FILES if (raw := read_regular(folder / name, SMALL_NBYTES_MAX)) is not None}


def local_base(folder: Path | None, expected: bytes) -> BaseIndex | None:
    """The index with hash `expected` in `folder`, whose files are as long as it says; None when there is no such index
    there. Raises DataError when a file is missing or too short. Contents are compared when they are read."""
    if folder is None or (raw := find_index(folder, expected, BASE_INDEX_FILE)) is None:
        return None
    index = parse_base(raw[1], expected, str(folder / BASE_INDEX_FILE))
    check_lengths(raw[0], index)
    return index


def check_lengths(folder: Path, index: BaseIndex) -> None:
    """Raises DataError when a file of the model is missing in `folder` or too short."""
    for file in index.files:
        if not file.starts:
            continue
        path, least = folder / file.name, file.starts[-1] + file.sizes[-1]
        try:
            status = path.stat()
        except OSError as error:
            raise DataError(f"{path}: {error.strerror}: a file of the base model is missing") from None
        if not stat.S_ISREG(status.st_mode) or status.st_size < least:
            raise DataError(f"{path}: {status.st_size} bytes where the base model has {least}: it is cut off")


def other_base(folder: Path, expected: bytes) -> str | None:
    """The reason why `folder` does not hold the base model with index `expected`; None when it does, or holds weights
    without an index, which are compared when they are read. Raises DataError for a missing or too short file."""
    if local_base(folder, expected) is not None:
        return None
    if (raw := read_regular(folder / BASE_INDEX_FILE, INDEX_NBYTES_MAX)) is not None:
        digest = parse_base(raw, None, str(folder / BASE_INDEX_FILE)).digest.hex()
        return f"{folder} holds base model {digest[:16]}..., the run starts from {expected.hex()[:16]}..."
    if not any(folder.glob("*.safetensors")):
        return f"{folder} holds no base model: neither {BASE_INDEX_FILE} nor *.safetensors"
    return None
