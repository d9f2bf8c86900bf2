"""The result of a simulated life, as numbers."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

from swarmnode.app.api import RunHistory
from swarmnode.base.metrics import name
from swarmnode.base.wire import record_pb2
from swarmnode.train.node.report import KIND_OF_METHOD
from swarmsim import capacity

if TYPE_CHECKING:
    from swarmsim.world import World

STATES = (
    record_pb2.NODE_STATE_JOINING,
    record_pb2.NODE_STATE_SYNCING,
    record_pb2.NODE_STATE_TRAINING,
    record_pb2.NODE_STATE_DRAINING,
)


@dataclass(slots=True)
class RunTotals:
    """Totals up to a moment."""

    at_s: float = 0.0
    samples: float = 0.0
    flop: float = 0.0
    done: float = 0.0
    lost: float = 0.0
    retried: float = 0.0
    duplicate: float = 0.0
    busy: float = 0.0
    recomputed: float = 0.0
    staleness: dict[str, float] = field(default_factory=dict)
    paired: float = 0.0
    lone: float = 0.0
    recoveries: float = 0.0
    moves: int = 0
    hops: int = 0  # calls that took microbatches from machine to machine
    bytes: dict[str, int] = field(default_factory=dict)

    @classmethod
    def of(cls, world: World) -> RunTotals:
        total = world.trace.total
        nbytes: Counter[str] = Counter()
        for method, count in world.network.sent.items():
            nbytes[KIND_OF_METHOD.get(method, "control")] += count
        return cls(
            at_s=world.loop.time(),
            samples=world.samples_done(),
            flop=world.flop_done + sum(p.machine.flop for p in world.nodes if p.machine is not None),
            done=total(name.MICROBATCHES, "done"),
            lost=total(name.MICROBATCHES, "lost"),
            retried=total(name.MICROBATCHES, "retried"),
            duplicate=total(name.MICROBATCHES, "duplicate"),
            busy=total(name.BUSY),
            recomputed=total(name.RECOMPUTED_TAPES),
            staleness={steps: total(name.GRADIENTS, steps) for steps in name.STALENESS},
            paired=total(name.EXCHANGES, "paired"),
            lone=total(name.EXCHANGES, "lone"),
            recoveries=total(name.RECOVERIES, "replica"),
            moves=world.trace.by_event["stage.moved"],
            hops=world.network.calls["process"],
            bytes=dict(sorted(nbytes.items())),
        )


@dataclass(slots=True)
class CurvePoint:
    """A point of the curves."""

    at_s: float
    samples: float
    optimum: float  # samples per second that the training machines could do in their stages
    ideal: float  # the same if every living machine were where it is needed
    even: float  # the same for the machines that train
    busy: float  # FLOP of training done so far
    flops: float  # FLOP/s of the living machines
    states: dict[str, int]
    stages: list[int]
    bytes: dict[str, int]
    recoveries: float
    faults: int
    paired: float  # outer steps with a partner, of all replicas

    @classmethod
    def of(cls, world: World) -> CurvePoint:
        sums = RunTotals.of(world)
        alive = [sim_node for sim_node in world.nodes if sim_node.alive]
        states = [sim_node.state for sim_node in alive]
        training = [p for p, state in zip(alive, states, strict=True) if state == record_pb2.NODE_STATE_TRAINING]
        stages = Counter(stage for sim_node in alive for stage in sim_node.stages)
        return cls(
            at_s=world.loop.time(),
            samples=sums.samples,
            optimum=capacity.optimum(world, training),
            ideal=capacity.even(world, alive),
            even=capacity.even(world, training),
            busy=sums.flop,
            flops=sum(p.kind.flops for p in alive),
            states={record_pb2.NodeState.Name(state)[11:].lower(): states.count(state) for state in STATES},
            stages=[stages[stage] for stage in range(len(world.parts))],
            bytes=sums.bytes,
            recoveries=sums.recoveries,
            faults=sum(world.struck.values()) - world.struck["spared"],
            paired=sums.paired,
        )


@dataclass(slots=True)
class Outcome:
    """All data of a report. `failures` is empty if all laws and demands held."""

    scenario: str
    seed: int
    nodes: int
    failures: list[str] = field(default_factory=list)
    involved: list[str] = field(default_factory=list)
    last_events: str = ""
    trace: str = ""
    virtual_s: float = 0.0
    cpu_s: float = 0.0
    storm_cpu_s: float = 0.0
    """CPU seconds until the end of the storm; the rest went into the recovery check."""
    callbacks: int = 0
    events: int = 0
    laws_checked: int = 0
    onesided: int = 0
    fallbacks: int = 0
    doubled: int = 0
    nodes_ever: int = 0
    struck: dict[str, int] = field(default_factory=dict)
    demands: dict[str, float] = field(default_factory=dict)
    storm: RunTotals = field(default_factory=RunTotals)
    total: RunTotals = field(default_factory=RunTotals)
    directory: dict[str, int] = field(default_factory=dict)  # bytes that each node sent and received for it, by label
    curve: list[CurvePoint] = field(default_factory=list)
    validations: list[tuple[float, float, int]] = field(default_factory=list)
    real: bool = False  # real tensors: losses are meaningful
    context: int = 0  # tokens of a sample
    meets_every_steps_planned: float = 0.0
    """Inner steps between two meetings of a replica about the same weights, by the manifest; 0: none meet."""
    steps_of_a_sample: float = 0.0  # its part of an inner step, times fragments

    @property
    def share(self) -> float:
        """Samples done in the storm over what the training machines could have done in their stages."""
        return _over(self.curve, self.storm.at_s, lambda sample: sample.optimum)

    @property
    def share_ideal(self) -> float:
        """The same over all living machines, each where it was needed."""
        return _over(self.curve, self.storm.at_s, lambda sample: sample.ideal)

    @property
    def machines_visited(self) -> float:
        """Machines that a microbatch came to, its feeder's own among them, in the mean over all that were done; those
        that were asked again count again."""
        return 1.0 + self.total.hops / self.total.done if self.total.done else 0.0

    def meets_every_steps(self, since_s: float = 0.0) -> float:
        """Inner steps between two meetings of a training replica about the same weights, in the mean from `since_s` to
        the end of the storm; 0: they did not meet."""
        storm = [point for point in self.curve if since_s <= point.at_s <= self.storm.at_s]
        replica_samples = paired = 0.0
        for before, after in itertools.pairwise(storm):
            replica_samples += after.states.get("training", 0) * (after.samples - before.samples)
            paired += after.paired - before.paired
        return self.steps_of_a_sample * replica_samples / paired if paired else 0.0

    def history(self) -> RunHistory:
        """The curves, as those of a live run."""
        context = self.context
        points = []
        for at, before in zip(self.curve, [None, *self.curve], strict=False):
            rate = 0.0 if before is None else (at.samples - before.samples) / max(1e-9, at.at_s - before.at_s)
            living = sum(at.states.values())
            serving = at.states.get("training", 0)
            sent = sum(at.bytes.values())
            gossip = at.bytes.get("gossip", 0)
            points.append((at.at_s, at.samples, rate * context, None, living, serving, None, sent, gossip))
        return RunHistory(
            self.scenario, points, [(n, t, loss) for t, loss, n in self.validations if self.real], context
        )

    @property
    def share_placed(self) -> float:
        """Possible throughput of the training machines in their stages, over that of all living ones where needed: the
        share of optimal throughput that SWARM's authors report for rebalancing."""
        return self._ratio(lambda sample: sample.optimum, lambda sample: sample.ideal)

    @property
    def share_training(self) -> float:
        """The part of `share_placed` due to living machines that do not train (yet)."""
        return self._ratio(lambda sample: sample.even, lambda sample: sample.ideal)

    @property
    def share_even(self) -> float:
        """The part of `share_placed` due to uneven stages. The product of the two parts is nearly `share_placed`."""
        return self._ratio(lambda sample: sample.optimum, lambda sample: sample.even)

    def _ratio(self, above: Callable[[CurvePoint], float], below: Callable[[CurvePoint], float]) -> float:
        """Ratio of two curves' integrals over the storm."""
        storm = [sample for sample in self.curve if sample.at_s <= self.storm.at_s]
        pairs = list(itertools.pairwise(storm))
        whole = sum(below(a) * (b.at_s - a.at_s) for a, b in pairs)
        return sum(above(a) * (b.at_s - a.at_s) for a, b in pairs) / whole if whole else 0.0

    def to_json(self) -> dict[str, Any]:
        """All of it as strict JSON has it: a number that is none, a diverged loss or an unknown time, is null."""
        found = dataclasses.asdict(self)
        found["share_of_optimum"] = self.share
        found["share_of_ideal"] = self.share_ideal
        found["share_placed"] = self.share_placed
        found["share_training"] = self.share_training
        found["share_even"] = self.share_even
        found["meets_every_steps"] = self.meets_every_steps()
        found["machines_visited"] = self.machines_visited
        found["callbacks_per_cpu_s"] = self.callbacks / max(1e-9, self.cpu_s)
        return cast(dict[str, Any], _finite(found))


def _finite(value: Any) -> Any:
    match value:
        case float():
            return value if math.isfinite(value) else None
        case dict():
            return {key: _finite(one) for key, one in value.items()}
        case list() | tuple():
            return [_finite(one) for one in value]
        case _:
            return value


def _over(curve: list[CurvePoint], until_s: float, could: Any) -> float:
    """Samples done between the first and the last point of the storm, over the integral of `could`."""
    storm = [sample for sample in curve if sample.at_s <= until_s]
    possible = sum(could(a) * (b.at_s - a.at_s) for a, b in itertools.pairwise(storm))
    return (storm[-1].samples - storm[0].samples) / possible if possible else 0.0
