"""Taking out of logs what is nobody's business: addresses, names of machines and people, secrets. Pure.

The same address becomes the same word all through one bundle, so that what happened between two machines can still be
followed. Peer ids stay: they are public, and without them a log says nothing.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

_IP4 = re.compile(r"(?<![\d.])(?:\d{1,3}\.){3}\d{1,3}(?![\d.])")
_HEX = r"[0-9A-Fa-f]{1,4}"
_IP6 = re.compile(
    rf"(?<![\w:])(?:(?:{_HEX}:){{7}}{_HEX}|(?:{_HEX}(?::{_HEX}){{0,6}})?::(?:{_HEX}(?::{_HEX}){{0,6}})?)(?![\w:])"
)
_DNS = re.compile(r"(/dns[46]?/)([^/\s\"]+)")
_URL_USER = re.compile(r"(\w+://)[^/@\s\"]+@")
_SECRET = re.compile(
    r"(?i)(\"?[\w-]*(?:secret|password|passwd|token(?!s|iz)|api[_-]?key|credential|authorization|invite)[\w-]*\"?\s*[:=]\s*)"
    r"(\"[^\"]*\"|[^\s,;}]+)"
)
_INVITE = re.compile(r"\bswarm\d+\.[A-Za-z0-9_\-]{20,}")
_AWS_KEY = re.compile(r"\b(?:AKIA|ASIA)[0-9A-Z]{16}\b")
_PUBLIC = ("127.", "0.0.0.0", "169.254.169.254", "255.255.255.255")
HIDDEN = "[hidden]"


class Redactor:
    """`text` without addresses, secrets, and `words` (path of a home, a user's name, a machine's), each replaced by
    what it is called in `words`."""

    def __init__(self, words: Sequence[tuple[str, str]] = ()) -> None:
        # Longest first: a home's path holds its owner's name.
        self._words = sorted(((word, name) for word, name in words if len(word) > 2), key=lambda pair: -len(pair[0]))
        self._known: dict[str, str] = {}
        self.hidden = 0

    def text(self, text: str) -> str:
        """`text` as it may be shown to others."""
        text = _URL_USER.sub(rf"\1{HIDDEN}@", text)
        text = _SECRET.sub(self._secret, text)
        text = _INVITE.sub(self._count, text)
        text = _AWS_KEY.sub(self._count, text)
        text = _DNS.sub(lambda found: found[1] + self._name(found[2], "host"), text)
        text = _IP4.sub(self._ip4, text)
        text = _IP6.sub(lambda found: found[0] if found[0] in ("::", "::1") else self._name(found[0], "ip6"), text)
        for word, name in self._words:
            text = text.replace(word, name)
        return text

    def _secret(self, found: re.Match[str]) -> str:
        self.hidden += 1
        quote = '"' if found[2].startswith('"') else ""
        return f"{found[1]}{quote}{HIDDEN}{quote}"

    def _count(self, found: re.Match[str]) -> str:
        self.hidden += 1
        return HIDDEN

    def _ip4(self, found: re.Match[str]) -> str:
        if found[0].startswith(_PUBLIC) or any(int(part) > 255 for part in found[0].split(".")):
            return found[0]
        return self._name(found[0], "ip4")

    def _name(self, what: str, kind: str) -> str:
        self.hidden += 1
        return self._known.setdefault(what, f"{kind}-{len(self._known) + 1}")
