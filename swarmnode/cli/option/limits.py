"""The limits as options, shared by `join` and `limit`."""

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


# limit, example, help; the same limits as node.limits.KINDS, which is not imported for --help
LIMITS = (
    ("hours", "22-07", "Run only at these hours (local time); 0-6,12-14 for two spans."),
    ("max-up", "20Mbit", "Most to send per second."),
    ("max-down", "100Mbit", "Most to receive per second."),
    ("quota", "50GB/day", "Most bytes per day, both directions together."),
    ("max-temp", "80C", "Pause while the GPU (or processor) is hotter than this."),
    ("max-memory", "6GB", "Pause while this process uses more memory."),
    ("max-load", "50%", "Share of the time to compute at most, in pieces well under a second."),
    ("yield-to", "steam,blender", "Pause while one of these programs runs."),
)


def limit_options(command: F) -> F:
    """Add an option for each limit; values are passed as keywords, with underscores for dashes."""
    for limit, metavar, text in reversed(LIMITS):
        command = click.option(f"--{limit}", type=LimitText(limit, metavar), metavar=metavar, help=text)(command)
    return command


def given_limits(values: Mapping[str, str | None]) -> dict[str, str]:
    """Limits by name from those keywords."""
    return {name.replace("_", "-"): text for name, text in values.items() if text is not None}
