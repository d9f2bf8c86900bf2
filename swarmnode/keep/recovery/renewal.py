"""When a copy of a stage's state is due anew, by time and bytes: as fresh as is asked, as line and disk carry it.

Pure: times and counts are arguments. Copies at neighbours (neighbour_backup.py) and on the own disk (stage_saver.py)
keep the same rule.
"""

from __future__ import annotations

from swarmnode.run.manifest import RecoverySpec


class RenewalTimer:
    """Knows what the last copy was of, and what it cost."""

    def __init__(self, spec: RecoverySpec) -> None:
        self._spec = spec
        self._made_s = float("-inf")
        self._samples = 0
        self._least_s = 0.0

    def due(self, now_s: float, total: int) -> tuple[bool, str]:
        """Whether to copy at `total` samples of the run, and why (not)."""
        age_s = now_s - self._made_s
        behind = total - self._samples
        if behind <= 0:
            return False, "nothing was trained since"
        if age_s < self._least_s:
            return False, f"line or disk carry one in {self._least_s:.3g} s"
        if age_s >= self._spec.snapshot_seconds or behind >= self._spec.snapshot_part * total:
            return True, f"the last one is {behind} samples behind"
        return False, f"the last one is {age_s:.3g} s old"

    def made(self, now_s: float, samples: int, least_s: float) -> None:
        """A copy of the state at `samples` of the run is there. The next one follows after `least_s` at the soonest,
        because of what this one cost."""
        self._made_s = now_s
        self._samples = samples
        self._least_s = least_s
