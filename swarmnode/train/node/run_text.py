"""The run's text on this node: opens it for feeding, compares it with the feeders' digests, announces it in the record.

A node without the text serves the other stages. That is no fault and ends nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass
from functools import partial

from swarmnode.base.errors import DataError, HardwareFault, NotPermitted, Unavailable
from swarmnode.base.ids import PeerId, seeded
from swarmnode.base.metrics import name
from swarmnode.base.ports import Compute, Priority, Replica
from swarmnode.base.wire import record_pb2
from swarmnode.keep.recovery.restore import RestoredState
from swarmnode.keep.transfer.chunk_set import ChunkSources
from swarmnode.keep.transfer.snapshot import Snapshot
from swarmnode.model.split import costs
from swarmnode.net.membership.liveness import AGAIN_S, TRIES
from swarmnode.net.membership.swarm import SERVING, Member, Swarm
from swarmnode.run.manifest import Manifest
from swarmnode.run.manifest.location import base_url
from swarmnode.train.node.chunk_samples import ChunkSamples
from swarmnode.train.node.limits import NodeRole
from swarmnode.train.node.membership_handlers import probing
from swarmnode.train.node.node_ports import NodeContext
from swarmnode.train.node.presence import Presence
from swarmnode.train.node.stage_change import StageTransfer, living_members
from swarmnode.train.pipeline.believed_rate import bounded
from swarmnode.train.pipeline.feeder import Samples
from swarmnode.train.pipeline.rebalance import RebalanceRules, choose_stage, reserved_stage

DIGEST_NBYTES = 8  # of the digest, in records
NO_INDEX = Unavailable("nobody gave the index of the run's data set in time")
LOOK_S = 20.0  # derived: the index of 100 GB of text at 1 Mbit/s; a node without it then chooses another stage


# The first part of a node's time at a stage: announce itself there, probe the machine, and bring a replica to the
# stage's state.


async def check_subspace(replica: Replica, manifest: Manifest, presence: Presence, compute: Compute) -> None:
    """Compute this machine's subspace and compare its digest with those in the records of nodes that train.

    Raises HardwareFault when all of them have another: activations would be noise to them. One liar keeps nobody away.
    """
    if manifest.pipeline.boundary != "subspace":
        return
    mine = await compute.run(Priority.OUTER, 0, replica.boundary_digest)
    presence.own.note(boundary_digest=mine)
    training = [m for m in presence.peer_table.swarm().members() if m.state == SERVING and m.peer != presence.me]
    if training and all(member.boundary_digest != mine for member in training):
        theirs = training[0].boundary_digest.hex() or "none"
        raise HardwareFault(
            f"this machine makes the subspace {mine.hex()} where the {len(training)} nodes that train"
            f" have {theirs}: its PyTorch computes otherwise; install the version they use, then join again"
        )


@dataclass(frozen=True, slots=True)
class JoinedStage:
    """A replica with the state of its stage, ready to be served. `text`: the run's, at the first stage; None: nothing
    is fed here."""

    stage: int
    replica: Replica
    restored: RestoredState
    samples_per_second: float  # expected of this machine there
    text: Samples | None


def sends_to(manifest: Manifest, stage: int) -> Collection[int]:
    """The stages to which a replica of `stage` sends microbatches."""
    return range(stage + 1, min(manifest.pipeline.stages, stage + 2))


def attend_stage(context: NodeContext, tasks: asyncio.TaskGroup, stage: int, transfer: StageTransfer | None) -> None:
    """Announce this node at `stage`, with what `transfer` says when it served another stage before. Loops that announce
    it and look others up run in `tasks` from now on."""
    presence = context.presence
    targets = sends_to(context.manifest, stage)
    saved = context.restorer.saved.newest(stage)
    samples = 0 if saved is None else saved.checkpoint.samples
    presence.attend(stage, targets, 0.0 if transfer is None else transfer.speed, samples)
    context.telemetry.gauge(name.STAGE, float(stage))
    presence.own.set_state(record_pb2.NODE_STATE_JOINING, "stage chosen" if transfer is None else transfer.reason)
    tasks.create_task(presence.announcing())
    # From now on: a download outlives donors, and must hear of new ones (simulated: everything, seed 104).
    tasks.create_task(presence.watching(sorted({stage, *targets})))


async def join_stage(
    context: NodeContext,
    tasks: asyncio.TaskGroup,
    stage: int,
    transfer: StageTransfer | None,
    text: Samples | None,
    backup: Snapshot | None,
) -> JoinedStage:
    """Bring a replica to the state of `stage`, with the state in `transfer` if it has one.

    `text`: the run's, where this node will feed; `backup`: a snapshot of another stage, kept while this node
    served the stage before. Raises Unavailable when the stage's state is nowhere to be had, HardwareFault when this
    machine cannot compute as the others do.
    """
    presence = context.presence
    ports = context.ports
    telemetry = context.telemetry
    replica = await ports.compute.run(Priority.OUTER, 0, partial(ports.replica, context.manifest, stage))
    expected = 0.0 if transfer is None else transfer.speed
    probe = None
    if not expected:
        with_what = ports.probe, ports.compute, telemetry, presence.own.announce_speed
        probe = tasks.create_task(probing(replica, context.manifest, stage, *with_what))
    await check_subspace(replica, context.manifest, presence, ports.compute)
    take = transfer.release if transfer is not None else lambda: None  # no name here keeps what may be gigabytes
    idle = transfer is not None and transfer.idle
    restored = await context.restorer.restore(replica, stage, take(), backup, seen_only=idle)
    speed = expected if probe is None else await probe
    return JoinedStage(stage, replica, restored, speed, text)


class RunText:
    """The run's text on one node, for the node's whole life and whichever stage it serves."""

    def __init__(self, context: NodeContext) -> None:
        manifest = context.manifest
        world = context.ports
        presence = context.presence
        self._manifest = manifest
        self._world = world
        self._presence = presence
        self._telemetry = context.telemetry
        self._samples: Samples | None = None
        self._asked: int | None = None
        if world.role is NodeRole.REPLICA or world.no_files:
            presence.own.can_serve(0, False)
        if (ports := world.data) is not None:
            asked = context.transport, context.telemetry, ports.meeting_points, self._holders
            urls = [str(base_url(one)) for one in manifest.data.locations]
            ports.set.fetch_from(ChunkSources(context.run_id, urls, ports.web, *asked))

    def ask_for(self, stage: int | None) -> None:
        """Note the stage that this machine's user named; None: none."""
        self._asked = stage

    async def look(self) -> None:
        """Try to open the text before a stage is chosen; note that this node cannot feed when that fails."""
        if self._world.data is None or 0 in self._presence.status.unable:
            return
        await self._try()

    async def _try(self) -> None:
        try:
            async with asyncio.timeout(LOOK_S):
                await self.open()
        except TimeoutError:
            self.refuse(NO_INDEX)
        except (DataError, NotPermitted, Unavailable) as error:
            self.refuse(error)

    async def keep_looking(self) -> None:
        """Retry in the background until the data set's index is here; this node can feed then. Returns at once when the
        run has no index, the index is open already, or this machine cannot serve the first stage."""
        ports = self._world.data
        if ports is None or ports.set.is_open or 0 in self._world.unable or not self._may_read:
            return
        while True:
            with contextlib.suppress(TimeoutError, DataError, NotPermitted, Unavailable):
                async with asyncio.timeout(AGAIN_S):
                    await self.open()
                    break
            await asyncio.sleep(AGAIN_S)
        self._presence.own.can_serve(0, True)
        self._presence.own.announce_change()

    @property
    def _may_read(self) -> bool:
        return self._world.role is not NodeRole.REPLICA and not self._world.no_files

    async def ready(self, stage: int) -> tuple[Samples | None, str]:
        """(the text of this node at `stage`, the reason why it should serve another stage; empty: none). There is text
        at the first stage alone. Its index is waited for, unless others feed and another stage is left.

        Raises DataError or NotPermitted when no other stage is left or the user asked for this one.
        """
        if stage != 0:
            return None, ""
        unable = self._presence.status.unable | {0}
        here = self._asked == 0 or len(unable) >= self._manifest.pipeline.stages
        others_feed = any(peer != self._presence.me for peer in self._presence.peer_table.swarm().feeders())
        goes = self._world.data is not None and others_feed and not here
        try:
            if not self._may_read:
                raise NotPermitted(
                    "this machine reads no text (--role replica, or no --data-root), as the first stage does"
                )
            async with asyncio.timeout(LOOK_S if goes else None):
                return await self.open(), ""
        except (TimeoutError, DataError, NotPermitted) as error:
            told = NO_INDEX if isinstance(error, TimeoutError) else error
            self.refuse(told)
            if here:
                raise
            return None, str(told)

    async def open(self) -> Samples:
        """The text, ready for feeding. Waits for the index without a time limit.

        Raises DataError when this machine's files are unusable or differ from those of the run's feeders, NotPermitted
        when they may not be read.
        """
        if self._samples is None:
            world = self._world
            if world.data is not None:
                await world.data.set.open()
                self._samples = ChunkSamples(world.data.set, self._manifest)
            else:
                self._samples = await world.compute.run(Priority.OUTER, 0, world.samples)
        mine = self._samples.digest[:DIGEST_NBYTES]
        self._presence.own.note(data_digest=mine)  # also where it is refused: the run's page shows it
        if self._world.data is None and mine:
            self._compare(mine)
        return self._samples

    def refuse(self, error: Exception) -> None:
        """Announce that this node does not feed, because of `error`. It serves other stages."""
        self._presence.own.can_serve(0, False)
        self._telemetry.event("data.refused", level="warning", reason=str(error))

    def _compare(self, mine: bytes) -> None:
        """Raise DataError when most feeders that joined before this node have another text. Later feeders do not count,
        because a new record costs no more than a key."""
        since_s = self._presence.own.incarnation / 1000.0
        before = [
            member.data_digest
            for member in self._presence.peer_table.swarm().serving(0)
            if member.data_digest and member.joined_unix_s < since_s and member.peer != self._presence.me
        ]
        if not before:
            return
        theirs, count = Counter(before).most_common(1)[0]
        if theirs != mine and count > before.count(mine):
            raise DataError(
                f"this machine's text has the digest {mine.hex()}, that of the run's feeders is {theirs.hex()}"
                f" ({count} of {len(before)}): it would train another text under the same sample numbers. The files, or"
                " the Python version whose standard library is read, differ; `swarmnode data make` makes a data set"
                " that is the same everywhere"
            )

    def _holders(self) -> list[PeerId]:
        """Members that announce the run's data set."""
        ports = self._world.data
        mine = b"" if ports is None else ports.set.digest[:DIGEST_NBYTES]
        return [m.peer for m in self._members() if m.data_digest == mine and m.peer != self._presence.me]

    def _members(self) -> list[Member]:
        return list(self._presence.peer_table.swarm().members())


# The stage that a node serves first, and after one whose text it cannot have.
#
# A node announces its choice before it downloads anything, and looks again: nodes that join at the same time see each
# other's reservations and take different stages (train/pipeline/rebalance.py).

SETTLE_S = 0.5  # guess: until the reservation of a node that joins at the same time can be read


async def choose(context: NodeContext, text: RunText, asked: int | None) -> int:
    """The stage `asked` for, or the one that needs a replica most, after a look at all members of the run."""
    manifest = context.manifest
    presence = context.presence
    pinger = context.pinger
    stages = range(manifest.pipeline.stages)
    await presence.look(stages)
    stage = asked
    reason = "asked for"
    if stage is None:
        await text.look()
        rng = seeded(manifest.seed, "stage", context.me)
        pipeline = manifest.pipeline
        shares = costs(manifest)
        rules = RebalanceRules(pipeline.rebalance_ratio, pipeline.min_keep)
        living = await living_members(presence, pinger, context.ports.clock, context.telemetry)
        empty = [at for at in stages if not living.serving(at)]
        own = context.restorer.saved.best(empty, presence.status.unable)
        if own is not None:
            stage = own
            reason = "nobody serves it, and its trained state is saved here"
            await presence.reserve(stage)
        else:
            gone = {m.peer for m in presence.peer_table.swarm().members()} - {m.peer for m in living.members()}
            stage, reason = choose_stage(bounded(living, shares), shares, rules, rng, presence.status.unable)
            for _ in range(TRIES):
                before = stage
                await presence.reserve(stage)
                await asyncio.sleep(SETTLE_S)
                await presence.look(stages)
                here = Swarm.of(
                    (m for m in presence.peer_table.swarm().members() if m.peer not in gone), pipeline.stages
                )
                told = bounded(here, shares), context.me, shares, rules, manifest.seed, presence.status.unable
                stage, why = reserved_stage(*told)
                if stage == before:
                    break
                reason = why
    context.telemetry.event("stage.chosen", serves=stage, reason=reason)
    return stage
