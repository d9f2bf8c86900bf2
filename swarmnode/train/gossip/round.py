"""Decides when a round ends. Rounds are counted in samples of the whole run, so that all replicas agree on the round.

Where samples come faster than replicas can meet, each would skip the rounds it has no time for, and no two the same
ones: on a quick machine replicas met in none of 50 rounds (measured: the `tiny` preset, 2 cores). So a replica whose
rounds come too fast meets at every second only, or fourth, ... Such a *stride* is a power of two and announced in
its record: a replica that meets more rarely still meets at rounds that the others have, and all know at which.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from statistics import median_low

from swarmnode.base.bounds import STRIDE_MAX
from swarmnode.base.ids import PeerId
from swarmnode.net.membership.clock import OUTLIER

# Guess: the stride falls only when half of it would do this much more than well, so that it does not flap. More would
# keep replicas apart for good that one long exchange has put apart.
NARROWING = 1.12

# Guess: of so many rounds the median counts. Where a cut network heals, the other half's samples come all at once;
# taken for a rate, they made replicas meet only every 256th round from then on (measured behind 20 Mbit/s).
RATES = 5
EXCHANGES_PER_ROUND = 1.1  # guess: rounds are so far apart that an exchange leaves a tenth of them
# Of what a round may take, for a plan. Headers, waiting, machines that are faster than planned and NARROWING take the
# rest: by more, eight home cards with rounds just long enough met at every second one for good (simulated).
PLANNED = 0.8
ALONE_SHARE = 0.9  # guess: of a line that carries nothing but rounds
LINE_FADE = 0.98  # guess: of the most that the line was seen to carry, a round: another network is noticed within 50

Spent = tuple[float, float]
"""Seconds, and of these the seconds in which the device worked."""


def spent_since(before: Spent, now: Spent) -> Spent:
    """The time between two readings of both clocks."""
    return now[0] - before[0], now[1] - before[1]


def least(strides: Iterable[int]) -> int:
    """The least of `strides`, powers of two: who says more keeps nobody from meeting; 1 if there are none."""
    return min(strides, default=1)


def round_share(uplink_share: float) -> float:
    """The part of a line up that packets of rounds may take, and of a round's time: what nodes keep to, and plans
    reckon with `PLANNED` of."""
    return min(uplink_share, 1.0 / EXCHANGES_PER_ROUND)


@dataclass(frozen=True, slots=True)
class Rounds:
    """The run's rounds: `round_samples` samples each."""

    round_samples: int

    def __post_init__(self) -> None:
        assert self.round_samples > 0, f"round_samples {self.round_samples}; at least 1"

    def index(self, total_samples: int) -> int:
        """E = floor(total / round_samples): the rounds that `total_samples` completes."""
        return total_samples // self.round_samples

    def following(self, round_index: int, stride: int) -> int:
        """The first round after `round_index` that a replica of `stride` takes part in."""
        return (round_index // stride + 1) * stride

    def newest(self, total_samples: int, stride: int) -> int:
        """The last round that `total_samples` completes and a replica of `stride` takes part in; 0: none."""
        return self.index(total_samples) // stride * stride

    def left(self, total_samples: int, stride: int = 1) -> int:
        """Samples until the next round of `stride` ends, at least 1."""
        return self.following(self.index(total_samples), stride) * self.round_samples - total_samples

    def stride(self, samples_per_second: float, seconds_min: float, now: int) -> tuple[int, str]:
        """(the stride at which rounds are at least `seconds_min` apart, or as at `now`; the reason).

        It grows as soon as rounds come faster, and falls when half of it leaves `NARROWING` times the seconds.
        """
        needed = samples_per_second * seconds_min / self.round_samples
        stride = now
        while stride < needed and stride < STRIDE_MAX:
            stride *= 2
        while stride > 1 and stride / 2 >= NARROWING * needed:
            stride //= 2
        seconds = self.round_samples / samples_per_second if samples_per_second > 0 else float("inf")
        return stride, f"a round takes {seconds:.3g} s, {seconds_min:.3g} s are needed: every {stride}"


SPEEDS_MAX = OUTLIER  # a machine's share, over that of the median one: the run's clock counts no machine as more
# Guess: of a round more or less where rounds and the run's count of samples are a round apart. Half of a round is 1.5
# samples for each of as many machines as samples: some train two, and all wait (simulated: 8.1 samples/s, else 9.3).
CATCH_UP = 0.25


@dataclass(slots=True)
class Share:
    """One replica's samples of an inner step, a round, by its speed: so all are ready together."""

    step_samples: int
    late: int = 0  # samples that the run's count was behind the rounds, as of the last round

    def of(self, me: PeerId, speeds: Mapping[PeerId, float]) -> int:
        """By the announced `speeds`, ours among them, 0 where it is not known. Each share is rounded by itself; what it
        lacks or has too much is made up for in later steps. If shares made up each step, some machines of one speed
        would train a sample more, and all others wait (simulated: sixteen samples, seven machines, 8.7 s for 5.7)."""
        usual_speed = median_low([speed for speed in speeds.values() if speed] or [1.0])
        bounded = {peer: min(speed or usual_speed, usual_speed * SPEEDS_MAX) for peer, speed in speeds.items()}
        apart = min(max(int(self.late / self.step_samples), -1), 1)
        wanted = self.step_samples * (1.0 + CATCH_UP * apart)
        return max(1, round(wanted * bounded[me] / sum(bounded.values())))


@dataclass(slots=True)
class RoundPace:
    """The rate of the run's samples, the seconds of an exchange and the bytes of a round, as the low median of some
    rounds; and what this machine's line up carries: the most it was seen to while it was busy, in any exchange or from
    round to round, packets and activations alike. An exchange in which one waits for the other is no measure of the
    line, so what the transport measured counts, too."""

    _rates: deque[float] = field(default_factory=lambda: deque(maxlen=RATES))
    _exchanges_s: deque[float] = field(default_factory=lambda: deque(maxlen=RATES))
    _rounds_nbytes: deque[int] = field(default_factory=lambda: deque(maxlen=RATES))
    line_bytes_per_s: float = 0.0
    _boundary: tuple[float, int, int] | None = None

    @property
    def samples_per_second(self) -> float:
        """The run's samples a second; 0 before a round brought any."""
        return median_low(self._rates or [0.0])

    @property
    def _round_nbytes(self) -> int:
        return median_low(self._rounds_nbytes or [0])

    @property
    def exchange_s(self) -> float:
        """Seconds that an exchange takes; 0 before the first."""
        return median_low(self._exchanges_s or [0.0])

    def boundary(self, now_s: float, samples: int, sent_nbytes: int) -> None:
        """A round is over; `samples` of the run and bytes that this machine sent, ever."""
        if self._boundary is not None and now_s > self._boundary[0]:
            seconds = now_s - self._boundary[0]
            if (gained := samples - self._boundary[1]) or self._rates:
                self._rates.append(gained / seconds)
            self.line_bytes_per_s *= LINE_FADE
            self.carried((sent_nbytes - self._boundary[2]) / seconds)
        self._boundary = (now_s, samples, sent_nbytes)

    def carried(self, bytes_per_s: float) -> None:
        """The line was seen to carry so much."""
        self.line_bytes_per_s = max(self.line_bytes_per_s, bytes_per_s)

    def needed_s(self, uplink_share: float) -> tuple[float, str]:
        """(seconds from round to round, so that exchanges take at most 1 / EXCHANGES_PER_ROUND of the time and
        `uplink_share` of the line up; why)."""
        exchanges_s = EXCHANGES_PER_ROUND * self.exchange_s
        line_s = 0.0
        if self.line_bytes_per_s > 0.0:
            line_s = self._round_nbytes / (uplink_share * self.line_bytes_per_s)
        if line_s > exchanges_s:
            line = f"a line of {self.line_bytes_per_s / 1e6:.3g} MB/s"
            return line_s, f"{self._round_nbytes / 1e6:.3g} MB are {uplink_share:g} of {line}"
        return exchanges_s, f"an exchange takes {self.exchange_s:.3g} s"

    def seconds(self, samples: int) -> float:
        """Seconds that the run needs for `samples`; infinite while its rate is unknown."""
        return samples / self.samples_per_second if self.samples_per_second > 0 else float("inf")

    def exchanged(self, seconds: float, nbytes: int) -> None:
        """A round's packets were sent, `nbytes` by this machine, and others' came, in `seconds` from when all were
        there: a partner that comes late to one round is not late to the next one for that."""
        self._rounds_nbytes.append(nbytes)
        if seconds > 0.0:
            self._exchanges_s.append(seconds)
            self.carried(nbytes / seconds)
