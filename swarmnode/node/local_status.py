"""Frozen snapshots of this node, from which its record and the daemon's status are made."""

from __future__ import annotations

from dataclasses import dataclass, field

from swarmnode.pipeline.microbatch_size import SampleRates
from swarmnode.wire import record_pb2


@dataclass(frozen=True, slots=True)
class LocalStatus:
    """The facts about this node that do not depend on the stage it serves. Presence replaces the whole snapshot."""

    state: record_pb2.NodeState = record_pb2.NODE_STATE_JOINING
    stage: int | None = None  # None: not chosen yet
    samples_per_second: float = 0.0  # expected at the stage, until the stage is served and measures its own
    rates: SampleRates = field(
        default_factory=lambda: SampleRates({1: 1.0})
    )  # by microbatch size, probed at the first stage
    addresses: tuple[str, ...] = ()
    moving_to: int | None = None  # the stage this node is about to serve instead
    saved_samples: int = 0  # samples of the run when the stage that this node joins was saved on its disk
    saves_checkpoints: bool = False
    unable: frozenset[int] = frozenset()  # stages that this machine cannot serve
    data_digest: bytes = b""  # of the run's text, as this machine has it; empty: it has none
    boundary_digest: bytes = b""  # of the frozen subspace made here, in a run that has one
    allowance: record_pb2.Allowance | None = None  # limits that other nodes should expect


@dataclass(frozen=True, slots=True)
class StageStatus:
    """The served stage at one moment. Losses are nats per token."""

    samples_per_second: float = 0.0
    queue: int = 0  # pieces of work that wait for the compute thread
    round_index: int = 0  # the last round finished
    round_stride: int = 1
    kept_round: int | None = None  # of the snapshot of the next stage; None: none is kept
    kept_steps: int = 0
    inner_steps: int = 0
    loss_train: float | None = None  # smoothed; None: not known yet
    tokens_per_second: float = 0.0  # fed here; 0 where this node feeds nothing
    loss_validation: float | None = None
    loss_validation_samples: int = 0  # samples of the run when it was measured
    loss_validation_first: float | None = None
    blocks: record_pb2.Blocks | None = None  # finished blocks of data; None where this node feeds nothing


NO_STAGE = StageStatus()
