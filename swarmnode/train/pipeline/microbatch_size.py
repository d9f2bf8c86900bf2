"""Choose from measurements how many samples travel together, and how many microbatches a feeder keeps in flight.

Staleness bounds the samples in flight (`window_limit`). With many machines for few samples, a replica's share of the
batch is cut into several microbatches: more machines then work at once, and the gradient of a share is still the sum
over its microbatches. But a small microbatch costs more time per sample. So a feeder predicts the samples per second
for each size that a share can be cut into, and takes the largest prediction. It needs the device's speed by size
(node/probe.py), the time microbatches spend on links, and the number of machines.

The prediction is mean value analysis of a closed network of queues (Reiser and Lavenberg 1980): a microbatch visits one
machine of each stage, finds there on average what the network holds with one microbatch less, and spends the rest of
its round trip on links. Service times hardly vary, so half of the piece in work is left on average (Reiser 1979, window
flow control). Six machines and three stages in the simulator, `swarmnode simulate --scenario six-machines`: predicted
.31, .52 and .73 busy with 2, 4 and 8 microbatches in flight, simulated .33, .65 and .88.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from swarmnode.base.ema import Ema, EmaStart
from swarmnode.base.ids import PeerId
from swarmnode.base.metrics.name import STALENESS
from swarmnode.base.ports import Tape
from swarmnode.model.split import stages_of
from swarmnode.net.membership.swarm import Swarm
from swarmnode.run.manifest import Manifest
from swarmnode.run.manifest.gossip_compat import averages_gradients, meets
from swarmnode.train.pipeline.next_hop import LATE_FACTOR

BETTER = 1.05  # guess: another size must promise this much more, or noise would change the size all the time
REVIEW = 16  # guess: completed microbatches until the link time is reviewed
LOOPBACK = ("/ip4/127.", "/ip6/::1/")
IN_FLIGHT = 4.0
"""Samples in flight for each machine that keep .85 of them at work: 24 equal machines at home, inner batch 128, .85 of
the time [simulated; n in flight keep n / (n + 1) busy in a closed network, below]."""
SETTLED_S = 60.0  # derived: speeds are measured over half of it; guess: so long after the newest machine
IDLE_SHARE = 0.5  # guess: of the machines at work at a time, below which their owners should know why


QUEUED_MAX = 2.0
"""Microbatches that wait at a machine on average, from which on more of them make gradients later and add little: a
closed network of equal machines with n in flight for each keeps n / (n + 1) of them busy (Kleinrock 1975)."""
UNEVEN = 2
"""So many times as many are in flight as that takes with equal machines. Simulated, 300 s, samples with 1, 1.5 and 2
times, over those of a window that follows measured queues as TCP Vegas does: churn-16 .92, 1.01 and 1.05, home-links
.85, .96 and 1.00, two-continents .94, 1.03 and 1.03."""


# The age of gradients, in inner steps of their replica between forward and backward, and how it is bounded.
#
# If the replicas of a stage together average B samples between two steps, and f samples are in flight in the whole
# swarm, a gradient is about f / B steps late (PipeDream, arXiv 1806.03377, section 3.3, counts the same delay). Late
# gradients are the main loss of a swarm's learning per sample [measured: `swarmnode bench learning`]. Two rules bound
# the delay at `pipeline.staleness_max` steps: a feeder keeps no more in flight than `window_limit`, and a replica
# postpones an inner step that would make an outstanding gradient too old. A gradient that is too old nevertheless is
# not added.

AVERAGED_MAX = 4  # measured up to this: replicas for which the learning rate grows (inner.replica_rate)

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


def replica_share(manifest: Manifest, replicas: int) -> int:
    """Samples per step of one of `replicas` replicas of a stage."""
    return replica_batch(manifest, manifest.inner.inner_batch, replicas)


def averaged(manifest: Manifest, replicas: int) -> int:
    """The replicas of a stage of `replicas` whose steps one round averages, at most AVERAGED_MAX; 1 where the learning
    rate does not follow them."""
    gossip = manifest.gossip
    if manifest.inner.replica_rate == "same" or not meets(gossip):
        return 1
    return max(1, min(replicas, gossip.group or replicas, AVERAGED_MAX))


def window_limit(manifest: Manifest, sizes: Sequence[int], feeders: int, microbatch: int) -> tuple[int, str]:
    """(microbatches of `microbatch` samples that one of `feeders` feeders may keep in flight, the reason), given each
    stage's replicas in `sizes`.

    All feeders' samples in flight amount to at most staleness_max steps of the stage with the fewest replicas.
    """
    inner = manifest.inner
    steps = max(1, manifest.pipeline.staleness_max)
    feeders = max(1, feeders)
    fewest = max(1, min(sizes))
    batch = fewest * replica_batch(manifest, max(inner.inner_batch, inner.inner_batch_max), fewest)
    limit = max(1, steps * batch // (microbatch * feeders))
    return limit, f"{steps} x {batch} samples in flight at {fewest} replicas, {feeders} feeders, {microbatch} at a time"


@dataclass(slots=True, eq=False)
class PendingForward:
    """A forward whose gradient is due: its replica's inner steps at that time, the loop time, its samples and tape."""

    inner_steps: int
    since_s: float
    samples: int = 0
    tape: Tape | None = None
    mark: bytes = b""  # of its slow weights at that time
    dropped: bool = False

    def age(self, inner_steps: int) -> int:
        """Inner steps since then; at least 0, as loaded state may have counted fewer."""
        return max(0, inner_steps - self.inner_steps)

    def drop(self) -> None:
        """Free the tape: its gradient has been used, or never comes. On any thread, but not during its backward."""
        self.dropped = True
        self.tape = None


class PendingGradients:
    """A replica's forwards whose gradient has not come back. Pure: told of steps and loop times, on one thread."""

    def __init__(self, staleness_max: int) -> None:
        self._staleness_max = staleness_max
        self._opened: list[PendingForward] = []
        self._usual_s = Ema(start=EmaStart.FIRST)

    @property
    def samples(self) -> int:
        """Samples whose gradient is still to come."""
        samples = 0
        for pending in self._opened:
            if not pending.dropped:
                samples += pending.samples
        return samples

    @property
    def nbytes(self) -> int:
        """Memory that their tapes hold. On any thread."""
        nbytes = 0
        for pending in self._opened:
            tape = pending.tape
            if tape is not None:
                nbytes += tape.nbytes
        return nbytes

    def opened(self, inner_steps: int, now_s: float, samples: int = 0, tape: Tape | None = None) -> PendingForward:
        """Record a forward of `samples` samples made after `inner_steps` steps."""
        pending = PendingForward(inner_steps, now_s, samples, tape)
        self._opened = [one for one in self._opened if not one.dropped]
        self._opened.append(pending)
        return pending

    def closed(self, pending: PendingForward, now_s: float) -> None:
        """Close a forward whose gradient came at `now_s`. Repeated calls do nothing."""
        if not pending.dropped:
            self._usual_s.add(now_s - pending.since_s)
            pending.drop()

    def put_off(self, inner_steps: int, now_s: float) -> bool:
        """Whether another step would make an outstanding gradient too old."""
        patience_s = LATE_FACTOR * self._usual_s.value if self._usual_s.known else float("inf")
        for pending in self._opened:
            if pending.dropped or now_s - pending.since_s > patience_s:
                continue
            if pending.age(inner_steps + 1) > self._staleness_max:
                return True
        return False


@dataclass(frozen=True, slots=True)
class SampleRates:
    """A device's measured samples per second by samples of a microbatch, interpolated in between."""

    measured: Mapping[int, float]

    @property
    def best(self) -> float:
        """Samples per second with microbatches of the best size."""
        return max(self.measured.values())

    def share(self, samples: int) -> float:
        """Share of the best rate with microbatches of `samples` samples."""
        sizes = sorted(self.measured)
        at = bisect.bisect_left(sizes, samples)
        right = sizes[min(at, len(sizes) - 1)]
        left = sizes[max(0, at - 1)] if right > samples else right
        # The time of a microbatch is nearly linear in its samples; the rate is not.
        low = left / self.measured[left]
        high = right / self.measured[right]
        way = (samples - left) / (right - left) if right > left else 0.0
        seconds = low + way * (high - low)
        if samples > right:
            seconds *= samples / right
        return samples / seconds / self.best


def loopback(swarm: Swarm, me: PeerId) -> int:
    """Nodes reachable only on this machine, which share its processors with us. 0 if we are reachable from elsewhere,
    whatever others announce."""
    here = {
        member.peer
        for member in swarm.members()
        if member.addresses and all(address.startswith(LOOPBACK) for address in member.addresses)
    }
    return len(here) if me in here else 0


@dataclass(frozen=True, slots=True)
class Host:
    """Resources that nodes on one machine share. `processors`: nodes that can compute at once; infinite if each node
    has its own device. `nodes`: how many of the swarm run on this machine."""

    processors: Callable[[], float] = lambda: math.inf
    nodes: Callable[[Swarm, PeerId], int] = loopback


@dataclass(frozen=True, slots=True)
class SizeChoice:
    """`samples` travel together, and a feeder keeps at most `limit` microbatches in flight."""

    samples: int
    limit: int
    reason: str


def sizes_of(manifest: Manifest, replicas: int) -> list[int]:
    """The sizes into which one of `replicas` replicas can cut its share, as evenly as possible: from the largest
    allowed, with twice as many pieces each time, down to one sample."""
    share = replica_share(manifest, replicas)
    pieces = -(-share // manifest.inner.microbatch)
    sizes: list[int] = []
    while not sizes or sizes[-1] > 1:
        sizes.append(-(-share // pieces))
        pieces *= 2
    return sizes


def throughput(in_flight: int, machines: float, visits: int, service_s: float, line_s: float) -> float:
    """Microbatches per second as `in_network`."""
    return in_network(in_flight, machines, visits, service_s, line_s)[0]


def in_network(in_flight: int, machines: float, visits: int, service_s: float, line_s: float) -> tuple[float, int]:
    """(microbatches per second, those in flight) with `in_flight` of them at most, each visiting `visits` of `machines`
    for `service_s` and spending `line_s` on links, and of QUEUED_MAX waiting at a machine at most."""
    work_s = visits * service_s
    rate = 0.0
    count = 1
    held = 0.0  # mean number at a machine
    busy = 0.0  # mean number in work there
    for count in range(1, in_flight + 1):
        stay_s = work_s * (1.0 + max(0.0, held - busy / 2.0))
        rate = min(count / (line_s + stay_s), machines / work_s)
        held = rate * stay_s / machines
        busy = rate * work_s / machines
        if rate * (stay_s - work_s) > QUEUED_MAX * machines:
            break
    return rate, count


def step_s(microbatches: float, machines: float, visits: int, service_s: float, line_s: float) -> float:
    """Seconds from the first forward of a numbered step to its last backward: `microbatches` each visit `visits` of
    `machines` for `service_s` and spend `line_s` on links, and nothing of the next step is on the way behind them."""
    behind = max(0.0, microbatches * visits / machines - 1.0)
    return (behind + visits) * service_s + line_s


def slowness(
    manifest: Manifest,
    speeds: Sequence[tuple[int, float]],
    samples_per_s: float,
    at_once: float = math.inf,
) -> tuple[str, str] | None:
    """(what is wrong, the reason and what to change) if a swarm at `samples_per_s` is slower than its best machine
    would be alone, or if most of its machines wait; else None.

    `speeds`: each machine's stage and its measured samples per second there; `at_once`: how many can compute at a time,
    where they share processors. Machines are compared as if each had memory for the whole model.
    """
    parts = stages_of(manifest)
    whole = sum(part.cost for part in parts)
    alone = [rate * parts[stage].cost / whole for stage, rate in speeds if rate > 0.0]
    sizes = [sum(stage == part.stage for stage, _ in speeds) for part in parts]
    if len(alone) < 2 or not all(sizes) or samples_per_s <= 0.0:
        return None
    count = len(alone)
    most = min(float(len(alone)), at_once)
    working = min(most, count * samples_per_s / sum(alone))
    context = manifest.model.context
    in_flight, _ = window_limit(manifest, sizes, 1, 1)
    needed = math.ceil(IN_FLIGHT * most)
    if len(parts) > 1 and in_flight < needed:
        reason = f"At most {in_flight} samples are in flight; inner.inner_batch_max = {needed} would keep more at work"
    else:
        reason = "They wait for lines or rounds; `swarmnode plan --search` finds settings that suit them"
    if samples_per_s < max(alone):
        rate = samples_per_s * context
        one = max(alone) * context
        title = f"The swarm does {rate:,.0f} tokens/s; one of its machines alone would do {one:,.0f}"
    elif working < IDLE_SHARE * most:
        title = f"{max(1, round(working))} of {count} machines work at a time"
    else:
        return None
    return title, reason


class MicrobatchSizer:
    """Chooses for one feeder. Pure: told of the stages and of completed microbatches."""

    def __init__(
        self, manifest: Manifest, me: PeerId, rates: SampleRates, speed: Callable[[], float], host: Host
    ) -> None:
        """`speed`: samples per second of this node on its stage, at the sizes now used."""
        self._manifest = manifest
        self._me = me
        self._rates = rates
        self._speed = speed
        self._host = host
        self._line_s = Ema(start=EmaStart.FIRST)
        self._back = 0
        self._seen: object = None
        self._choice: SizeChoice | None = None

    def record_trip(self, samples: int, round_trip_s: float, queued_s: float) -> None:
        """Record a completed microbatch of `samples` samples, whose round trip included `queued_s` of queueing at
        machines."""
        self._back += 1
        line_s = max(0.0, round_trip_s - queued_s - self._visits * self._service_s(samples))
        self._line_s.add(line_s)

    def choose(self, swarm: Swarm) -> SizeChoice:
        """The choice for the current stages; unchanged unless they changed or another size is clearly better."""
        seen = (
            swarm.sizes,
            len(swarm.feeders()),
            self._manifest.inner.inner_batch,
            self._back // REVIEW,
        )
        if self._choice is None or seen != self._seen:
            self._seen = seen
            self._choice = self._chosen(swarm)
        return self._choice

    def _chosen(self, swarm: Swarm) -> SizeChoice:
        feeders = max(1, len(swarm.feeders()))
        machines, line_s = self._network(swarm, feeders)
        promised = dict[int, float]()
        limits = dict[int, int]()
        for samples in sizes_of(self._manifest, max(swarm.sizes)):
            limit, _ = window_limit(self._manifest, swarm.sizes, feeders, samples)
            limit = min(limit, self._manifest.pipeline.window_max)
            count = min(limit, self._slots(swarm))
            rate, needed = in_network(count, machines, self._visits, self._service_s(samples), line_s)
            limits[samples] = min(limit, UNEVEN * needed)
            promised[samples] = samples * rate
            if averages_gradients(self._manifest):
                share = self._manifest.inner.inner_batch / feeders
                service_s = self._service_s(samples)
                promised[samples] = share / step_s(share / samples, machines, self._visits, service_s, line_s)
        best = self._best(promised)
        _, bound = window_limit(self._manifest, swarm.sizes, feeders, best)
        listing = ", ".join(f"{samples}: {rate * feeders:.3g}" for samples, rate in promised.items())
        reason = (
            f"samples/s predicted by size: {listing} ({machines * feeders:.3g} machines, {line_s:.2g} s on links,"
            f" {self._rates.share(best):.0%} of the device's best rate); {bound}"
        )
        return SizeChoice(best, limits[best], reason)

    def _network(self, swarm: Swarm, feeders: int) -> tuple[float, float]:
        """(machines of each of `feeders`, seconds of a microbatch on links). Nodes that share processors count as the
        machines that these are; a message between them costs processor time and no waiting time."""
        total = max(1, sum(swarm.sizes))
        here = self._host.nodes(swarm, self._me)
        shared = min(float(here), max(1.0, self._host.processors()))
        line_s = 0.0 if here >= total and shared < here else self._line_s.value
        return max(1.0, total - here + shared) / feeders, line_s

    def _best(self, promised: Mapping[int, float]) -> int:
        """The size that promises most. The present one stays unless another is clearly better, or a larger one as good:
        it needs fewer messages, which cost processor time that no prediction counts."""
        best = max(promised, key=lambda samples: (promised[samples], samples))
        used = self._choice.samples if self._choice is not None else max(promised)
        if used not in promised or promised[best] >= BETTER * promised[used]:
            return best
        return max(samples for samples, rate in promised.items() if rate >= promised[used])

    @property
    def _visits(self) -> int:
        return self._manifest.pipeline.stages

    def _service_s(self, samples: int) -> float:
        """Seconds of one microbatch at one machine: ours, as stages are cut to equal cost."""
        used = self._rates.share(self._choice.samples) if self._choice is not None else 1.0
        return samples * used / max(1e-9, self._speed() * self._rates.share(samples))

    def _slots(self, swarm: Swarm) -> int:
        """Most microbatches of one feeder that each stage to which they are sent holds."""
        fewest = max(1, min(swarm.sizes[1:], default=1))
        return max(1, self._manifest.limits.in_flight_max * fewest // max(1, len(swarm.feeders())))
