"""The way of a served replica to its stage's state: a newcomer's first round, and what it takes after a pause or when
it fell behind."""

from __future__ import annotations

import asyncio
import math
from contextlib import suppress

from swarmnode.base.errors import Unavailable
from swarmnode.base.ids import PeerId, stage_name
from swarmnode.base.wire import record_pb2
from swarmnode.keep.recovery.recovery_source import OwnState, donors_of
from swarmnode.model.split import costs
from swarmnode.net.membership.liveness import TRIES
from swarmnode.net.membership.swarm import Swarm
from swarmnode.run.manifest.gossip_compat import averages_gradients
from swarmnode.train.gossip.exchange import WAIT_MIN_S, Gossip
from swarmnode.train.node.held_replica import HeldReplica
from swarmnode.train.node.node_ports import NodeContext
from swarmnode.train.node.stage_change import ROUND_WAIT_MAX_S
from swarmnode.train.node.stage_parts import StageParts
from swarmnode.train.node.stage_return import StageReturn
from swarmnode.train.pipeline.rebalance import load

SYNCS_AGAIN = TRIES - 1  # times that a newcomer which missed its first round takes the state again


def ready_to_serve(
    swarm: Swarm, stage: int, me: PeerId, *, received: bool, waited_s: float, round_in_s: float = 0.0
) -> tuple[bool, str]:
    """(ready, the reason): a newcomer with its state may take microbatches after a round at weight 0. It does not wait
    when no other replica serves the stage, nor when the next round, due in `round_in_s` at the earliest, is far off."""
    if received:
        return True, "received a round"
    if not donors_of(swarm, stage, me):
        return True, f"nobody else serves {stage_name(stage)}"
    if round_in_s > ROUND_WAIT_MAX_S:
        return True, f"no round comes within {round_in_s:.0f} s"
    if waited_s >= ROUND_WAIT_MAX_S:
        return True, f"no round came within {ROUND_WAIT_MAX_S:g} s"
    return False, "waiting for the first round"


async def receive_first_round(context: NodeContext, stage: int, gossip: Gossip) -> None:
    """Receive one round at weight 0 before serving, unless the next round is too far away. Looks again at least
    every announce period, until it has waited for long enough."""
    presence = context.presence
    shares = costs(context.manifest)
    period_s = context.manifest.limits.announce_period_s
    begun = asyncio.get_running_loop().time()
    presence.own.set_state(record_pb2.NODE_STATE_SYNCING, "state loaded")
    while True:
        done = gossip.done
        waited_s = asyncio.get_running_loop().time() - begun
        received = not gossip.weight.newcomer
        swarm = presence.peer_table.swarm()
        # The run is at most as fast as its slowest stage says it could be.
        fastest = min(load(swarm, shares).capacity)
        round_in_s = gossip.left / fastest if fastest > 0.0 else 0.0
        if stage == 0 and not swarm.feeders():
            round_in_s = math.inf  # all wait for this node to feed
        ready, reason = ready_to_serve(
            swarm, stage, presence.me, received=received, waited_s=waited_s, round_in_s=round_in_s
        )
        if ready:
            gossip.weight.serve()  # it waits no longer for a round to receive
            context.telemetry.event("node.state", state="synced", reason=reason)
            return
        with suppress(TimeoutError):
            async with asyncio.timeout(min(period_s, max(WAIT_MIN_S, ROUND_WAIT_MAX_S - waited_s))):
                await gossip.beyond(done)


class CatchUp:
    """Brings one replica to the state of its stage. `watch` says whose state it should take."""

    def __init__(self, parts: StageParts, held: HeldReplica) -> None:
        context = parts.context
        self._parts = parts
        self._held = held
        self._gossip = parts.gossip
        self._stage = parts.here.stage
        self._context = context
        self._presence = context.presence
        self._behind = asyncio.Event()  # set while the replica waits for a state further than its own
        self._from: frozenset[PeerId] = frozenset()  # then: who has the state, of all that serve the stage
        self.watch = StageReturn(context, self._stage, self._gossip, parts.restored.before, lambda: parts.hop.worked)
        self._gossip.behind = self._fell_behind

    async def run(self) -> None:
        """Take the stage's state whenever this replica fell behind, then serve again, until cancelled."""
        presence = self._presence
        while True:
            await self._behind.wait()
            try:
                await self.resume()
            except Unavailable as error:
                self._context.telemetry.event("recovery.waiting", stage=self._stage, reason=str(error))
                await asyncio.sleep(self._context.manifest.limits.announce_period_s)
                continue
            self._behind.clear()
            if presence.status.state == record_pb2.NODE_STATE_SYNCING:
                presence.own.set_state(record_pb2.NODE_STATE_TRAINING, "has the state of the run again")

    def on_progress(self) -> None:
        """The run's sample count grew: look whether this replica is behind."""
        due = self._presence.progress.total // self._context.manifest.gossip.round_samples
        if self._gossip.idle.is_set() and self.watch.asks(due):  # else it is asked before the next round
            self._fell_behind(due)

    async def resume(self) -> None:
        """After a hold: catch up with the stage, then take work again. Raises Unavailable, and nothing has changed,
        when the nodes that had the state are gone meanwhile.

        Where nobody else serves the stage, the newest of this replica's state and what is kept counts.
        """
        await self._gossip.idle.wait()  # a round begun before the pause goes on, and its outer step needs its mark
        await self._presence.look([self._stage])
        older = self._behind.is_set() or self._held.outdated() or bool(self._from)
        newcomer = older and await self._restore_again()
        self._held.release()
        if newcomer:
            await self.sync()
        self._parts.held_work.hold(None)

    async def sync(self) -> None:
        """Receive a first round. A newcomer that misses it takes the state once more, with that round in it; unless a
        further round ended meanwhile, it has what it would have received. Where each step is a round, a state is some
        rounds old when it has come over a home line, and the next one would be, too: later rounds heal that."""
        manifest = self._context.manifest
        gossip = self._gossip
        size = manifest.gossip.round_samples
        for again in range(SYNCS_AGAIN + 1):
            await receive_first_round(self._context, self._stage, gossip)
            if not gossip.missed or again == SYNCS_AGAIN or averages_gradients(manifest):
                return
            gossip.hold(True)
            await gossip.idle.wait()
            with suppress(Unavailable):
                await self._restore_again(gossip.done)
                if self._presence.progress.total // size <= gossip.done:
                    gossip.weight.serve()
            gossip.hold(False)
            if not gossip.weight.newcomer:
                return

    async def _restore_again(self, round_min: int = 0) -> bool:
        """Take the state after round `round_min` or later, if another node has a newer one than this replica. Returns
        whether its next round is to be received at weight 0. Raises Unavailable."""
        gossip = self._gossip
        only = self._from & {*self._held.others()}
        self._from = frozenset()
        restored = await self._context.restorer.restore(
            self._parts.here.replica,
            self._stage,
            round_min=round_min,
            only=only,
            backup=self._parts.backup.kept(self._stage),
            own=OwnState(self._held.trained().total, gossip.line),
        )
        gossip.restored(max(gossip.done, restored.round), restored.line, newcomer=restored.newcomer)
        self.watch.settled()
        return restored.newcomer

    def _fell_behind(self, due: int) -> bool:
        """Whether this replica's state is older than its stage's before round `due` (stage_return.py): from now on it
        serves no microbatch, no round and no state until it has theirs."""
        presence = self._presence
        if self._behind.is_set() or presence.status.state != record_pb2.NODE_STATE_TRAINING:
            return False  # while it catches up, it is held
        if (found := self.watch.behind(due)) is None:
            return False
        self._from, reason = found
        self._context.telemetry.event("state.behind", level="warning", round=self._gossip.done, reason=reason)
        self._held.hold("this replica's state is behind the run's", away=False)
        presence.own.set_state(record_pb2.NODE_STATE_SYNCING, reason)
        self._behind.set()
        return True
