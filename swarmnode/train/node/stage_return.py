"""Whether a replica's state is older than its stage's: it slept, it was cut off, or another one took its place.

A replica that was away for long takes the newer state before it meets others, as a joiner does: an older state is never
averaged into a newer one (net/membership/state_line.py).
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Collection

from swarmnode.base.ids import PeerId, stage_name
from swarmnode.net.membership.liveness import LOOK_SHARE, LOST_PERIODS
from swarmnode.net.membership.run_progress import APART_ROUNDS
from swarmnode.net.membership.state_line import StateLine, WorkWatch, judge_return, yields
from swarmnode.net.membership.swarm import Member
from swarmnode.train.gossip.exchange import Gossip
from swarmnode.train.node.node_ports import NodeContext

HEARD_PERIODS = 2.0
"""Announce periods until a machine that slept has heard of the others: announced in one, read in the next."""


class StageReturn:
    """Watches one replica. `behind` says whose state it should take."""

    def __init__(
        self, context: NodeContext, stage: int, gossip: Gossip, before: Collection[PeerId], worked: Callable[[], float]
    ) -> None:
        """`before`: replicas whose place this one took; `worked`: samples that it has worked on."""
        limits = context.manifest.limits
        presence = context.presence
        self._context = context
        self._stage = stage
        self._gossip = gossip
        self._before = before
        self._worked = worked
        self._period_s = LOOK_SHARE * limits.announce_period_s
        self._heard_s = HEARD_PERIODS * limits.announce_period_s
        self._watch = WorkWatch(
            LOST_PERIODS * limits.announce_period_s, context.ports.clock.unix_s(), presence.progress.total
        )
        self._in_vain = presence.run_progress.in_vain  # what was known to be trained in vain
        self._asked_due = -1  # the round before which `behind` was asked last, and when
        self._asked_s = -math.inf

    async def run(self) -> None:
        """Note how much this replica works, until cancelled."""
        while True:
            self._tick()
            await asyncio.sleep(self._period_s)

    def _tick(self) -> None:
        self._watch.tick(self._context.ports.clock.unix_s(), self._context.presence.progress.total, int(self._worked()))

    def asks(self, due: int) -> bool:
        """Whether to ask if this replica is `behind`: before each round, and at times in between."""
        now_s = asyncio.get_running_loop().time()
        if due == self._asked_due and now_s - self._asked_s < self._period_s:
            return False
        self._asked_due = due
        self._asked_s = now_s
        return True

    def settled(self) -> None:
        """This replica has the state of its stage."""
        self._watch.slept = False

    def behind(self, due: int) -> tuple[frozenset[PeerId], str] | None:
        """(the replicas whose state this one should take, none for any; why), None where its own is as new: before
        round `due`, which the believed count of samples has reached.

        Others took a step that this replica lacks; or another part of the swarm trained more while they were apart; or
        the stage went on from a copy while this replica was away, and has more by now; or one is back whose place this
        one took, with more; or others are rounds ahead. A liar about its round or its line cannot bring this about: the
        count is believed in bounds (net/membership/clock.py), and a line counts only where this replica did not work,
        or knows whose place it took. The state that is taken is checked by others, as a joiner's.
        """
        self._tick()
        if went_on := self._gossip.butterfly.went_on:
            return went_on, "others took a step that this replica lacks: it takes their state"
        presence = self._context.presence
        run_progress = presence.run_progress
        run_progress.compare_parts()
        mates = [m for m in presence.peer_table.swarm().serving(self._stage) if m.peer != presence.me]
        vain = run_progress.in_vain
        back = run_progress.watch.back
        others = frozenset(m.peer for m in mates if m.peer in back)
        if vain is not None and vain is not self._in_vain and others:
            self._in_vain = vain
            return others, f"{vain.reason}: it takes their state"
        if (found := self._of_other_line(mates)) is not None:
            return found
        ahead = max((m.round_index for m in mates if m.line == self._gossip.line), default=0)
        # Records are as old as the sleep, until others are heard: only the count of samples tells that they went on.
        newest = due if self._watch.slept and ahead else min(due, ahead)
        if newest <= self._gossip.done + self._rounds_apart() or run_progress.watch.merging:
            if self._watch.awake_s(self._context.ports.clock.unix_s()) >= self._heard_s:
                self._watch.slept = False
            return None
        done = self._gossip.done
        why = "slept" if self._watch.slept else "lagged"
        return frozenset(), (
            f"others of {stage_name(self._stage)} are in round {newest}, this replica, which {why}, in {done}: it takes"
            " their state"
        )

    def _rounds_apart(self) -> int:
        """Rounds that this replica may be behind the others: one, after its machine slept."""
        manifest = self._context.manifest
        gossip = self._gossip
        if self._watch.slept:
            return gossip.stride * (1 + manifest.gossip.delay)
        pace = gossip.pace.samples_per_second
        size = manifest.gossip.round_samples
        missed = manifest.limits.exchange_timeout_s * pace / size  # where rounds are short, one exchange may cost many
        return max(APART_ROUNDS * gossip.stride, int(missed))

    def _of_other_line(self, mates: Collection[Member]) -> tuple[frozenset[PeerId], str] | None:
        """The same as `behind`, of replicas whose state is of a later line."""
        gossip = self._gossip
        manifest = self._context.manifest
        later = {m.line for m in mates if m.line.at >= gossip.line.at and m.line != gossip.line}
        total = self._context.presence.progress.total
        size = manifest.gossip.round_samples
        for line in sorted(later, key=lambda line: (line.at, -line.lost), reverse=True):
            peers = frozenset(m.peer for m in mates if m.line == line)
            if line.at > gossip.line.at and self._watch.away_at(line.at, size, total):
                verdict = judge_return(gossip.line, line, total, size * manifest.recovery.snapshot_rounds_max)
                if verdict.take:
                    return peers, verdict.reason
                self._keep(verdict.line, verdict.reason)
                return None
            known = frozenset(p for p in peers if p in self._before or gossip.acceptance.packets_taken(p))
            if known and yields(gossip.line, line):
                more = gossip.line.lost - line.lost
                return known, f"a replica is back whose state has {more} samples more than this one"
        return None

    def _keep(self, line: StateLine, reason: str) -> None:
        """Go on with our own state, and let the others know what it lacks."""
        self._gossip.line = line
        self._context.telemetry.event("state.kept", round=self._gossip.done, lost=line.lost, reason=reason)
        self._context.presence.own.announce_change()
