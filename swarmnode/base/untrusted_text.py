"""Make text from others safe for terminals, log lines, chats and pages. This is the only place that does so."""

from __future__ import annotations

import re

WIDE = str.maketrans("<>&*_~`[]|@#\\$", "＜＞＆＊＿～｀［］｜＠＃＼＄")
"""Characters that chats read as mentions, links or styles, with wide ones that look alike."""
MARKDOWN = str.maketrans(dict.fromkeys("<>[]|`\\*_#") | {key: chr(WIDE[ord(key)]) for key in "&~$"})
"""Those that Markdown reads, dropped, or where they are common in prose with wide ones."""
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


def chat_text(text: str) -> str:
    """`text` as Slack, Mattermost, Discord and Matrix show it letter by letter. They make a link of a bare `a.example`,
    too, so a full stop or colon within a word is a wide one."""
    text = text.translate(WIDE).replace("://", ":／／")
    return re.sub(r"(?<=\w)[.:](?=[^\W\d])", lambda found: {".": "．", ":": "："}[found[0]], text)


def markdown_text(text: str, characters_max: int = 400) -> str:
    """`text` as one line of Markdown without markup, HTML, links or mentions, which GitHub makes of `www.` and `@` at a
    word's beginning, too."""
    line = printable(text, characters_max).translate(MARKDOWN).replace("://", ": //")
    return re.sub(r"(?<!\w)@", "＠", re.sub(r"(?i)\bwww\.", "www ", line)).strip()
