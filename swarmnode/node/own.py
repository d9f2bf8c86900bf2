"""What changes about this node."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from swarmnode.pipeline.microbatch import Rates
from swarmnode.recovery.snapshot import Snapshot
from swarmnode.wire import record_pb2


@dataclass(slots=True)
class Self_:
    """Its record is made from this."""

    state: record_pb2.NodeState = record_pb2.NODE_STATE_JOINING
    stage: int | None = None
    speed: Callable[[], float] = lambda: 0.0  # samples a second this node manages on its stage
    rates: Rates = field(default_factory=lambda: Rates({1: 1.0}))  # by size, probed at the first stage: at others alike
    queue: Callable[[], int] = lambda: 0
    round_index: Callable[[], int] = lambda: 0
    round_stride: Callable[[], int] = lambda: 1
    blocks: Callable[[], record_pb2.Blocks | None] = lambda: None
    kept: Callable[[], Snapshot | None] = lambda: None  # of the next stage
    addresses: list[str] = field(default_factory=list)
    moving_to: int | None = None
    saves_checkpoints: bool = False
    unable: frozenset[int] = frozenset()  # stages that this machine cannot serve
    boundary_digest: bytes = b""  # of our frozen subspace, in a run that has one
    allowance: record_pb2.Allowance | None = None  # limits others should expect
