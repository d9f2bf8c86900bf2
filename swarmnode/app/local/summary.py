"""Summarise a local swarm from the last status of each node: plain arithmetic, no waiting."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median_low

from swarmnode.base.metrics import name
from swarmnode.base.wire.record_pb2 import NODE_STATE_TRAINING
from swarmnode.base.wire.report_pb2 import StatusReply

OUTCOMES = ("done", "lost", "retried", "duplicate")
SHOWN_AS = {"round": "rounds", "loss_train": "loss_train_last", "loss_validation": "loss_validation_last"}
KINDS = ("pipeline", "gossip", "state", "control")

_LABEL = re.compile(r'(\w+)="([^"]*)"')


@dataclass(frozen=True, slots=True)
class NodeFacts:
    """A node process: its last status (None: never any) and how it ended ("" while it runs)."""

    name: str
    stage: int | None
    status: StatusReply | None
    reason: str = ""

    @property
    def training(self) -> bool:
        return not self.reason and self.status is not None and self.status.state == NODE_STATE_TRAINING


@dataclass(frozen=True, slots=True)
class Totals:
    """Totals of the whole swarm. Counts are summed over all nodes, dead ones included; facts that all nodes know of the
    run (samples, tokens, round) are the largest. Losses are nats per token, None if unknown. `paired` counts each
    partner's step, `staleness` gradients by age in inner steps. Only sent bytes count, so that none counts twice.
    `meets_every_steps`: inner steps between meetings, the median of the nodes; and as the manifest has it."""

    samples: int = 0
    tokens: int = 0
    round: int = 0
    loss_train: float | None = None
    loss_validation_first: float | None = None
    loss_validation: float | None = None
    exchanges: Mapping[str, int] = field(default_factory=dict)
    microbatches: Mapping[str, int] = field(default_factory=dict)
    staleness: Mapping[str, int] = field(default_factory=dict)
    samples_duplicate: int = 0
    recoveries: int = 0
    bytes: Mapping[str, int] = field(default_factory=dict)
    meets_every_steps: float = 0.0
    meets_every_steps_planned: float = 0.0


def parse_series(key: str) -> tuple[str, dict[str, str]]:
    """The metric and labels of a key written by `metrics.name.series`."""
    metric, _, labels = key.partition("{")
    return metric, dict(_LABEL.findall(labels))


def count(nodes: Sequence[NodeFacts], metric: str, **labels: str) -> int:
    """The sum over all nodes of every series of `metric` with these labels."""
    total = 0.0
    for node in nodes:
        for key, value in node.status.counters.items() if node.status else ():
            series, has = parse_series(key)
            if series == metric and labels.items() <= has.items():
                total += value
    return round(total)


def speeds(nodes: Sequence[NodeFacts]) -> list[tuple[int, float]]:
    """Stage and announced samples per second of each node that trains, by what the others heard."""
    heard = {peer.peer_id: peer for node in nodes if node.status is not None for peer in node.status.peers}
    training = [node.status for node in nodes if node.training and node.status is not None]
    return [
        (status.stage, heard[status.peer_id].samples_per_second)
        for status in training
        if status.peer_id in heard and status.stage < status.stages
    ]


def totals(nodes: Sequence[NodeFacts]) -> Totals:
    """The totals of `nodes`, in the order of their start."""
    said = [node.status for node in nodes if node.status is not None]
    living = [node.status for node in nodes if node.status is not None and not node.reason] or said
    losses = [status.loss_train for status in living if status.loss_train]
    measured = [status for status in said if status.loss_validation]
    last = max(measured, key=lambda status: status.loss_validation_samples, default=None)
    return Totals(
        samples=max((status.samples_total for status in said), default=0),
        tokens=max((status.tokens_total for status in said), default=0),
        round=max((status.round for status in said), default=0),
        loss_train=sum(losses) / len(losses) if losses else None,
        loss_validation_first=next((s.loss_validation_first for s in said if s.loss_validation_first), None),
        loss_validation=last.loss_validation if last else None,
        exchanges={outcome: count(nodes, name.EXCHANGES, outcome=outcome) for outcome in ("paired", "lone")},
        microbatches={outcome: count(nodes, name.MICROBATCHES, outcome=outcome) for outcome in OUTCOMES},
        staleness={steps: count(nodes, name.GRADIENTS, staleness=steps) for steps in name.STALENESS},
        samples_duplicate=count(nodes, name.DUPLICATE_SAMPLES),
        recoveries=count(nodes, name.RECOVERIES) - count(nodes, name.RECOVERIES, method="fresh"),
        bytes={kind: count(nodes, name.LINK_BYTES, kind=kind, direction="sent") for kind in KINDS},
        meets_every_steps=median_low([s.meets_every_steps for s in said if s.meets_every_steps] or [0.0]),
        meets_every_steps_planned=max((s.meets_every_steps_planned for s in said), default=0.0),
    )


@dataclass(slots=True)
class TokenRate:
    """Tokens per second between the first and the last observed progress, so that start and end do not dilute it."""

    first: tuple[float, int] | None = None
    last: tuple[float, int] | None = None

    def see(self, now_s: float, tokens: int) -> None:
        if tokens <= 0:
            return
        if self.first is None:
            self.first = self.last = (now_s, tokens)
        elif self.last is not None and tokens > self.last[1]:
            self.last = (now_s, tokens)

    @property
    def tokens_per_s(self) -> float:
        if self.first is None or self.last is None or self.last[0] <= self.first[0]:
            return 0.0
        return (self.last[1] - self.first[1]) / (self.last[0] - self.first[0])


@dataclass(frozen=True, slots=True)
class Summary:
    """The result of `swarmnode up`. `wall_s` is from the first process's start to the last one's end."""

    run: str
    nodes: int
    wall_s: float
    tokens_per_s: float
    totals: Totals
    killed: int
    stopped: str
    folder: str
    exit_reasons: Mapping[str, str]
    model: str | None = None
    failure: str | None = None
    checkpoint: str | None = None
    exit_code: int = 0  # of `up`: that of the node that could not work, 70 for other failures

    def to_json(self) -> dict[str, object]:
        """A JSON object; `swarmnode up --help` documents its keys."""
        fields = dataclasses.asdict(self)
        totals = {SHOWN_AS.get(key, key): value for key, value in fields.pop("totals").items()}
        del fields["exit_code"]
        return {**fields, **totals, "wall_s": round(self.wall_s, 3), "tokens_per_s": round(self.tokens_per_s, 1)}
