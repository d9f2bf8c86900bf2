"""What strangers say, made fit to be shown: one line, no control characters, no addresses, names for ids. Pure."""

from __future__ import annotations

import re
from collections.abc import Callable

_ID = re.compile(r"\b(12D3Koo[1-9A-HJ-NP-Za-km-z]{45}|[1-9A-HJ-NP-Za-km-z]{8})\b")
_ADDRESS = re.compile(r"/(?:ip4|ip6|dns[46]?)/\S+")


def named(text: str, name_of: Callable[[str], str | None]) -> str:
    """`text` with names in the place of peer ids, whole or their last eight characters; ids nobody knows are cut."""
    return _ID.sub(lambda match: name_of(match[0]) or match[0][-8:], text)


def brief(reason: str) -> str:
    """An error's text without what only its finder can use: addresses, and how each dial of them failed."""
    return _ADDRESS.sub("its address", reason.partition(": failed to dial")[0])


def clean(text: str) -> str:
    """`text` of a stranger without control characters, on one line."""
    return "".join(character if character.isprintable() else " " for character in text).strip()


def number(text: str | None) -> float | None:
    """A finite number, or None."""
    try:
        value = float(text) if text is not None else None
    except ValueError:
        return None
    return value if value is not None and abs(value) != float("inf") and value == value else None
