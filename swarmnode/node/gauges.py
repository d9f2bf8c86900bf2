"""Periodic gauges: bytes by kind, peers, delay of the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence

from swarmnode.metrics import name
from swarmnode.ports import Telemetry, Transport

KIND_OF_METHOD: Mapping[str, str] = {
    "process": "pipeline",
    "reserve": "pipeline",
    "opening": "pipeline",
    "recompute": "pipeline",
    "exchange": "gossip",
    "commit": "gossip",
    "fallback": "gossip",
    "table": "gossip",
    "packet_receipt": "gossip",
    "data_chunk": "data",
    "snapshot": "state",
    "chunk": "state",
}
PERIOD_MIN_S = 1.0
SHARE = 0.5  # guess: of the announce period, between two looks


async def measuring(
    transport: Transport,
    counts: Callable[[], Sequence[tuple[int, int]]],
    samples_total: Callable[[], int],
    telemetry: Telemetry,
    announce_period_s: float,
) -> None:
    """Keep the gauges current until cancelled. `counts`: of each stage members, and how many of them serve it."""
    loop = asyncio.get_running_loop()
    period_s = max(PERIOD_MIN_S, SHARE * announce_period_s)
    before: dict[tuple[str, str], int] = {}
    seen: Sequence[tuple[int, int]] = ()
    while True:
        asked = loop.time()
        await asyncio.sleep(period_s)
        telemetry.observe(name.LOOP_LAG_SECONDS, max(0.0, loop.time() - asked - period_s))
        if (here := counts()) != seen:
            _tell_swarm(here, telemetry)
            seen = here
        telemetry.gauge(name.RUN_SAMPLES, float(samples_total()))
        now = dict(transport.bytes_by_method())
        for (method, direction), nbytes in now.items():
            grown = nbytes - before.get((method, direction), 0)
            if grown:
                kind = KIND_OF_METHOD.get(method, "control")
                telemetry.count(name.LINK_BYTES, grown, kind=kind, direction=direction)
        before = now


def _tell_swarm(counts: Sequence[tuple[int, int]], telemetry: Telemetry) -> None:
    serving = [count for _, count in counts]
    telemetry.gauge(name.PEERS, float(sum(members for members, _ in counts)))
    telemetry.gauge(name.STAGES, float(len(serving)))
    telemetry.gauge(name.STAGES_EMPTY, float(serving.count(0)))
    telemetry.gauge(name.REPLICAS_FEWEST, float(min(serving)))
