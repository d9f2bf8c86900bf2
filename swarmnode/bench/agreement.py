"""Does the simulator agree with the world: six node processes on loopback, and the same six in virtual time with the
speeds that the live ones measured of themselves. Tokens a second should agree within 20 %, bytes a token by kind within
5 %.

A machine is told to the simulator by what it announced while it was measured (samples a second; forwards done again are
work, too), and by how long pings to it and messages as long as an activation took meanwhile: where few cores serve many
processes, a message waits for its turn longer than it travels, and its bytes are copied, hashed and encrypted by cores
that have other things to do. Both are measured over whole rounds, from the middle of one to that
of another: rounds come so seldom that one more or less in a window of seconds is a third of the gossip.
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

from swarmnode.bench.transport import own_transport
from swarmnode.bench.watching import Watched, swarm_of
from swarmnode.errors import LocalFault, RemoteFault, Unavailable
from swarmnode.ids import PeerId, RunId
from swarmnode.local.fleet import Fleet
from swarmnode.local.summary import NodeFacts, count
from swarmnode.manifest import PRESETS, Manifest
from swarmnode.membership.liveness import alive
from swarmnode.metrics import name
from swarmnode.model.split import split
from swarmnode.ports import Call, Transport, WireTensor
from swarmnode.simulation.fleet import Kind
from swarmnode.simulation.geography import Address
from swarmnode.simulation.outcome import Outcome
from swarmnode.simulation.scenario import Bounds, Scenario
from swarmnode.simulation.world import simulate
from swarmnode.transport.capacity import TIMEOUT_S, noise
from swarmnode.wire import call_pb2 as wire

NODES = 6
WARM_SAMPLES = 1024  # windows have grown, speeds are measured on real work
ROUNDS = 6  # guess: with three pairs each, a single exchange that failed is 5 % of the gossip
MEASURE_MAX_S = 400.0  # guess: rounds are not waited for any longer
LOOK_S = 0.25
PING_EVERY_S = 0.2  # guess: one node after the other, so that each is asked some fifty times
STALLS = 0.02  # guess: share of pings, the longest, that tell of the machine and not of the way
LONG_EVERY = 7  # one ping of so many carries LONG_BYTES; no multiple of NODES, so that all get some; guess
LONG_BYTES = 1 << 18  # an activation of the demo's: 8 samples of 128 tokens of 128 bf16
SLOWER = 1.5  # the simulated swarm may be so much slower and still come to the same sample
RATE_WITHIN, BYTES_WITHIN = 0.20, 0.05
KINDS = ("pipeline", "gossip")


def run(rounds: int = ROUNDS, preset: str = "demo") -> dict[str, Any]:
    """{"live", "simulated", "ratio", "agrees"}: tokens a second, and bytes a token by kind. `load`: processes that
    wanted to run, the swarm's own included, while it was measured."""
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
    swarm: Watched, manifest: Manifest, rounds: int
) -> tuple[tuple[Kind, ...], dict[str, float], tuple[int, int], float]:
    """The machines as they found themselves, what the swarm did in `rounds`, samples at both ends, seconds between."""
    fleet = swarm.fleet
    async with swarm.running():
        size = manifest.gossip.round_samples
        begin = (math.ceil(WARM_SAMPLES / size) + 0.5) * size
        await _reached(fleet, begin)
        loop = asyncio.get_running_loop()
        begun, first = loop.time(), _sums(fleet.facts())
        async with asyncio.timeout(MEASURE_MAX_S):
            async with _pinging(fleet) as ways:
                await _reached(fleet, begin + rounds * size)
        wall_s, facts = loop.time() - begun, fleet.facts()
        last, context = _sums(facts), manifest.model.context
        ends = first["tokens"] // context, last["tokens"] // context
        return _machines(manifest, facts, ways), _rates(first, last, wall_s), ends, wall_s


def typical(seconds: Iterable[float]) -> float:
    """The mean without the longest STALLS of them: a machine that once stands still for a second is not so far away."""
    ordered = sorted(seconds)
    return statistics.fmean(ordered[: math.ceil((1.0 - STALLS) * len(ordered))])


@dataclass(slots=True)
class Ways:
    """Seconds that calls to nodes took, there and back: empty ones by node, and those that carried LONG_BYTES there.
    Samples a second that each node announced meanwhile."""

    told: defaultdict[PeerId, list[float]] = field(default_factory=lambda: defaultdict(list))
    empty_s: defaultdict[PeerId, list[float]] = field(default_factory=lambda: defaultdict(list))
    long_s: list[float] = field(default_factory=list)

    def bytes_s(self) -> float:
        """What a message's bytes add to its way. At least half of a long call counts as theirs."""
        empty_s = typical(itertools.chain(*self.empty_s.values()))
        long_s = typical(self.long_s)
        return LONG_BYTES / max(long_s - empty_s, long_s / 2.0)


@contextlib.asynccontextmanager
async def _pinging(fleet: Fleet) -> AsyncIterator[Ways]:
    """Calls to each node by a stranger of their kind, an event loop and a p2pd of its own."""
    ways = Ways()
    nodes = [child.ready for child in fleet.nodes if child.alive and child.ready is not None]
    run_id = RunId(nodes[0].run_id)

    payload = noise()[:LONG_BYTES]
    long = Call(wire.Request(measure=wire.Measure()), (WireTensor("u8", (LONG_BYTES,), payload),))

    async def ping(transport: Transport) -> None:
        for turn, node in enumerate(itertools.cycle(nodes)):
            peer, asked = PeerId(node.peer_id), time.perf_counter()
            with contextlib.suppress(RemoteFault, Unavailable):
                if turn % LONG_EVERY:
                    await alive(transport, run_id, peer)
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
            pinging = tasks.create_task(ping(transport))
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


def _machines(manifest: Manifest, facts: list[NodeFacts], ways: Ways) -> tuple[Kind, ...]:
    """One kind of machine a node: the FLOP/s behind the samples a second it announced, at the stage it serves."""
    parts = split(manifest.model, manifest.pipeline.stages)
    if not ways.long_s:
        raise LocalFault("no node took a long message: what bytes cost cannot be told to the simulator")
    bytes_s = ways.bytes_s()
    kinds = []
    for node in facts:
        status = node.status
        if status is None or not (told := ways.told.get(PeerId(status.peer_id))):
            continue
        flops = statistics.harmonic_mean(told) * 3.0 * parts[status.stage].cost * manifest.model.context
        if not (rtts := ways.empty_s.get(PeerId(status.peer_id))):
            raise LocalFault(f"{node.name} answered no ping: its way cannot be told to the simulator")
        address = Address("local", typical(rtts) / 2.0)  # of a round trip, each end has half
        kinds.append(Kind(node.name, 1, flops, bytes_s, bytes_s, address, stage=int(status.stage)))
    return tuple(kinds)


def _simulated(
    manifest: Manifest, machines: tuple[Kind, ...], ends: tuple[int, int], wall_s: float
) -> dict[str, float]:
    """The same in virtual time, between the same samples."""
    scenario = Scenario(
        "agreement",
        seconds=WARM_SAMPLES * wall_s / (ends[1] - ends[0]) + SLOWER * wall_s * ends[1] / (ends[1] - ends[0]),
        fleet=machines,
        manifest=manifest,
        processors=os.cpu_count() or 1,
        memory_gbps=1e6,  # steps and copies are in the speeds already
        bounds=Bounds(window_s=1.0, throughput=0.0, spread=1e9),
    )
    return _window(simulate(scenario, 0), manifest, ends)


def _window(outcome: Outcome, manifest: Manifest, ends: tuple[int, int]) -> dict[str, float]:
    first, last = (min(outcome.curve, key=lambda sample: abs(sample.samples - end)) for end in ends)
    context = manifest.model.context

    def sums(sample: Any) -> Counter[str]:
        return Counter({"tokens": int(sample.samples * context)} | {k: sample.bytes.get(k, 0) for k in KINDS})

    return _rates(sums(first), sums(last), last.at_s - first.at_s)
