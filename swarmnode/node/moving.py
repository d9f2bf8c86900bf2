"""A node changes its stage: it finds out alone that it should, and fetches the new state while it serves the old stage
(design section 3, rebalancing). The decisions are pipeline/rebalance.py's."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial

from swarmnode.errors import Unavailable
from swarmnode.gossip.exchange import Gossip
from swarmnode.ids import PeerId, RunId
from swarmnode.manifest import Manifest
from swarmnode.membership.swarm import Swarm
from swarmnode.metrics import name
from swarmnode.model.section import Sizes, snapshot_nbytes
from swarmnode.model.split import split
from swarmnode.node.lifecycle import donors_of
from swarmnode.node.presence import Presence
from swarmnode.pipeline.credible import bounded, evened, witnessed
from swarmnode.pipeline.rebalance import (
    DOWNLOAD_RATE,
    SMALL,
    Move,
    Rules,
    all_told,
    load,
    on_the_way,
    plan_move,
    shifted,
    still_good,
    uneven,
    worth_it,
)
from swarmnode.ports import State, Telemetry, Transport
from swarmnode.recovery.asking import DownloadLimits
from swarmnode.recovery.download import Compare, download
from swarmnode.recovery.second import Apart, SecondWord, apart
from swarmnode.wire import call_pb2 as wire
from swarmnode.wire import record_pb2

WAIT_SHARE = 0.1  # guess: of the period, the longest random wait against simultaneous movers
ROUND_WAIT_MAX_S = 60.0  # guess, as lifecycle.SYNC_WAIT_MAX_S
EMPTY_SHARE = 0.25  # guess: of the announce period, between two looks for an empty stage, which stops all training
EMPTY_LOOKS = 2  # guess: looks in a row that a stage has nobody; the roll call has buried its dead before
FIRST_LOOKS = 40  # guess: the same before the run has trained anything
CALM_LOOKS = 6  # guess: looks in a row in which nobody came, before the run has trained anything: they came together
UNREST = 3  # guess: waits of an announce period after nodes came or went: who came has not told its speed yet
PARTNER_WAIT = 2.0  # guess: announce periods until somebody has said that it comes in exchange
SEEN_PERIODS = 2.0  # guess: announce periods, at least, over which a node looks at what its stage asks of it
SEEN_MICROBATCHES = 4  # guess: for each replica of a stage; of fewer nothing is concluded
MATES_MAX = 8  # guess: replicas of the own stage that are asked whether they stay; one will do
THIN_LOOKS = 20  # guess: looks in a row that a stage has too few and another can spare one; joiners come first


@dataclass(slots=True)
class Brought:
    """What a node takes along to its new stage; no `state` when nobody there has one, or once it is loaded. `speed`:
    samples/s it expects to do there, by what it did and the stages' costs."""

    stage: int
    reason: str
    speed: float
    state: State | None
    offer: wire.Snapshot


def costs(manifest: Manifest) -> tuple[float, ...]:
    """The stages' costs per sample, relative."""
    return tuple(part.cost for part in split(manifest.model, manifest.pipeline.stages))


class Moving:
    """Watches the balance of the stages for one node. `run` returns once it is time to go."""

    def __init__(
        self,
        manifest: Manifest,
        run_id: RunId,
        presence: Presence,
        line: Transport,
        answering: Callable[[Sequence[PeerId]], Awaitable[frozenset[PeerId]]],
        sizes: Callable[[int], Sizes],
        gossip: Gossip,
        telemetry: Telemetry,
        rng: random.Random,
        samples_here: Callable[[], int],
        apart: Apart = apart,
    ) -> None:
        """`answering`: those of some peers that answer a ping; `sizes` of a stage, as its replicas count them;
        `gossip` runs the rounds at the present one; `samples_here` were trained there so far; `apart` as ports.Replica
        has it."""
        self._manifest = manifest
        self._run_id = run_id
        self._presence = presence
        self._line = line
        self._answering = answering
        self._sizes = sizes
        self._apart = apart
        self._gossip = gossip
        self._telemetry = telemetry
        self._rng = rng
        self._samples_here = samples_here
        self._costs = costs(manifest)
        pipeline = manifest.pipeline
        self._rules = Rules(pipeline.rebalance_ratio, pipeline.min_keep)
        self._rate = DOWNLOAD_RATE
        self._unrest = UNREST  # this node has just come itself
        self._since_s, self._since_total = asyncio.get_running_loop().time(), presence.progress.total
        self._seen = self._since_s, self._since_total, 0  # at the last wait's begin: loop time, samples, of them here

    @property
    def _period_s(self) -> float:
        return self._manifest.pipeline.rebalance_period_s

    async def run(self) -> Brought:
        """Wait until this node should serve another stage and has that one's state, and a round here is just over."""
        if self._period_s <= 0.0 or self._manifest.pipeline.stages < 2:
            await asyncio.Event().wait()
        while True:
            await self._wait()
            move, _ = self._plan()
            if move is None:
                continue
            share = 1.0 if self._presence.book.swarm().coming(move.target) else EMPTY_SHARE
            longest_s = min(WAIT_SHARE * self._period_s, share * self._manifest.limits.announce_period_s)
            await asyncio.sleep(longest_s * self._rng.random())
            await self._look()
            move, reason = self._plan()
            if move is None:
                continue
            brought = await self._prepare(move, reason)
            if brought is not None:
                return brought

    async def _wait(self) -> None:
        """About a period; not so long when a stage stands empty, or has too few and another can spare one, or when
        nodes came or went, this one too: who died should not be missed for a period, and who began together chose their
        stages before anybody had told its speed. Those need not wait for the first sample: it takes minutes."""
        loop, book, empty, thin, calm = asyncio.get_running_loop(), self._presence.book, 0, 0, 0
        if self._saw_enough():
            self._seen = loop.time(), self._presence.progress.total, self._samples_here()
        before, going, shape = book.serving(), self._going(), -1
        # Before the first sample an empty stage's nodes may be starting, too, and nothing stands still yet.
        begun = self._presence.progress.total > 0
        soon = begun and self._unrest > 0
        period_s = min(self._period_s, self._manifest.limits.announce_period_s) if soon else self._period_s
        self._unrest = max(0, self._unrest - soon)
        end = loop.time() + period_s * (0.9 + 0.2 * self._rng.random())
        patience = EMPTY_LOOKS if begun else FIRST_LOOKS
        while (left_s := end - loop.time()) > 0 and empty < patience and thin < THIN_LOOKS:
            await asyncio.sleep(min(left_s, EMPTY_SHARE * self._manifest.limits.announce_period_s))
            if begun and book.shape == shape and not empty and not thin:
                continue  # nobody came, went or changed since the last look
            shape = book.shape
            if not begun:
                now, told = (book.serving(), self._going()), all_told(book.swarm())
                calm = calm + 1 if told and now == (before, going) else 0
                before, going = now
                if self._presence.progress.total > 0 or calm >= CALM_LOOKS:
                    return
            if begun and (shifted(before, book.serving(), self._rules) or self._going() != going):
                self._unrest = UNREST
                return
            counts = [members for members, _ in book.counts()]
            empty = 0 if all(counts) else empty + 1
            thin = thin + 1 if uneven(counts, self._rules) else 0

    def _going(self) -> tuple[tuple[PeerId, int, bool], ...]:
        """Who is on its way; in a large swarm that does not matter."""
        book = self._presence.book
        return on_the_way(book.swarm()) if book.size <= SMALL else ()

    def _plan(self) -> tuple[Move | None, str]:
        """This node's own move, if it is the one to move now."""
        presence = self._presence
        if presence.self.state != record_pb2.NODE_STATE_TRAINING:
            return None, "not training"
        move, reason = plan_move(self._swarm(), self._costs, self._rules, presence.me)
        if move is None or move.peer != presence.me:
            return None, reason
        good, why = self._agrees(move)
        if not good:
            self._telemetry.event("stage.stays", source=move.source, target=move.target, reason=why)
        return (move, reason) if good else (None, why)

    def _swarm(self) -> Swarm:
        """As it is known here, with speeds that can be believed."""
        return bounded(self._presence.book.swarm(), self._costs)

    def _saw_enough(self) -> bool:
        """Whether some microbatches for each replica of a stage went through since this was first looked at."""
        since_s, total, _ = self._seen
        seconds = asyncio.get_running_loop().time() - since_s
        replicas = max(1, max(self._presence.book.serving(), default=1))
        enough = SEEN_MICROBATCHES * replicas * self._manifest.inner.microbatch
        periods = seconds / self._manifest.limits.announce_period_s
        return periods >= SEEN_PERIODS and self._presence.progress.total - total >= enough

    def _agrees(self, move: Move) -> tuple[bool, str]:
        """Whether what this node's stage asks of it agrees with the speeds that make it seem stronger than another. Not
        asked where the other is empty or has too few replicas, when speeds do not matter, nor before the first sample.
        """
        presence, (since_s, total, here) = self._presence, self._seen
        if move.safety or not move.before or not presence.progress.total:
            return True, "speeds do not matter"
        if not self._saw_enough():
            good, why = still_good(evened(self._swarm(), move.source), self._costs, move, self._rules)
            return good, f"too little was trained since to compare; were its fastest as fast as the next, {why}"
        seconds, own = asyncio.get_running_loop().time() - since_s, max(presence.self.speed(), 1e-9)
        claimed = load(self._swarm(), self._costs).capacity[move.source]
        used = (self._samples_here() - here) / seconds / own
        return witnessed(used, (presence.progress.total - total) / seconds, claimed)

    async def _look(self) -> None:
        await self._presence.look(range(self._manifest.pipeline.stages))

    async def _prepare(self, move: Move, reason: str) -> Brought | None:
        """Fetch the state of the new stage, then look again; None when this node stays."""
        sizes = self._sizes(move.target)
        good, why = worth_it(move, snapshot_nbytes(sizes) / self._rate)
        if not good:
            self._stay(move, why)
            return None
        self._telemetry.event("stage.moving", source=move.source, target=move.target, reason=reason)
        self._say(move.target)
        if not self._presence.book.swarm().stages[move.target]:  # nothing to fetch: the new stay brings the stage back
            good, why = await self._replaced(move.source)
            if not good:
                self._stay(move, why)
                return None
            return Brought(move.target, reason, move.speed, None, wire.Snapshot())
        loop = asyncio.get_running_loop()
        begun = loop.time()
        try:
            state, offer = await download(
                self._line,
                lambda: self._donors(move.target),
                move.target,
                self._run_id,
                sizes,
                DownloadLimits(),
                self._telemetry,
                rounds_max=lambda: self._presence.beliefs.rounds_max,
                compare=self._compare_with(move.target, sizes),
            )
        except Unavailable as error:
            self._stay(move, str(error))
            return None
        seconds = loop.time() - begun
        self._rate = offer.nbytes / max(1e-3, seconds)
        await self._after_a_round()
        await self._look()
        end = loop.time() + PARTNER_WAIT * self._manifest.limits.announce_period_s * bool(move.against)
        while not (found := still_good(self._swarm(), self._costs, move, self._rules))[0]:
            if loop.time() >= end:
                break
            await asyncio.sleep(EMPTY_SHARE * self._manifest.limits.announce_period_s)
            await self._look()
        good, why = found
        if not good:
            self._stay(move, why)
            return None
        self._telemetry.count(name.RECOVERIES, method="replica")
        return Brought(move.target, f"{reason}; {why}", move.speed, state, offer)

    def _compare_with(self, stage: int, sizes: Sizes) -> Compare | None:
        """What asks other replicas of `stage` about a state of it; replicas that never meet differ as they please."""
        if self._manifest.gossip.method == "none":
            return None
        donors, beliefs = partial(self._donors, stage), self._presence.beliefs
        here = self._line, self._run_id, stage, sizes, donors, lambda: beliefs.rounds_max
        second = SecondWord(*here, self._apart, self._telemetry)

        async def compare(state: State, offer: wire.Snapshot, givers: Collection[PeerId]) -> None:
            await second.compare(state, offer, givers)

        return compare

    async def _replaced(self, stage: int) -> tuple[bool, str]:
        """Whether another replica of `stage`, ours, is sure to stay: it answers, and has not announced that it goes.

        We announce that we go before we look. So of two who go at the same time at least one hears of the other, and
        who hears stays: both may, and look again after a random wait. Without this both replicas of a stage were seen
        to leave for an empty one, and what it had learned was gone.
        """
        me = self._presence.me
        await self._presence.announce()
        await self._presence.look([stage])
        mates = [member.peer for member in self._presence.book.swarm().settled(stage) if member.peer != me]
        found = await self._answering(mates[:MATES_MAX])
        return bool(found), f"of the others of stage {stage} {len(mates)} mean to stay, and {len(found)} of them answer"

    async def _after_a_round(self) -> None:
        """Until a round is over, while one is expected within ROUND_WAIT_MAX_S: what was learnt since the last would be
        lost to the others; but where rounds take an hour the weak stage cannot wait, nor where they do from now on, as
        most of its replicas have gone (simulated: flash-crowd; it was the minute that the stage had to wait)."""
        loop, gossip, done = asyncio.get_running_loop(), self._gossip, self._gossip.done
        begun_s, begun_total = loop.time(), self._presence.progress.total
        end = begun_s + min(self._period_s, ROUND_WAIT_MAX_S)
        due_s = self._next_round_s(self._since_s, self._since_total)
        while gossip.done == done and due_s <= ROUND_WAIT_MAX_S and (left_s := end - loop.time()) > 0.0:
            gossip.finished.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(min(left_s, self._manifest.limits.announce_period_s)):
                    await gossip.finished.wait()
            due_s = self._next_round_s(begun_s, begun_total)

    def _next_round_s(self, since_s: float, since_total: int) -> float:
        """Seconds until the run's next round at the rate of samples since loop time `since_s`, when there were
        `since_total`."""
        total, size = self._presence.progress.total, self._manifest.gossip.round_samples
        seconds = asyncio.get_running_loop().time() - since_s
        rate = (total - since_total) / seconds if seconds > 0.0 else 0.0
        return (size - total % size) / rate if rate > 0.0 else float("inf")

    def _donors(self, stage: int) -> Sequence[PeerId]:
        return donors_of(self._presence.book.swarm(), stage, self._presence.me)

    def _say(self, moving_to: int | None) -> None:
        self._presence.self.moving_to = moving_to
        self._presence.changed()

    def _stay(self, move: Move, why: str) -> None:
        self._say(None)
        self._telemetry.event("stage.stays", source=move.source, target=move.target, reason=why)
