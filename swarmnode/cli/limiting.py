"""The limits as options, alike for `join` and `limit`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import click

F = TypeVar("F", bound=Callable[..., Any])


class LimitText(click.ParamType[str]):
    """Text that `node.limits.change` accepts for the limit `name`; kept as text."""

    name = "limit"

    def __init__(self, limit: str, metavar: str) -> None:
        self.limit = limit
        self.name = metavar

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> str:
        from swarmnode.node.limits import Limits, change

        try:
            change(Limits(), {self.limit: str(value)})
        except ValueError as error:
            self.fail(str(error).partition(": ")[2] or str(error), param, ctx)
        return str(value)


# limit, what it takes, what it does; the same limits as node.limits.KINDS, which is not imported for --help
LIMITS = (
    ("hours", "22-07", "Run only then (local time); 0-6,12-14 for two spans."),
    ("max-up", "20Mbit", "Send at most so much a second."),
    ("max-down", "100Mbit", "Receive at most so much a second."),
    ("quota", "50GB/day", "Move at most so many bytes a day, both ways together."),
    ("max-temp", "80C", "Pause while the GPU (or processor) is hotter."),
    ("max-memory", "6GB", "Pause while this process holds more."),
    ("max-load", "50%", "Compute for at most so much of the time, in pieces well under a second."),
    ("yield-to", "steam,blender", "Pause while one of these programs runs."),
)


def limit_options(command: F) -> F:
    """Add an option for each limit; their values come as keywords, underscores for dashes."""
    for limit, metavar, text in reversed(LIMITS):
        command = click.option(f"--{limit}", type=LimitText(limit, metavar), metavar=metavar, help=text)(command)
    return command


def given_limits(values: Mapping[str, str | None]) -> dict[str, str]:
    """Limits by name from those keywords."""
    return {name.replace("_", "-"): text for name, text in values.items() if text is not None}
