"""Estimate a run on a fleet by formula, as a first answer before `simulate`.

The rate that the samples in flight allow: what feeders may keep under way, over the time of a round trip.

Feeders choose the size of microbatches by the same prediction (train/pipeline/microbatch_size.py), with measured times;
here they come from the fleet's numbers.
"""

from __future__ import annotations

import functools
import heapq
import itertools
import math
import operator
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from swarmnode.app.planner.fleet import MachineKind
from swarmnode.app.planner.geography import RELAY_RATE, Nat, rtt_s
from swarmnode.app.planner.learning_efficiency import learned
from swarmnode.app.planner.stage_memory import ADVICE, blocks_of, fit_of, repeated, shortages
from swarmnode.base.errors import UsageError
from swarmnode.base.ids import stage_name
from swarmnode.keep.transfer.snapshot import newcomer_part
from swarmnode.model.adapter import trained_count
from swarmnode.model.memory_budget import CPU, MemoryNeed, memory_need
from swarmnode.model.section import section_sizes, snapshot_nbytes
from swarmnode.model.split import StageLayers, stages_of
from swarmnode.run.gossip_rules import codecs
from swarmnode.run.manifest import Manifest, boundary_codes, boundary_nbytes, boundary_width
from swarmnode.run.manifest.gossip_compat import averages_gradients
from swarmnode.train.gossip.outer.traffic import message_nbytes, messages
from swarmnode.train.gossip.round import EXCHANGES_PER_ROUND, NARROWING, PLANNED, round_share
from swarmnode.train.pipeline.microbatch_size import IN_FLIGHT, sizes_of, throughput, window_limit
from swarmnode.train.pipeline.span import share_of

PIECE_TOKENS = 40
"""Fixed cost of a piece of work, in tokens. Measured: the demo's stages on one CPU thread take 1.5 to 2.7 ms, plus 5.2
ms for each sample of 128 tokens, forward and backward."""

ALIKE = 0.01  # guess: what an estimate cannot tell apart
SHARE_ALONE = 0.95  # simulated: of its FLOP/s, a machine that holds the whole model and waits for nobody
# Simulated: microbatches that an exchange takes of two devices beside its packets, in the mean; 8 cards at home with
# 125 M parameters (.71 s each) and 64 with 1 B (15 s each).
DEVICE_WAITS = 1.25
ROUND_TRIPS = 2.0  # of an exchange: the packets and the commit (train/gossip/exchange_machine.py)
ROUND_TRIPS_IN_PIECES = (
    2.5  # derived: commit, roster, pieces, means, close, each one way (train/gossip/butterfly/driver.py)
)


def balanced(
    speeds: Sequence[float], costs: Sequence[float], unable: Sequence[Collection[int]] | None = None
) -> list[int | None]:
    """A stage for each machine, in the given order: the fastest first, to the stage with the least speed per cost of
    those that it is not `unable` to serve. Machines that can serve the fewest stages come first. None: it can serve no
    stage."""
    heap = [(0.0, stage) for stage in range(len(costs))]
    stages: list[int | None] = [None] * len(speeds)
    order = sorted(range(len(speeds)), key=lambda i: (-len(unable[i]) if unable else 0, -speeds[i], i))
    for index in order:
        passed = []
        while heap and unable and heap[0][1] in unable[index]:
            passed.append(heapq.heappop(heap))
        if heap:
            load, stage = heapq.heappop(heap)
            stages[index] = stage
            passed.append((load + speeds[index] / costs[stage], stage))
        for one in passed:
            heapq.heappush(heap, one)
    return stages


def placed_in_blocks(
    speeds: Sequence[float], costs: Sequence[float], blocks: Sequence[Sequence[range]]
) -> list[int | None]:
    """A stage for each machine, in the given order, which then serves the block that `blocks` has for it there, empty
    where it can serve none. The widest come first, of equals the fastest: each goes where the least speed is."""
    loads = [0.0] * len(costs)
    widths = [max(map(len, mine)) for mine in blocks]
    found: list[int | None] = [None] * len(speeds)
    for index in sorted(range(len(speeds)), key=lambda i: (-widths[i], -speeds[i], i)):
        able = [stage for stage, block in enumerate(blocks[index]) if block]
        if not able:
            continue
        stage = min(able, key=loads.__getitem__)
        block = blocks[index][stage]
        speed = speeds[index] / sum(costs[one] for one in block)
        for one in block:
            loads[one] += speed
        found[index] = stage
    return found


def places(
    manifest: Manifest, machines: Sequence[MachineKind], *, memory: bool = True
) -> tuple[list[int | None], list[tuple[range, ...]]]:
    """(the stage of each of `machines`, the blocks of stages that each would serve, by stage)."""
    costs = [part.cost for part in stages_of(manifest)]
    of_kind = {kind: blocks_of(manifest, kind if memory else None) for kind in dict.fromkeys(machines)}
    blocks = [of_kind[kind] for kind in machines]
    speeds = [kind.flops for kind in machines]
    if manifest.pipeline.span_max > 1:
        return placed_in_blocks(speeds, costs, blocks), blocks
    unable = [{stage for stage, block in enumerate(mine) if not block} for mine in blocks]
    return balanced(speeds, costs, unable), blocks


@dataclass(frozen=True, slots=True)
class _Placement:
    """The machines of a stage, the block of stages that each serves, the share of its time that this one gets, and the
    FLOP/s that it has for it after forwards that its memory makes it do again."""

    stage: int
    machines: list[MachineKind]
    blocks: list[range]
    shares: list[float]
    flops: list[float]

    @property
    def speed(self) -> float:
        """FLOP/s of all machines for this stage."""
        return sum(self.flops)

    @property
    def up(self) -> float:
        """Bytes a second that the machines can send for this stage."""
        return sum(kind.up / len(block) for kind, block in zip(self.machines, self.blocks, strict=True))

    def ends_at(self, other: int) -> tuple[list[MachineKind], float]:
        """(machines whose block does not hold the stage `other` beside this one, their share of the speed)."""
        ends = [i for i, block in enumerate(self.blocks) if other not in block]
        return [self.machines[i] for i in ends], sum(self.flops[i] for i in ends) / (self.speed or 1.0)


class PipelineFlow(NamedTuple):
    """The limit that samples in flight set. `samples_per_s`: if feeders choose the best size of microbatches;
    `saturated`: whether the machines have as much work as queues may hold, so that more in flight would add nothing;
    `trip_s`: seconds of such a microbatch there and back, if it waits for no other."""

    samples_per_s: float
    saturated: bool
    trip_s: float


def in_flight_rate(
    manifest: Manifest, placements: Sequence[_Placement], flop: Sequence[float], share: float, hop: float
) -> PipelineFlow:
    """The flow of a pipeline. Where steps are numbered, the best size is that with which a step is over first.

    `placements`: the machines of each stage, of whose FLOP/s a `share` does useful work; `flop` of a token there,
    forward and backward; `hop`: bytes of a sample between two machines, one way.
    """
    sizes = [len(here.machines) for here in placements]
    if not min(sizes):
        return PipelineFlow(0.0, False, 0.0)
    if len(sizes) == 1:  # nothing is under way: each feeder's microbatches stay on its own machine
        return PipelineFlow(math.inf, True, 0.0)
    feeders = sizes[0]
    machines = sum(sum(here.shares) for here in placements)
    slots = max(1, manifest.limits.in_flight_max * min(sizes) // feeders)
    wait_s, byte_s = _lines(placements)
    step = manifest.inner.inner_batch if averages_gradients(manifest) else math.inf
    flows = list[PipelineFlow]()
    for samples in sizes_of(manifest, max(sizes)):
        limit, _ = window_limit(manifest, sizes, feeders, samples)
        count = feeders * min(limit, manifest.pipeline.window_max, slots)
        tokens = samples * manifest.model.context + PIECE_TOKENS
        work_s = sum(
            one * tokens * sum(here.shares) / (share * here.speed) for one, here in zip(flop, placements, strict=True)
        )  # of a mean machine of each stage
        work_s = work_s / len(sizes)
        line_s = wait_s + byte_s * samples * hop
        rate, more = (throughput(many, machines, len(sizes), work_s, line_s) for many in (count, 2 * count))
        flows.append(PipelineFlow(samples * rate, more < (1.0 + ALIKE) * rate, len(sizes) * work_s + line_s))
    return max(flows, key=lambda flow: 1.0 / (1.0 / flow.samples_per_s + flow.trip_s / step))


def in_flight_needed(manifest: Manifest, fleet: Sequence[MachineKind], share: float = 0.7) -> float:
    """Samples in flight that keep .85 of the machines of `fleet` busy: IN_FLIGHT a machine for each moment of work, and
    as many for the time on lines [simulated: 24 equal machines at home, and Kleinrock's closed network]."""
    machines = [kind for kind in fleet for _ in range(kind.count)]
    flop = sum(3.0 * part.cost for part in stages_of(manifest)) * manifest.model.context
    work_s = flop * len(machines) / sum(kind.flops for kind in machines) / share
    wait_s, byte_s = _line(machines, machines)
    line_s = (hops_of(manifest, fleet) - 1.0) * (wait_s + byte_s * sum(_ways_bytes(manifest)) / 2)
    return IN_FLIGHT * len(machines) * (1.0 + line_s / work_s)


def hops_of(manifest: Manifest, fleet: Sequence[MachineKind], *, memory: bool = True) -> float:
    """Machines that a microbatch visits on its way, in the mean."""
    if manifest.pipeline.span_max == 1:
        return float(manifest.pipeline.stages)
    return _hops(_placed(manifest, fleet, stages_of(manifest), memory=memory))


def _hops(placements: Sequence[_Placement]) -> float:
    return 1.0 + sum(here.ends_at(here.stage + 1)[1] for here in placements[:-1])


def _lines(placements: Sequence[_Placement]) -> tuple[float, float]:
    """Seconds that a microbatch waits for distances on its way there and back, and for each byte of a hop."""
    wait_s = byte_s = 0.0
    for here, after in itertools.pairwise(placements):
        senders, share = here.ends_at(after.stage)
        receivers, _ = after.ends_at(here.stage)
        # Where none begins a span there, microbatches go to those in the middle of one.
        hop_s, one_s = _line(senders, receivers or after.machines) if senders else (0.0, 0.0)
        wait_s += share * hop_s
        byte_s += share * one_s
    return wait_s, byte_s


def _line(some: Sequence[MachineKind], others: Sequence[MachineKind]) -> tuple[float, float]:
    """Seconds for the distance there and back, and for each byte, from one of `some` machines to one of `others`."""
    wait_s = byte_s = 0.0
    pairs = len(some) * len(others)
    receivers = Counter(others)
    for a, many in Counter(some).items():
        for b, count in receivers.items():
            share = many * count / pairs
            relayed = 1.0 / RELAY_RATE if Nat.RELAYED in (a.address.nat, b.address.nat) else 0.0
            wait_s += share * rtt_s(a.address, b.address)
            byte_s += share * (1.0 / min(a.up, b.down) + 1.0 / min(b.up, a.down) + 2.0 * relayed)
    return wait_s, byte_s


DETECT_S = 60.0  # guess: time until a dead node's replacement begins to download


@dataclass(frozen=True, slots=True)
class StagePlan:
    """A stage: `egress` in bytes per second of an average node; `need` the bytes of a replica on the machine of the
    stage that needs the most, as it is served there (in passes, and with the optimizer state, that fit); `survival` the
    probability that at least one replica is alive throughout a day."""

    part: StageLayers
    replicas: int
    flops: float
    samples_per_s: float
    egress: float
    need: MemoryNeed
    download_s: float
    survival: float


@dataclass(frozen=True, slots=True)
class Plan:
    """The estimate. `limit` names the bottleneck, `limit_kind` is "arithmetic", "uplink" or "in flight"; `idle`: a
    line for each kind of machine that can serve no stage. `efficiency`: what the run learns from a token
    (learning_efficiency.py); `likely`: the least and the most of it by measurement. `share`: of the arithmetic of all
    machines of the fleet. `per_hour`: the money for the machines that serve a stage, and for what they send; 0 where
    the fleet has no prices. `hops`: machines that a microbatch visits on its way, in the mean; `machines`: those that
    serve a stage, or several."""

    stages: tuple[StagePlan, ...]
    samples_per_s: float
    tokens_per_s: float
    days: float
    limit: str
    limit_kind: str
    survival: float
    idle: tuple[str, ...]
    efficiency: float = 1.0
    likely: tuple[float, float] = (1.0, 1.0)
    share: float = 0.0
    per_hour: float = 0.0
    hops: float = 1.0
    machines: int = 0

    @property
    def learned_per_s(self) -> float:
        """Tokens per second of one replica with a batch by the law that would learn as much."""
        return self.tokens_per_s * self.efficiency

    @property
    def lines_bind(self) -> bool:
        """Whether upward lines are what keeps the run from being faster."""
        return self.limit_kind == "uplink"

    @property
    def tokens_per_money(self) -> float:
        """Tokens for one unit of money; infinite where nothing costs any."""
        return self.tokens_per_s * 3600.0 / self.per_hour if self.per_hour else math.inf

    @property
    def replicas_min(self) -> int:
        """Replicas of the stage with the fewest."""
        return min(stage.replicas for stage in self.stages)

    @property
    def egress(self) -> float:
        """Bytes per second that an average node of the busiest stage sends."""
        return max(stage.egress for stage in self.stages)


def plan(
    manifest: Manifest, fleet: Sequence[MachineKind], tokens: float, share: float = 0.7, *, memory: bool = True
) -> Plan:
    """Estimate a run; machines serve only stages that fit into their memory (`memory` = False: any). `share` of the
    machines' FLOP/s is assumed to do useful work in several stages [simulated: 0.6 to 0.8, `swarmnode simulate`].

    Raises UsageError, with bytes, if no machine can serve any stage.
    """
    stages = manifest.pipeline.stages
    if memory and fleet and all(fit_of(manifest, kind).unable == set(range(stages)) for kind in fleet):
        raise UsageError(f"{shortages(manifest, fleet)[0]}; {ADVICE}")
    parts = stages_of(manifest)
    share = share if stages > 1 else SHARE_ALONE
    any_round = replace(manifest, gossip=replace(manifest.gossip, round_samples=1))
    placements, flow = _work(any_round, tuple(fleet), share, memory)
    gossips = [_gossip_bytes(manifest, part, len(here.machines)) for part, here in zip(parts, placements, strict=True)]
    each = [nbytes / max(1, len(here.machines)) for nbytes, here in zip(gossips, placements, strict=True)]
    rates = [_stage_rates(manifest, part, here, share, each) for part, here in zip(parts, placements, strict=True)]
    binding = _binding(manifest, rates, flow)
    planned = tuple(
        _stage(manifest, part, placed, fleet, binding.samples_per_s)
        for part, placed in zip(parts, placements, strict=True)
    )
    tokens_per_s = binding.samples_per_s * manifest.model.context
    efficiency = learned(manifest, max(1, min(stage.replicas for stage in planned)), tokens)
    needed_flops = tokens_per_s * sum(3.0 * part.cost for part in parts)
    return Plan(
        stages=planned,
        samples_per_s=binding.samples_per_s,
        tokens_per_s=tokens_per_s,
        days=tokens / tokens_per_s / 86400 if tokens_per_s else math.inf,
        limit=binding.text,
        limit_kind=binding.kind,
        survival=math.prod(stage.survival for stage in planned),
        idle=tuple(shortages(manifest, fleet)) if memory else (),
        efficiency=efficiency.reckoned,
        likely=(efficiency.least, efficiency.most),
        share=needed_flops / (sum(kind.count * kind.flops for kind in fleet) or 1.0),
        per_hour=sum(_per_hour(placed, stage.egress) for placed, stage in zip(placements, planned, strict=True)),
        hops=_hops(placements),
        machines=round(sum(sum(placed.shares) for placed in placements)),
    )


class _StageRates(NamedTuple):
    """Samples per second that a stage's devices compute and its upward lines carry. `exchange_s`: of the gradients of a
    step, where they are averaged before each."""

    computed: float
    carried: float
    exchange_s: float = 0.0


def _stage_rates(
    manifest: Manifest, part: StageLayers, placed: _Placement, share: float, gossips: Sequence[float]
) -> _StageRates:
    """`gossips`: by stage, bytes that a replica sends in exchanges for a sample of the run."""
    machines = placed.machines
    computed = share * placed.speed / (3.0 * part.cost * _tokens_of_sample(manifest, len(machines)))
    if averages_gradients(manifest):
        exchange_s = step_exchange_s(manifest, part, machines, placed.blocks)
        return _StageRates(computed, _carried(manifest, placed, [0.0] * len(gossips)), exchange_s)
    if not machines:
        return _StageRates(computed, 0.0)
    carried = _carried(manifest, placed, gossips)
    if not (gossip := gossips[part.stage] * len(machines)):
        return _StageRates(computed, carried)
    line_share = PLANNED * round_share(manifest.gossip.uplink_share)  # a machine whose rounds need more skips some
    rounds = _rounds_rate(manifest, gossip, placed.up, len(machines), computed)
    return _StageRates(computed, min(carried, placed.up * line_share / gossip, rounds))


def _tokens_of_sample(manifest: Manifest, replicas: int) -> float:
    """Tokens of which a sample costs the arithmetic, with the fixed cost of its piece. Where the replicas of a single
    stage average each step, pieces are of whole samples and no larger than a replica's share of the step."""
    context = manifest.model.context
    if not (averages_gradients(manifest) and replicas and manifest.pipeline.stages == 1):
        return context + PIECE_TOKENS / manifest.inner.microbatch
    part_of_step = manifest.gossip.round_samples / replicas
    share = math.ceil(part_of_step)
    return (context + PIECE_TOKENS / min(share, manifest.inner.microbatch)) * share / part_of_step


class _Binding(NamedTuple):
    """The bottleneck of a run: its kind as in `Plan.limit_kind`, and a text for people."""

    samples_per_s: float
    kind: str
    text: str


def _binding(manifest: Manifest, rates: Sequence[_StageRates], flow: PipelineFlow) -> _Binding:
    computed = [one.computed for one in rates]
    carried = [one.carried for one in rates]
    binding = min(
        _Binding(min(computed), "arithmetic", f"the arithmetic of {stage_name(computed.index(min(computed)))}"),
        _Binding(min(carried), "uplink", f"the upward lines of {stage_name(carried.index(min(carried)))}"),
        _Binding(flow.samples_per_s, "in flight", "the samples in flight, that wait for lines and machines"),
        key=lambda one: one.samples_per_s,
    )
    if averages_gradients(manifest) and binding.samples_per_s:
        binding = _with_exchange(manifest, rates, flow, binding)
    if binding.kind == "in flight" and flow.saturated:
        text = "the arithmetic of all machines, some of which wait for others"
        return _Binding(binding.samples_per_s, "arithmetic", text)
    return binding


def _with_exchange(manifest: Manifest, rates: Sequence[_StageRates], flow: PipelineFlow, binding: _Binding) -> _Binding:
    """One after the other: the samples of a step, the last one's way, the exchange of all stages. With gossip.delay the
    exchange goes on beside the others, of the next step."""
    step = manifest.inner.inner_batch
    samples_s = step / binding.samples_per_s + flow.trip_s
    exchanges_s = [one.exchange_s for one in rates]
    slowest_s = max(exchanges_s)
    both = max if manifest.gossip.delay else operator.add
    samples_per_s = step / both(samples_s, slowest_s)
    if slowest_s > samples_s:
        return _Binding(samples_per_s, "uplink", f"the upward lines of {stage_name(exchanges_s.index(slowest_s))}")
    return binding._replace(samples_per_s=samples_per_s)


def _rounds_rate(manifest: Manifest, gossip: float, up: float, replicas: int, speed: float) -> float:
    """Samples per second at which a round is long enough for its exchange, also to fall back to it (NARROWING): the
    packets on the line, and the device, that ends what it is at before it drafts one. `gossip`: bytes of all replicas,
    per sample; `speed`: samples per second of all their devices."""
    round_samples = manifest.gossip.round_samples
    device_s = DEVICE_WAITS * manifest.inner.microbatch * replicas / speed if speed else 0.0
    exchange_s = gossip * round_samples / up + device_s
    return round_samples / (NARROWING * EXCHANGES_PER_ROUND * exchange_s)


@functools.lru_cache(maxsize=64)
def _work(
    manifest: Manifest, fleet: tuple[MachineKind, ...], share: float, memory: bool
) -> tuple[list[_Placement], PipelineFlow]:
    """The placement, and `in_flight_rate`: the same for rounds of any length."""
    parts = stages_of(manifest)
    placements = _placed(manifest, fleet, parts, memory=memory)
    flow = in_flight_rate(
        manifest,
        placements,
        [3.0 * part.cost for part in parts],
        share,
        sum(_ways_bytes(manifest)) / 2,
    )
    return placements, flow


def _placed(
    manifest: Manifest, fleet: Sequence[MachineKind], parts: Sequence[StageLayers], *, memory: bool
) -> list[_Placement]:
    machines = [kind for kind in fleet for _ in range(kind.count)]
    stages, blocks = places(manifest, machines, memory=memory)
    costs = [part.cost for part in parts]
    placements = [_Placement(part.stage, [], [], [], []) for part in parts]
    passes = {
        (kind, stage): repeated(manifest, kind, stage) if memory else 0
        for kind in dict.fromkeys(machines)
        for stage in range(len(parts))
    }
    for kind, stage, mine in zip(machines, stages, blocks, strict=True):
        block = range(0) if stage is None else mine[stage]
        for one in block:
            again = passes[kind, one]
            here = placements[one]
            here.machines.append(kind)
            here.blocks.append(block)
            here.shares.append(share_of(one, block, costs))
            here.flops.append(kind.flops * here.shares[-1] * 3.0 / (3.0 + again))
    return placements


def _carried(manifest: Manifest, placed: _Placement, gossip: Sequence[float]) -> float:
    """Samples a second that the machines of a stage carry to the stages beside their blocks and back. `gossip`: bytes
    that a replica of each stage sends for a sample of the run; a machine has as much less of its line for others."""
    rate = taken = 0.0
    for kind, block in zip(placed.machines, placed.blocks, strict=True):
        if not (nbytes := sample_bytes(manifest, block)):
            return math.inf
        rate += kind.up / nbytes
        taken += sum(gossip[stage] for stage in block) / nbytes
    return rate / (1.0 + taken)


def _per_hour(placed: _Placement, egress: float) -> float:
    """Money an hour for the machines of a stage, each of which sends `egress` bytes a second for it."""
    gigabytes = egress * 3600.0 / 1e9
    pairs = zip(placed.machines, placed.blocks, strict=True)
    return sum(kind.price / len(block) + gigabytes * kind.egress_price for kind, block in pairs)


def step_exchange_s(
    manifest: Manifest, part: StageLayers, here: Sequence[MachineKind], blocks: Sequence[range] = ()
) -> float:
    """Seconds between two steps in which the machines `here` send each other their gradients; some round trips at
    least. `blocks`: the stages that each serves, whose exchanges share its line; none: this one alone."""
    if len(here) < 2:
        return 1e-9
    nbytes = _gossip_bytes(manifest, part, len(here)) * manifest.gossip.round_samples / len(here)  # of one step
    widths = [len(block) for block in blocks] or [1] * len(here)
    line_s = max(nbytes * width / min(kind.up, kind.down) for kind, width in zip(here, widths, strict=True))
    trips = ROUND_TRIPS_IN_PIECES if manifest.gossip.butterfly else ROUND_TRIPS
    line_s = max(line_s, _coding_s(manifest, part, len(here)))  # packets travel while they are coded
    return line_s + trips * max(rtt_s(one.address, other.address) for one in set(here) for other in set(here))


def _coding_s(manifest: Manifest, part: StageLayers, replicas: int) -> float:
    """Seconds of one processor for the packets of a step: in pieces two are written and two read, else one of each
    member is read."""
    elements = trained_count(manifest, part) / manifest.gossip.fragments
    packets = 2 if manifest.gossip.butterfly else replicas
    return 1e-9 * codecs()[manifest.gossip.codec].coding_ns * packets * elements


def _ways_bytes(manifest: Manifest) -> tuple[int, int]:
    """Bytes of a sample's (activations, their gradient) between two stages."""
    there, back = (
        boundary_nbytes(code, manifest.model.context, boundary_width(manifest))
        for code in boundary_codes(manifest.pipeline.boundary)
    )
    return there, back


def sample_bytes(manifest: Manifest, block: range) -> float:
    """Bytes a machine that serves `block` sends per sample: activations and tokens onward, the gradient back."""
    there, back = _ways_bytes(manifest)
    onwards = there + 2 * (manifest.model.context + 1) if block.stop < manifest.pipeline.stages else 0
    return float(onwards + (back if block.start > 0 else 0))


def _gossip_bytes(manifest: Manifest, part: StageLayers, replicas: int) -> float:
    """Bytes that all replicas of a stage send in exchanges, per sample of the run."""
    sent = messages(manifest.gossip, replicas)
    if not sent:
        return 0.0
    seconds = section_sizes(manifest, part).get("exp_avg_sq", 0)
    return (
        sent * message_nbytes(manifest.gossip, trained_count(manifest, part), seconds) / manifest.gossip.round_samples
    )


def _stage(
    manifest: Manifest,
    part: StageLayers,
    placed: _Placement,
    fleet: Sequence[MachineKind],
    samples_per_s: float,
) -> StagePlan:
    here = placed.machines
    sizes = section_sizes(manifest, part)
    nbytes = snapshot_nbytes(newcomer_part(manifest.gossip, sizes).sizes(sizes))
    replicas = len(here)
    back = sample_bytes(manifest, range(part.stage, manifest.pipeline.stages)) * placed.ends_at(part.stage - 1)[1]
    onwards = sample_bytes(manifest, range(part.stage + 1)) * placed.ends_at(part.stage + 1)[1]
    traffic = onwards + back + _gossip_bytes(manifest, part, replicas)
    up = sum(kind.up for kind in here) / replicas if here else math.inf
    down = sum(kind.down for kind in here) / replicas if here else math.inf
    download_s = nbytes / min(up, down)
    return StagePlan(
        part,
        replicas,
        sum(kind.flops * share for kind, share in zip(here, placed.shares, strict=True)),
        samples_per_s,
        samples_per_s * traffic / replicas if replicas else 0.0,
        _need(manifest, part, here or fleet),
        download_s,
        survival_of_a_day(here, DETECT_S + download_s),
    )


def _need(manifest: Manifest, part: StageLayers, kinds: Sequence[MachineKind]) -> MemoryNeed:
    """The most that a replica of `part` needs on a machine of `kinds`, as that machine would serve it; without any, on
    a processor."""
    needs = [fit_of(manifest, kind).needed[part.stage] for kind in dict.fromkeys(kinds)]
    needs = needs or [memory_need(manifest, part, CPU)]
    return MemoryNeed(*(max(getattr(need, part) for need in needs) for part in ("device", "host", "working")))


def survival_of_a_day(here: Sequence[MachineKind], back_s: float) -> float:
    """Probability that a stage keeps a replica for a day, if each machine lives its mean lifetime (exponential) and is
    replaced after `back_s`.

    Machines fail and return independently. So all are away at once for a share prod(u) of the time, and such a moment
    begins at rate prod(u) * sum(1 / back) (the birth-death chain's rate out of the last state).
    """
    if not here:
        return 0.0
    away = [back_s / (back_s + kind.life_h * 3600.0) if math.isfinite(kind.life_h) else 0.0 for kind in here]
    rate = math.prod(away) * len(here) / back_s
    return math.exp(-rate * 86400.0)
