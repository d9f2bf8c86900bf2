"""How fast this node is, as it tells others: probed first, then as its device really works microbatches off."""

from __future__ import annotations

from swarmnode.pipeline.hop import Hop
from swarmnode.ports import Compute

SPEED_SAMPLES = 32.0  # guess: a probe weighs as much as a few real microbatches


class Speed:
    """Samples a second of this node on its stage: as probed, then as its device really worked them off."""

    def __init__(self, hop: Hop, compute: Compute, probed: float) -> None:
        self._hop = hop
        self._compute = compute
        self._worked_s = compute.worked_s
        # What was probed counts as much as SPEED_SAMPLES of real work.
        self._samples = SPEED_SAMPLES
        self._seconds = SPEED_SAMPLES / max(probed, 1e-9)
        self._counted = hop.worked + hop.reworked

    def __call__(self) -> float:
        # In work, not in microbatches back: a node that has just come has done the forwards of many, and would seem
        # slower than it is by half (simulated: swarm48). A forward done again is work, too.
        samples, worked_s = self._hop.worked + self._hop.reworked, self._compute.worked_s
        self._samples += samples - self._counted
        self._seconds += worked_s - self._worked_s
        self._counted, self._worked_s = samples, worked_s
        if self._samples > 8 * SPEED_SAMPLES:  # the past fades: halve its weight
            self._samples, self._seconds = self._samples / 2, self._seconds / 2
        return self._samples / self._seconds
