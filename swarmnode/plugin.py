"""Additions of other packages to swarmnode, by entry points: verbs, and the simulator.

A package names them in its pyproject.toml: `[project.entry-points."swarmnode.verbs"]` with `mine = "package:command"`.
"""

from __future__ import annotations

import functools
from importlib.metadata import EntryPoint, entry_points

VERBS = "swarmnode.verbs"  # click commands by verb; one of our own names replaces ours
SIMULATOR = "swarmnode.simulator"  # `rate`: see swarmsim/simulated_rate.py


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
