"""A tokenizer.json as the tokenizer of a GGUF file, which llama.cpp reads.

llama.cpp does not read pre-tokenizers: it knows some by a name, `tokenizer.ggml.pre`, and its converter recognises them
by the ids that a published tokenizer makes, so that none of one's own is ever recognised. Here the name follows from
what tokenizer.json says, and what llama.cpp does otherwise is refused.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from swarmnode.base.errors import UsageError
from swarmnode.data.tokens import framed_ids, json_object
from swarmnode.model.export_tokenizer import byte_characters, named_tokens, special_ids, token_names

SPACES = r"|\s*[\r\n]+|\s+(?!\S)|\s+"
WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
SIGNS = r"| ?[^\s\p{L}\p{N}]+[\r\n]*"
LLAMA3 = WORDS + r"|\p{N}{1,3}" + SIGNS + SPACES
QWEN2 = WORDS + r"|\p{N}" + SIGNS + SPACES
NEVER = "\u4e00 \u4e01"  # a merge of what byte-level BPE never writes: llama.cpp wants one at least


@dataclass(frozen=True, slots=True)
class GgufTokenizer:
    """The tokens by id, their kinds (gguf.TokenType), merges in order, and llama.cpp's name of the pre-tokenizer.
    `specials`: ids of bos_token_id, eos_token_id, pad_token_id; `adds`: whether texts begin or end with these."""

    tokens: tuple[str, ...]
    kinds: tuple[int, ...]
    merges: tuple[str, ...]
    pre: str
    specials: Mapping[str, int]
    adds: Mapping[str, bool]


def gguf_tokenizer(
    tree: Mapping[str, Any], config: Mapping[str, Any], specials: Mapping[str, int], vocabulary: int
) -> GgufTokenizer:
    """The tokenizer of `tree` (tokenizer.json) with `config` (tokenizer_config.json) for a model of `vocabulary` ids.
    Raises UsageError, one line, where llama.cpp would make other ids of a text."""
    import gguf

    model = tree.get("model") or {}
    _check_model(tree, model)
    names = token_names(tree)
    added = {one["id"]: one for one in tree.get("added_tokens") or []}
    if max(names, default=0) >= vocabulary:
        raise _refused(f"it has {max(names) + 1} tokens, the model {vocabulary}")
    for one in added.values():
        if flags := [flag for flag in ("lstrip", "rstrip", "single_word") if one.get(flag)]:
            raise _refused(f"its token {one['content'][:40]!r} has {flags[0]}, which llama.cpp does not know")
    named = set(named_tokens(config).values())
    kinds = list[int]()
    tokens = list[str]()
    for index in range(vocabulary):
        name = names.get(index)
        tokens.append(f"[PAD{index}]" if name is None else name)
        special = index in added and (added[index].get("special") or name in named)
        if name is None:
            kinds.append(gguf.TokenType.UNUSED)
        elif special or index in specials.values():
            kinds.append(gguf.TokenType.CONTROL)
        else:
            kinds.append(gguf.TokenType.USER_DEFINED if index in added else gguf.TokenType.NORMAL)
    pairs = [" ".join(pair) if isinstance(pair, list) else str(pair) for pair in model.get("merges") or []]
    adds = _added_around(tree, specials)
    return GgufTokenizer(tuple(tokens), tuple(kinds), tuple(pairs or [NEVER]), _pre(tree, model), specials, adds)


def read_tokenizer(files: Mapping[str, bytes], vocabulary: int) -> GgufTokenizer:
    """The tokenizer among the files of an exported model. Raises UsageError as `gguf_tokenizer`, and without one."""
    tree = json_object(files.get("tokenizer.json", b""))
    if not tree:
        raise UsageError("--gguf: the run's tokenizer is not here; give --data, the folder that has it")
    config = json_object(files.get("tokenizer_config.json", b""))
    return gguf_tokenizer(tree, config, special_ids(files), vocabulary)


def _check_model(tree: Mapping[str, Any], model: Mapping[str, Any]) -> None:
    """Raises UsageError for what is no byte-level BPE, or has parts that llama.cpp has not."""
    if model.get("type") != "BPE":
        raise _refused(f"it is {model.get('type') or 'of a kind that is not named'}, not byte-level BPE")
    normalizer = tree.get("normalizer") or {"type": None}
    harmless = normalizer.get("type") in (None, "NFC") or normalizer.get("pattern") == {"String": "\0"}
    if model.get("byte_fallback") or not harmless or not _levels(tree):
        raise _refused(
            "it is not byte-level BPE alone; llama.cpp's convert_hf_to_gguf.py may read an export with SentencePiece's"
        )
    for part in ("continuing_subword_prefix", "end_of_word_suffix", "dropout"):
        if model.get(part):
            raise _refused(f"its {part} is {model[part]!r}")
    missing = set(byte_characters().values()) - set(model.get("vocab") or {})
    if len(missing) > 1:  # one byte, which no text has, may be the end token
        raise _refused(f"{len(missing)} of 256 bytes have no token")


def _parts(tree: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The pre-tokenizers, in order."""
    pre = tree.get("pre_tokenizer") or {}
    return list(pre.get("pretokenizers") or []) if pre.get("type") == "Sequence" else [pre]


def _levels(tree: Mapping[str, Any]) -> bool:
    return [part.get("type") for part in _parts(tree)].count("ByteLevel") == 1


def _pre(tree: Mapping[str, Any], model: Mapping[str, Any]) -> str:
    """llama.cpp's name of the pre-tokenizer (src/llama-vocab.cpp). Raises UsageError where it has none."""
    *before, level = _parts(tree)
    whole = bool(model.get("ignore_merges"))
    if level.get("type") != "ByteLevel" or level.get("add_prefix_space"):
        raise _refused("its pre-tokenizer puts a space before each text, or does more after dividing it into bytes")
    shape = [_shape(part) for part in before]
    divides = level.get("use_regex", True)
    if not divides and not model.get("merges"):
        return "gpt-2"  # where nothing is merged it does not matter how a text is divided
    known: Sequence[tuple[list[str], bool, bool, str]] = (
        ([], True, False, "gpt-2"),
        (["digits"], True, False, "smollm"),
        ([LLAMA3], False, True, "llama-bpe"),
        ([LLAMA3], False, False, "dbrx"),
        ([QWEN2], False, False, "qwen2"),
    )
    for parts, by_regex, ignores, name in known:
        if (parts, by_regex, ignores) == (shape, divides, whole):
            return name
    raise _refused("llama.cpp has no pre-tokenizer that divides texts as this one does")


def _shape(part: Mapping[str, Any]) -> str:
    if part.get("type") == "Digits" and part.get("individual_digits"):
        return "digits"
    isolated = part.get("behavior") in ("Isolated", "isolated") and not part.get("invert")
    if part.get("type") == "Split" and isolated:
        return str((part.get("pattern") or {}).get("Regex"))
    return "another"


def _added_around(tree: Mapping[str, Any], specials: Mapping[str, int]) -> dict[str, bool]:
    """Whether transformers begins a text with the token bos_token_id, or ends it with eos_token_id. Raises UsageError
    for a tokenizer that adds others."""
    plain, full = framed_ids(json.dumps(tree), "a")
    for begin in ([], [specials.get("bos_token_id")]):
        for end in ([], [specials.get("eos_token_id")]):
            if [*begin, *plain, *end] == full:
                return {"bos": bool(begin), "eos": bool(end)}
    raise _refused("it adds other tokens to a text than those that begin and end one")


def _refused(why: str) -> UsageError:
    return UsageError(f"--gguf: llama.cpp cannot read this tokenizer: {why}")
