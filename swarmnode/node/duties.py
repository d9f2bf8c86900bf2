"""What a node that serves has to bring home before it goes, as the steps of drain.py."""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from swarmnode.errors import SwarmnodeError, Unavailable
from swarmnode.gossip.bequest import bequeath
from swarmnode.gossip.exchange import Gossip
from swarmnode.ids import PeerId, RunId, short
from swarmnode.membership.swarm import Swarm
from swarmnode.model.section import snapshot_nbytes
from swarmnode.node.drain import Farewell, Step, Task
from swarmnode.node.notice import Kind
from swarmnode.pipeline.backlog import Backlog
from swarmnode.pipeline.feeder import Feeder
from swarmnode.ports import Call, Replica, Telemetry, Transport
from swarmnode.recovery.donor import SnapshotDonor
from swarmnode.wire import call_pb2 as wire

MARGIN = 2.0  # guess: what is held, or an exchange, may take twice as long as usually
EXCHANGE_S = 1.0  # guess: at least, with its turn on a busy device; an exchange of a round itself may take 0.1 s
UPLINK_BYTES_PER_S = 5e6  # guess: a volunteer's uplink
SAVED_BYTES = 4  # of a parameter
SAVE_BYTES_PER_S = 1e8  # guess: a cloud disk of the cheapest kind


@dataclass(slots=True)
class Parts:
    """What this node serves with. `save` writes the stage to this machine's disk."""

    run_id: RunId
    stage: int
    line: Transport
    swarm: Callable[[], Swarm]
    replica: Replica
    gossip: Gossip
    donor: SnapshotDonor
    backlog: Backlog
    feeder: Feeder | None
    save: Callable[[], Awaitable[None]]
    telemetry: Telemetry
    rng: random.Random

    def held(self) -> int:
        """Microbatches in work here."""
        return len(self.backlog) + (self.feeder.under_way if self.feeder is not None else 0)

    def finished(self) -> int:
        """Microbatches that came to their end here, ever."""
        return self.backlog.finished + (self.feeder.returned if self.feeder is not None else 0)

    def refuse(self) -> None:
        """From now on nothing new is begun."""
        self.backlog.refusing = "this node is leaving"
        if self.feeder is not None:
            self.feeder.stop()

    async def finish(self) -> None:
        """Returns when nothing is held any more."""
        if self.feeder is not None:
            await self.feeder.drain()
        await self.backlog.empty()


def mates(swarm: Swarm, stage: int, me: PeerId) -> list[PeerId]:
    """Replicas of `stage` that stay and can take what this one learnt."""
    return [member.peer for member in swarm.serving(stage) if member.peer != me]


def heirs(swarm: Swarm, stage: int, me: PeerId) -> tuple[list[PeerId], str]:
    """Who may keep the state of `stage` for whoever serves it next, best first; empty when nobody has to.

    Nodes of the stage before: there its next replica looks for it (recovery/ladder.py). The least loaded ones first.
    """
    if mates(swarm, stage, me):
        return [], "other replicas of the stage stay"
    before = (stage - 1) % len(swarm.stages)
    found = sorted(swarm.serving(before), key=lambda member: (member.queue, member.peer))
    able = [member.peer for member in found if member.peer != me]
    return able, f"this is the last replica of stage {stage}; {len(able)} nodes of stage {before} may keep its state"


def duties(parts: Parts, farewell: Farewell) -> list[Task]:
    """Take no new work, and what leaving means for `parts`, in order; `farewell` is filled in as it goes."""
    parts.refuse()
    before, gossip, me = parts.finished(), parts.gossip, parts.line.peer_id
    farewell.held, farewell.unsent = parts.held(), gossip.unsent
    stopping = farewell.notice.kind is Kind.STOP

    async def finish() -> None:
        try:
            await parts.finish()
        finally:
            count()

    def count() -> str:
        farewell.finished = min(farewell.held, parts.finished() - before)
        return f"{farewell.held - farewell.finished} of {farewell.held} microbatches"

    async def exchange() -> None:
        await gossip.rest()
        farewell.unsent = gossip.unsent
        staying = mates(parts.swarm(), parts.stage, me)
        if stopping or not farewell.unsent or not staying:
            return
        await bequeath(parts.line, parts.run_id, staying, gossip.parting, parts.telemetry, parts.rng)
        farewell.sent = farewell.unsent

    async def handover() -> None:
        parts.donor.close()  # what is kept there was copied before the last step
        if mates(parts.swarm(), parts.stage, me):  # one has come since this was planned: nothing is cut
            if farewell.sent < farewell.unsent:
                await exchange()
            return
        able, reason = heirs(parts.swarm(), parts.stage, me)
        for heir in able:
            request = wire.Request(run_id=parts.run_id, handover=wire.Handover(stage=parts.stage))
            try:
                await parts.line.call(heir, Call(request), timeout_s=HANDOVER_MAX_S, reply_bytes_max=0)
            except SwarmnodeError as error:
                reason = f"{short(heir)}: {error}"
                continue
            farewell.heir, farewell.sent = heir, farewell.unsent
            parts.telemetry.event("handover.done", peer=heir, stage=parts.stage, reason=reason)
            return
        raise Unavailable(reason)

    nbytes = snapshot_nbytes(parts.replica.sizes_of(parts.stage))
    tasks = [
        Task(Step.FINISH, MARGIN * parts.backlog.seconds if farewell.held else 0.0, finish, count),
        Task(
            Step.EXCHANGE,
            max(EXCHANGE_S, MARGIN * gossip.exchange_s) if farewell.unsent or farewell.held else 0.0,
            exchange,
            lambda: f"{farewell.unsent - farewell.sent} samples learnt",
        ),
    ]
    if not stopping and heirs(parts.swarm(), parts.stage, me)[0]:
        due_s = nbytes / UPLINK_BYTES_PER_S
        tasks.append(Task(Step.HANDOVER, due_s, handover, lambda: f"the state of stage {parts.stage}"))
    save_s = parts.replica.parameters * SAVED_BYTES / SAVE_BYTES_PER_S
    return [*tasks, Task(Step.SAVE, save_s, parts.save, lambda: "the stage on disk")]


HANDOVER_MAX_S = 3600.0  # the notice's own time is shorter
