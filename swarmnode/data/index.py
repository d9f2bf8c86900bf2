"""The content-addressed data set format: the index lists every chunk's SHA-256, the manifest holds the index's SHA-256.

A data set is a folder: `index.json`, shards, and the tokenizer's `tokenizer.json` if it has one. A shard is a sequence
of chunks without a header. A chunk of n tokens is n little-endian ids of 2 or 4 bytes. If the index sets `loss_mask`,
ceil(n / 8) mask bytes follow. Their bit i (least significant first, `numpy.packbits(bitorder="little")`) says whether
token i counts as a target. Each document ends with the token `end_token`, which counts like any other. All chunks of a
split have `chunk_tokens` tokens except the last, which may have fewer.

The index is canonical JSON (keys sorted, no spaces, ASCII), so one content has one hash.
"""

from __future__ import annotations

import bisect
import functools
import hashlib
import itertools
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, TypeVar

import numpy as np

from swarmnode.base.errors import DataError
from swarmnode.base.ports import Telemetry
from swarmnode.data.tokens import dtype_of

INDEX_FILE = "index.json"
TOKENIZER_FILE = "tokenizer.json"
FORMAT = "swarmnode-data-1"
INDEX_NBYTES_MAX = 32 << 20
"""Enough for two terabytes of tokens in chunks of 4 MiB."""
CHUNK_NBYTES = 4 << 20
CHUNK_NBYTES_MAX = CHUNK_NBYTES + (CHUNK_NBYTES >> 3)
SHARDS_MAX = 1 << 16
TOKENS_MAX = 1 << 50
VOCABULARY_MAX = 1 << 24  # the same limit as model.vocabulary
HASH_NBYTES = 32

_SHARD = re.compile(r"[a-z]{1,16}-[0-9]{5}\.bin")
_HEX = re.compile(r"[0-9a-f]{64}")
_KEYS = frozenset({"format", "tokenizer", "vocabulary", "end_token", "loss_mask", "train", "validation"})


@dataclass(frozen=True, slots=True)
class Chunk:
    """One chunk: bytes [offset, offset + nbytes) of `shard`; `number` counts the index's chunks, training first."""

    number: int
    shard: str
    offset: int
    nbytes: int
    tokens: int
    sha256: bytes


@dataclass(frozen=True, slots=True)
class ShardEntry:
    """`hashes`: SHA-256 of each chunk, 32 bytes each in a row."""

    name: str
    tokens: int
    hashes: bytes


@dataclass(frozen=True)
class Split:
    """Training or held-out text: `count` chunks of `chunk_tokens` tokens each, the last may have fewer."""

    chunk_tokens: int
    documents: int
    shards: tuple[ShardEntry, ...]

    @functools.cached_property
    def tokens(self) -> int:
        return sum(shard.tokens for shard in self.shards)

    @functools.cached_property
    def ends(self) -> list[int]:
        """For each shard, the number of the first chunk after it."""
        return list(itertools.accumulate(len(shard.hashes) // HASH_NBYTES for shard in self.shards))

    @property
    def count(self) -> int:
        return self.ends[-1] if self.ends else 0


@dataclass(frozen=True, slots=True)
class Index:
    """The content of `index.json`. `digest` is the SHA-256 of its bytes, `tokenizer` the tokenizer's (tokens.py)."""

    tokenizer: bytes
    vocabulary: int
    end_token: int
    loss_mask: bool
    train: Split
    validation: Split
    digest: bytes = b""

    FIELD: ClassVar = "data.index"
    FILE: ClassVar = INDEX_FILE
    PUBLISHED: ClassVar = True
    BARE_FOLDER: ClassVar = False

    @classmethod
    def parse(cls, raw: bytes, expected: bytes, origin: str) -> Index:
        return parse_index(raw, expected, origin)

    def tell_opened(self, telemetry: Telemetry, note: str) -> None:
        train = self.train.tokens
        validation = self.validation.tokens
        telemetry.event(
            "data.opened", digest=self.digest.hex(), tokens_train=train, tokens_validation=validation, note=note
        )

    @property
    def dtype(self) -> np.dtype[Any]:
        return dtype_of(self.vocabulary)

    @property
    def count(self) -> int:
        """The number of chunks in both splits."""
        return self.train.count + self.validation.count

    def chunk_nbytes(self, tokens: int) -> int:
        return chunk_nbytes(tokens, self.vocabulary, loss_mask=self.loss_mask)

    def chunk(self, number: int) -> Chunk:
        """Chunk `number` of [0, count). Validation chunks come after training chunks."""
        split = self.train
        local = number
        if local >= split.count:
            split = self.validation
            local = number - self.train.count
        if not 0 <= local < split.count:
            raise IndexError(number)
        at = bisect.bisect_right(split.ends, local)
        shard = split.shards[at]
        local -= split.ends[at - 1] if at else 0
        tokens = min(split.chunk_tokens, shard.tokens - local * split.chunk_tokens)
        sha256 = shard.hashes[local * HASH_NBYTES : (local + 1) * HASH_NBYTES]
        offset = local * self.chunk_nbytes(split.chunk_tokens)
        return Chunk(number, shard.name, offset, self.chunk_nbytes(tokens), tokens, sha256)

    def canonical(self) -> bytes:
        """The bytes of index.json."""
        tree = {
            "format": FORMAT,
            "tokenizer": self.tokenizer.hex(),
            "vocabulary": self.vocabulary,
            "end_token": self.end_token,
            "loss_mask": self.loss_mask,
            "train": _split_tree(self.train),
            "validation": _split_tree(self.validation),
        }
        return json.dumps(tree, sort_keys=True, separators=(",", ":")).encode("ascii")


def chunk_nbytes(tokens: int, vocabulary: int, *, loss_mask: bool) -> int:
    """The size in bytes of a chunk of `tokens` tokens."""
    return tokens * dtype_of(vocabulary).itemsize + (-(-tokens // 8) if loss_mask else 0)


def checked_digest(raw: bytes, expected: bytes | None, origin: str, what: str) -> bytes:
    """The SHA-256 of the index `raw`. Raises DataError if it is too long to be `what`, or another one than
    `expected`."""
    if len(raw) > INDEX_NBYTES_MAX:
        raise DataError(f"{origin}: {len(raw)} bytes, at most {INDEX_NBYTES_MAX}; is this {what}?")
    digest = hashlib.sha256(raw).digest()
    if expected is not None and digest != expected:
        raise DataError(f"{origin}: SHA-256 {digest.hex()[:16]}..., the run's is {expected.hex()[:16]}...")
    return digest


class _Canonical(Protocol):
    def canonical(self) -> bytes: ...


AnyIndex = TypeVar("AnyIndex", bound=_Canonical)


def parsed(
    raw: bytes, expected: bytes | None, origin: str, what: str, of: Callable[[Any, bytes], AnyIndex], makes: str
) -> AnyIndex:
    """The index `of` makes of the JSON in `raw` and its SHA-256, which is `expected` (None accepts any). `what` it is,
    and the command that `makes` one. Raises DataError with a message that begins with `origin`."""
    digest = checked_digest(raw, expected, origin, what)
    try:
        tree = json.loads(raw.decode("ascii"))
    except (ValueError, RecursionError):
        raise DataError(f"{origin}: not JSON; `{makes}` makes {what}") from None
    try:
        index = of(tree, digest)
    except (KeyError, TypeError, ValueError) as error:
        raise DataError(f"{origin}: {str(error)[:160]}; `{makes}` makes {what}") from None
    if index.canonical() != raw:
        raise DataError(f"{origin}: not in canonical form; made by another version of swarmnode?")
    return index


def parse_index(raw: bytes, expected: bytes | None = None, origin: str = "index") -> Index:
    """Parses the index `raw` and checks its size, hash, form and every number. Raises DataError as `parsed`."""
    return parsed(raw, expected, origin, "an index", _index_of, "swarmnode data make")


def _index_of(tree: Any, digest: bytes) -> Index:
    if not isinstance(tree, dict) or tree.get("format") != FORMAT or tree.keys() != _KEYS:
        raise ValueError(f"no index of format {FORMAT}")
    vocabulary = _whole(tree, "vocabulary", 1, VOCABULARY_MAX)
    if type(tree["loss_mask"]) is not bool:
        raise ValueError("loss_mask is neither true nor false")
    index = Index(
        tokenizer=hashes_of([tree["tokenizer"]]),
        vocabulary=vocabulary,
        end_token=_whole(tree, "end_token", 0, vocabulary - 1),
        loss_mask=tree["loss_mask"],
        train=_split_of(tree["train"], "train"),
        validation=_split_of(tree["validation"], "validation"),
        digest=digest,
    )
    for split in (index.train, index.validation):
        if index.chunk_nbytes(split.chunk_tokens) > CHUNK_NBYTES_MAX:
            raise ValueError(f"chunks of {split.chunk_tokens} tokens are larger than {CHUNK_NBYTES_MAX} bytes")
    names = [shard.name for split in (index.train, index.validation) for shard in split.shards]
    if len(set(names)) < len(names):
        raise ValueError("two shards of one name")
    return index


def _split_of(tree: Any, name: str) -> Split:
    if not isinstance(tree, dict) or tree.keys() != {"chunk_tokens", "documents", "shards"}:
        raise ValueError(f"{name}: no split")
    given = tree["shards"]
    chunk_tokens = _whole(tree, "chunk_tokens", 2, CHUNK_NBYTES)
    if not isinstance(given, list) or len(given) > SHARDS_MAX:
        raise ValueError(f"{name}: at most {SHARDS_MAX} shards")
    shards = []
    for number, shard in enumerate(given):
        if not isinstance(shard, dict) or shard.keys() != {"name", "tokens", "sha256"}:
            raise ValueError(f"{name}: shard {number} is none")
        if type(shard["name"]) is not str or not _SHARD.fullmatch(shard["name"]):
            raise ValueError(f"{name}: shard {number} has no name like train-00000.bin")
        tokens = _whole(shard, "tokens", 1, TOKENS_MAX)
        hashes = shard["sha256"]
        if number + 1 < len(given) and tokens % chunk_tokens:
            raise ValueError(f"{shard['name']}: only the last chunk of a split may be short")
        if not isinstance(hashes, list) or len(hashes) != -(-tokens // chunk_tokens):
            raise ValueError(f"{shard['name']}: {tokens} tokens need {-(-tokens // chunk_tokens)} hashes")
        shards.append(ShardEntry(shard["name"], tokens, hashes_of(hashes)))
    return Split(chunk_tokens, _whole(tree, "documents", 0, TOKENS_MAX), tuple(shards))


def _split_tree(split: Split) -> dict[str, Any]:
    shards = [
        {
            "name": shard.name,
            "tokens": shard.tokens,
            "sha256": hex_of(shard.hashes),
        }
        for shard in split.shards
    ]
    return {"chunk_tokens": split.chunk_tokens, "documents": split.documents, "shards": shards}


def _whole(tree: dict[str, Any], key: str, low: int, high: int) -> int:
    value = tree[key]
    if type(value) is not int or not low <= value <= high:
        raise ValueError(f"{key} is not a whole number from {low} to {high}")
    return value


def hashes_of(texts: Sequence[Any]) -> bytes:
    """The SHA-256 in `texts`, one after the other. Raises ValueError for what is none."""
    if not all(type(text) is str and _HEX.fullmatch(text) for text in texts):
        raise ValueError("a SHA-256 is not 64 hex digits")
    return bytes.fromhex("".join(texts))


def hex_of(hashes: bytes) -> list[str]:
    """Each SHA-256 of `hashes` as text."""
    return [hashes[at : at + HASH_NBYTES].hex() for at in range(0, len(hashes), HASH_NBYTES)]
