"""Finds a run's tokenizer beside its text or a model, to use it or to copy its file."""

from __future__ import annotations

import functools
import json
import stat
import string
from pathlib import Path

from swarmnode.base.errors import DataError
from swarmnode.base.limited_child import run_limited
from swarmnode.data.base_index import SMALL_NBYTES_MAX, files_in, object_of, small_files
from swarmnode.data.chat_template import CONFIG_FILE, PROCESSOR_TEMPLATE, ChatTemplate, tokenizer_and_template
from swarmnode.data.chat_template import conversation as conversation_of
from swarmnode.data.chunk_store import find_index, read_regular
from swarmnode.data.index import TOKENIZER_FILE
from swarmnode.data.root import DataRoot, model_root
from swarmnode.data.tokens import (
    ByteTokenizer,
    Tokenizer,
    huggingface_tokenizer,
    json_object,
    model_ends,
    open_tokenizer,
)
from swarmnode.run.manifest import DataSpec

GENERATION = "generation_config.json"
READ_BY_TRANSFORMERS = ("*.json", "*.jinja", "*.txt", "*.model", "additional_chat_templates/*")
TRIAL_CHARACTERS = 2000  # of one kind in a row: expressions that try every way to divide them never end
NAMED_MAX = 100  # guess: characters that expressions and replacements name, beside the usual kinds
BESIDE_TOKENIZER = (
    CONFIG_FILE,
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    PROCESSOR_TEMPLATE,
    GENERATION,
)


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
    if data.index and (raw := find_index(folder, bytes.fromhex(data.index))) is not None:
        folder = raw[0]
    root = DataRoot(folder)
    kept = "tokenizer.json"
    name = kept if not root.find(name).is_file() and root.find(kept).is_file() else name
    path = root.find(name)
    check_tokenizer(path)
    return open_tokenizer(name, root), path


@functools.lru_cache(maxsize=16)
def check_tokenizer(path: Path, called: str = "") -> None:
    """Look at the tokenizer file `path` and what lies beside it, which strangers made, before this process uses them.
    `called` is its name in messages, if it has another.

    Raises NotPermitted where a link leads out of the folder, DataError for what is no file or no JSON, and for a
    tokenizer or a chat template that hangs, takes gigabytes or crashes in a trial.
    """
    root = model_root(path.parent)
    beside = set[Path]()
    for pattern in READ_BY_TRANSFORMERS:
        beside.update(path.parent.glob(pattern))
    reads = [path.parent.absolute()]
    for each in sorted({path, *beside}):
        real = root.inside(each)
        if real.is_dir():
            continue
        reads.append(real)
        if not real.exists() or not stat.S_ISREG(real.stat().st_mode):
            raise DataError(f"{each}: not a regular file")
    # What transformers makes of these beside a tokenizer.json: a template, and maybe another tokenizer.
    rebuilt = any(each.suffix == ".jinja" or each.name in (CONFIG_FILE, PROCESSOR_TEMPLATE) for each in beside)
    imports = ["tokenizers", *(["transformers.models.auto", "jinja2"] if rebuilt else [])]
    given = str(path.absolute()), "yes" if rebuilt else ""  # the child works elsewhere
    run_limited(f"{__name__}:try_tokenizer", *given, what=called or str(path), imports=imports, reads=reads)


def try_tokenizer(path: str, rebuilt: str) -> None:
    """Use the tokenizer at `path`, if `rebuilt` as transformers makes it and with its chat template, on texts of many
    kinds, also of the characters that it names. For `run_limited`. Raises DataError."""
    raw = read_regular(Path(path), SMALL_NBYTES_MAX)
    if raw is None:
        raise DataError(f"{path}: tokenizer cannot be read")
    tokenizer: Tokenizer = huggingface_tokenizer(raw, path)
    if rebuilt:
        tokenizer, raw, template = tokenizer_and_template(Path(path), tokenizer)
    kinds = [*string.printable, "é", "\u0301", "漢", "ก", "ي", "👍", "\u200d", "ab", "a ", "1,", "\r\n", "\n ", "Aé"]
    tree = object_of(raw or b"", path)
    parts = json.dumps([tree.get(part) for part in ("normalizer", "pre_tokenizer")], ensure_ascii=False)
    kinds += sorted({*parts} - {*kinds})[:NAMED_MAX]
    for kind in kinds:
        for text in (kind * (TRIAL_CHARACTERS // len(kind)), kind * 40 + "!"):
            ids, _ = tokenizer.encode_spans(text + "\0", [(0, 1)])
            tokenizer.encode_all([text])
        tokenizer.decode(ids)
    if rebuilt:
        asked = [{"role": "user", "content": "What is 7 * 6?\n\n"}, {"role": "assistant", "content": "It is **42**."}]
        tools = [{"type": "function", "function": {"name": "f", "description": "g", "parameters": {"type": "object"}}}]
        tried = 0
        refusal = None
        for messages in (asked, [{"role": "system", "content": "Be brief."}, *asked], asked * 8):
            for given in (None, tools):
                if (spoken := conversation_of(messages, given)) is None:
                    continue
                try:
                    template.encode(spoken, tokenizer)
                    tried += 1
                except DataError as error:  # a template may know no system, or no tools
                    refusal = error
        if not tried and refusal is not None and ("Syntax" in str(refusal) or "Memory" in str(refusal)):
            raise refusal


def files_beside(
    path: Path, raw: bytes, template: ChatTemplate, tokenizer: Tokenizer, *, rendered: bool
) -> dict[str, bytes]:
    """The files of the tokenizer at `path`, by name: `raw` as its tokenizer.json, and what transformers reads beside
    it: special tokens, the tokens that end what a model generates, and its chat templates; ChatML where it has none and
    conversations were `rendered`."""
    files = {TOKENIZER_FILE: raw} | files_in(path.parent, BESIDE_TOKENIZER)
    settings = json_object(files.get(GENERATION, b"")) or {"do_sample": True}
    if ends := list(dict.fromkeys([*model_ends(path.parent), *template.ends(tokenizer)])):
        settings["eos_token_id"] = ends if len(ends) > 1 else ends[0]
    files[GENERATION] = (json.dumps(settings, indent=2) + "\n").encode()
    if shows := template.own or (template.source if rendered else None):
        config = json_object(files.get(CONFIG_FILE, b"")) | {"chat_template": shows}
        files[CONFIG_FILE] = (json.dumps(config, indent=2, ensure_ascii=False) + "\n").encode()
        files.pop("chat_template.jinja", None)
    return files


def carried_files(base: Path | None, index: str, tokenizer: Path | None) -> dict[str, bytes]:
    """The small files, by name, that an export carries beside its weights: of the base model in `base` with the index
    of hash `index`, and of the run's tokenizer. Where both have some, those of the tokenizer count: the data was
    rendered with their template."""
    carried = small_files(base, index)
    beside = {} if tokenizer is None else files_in(tokenizer.parent, BESIDE_TOKENIZER)
    if CONFIG_FILE not in beside:
        return carried
    return {name: raw for name, raw in carried.items() if name not in BESIDE_TOKENIZER} | beside


def stops_of(tokenizer: Tokenizer, path: Path | None) -> frozenset[int]:
    """The tokens that end what a model generates: its tokenizer's end of text, and those that the model's configuration
    beside the tokenizer's file `path` names."""
    stops = set[int]() if tokenizer.separator is None else {tokenizer.separator}
    return frozenset(stops if path is None else stops.union(model_ends(path.parent)))
