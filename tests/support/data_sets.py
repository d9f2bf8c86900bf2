"""Small data sets as `data make` writes them, for tests."""

import hashlib
from pathlib import Path

import numpy as np

from swarmnode.data.index import INDEX_FILE, Index, ShardEntry, Split, parse_index
from swarmnode.data.tokens import ByteTokenizer, dtype_of


def split(
    folder: Path, name: str, tokens: np.ndarray, chunk_tokens: int, vocabulary: int, mask: np.ndarray | None = None
) -> Split:
    """Write `tokens` as shards of four chunks."""
    chunks = []
    for first in range(0, tokens.size, chunk_tokens):
        part = tokens[first : first + chunk_tokens].astype(dtype_of(vocabulary)).tobytes()
        if mask is not None:
            part += np.packbits(mask[first : first + chunk_tokens], bitorder="little").tobytes()
        chunks.append(part)
    shards = []
    for number, first in enumerate(range(0, len(chunks), 4)):
        inside = chunks[first : first + 4]
        entry = f"{name}-{number:05}.bin"
        (folder / entry).write_bytes(b"".join(inside))
        count = min(tokens.size - first * chunk_tokens, len(inside) * chunk_tokens)
        shards.append(ShardEntry(entry, count, b"".join(hashlib.sha256(chunk).digest() for chunk in inside)))
    return Split(chunk_tokens, 1, tuple(shards))


def data_set(
    folder: Path, chunks: int = 8, chunk_tokens: int = 1025, vocabulary: int = 256, *, loss_mask: bool = False
) -> Index:
    """Training tokens count upwards modulo the vocabulary, so a window tells where it is from."""
    folder.mkdir(parents=True, exist_ok=True)
    tokens = np.arange(chunks * chunk_tokens) * 7 % vocabulary
    held_out = (np.arange(2 * chunk_tokens) * 7 + 3) % vocabulary
    masks = [(part % 3 > 0) if loss_mask else None for part in (tokens, held_out)]
    made = Index(
        tokenizer=ByteTokenizer.digest,
        vocabulary=vocabulary,
        end_token=0,
        loss_mask=loss_mask,
        train=split(folder, "train", tokens, chunk_tokens, vocabulary, masks[0]),
        validation=split(folder, "validation", held_out, chunk_tokens, vocabulary, masks[1]),
    )
    raw = made.canonical()
    (folder / INDEX_FILE).write_bytes(raw)
    return parse_index(raw)
