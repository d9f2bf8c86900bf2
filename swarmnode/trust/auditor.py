"""Audit answers: a second replica of the stage recomputes some of them, and the results are compared.

The caller of a hop knows its request (x, tokens) and the answer (the gradient of x). To check hop s, it

1. asks the server for the activations it sent on and the gradient it got back (`opening`). The server's signed
   statement names both, so it cannot make them up now; the next server's statement confirms that it received and gave
   them;
2. has another replica of stage s run forward and backward of this hop alone (`recompute`), without accumulating;
3. compares activations, gradient and, at the last stage, loss. If the two differ, further replicas recompute the hop.
   An answer that is far from the others, or whose server's answers fall short of what is usual in its stage
   (audit.Shortfall), is compared with what the weights that its server gives make of the hop. What they do not explain
   is false.

This tells a false answer from a true answer to a later stage's false gradient. After a right hop the next one is
checked too at times, because a server may collude with the next server.

Audits run beside training, when the answer has already been used. Gradient clipping (model/gradient_clip.py) bounds the
damage that a few lies do until their sender is excluded.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import random
import statistics
from collections.abc import Awaitable, Callable, Collection, Coroutine, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from swarmnode.data.sample import counted_targets
from swarmnode.errors import LocalFault, RemoteFault, Unavailable, cause_of
from swarmnode.identity import Identity
from swarmnode.ids import PeerId, machine_of, seeded, short
from swarmnode.manifest import Manifest
from swarmnode.manifest.gossip_compat import averages_gradients
from swarmnode.membership.swarm import Swarm
from swarmnode.metrics import name
from swarmnode.microbatch_shape import check_activations
from swarmnode.ports import Answer, Call, Compute, Priority, Replica, Telemetry, Transport, WireTensor
from swarmnode.remembered import Remembered
from swarmnode.trust import statement as statements
from swarmnode.trust.audit import (
    EXACT,
    LOSS_LEAST,
    OPPOSITE,
    AnswerSimilarity,
    Audits,
    Weighed,
    hides,
    is_false,
    middle,
)
from swarmnode.trust.exact_check import ExactCheck, Exactness, Voter, of_same_weights
from swarmnode.trust.recompute import recomputed_statement
from swarmnode.trust.statement import (
    HopAnswer,
    HopClaim,
    HopEvidence,
    StepsApart,
    StepsContradicted,
    TensorFingerprints,
)
from swarmnode.wire import call_pb2 as wire

AT_ONCE_MAX = 2  # guess: concurrent checks; further answers are not checked meanwhile
DEEPER_SHARE = 0.5  # guess: share of right hops after which the next hop is checked too
VOTES_MAX = 7  # guess: replicas whose answers are compared after a contradiction
SHOWN_MAX = 16  # guess: peers shown a false answer, of its callers and of its stage
TIMEOUT_S = 30.0  # guess: for one recomputation
REPLY_SLACK_BYTES = 4096

Exclude = Callable[[PeerId, str], None]
Check = Callable[[HopClaim], Coroutine[Any, Any, None]]


@dataclass(frozen=True, slots=True)
class OwnWeights:
    """Weights that a replica gave: `again` makes a hop of it with them. Raises Unavailable (StepsApart where they are
    too many steps from those that answered), StepsContradicted if they cannot be its, RemoteFault."""

    again: Callable[[HopClaim, HopEvidence | None], Awaitable[HopAnswer]]
    inner_steps: int
    mark: bytes  # ports.Replica.mark


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
        self._stage = stage
        self._identity = identity
        self.me = identity.peer_id
        self.transport = transport
        self._replica = replica
        self._compute = compute
        self._swarm = swarm
        self.tasks = tasks
        self._telemetry = telemetry
        self._exclude = exclude
        self.weights = weights
        self._asked = dict[PeerId, asyncio.Future[HopClaim] | None]()  # those examined, and the answer of each
        self._wanted = dict[int, PeerId]()  # by stage, who is to answer next
        self._rng = rng
        self.boundary_digest = replica.boundary_digest()
        self.exact = averages_gradients(manifest)  # replicas of a stage hold equal weights (exact_check.py)
        self._under_way = 0
        self._at_work = Remembered[PeerId, None]()  # whose answers came: they are asked first
        self.audits = Audits(manifest.pipeline.audit_share)
        # Of sketches: a liar that knew them could point where they do not look.
        self._signs = seeded("sketch", identity.seed.hex()).getrandbits(32)

    # ---- our own answers and those to us, on the compute thread

    def sign(self, process: wire.Process, client: PeerId, prints: TensorFingerprints, report: wire.Processed) -> None:
        """Add our signed statement of our answer to `client` to `report`, whose inner steps are set."""
        if process.mark_position != process.position:  # this caller did not ask
            prints = replace(prints, mark=b"")
        mine = statements.stated(self.run_id, process, self.me, client, prints, report)
        statements.sign(mine, self._identity)
        report.sent = mine.sent
        report.got = mine.got
        report.mark = mine.mark
        report.signature = mine.signature

    def checked(
        self, process: wire.Process, server: PeerId, report: wire.Processed, prints: TensorFingerprints
    ) -> wire.Statement:
        """The verified statement of `server` about its answer `report` to us. `process` is the request as it arrived
        there, `prints` our own fingerprints. Raises RemoteFault if it does not verify."""
        theirs = replace(prints, sent=report.sent, got=report.got, mark=report.mark)
        statement = statements.stated(self.run_id, process, server, self.me, theirs, report)
        statement.signature = report.signature
        statements.check(statement)
        last = process.position == len(process.itinerary) - 1
        if last != (not report.sent):
            raise RemoteFault(f"statement of {short(server)} that names {'activations' if last else 'no activations'}")
        return statement

    # ---- checks

    def observe_answer(self, claim: HopClaim, check: Check | None = None) -> None:
        """Consider an answer for an audit by `check` (None: by `self.check`). This machine's other stages are trusted
        as it trusts itself: whoever is given the answer of all of them audits those."""
        if machine_of(claim.server) == machine_of(self.me):
            return
        server = claim.server
        stage = claim.statement.stage
        now_s = asyncio.get_running_loop().time()
        means = self.audits.means(stage)
        claim = replace(claim, came_s=now_s)
        if not self.exact:
            means.observe(server, claim.sketch, now_s)
        self._at_work[server] = None
        if (asked := self._asked.get(server)) is not None and not asked.done():
            asked.set_result(claim)
            return
        # Once only its weights decide, the budget is for checks with these.
        if means.speaks(server) and not self.audits.weighable(server, now_s):
            return
        chosen = self.audits.chosen(server, self._rng.random(), len(self._swarm().serving(self._stage)))
        if chosen and self._under_way < AT_ONCE_MAX:
            self._under_way += 1
            if not self.spawn(self._checking(partial(check or self.check, claim))):
                self._under_way -= 1

    def withholds(self, peer: PeerId, stage: int) -> bool:
        """Whether not to use an answer of `peer`, of `stage`: another replica can answer whose answers are usable."""
        if not self.audits.unusable(peer, stage):
            return False
        others = (member.peer for member in self._swarm().serving(stage))
        return any(one in self._at_work and not self.audits.unusable(one, stage) for one in others if one != peer)

    def spawn(self, work: Coroutine[Any, Any, None]) -> bool:
        """Run `work` beside training. Returns False if this node is shutting down."""
        try:
            self.tasks.create_task(work)
        except RuntimeError:
            work.close()
            return False
        return True

    async def _checking(self, check: Callable[[], Coroutine[Any, Any, object]]) -> None:
        try:
            await check()
        finally:
            self._under_way -= 1

    async def check(self, claim: HopClaim, made: Sequence[Voter] = ()) -> None:
        """Check an answer, and at times the next one; `made`: what others answered to it already."""
        current: HopClaim | None = claim
        try:
            while current is not None:
                current = await self._check_hop(current, made)
                made = ()
        except (Unavailable, RemoteFault, LocalFault) as error:
            self._tell(claim, "undone", str(error))

    async def _check_hop(self, claim: HopClaim, made: Sequence[Voter]) -> HopClaim | None:
        """Check one hop; return the next one if it should be checked too. Raises Unavailable or RemoteFault if the
        check cannot be made."""
        outer = claim.statement.stage in (0, self.manifest.pipeline.stages - 1)
        given = dict(made)
        others = self.others(claim.statement.stage, claim.server, PeerId(claim.statement.client))
        others = list(dict.fromkeys([*given, *others]))
        if not self.audits.unusable(claim.server, claim.statement.stage):  # whose answers say nothing about others
            others = [peer for peer in others if not self.audits.unusable(peer, claim.statement.stage)]
        if not others:  # nobody to compare it with
            return None
        shown = None if outer else await self._opened(claim)
        if not outer and shown is None:
            return None
        voters = [(claim.server, claim.answer(None if shown is None else shown.sent))]
        failures = list[str]()
        close = False
        exact = ExactCheck(voters[0][1], partial(self.like, claim))
        for peer in others:
            try:
                voters.append((peer, given.get(peer) or await self.recomputed(peer, claim, shown)))
            except (Unavailable, RemoteFault) as error:
                failures.append(f"{short(peer)}: {error}")
                continue
            if self.exact and of_same_weights(claim.statement, voters[-1][1]):
                found = await exact.hear(voters[-1])
                if found is not Exactness.OPEN:
                    return self._decided(claim, shown, voters[0], exact, found)
            elif exact.begun:  # a witness with other weights says nothing
                continue
            elif len(voters) == 2:
                likeness, usual = await self._compared(claim, *voters)
                close = likeness.close
                if usual:
                    return self._right(claim, shown, str(likeness))
            elif close:  # a third one says which of the two is farther than usual
                break
        if len(voters) < 2:
            self._tell(claim, "undone", "; ".join(failures))
            return None
        return await self._judge(claim, shown, voters)

    def _decided(
        self, claim: HopClaim, shown: HopEvidence | None, server: Voter, check: ExactCheck, found: Exactness
    ) -> HopClaim | None:
        """Record what replicas with the very weights that answered found; as `_right`."""
        if found is Exactness.RIGHT:
            for liar, likeness in check.liars:
                self._false(claim, shown, liar, f"{short(liar[0])}: {likeness} to the same weights", math.inf)
            return self._right(claim, shown, str(check))
        self._false(claim, shown, server, f"{short(server[0])}: {check}", math.inf)
        self._tell(claim, "wrong", str(check))
        return None

    async def _compared(self, claim: HopClaim, one: Voter, other: Voter) -> tuple[AnswerSimilarity, bool]:
        """(the similarity of two answers, whether it is usual in their stage). A usual distance is learned from."""
        likeness = await self.like(claim, one[1], other[1])
        test = self.audits.shortfall(claim.statement.stage)
        if not likeness.close:
            return likeness, False
        steers = any(self.audits.means(claim.statement.stage).speaks(peer) for peer, _ in (one, other))
        usual = not steers and not test.short(likeness.distance)
        for peer, _ in (one, other) if usual else ():
            test.observe(peer, likeness.distance)
        return likeness, usual

    async def _judge(self, claim: HopClaim, shown: HopEvidence | None, voters: Sequence[Voter]) -> HopClaim | None:
        """Decide which of the `voters`, who answered the hop of `claim`, its server first, gave a false answer: one
        that is far from the others, or of a suspected replica, and that its server's own weights do not explain."""
        # As most say: one that stood still has a high loss of text that the others know by heart.
        loss_sum = statistics.median_high(one.loss_sum for _, one in voters) if shown is None else shown.next.loss_sum
        if self.is_noise(claim, loss_sum):
            self._tell(claim, "undecided", f"a loss of {loss_sum:.3g} nats: gradients are noise")
            return None
        cases = await self._cases(claim, voters)
        means = self.audits.means(claim.statement.stage)
        # Most contradict each other: nobody can be told from them.
        split = 2 * sum(not case.vote.close for case in cases) > len(cases) > 2
        doubted = [i for i, case in enumerate(cases) if case.suspected or not (split or case.vote.close)]
        # Of two each may be the one that lies, until its weights cleared one of them: both are weighed.
        two = len(cases) == len(doubted) == 2
        loop = asyncio.get_running_loop()
        for group in [(0, 1)] if two else [(index,) for index in doubted if cases[index].vote.cosine >= OPPOSITE]:
            peers = [voters[index][0] for index in group]
            now_s = loop.time()
            if not all(self.audits.weighable(peer, now_s) for peer in peers):
                doubted = [index for index in doubted if index not in group]
                continue
            for index in group:
                cases[index] = await self._weighed(claim, shown, voters[index], cases[index])
            self.audits.weighed(peers, loop.time() - now_s, loop.time())
        rivals = {index: cases[1 - index] if two else None for index in doubted}
        false = {index for index, other in rivals.items() if is_false(cases[index], other)}
        outcome = "right" if cases[0].vote.close and not cases[0].speaks else "undecided"
        reasons = list[str]()
        for index, other in rivals.items():
            peer = voters[index][0]
            case = cases[index]
            reason = f"{short(peer)}: {case.vote} to others of its stage, to its own weights {case.own}"
            reasons.append(reason)
            if index in false:
                # Whatever its weights are, or by those that answered.
                certain = case.vote.cosine < OPPOSITE or case.near
                proven = self._false(claim, shown, voters[index], reason, math.inf if certain else claim.came_s)
                outcome = outcome if index else "wrong" if proven else "undecided"
            elif hides(case, other):
                if self.audits.withheld(peer, loop.time()):
                    self._exclude(peer, f"its answers fall short, and no weights of it explain them: {reason}")
            elif case.explained:
                lie = bool(false) or (other is not None and not other.explained)
                if case.suspected:
                    self.audits.clear(peer, claim.statement.stage, None if lie else case.vote.distance)
                if claim.statement.stage and not (case.vote.close or lie):  # honest, of weights that others do not have
                    means.put_aside(peer, loop.time())
        if outcome == "right":
            return self._right(claim, shown, str(cases[0].vote))
        self._tell(claim, outcome, "; ".join(reasons) or ("most contradict each other" if split else "unusual"))
        return None

    async def _cases(self, claim: HopClaim, voters: Sequence[Voter]) -> list[Weighed]:
        """The answers of the `voters`, compared with each other. Their distances are added to what is known."""
        stage = claim.statement.stage
        test = self.audits.shortfall(claim.statement.stage)
        votes = await self._votes(claim, voters)
        usual = statistics.median_low([vote.distance for vote in votes]) if len(voters) > 2 else 0.0
        unsettled = [self.audits.suspected(peer, stage) for peer, _ in voters]
        cases = list[Weighed]()
        for index, ((peer, _), vote) in enumerate(zip(voters, votes, strict=True)):
            # A suspected replica's answers say nothing about the other one of a stage of two.
            told = len(voters) > 2 or unsettled[index] or not any(unsettled)
            speaks = told and test.observe(peer, vote.distance, usual)
            cases.append(Weighed(vote, self.audits.suspected(peer, stage), speaks))
        return cases

    async def _votes(self, claim: HopClaim, voters: Sequence[Voter]) -> list[AnswerSimilarity]:
        """Similarity of each of the `voters` to the others."""
        votes = []
        for peer, answered in voters:
            others = [one for other, one in voters if other != peer]
            votes.append(middle([await self.like(claim, answered, one) for one in others]))
        return votes

    async def _weighed(self, claim: HopClaim, shown: HopEvidence | None, voter: Voter, case: Weighed) -> Weighed:
        """`case` with what the own weights of `voter` make of the hop. It stays without them where they cannot be had;
        where they cannot be those that answered, nothing is less alike."""
        peer, answered = voter
        stated = claim if answered.statement is None else replace(claim, statement=answered.statement)
        try:
            async with self.weights(peer, stated.statement.stage) as given:
                own = await given.again(stated, shown)
            self.audits.spent(peer)
        except StepsContradicted:
            return replace(case, own=AnswerSimilarity(-1.0))
        except (Unavailable, RemoteFault) as error:
            return replace(case, late=isinstance(error, StepsApart))
        return replace(case, own=await self.like(claim, answered, own), apart=own.apart, near=own.near)

    def passed_over(self, stage: int, train: bool) -> Collection[PeerId]:
        """Replicas of `stage` that do not get the next microbatch: those whose answers are not used, as long as another
        one can answer. Each of them is examined at times; then it is the others that do not get one of training."""
        peers = [member.peer for member in self._swarm().serving(stage)]
        if train and (wanted := self._wanted.pop(stage, None)) in peers:
            return [peer for peer in peers if peer != wanted]
        resting = [peer for peer in peers if self.withholds(peer, stage)]
        for peer in resting:
            due = peer not in self._asked and self.audits.weighable(peer, asyncio.get_running_loop().time())
            if due and self.audits.share(peer) == 1.0:
                self._asked[peer] = None
                self.spawn(self._examining(peer, stage))
        return resting

    async def _examining(self, peer: PeerId, stage: int) -> None:
        """Fetch the weights of a replica whose answers are not used, and ask for an answer then, which they should give
        again: no answer looks honest to the very weights that gave it."""
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        try:
            async with contextlib.AsyncExitStack() as stack:
                own = None
                with contextlib.suppress(Unavailable, RemoteFault):
                    own = await stack.enter_async_context(self.weights(peer, stage))
                self._wanted[stage] = peer
                answered = loop.create_future()
                self._asked[peer] = answered
                async with asyncio.timeout(TIMEOUT_S):
                    claim = await answered
                stated = claim.statement
                if own is not None and (stated.inner_steps, stated.mark) == (own.inner_steps, own.mark):
                    await self._examine(claim, own)
                    return
            await self.check(claim)
        except (TimeoutError, Unavailable, RemoteFault, LocalFault) as error:
            self.tell(peer, stage, "undone", cause_of(error))
        finally:
            del self._asked[peer]
            self._wanted.pop(stage, None)
            self.audits.weighed([peer], loop.time() - began_s, loop.time())

    async def _examine(self, claim: HopClaim, own: OwnWeights) -> None:
        """Judge an answer by the very weights that gave it. Raises Unavailable, RemoteFault."""
        server = claim.server
        stage = claim.statement.stage
        shown = None if stage == self.manifest.pipeline.stages - 1 else await self._opened(claim)
        if shown is None and stage < self.manifest.pipeline.stages - 1:
            return
        answered = claim.answer(None if shown is None else shown.sent)
        made = await own.again(claim, shown)
        self.audits.spent(server)
        likeness = await self.like(claim, answered, made)
        reason = f"{short(server)}: {likeness} to the weights that gave it"
        if likeness.distance <= EXACT:
            self.audits.clear(server, stage)
            self.audits.means(stage).excuse(server)
            self.record_right(server, stage, reason)
        elif self.is_noise(claim, made.loss_sum if shown is None else shown.next.loss_sum):
            self._tell(claim, "undecided", reason)
        else:
            self._false(claim, shown, (server, answered), reason, math.inf)
            self._tell(claim, "wrong", reason)

    def _false(
        self, claim: HopClaim, shown: HopEvidence | None, voter: Voter, reason: str, came_s: float | None
    ) -> bool:
        """Record a false answer of `voter` to the hop of `claim`, as `wrong`, and show it to others."""
        stated = claim.statement
        peer, answered = voter
        if stated.stage:  # a feeder signs nothing
            self.spawn(self._accuse(claim, shown, answered))
        return self.wrong(peer, stated.stage, bytes(stated.microbatch_id), reason, came_s)

    def sketch(self, gradient: WireTensor, tokens: WireTensor, samples: int) -> Sequence[float]:
        """The sketch of an answer over its length, for MeanAnswers. On the compute thread. Raises RemoteFault."""
        length = self._replica.norm(gradient, samples)
        sketch = self._replica.sketch(gradient, tokens, samples, self._signs)
        return [one / length if length > 0.0 else 0.0 for one in sketch]

    async def sketched(self, claim: HopClaim) -> Sequence[float]:
        """`sketch` of an answer, on the event loop; empty where checks are exact. Raises RemoteFault."""
        if self.exact:
            return ()
        work = partial(self.sketch, claim.gradient, claim.tokens, claim.samples)
        return await self._compute.run(Priority.BACKWARD, 0, work)

    def wrong(self, peer: PeerId, stage: int, microbatch: bytes, reason: str, came_s: float | None = math.inf) -> bool:
        """Record a false answer of `peer`, of `stage`, for `microbatch` that came at `came_s` (None: now; infinity: no
        weights explain it), and exclude `peer` if it was one too many. Returns whether its lie is proven."""
        now_s = asyncio.get_running_loop().time()
        out = self.audits.wrong(peer, microbatch, now_s if came_s is None else came_s, now_s)
        if came_s == math.inf:
            self.audits.means(stage).put_aside(peer, now_s)
        if out:
            self._exclude(peer, f"its answers are false; {reason}")
        proven = out or came_s == math.inf
        if proven:
            self._telemetry.count(name.PEER_FAULTS, kind="wrong")
        return proven

    def is_noise(self, claim: HopClaim, loss_sum: float) -> bool:
        """Whether the text is memorised, so that its gradients are noise; a feeder sends none."""
        return claim.statement.stage > 0 and loss_sum / self._counted(claim) < LOSS_LEAST

    async def _accuse(self, claim: HopClaim, shown: HopEvidence | None, answered: HopAnswer) -> None:
        """Show a false answer for the hop of `claim` to its other callers and to other replicas of its stage, one after
        another (accusation.py)."""
        stated = answered.statement or claim.statement
        accusation = wire.Accusation(statement=stated, samples=claim.samples, boundary_digest=self.boundary_digest)
        tensors: tuple[WireTensor, ...] = (claim.x, claim.tokens, answered.gradient)
        if shown is not None and answered.sent is not None:
            tensors += (answered.sent, shown.got)
            accusation.next.CopyFrom(shown.next)
        callers, mates = (self.others(of, PeerId(stated.server), most=SHOWN_MAX) for of in (self._stage, stated.stage))
        for peer in (*callers, *mates):
            call = Call(wire.Request(run_id=self.run_id, accusation=accusation), tensors)
            with contextlib.suppress(Unavailable, RemoteFault):  # the next one may accept it
                await self.transport.call(peer, call, timeout_s=TIMEOUT_S, reply_bytes_max=REPLY_SLACK_BYTES)

    def _right(self, claim: HopClaim, shown: HopEvidence | None, reason: str) -> HopClaim | None:
        """Record a confirmed answer; return the next hop if it should be checked too."""
        self.record_right(claim.server, claim.statement.stage, reason)
        if shown is None or self.audits.doubted(claim.server) or self._rng.random() >= DEEPER_SHARE:
            return None
        return HopClaim(shown.next, claim.samples, shown.sent, claim.tokens, shown.got, claim.came_s)

    def others(self, stage: int, *but: PeerId, most: int = VOTES_MAX - 1) -> Sequence[PeerId]:
        """A few other replicas of `stage` that can recompute a hop, in random order."""
        return self._drawn([one.peer for one in self._swarm().serving(stage) if one.peer not in (*but, self.me)], most)

    def _drawn(self, found: Sequence[PeerId], most: int = VOTES_MAX - 1) -> list[PeerId]:
        """`most` of `found` at most, in random order: first those seen at work, because a key that is none costs
        nothing and a check that waits for it finds nobody."""
        known = [peer for peer in found if peer in self._at_work]
        drawn = self._rng.sample(known, min(most, len(known)))
        others = [peer for peer in found if peer not in self._at_work]
        return drawn + self._rng.sample(others, min(most - len(drawn), len(others)))

    def other_feeders(self, *but: PeerId) -> Sequence[PeerId]:
        """A few other nodes that feed, in random order."""
        return self._drawn([peer for peer in self._swarm().feeders() if peer not in (*but, self.me)])

    async def _opened(self, claim: HopClaim) -> HopEvidence | None:
        """The evidence of an answer; None if its server does not show it. A server whose evidence contradicts its
        statement is excluded."""
        stated = claim.statement
        try:
            request = wire.Opening(microbatch_id=stated.microbatch_id, position=stated.position)
            answer = await self.transport.call(
                claim.server,
                Call(wire.Request(run_id=self.run_id, opening=request)),
                timeout_s=TIMEOUT_S,
                reply_bytes_max=claim.x.nbytes + claim.gradient.nbytes + REPLY_SLACK_BYTES,
            )
            if len(answer.tensors) != 2:
                raise RemoteFault(f"{len(answer.tensors)} tensors shown; expected activations and their gradient")
            sent, got = answer.tensors
            for tensor in (sent, got):
                check_activations(self.manifest, claim.samples, tensor, "tensor shown")
            shown = HopEvidence(sent, got, answer.header.opening.next)
            await self._compute.run(Priority.BACKWARD, 0, lambda: self._check_shown(claim, shown))
        except (Unavailable, RemoteFault) as error:
            if self.audits.unshown(claim.server):
                self._exclude(claim.server, f"it does not show the evidence of its answers: {error}")
            self._tell(claim, "unshown", str(error))
            return None
        return shown

    def _check_shown(self, claim: HopClaim, shown: HopEvidence) -> None:
        """Raises RemoteFault unless `shown` matches the statements of the claim's server and of the next one."""
        stated = claim.statement
        then = shown.next
        print_of = self._replica.fingerprint
        sent = print_of(shown.sent)
        got = print_of(shown.got)
        if (sent, got) != (stated.sent, stated.got):
            raise RemoteFault("the evidence does not match the statement")
        due = (stated.run_id, stated.microbatch_id, stated.position + 1, stated.server, stated.tokens, sent, got)
        said = (then.run_id, then.microbatch_id, then.position, then.client, then.tokens, then.x, then.gradient)
        if said != due or then.stage == stated.stage or then.stage >= self.manifest.pipeline.stages:
            raise RemoteFault("the next server's statement is about something else")
        statements.check(then)

    async def recomputed(self, peer: PeerId, claim: HopClaim, shown: HopEvidence | None) -> HopAnswer:
        """The hop of `claim`, recomputed by `peer`. Raises Unavailable, RemoteFault."""
        request = wire.Recompute(
            stage=claim.statement.stage, samples=claim.samples, boundary_digest=self.boundary_digest
        )
        request.microbatch_id = claim.statement.microbatch_id
        request.position = claim.statement.position
        request.marks = True
        fed = claim.statement.stage == 0
        tensors = (claim.tokens,) if fed else (claim.x, claim.tokens, *(() if shown is None else (shown.got,)))
        most = 2 * max(claim.x.nbytes, claim.gradient.nbytes) + REPLY_SLACK_BYTES
        call = Call(wire.Request(recompute=request), tensors)
        about = None if claim.came_s is None else claim.server  # what others show is bounded by their number
        answer = await self.ask(peer, call, about=about, timeout_s=TIMEOUT_S, most=most)
        due = 1 if shown is None else 2
        if len(answer.tensors) != due:
            raise RemoteFault(f"{len(answer.tensors)} tensors of a recomputed hop; expected {due}")
        if fed:
            return await self.fed_again(answer, answer.tensors[0], claim.samples)
        report = answer.header.recompute
        got = None if shown is None else shown.got

        def work() -> wire.Statement:
            self._check_readable(answer.tensors, claim.samples)
            given = (claim.x, claim.tokens, got)
            stated = recomputed_statement(request, self.me, given, answer.tensors, report, self._replica.fingerprint)
            stated.run_id = self.run_id
            stated.server = peer
            stated.signature = report.signature
            statements.check(stated)
            return stated

        stated = await self._compute.run(Priority.BACKWARD, 0, work)
        return replace(HopAnswer.of(answer.tensors, report.loss_sum), statement=stated)

    async def fed_again(self, answer: Answer, activations: WireTensor, samples: int) -> HopAnswer:
        """The `activations` that another feeder makes of the same tokens, in an `answer` that it does not sign. Raises
        RemoteFault."""
        await self._compute.run(Priority.BACKWARD, 0, partial(self._check_readable, (activations,), samples))
        report = answer.header.recompute
        stated = wire.Statement(client=self.me, inner_steps=report.inner_steps, mark=report.mark)
        return HopAnswer(activations, None, 0.0, statement=stated)

    def _check_readable(self, tensors: Sequence[WireTensor], samples: int) -> None:
        """Raises RemoteFault for what nobody can read: it is no vote, since it would speak against the honest."""
        for tensor in tensors:
            self._replica.norm(tensor, samples)

    async def like(self, claim: HopClaim, one: HopAnswer, other: HopAnswer) -> AnswerSimilarity:
        """Similarity of two answers; the lowest possible if a tensor is malformed."""
        pairs = [(one.gradient, other.gradient)]
        if one.sent is not None and other.sent is not None:
            pairs.append((one.sent, other.sent))

        def work() -> tuple[float, float]:
            norms = [sorted(self._replica.norm(tensor, claim.samples) for tensor in pair) for pair in pairs]
            longer = max(1.0 if most == 0.0 else most / least if least > 0.0 else math.inf for least, most in norms)
            return min(self._replica.cosine(*pair, claim.samples) for pair in pairs), longer

        try:
            cosine, longer = await self._compute.run(Priority.BACKWARD, 0, work)
        except RemoteFault:
            cosine = -1.0
            longer = math.inf
        return AnswerSimilarity(cosine, abs(one.loss_sum - other.loss_sum) / self._counted(claim), longer)

    def _counted(self, claim: HopClaim) -> int:
        """Tokens that its loss is of; at least 1, where it is zero."""
        return max(1, counted_targets(claim.tokens, self.manifest.data.document_end))

    def record_right(self, peer: PeerId, stage: int, reason: str) -> None:
        """Record that `peer`'s data was found right."""
        self.audits.right(peer)
        self.tell(peer, stage, "right", reason)

    def record_false(
        self, peer: PeerId, stage: int, microbatch: bytes, reason: str, came_s: float | None = math.inf
    ) -> None:
        """Record that `peer`'s data for `microbatch`, which came at `came_s`, was found false (as `wrong`)."""
        proven = self.wrong(peer, stage, microbatch, reason, came_s)
        self.tell(peer, stage, "wrong" if proven else "undecided", reason)

    async def ask(self, peer: PeerId, call: Call, *, about: PeerId | None, timeout_s: float, most: int) -> Answer:
        """Have `peer` recompute a hop of a check of `about`, charged to our budget if it answers (None: to nobody's).
        Raises Unavailable, RemoteFault."""
        call.header.run_id = self.run_id
        answer = await self.transport.call(peer, call, timeout_s=timeout_s, reply_bytes_max=most)
        if about is not None:
            self.audits.spent(about)
        self._at_work[peer] = None
        return answer

    def _tell(self, claim: HopClaim, outcome: str, reason: str) -> None:
        self.tell(claim.server, claim.statement.stage, outcome, reason)

    def tell(self, peer: PeerId, stage: int, outcome: str, reason: str) -> None:
        """Count a check and log it."""
        self._telemetry.count(name.AUDITS, outcome=outcome)
        level = {"right": "debug", "undone": "debug", "undecided": "info"}.get(outcome, "warning")
        self._telemetry.event("audit.done", level=level, peer=peer, stage_of_peer=stage, outcome=outcome, reason=reason)
