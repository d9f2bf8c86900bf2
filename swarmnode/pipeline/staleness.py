"""The age of gradients, in inner steps of their replica between forward and backward, and how it is bounded.

If the replicas of a stage together average B samples between two steps, and f samples are in flight in the whole swarm,
a gradient is about f / B steps late (PipeDream, arXiv 1806.03377, section 3.3, counts the same delay). Late gradients
are the main loss of a swarm's learning per sample [measured: `swarmnode bench learning`]. Two rules bound the delay at
`pipeline.staleness_max` steps: a feeder keeps no more in flight than `window_limit`, and a replica postpones an inner
step that would make an outstanding gradient too old. A gradient that is too old nevertheless is not added.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from swarmnode.ema import Ema, EmaStart
from swarmnode.manifest import Manifest
from swarmnode.manifest.gossip_compat import meets
from swarmnode.metrics.name import STALENESS
from swarmnode.model.optimizer import inner_batch
from swarmnode.ports import Tape

AVERAGED_MAX = 4  # guess: replicas for which the learning rate grows; more were not measured

STRAGGLER = 4.0  # guess: a gradient this many times later than usual postpones no step
PUT_OFF = 2.0  # guess: no step is postponed beyond this multiple of a replica's largest share


def label(staleness: int) -> str:
    """The label in `swarmnode_gradients_total` of a gradient that is `staleness` steps old."""
    return STALENESS[min(max(staleness, 0), len(STALENESS) - 1)]


def shares_text(counts: Mapping[str, float]) -> str:
    """Text of the shares of gradients by their age in steps, from `counts` by `label`."""
    total = sum(counts.values())
    return (
        ", ".join(f"{steps}: {number / total:.1%}" for steps, number in counts.items() if number) or "no gradient yet"
    )


def replica_batch(manifest: Manifest, batch: int, replicas: int) -> int:
    """Samples per step of one of `replicas` that together average `batch`: its share, rounded up."""
    least = min(manifest.inner.replica_batch_min, manifest.inner.microbatch)
    return max(least, -(-batch // max(1, replicas)))


def replica_share(manifest: Manifest, samples_total: int, replicas: int) -> int:
    """Samples per step of one of `replicas` replicas of a stage, after `samples_total` samples of the whole run."""
    return replica_batch(manifest, inner_batch(manifest.inner, samples_total), replicas)


def averaged(manifest: Manifest, replicas: int) -> int:
    """The replicas of a stage of `replicas` whose steps one round averages, at most AVERAGED_MAX; 1 where the learning
    rate does not follow them."""
    gossip = manifest.gossip
    if manifest.inner.replica_rate == "same" or not meets(gossip):
        return 1
    return max(1, min(replicas, gossip.group or replicas, AVERAGED_MAX))


def window_limit(
    manifest: Manifest, sizes: Sequence[int], feeders: int, samples_total: int, microbatch: int
) -> tuple[int, str]:
    """(microbatches of `microbatch` samples that one of `feeders` feeders may keep in flight, the reason), given each
    stage's replicas in `sizes`.

    All feeders' samples in flight amount to at most staleness_max steps of the stage with the fewest replicas.
    """
    inner, steps = manifest.inner, max(1, manifest.pipeline.staleness_max)
    feeders, fewest = max(1, feeders), max(1, min(sizes))
    batch = fewest * replica_batch(manifest, max(inner_batch(inner, samples_total), inner.inner_batch_max), fewest)
    limit = max(1, steps * batch // (microbatch * feeders))
    return limit, f"{steps} x {batch} samples in flight at {fewest} replicas, {feeders} feeders, {microbatch} at a time"


@dataclass(slots=True, eq=False)
class PendingForward:
    """A forward whose gradient is due: its replica's inner steps at that time, the loop time, its samples and tape."""

    inner_steps: int
    since_s: float
    samples: int = 0
    tape: Tape | None = None
    dropped: bool = False

    def age(self, inner_steps: int) -> int:
        """Inner steps since then; at least 0, as loaded state may have counted fewer."""
        return max(0, inner_steps - self.inner_steps)

    def drop(self) -> None:
        """Free the tape: its gradient has been used, or never comes. On any thread, but not during its backward."""
        self.dropped, self.tape = True, None


class PendingGradients:
    """A replica's forwards whose gradient has not come back. Pure: told of steps and loop times, on one thread."""

    def __init__(self, staleness_max: int) -> None:
        self._staleness_max = staleness_max
        self._opened: list[PendingForward] = []
        self._usual_s = Ema(start=EmaStart.FIRST)

    @property
    def _open(self) -> list[PendingForward]:
        self._opened = [pending for pending in self._opened if not pending.dropped]
        return self._opened

    @property
    def samples(self) -> int:
        """Samples whose gradient is still to come."""
        return sum(pending.samples for pending in self._open)

    @property
    def nbytes(self) -> int:
        """Memory that their tapes hold."""
        return sum(tape.nbytes for pending in self._open if (tape := pending.tape) is not None)

    def opened(self, inner_steps: int, now_s: float, samples: int = 0, tape: Tape | None = None) -> PendingForward:
        """Record a forward of `samples` samples made after `inner_steps` steps."""
        self._opened.append(pending := PendingForward(inner_steps, now_s, samples, tape))
        return pending

    def closed(self, pending: PendingForward, now_s: float) -> None:
        """Close a forward whose gradient came at `now_s`. Repeated calls do nothing."""
        if not pending.dropped:
            self._usual_s.add(now_s - pending.since_s)
            pending.drop()

    def put_off(self, inner_steps: int, now_s: float) -> bool:
        """Whether another step would make an outstanding gradient too old."""
        patience_s = STRAGGLER * self._usual_s.value if self._usual_s.known else float("inf")
        return any(
            pending.age(inner_steps + 1) > self._staleness_max and now_s - pending.since_s <= patience_s
            for pending in self._open
        )
