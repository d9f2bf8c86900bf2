"""Agreement of the simulator with real processes: six node processes on loopback, and the same six in virtual time at
the speeds measured live. Tokens per second should agree within 20 %, bytes per token by kind within 5 %.

A simulated machine has the samples per second that the live one announced during the measurement (repeated forwards
count as work), and the latency of pings and of messages as long as an activation. On few cores with many processes a
message waits for its turn longer than it travels, and busy cores copy, hash and encrypt its bytes. Both runs are
measured over whole rounds, from the middle of one to the middle of another: rounds are so rare that one more or less in
a window of seconds is a third of the gossip.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
import os
import statistics
import time
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass, field
from typing import Any

from benchmarks.micro.transport import own_transport
from benchmarks.swarm.harness import SwarmHarness, swarm_of
from swarmnode.app.local.fleet import Fleet
from swarmnode.app.local.summary import NodeFacts, count
from swarmnode.app.planner.fleet import MachineKind
from swarmnode.app.planner.geography import Address
from swarmnode.base.errors import LocalFault, RemoteFault, Unavailable
from swarmnode.base.ids import PeerId, RunId
from swarmnode.base.metrics import name
from swarmnode.base.ports import Call, Transport, WireTensor
from swarmnode.base.wire import call_pb2 as wire
from swarmnode.model.split import stages_of
from swarmnode.net.membership.liveness import ping_fault
from swarmnode.net.transport.capacity import TIMEOUT_S, noise
from swarmnode.run.manifest import Manifest
from swarmnode.run.manifest.recipe import PRESETS
from swarmsim.life import simulate
from swarmsim.outcome import Outcome
from swarmsim.scenario import RecoveryBounds, Scenario

NODES = 6
WARM_SAMPLES = 1024  # until windows have grown and speeds come from real work
ROUNDS = 6  # guess: with three pairs each, a single exchange that failed is 5 % of the gossip
MEASURE_MAX_S = 400.0  # guess: longest wait for the rounds
LOOK_S = 0.25
PING_EVERY_S = 0.2  # guess: nodes in turn, about fifty calls to each
STALLS = 0.02  # guess: share of pings, the longest, caused by the machine and not the network
LONG_EVERY = 7  # guess: one ping in so many carries LONG_BYTES; coprime to NODES, so that all get some
LONG_BYTES = 1 << 18  # an activation of the demo's: 8 samples of 128 tokens of 128 bf16
SLOWER = 1.5  # slowdown of the simulated swarm that still reaches the same sample
RATE_WITHIN = 0.20
BYTES_WITHIN = 0.05
KINDS = ("pipeline", "gossip")


def run(rounds: int = ROUNDS, preset: str = "demo") -> dict[str, Any]:
    """{"live", "simulated", "ratio", "agrees"}: tokens per second, and bytes per token by kind. `load`: processes ready
    to run during the measurement, including the swarm's own."""
    manifest = PRESETS[preset]
    with swarm_of(manifest, NODES) as swarm:
        machines, live, (first, last), wall_s = asyncio.run(_live(swarm, manifest, rounds))
    simulated = _simulated(manifest, machines, (first, last), wall_s)
    ratio = {key: simulated[key] / live[key] for key in live if live[key]}
    agrees = {
        key: abs(value - 1.0) <= (RATE_WITHIN if key == "tokens_per_s" else BYTES_WITHIN)
        for key, value in ratio.items()
    }
    return {
        "live": live,
        "simulated": simulated,
        "ratio": ratio,
        "agrees": agrees,
        "samples": [first, last],
        "seconds": round(wall_s, 1),
        "load": os.getloadavg()[0],
        "machines": {
            f"stage {kind.stage}, {kind.name}": f"{kind.flops:.3g} FLOP/s, ping {2000 * kind.address.access_s:.1f} ms, "
            f"{kind.up / 1e6:.0f} MB/s"
            for kind in machines
        },
    }


async def _live(
    swarm: SwarmHarness, manifest: Manifest, rounds: int
) -> tuple[tuple[MachineKind, ...], dict[str, float], tuple[int, int], float]:
    """Measured machines, rates of the swarm over `rounds`, samples at both ends, and seconds between."""
    fleet = swarm.fleet
    async with swarm.running():
        size = manifest.gossip.round_samples
        begin = (math.ceil(WARM_SAMPLES / size) + 0.5) * size
        await _reached(fleet, begin)
        loop = asyncio.get_running_loop()
        begun = loop.time()
        first = _sums(fleet.facts())
        async with asyncio.timeout(MEASURE_MAX_S):
            async with _pinging(fleet) as ways:
                await _reached(fleet, begin + rounds * size)
        wall_s = loop.time() - begun
        facts = fleet.facts()
        last = _sums(facts)
        context = manifest.model.context
        ends = first["tokens"] // context, last["tokens"] // context
        return _machines(manifest, facts, ways), _rates(first, last, wall_s), ends, wall_s


def typical(seconds: Iterable[float]) -> float:
    """Mean without the longest STALLS: a machine that pauses once for a second is not that far away."""
    ordered = sorted(seconds)
    return statistics.fmean(ordered[: math.ceil((1.0 - STALLS) * len(ordered))])


@dataclass(slots=True)
class CallTimes:
    """Round-trip seconds of calls to nodes: empty ones by node, and those with LONG_BYTES in the request; and the
    samples per second that each node announced meanwhile."""

    told: defaultdict[PeerId, list[float]] = field(default_factory=lambda: defaultdict(list))
    empty_s: defaultdict[PeerId, list[float]] = field(default_factory=lambda: defaultdict(list))
    long_s: list[float] = field(default_factory=list)

    def bytes_s(self) -> float:
        """Seconds that a message's bytes add to its latency. At least half of a long call's time counts as theirs."""
        empty_s = typical(itertools.chain(*self.empty_s.values()))
        long_s = typical(self.long_s)
        return LONG_BYTES / max(long_s - empty_s, long_s / 2.0)


@contextlib.asynccontextmanager
async def _pinging(fleet: Fleet) -> AsyncIterator[CallTimes]:
    """Call each node repeatedly from a separate peer with its own event loop and p2pd."""
    ways = CallTimes()
    nodes = [child.ready for child in fleet.nodes if child.alive and child.ready is not None]
    run_id = RunId(nodes[0].run_id)

    payload = noise()[:LONG_BYTES]
    long = Call(wire.Request(measure=wire.Measure()), (WireTensor("u8", (LONG_BYTES,), payload),))

    async def measure(transport: Transport) -> None:
        for turn, node in enumerate(itertools.cycle(nodes)):
            peer = PeerId(node.peer_id)
            asked = time.perf_counter()
            with contextlib.suppress(RemoteFault, Unavailable):
                if turn % LONG_EVERY:
                    if await ping_fault(transport, run_id, peer) is None:
                        ways.empty_s[peer].append(time.perf_counter() - asked)
                else:
                    await transport.call(peer, long, timeout_s=TIMEOUT_S, reply_bytes_max=0)
                    ways.long_s.append(time.perf_counter() - asked)
            for facts in fleet.facts():
                for known in facts.status.peers if facts.status else ():
                    ways.told[PeerId(known.peer_id)].append(known.samples_per_second)
            await asyncio.sleep(PING_EVERY_S)

    async with own_transport(run_id) as transport:
        for node in nodes:
            await transport.connect(PeerId(node.peer_id), node.addresses)
        async with asyncio.TaskGroup() as tasks:
            pinging = tasks.create_task(measure(transport))
            yield ways
            pinging.cancel()


async def _reached(fleet: Fleet, samples: float) -> None:
    while count(fleet.facts(), name.SAMPLES) < samples:
        await asyncio.sleep(LOOK_S)
        await fleet.poll()


def _sums(facts: list[NodeFacts]) -> Counter[str]:
    sums: Counter[str] = Counter({"tokens": count(facts, name.TOKENS)})
    for kind in KINDS:
        sums[kind] = count(facts, name.LINK_BYTES, kind=kind, direction="sent")
    return sums


def _rates(first: Counter[str], last: Counter[str], wall_s: float) -> dict[str, float]:
    tokens = max(1, last["tokens"] - first["tokens"])
    rates = {"tokens_per_s": tokens / wall_s}
    return rates | {f"{kind} bytes per token": (last[kind] - first[kind]) / tokens for kind in KINDS}


def _machines(manifest: Manifest, facts: list[NodeFacts], ways: CallTimes) -> tuple[MachineKind, ...]:
    """A machine kind per node: its FLOP/s, from the samples per second it announced at its stage."""
    parts = stages_of(manifest)
    if not ways.long_s:
        raise LocalFault("no node received a long message: the bandwidth for the simulator is unknown")
    bytes_s = ways.bytes_s()
    kinds = []
    for node in facts:
        status = node.status
        if status is None or not (told := ways.told.get(PeerId(status.peer_id))):
            continue
        flops = statistics.harmonic_mean(told) * 3.0 * parts[status.stage].cost * manifest.model.context
        if not (rtts := ways.empty_s.get(PeerId(status.peer_id))):
            raise LocalFault(f"{node.name} answered no ping: its latency for the simulator is unknown")
        address = Address("local", typical(rtts) / 2.0)  # each end has half of a round trip
        kinds.append(MachineKind(node.name, 1, flops, bytes_s, bytes_s, address, stage=int(status.stage)))
    return tuple(kinds)


def _simulated(
    manifest: Manifest, machines: tuple[MachineKind, ...], ends: tuple[int, int], wall_s: float
) -> dict[str, float]:
    """Rates in virtual time, between the same samples."""
    scenario = Scenario(
        "agreement",
        seconds=WARM_SAMPLES * wall_s / (ends[1] - ends[0]) + SLOWER * wall_s * ends[1] / (ends[1] - ends[0]),
        fleet=machines,
        manifest=manifest,
        processors=os.cpu_count() or 1,
        memory_gbps=1e6,  # the speeds already include steps and copies
        bounds=RecoveryBounds(window_s=1.0, throughput=0.0, spread=1e9),
    )
    return _window(simulate(scenario, 0), manifest, ends)


def _window(outcome: Outcome, manifest: Manifest, ends: tuple[int, int]) -> dict[str, float]:
    first, last = (min(outcome.curve, key=lambda sample: abs(sample.samples - end)) for end in ends)
    context = manifest.model.context

    def sums(sample: Any) -> Counter[str]:
        return Counter({"tokens": int(sample.samples * context)} | {k: sample.bytes.get(k, 0) for k in KINDS})

    return _rates(sums(first), sums(last), last.at_s - first.at_s)
