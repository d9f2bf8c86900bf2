"""`--track`: the run's numbers in trackio or Weights & Biases, which have one interface."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import sys
from typing import Any

from swarmnode import plugin
from swarmnode.dashboard import view
from swarmnode.dashboard.board import Board
from swarmnode.ports import Clock, Telemetry

TRACK_EVERY_S = 10.0  # guess: W&B's free plan takes one a second
COLUMNS = ("loss_train", "loss_validation", "tokens", "tokens_per_s", "samples", "round")


def row(summary: view.Json) -> dict[str, Any]:
    """The logged part of `view.summary`: COLUMNS that are known, and `machines` with a valid record."""
    known = {key: summary[key] for key in COLUMNS if summary[key] is not None}
    return {**known, "machines": summary["nodes"]}


async def track(library: str, board: Board, facts: view.Json, clock: Clock, telemetry: Telemetry) -> None:
    """Log the run's numbers by `library` ("trackio", "wandb") at each step of samples, until cancelled. A coordinator
    that starts again goes on with the same run there. What the library cannot do is logged once, and ends this."""
    name = f"{facts['name']}-{str(facts['run_id'])[:8]}"
    settings = {key: value for key, value in facts.items() if key not in ("join", "stage_parameters")}
    given = {"id": str(facts["run_id"])[:16]} if library == "wandb" else {}

    def begin() -> Any:
        with contextlib.redirect_stdout(sys.stderr):  # ours has the addresses
            module = plugin.library(library, f"--track {library}")
            return module.init(project="swarmnode", name=name, config=settings, resume="allow", **given)

    try:
        run = await asyncio.to_thread(begin)
        try:
            at = -1
            while True:
                summary = view.summary(board, clock.unix_s())
                if board.samples > at:
                    at = board.samples
                    await asyncio.to_thread(functools.partial(run.log, row(summary), step=at))
                await asyncio.sleep(TRACK_EVERY_S)
        finally:
            run.finish()
    except Exception as error:  # noqa: BLE001  a library's own; training does not depend on it
        telemetry.event("dashboard.tracking_failed", level="error", library=library, reason=str(error)[:300])
