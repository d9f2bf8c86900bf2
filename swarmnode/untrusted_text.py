"""Make text from others safe for terminals, log lines and pages. This is the only place that does so."""

from __future__ import annotations

REASON_CHARACTERS_MAX = 512  # guess: longer error texts repeat themselves


def readable(text: str) -> str:
    """`text` of several lines: each control, format and surrogate character but a newline or a tab is replaced by a
    space. A model's own words may be a stranger's."""
    return "".join(one if one.isprintable() or one in "\n\t" else " " for one in text)


def printable(text: str, characters_max: int = REASON_CHARACTERS_MAX) -> str:
    """`text` on one line, each control, format and surrogate character replaced by a space, cut to `characters_max`.

    Terminals act on control characters (ECMA-48), and format characters (Unicode category Cf) reorder the displayed
    text.
    """
    text = text[:characters_max]
    if text.isprintable():
        return text
    return "".join(character if character.isprintable() else " " for character in text)
