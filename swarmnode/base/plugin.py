"""Additions of other packages to swarmnode, by entry points: verbs, methods, codecs, transports, the simulator.

A package names them in its pyproject.toml: `[project.entry-points."swarmnode.verbs"]` with `mine = "package:command"`.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from importlib.metadata import EntryPoint, entry_points
from typing import Any, TypeVar

from swarmnode.base.errors import UsageError

VERBS = "swarmnode.verbs"  # click commands by verb; one of our own names replaces ours
METHODS = "swarmnode.methods"  # tuples of gossip_rules.MethodRules
CODECS = "swarmnode.codecs"  # tuples of gossip_rules.CodecRules
TRANSPORTS = "swarmnode.transports"  # see net/transport/kind.py
SIMULATOR = "swarmnode.simulator"  # `rate`: see swarmsim/simulated_rate.py


T = TypeVar("T")


@functools.cache
def _points(group: str) -> dict[str, EntryPoint]:
    return {point.name: point for point in entry_points(group=group)}


def names(group: str) -> list[str]:
    """Names of the additions to `group`, sorted."""
    return sorted(_points(group))


def load(group: str, name: str) -> object | None:
    """The object installed as `name`. None if nothing is, or its package is missing: `benchmarks` is where swarmnode
    comes from a wheel."""
    point = _points(group).get(name)
    if point is None:
        return None
    try:
        loaded: object = point.load()
        return loaded
    except ModuleNotFoundError as error:
        if error.name is not None and point.module.startswith(error.name):
            return None
        raise


def rows(group: str, kind: type[T]) -> list[T]:
    """All rows of the installed tables of `group`. Raises UsageError for a table of anything but `kind`."""
    rows_of_all: list[T] = []
    for name in names(group):
        table = load(group, name)
        if not isinstance(table, tuple) or not all(isinstance(row, kind) for row in table):
            raise UsageError(
                f"entry point {name} of {group}: expected a tuple of {kind.__name__}; reinstall its package"
            )
        rows_of_all += table
    return rows_of_all


def implementation(path: str) -> object:
    """The object at "module:name"."""
    module, _, name = path.partition(":")
    made: object = getattr(importlib.import_module(module), name)
    return made


def check_library(name: str, wanted_by: str) -> None:
    """Raises UsageError with the command that installs the library `name`, which is no dependency of ours, if it is
    missing."""
    if importlib.util.find_spec(name) is None:
        raise UsageError(f"{wanted_by} needs the library {name}: pip install {name.replace('_', '-')}")


def library(name: str, wanted_by: str) -> Any:
    """The library `name`. Raises UsageError as `check_library`."""
    check_library(name, wanted_by)
    return importlib.import_module(name)
