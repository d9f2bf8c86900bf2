"""A node that only feeds: it reads text, starts microbatches at replicas of the first stage, and reports losses."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace

from swarmnode.concurrency import background_tasks, forever
from swarmnode.errors import RemoteFault
from swarmnode.ids import PeerId
from swarmnode.membership.liveness import SOON_SHARE
from swarmnode.membership.swarm import feeder_place
from swarmnode.node.drain import DrainReport, drain
from swarmnode.node.drain_steps import HeldWork
from swarmnode.node.feeder_loop import fed_status, feeding, make_feeder
from swarmnode.node.node_ports import NodeContext
from swarmnode.node.notice import Notices
from swarmnode.node.presence import NO_STAGE, StageObserver, StageStatus
from swarmnode.pipeline.feeder import Feeder, RemoteFirstHop, Samples
from swarmnode.pipeline.microbatch_size import SampleRates
from swarmnode.pipeline.next_hop import NextHop
from swarmnode.pipeline.recompute import TextService
from swarmnode.ports import Handler
from swarmnode.wire import record_pb2

PINGED = 4  # guess: replicas of each stage that are asked how far the run is
SINGLE_SHARE = 0.5  # guess: of its best speed a replica has with one sample at a time; a feeder measures no device


class CountedRounds:
    """The run's rounds by its count of samples, for a node that takes part in none."""

    def __init__(self, context: NodeContext) -> None:
        self._total = context.presence.samples_total
        self._size = context.manifest.gossip.round_samples
        self._grew = asyncio.Event()

    @property
    def done(self) -> int:
        """Rounds whose samples are trained."""
        return self._total() // self._size

    async def beyond(self, round_index: int) -> None:
        """Return when a later round than `round_index` is done."""
        while self.done <= round_index:
            self._grew.clear()
            await self._grew.wait()

    def on_progress(self) -> None:
        """The run's sample count grew."""
        self._grew.set()


class FeederOnly(StageObserver):
    """A node at the feeders' place (swarm.py), from `open` until the end of its block. `begin` makes it feed."""

    def __init__(self, context: NodeContext, samples: Samples, tasks: asyncio.TaskGroup) -> None:
        manifest, presence, telemetry = context.manifest, context.presence, context.telemetry
        self._context = context
        self._samples = samples
        self._tasks = tasks
        self._rounds = CountedRounds(context)
        self._next_hop = NextHop(context.run_id, context.transport, presence.routers, telemetry, manifest)
        self._text = TextService(manifest, samples.again)
        self.feeder: Feeder | None = None
        self.held_work = HeldWork(None)

    @classmethod
    @asynccontextmanager
    async def open(cls, context: NodeContext, samples: Samples) -> AsyncIterator[FeederOnly]:
        """Answer questions about the text for the length of a block."""
        async with background_tasks() as tasks:
            yield cls(context, samples, tasks)

    async def begin(self) -> None:
        """Wait until every stage has a replica, then feed. Returns when cancelled, and the feeding goes on."""
        context, presence = self._context, self._context.presence
        await self._meet_run()
        hop = RemoteFirstHop(self._next_hop, context.ports.identity, presence.run_progress.clock.history.record_work)
        size = context.manifest.inner.microbatch
        presence.note(rates=SampleRates({1: SINGLE_SHARE, size: 1.0} if size > 1 else {1: 1.0}))
        self.feeder = feeder = make_feeder(
            context, hop, presence.incarnation, self._samples, self._replica_speed, self._fed
        )
        self.held_work.feed_by(feeder)
        resumed = context.ports.saving.resume is not None
        self._tasks.create_task(feeding(feeder, self._rounds, presence.samples_total, self._rounds.done, resumed))
        presence.set_state(record_pb2.NODE_STATE_TRAINING, "ready")
        context.telemetry.event("node.ready", serves="feeder")
        await forever()

    async def _meet_run(self) -> None:
        """Wait for a run that can train, and take over its count of samples as most of its replicas tell it."""
        context, presence, waiting = self._context, self._context.presence, False
        stages = range(context.manifest.pipeline.stages)
        while empty := [stage for stage in stages if not presence.peer_table.swarm().serving(stage)]:
            if not waiting:
                context.telemetry.event("feeder.waiting", stages=empty, reason="these stages have no replica")
            waiting = True
            await asyncio.sleep(SOON_SHARE * context.manifest.limits.announce_period_s)
            await presence.look(empty)
        answering = await context.pinger.answering_in(presence.peer_table.swarm(), stages, PINGED)
        presence.run_progress.begin(presence.run_progress.suppose(answering).least)

    def _replica_speed(self) -> float:
        """Samples a second of an average replica, as they announce it."""
        rates = [m.samples_per_second for m in self._context.presence.peer_table.swarm().members()]
        known = [speed for speed in rates if speed > 0.0]
        return sum(known) / len(known) if known else 1.0

    def _fed(self, samples: int) -> None:
        self._context.presence.run_progress.record_fed(samples)
        self.on_progress()

    async def drain(self, notices: Notices, report: DrainReport, checkpoint: str) -> None:
        """Finish the microbatches in flight as far as `notices` allow; `report` is filled in. There is no stage to
        save in `checkpoint`."""
        step = self.held_work.leave(report)
        report.begin(notices.left_s(), self._context.telemetry)
        await drain(report, [step], notices, self._context.telemetry)

    def hold(self, reason: str) -> None:
        """Start no microbatch for `reason`. Those under way go on."""
        self.held_work.hold(reason)

    async def resume(self) -> None:
        """After `hold`: feed again."""
        self.held_work.hold(None)

    # ---- calls, news, status

    def handlers(self) -> Mapping[str, Handler]:
        """The handlers of calls that a feeder answers."""
        return {"recompute": self._text.serve}

    def status(self) -> StageStatus:
        """The feeder at this moment."""
        return NO_STAGE if self.feeder is None else replace(fed_status(self.feeder), round_index=self._rounds.done)

    def on_progress(self) -> None:
        """The run's sample count grew: a validation may be due, or another part of the swarm is back."""
        self._context.presence.run_progress.compare_parts()
        self._rounds.on_progress()

    def hear_blocks(self, told: Mapping[PeerId, record_pb2.Blocks], frontier_max: int) -> Iterable[RemoteFault]:
        """Take in the finished blocks announced by other feeders; returns those that cannot be believed."""
        return () if self.feeder is None else self.feeder.observe_blocks(told, frontier_max)

    def doubt(self, peers: Iterable[PeerId]) -> None:
        """Check whether calls to `peers`, which went silent, are still alive."""
        self._next_hop.doubt(peers)


def attend_feeding(context: NodeContext, tasks: asyncio.TaskGroup) -> None:
    """Announce this node as a feeder without a stage. Loops that announce it and look others up run in `tasks` from now
    on."""
    presence, place = context.presence, feeder_place(context.manifest)
    presence.attend(place, (0,), 0.0)
    presence.set_state(record_pb2.NODE_STATE_JOINING, "feeds only")
    tasks.create_task(presence.announcing())
    tasks.create_task(presence.watching([0, place]))
