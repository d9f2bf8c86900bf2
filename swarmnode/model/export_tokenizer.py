"""The tokenizer of an exported model: the byte tokenizer as transformers reads it, and the tokens that end and pad."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from swarmnode.data.tokens import json_object
from swarmnode.run.manifest import BYTES_END, Manifest

END = "<|endoftext|>"  # GPT-2's name for it, where a tokenizer has none
TOKENIZER = "tokenizer.json"
TOKENIZER_CONFIG = "tokenizer_config.json"
SPECIAL_MAP = "special_tokens_map.json"
NAMED = {"bos_token": "bos_token_id", "eos_token": "eos_token_id", "pad_token": "pad_token_id"}


def byte_tokenizer() -> dict[str, object]:
    """tokenizer.json in which each byte is one token and its id the byte's value: byte-level BPE without merges. Byte
    0, which no text has, is the token that ends a text; in a prompt it is a space, as ByteTokenizer has it."""
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    shown = byte_characters() | {BYTES_END: END}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [_added(BYTES_END, END)],
        "normalizer": {"type": "Replace", "pattern": {"String": "\0"}, "content": " "},
        "pre_tokenizer": level,
        "post_processor": None,
        "decoder": level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {shown[byte]: byte for byte in range(256)},
            "merges": [],
        },
    }


def byte_characters() -> dict[int, str]:
    """The character by which byte-level BPE writes each byte: a printable one itself, the others, in order, from U+0100
    on (GPT-2)."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = (byte for byte in range(256) if byte not in printable)
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + n) for n, byte in enumerate(others)}


def end_of_text(manifest: Manifest) -> int | None:
    """The token that ends the run's documents; None without one."""
    if manifest.data.tokenizer == "bytes":
        return BYTES_END
    return manifest.data.end_token if manifest.data.end_token >= 0 else None


def tokenizer_files(raw: bytes, beside: Mapping[str, bytes], manifest: Manifest) -> dict[str, bytes]:
    """tokenizer.json of `raw`, and tokenizer_config.json, in which the tokens that begin, end and pad a text have
    names. `beside`: the files beside the tokenizer. A token that ends the run's documents and has no name in the
    tokenizer becomes `<|endoftext|>`; texts are padded with the token that ends them where no other is named."""
    tree = json_object(raw)
    names = token_names(tree)
    end = end_of_text(manifest)
    if end is not None and end not in names and END not in names.values() and end < manifest.model.vocabulary:
        raw = _json_bytes({**tree, "added_tokens": [*(tree.get("added_tokens") or []), _added(end, END)]})
        names[end] = END
    limits = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": manifest.model.context}
    config = json_object(beside.get(TOKENIZER_CONFIG, b"")) or limits
    named = named_tokens(config, json_object(beside.get(SPECIAL_MAP, b"")))
    settings = json_object(beside.get("generation_config.json", b"")), json_object(beside.get("config.json", b""))
    for token, key in NAMED.items():
        ids = [each for tree_of in settings for each in token_ids(tree_of.get(key))]
        found = next((names[each] for each in ids if each in names), None)
        if token not in named and found is not None:
            named[token] = found
    if "eos_token" not in named and end in names:
        named["eos_token"] = names[end]
    if "pad_token" not in named and "eos_token" in named:
        named["pad_token"] = named["eos_token"]
    config = config | {token: config.get(token) or name for token, name in named.items()}
    return {TOKENIZER: raw, TOKENIZER_CONFIG: _json_bytes(config)}


def special_ids(files: Mapping[str, bytes]) -> dict[str, int]:
    """The ids of the tokens that `tokenizer_files` named, by their keys in generation_config.json."""
    ids = {token: index for index, token in token_names(json_object(files.get(TOKENIZER, b""))).items()}
    named = named_tokens(json_object(files.get(TOKENIZER_CONFIG, b"")))
    return {NAMED[token]: ids[name] for token, name in named.items() if name in ids}


def named_tokens(*configs: Mapping[str, Any]) -> dict[str, str]:
    """The tokens of NAMED that `configs` name, those of the first one that does."""
    named = dict[str, str]()
    for config in configs:
        for token in NAMED:
            value = config.get(token)
            value = value.get("content") if isinstance(value, dict) else value
            if isinstance(value, str):
                named.setdefault(token, value)
    return named


def token_names(tree: Mapping[str, Any]) -> dict[int, str]:
    """The token of each id in a tokenizer.json. Empty for one whose vocabulary is no table of BPE, WordPiece or
    Unigram."""
    vocabulary = (tree.get("model") or {}).get("vocab") or {}
    if isinstance(vocabulary, list):  # Unigram: pairs of token and score
        names = {index: row[0] for index, row in enumerate(vocabulary)}
    else:
        names = {index: token for token, index in vocabulary.items()}
    return names | {one["id"]: one["content"] for one in tree.get("added_tokens") or []}


def token_ids(value: object) -> list[int]:
    """The ids that a setting such as eos_token_id names: one, several, or none."""
    return [one for one in (value if isinstance(value, list) else [value]) if type(one) is int]


def _added(index: int, content: str) -> dict[str, object]:
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    return {"id": index, "content": content, **flags}


def _json_bytes(value: Mapping[str, object]) -> bytes:
    return (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode()
