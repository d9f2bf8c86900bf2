"""The curves of one run, live or simulated, as rows and as a table of pandas."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from swarmnode.plugin import library

COLUMNS = (
    "time_s",
    "samples",
    "tokens_per_s",
    "loss_train",
    "nodes",
    "serving",
    "round",
    "sent_nbytes",
    "gossip_nbytes",
)
"""Of a point (dashboard/history.py); `time_s` is a Unix time, or a simulated life's. Losses are nats per token."""


@dataclass(frozen=True, slots=True)
class RunHistory:
    """The curves of one run or of one simulated life. `points` have COLUMNS, `validations` are (samples, time, nats a
    token), both oldest first; `context` is the tokens of a sample, None if unknown."""

    name: str
    points: Sequence[Sequence[Any]] = field(repr=False)
    validations: Sequence[tuple[int, float, float]] = field(repr=False)
    context: int | None = None

    def rows(self) -> list[dict[str, Any]]:
        """A dictionary for each point and each validation, in the order of time: COLUMNS, `tokens` and
        `loss_validation`, None where a row does not have it."""
        empty: dict[str, Any] = dict.fromkeys((*COLUMNS, "loss_validation"))
        rows = [empty | dict(zip(COLUMNS, point, strict=True)) for point in self.points]
        for samples, time_s, loss in self.validations:
            rows.append(empty | {"time_s": time_s, "samples": samples, "loss_validation": loss})
        rows.sort(key=lambda row: row["time_s"])
        return [row | {"tokens": row["samples"] * self.context if self.context else None} for row in rows]

    def to_pandas(self) -> Any:
        """`rows` as a pandas.DataFrame. Raises UsageError where pandas is not installed."""
        return library("pandas", "to_pandas()").DataFrame(self.rows())

    def loss_at(self, samples: float) -> float | None:
        """Held-out loss after `samples` of the run, interpolated between measurements; None outside of them."""
        points = sorted({(count, loss) for count, _, loss in self.validations})
        for (before, high), (after, low) in itertools.pairwise(points):
            if before <= samples <= after:
                return high + (low - high) * (samples - before) / max(1, after - before)
        return None

    def loss_towards(self, samples: float) -> float | None:
        """Mean of `loss_at` over the last tenth of the way to `samples`. A single measurement depends on the replicas
        of its routes and may be off by a hundredth."""
        points = [self.loss_at(round(samples * (1.0 - step / 100.0))) for step in range(11)]
        known = [loss for loss in points if loss is not None]
        return statistics.fmean(known) if len(known) == len(points) else None
