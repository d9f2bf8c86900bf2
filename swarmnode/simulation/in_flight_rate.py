"""The rate that the samples in flight allow: what feeders may keep under way, over the time of a round trip.

Feeders choose the size of microbatches by the same prediction (pipeline/microbatch_size.py), with measured times; here
they come from the fleet's numbers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from swarmnode.manifest import Manifest
from swarmnode.pipeline.microbatch_size import sizes_of, throughput
from swarmnode.pipeline.staleness import window_limit
from swarmnode.simulation.fleet import MachineKind
from swarmnode.simulation.geography import RELAY_RATE, Nat, rtt_s
from swarmnode.simulation.metered_replica import PIECE_TOKENS

SATURATED = 1.01  # guess: twice as many in flight would be less than so many times as fast


def in_flight_rate(
    manifest: Manifest, stages: Sequence[Sequence[MachineKind]], flop: Sequence[float], flops: Sequence[float], hop: int
) -> tuple[float, bool]:
    """(samples per second, if feeders choose the best size of microbatches; whether the machines have as much work as
    queues may hold, so that more in flight would add nothing).

    `stages`: the machines of each stage, and their `flops` together; `flop` of a token there, forward and backward;
    `hop`: bytes of a sample between two stages, one way.
    """
    sizes = [len(here) for here in stages]
    if not min(sizes):
        return 0.0, False
    feeders = sizes[0]
    slots = max(1, manifest.limits.in_flight_max * min(sizes) // feeders)
    wait_s, byte_s = _lines(stages)
    best = 0.0, False
    for samples in sizes_of(manifest, max(sizes), 0):
        limit, _ = window_limit(manifest, sizes, feeders, 0, samples)
        count = feeders * min(limit, manifest.pipeline.window_max, slots)
        tokens = samples * manifest.model.context + PIECE_TOKENS
        work_s = sum(
            one * tokens * size / rate for one, size, rate in zip(flop, sizes, flops, strict=True)
        )  # of a mean machine of each stage
        work_s, line_s = work_s / len(sizes), wait_s + byte_s * samples * hop
        rate, more = (throughput(many, sum(sizes), len(sizes), work_s, line_s) for many in (count, 2 * count))
        best = max(best, (samples * rate, more < SATURATED * rate))
    return best


def _lines(stages: Sequence[Sequence[MachineKind]]) -> tuple[float, float]:
    """Seconds that a microbatch waits for distances on its way there and back, and for each byte of a hop."""
    wait_s = byte_s = 0.0
    for i in range(len(stages) - 1):
        senders, receivers = Counter(stages[i]), Counter(stages[i + 1])
        pairs = len(stages[i]) * len(stages[i + 1])
        for a, many in senders.items():
            for b, others in receivers.items():
                share = many * others / pairs
                relayed = 1.0 / RELAY_RATE if Nat.RELAYED in (a.address.nat, b.address.nat) else 0.0
                wait_s += share * rtt_s(a.address, b.address)
                byte_s += share * (1.0 / min(a.up, b.down) + 1.0 / min(b.up, a.down) + 2.0 * relayed)
    return wait_s, byte_s
