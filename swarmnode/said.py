"""Text that others wrote, made fit for a terminal, a log line and a page: the one place where that is done."""

from __future__ import annotations

REASON_CHARACTERS_MAX = 512  # guess: an error's text; longer ones repeat themselves


def printable(text: str, characters_max: int = REASON_CHARACTERS_MAX) -> str:
    """`text` on one line, every control, format and surrogate character replaced by a space, cut to `characters_max`.

    A terminal acts on control characters (ECMA-48), and format characters (Unicode category Cf) reorder what is read.
    """
    text = text[:characters_max]
    if text.isprintable():
        return text
    return "".join(character if character.isprintable() else " " for character in text)
