"""The speed that this node announces: probed at first, then measured on real work."""

from __future__ import annotations

from swarmnode.pipeline.hop import Hop
from swarmnode.ports import Compute

SPEED_SAMPLES = 32.0  # guess: a probe weighs as much as a few real microbatches


class Speed:
    """Samples a second of this node on its stage: the probed speed, blended into the device's measured speed."""

    def __init__(self, hop: Hop, compute: Compute, probed: float) -> None:
        self._hop = hop
        self._compute = compute
        self._worked_s = compute.worked_s
        # The probed speed counts as much as SPEED_SAMPLES of real work.
        self._samples = SPEED_SAMPLES
        self._seconds = SPEED_SAMPLES / max(probed, 1e-9)
        self._counted = hop.worked + hop.reworked

    def __call__(self) -> float:
        # Counted in work, not in completed microbatches: a node that has just come has done only the forwards of many,
        # and would seem slower than it is by half (simulated: swarm48). A recomputed forward is work, too.
        samples, worked_s = self._hop.worked + self._hop.reworked, self._compute.worked_s
        self._samples += samples - self._counted
        self._seconds += worked_s - self._worked_s
        self._counted, self._worked_s = samples, worked_s
        if self._samples > 8 * SPEED_SAMPLES:  # the past fades: halve its weight
            self._samples, self._seconds = self._samples / 2, self._seconds / 2
        return self._samples / self._seconds
