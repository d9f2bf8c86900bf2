"""Text files that people write, as their editors save them."""

from __future__ import annotations

import codecs


def decoded(raw: bytes) -> str:
    """The text of `raw`: UTF-8 with or without a byte order mark, which editors on Windows write; or UTF-16 with one,
    which PowerShell's redirection writes. Raises UnicodeDecodeError."""
    if raw.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return raw.decode("utf-16")
    return raw.decode("utf-8-sig")
