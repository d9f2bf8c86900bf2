"""Tokenizers, from text to ids: the built-in `bytes`, or any Hugging Face tokenizer.json."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt

from swarmnode.data.root import DataRoot
from swarmnode.errors import DataError
from swarmnode.ids import digest
from swarmnode.manifest import BYTES_END

if TYPE_CHECKING:
    import tokenizers

Tokens = npt.NDArray[np.uint16] | npt.NDArray[np.uint32]

TOKENIZER_BYTES_MAX = 64 << 20
SEPARATOR_NAMES = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "[SEP]")
"""Names under which public tokenizers keep their end-of-document token, most common first."""


class Tokenizer(Protocol):
    """Produces ids below `vocabulary`. `digest` (32 bytes) identifies the tokenizer. `separator` ends documents."""

    @property
    def vocabulary(self) -> int: ...

    @property
    def digest(self) -> bytes: ...

    @property
    def separator(self) -> int | None: ...

    def encode(self, text: str | bytes) -> Tokens:
        """Token ids, [n], of `dtype_of(vocabulary)`."""
        ...

    def encode_all(self, texts: Sequence[bytes]) -> list[Tokens]:
        """Encode several texts at once."""
        ...

    def decode(self, tokens: npt.ArrayLike) -> str: ...


def dtype_of(vocabulary: int) -> np.dtype[Any]:
    """The smallest of uint16 and uint32 (little endian) that holds every id."""
    return np.dtype("<u2") if vocabulary <= 1 << 16 else np.dtype("<u4")


class ByteTokenizer:
    """Uses UTF-8 bytes as ids. Byte 0, which text does not contain, separates documents."""

    vocabulary = 256
    separator = BYTES_END
    digest = digest("tokenizer", "bytes")

    def encode(self, text: str | bytes) -> Tokens:
        raw = text.encode(errors="replace") if isinstance(text, str) else text
        return np.frombuffer(raw, dtype=np.uint8).astype("<u2")

    def encode_all(self, texts: Sequence[bytes]) -> list[Tokens]:
        return [self.encode(text) for text in texts]

    def decode(self, tokens: npt.ArrayLike) -> str:
        return np.asarray(tokens).astype(np.uint8).tobytes().decode(errors="replace")


class HuggingFaceTokenizer:
    """A tokenizer.json, without the special tokens that its template would add."""

    def __init__(self, inner: tokenizers.Tokenizer, file_digest: bytes) -> None:
        self._inner = inner
        self.digest = file_digest
        # Ids may have gaps, so the largest id determines the vocabulary.
        ids = inner.get_vocab(with_added_tokens=True)
        self.vocabulary = max(ids.values(), default=-1) + 1
        self.separator = next((ids[name] for name in SEPARATOR_NAMES if name in ids), None)
        self._dtype = dtype_of(self.vocabulary)

    def encode(self, text: str | bytes) -> Tokens:
        return self.encode_all([text.encode(errors="replace") if isinstance(text, str) else text])[0]

    def encode_all(self, texts: Sequence[bytes]) -> list[Tokens]:
        decoded = [text.decode(errors="replace") for text in texts]
        made = self._inner.encode_batch_fast(decoded, add_special_tokens=False)  # without offsets, which are not used
        return [np.array(one.ids, dtype=self._dtype) for one in made]

    def decode(self, tokens: npt.ArrayLike) -> str:
        return self._inner.decode(np.asarray(tokens).astype(np.int64).tolist(), skip_special_tokens=False)


def open_tokenizer(name: str, folder: DataRoot) -> Tokenizer:
    """The manifest's `data.tokenizer`: "bytes", or the path of a tokenizer.json below `folder`.

    Raises DataError when the file is missing, too long or not a tokenizer, NotPermitted when it is not to be opened.
    """
    if name == "bytes":
        return ByteTokenizer()
    path = folder.find(name)
    try:
        with path.open("rb") as file:
            raw = file.read(TOKENIZER_BYTES_MAX + 1)
    except OSError as error:
        raise DataError(f"{path}: tokenizer cannot be read: {error.strerror}; data.tokenizer names it") from error
    return huggingface_tokenizer(raw, str(path))


def huggingface_tokenizer(raw: bytes, path: str) -> HuggingFaceTokenizer:
    """The tokenizer in `raw`, the bytes of a tokenizer.json. Raises DataError that names `path`."""
    if len(raw) > TOKENIZER_BYTES_MAX:
        raise DataError(f"{path}: longer than {TOKENIZER_BYTES_MAX} bytes; is this a tokenizer.json?")
    import tokenizers  # a slow import, so only when it is needed

    try:
        inner = tokenizers.Tokenizer.from_str(raw.decode())
    except Exception as error:  # noqa: BLE001  tokenizers raises bare Exception for a bad file
        raise DataError(f"{path}: not a Hugging Face tokenizer.json: {str(error)[:120]}") from None
    inner.no_truncation()
    inner.no_padding()
    tokenizer = HuggingFaceTokenizer(inner, digest("tokenizer", raw))
    if tokenizer.vocabulary < 1:
        raise DataError(f"{path}: this tokenizer has no tokens")
    return tokenizer
