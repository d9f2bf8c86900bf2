"""The text of tokens, piece by piece, as a model makes them."""

from __future__ import annotations

from collections.abc import Iterator

from swarmnode.data.tokens import Tokenizer

WHOLE_CHARACTER_TOKENS = 8  # derived: a character has four bytes at most; twice that, then it is shown as it is


def pieces(tokenizer: Tokenizer, tokens: Iterator[int], after: str = "") -> Iterator[str]:
    """The text of `tokens`, which go on with the text `after`, as soon as it is complete: a character of several tokens
    waits for its last one. Some tokenizers (Llama 2's) drop the space before a first word, and only before that."""
    ids = [int(token) for token in tokenizer.encode(after)]
    start = 0
    shown = len(ids)
    for token in tokens:
        ids.append(token)
        old = tokenizer.decode(ids[start:shown])
        new = tokenizer.decode(ids[start:])
        complete = not new.endswith("\ufffd") or len(ids) - shown > WHOLE_CHARACTER_TOKENS
        if len(new) > len(old) and complete:
            yield new[len(old) :]
            start = shown
            shown = len(ids)
    rest = tokenizer.decode(ids[start:])[len(tokenizer.decode(ids[start:shown])) :]
    if rest:
        yield rest
