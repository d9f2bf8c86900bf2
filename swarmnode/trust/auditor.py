"""Audit answers: gather evidence about some of them, and do what the verdict table says (verdict.py).

An answer is made again by a second replica of its stage. Where the two differ, or where the answers of a replica point
elsewhere on average (mean_answers.py), its own weights are fetched and make the hop here. After a right hop the next
one is checked too at times, because a server may collude with the next server. Whose answers are examined gets the next
microbatch once its weights are here: no lie looks honest to the very weights that gave it.

Audits run beside training, when the answer has already been used. Gradient clipping (model/inner_optimizer.py) bounds
the damage that a few lies do until their sender is excluded.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Awaitable, Callable, Collection, Coroutine, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from swarmnode.base.errors import LocalFault, RemoteFault, Unavailable, cause_of
from swarmnode.base.identity import Identity
from swarmnode.base.ids import PeerId, machine_of, seeded, short
from swarmnode.base.ports import Compute, Priority, Replica, Telemetry, Transport, WireTensor
from swarmnode.net.membership.swarm import Swarm
from swarmnode.run.manifest import Manifest
from swarmnode.run.manifest.gossip_compat import averages_gradients
from swarmnode.trust.audit import Audits
from swarmnode.trust.exact_check import ExactCheck, Exactness, Voter, of_same_weights
from swarmnode.trust.examination import Examinations
from swarmnode.trust.findings import Findings
from swarmnode.trust.statement import HopAnswer, HopClaim, HopEvidence, Statements
from swarmnode.trust.verdict import Evidence, Judgement, by_own_weights
from swarmnode.trust.witness import Witnesses

AT_ONCE_MAX = 2  # guess: concurrent checks; further answers are not checked meanwhile
DEEPER_SHARE = 0.5  # guess: share of right hops after which the next hop is checked too

Exclude = Callable[[PeerId, str], None]
Check = Callable[[HopClaim], Coroutine[Any, Any, None]]


@dataclass(frozen=True, slots=True)
class OwnWeights:
    """Weights that a replica gave: `again` makes a hop of it with them. Raises Unavailable, RemoteFault."""

    again: Callable[[HopClaim, HopEvidence | None], Awaitable[HopAnswer]]


Weights = Callable[[PeerId, int], contextlib.AbstractAsyncContextManager[OwnWeights]]
"""The weights of a given replica of a stage. Raises Unavailable, RemoteFault."""


class Auditor:
    """A replica's audits of other replicas' answers."""

    def __init__(
        self,
        manifest: Manifest,
        run_id: str,
        stage: int,
        identity: Identity,
        transport: Transport,
        replica: Replica,
        compute: Compute,
        swarm: Callable[[], Swarm],
        tasks: asyncio.TaskGroup,
        telemetry: Telemetry,
        exclude: Exclude,
        weights: Weights,
        rng: random.Random,
    ) -> None:
        """`weights` gives those of a replica, to make hops again here. `exclude` is called with one that was found to
        lie. `rng` must be secret: a liar that knew which answers are checked would lie only in the others."""
        self.manifest = manifest
        self.run_id = run_id
        self.me = identity.peer_id
        self.audits = Audits(manifest.pipeline.audit_share)
        ports = (transport, replica, compute, swarm)
        self.witnesses = Witnesses(manifest, run_id, self.me, *ports, self.audits.spent, rng)
        self.weights = weights
        self.exact = averages_gradients(manifest)  # replicas of a stage hold equal weights (exact_check.py)
        self._stage = stage
        self.statements = Statements(run_id, identity)
        self._replica = replica
        self._compute = compute
        self._swarm = swarm
        self._tasks = tasks
        self.findings = Findings(self.audits, swarm, telemetry, exclude)
        self._examinations = Examinations()
        self._rng = rng
        self._under_way = 0
        # Of sketches: a liar that knew them could point where they do not look.
        self._signs = seeded("sketch", identity.seed.hex()).getrandbits(32)

    def sketch(self, gradient: WireTensor, tokens: WireTensor, samples: int) -> Sequence[float]:
        """The sketch of an answer over its length; empty where checks are exact. Raises RemoteFault."""
        if self.exact:
            return ()
        length = self._replica.norm(gradient, samples)
        sketch = self._replica.sketch(gradient, tokens, samples, self._signs)
        return [one / length if length > 0.0 else 0.0 for one in sketch]

    async def sketched(self, claim: HopClaim) -> HopClaim:
        """`claim` with its sketch, made on the compute thread. Raises RemoteFault."""
        work = partial(self.sketch, claim.gradient, claim.tokens, claim.samples)
        return replace(claim, sketch=await self._compute.run(Priority.BACKWARD, 0, work))

    # ---- which answers are looked at

    def observe_answer(self, claim: HopClaim, check: Check | None = None) -> None:
        """Consider an answer for an audit by `check` (None: by `self.check`). This machine's other stages are trusted
        as it trusts itself: whoever is given the answer of all of them audits those."""
        if machine_of(claim.server) == machine_of(self.me):
            return
        server = claim.server
        stage = claim.statement.stage
        now_s = asyncio.get_running_loop().time()
        claim = replace(claim, came_s=now_s)
        self.witnesses.at_work[server] = None
        due = self._examinations.take(claim)
        means = self.audits.means(stage)
        examined = due or (means.aside(server) and self._examinations.lately(server, now_s))
        means.observe(server, claim.sketch, now_s, examined=examined)
        if examined and means.two_faced(server):
            self._conclude(claim, Evidence.TWO_FACED, "its answers point elsewhere while nobody examines it")
        if due:
            return
        spoken = means.speaks(server) and stage == 0  # nobody chooses which microbatch a feeder sends
        chosen = self.audits.chosen(server, self._rng.random(), len(self._swarm().serving(self._stage)))
        if (chosen or (spoken and self.audits.weighable(server, now_s))) and self._under_way < AT_ONCE_MAX:
            self._under_way += 1
            if not self.spawn(self._checking(partial(check or self.check, claim))):
                self._under_way -= 1

    def withholds(self, peer: PeerId, stage: int) -> bool:
        """Whether not to use an answer of `peer`, of `stage`: another replica can answer whose answers are usable."""
        if not self.audits.unusable(peer, stage):
            return False
        others = (member.peer for member in self._swarm().serving(stage))
        at_work = self.witnesses.at_work
        return any(one in at_work and not self.audits.unusable(one, stage) for one in others if one != peer)

    def passed_over(self, stage: int, train: bool) -> Collection[PeerId]:
        """Replicas of `stage` that do not get the next microbatch: those whose answers are not used, as long as another
        one can answer. Each that is examined gets one at times; then it is the others that do not get it."""
        peers = [member.peer for member in self._swarm().serving(stage)]
        now_s = asyncio.get_running_loop().time()
        if train and (one := self._examinations.turn(stage, peers, now_s)) is not None:
            return [peer for peer in peers if peer != one]
        for peer in peers:
            known = self.audits.examined(peer, stage) and peer in self.witnesses.at_work
            if known and peer not in self._examinations and self.audits.weighable(peer, now_s):
                self._examinations.begin(peer)
                self.spawn(self._examining(peer, stage))
        return [peer for peer in peers if self.withholds(peer, stage)]

    def spawn(self, work: Coroutine[Any, Any, None]) -> bool:
        """Run `work` beside training. Returns False if this node is shutting down."""
        try:
            self._tasks.create_task(work)
        except RuntimeError:
            work.close()
            return False
        return True

    async def _checking(self, check: Callable[[], Coroutine[Any, Any, object]]) -> None:
        try:
            await check()
        finally:
            self._under_way -= 1

    # ---- evidence

    async def check(self, claim: HopClaim, made: Sequence[Voter] = ()) -> None:
        """Check an answer, and at times the next one; `made`: what others answered to it already."""
        current: HopClaim | None = claim
        try:
            while current is not None:
                current = await self._check_hop(current, made)
                made = ()
        except (Unavailable, RemoteFault, LocalFault) as error:
            self.findings.tell(claim.server, claim.statement.stage, "undone", str(error))

    async def _check_hop(self, claim: HopClaim, made: Sequence[Voter]) -> HopClaim | None:
        """Check one hop; return the next one if it should be checked too. Raises Unavailable or RemoteFault if the
        check cannot be made."""
        stage = claim.statement.stage
        server = claim.server
        shown = await self._shown(claim)
        if shown is None and self._inner(stage):
            return None
        mine = server, claim.answer(None if shown is None else shown.sent)
        exact = ExactCheck(mine[1], partial(self.witnesses.like, claim))
        against = list[Voter]()
        failures = list[str]()
        given = dict(made)
        others = list(self.witnesses.others(stage, server, PeerId(claim.statement.client)))
        others = [peer for peer in dict.fromkeys([*given, *others]) if not self.audits.unusable(peer, stage)]
        for peer in others:
            try:
                voter = peer, given.get(peer) or await self.witnesses.recomputed(peer, claim, shown)
            except (Unavailable, RemoteFault) as error:
                failures.append(f"{short(peer)}: {error}")
                continue
            if self.exact and of_same_weights(claim.statement, voter[1]):
                found = await exact.hear(voter)
                if found is not Exactness.OPEN:
                    return self._decided(claim, shown, exact, found)
                against.append(voter)
            elif not exact.begun:  # beside a witness one with other weights says nothing
                likeness = await self.witnesses.like(claim, mine[1], voter[1])
                if likeness.close and not self.audits.means(stage).speaks(server):
                    self._conclude(claim, Evidence.AGAIN_SAME, str(likeness))
                    return self._deeper(claim, shown)
                against.append(voter)
                break
        # One that is alone is examined until it was right once: a copy of its weights costs more than a hop.
        if not against and (failures or others or self.audits.in_row(server)):
            self.findings.tell(server, stage, "undone", "; ".join(failures) or "no other replica")
            return None
        await self._by_own_weights(claim, shown, [mine, *against])
        return None

    def _decided(
        self, claim: HopClaim, shown: HopEvidence | None, check: ExactCheck, found: Exactness
    ) -> HopClaim | None:
        """Record what replicas with the very weights that answered found; as `_check_hop`."""
        if found is Exactness.WRONG:
            self._conclude(claim, Evidence.TWO_AGAINST, str(check), shown=shown, comparable=True)
            return None
        for liar, likeness in check.liars:
            reason = f"{short(liar[0])}: {likeness} to the same weights"
            self._conclude(claim, Evidence.TWO_AGAINST, reason, shown=shown, voter=liar, comparable=True)
        self._conclude(claim, Evidence.AGAIN_SAME, str(check))
        return self._deeper(claim, shown)

    async def examine(self, claim: HopClaim) -> None:
        """Judge an answer of the first stage by the weights of its server."""
        await self._by_own_weights(claim, None, [(claim.server, claim.answer(None))])

    async def _by_own_weights(self, claim: HopClaim, shown: HopEvidence | None, voters: Sequence[Voter]) -> None:
        """Judge each of the `voters`, who answered the hop of `claim`, by its own weights."""
        loss_sum = max(one.loss_sum for _, one in voters) if shown is None else shown.next.loss_sum
        if self.witnesses.is_noise(claim, loss_sum):
            what = f"a loss of {loss_sum:.3g} nats: gradients are noise"
            self.findings.tell(claim.server, claim.statement.stage, "undecided", what)
            return
        for voter in voters:
            peer, answered = voter
            stated = claim if answered.statement is None else replace(claim, statement=answered.statement)
            now_s = asyncio.get_running_loop().time()
            if not self.audits.weighable(peer, now_s):
                self.findings.tell(peer, claim.statement.stage, "undecided", "its weights were fetched a moment ago")
                continue
            try:
                async with self.weights(peer, claim.statement.stage) as own:
                    await self._weigh(own, stated, shown, voter)
            except (Unavailable, RemoteFault) as error:
                self._conclude(claim, Evidence.NO_WEIGHTS, str(error), voter=voter)
            finally:
                then_s = asyncio.get_running_loop().time()
                self.audits.weighed(peer, claim.statement.stage, then_s - now_s, then_s)

    async def _weigh(self, own: OwnWeights, claim: HopClaim, shown: HopEvidence | None, voter: Voter) -> None:
        """Judge what `voter` answered to the hop of `claim` by its `own` weights. Raises Unavailable, RemoteFault."""
        made = await own.again(claim, shown)
        likeness = await self.witnesses.like(claim, voter[1], made)
        found, comparable = by_own_weights(likeness, made.apart, marked=made.marked)
        reason = f"{likeness} to its own weights, {made.apart} steps apart"
        self._conclude(claim, found, reason, shown=shown, voter=voter, comparable=comparable)

    async def _examining(self, peer: PeerId, stage: int) -> None:
        """Fetch the weights of a replica, and ask for an answer then, which they should give again."""
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        try:
            if self.exact and len(self._swarm().serving(stage)) > 2:  # two others hold the same weights
                await self.check(await self._examinations.next_of(peer, stage))
                return
            async with self.weights(peer, stage) as own:
                claim = await self._examinations.next_of(peer, stage)
                shown = await self._shown(claim)
                if shown is None and self._inner(stage):
                    return
                loss_sum = claim.statement.loss_sum if shown is None else shown.next.loss_sum
                if not self.witnesses.is_noise(claim, loss_sum):
                    voter = peer, claim.answer(None if shown is None else shown.sent)
                    await self._weigh(own, claim, shown, voter)
        except (TimeoutError, Unavailable, RemoteFault, LocalFault) as error:
            self.findings.tell(peer, stage, "undone", cause_of(error))
        finally:
            self._examinations.end(peer)
            self.audits.weighed(peer, stage, loop.time() - began_s, loop.time())

    def _inner(self, stage: int) -> bool:
        """Whether a replica of `stage` sends activations on and gets gradients back."""
        return 0 < stage < self.manifest.pipeline.stages - 1

    async def _shown(self, claim: HopClaim) -> HopEvidence | None:
        """The evidence of an answer of an inner stage; None if its server does not show it."""
        if not self._inner(claim.statement.stage):
            return None
        try:
            return await self.witnesses.opened(claim)
        except (Unavailable, RemoteFault) as error:
            self.findings.unshown(claim.server, claim.statement.stage, str(error))
            return None

    # ---- verdicts

    def _conclude(
        self,
        claim: HopClaim,
        evidence: Evidence,
        reason: str,
        *,
        shown: HopEvidence | None = None,
        voter: Voter | None = None,
        comparable: bool = False,
    ) -> None:
        """Do what the table says of `evidence` about the server of `claim`, or about another `voter` on its hop."""
        stated = claim.statement
        peer = claim.server if voter is None else voter[0]
        named = bytes(stated.microbatch_id)
        found = self.findings.conclude(peer, stated.stage, evidence, named, reason, comparable=comparable)
        if found is Judgement.FALSE and stated.stage:  # a feeder signs nothing
            answered = claim.answer(None if shown is None else shown.sent) if voter is None else voter[1]
            self.spawn(self._accuse(claim, shown, answered))

    def _deeper(self, claim: HopClaim, shown: HopEvidence | None) -> HopClaim | None:
        """After a right hop the next one, if it should be checked too."""
        if shown is None or self.audits.doubted(claim.server) or self._rng.random() >= DEEPER_SHARE:
            return None
        return HopClaim(shown.next, claim.samples, shown.sent, claim.tokens, shown.got, claim.came_s)

    async def _accuse(self, claim: HopClaim, shown: HopEvidence | None, answered: HopAnswer) -> None:
        """Show a false answer for the hop of `claim` to others."""
        await self.witnesses.accuse(self._stage, claim, shown, answered)
