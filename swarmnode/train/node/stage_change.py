"""Moves of a node to another stage. The node decides alone (train/pipeline/rebalance.py), and fetches the new state
while it serves the old stage."""

from __future__ import annotations

import asyncio
import contextlib
import math
import random
from collections.abc import Callable
from dataclasses import dataclass

from swarmnode.base.errors import Unavailable
from swarmnode.base.ids import PeerId, stage_name
from swarmnode.base.metrics import name
from swarmnode.base.ports import Clock, Replica, Telemetry
from swarmnode.base.wire import record_pb2
from swarmnode.keep.recovery.state_fetcher import StateFetcher
from swarmnode.keep.transfer.snapshot import DOWNLOAD_RATE, Snapshot
from swarmnode.model.section import snapshot_nbytes
from swarmnode.model.split import costs
from swarmnode.net.membership.liveness import AGAIN_S, PINGED_MAX, SAMPLE, SOON_SHARE, Pinger
from swarmnode.net.membership.swarm import COMING, DRAINING, PAUSED, SERVING, Swarm
from swarmnode.run.manifest import Manifest
from swarmnode.train.gossip.exchange import Gossip
from swarmnode.train.node.move_evidence import MoveEvidence
from swarmnode.train.node.node_ports import NodeContext
from swarmnode.train.node.presence import Presence
from swarmnode.train.pipeline.believed_rate import bounded
from swarmnode.train.pipeline.rebalance import (
    SMALL,
    RebalanceRules,
    StageMove,
    on_the_way,
    pause_ahead_s,
    plan_move,
    shifted,
    staying,
    still_good,
    worth_it,
)

ROUND_WAIT_MAX_S = 60.0  # guess: rounds may take hours; no machine should idle, nor a stage stand empty, for so long
UNREST = 3  # guess: waits of an announce period after nodes came or went: newcomers have not announced a speed yet
# Guess: so long before the announced pause of a stage's last replica another machine goes there. It fetches the state,
# and waits for a round, ROUND_WAIT_MAX_S at most.
PAUSE_AHEAD_S = 2.0 * ROUND_WAIT_MAX_S


@dataclass(slots=True)
class StageTransfer:
    """The state and expectations that a node takes along to its new stage. `state` is None when no replica there has
    one, or once it is loaded. `speed`: the samples/s expected there, by the speed so far and the stages' costs.
    `idle`: the replicas there do nothing."""

    stage: int
    reason: str
    speed: float
    state: Snapshot | None
    idle: bool = False

    def release(self) -> Snapshot | None:
        """Return the state and drop the reference here: it is as large as the replica itself."""
        state = self.state
        self.state = None
        return state


async def living_members(presence: Presence, pinger: Pinger, clock: Clock, telemetry: Telemetry) -> Swarm:
    """The swarm without members that answer no ping, or have announced to pause soon. Large swarms are not pinged."""
    swarm = staying(presence.peer_table.swarm(), clock.unix_s())
    peers = [member.peer for member in swarm.members() if member.peer != presence.me]
    answering = await pinger.answering(peers) if len(peers) <= PINGED_MAX else frozenset(peers)
    gone = [peer for peer in peers if peer not in answering]
    if gone:
        telemetry.event("peer.gone", peers=gone, reason="no answer to a ping")
    return Swarm.of((member for member in swarm.members() if member.peer not in gone), len(swarm.stages))


class StageRebalancer:
    """Watches the balance of the stages for one node. `run` returns when the node should move."""

    def __init__(
        self,
        context: NodeContext,
        replica: Replica,
        gossip: Gossip,
        rng: random.Random,
        samples_here: Callable[[], int],
        speed: Callable[[], float],
        work_here: Callable[[], float],
    ) -> None:
        """`replica` is of the present stage, and `gossip` runs its rounds; `samples_here` counts the samples trained
        there; `speed` is this machine's, in samples/s; `work_here` grows with each microbatch that comes."""
        manifest = context.manifest
        self._context = context
        self._manifest = manifest
        self._presence = context.presence
        self._replica = replica
        self._fetcher = StateFetcher(context, self._presence, replica)
        self._gossip = gossip
        self._rng = rng
        self._idle = IdleStages(manifest, self._presence, work_here)
        self._costs = costs(manifest)
        pipeline = manifest.pipeline
        self._rules = RebalanceRules(pipeline.rebalance_ratio, pipeline.min_keep)
        self._rate = DOWNLOAD_RATE
        self._unrest = UNREST  # this node has just come itself
        self._since_s = asyncio.get_running_loop().time()
        self._since_total = self._presence.progress.total
        self._evidence = MoveEvidence(manifest, self._presence, self._costs, self._rules, samples_here, speed)

    @property
    def _period_s(self) -> float:
        return self._manifest.pipeline.rebalance_period_s

    @property
    def _announce_s(self) -> float:
        return self._manifest.limits.announce_period_s

    async def run(self) -> StageTransfer:
        """Wait until this node should serve another stage and has that one's state, and a round here is just over."""
        if self._period_s <= 0.0 or self._manifest.pipeline.stages < 2:
            await asyncio.Event().wait()
        while True:
            await self._wait()
            move, _ = self._plan()
            if move is None:
                continue
            share = 1.0 if self._presence.peer_table.swarm().coming(move.target) else SOON_SHARE
            await asyncio.sleep(share * self._announce_s * self._rng.random())  # against simultaneous movers
            await self._look()
            move, reason = self._plan()
            if move is None:
                continue
            transfer = await self._prepare(move, reason)
            if transfer is not None:
                return transfer

    async def _wait(self) -> None:
        """Wait about a period, so that moves are rare.

        The wait is an announce period while a stage stands empty, and after nodes (including this one) came or went:
        the loss of a node should not stay unnoticed for a period, and nodes that began together chose their stages
        before any had announced a speed. It ends at once when nodes come or go, or a stage is idle. Before the first
        sample, which takes minutes, it begins anew then, and is AGAIN_S while a stage's nodes may be starting.
        """
        while not await self._waited():
            pass

    async def _waited(self) -> bool:
        """Wait as `_wait` does; False if the wait is to begin anew."""
        loop = asyncio.get_running_loop()
        peer_table = self._presence.peer_table
        announce_s = self._announce_s
        self._evidence.renew()
        before = peer_table.serving()
        going = self._going()
        shape = peer_table.shape
        begun = self._presence.progress.total > 0
        swarm = peer_table.swarm()
        now_unix_s = self._context.ports.clock.unix_s()
        here = staying(swarm, now_unix_s, PAUSE_AHEAD_S)
        whole = all(any(m.state != PAUSED for m in members) for members in here.stages)
        if begun:
            most_s = announce_s if self._unrest > 0 or not whole else math.inf
        else:
            most_s = announce_s if self._unrest > 0 and whole else AGAIN_S
        self._unrest = max(0, self._unrest - (begun or whole))
        wait_s = min(self._period_s, most_s) * (0.9 + 0.2 * self._rng.random())
        end = loop.time() + min(wait_s, pause_ahead_s(swarm, now_unix_s, PAUSE_AHEAD_S))
        while (left_s := end - loop.time()) > 0:
            await asyncio.sleep(min(left_s, SOON_SHARE * announce_s))
            if self._idle.move() is not None or (not begun and self._presence.progress.total > 0):
                return True
            if peer_table.shape == shape:
                continue  # nobody came, went or changed since the last look
            shape = peer_table.shape
            if shifted(before, peer_table.serving(), self._rules) or self._going() != going:
                self._unrest = UNREST
                return begun
        return True

    def _going(self) -> tuple[tuple[PeerId, int, bool], ...]:
        """The nodes on their way to another stage; none in a large swarm, where they do not matter."""
        peer_table = self._presence.peer_table
        return on_the_way(peer_table.swarm()) if peer_table.size <= SMALL else ()

    def _plan(self) -> tuple[StageMove | None, str]:
        """This node's own move, if it is the one to move now."""
        presence = self._presence
        if presence.status.state != record_pb2.NODE_STATE_TRAINING:
            return None, "not training"
        if (planned := self._idle.move()) is not None:
            return planned
        move, reason = plan_move(self._swarm(), self._costs, self._rules, presence.me)
        if move is None or move.peer != presence.me:
            return None, reason
        good, why = self._evidence.supports(move, self._swarm())
        if not good:
            self._context.telemetry.event("stage.stays", source=move.source, target=move.target, reason=why)
        return (move, reason) if good else (None, why)

    def _swarm(self) -> Swarm:
        """The members that stay, with speeds bounded to what can be believed."""
        now_unix_s = self._context.ports.clock.unix_s()
        return bounded(staying(self._presence.peer_table.swarm(), now_unix_s, PAUSE_AHEAD_S), self._costs)

    async def _look(self) -> None:
        await self._presence.look(range(self._manifest.pipeline.stages))

    async def _prepare(self, move: StageMove, reason: str) -> StageTransfer | None:
        """Fetch the state of the new stage, then look again; None when this node stays."""
        try:
            return await self._transfer(move, reason)
        except Unavailable as error:
            self._presence.own.going_to(None)
            self._context.telemetry.event("stage.stays", source=move.source, target=move.target, reason=str(error))
            return None

    async def _transfer(self, move: StageMove, reason: str) -> StageTransfer:
        """The state to take along. Raises Unavailable where it is better to stay."""
        sizes = self._replica.sizes_of(move.target)
        round_now = self._presence.progress.total // self._manifest.gossip.round_samples
        cut = self._fetcher.newcomer_part(move.target, round_now)
        _expect(*worth_it(move, snapshot_nbytes(cut.sizes(sizes)) / self._rate))
        self._context.telemetry.event("stage.moving", source=move.source, target=move.target, reason=reason)
        self._presence.own.going_to(move.target)
        idle = move.target in self._idle
        if idle or not self._presence.peer_table.swarm().serving(move.target):
            return await self._bring_back(move, reason, idle)
        loop = asyncio.get_running_loop()
        begun_s = loop.time()
        donors = self._fetcher.replicas(move.target)
        try:
            judge = self._fetcher.judge(move.target, donors)
            state, offer = await self._fetcher.of_replicas(move.target, donors, judge, round_now)
        except Unavailable:
            if self._presence.peer_table.swarm().serving(move.target):
                raise
            return await self._bring_back(move, reason)  # all who gave it have gone, or paused, since
        self._rate = offer.nbytes / max(1e-3, loop.time() - begun_s)
        await self._after_a_round()
        await self._look()
        if self._swarm().coming(move.target):
            good, why = still_good(self._swarm(), self._costs, move, self._rules)
        else:  # still nobody feeds there, so all training stands
            good, why = await self._replaced(move.source)
        _expect(good, why)
        _expect(self._presence.status.state == SERVING, "this node has paused meanwhile")
        self._context.telemetry.count(name.RECOVERIES, method="replica")
        return StageTransfer(move.target, f"{reason}; {why}", move.speed, Snapshot.of_offer(offer, state))

    async def _bring_back(self, move: StageMove, reason: str, idle: bool = False) -> StageTransfer:
        """A move without a state: the new stay brings the stage back as a joiner does. Raises Unavailable where it is
        better to stay."""
        # One that leaves gives its state to a replica of the stage before, perhaps this one, and then says goodbye.
        leaves = any(m.state == DRAINING for m in self._presence.peer_table.swarm().resting(move.target))
        _expect(not leaves, f"the last replica of {stage_name(move.target)} leaves, and is handing it on")
        _expect(*await self._replaced(move.source))
        _expect(self._presence.status.state == SERVING, "this node has paused meanwhile")
        return StageTransfer(move.target, reason, move.speed, None, idle)

    async def _replaced(self, stage: int) -> tuple[bool, str]:
        """Whether another replica of `stage`, ours, is sure to stay: it answers, and has not announced that it goes.

        This node announces its move before it looks. Of two nodes that leave at the same time, at least one therefore
        hears of the other, and a node that hears stays. Both may stay, and look again after a random wait. Without this
        check both replicas of a stage were seen to leave for an empty one, and the stage's learning was lost.
        """
        me = self._presence.me
        await self._presence.announce()
        await self._presence.look([stage])
        mates = [member.peer for member in self._swarm().settled(stage) if member.peer != me]
        answering = await self._context.pinger.answering(mates[:SAMPLE])
        return bool(
            answering
        ), f"of the others of {stage_name(stage)} {len(mates)} mean to stay, and {len(answering)} of them answer"

    async def _after_a_round(self) -> None:
        """Wait for the end of a round expected within ROUND_WAIT_MAX_S, so that this node's update reaches the others.

        Does not wait when rounds take longer, because the weak stage cannot wait. Stops waiting when rounds become that
        slow because most of the stage's replicas have gone (simulated: flash-crowd; it was the minute that the stage
        had to wait).
        """
        loop = asyncio.get_running_loop()
        gossip = self._gossip
        done = self._gossip.done
        begun_s = loop.time()
        begun_total = self._presence.progress.total
        end = begun_s + min(self._period_s, ROUND_WAIT_MAX_S)
        due_s = self._next_round_s(self._since_s, self._since_total)
        while gossip.done == done and due_s <= ROUND_WAIT_MAX_S and (left_s := end - loop.time()) > 0.0:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(min(left_s, self._announce_s)):
                    await gossip.beyond(done)
            due_s = self._next_round_s(begun_s, begun_total)

    def _next_round_s(self, since_s: float, since_total: int) -> float:
        """Seconds until the run's next round at the rate of samples since loop time `since_s`, when there were
        `since_total`."""
        total = self._presence.progress.total
        size = self._manifest.gossip.round_samples
        seconds = asyncio.get_running_loop().time() - since_s
        rate = (total - since_total) / seconds if seconds > 0.0 else 0.0
        return (size - total % size) / rate if rate > 0.0 else float("inf")


def _expect(good: bool, why: str) -> None:
    if not good:
        raise Unavailable(why)


PATIENCE = 2.0  # guess: a microbatch taken within the first `microbatch_timeout_s` is answered within the second
# Guess: a stage refuses as well because it finds no one behind it, so the last stage is suspected first. At most:
LATER_MAX = 4.0


class IdleStages:
    """The idle stages as one node of a stage sees them."""

    def __init__(self, manifest: Manifest, presence: Presence, work_here: Callable[[], float]) -> None:
        """`work_here` grows with each microbatch that comes to this node."""
        self._patience_s = PATIENCE * manifest.limits.microbatch_timeout_s
        self._stages = manifest.pipeline.stages
        self._presence = presence
        self._work_here = work_here
        self._seen = 0.0, asyncio.get_running_loop().time()  # work done here, and the loop time of its last change

    def __contains__(self, stage: int) -> bool:
        """Whether nobody works at `stage`, and no node that was seen at work is on its way there."""
        presence = self._presence
        own = self._presence.status.stage
        unfed = own is not None and stage == own - 1 and self._unfed(stage)
        idle = stage != own and (unfed or presence.routing.idle(stage, self._patience(stage)))
        return idle and not self._someone_comes(stage)

    def move(self) -> tuple[StageMove, str] | None:
        """(the move of this node to an idle stage, the reason), or None if there is none that it could serve, or if no
        other replica of its own stage stays."""
        presence = self._presence
        own = self._presence.status.stage
        if own is None or own >= self._stages:
            return None
        target = next((stage for stage in range(self._stages) if stage in self), None)
        if target is None or target in presence.status.unable:
            return None
        swarm = presence.peer_table.swarm()
        if not swarm.serving(target) or len(swarm.settled(own)) < 2:
            return None
        speed = presence.status.samples_per_second
        reason = f"nobody works at {stage_name(target)}, though {swarm.sizes[target]} replicas announce themselves"
        return StageMove(presence.me, own, target, 0.0, speed, speed), reason

    def _unfed(self, stage: int) -> bool:
        """Whether no microbatch has come for long from `stage`, the one before. Behind the second stage one must have
        come earlier: else a stage in front of `stage` may be the idle one."""
        work = self._work_here()
        now = asyncio.get_running_loop().time()
        if work != self._seen[0] or self._presence.status.state != SERVING:
            self._seen = work, now  # nothing comes while this node pauses
        return (stage == 0 or work > 0.0) and now - self._seen[1] >= self._patience(stage)

    def _patience(self, stage: int) -> float:
        """Seconds until `stage` is taken to be idle."""
        return self._patience_s * min(LATER_MAX, float(self._stages - stage))

    def _someone_comes(self, stage: int) -> bool:
        """Whether a machine that was seen at work has said that it goes to `stage`, or is there."""
        presence = self._presence
        swarm = presence.peer_table.swarm()
        seen = presence.run_progress.clock.history.times
        return any(
            member.peer in seen and (member.moving_to == stage or (member.stage == stage and member.state in COMING))
            for member in swarm.members()
        )
