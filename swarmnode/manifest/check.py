"""Is one value of a manifest what it should be? A check names what it allows, so that errors and comments agree."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

COUNT_MAX = 1 << 40
BYTES_MAX = 1 << 40
TEXT_MAX = 1024
PATHS_MAX = 256
SCHEMES = ("s3", "gs", "az")
_BUCKET = re.compile(rf"(?:{'|'.join(SCHEMES)})://([a-z0-9][a-z0-9.-]{{1,61}}[a-z0-9])(?:/[A-Za-z0-9._-]+)*/?")
_IP4 = re.compile(r"[0-9.]+")

Value = int | float | str | tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Check:
    """`accept(raw)` returns the value in its own type, or None when `raw` is not `allowed`."""

    allowed: str
    accept: Callable[[Any], Value | None]


def whole(low: int, high: int) -> Check:
    """An integer in [low, high]."""

    def accept(raw: Any) -> Value | None:
        return raw if type(raw) is int and low <= raw <= high else None

    return Check(f"a whole number from {low:_} to {high:_}", accept)


def odd(low: int, high: int) -> Check:
    """An odd integer in [low, high]."""

    def accept(raw: Any) -> Value | None:
        return raw if type(raw) is int and low <= raw <= high and raw % 2 == 1 else None

    return Check(f"an odd whole number from {low:_} to {high:_}", accept)


def real(low: float, high: float, *, above: bool = False, below: bool = False) -> Check:
    """A finite number in [low, high]; `above` and `below` leave the ends out. An integer is taken as a float."""

    def accept(raw: Any) -> Value | None:
        if type(raw) is int and abs(raw) <= 1 << 53:
            raw = float(raw)
        if type(raw) is not float or not math.isfinite(raw) or not low <= raw <= high:
            return None
        return None if (above and raw == low) or (below and raw == high) else raw

    lower = f"above {low:g}" if above else f"at least {low:g}"
    upper = f"below {high:g}" if below else f"at most {high:g}"
    return Check(f"a number {lower} and {upper}", accept)


def one_of(*choices: str) -> Check:
    """One of a few words."""

    def accept(raw: Any) -> Value | None:
        return raw if type(raw) is str and raw in choices else None

    return Check(" or ".join(f'"{choice}"' for choice in choices), accept)


def word_or(word: str, otherwise: Check) -> Check:
    """The one word `word`, or what `otherwise` accepts."""

    def accept(raw: Any) -> Value | None:
        return raw if type(raw) is str and raw == word else otherwise.accept(raw)

    return Check(f'"{word}" or {otherwise.allowed}', accept)


def matching(pattern: str, allowed: str) -> Check:
    """Text that `pattern` matches as a whole."""
    compiled = re.compile(pattern)

    def accept(raw: Any) -> Value | None:
        return raw if type(raw) is str and compiled.fullmatch(raw) else None

    return Check(allowed, accept)


def text() -> Check:
    """Printable text that is not empty."""

    def accept(raw: Any) -> Value | None:
        return raw if _is_plain(raw) else None

    return Check(f"text of 1 to {TEXT_MAX} printable characters", accept)


PATH = 'a path below the data folder ("/" between names; none empty, "..", hidden or beginning with "~")'


def path() -> Check:
    """A path that cannot lead out of the folder it begins in, unless by a symbolic link there."""

    def accept(raw: Any) -> Value | None:
        return raw if is_below(raw) else None

    return Check(PATH, accept)


def paths() -> Check:
    """A list of such paths; empty is allowed here."""

    def accept(raw: Any) -> Value | None:
        if not isinstance(raw, list | tuple) or len(raw) > PATHS_MAX or not all(is_below(item) for item in raw):
            return None
        return tuple(raw)

    return Check(f"a list of at most {PATHS_MAX}, each {PATH}", accept)


def bucket() -> Check:
    """A place in a bucket, which names no host: those of the cloud, or of the endpoint in the environment of whoever
    opts in. "" is allowed here.

    Bucket names are those of S3 (Amazon S3 user guide, "General purpose bucket naming rules"), without IP addresses and
    ARNs; Google's and Azure's are of the same letters.
    """

    def accept(raw: Any) -> Value | None:
        if type(raw) is not str or len(raw) > TEXT_MAX:
            return None
        found = _BUCKET.fullmatch(raw)
        if raw and (found is None or _IP4.fullmatch(found[1]) or ".." in raw):
            return None
        return raw

    return Check(f'"" or {" or ".join(f"{scheme}://BUCKET/PREFIX" for scheme in SCHEMES)}', accept)


def is_below(raw: Any) -> bool:
    """Whether `raw` is a path as `path` allows it."""
    if not _is_plain(raw) or "\\" in raw or raw.startswith("~"):
        return False
    return all(name and not name.startswith(".") for name in raw.removeprefix("./").split("/"))


def _is_plain(raw: Any) -> bool:
    return type(raw) is str and 0 < len(raw) <= TEXT_MAX and raw.isprintable()


@dataclass(frozen=True, slots=True)
class Field:
    """One key: `table` is "" for the top level. `origin` signs the default (paper, measured or guess)."""

    table: str
    key: str
    check: Check
    meaning: str
    origin: str

    @property
    def name(self) -> str:
        return f"{self.table}.{self.key}" if self.table else self.key
