"""When a round ends: rounds are counted in samples of the whole run, whoever computed them (design section 5)."""

from __future__ import annotations

from dataclasses import dataclass

# Who waits exactly round_seconds_min may see a float's rounding less gone by, and must not be told to wait 0 seconds.
ROUNDING_S = 1e-6


@dataclass(frozen=True, slots=True)
class Rounds:
    """The run's rounds: `round_samples` samples each, at most one boundary per `round_seconds_min` at a replica."""

    round_samples: int
    round_seconds_min: float = 0.0

    def __post_init__(self) -> None:
        assert self.round_samples > 0, f"round_samples {self.round_samples}; at least 1"
        assert self.round_seconds_min >= 0.0, f"round_seconds_min {self.round_seconds_min}; at least 0"

    def index(self, total_samples: int) -> int:
        """E = floor(total / round_samples): the rounds that `total_samples` completes."""
        return total_samples // self.round_samples

    def left(self, total_samples: int) -> int:
        """Samples until the next round ends, 1 to `round_samples`."""
        return self.round_samples - total_samples % self.round_samples

    def due(self, total_samples: int, round_done: int, seconds_since_last: float) -> tuple[int | None, str]:
        """(the round whose boundary is now, or None; the reason).

        `round_done` is the last round this replica finished or joined at, `seconds_since_last` the event loop's time
        since then. A replica that was away is due for the newest round at once: those it missed are not made up for,
        because its pseudo-gradient already holds what it did in them.
        """
        newest = self.index(total_samples)
        if newest <= round_done:
            return None, f"{self.left(total_samples)} samples until round {newest + 1}"
        if seconds_since_last < self.round_seconds_min - ROUNDING_S:
            wait_s = self.round_seconds_min - seconds_since_last
            return None, f"round {newest} has come, {wait_s:.1f} s before round_seconds_min allows it"
        missed = newest - round_done - 1
        return newest, f"{total_samples} samples end round {newest}" + (f", {missed} skipped" if missed else "")
