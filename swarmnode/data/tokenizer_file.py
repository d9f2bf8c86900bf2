"""Finds a run's tokenizer beside its text or a model, to use it or to copy its file."""

from __future__ import annotations

import json
from pathlib import Path

from swarmnode.data.base_folder import SMALL_NBYTES_MAX, small_files
from swarmnode.data.chat_template import CONFIG_FILE, ChatTemplate
from swarmnode.data.chunk_store import find_index, read_regular
from swarmnode.data.index import TOKENIZER_FILE
from swarmnode.data.root import DataRoot
from swarmnode.data.tokens import ByteTokenizer, Tokenizer, json_object, open_tokenizer
from swarmnode.manifest import DataSpec

GENERATION = "generation_config.json"
BESIDE_TOKENIZER = (CONFIG_FILE, "special_tokens_map.json", "added_tokens.json", "chat_template.jinja", GENERATION)


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


def files_beside(path: Path, raw: bytes, template: ChatTemplate, tokenizer: Tokenizer) -> dict[str, bytes]:
    """The files of the tokenizer at `path`, by name: `raw` as its tokenizer.json, and what transformers reads beside
    it: special tokens, chat templates, and the tokens that end what a model generates."""
    files = {TOKENIZER_FILE: raw} | _beside(path.parent)
    ends = template.ends(tokenizer)
    settings = json_object(files.get(GENERATION, b"")) or {"do_sample": True}
    theirs = settings.get("eos_token_id")
    known = theirs if isinstance(theirs, list) else [theirs] if isinstance(theirs, int) else []
    if merged := list(dict.fromkeys([*known, *ends])):
        settings["eos_token_id"] = merged if len(merged) > 1 else merged[0]
    files[GENERATION] = (json.dumps(settings, indent=2) + "\n").encode()
    if named := template.named:
        config = json_object(files.get(CONFIG_FILE, b"")) | {"chat_template": named}
        files[CONFIG_FILE] = (json.dumps(config, indent=2, ensure_ascii=False) + "\n").encode()
        files.pop("chat_template.jinja", None)
    return files


def carried_files(base: Path | None, index: str, tokenizer: Path | None) -> dict[str, bytes]:
    """The small files, by name, that an export carries beside its weights: of the base model in `base` with the index
    of hash `index`, and of the run's tokenizer. Where both have some, those of the tokenizer count: the data was
    rendered with their template."""
    carried = small_files(base, index)
    beside = {} if tokenizer is None else _beside(tokenizer.parent)
    if CONFIG_FILE not in beside:
        return carried
    return {name: raw for name, raw in carried.items() if name not in BESIDE_TOKENIZER} | beside


def stops_of(tokenizer: Tokenizer, path: Path | None) -> frozenset[int]:
    """The tokens that end what a model generates: its tokenizer's end of text, and those that generation_config.json
    beside the tokenizer's file `path` names."""
    stops = set[int]() if tokenizer.separator is None else {tokenizer.separator}
    if path is not None:
        named = json_object(_beside(path.parent).get(GENERATION, b"")).get("eos_token_id")
        stops.update(one for one in (named if isinstance(named, list) else [named]) if isinstance(one, int))
    return frozenset(stops)


def _beside(folder: Path) -> dict[str, bytes]:
    read = {name: read_regular(folder / name, SMALL_NBYTES_MAX) for name in BESIDE_TOKENIZER}
    return {name: raw for name, raw in read.items() if raw is not None}
