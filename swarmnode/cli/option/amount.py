"""Amounts with a unit on the command line: 12GB, 20Mbit."""

from __future__ import annotations

import re
from collections.abc import Mapping

import click

GB: Mapping[str, float] = {"gb": 1.0, "gib": 1.0, "mb": 1e-3}
BITS: Mapping[str, float] = {"mbit": 1e6, "gbit": 1e9, "kbit": 1e3}
_AMOUNT = re.compile(r"(\d+(?:\.\d+)?) ?([a-z]*)\Z")


class Amount(click.ParamType[float]):
    """A click parameter type: a positive number with one of `units`, the first if none is given, times its worth."""

    def __init__(self, name: str, units: Mapping[str, float]) -> None:
        self.name = name
        self._units = units

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> float:
        found = _AMOUNT.match(str(value).strip().lower().removesuffix("/s"))
        worth = self._units.get(found[2] or next(iter(self._units))) if found else None
        if found is None or worth is None or not float(found[1]) > 0.0:
            self.fail(f"{str(value)[:40]!r}: expected a number with {' or '.join(self._units)}", param, ctx)
        return float(found[1]) * worth
