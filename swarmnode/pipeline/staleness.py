"""How old gradients are, in inner steps of their replica between forward and backward, and what keeps them young.

Where the replicas of a stage average B samples between two steps, all together, and f samples are in flight in the
whole swarm, a gradient is about f / B steps late (PipeDream, arXiv 1806.03377, section 3.3, counts the same delay).
Late gradients cost most of what a swarm fails to learn from a sample [measured: `swarmnode bench learning`]. Two
things bound the delay at `pipeline.staleness_max` steps: a feeder keeps no more under way than `window_limit`, and a
replica puts off an inner step that would make a gradient it still waits for too old. A gradient that is too old
nevertheless is not added.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from swarmnode.manifest import Manifest
from swarmnode.metrics.name import STALENESS
from swarmnode.model.schedule import inner_batch

STRAGGLER = 4.0  # guess: a gradient that takes so many times as long as usual holds up no step
SMOOTHING = 0.1  # guess: of the usual time, over about ten gradients
PUT_OFF = 2.0  # guess: a step is put off until so many times a replica's largest share has come together


def label(staleness: int) -> str:
    """How `swarmnode_gradients_total` names a gradient that is so many steps old."""
    return STALENESS[min(max(staleness, 0), len(STALENESS) - 1)]


def shares_text(counts: Mapping[str, float]) -> str:
    """Shares of gradients by how many steps old they were, of `counts` by `label`."""
    total = sum(counts.values())
    return (
        ", ".join(f"{steps}: {number / total:.1%}" for steps, number in counts.items() if number) or "no gradient yet"
    )


def replica_batch(manifest: Manifest, batch: int, replicas: int) -> int:
    """Samples that one of `replicas` steps on where all together average `batch`: its share, rounded up."""
    least = min(manifest.inner.replica_batch_min, manifest.inner.microbatch)
    return max(least, -(-batch // max(1, replicas)))


def window_limit(manifest: Manifest, sizes: Sequence[int], samples_total: int, microbatch: int) -> tuple[int, str]:
    """(microbatches of so many samples that one feeder may keep under way, the reason), given how many replicas each
    stage has.

    All feeders' samples in flight come to at most staleness_max steps of the stage that has the fewest replicas.
    """
    inner, steps = manifest.inner, max(1, manifest.pipeline.staleness_max)
    feeders, fewest = max(1, sizes[0]), max(1, min(sizes))
    batch = fewest * replica_batch(manifest, max(inner_batch(inner, samples_total), inner.inner_batch_max), fewest)
    limit = max(1, steps * batch // (microbatch * feeders))
    return limit, f"{steps} x {batch} samples in flight at {fewest} replicas, {feeders} feeders, {microbatch} at a time"


@dataclass(frozen=True, slots=True, eq=False)
class Pending:
    """One forward: after how many inner steps of its replica it was made, and when."""

    inner_steps: int
    since_s: float

    def age(self, inner_steps: int) -> int:
        """Steps since then. State loaded from elsewhere may have counted fewer."""
        return max(0, inner_steps - self.inner_steps)


class PendingGradients:
    """Forwards of one replica whose gradient has not come back. Pure: told of steps and times, by the event loop's
    seconds. Both threads of a node call it; each change is one operation that the interpreter does not divide."""

    def __init__(self, staleness_max: int) -> None:
        self._staleness_max = staleness_max
        self._open: dict[Pending, None] = {}
        self._usual_s: float | None = None

    def opened(self, inner_steps: int, now_s: float) -> Pending:
        """A forward was made after so many inner steps."""
        pending = Pending(inner_steps, now_s)
        self._open[pending] = None
        return pending

    def closed(self, pending: Pending, now_s: float | None = None) -> None:
        """Its gradient came, at `now_s`, or never will (None). Later calls for the same one do nothing."""
        if self._open.pop(pending, pending) is None and now_s is not None:
            seconds = now_s - pending.since_s
            self._usual_s = seconds if self._usual_s is None else self._usual_s + SMOOTHING * (seconds - self._usual_s)

    def put_off(self, inner_steps: int, now_s: float) -> bool:
        """Whether another step would make a gradient too old that is still expected."""
        patience_s = float("inf") if self._usual_s is None else STRAGGLER * self._usual_s
        return any(
            pending.age(inner_steps + 1) > self._staleness_max and now_s - pending.since_s <= patience_s
            for pending in list(self._open)
        )
