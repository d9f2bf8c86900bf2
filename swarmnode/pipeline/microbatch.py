"""How many samples travel together, and how many microbatches a feeder may keep under way: chosen from measurement.

Staleness bounds the samples in flight (staleness.py). Where machines are many for so few samples, a replica's share of
the batch is cut into several microbatches: more machines then work at the same time, and the gradient of a share is
still the sum over its microbatches. But a small microbatch costs more time a sample. So a feeder predicts the samples
a second for each size that a share can be cut into, and takes the largest. Its prediction needs how fast the device is
by size (node/probe.py), how long microbatches spend on the lines, and how many machines there are.

The prediction is mean value analysis of a closed network of queues (Reiser and Lavenberg 1980): a microbatch visits one
machine of each stage, finds there on average what the network holds with one microbatch less, and spends the rest of
its round trip on lines. Work takes about the same time each time, so of the piece in work half is left on average
(Reiser 1979, window flow control). Six machines and three stages in the simulator, `swarmnode simulate --scenario
six-machines`: predicted .31, .52 and .73 busy with 2, 4 and 8 microbatches in flight, simulated .33, .65 and .88.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from swarmnode.ids import PeerId
from swarmnode.manifest import Manifest
from swarmnode.membership.swarm import Swarm
from swarmnode.model.schedule import inner_batch
from swarmnode.pipeline.staleness import replica_batch, window_limit
from swarmnode.pipeline.window import QUEUED_HIGH

BETTER = 1.05  # guess: another size must promise so much more than the one in use, or noise would change it for ever
REVIEW = 16  # guess: microbatches back, until the time on the lines is looked at again
SMOOTHING = 0.1  # guess: of the time on the lines, over about ten microbatches
LOOPBACK = ("/ip4/127.", "/ip6/::1/")


@dataclass(frozen=True, slots=True)
class Rates:
    """Samples a second of a device by samples of a microbatch, as measured; in between by interpolation."""

    measured: Mapping[int, float]

    @property
    def best(self) -> float:
        """With microbatches of the best size."""
        return max(self.measured.values())

    def share(self, samples: int) -> float:
        """Of the best rate, with microbatches of so many samples."""
        sizes = sorted(self.measured)
        at = bisect.bisect_left(sizes, samples)
        right = sizes[min(at, len(sizes) - 1)]
        left = sizes[max(0, at - 1)] if right > samples else right
        # The time a microbatch takes is nearly a straight line by its samples; the rate is not.
        low, high = left / self.measured[left], right / self.measured[right]
        way = (samples - left) / (right - left) if right > left else 0.0
        seconds = low + way * (high - low)
        if samples > right:
            seconds *= samples / right
        return samples / seconds / self.best


def loopback(swarm: Swarm, me: PeerId) -> int:
    """Nodes that can be reached on this machine alone, and so share its processors with us; none where we can be
    reached from elsewhere, whatever others announce."""
    here = {
        member.peer
        for member in swarm.members()
        if member.addresses and all(address.startswith(LOOPBACK) for address in member.addresses)
    }
    return len(here) if me in here else 0


@dataclass(frozen=True, slots=True)
class Host:
    """What nodes on one machine share. `processors`: nodes that can compute at the same time; infinitely many where
    each node has a device of its own. `nodes`: how many of the swarm are on this machine."""

    processors: Callable[[], float] = lambda: math.inf
    nodes: Callable[[Swarm, PeerId], int] = loopback


@dataclass(frozen=True, slots=True)
class Choice:
    """`samples` travel together, and a feeder keeps at most `limit` microbatches under way."""

    samples: int
    limit: int
    reason: str


def sizes_of(manifest: Manifest, replicas: int, samples_total: int) -> list[int]:
    """The sizes that the share of one of `replicas` can be cut into, in pieces as even as can be: from the largest that
    may travel, with twice as many pieces each time, down to one sample."""
    share = replica_batch(manifest, inner_batch(manifest.inner, samples_total), replicas)
    pieces = -(-share // manifest.inner.microbatch)
    found: list[int] = []
    while not found or found[-1] > 1:
        found.append(-(-share // pieces))
        pieces *= 2
    return found


def throughput(in_flight: int, machines: float, visits: int, service_s: float, line_s: float) -> float:
    """Microbatches a second of `in_flight` that visit `visits` of `machines`, each for `service_s`, and spend `line_s`
    on lines; once more of them only wait than a window lets (window.py), more in flight count no further."""
    work_s, held, busy, rate = visits * service_s, 0.0, 0.0, 0.0  # `held`, `busy`: at and on a machine, on average
    for count in range(1, in_flight + 1):
        stay_s = work_s * (1.0 + max(0.0, held - busy / 2.0))
        rate = min(count / (line_s + stay_s), machines / work_s)
        held, busy = rate * stay_s / machines, rate * work_s / machines
        if rate * (stay_s - work_s) > QUEUED_HIGH * machines:
            break
    return rate


class Sizing:
    """Chooses for one feeder. Pure: told of the stages, and of microbatches that came back."""

    def __init__(self, manifest: Manifest, me: PeerId, rates: Rates, speed: Callable[[], float], host: Host) -> None:
        """`speed`: samples a second of this node on its stage, in work as it comes."""
        self._manifest = manifest
        self._me = me
        self._rates = rates
        self._speed = speed
        self._host = host
        self._line_s: float | None = None
        self._back = 0
        self._seen: object = None
        self._choice: Choice | None = None

    def completed(self, samples: int, round_trip_s: float, queued_s: float) -> None:
        """A microbatch of so many came back, of whose round trip it waited `queued_s` for machines."""
        self._back += 1
        line_s = max(0.0, round_trip_s - queued_s - self._visits * self._service_s(samples))
        self._line_s = line_s if self._line_s is None else self._line_s + SMOOTHING * (line_s - self._line_s)

    def choose(self, swarm: Swarm, samples_total: int) -> Choice:
        """For the stages as they are now. The same as before, unless they changed or another size is clearly better."""
        seen = (swarm.sizes, inner_batch(self._manifest.inner, samples_total), self._back // REVIEW)
        if self._choice is None or seen != self._seen:
            self._seen, self._choice = seen, self._chosen(swarm, samples_total)
        return self._choice

    def _chosen(self, swarm: Swarm, samples_total: int) -> Choice:
        manifest, sizes = self._manifest, swarm.sizes
        feeders, total, here = max(1, sizes[0]), max(1, sum(sizes)), self._host.nodes(swarm, self._me)
        shared = min(float(here), max(1.0, self._host.processors()))
        machines = max(1.0, total - here + shared) / feeders
        # Between processes that wait for each other's processors a message costs their time; none is spent waiting.
        line_s = 0.0 if here >= total and shared < here else self._line_s or 0.0
        options = sizes_of(manifest, max(sizes), samples_total)
        promised: dict[int, float] = {}
        for samples in options:
            limit, _ = window_limit(manifest, sizes, samples_total, samples)
            count = min(limit, manifest.pipeline.window_max, self._places(swarm))
            promised[samples] = samples * throughput(count, machines, self._visits, self._service_s(samples), line_s)
        best = max(options, key=lambda samples: promised[samples])
        used = self._choice.samples if self._choice is not None else options[0]
        if used in promised and promised[best] < BETTER * promised[used]:
            best = used
        limit, bound = window_limit(manifest, sizes, samples_total, best)
        most = self._rates.share(best)
        listing = ", ".join(f"{samples}: {rate * feeders:.3g}" for samples, rate in promised.items())
        reason = f"samples/s promised by size: {listing} ({machines * feeders:.3g} machines, {line_s:.2g} s on lines,"
        return Choice(best, limit, f"{reason} {most:.0%} of the device's best rate); {bound}")

    @property
    def _visits(self) -> int:
        return self._manifest.pipeline.stages

    def _service_s(self, samples: int) -> float:
        """Of a microbatch at one machine: ours; stages are cut to cost the same."""
        used = self._rates.share(self._choice.samples) if self._choice is not None else 1.0
        return samples * used / max(1e-9, self._speed() * self._rates.share(samples))

    def _places(self, swarm: Swarm) -> int:
        """Microbatches of one feeder that each stage after it holds, at most."""
        fewest = max(1, min(swarm.sizes[1:], default=1))
        return max(1, self._manifest.limits.in_flight_max * fewest // max(1, swarm.sizes[0]))
