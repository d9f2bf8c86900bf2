"""Checks of single manifest values. A check states what it allows, so that errors and comments agree."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

COUNT_MAX = 1 << 40
BYTES_MAX = 1 << 40
TEXT_MAX = 1024
SCHEMES = ("s3", "gs", "az")
_BUCKET = re.compile(rf"(?:{'|'.join(SCHEMES)})://([a-z0-9][a-z0-9.-]{{1,61}}[a-z0-9])(?:/[A-Za-z0-9._-]+)*/?")
_IP4 = re.compile(r"[0-9.]+")

Value = int | float | str | tuple[str, ...] | tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ValueCheck:
    """`accept(raw)` returns the value in its own type, or None if `raw` is not `allowed`."""

    allowed: str
    accept: Callable[[Any], Value | None]


def whole(low: int, high: int) -> ValueCheck:
    """An integer in [low, high]."""

    def accept(raw: Any) -> Value | None:
        return raw if type(raw) is int and low <= raw <= high else None

    return ValueCheck(f"a whole number from {low:_} to {high:_}", accept)


def odd(low: int, high: int) -> ValueCheck:
    """An odd integer in [low, high]."""

    def accept(raw: Any) -> Value | None:
        return raw if type(raw) is int and low <= raw <= high and raw % 2 == 1 else None

    return ValueCheck(f"an odd whole number from {low:_} to {high:_}", accept)


def flag() -> ValueCheck:
    """true or false."""

    def accept(raw: Any) -> Value | None:
        return raw if type(raw) is bool else None

    return ValueCheck("true or false", accept)


def numbers(high: int) -> ValueCheck:
    """Different integers in [0, high], in ascending order; may be empty."""

    def accept(raw: Any) -> Value | None:
        if not isinstance(raw, list | tuple) or len(raw) > high + 1:
            return None
        if not all(type(item) is int and 0 <= item <= high for item in raw) or sorted(set(raw)) != list(raw):
            return None
        return tuple(raw)

    return ValueCheck(f"a list of different whole numbers from 0 to {high:_}, in ascending order", accept)


def real(low: float, high: float, *, above: bool = False, below: bool = False) -> ValueCheck:
    """A finite number in [low, high]; `above` and `below` exclude the ends. An integer becomes a float."""

    def accept(raw: Any) -> Value | None:
        if type(raw) is int and abs(raw) <= 1 << 53:
            raw = float(raw)
        if type(raw) is not float or not math.isfinite(raw) or not low <= raw <= high:
            return None
        return None if (above and raw == low) or (below and raw == high) else raw

    lower = f"above {low:g}" if above else f"at least {low:g}"
    upper = f"below {high:g}" if below else f"at most {high:g}"
    return ValueCheck(f"a number {lower} and {upper}", accept)


def one_of(*choices: str) -> ValueCheck:
    """An of `choices`."""

    def accept(raw: Any) -> Value | None:
        return raw if type(raw) is str and raw in choices else None

    return ValueCheck(" or ".join(f'"{choice}"' for choice in choices), accept)


def some_of(*choices: str) -> ValueCheck:
    """A non-empty list of different `choices`."""

    def accept(raw: Any) -> Value | None:
        if not isinstance(raw, list | tuple) or not raw or not all(type(item) is str for item in raw):
            return None
        return tuple(raw) if len(set(raw)) == len(raw) and set(raw) <= set(choices) else None

    return ValueCheck("a list of different names among " + ", ".join(choices), accept)


def word_or(word: str, otherwise: ValueCheck) -> ValueCheck:
    """The word `word`, or what `otherwise` accepts."""

    def accept(raw: Any) -> Value | None:
        return raw if type(raw) is str and raw == word else otherwise.accept(raw)

    return ValueCheck(f'"{word}" or {otherwise.allowed}', accept)


def matching(pattern: str, allowed: str) -> ValueCheck:
    """Text that `pattern` matches as a whole."""
    compiled = re.compile(pattern)

    def accept(raw: Any) -> Value | None:
        return raw if type(raw) is str and compiled.fullmatch(raw) else None

    return ValueCheck(allowed, accept)


def text() -> ValueCheck:
    """Non-empty printable text."""

    def accept(raw: Any) -> Value | None:
        return raw if _is_plain(raw) else None

    return ValueCheck(f"text of 1 to {TEXT_MAX} printable characters", accept)


PATH = 'a path below the data folder ("/" between names; none empty, "..", hidden or beginning with "~")'


def path() -> ValueCheck:
    """A path that cannot leave its folder, except by a symbolic link there."""

    def accept(raw: Any) -> Value | None:
        return raw if is_below(raw) else None

    return ValueCheck(PATH, accept)


def list_of(item: ValueCheck, most: int, *, different: bool = True) -> ValueCheck:
    """A list of at most `most` texts, each as `item` allows; may be empty. `different`: none stands twice."""

    def accept(raw: Any) -> Value | None:
        if not isinstance(raw, list | tuple) or len(raw) > most:
            return None
        if any(type(each) is not str or item.accept(each) is None for each in raw):
            return None
        return tuple(raw) if not different or len(set(raw)) == len(raw) else None

    return ValueCheck(f"a list of at most {most}{' different ones' * different}, each {item.allowed}", accept)


def bucket() -> ValueCheck:
    """A place in a bucket, without a host: the cloud's own, or the endpoint in the environment of the user who opts in.
    May be "".

    Bucket names are those of S3 (Amazon S3 user guide, "General purpose bucket naming rules"), without IP addresses and
    ARNs; Google's and Azure's use the same letters.
    """

    def accept(raw: Any) -> Value | None:
        if type(raw) is not str or len(raw) > TEXT_MAX:
            return None
        match = _BUCKET.fullmatch(raw)
        if raw and (match is None or _IP4.fullmatch(match[1]) or ".." in raw):
            return None
        return raw

    return ValueCheck(f'"" or {" or ".join(f"{scheme}://BUCKET/PREFIX" for scheme in SCHEMES)}', accept)


def is_below(raw: Any) -> bool:
    """Whether `raw` is a path that `path` allows."""
    if not _is_plain(raw) or "\\" in raw or raw.startswith("~"):
        return False
    return all(name and not name.startswith(".") for name in raw.removeprefix("./").split("/"))


def _is_plain(raw: Any) -> bool:
    return type(raw) is str and 0 < len(raw) <= TEXT_MAX and raw.isprintable()
