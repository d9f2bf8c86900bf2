"""Tokenizers, from text to ids: the built-in `bytes`, or any Hugging Face tokenizer.json."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt

from swarmnode.base.errors import DataError, cause_of, os_errors
from swarmnode.base.ids import digest
from swarmnode.data.lfs_pointer import refuse_pointer
from swarmnode.data.root import DataRoot
from swarmnode.run.manifest import BYTES_END

if TYPE_CHECKING:
    import tokenizers

Tokens = npt.NDArray[np.uint16] | npt.NDArray[np.uint32]

TOKENIZER_BYTES_MAX = 64 << 20
CONFIG_BYTES_MAX = 4 << 20
SEPARATOR_NAMES = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "[SEP]")
"""Names under which public tokenizers keep their end-of-document token, most common first."""
BYTE_TOKEN = re.compile("<0x[0-9A-F]{2}>")
NO_TEXT = "\uffff\ufdd0"  # Unicode's noncharacters, which no text should have


class Tokenizer(Protocol):
    """Produces ids below `vocabulary`. `digest` (32 bytes) identifies the tokenizer. `separator` ends documents."""

    @property
    def vocabulary(self) -> int: ...

    @property
    def digest(self) -> bytes: ...

    @property
    def separator(self) -> int | None: ...

    @property
    def dtype(self) -> np.dtype[Any]:
        """`dtype_of(vocabulary)`."""
        ...

    def encode(self, text: str | bytes) -> Tokens:
        """Token ids of a prompt, [n], in which the written form of a special token is that token."""
        ...

    def encode_all(self, texts: Sequence[str], *, special: bool = False) -> list[Tokens]:
        """Token ids of several texts, in which the written form of a special token is text, unless `special`."""
        ...

    def encode_spans(self, text: str, spans: Sequence[tuple[int, int]]) -> tuple[Tokens, npt.NDArray[np.uint8]]:
        """(token ids [n] of a rendered conversation, mask [n]: 1 for the tokens of the characters in `spans`)."""
        ...

    def decode(self, tokens: npt.ArrayLike) -> str: ...


def dtype_of(vocabulary: int) -> np.dtype[Any]:
    """The smallest of uint16 and uint32 (little endian) that holds every id."""
    return np.dtype("<u2") if vocabulary <= 1 << 16 else np.dtype("<u4")


class ByteTokenizer:
    """Uses UTF-8 bytes as ids. Byte 0, which text does not contain, separates documents."""

    vocabulary = 256
    dtype = dtype_of(vocabulary)
    separator = BYTES_END
    digest = digest("tokenizer", "bytes")

    def encode(self, text: str | bytes) -> Tokens:
        raw = text.encode(errors="replace") if isinstance(text, str) else text
        return np.frombuffer(raw, dtype=np.uint8).astype(self.dtype)

    def encode_all(self, texts: Sequence[str], *, special: bool = False) -> list[Tokens]:
        return [self.encode(text.replace("\0", " ")) for text in texts]

    def encode_spans(self, text: str, spans: Sequence[tuple[int, int]]) -> tuple[Tokens, npt.NDArray[np.uint8]]:
        ids = self.encode(text.replace("\0", " "))
        mask = np.zeros(ids.size, np.uint8)
        for first, last in spans:
            start = len(text[:first].encode(errors="replace"))
            mask[start : start + len(text[first:last].encode(errors="replace"))] = 1
        return ids, mask

    def decode(self, tokens: npt.ArrayLike) -> str:
        return np.asarray(tokens).astype(np.uint8).tobytes().decode(errors="replace")


class HuggingFaceTokenizer:
    """A tokenizer.json, without the special tokens that its template would add."""

    def __init__(self, inner: tokenizers.Tokenizer, file_digest: bytes, eos: str | int | None = None) -> None:
        """`eos`: the token that ends a text, or its id, as the configuration names it; None: one of SEPARATOR_NAMES."""
        self._inner = inner
        self._plain: tokenizers.Tokenizer | None = None
        self.digest = file_digest
        # Ids may have gaps, so the largest id determines the vocabulary.
        ids = inner.get_vocab(with_added_tokens=True)
        self.vocabulary = max(ids.values(), default=-1) + 1
        if isinstance(eos, int):
            self.separator = eos if eos in ids.values() else None
        else:
            names = SEPARATOR_NAMES if eos is None else (eos,)
            self.separator = next((ids[name] for name in names if name in ids), None)
        self.dtype = dtype_of(self.vocabulary)
        self.special = sorted(token for token, one in inner.get_added_tokens_decoder().items() if one.special)
        """The ids of special tokens, ascending."""

    def same_as(self, text: str) -> bool:
        """Whether `text` is the tokenizer.json of a tokenizer that makes the same ids."""
        return _essence(self._inner.to_str()) == _essence(text)

    def encode(self, text: str | bytes) -> Tokens:
        return self.encode_all([text if isinstance(text, str) else text.decode(errors="replace")], special=True)[0]

    def encode_all(self, texts: Sequence[str], *, special: bool = False) -> list[Tokens]:
        with panics_are_faults():
            inner = self._inner if special else self._literal
            made = inner.encode_batch_fast(texts, add_special_tokens=False)  # without offsets, which are not used
        return [np.array(one.ids, dtype=self.dtype) for one in made]

    @property
    def _literal(self) -> tokenizers.Tokenizer:
        """The tokenizer that reads the written form of a special token as text."""
        if self._plain is None:
            tree = json.loads(self._inner.to_str())
            _rename_specials(tree)
            self._plain = type(self._inner).from_str(json.dumps(tree))
            self._plain.encode_special_tokens = True
        return self._plain

    def encode_spans(self, text: str, spans: Sequence[tuple[int, int]]) -> tuple[Tokens, npt.NDArray[np.uint8]]:
        with panics_are_faults():
            made = self._inner.encode(text, add_special_tokens=False)
        ids = np.array(made.ids, dtype=self.dtype)
        mask = np.zeros(len(made.ids), np.uint8)
        for first, last in spans:
            # Characters that a normaliser drops have no token: the nearest ones inside the span count.
            start = next((at for n in range(first, last) if (at := made.char_to_token(n)) is not None), None)
            end = next((at for n in range(last - 1, first - 1, -1) if (at := made.char_to_token(n)) is not None), None)
            if start is not None and end is not None:
                mask[start : end + 1] = 1
        return ids, mask

    def decode(self, tokens: npt.ArrayLike) -> str:
        with panics_are_faults():
            return self._inner.decode(np.asarray(tokens).astype(np.int64).tolist(), skip_special_tokens=False)


def _rename_specials(tree: dict[str, Any]) -> None:
    """Give the special tokens of a tokenizer.json names that no text has; ids stay.

    `encode_special_tokens` lets added tokens be, but a special token is also an entry of most vocabularies. Unigram,
    WordLevel and BPE with `ignore_merges` look texts up there (tokenizers 0.23.3); SentencePiece looks for pieces of
    text alone."""
    model = tree["model"]
    special = [one for one in tree["added_tokens"] if one["special"] and len(one["content"]) > 1]
    if model.get("byte_fallback"):  # bytes are found by the names of their tokens
        special = [one for one in special if not BYTE_TOKEN.fullmatch(one["content"])]
    names = {one["content"]: f"{NO_TEXT}{one['id']}" for one in special}
    for one in special:
        one["content"] = names[one["content"]]
    if isinstance(model["vocab"], list):
        model["vocab"] = [[names.get(piece, piece), score] for piece, score in model["vocab"]]
    else:
        model["vocab"] = {names.get(piece, piece): index for piece, index in model["vocab"].items()}
    if model.get("unk_token") in names:
        model["unk_token"] = names[model["unk_token"]]
    prefix = model.get("continuing_subword_prefix") or ""
    if "merges" in model:
        model["merges"] = [
            [left, right] for left, right in model["merges"]
            if not names.keys() & {left, right, left + right.removeprefix(prefix)}
        ]  # fmt: skip


@contextlib.contextmanager
def panics_are_faults() -> Iterator[None]:
    """Raises DataError where Rust code fails, by a bare Exception, or panics: that derives from BaseException, past
    every `except`."""
    try:
        yield
    except BaseException as error:
        if not (fails := type(error) is Exception) and type(error).__name__ != "PanicException":
            raise
        raise DataError(f"{'' if fails else 'this tokenizer breaks off: '}{cause_of(error)[:120]}") from None


def keep_merges(inner: tokenizers.Tokenizer) -> None:
    """Turn BPE-dropout off (arXiv 1910.13267), which divides a text in another way each time."""
    if getattr(inner.model, "dropout", None):
        inner.model.dropout = None


def framed_ids(tokenizer_json: str, text: str) -> tuple[list[int], list[int]]:
    """The ids of `text`, without and with the special tokens that transformers puts around it."""
    import tokenizers  # a slow import, so only when it is needed

    with panics_are_faults():
        inner = tokenizers.Tokenizer.from_str(tokenizer_json)
        inner.no_truncation()
        inner.no_padding()
        plain, framed = (inner.encode(text, add_special_tokens=added).ids for added in (False, True))
    return plain, framed


def _essence(text: str) -> object:
    """The parts of a tokenizer.json that decide about ids."""
    tree = json.loads(text)
    return [tree.get(key) for key in ("added_tokens", "normalizer", "pre_tokenizer", "model")]


def open_tokenizer(name: str, folder: DataRoot) -> Tokenizer:
    """The manifest's `data.tokenizer`: "bytes", or the path of a tokenizer.json below `folder`.

    Raises DataError when the file is missing, too long or not a tokenizer, NotPermitted when it is not to be opened.
    """
    if name == "bytes":
        return ByteTokenizer()
    path = folder.find(name)
    unread = os_errors(DataError, f"{path}: tokenizer cannot be read", "; data.tokenizer names it")
    with unread, path.open("rb") as file:
        raw = file.read(TOKENIZER_BYTES_MAX + 1)
    return huggingface_tokenizer(raw, str(path), named_eos(path.parent))


def json_object(raw: bytes) -> dict[str, Any]:
    """The JSON object in `raw`; an empty one where there is none."""
    try:
        tree = json.loads(raw)
    except (ValueError, RecursionError):
        return {}
    return tree if isinstance(tree, dict) else {}


def named_eos(folder: Path) -> str | int | None:
    """The token that ends a text, as the configuration beside a tokenizer.json in `folder` names it, or its id, as that
    of the model does; None without one."""
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        token = config_in(folder, name).get("eos_token")
        token = token.get("content") if isinstance(token, dict) else token
        if isinstance(token, str):
            return token
    return next(iter(model_ends(folder)), None)


def model_ends(folder: Path) -> list[int]:
    """The ids that end what the model in `folder` generates, as transformers takes them from its configuration."""
    for name in ("generation_config.json", "config.json"):
        named = config_in(folder, name).get("eos_token_id")
        if ids := [one for one in (named if isinstance(named, list) else [named]) if type(one) is int]:
            return ids
    return []


def config_in(folder: Path, name: str) -> dict[str, Any]:
    """The JSON object in the file `name` of `folder`; an empty one where there is none."""
    try:
        with (folder / name).open("rb") as file:
            return json_object(file.read(CONFIG_BYTES_MAX))
    except OSError:
        return {}


def huggingface_tokenizer(raw: bytes, path: str, eos: str | int | None = None) -> HuggingFaceTokenizer:
    """The tokenizer in `raw`, the bytes of a tokenizer.json, whose texts end with `eos` (None: a usual name). Raises
    DataError that names `path`."""
    if len(raw) > TOKENIZER_BYTES_MAX:
        raise DataError(f"{path}: longer than {TOKENIZER_BYTES_MAX} bytes; is this a tokenizer.json?")
    refuse_pointer(raw, path)
    import tokenizers  # a slow import, so only when it is needed

    try:
        with panics_are_faults():
            inner = tokenizers.Tokenizer.from_str(raw.decode())
    except Exception as error:  # noqa: BLE001  tokenizers raises bare Exception for a bad file
        raise DataError(f"{path}: not a Hugging Face tokenizer.json: {cause_of(error)[:120]}") from None
    inner.no_truncation()
    inner.no_padding()
    keep_merges(inner)
    tokenizer = HuggingFaceTokenizer(inner, digest("tokenizer", raw), eos)
    if tokenizer.vocabulary < 1:
        raise DataError(f"{path}: this tokenizer has no tokens")
    return tokenizer
