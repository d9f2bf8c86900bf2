"""The chunks in which the head's loss is computed (linear_loss.py), and its memory by formula, without tensors."""

from __future__ import annotations

CHUNK_NBYTES = {"cpu": 16 << 20}
"""Bytes of logits in a chunk, by type of device [measured on one thread of a CPU, vocabulary 49,152, width 256: 1,024
rows in chunks of 2, 8, 16, 64 MiB and all at once take 10.4, 4.9, 4.2, 5.6 and 8.7 s on a busy machine]."""

CHUNK_NBYTES_ELSEWHERE = 256 << 20
"""The same for an accelerator, where each chunk reads and writes the whole gradient of the head once [guess: at a
vocabulary of 128,256 a thousand rows, whose products take longer than that]."""

SOFTMAX_NBYTES = 32 << 20  # guess: of a chunk's logits this much is float32 at a time, if they are narrower
TILE_NBYTES = 64 << 20  # guess: of the head's gradient this much is made at a time, if products are narrower than it
EXACT = 4  # bytes of float32


def chunk_rows(rows: int, vocabulary: int, itemsize: int, kind: str) -> int:
    """Rows in a chunk of logits on a device of type `kind`, of CHUNK_NBYTES at most; `rows` if all fit."""
    nbytes = CHUNK_NBYTES.get(kind, CHUNK_NBYTES_ELSEWHERE)
    return min(rows, max(1, nbytes // (vocabulary * itemsize)))


def head_nbytes(rows: int, vocabulary: int, width: int, *, autocast: bool, kind: str) -> int:
    """Memory that the loss of `rows` rows and its gradients take at their peak beside float32 weights and gradients,
    in products of bfloat16 with `autocast`."""
    product = 2 if autocast else EXACT
    here = chunk_rows(rows, vocabulary, product, kind)
    cast = product * vocabulary * width if autocast else 0
    by_rows = EXACT * rows * width
    if here == rows:
        exact = 3 * EXACT * rows * vocabulary  # logits, their log-softmax, and their gradient
        by_head = (product + EXACT) * vocabulary * width  # before it is added
        return cast + by_rows + max(exact + (product * rows * vocabulary if autocast else 0), by_head)
    tile = min(TILE_NBYTES, product * vocabulary * width) if autocast else 0
    softmax = min(SOFTMAX_NBYTES, EXACT * here * vocabulary)
    return cast + by_rows + product * here * (vocabulary + 2 * width) + max(softmax, tile)
