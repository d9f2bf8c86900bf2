"""The first part of a node's time at a stage: announce itself there, probe the machine, and bring a replica to the
stage's state."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass
from functools import partial

from swarmnode.errors import HardwareFault
from swarmnode.manifest import Manifest
from swarmnode.membership.swarm import SERVING
from swarmnode.metrics import name
from swarmnode.node.node_context import NodeContext
from swarmnode.node.presence import Presence
from swarmnode.node.probe import telling
from swarmnode.node.stage_change import StageTransfer
from swarmnode.pipeline.feeder import Samples
from swarmnode.pipeline.itinerary import successors
from swarmnode.ports import Compute, Priority, Replica
from swarmnode.recovery.restore import RestoredState
from swarmnode.transfer.snapshot import Snapshot
from swarmnode.wire import record_pb2


async def check_subspace(replica: Replica, manifest: Manifest, presence: Presence, compute: Compute) -> None:
    """Compute this machine's subspace and compare its digest with those in the records of nodes that train.

    Raises HardwareFault when all of them have another: activations would be noise to them. One liar keeps nobody away.
    """
    if manifest.pipeline.boundary != "subspace":
        return
    mine = await compute.run(Priority.OUTER, 0, replica.boundary_digest)
    presence.made_subspace(mine)
    training = [m for m in presence.peer_table.swarm().members() if m.state == SERVING and m.peer != presence.me]
    if training and all(member.boundary_digest != mine for member in training):
        theirs = training[0].boundary_digest.hex() or "none"
        raise HardwareFault(
            f"this machine makes the subspace {mine.hex()} where the {len(training)} nodes that train"
            f" have {theirs}: its PyTorch computes otherwise; install the version they use, then join again"
        )


@dataclass(frozen=True, slots=True)
class StageText:
    """The run's text at a stage. Both None: nothing is fed there. `later` waits until a node of the first stage that
    has no text has it; others feed meanwhile."""

    samples: Samples | None = None
    later: Callable[[], Awaitable[Samples]] | None = None


@dataclass(frozen=True, slots=True)
class JoinedStage:
    """A replica with the state of its stage, ready to be served."""

    stage: int
    replica: Replica
    restored: RestoredState
    samples_per_second: float  # expected of this machine there
    text: StageText


def sends_to(manifest: Manifest, stage: int) -> Collection[int]:
    """The stages to which a replica of `stage` sends microbatches, ascending."""
    stages, spec = manifest.pipeline.stages, manifest.recovery
    return sorted(successors(stage, stages, swapped=spec.itinerary == "swapped", skips=spec.while_lost == "skip"))


def attend_stage(context: NodeContext, tasks: asyncio.TaskGroup, stage: int, transfer: StageTransfer | None) -> None:
    """Announce this node at `stage`, with what `transfer` says when it served another stage before. Loops that announce
    it and look others up run in `tasks` from now on."""
    presence, targets = context.presence, sends_to(context.manifest, stage)
    shares = (0,) if stage == 0 else ()  # a feeder here gives work to the first stage's replicas without text
    saved = context.restorer.saved.newest(stage)
    samples = 0 if saved is None else saved.checkpoint.samples
    presence.attend(stage, (*shares, *targets), 0.0 if transfer is None else transfer.speed, samples)
    context.telemetry.gauge(name.STAGE, float(stage))
    presence.set_state(record_pb2.NODE_STATE_JOINING, "stage chosen" if transfer is None else transfer.reason)
    tasks.create_task(presence.announcing())
    # From now on: a download outlives donors, and must hear of new ones (simulated: everything, seed 104).
    tasks.create_task(presence.watching(sorted({stage, *targets})))


async def join_stage(
    context: NodeContext,
    tasks: asyncio.TaskGroup,
    stage: int,
    transfer: StageTransfer | None,
    text: StageText,
    backup: Snapshot | None,
) -> JoinedStage:
    """Bring a replica to the state of `stage`, with the state in `transfer` if it has one.

    `text`: the run's, where this node will feed; `backup`: a snapshot of another stage, kept while this node
    served the stage before. Raises Unavailable when the stage's state is nowhere to be had, HardwareFault when this
    machine cannot compute as the others do.
    """
    presence, ports, telemetry = context.presence, context.ports, context.telemetry
    replica = await ports.compute.run(Priority.OUTER, 0, partial(ports.replica, context.manifest, stage))
    expected, probe = 0.0 if transfer is None else transfer.speed, None
    if not expected:
        probing = telling(replica, context.manifest, stage, ports.probe, ports.compute, telemetry, presence)
        probe = tasks.create_task(probing)
    await check_subspace(replica, context.manifest, presence, ports.compute)
    take = transfer.release if transfer is not None else lambda: None  # no name here keeps what may be gigabytes
    idle = transfer is not None and transfer.idle
    restored = await context.restorer.restore(replica, stage, take(), backup, seen_only=idle)
    speed = expected if probe is None else await probe
    return JoinedStage(stage, replica, restored, speed, text)
