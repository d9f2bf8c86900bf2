"""Sums each node's work over its lives, for the contributors' table and the totals of the run."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from swarmnode.dashboard.ledger import ReceiptTotals
from swarmnode.metrics import name
from swarmnode.metrics.name import series

COUNT_MAX = 1e18
"""Claims above this are ignored: no machine counts this far."""

LIVES_MAX = 64
"""Lives of one peer that are kept apart. Beyond this the oldest are merged, so invented lives take no memory. Guess."""

DENSE_BYTES = 8.0
"""Bytes per parameter and exchange in published NoLoCo: pseudo-gradient and slow weights in fp32 [paper]."""

SERIES: Mapping[str, tuple[str, ...]] = {
    "fed": (name.SAMPLES,),
    "steps": (name.INNER_STEPS,),
    "done": (series(name.MICROBATCHES, outcome="done"),),
    "lost": (series(name.MICROBATCHES, outcome="lost"),),
    "retried": (series(name.MICROBATCHES, outcome="retried"),),
    "paired": (series(name.EXCHANGES, outcome="paired"),),
    "lone": (series(name.EXCHANGES, outcome="lone"),),
    "recoveries": tuple(
        series(name.RECOVERIES, method=method)
        for method in name.METRICS[name.RECOVERIES].labels["method"]
        if method != "fresh"
    ),
    **{f"late_{index}": (series(name.GRADIENTS, staleness=label),) for index, label in enumerate(name.STALENESS)},
    "sent_pipeline": (series(name.LINK_BYTES, kind="pipeline", direction="sent"),),
    "sent_gossip": (series(name.LINK_BYTES, kind="gossip", direction="sent"),),
    "sent_state": (series(name.LINK_BYTES, kind="state", direction="sent"),),
    "sent_control": (series(name.LINK_BYTES, kind="control", direction="sent"),),
}
"""Maps the dashboard's name for a count to the series of a status that add up to it."""

KEYS = (*SERIES, "worked_s", "dense")
LATE = tuple(key for key in KEYS if key.startswith("late_"))
SENT = tuple(key for key in KEYS if key.startswith("sent_"))


def counts_of(counters: Mapping[str, float]) -> dict[str, float]:
    """The counts of a status by the names in SERIES, and `worked_s`. Absurd values count as zero."""
    counts = {key: sum(_believable(counters.get(one, 0.0)) for one in summed) for key, summed in SERIES.items()}
    worked = sum(_believable(value) for key, value in counters.items() if key.startswith(name.COMPUTE_SECONDS))
    return {**counts, "worked_s": worked}


def _believable(value: float) -> float:
    return value if math.isfinite(value) and 0.0 <= value <= COUNT_MAX else 0.0


@dataclass(slots=True)
class Contribution:
    """The work of one peer. `lives` maps an incarnation to the counts it last reported. Times are Unix seconds."""

    name: str = ""
    first_unix_s: float = 0.0
    last_unix_s: float = 0.0
    lives: dict[int, dict[str, float]] = field(default_factory=dict)

    def tell(self, incarnation: int, counts: Mapping[str, float], parameters: int) -> dict[str, float]:
        """Take in the counts of one life. Returns the growth by key. Counts that shrink keep their old value.

        `parameters` is the size of the stage it serves. It gives the bytes that an exchange would send uncompressed.
        """
        life = self.lives.setdefault(incarnation, dict.fromkeys(KEYS, 0.0))
        if len(self.lives) > LIVES_MAX:
            oldest, next_oldest = list(self.lives)[:2]
            for key, value in self.lives.pop(next_oldest).items():
                self.lives[oldest][key] = self.lives[oldest].get(key, 0.0) + value
        grown = {key: max(0.0, value - life.get(key, 0.0)) for key, value in counts.items()}
        grown["dense"] = grown.get("paired", 0.0) * DENSE_BYTES * parameters
        for key, value in grown.items():
            life[key] = life.get(key, 0.0) + value
        return grown

    def total(self, key: str) -> float:
        return sum(life.get(key, 0.0) for life in self.lives.values())

    def to_json(self, peer: str, thanks: ReceiptTotals | None) -> dict[str, object]:
        """The peer's own claims, and the receipts that others signed for it."""
        return {
            "peer": peer,
            "name": self.name,
            "first": round(self.first_unix_s, 3),
            "last": round(self.last_unix_s, 3),
            "lives": len(self.lives),
            "steps": round(self.total("steps")),
            "fed": round(self.total("fed")),
            "worked_s": round(self.total("worked_s"), 1),
            "sent": round(sum(self.total(key) for key in SENT)),
            "exchanges": round(self.total("paired")),
            "receipts": None if thanks is None else thanks.to_json(),
        }
