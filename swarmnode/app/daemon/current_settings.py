"""Settings of a daemon as they are now: what it was started with, and what was changed since."""

from __future__ import annotations

from collections.abc import Sequence

from swarmnode.run.admission.amendment import Amendments
from swarmnode.run.manifest import Manifest
from swarmnode.run.manifest.spec import FIELDS
from swarmnode.run.manifest.text import value_of
from swarmnode.train.node.limits import show
from swarmnode.train.node.regulator import Regulator

Row = tuple[str, str, str]
"""Name, value, origin."""

MISSING = "-"  # the value of an option that is not set


def settings_now(started: Sequence[Row], regulator: Regulator | None) -> list[Row]:
    """The options of the start, with limits that `swarmnode limit` or the page changed since."""
    rows = {name: (value, origin) for name, value, origin in started}
    if regulator is not None:
        limits = show(regulator.limits)
        rows |= {name: (limits.get(name, MISSING), "swarmnode limit") for name in sorted(regulator.told)}
    return [(name, value, origin) for name, (value, origin) in rows.items()]


def manifest_now(manifest: Manifest, amendments: Amendments | None, done: int | None) -> list[Row]:
    """The fields of the run's manifest, with the amendments in effect once round `done` is; None: this daemon does no
    rounds, and shows `manifest`, its own."""
    in_force = manifest if amendments is None or done is None else amendments.at(done)
    signed = manifest if amendments is None else amendments.after(0)
    rows = []
    for field in FIELDS:
        value = value_of(in_force, field.name)
        origin = "manifest" if value == value_of(signed, field.name) else "amendment"
        rows.append((field.name, str(value), origin))
    return rows
