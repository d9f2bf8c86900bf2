"""Durations on the command line: 90, 90s, 1m30s, 2h, 500ms."""

from __future__ import annotations

import re

import click

UNITS_S = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
DURATION_MAX_S = 366 * 86400.0

_PART = re.compile(r"(\d+(?:\.\d+)?)(ms|s|m|h|d)")
_PLAIN = re.compile(r"\d+(?:\.\d+)?\Z")


def parse_duration(text: str) -> float:
    """The seconds of `text`. Raises ValueError unless it is a positive number (of seconds) or has units, large to
    small."""
    text = text.strip().lower()
    if _PLAIN.match(text):
        seconds = float(text)
    else:
        parts = _PART.findall(text)
        sizes = [UNITS_S[unit] for _, unit in parts]
        if not parts or "".join(number + unit for number, unit in parts) != text or sizes != sorted(set(sizes))[::-1]:
            raise ValueError("not a duration: use 90s, 1m30s, 2h or 500ms")
        seconds = sum(float(number) * UNITS_S[unit] for number, unit in parts)
    if not 0 < seconds <= DURATION_MAX_S:
        raise ValueError("a duration is more than 0 and at most a year")
    return seconds


class Duration(click.ParamType[float]):
    """A click parameter type that converts a duration to seconds."""

    name = "duration"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> float:
        if isinstance(value, float):
            return value
        try:
            return parse_duration(str(value))
        except ValueError as error:
            self.fail(f"{str(value)[:40]!r}: {error}", param, ctx)
