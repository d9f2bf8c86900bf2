"""`swarmnode.simulate` and `swarmnode.compare`: simulated lives, and what several runs learned, side by side."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

from swarmnode.app.api import RunHistory
from swarmnode.base.concurrency import beside_loop
from swarmnode.base.errors import UsageError
from swarmnode.base.plugin import library
from swarmsim.drawing import COLOURS, Curve, drawing, table
from swarmsim.life import simulate as live
from swarmsim.outcome import Outcome
from swarmsim.scenario import Scenario, chosen, shorter

NOISE = "A thin line is another seed, ± their standard deviation. Below .03 nat, one seed shows nothing: take three."


class HasHistory(Protocol):
    """A run of `swarmnode.connect` or the outcome of `simulate`."""

    def history(self) -> RunHistory: ...


@dataclass(frozen=True, slots=True)
class Comparison:
    """Runs at `samples`, which all of them reached; runs of one name are seeds of one."""

    samples: int
    histories: Mapping[str, Sequence[RunHistory]]

    def rows(self) -> list[dict[str, Any]]:
        """For each name: runs, samples, loss_validation (nats a token: the mean over runs of RunHistory.loss_towards),
        spread (its standard deviation over runs; None for one), time_s, sent_nbytes and gossip_nbytes (means, from the
        first point to `samples`)."""
        return [self._row(name, runs) for name, runs in self.histories.items()]

    def _row(self, name: str, runs: Sequence[RunHistory]) -> dict[str, Any]:
        losses = [loss for run in runs if (loss := run.loss_towards(self.samples)) is not None]
        row = {"name": name, "runs": len(runs), "samples": self.samples}
        row["loss_validation"] = statistics.fmean(losses) if losses else None
        row["spread"] = statistics.stdev(losses) if len(losses) > 1 else None
        for key in ("time_s", "sent_nbytes", "gossip_nbytes"):
            costs = [cost for run in runs if (cost := _grown(run, key, self.samples)) is not None]
            row[key] = statistics.fmean(costs) if costs else None
        return row

    def to_pandas(self) -> Any:
        """`rows` as a pandas.DataFrame. Raises UsageError where pandas is not installed."""
        return library("pandas", "to_pandas()").DataFrame(self.rows())

    def svg(self) -> str:
        """Held-out loss over samples, a curve for each run, thin ones for further seeds, as a picture for a page or a
        file. A name has the spread of its seeds, and a line below says what a difference means."""
        spread = {row["name"]: row["spread"] for row in self.rows()}
        curves = []
        for at, (name, runs) in enumerate(self.histories.items()):
            for seed, run in enumerate(runs):
                title = f"{name}, {len(runs)} seeds ± {spread[name]:.2g}" if len(runs) > 1 else f"{name}, one seed"
                points = [(n, loss) for n, _, loss in sorted(run.validations) if n]
                curves.append(Curve("" if seed else title, COLOURS[at % len(COLOURS)], points))
        picture = drawing(curves, "samples", "held-out nats a token", note=NOISE)
        return picture.replace("<svg ", "<svg xmlns='http://www.w3.org/2000/svg' ", 1)  # a file of its own needs it

    def _repr_html_(self) -> str:
        """The curves and the rows, for a notebook."""
        return f"{self.svg()}{table(self.rows())}"


def _grown(run: RunHistory, key: str, samples: int) -> float | None:
    """The growth of column `key` until `samples`; None where the run has no such numbers."""
    known = [row for row in run.rows() if row.get(key) is not None and row.get("loss_validation") is None]
    until = next((row for row in known if row["samples"] >= samples), known[-1] if known else None)
    return None if until is None else float(until[key]) - float(known[0][key])


def compare(runs: Iterable[HasHistory | RunHistory]) -> Comparison:
    """`runs` at the most samples that all of them validated: outcomes of `simulate`, runs of `connect`, histories. Runs
    of the same name count as seeds of one. Raises UsageError if one of them has no validation."""
    histories: dict[str, list[RunHistory]] = {}
    for run in runs:
        history = run if isinstance(run, RunHistory) else run.history()
        if not history.validations:
            raise UsageError(f"{history.name} has no held-out loss: simulate it with real tensors, or train for longer")
        histories.setdefault(history.name, []).append(history)
    if not histories:
        raise UsageError("there is nothing to compare: give runs, outcomes or histories")
    reached = [max(n for n, _, _ in one.validations) for each in histories.values() for one in each]
    return Comparison(min(reached), histories)


@beside_loop
def simulate(
    scenario: str | Path | Scenario = "calm",
    *,
    seed: int = 0,
    nodes: int | None = None,
    for_s: float | None = None,
    changes: Mapping[str, object] = MappingProxyType({}),
    name: str | None = None,
) -> Outcome:
    """One life of `scenario` (a name from examples/, a TOML file, or a Scenario) from `seed`, as `swarmnode simulate`:
    the fleet scaled to `nodes`, the storm `for_s` of virtual time long, the manifest with `changes`
    (`{"gossip.method": "diloco"}`), called `name` in comparisons.

    A broken law is in the outcome's `failures`. Raises UsageError, ManifestError."""
    if isinstance(scenario, Scenario):
        scene = scenario if for_s is None else shorter(scenario, for_s)
    else:
        scene = chosen(str(scenario), nodes, for_s, changes)
    return live(scene if name is None else dataclasses.replace(scene, name=name), seed)
