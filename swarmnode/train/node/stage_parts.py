"""The parts that work on a served replica, put together: its calls, microbatches, rounds and copies."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING

from swarmnode.base.errors import Unavailable
from swarmnode.base.ids import PeerId
from swarmnode.base.ports import Compute, WireTensor
from swarmnode.base.wire import call_pb2 as wire
from swarmnode.base.wire import record_pb2
from swarmnode.keep.recovery.neighbour_backup import NeighbourBackup
from swarmnode.net.membership.judge import Judge, Trusting, judges
from swarmnode.run.manifest.kind_compat import trains_both_ends
from swarmnode.train.gossip.exchange import Gossip
from swarmnode.train.gossip.exchange_driver import PARTNER_PATIENCE_S
from swarmnode.train.node.drain_steps import HeldWork
from swarmnode.train.node.node_ports import NodeContext
from swarmnode.train.node.run_text import JoinedStage
from swarmnode.train.pipeline.backlog import Backlog
from swarmnode.train.pipeline.feeder import Feeder
from swarmnode.train.pipeline.hop import Hop
from swarmnode.train.pipeline.next_hop import NextHop
from swarmnode.train.pipeline.validation import Validator

if TYPE_CHECKING:
    from swarmnode.train.node.tied_ends import TiedEnds

HEARSAY_S = PARTNER_PATIENCE_S  # guess: a feeder's own word comes in a round trip
SPEED_SAMPLES = 32.0  # guess: a probe weighs as much as a few real microbatches


class Speed:
    """Samples a second of this node on its stage: the probed speed, blended into the device's measured speed."""

    def __init__(self, hop: Hop, compute: Compute, probed: float) -> None:
        self._hop = hop
        self._compute = compute
        self._worked_s = compute.worked_s
        # The probed speed counts as much as SPEED_SAMPLES of real work.
        self._samples = SPEED_SAMPLES
        self._seconds = SPEED_SAMPLES / max(probed, 1e-9)
        self._counted = hop.worked + hop.reworked

    def __call__(self) -> float:
        # Counted in work, not in completed microbatches: a node that has just come has done only the forwards of many,
        # and would seem slower than it is by half (simulated: swarm48). A recomputed forward is work, too.
        samples = self._hop.worked + self._hop.reworked
        worked_s = self._compute.worked_s
        self._samples += samples - self._counted
        self._seconds += worked_s - self._worked_s
        self._counted = samples
        self._worked_s = worked_s
        if self._samples > 8 * SPEED_SAMPLES:  # the past fades: halve its weight
            self._samples = self._samples / 2
            self._seconds = self._seconds / 2
        return self._samples / self._seconds


class StageParts:
    """The parts of one served replica. `feeder` and `validator` are None until this node feeds, which it does at the
    first stage, with text."""

    def __init__(self, context: NodeContext, joined: JoinedStage, served_before: int, tasks: asyncio.TaskGroup) -> None:
        """`served_before`: stages that this process served before; `tasks` run as long as the stage is served."""
        presence = context.presence
        history = presence.run_progress.clock.history
        restored = joined.restored
        self.context = context
        self.served_before = served_before
        self.restored = restored
        self.here = here = context.at(joined.stage, joined.replica)
        self.backlog = Backlog(tasks, context.manifest.limits.in_flight_max, context.telemetry)
        self.held_work = HeldWork(self.backlog)
        self.next_hop = NextHop(
            context.run_id,
            context.transport,
            presence.routing.routers,
            context.telemetry,
            context.manifest,
            presence.peer_table.swarm,
        )
        self.judge = self._judge(tasks)
        self.next_hop.passed_over = self.judge.passed_over
        self.hop = Hop(here, self.next_hop, self.backlog, history, self.judge, context.transport.work)
        self.gossip = Gossip(
            here,
            lambda: self.hop.samples,
            done=restored.round,
            newcomer=restored.newcomer,
            packet_taken=history.record_work,
            line=restored.line,
            fed=self.hop.turns.fed,
        )
        self.hop.step_begun = self._step_begun
        self.gossip.stepped = self.hop.record_step
        self.gossip.met = self.count_replicas
        self.gossip.butterfly.exclude = presence.exclude
        self.backup = NeighbourBackup(here, presence)
        self.speed = Speed(self.hop, here.compute, joined.samples_per_second * presence.own.device_share)
        self.tied_ends = self._tied_ends()
        self.feeder: Feeder | None = None
        self.validator: Validator | None = None
        self.count_replicas()

    def count_replicas(self) -> None:
        """Tell the worker how many replicas of this stage there are whose steps rounds average."""
        table = self.context.presence.peer_table
        self._shape = table.shape
        self.hop.worker.replicas = self.gossip.meeting(table.swarm().sizes[self.here.stage])

    def on_progress(self) -> None:
        """The run's sample count grew, and perhaps the swarm changed."""
        if self.context.presence.peer_table.shape != self._shape:
            self.count_replicas()

    def finished_blocks(self) -> record_pb2.Blocks:
        """The data blocks that this node knows to be finished, to be saved with the state."""
        return record_pb2.Blocks() if self.feeder is None else self.feeder.ledger.finished()

    async def _step_begun(self, process: wire.Process) -> None:
        """Wait for the weights that a training microbatch needs. One of a step proves that its feeder is through with
        the step before: only a feeder's own call does. The word of a stage between is taken where nobody else told."""
        feeder = PeerId(process.feeder)
        ended = process.step - self.gossip.stride
        if process.position == 1:
            self.gossip.step_ended(feeder, ended)
        elif ended >= self.gossip.next_round:
            asyncio.get_running_loop().call_later(HEARSAY_S, self.gossip.step_ended, feeder, ended)
        await self.gossip.step_begun(process.step)

    def _judge(self, tasks: asyncio.TaskGroup) -> Judge:
        """The judge of this replica's peers. A run that judges nobody does not import what does."""
        if not judges(self.context.manifest):
            return Trusting()
        from swarmnode.train.node.audit_setup import stage_judge

        return stage_judge(self.context, self.here.stage, self.here.replica, tasks, self._training_text)

    def _tied_ends(self) -> TiedEnds | None:
        """The part that keeps the table of a tied model's ends equal; None at other stages, and in other models."""
        here = self.here
        if not trains_both_ends(here.manifest) or here.stage not in (0, here.manifest.pipeline.stages - 1):
            return None
        from swarmnode.train.node.tied_ends import TiedEnds

        return TiedEnds(here, self.gossip)

    async def _training_text(self, indices: Sequence[int]) -> WireTensor | None:
        """Tokens of training samples. Raises Unavailable where this node feeds nothing."""
        if self.feeder is None:
            raise Unavailable("this node has no stage yet")
        return await self.feeder.samples.again(indices)
