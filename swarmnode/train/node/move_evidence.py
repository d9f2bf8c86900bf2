"""A node's view of the run's training, and the checks of a planned move by it.

Members announce their speeds themselves, so a plan that compares stages is checked against what went through.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from swarmnode.base.ids import stage_name
from swarmnode.keep.recovery.state_fetcher import FIRST_ROUNDS
from swarmnode.net.membership.swarm import Swarm
from swarmnode.run.manifest import Manifest
from swarmnode.run.manifest.gossip_compat import meets
from swarmnode.train.node.presence import Presence
from swarmnode.train.pipeline.believed_rate import evened, witnessed
from swarmnode.train.pipeline.rebalance import RebalanceRules, StageMove, load, still_good

SEEN_MICROBATCHES = 4  # guess: for each replica of a stage; of fewer nothing is concluded
HEARD_PERIODS = 2.0  # derived: a record is announced in one announce period and read in the next
# Guess: of what the weaker stage could do, below which lines or samples in flight limit the run, as a stage that limits
# it is at work .6 to .8 of the time [simulated, plan.py]. 64 of home-8b's machines in 9 stages do .47 of it, and .3
# while two of them fetch the state of other stages for ten minutes [simulated].
LIMITING_SHARE = 0.6


class MoveEvidence:
    """The samples of the run that this node saw since a wait began, and the checks of a move by them."""

    def __init__(
        self,
        manifest: Manifest,
        presence: Presence,
        costs: Sequence[float],
        rules: RebalanceRules,
        samples_here: Callable[[], int],
        speed: Callable[[], float],
    ) -> None:
        """`costs` of the stages; `samples_here` counts the samples trained here; `speed` is this machine's, in
        samples/s."""
        self._manifest = manifest
        self._presence = presence
        self._rules = rules
        self._samples_here = samples_here
        self._speed = speed
        self._costs = costs
        self._seen = asyncio.get_running_loop().time(), presence.progress.total, 0
        """At the begin: loop time, samples of the run, of them here."""

    def renew(self) -> None:
        """Begin anew, if enough was seen."""
        if self.enough:
            self._seen = asyncio.get_running_loop().time(), self._presence.progress.total, self._samples_here()

    def supports(self, move: StageMove, swarm: Swarm) -> tuple[bool, str]:
        """(whether nothing that was seen speaks against `move`, planned for `swarm`; the reason)."""
        good, why = self.counts_workers(move)
        if good:
            good, why = self.leaves_workers(move)
        return self.agrees(move, swarm) if good else (good, why)

    def counts_workers(self, move: StageMove) -> tuple[bool, str]:
        """(whether the stages can be compared, the reason): not while most strangers do nothing, unless nobody is at
        the other stage."""
        good = not move.before or not self._presence.doubtful
        return good, "" if good else "most replicas that are new here do not work, so stages cannot be compared"

    def leaves_workers(self, move: StageMove) -> tuple[bool, str]:
        """(whether one of the replicas that stay was seen at work in rounds, the reason): keys beside the last replica
        that works are no replacement.

        Not asked in the first rounds, where replicas never meet, and where a stage stands empty: then no round comes.
        """
        presence = self._presence
        gossip = self._manifest.gossip
        if not meets(gossip) or presence.progress.total < FIRST_ROUNDS * gossip.round_samples or not move.before:
            return True, "nobody can have met"
        here = presence.peer_table.swarm().settled(move.source)
        at_work = presence.run_progress.clock.history.at_work
        workers = sum(member.peer in at_work for member in here)
        return workers > 0, f"{workers} other replicas of {stage_name(move.source)} were seen at work"

    @property
    def enough(self) -> bool:
        """True if enough microbatches for each replica of a stage went through since the last wait began."""
        since_s, total, _ = self._seen
        seconds = asyncio.get_running_loop().time() - since_s
        replicas = max(1, max(self._presence.peer_table.serving(), default=1))
        enough = SEEN_MICROBATCHES * replicas * self._manifest.inner.microbatch
        return (
            seconds >= HEARD_PERIODS * self._manifest.limits.announce_period_s
            and self._presence.progress.total - total >= enough
        )

    def agrees(self, move: StageMove, swarm: Swarm) -> tuple[bool, str]:
        """(whether the load at this node's stage agrees with the speeds that make it seem stronger than another, the
        reason).

        They do not where the run does far less than the weaker stage could: a move's download would only hold it up.
        The check is skipped where the other stage is empty or has too few replicas, when speeds do not matter, and
        before the first sample. With too few samples to measure the load, the move must still be good with the stage's
        fastest replica counted only as fast as the second fastest.
        """
        presence = self._presence
        since_s, total, here = self._seen
        if move.safety or not move.before or not presence.progress.total:
            return True, "speeds do not matter"
        seconds = asyncio.get_running_loop().time() - since_s
        own = max(self._speed(), 1e-9)
        rate = (presence.progress.total - total) / max(seconds, 1e-9)
        if seconds >= HEARD_PERIODS * self._manifest.limits.announce_period_s and rate < LIMITING_SHARE * move.before:
            return False, f"the run does {rate:.3g} samples/s, and {stage_name(move.target)} could do {move.before:.3g}"
        if not self.enough:
            good, why = still_good(evened(swarm, move.source), self._costs, move, self._rules)
            return good, f"too little was trained since to compare; were its fastest as fast as the next, {why}"
        claimed = load(swarm, self._costs).capacity[move.source]
        used = (self._samples_here() - here) / seconds / own
        return witnessed(used, rate, claimed)
