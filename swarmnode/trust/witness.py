"""Ask other peers about an answer: to make it again, or to show what it was made of.

To check hop s of a request (x, tokens) and its answer (the gradient of x), a caller

1. asks the server for the activations it sent on and the gradient it got back (`opened`). The server's signed statement
   names both, so it cannot make them up now; the next server's statement confirms that it received and gave them;
2. has another replica of stage s run forward and backward of this hop alone (`recomputed`), without accumulating;
3. compares activations, gradient and, at the last stage, loss (`like`).

This tells a false answer from a true answer to a later stage's false gradient.
"""

from __future__ import annotations

import contextlib
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from swarmnode.base.errors import RemoteFault, Unavailable
from swarmnode.base.ids import PeerId
from swarmnode.base.ports import Answer, Call, Compute, Priority, Replica, Transport, WireTensor
from swarmnode.base.remembered import Remembered
from swarmnode.base.wire import call_pb2 as wire
from swarmnode.data.microbatch_shape import check_activations
from swarmnode.data.sample import counted_targets
from swarmnode.net.membership.judge import ASKED_S
from swarmnode.net.membership.swarm import Swarm
from swarmnode.run.manifest import Manifest
from swarmnode.trust import statement as statements
from swarmnode.trust.recompute import recomputed_statement
from swarmnode.trust.statement import HopAnswer, HopClaim, HopEvidence
from swarmnode.trust.verdict import LOSS_LEAST, AnswerSimilarity, exact_distance

VOTES_MAX = 7  # guess: replicas that are asked about one answer, its server among them
REPLY_SLACK_BYTES = 4096
SHOWN_MAX = 16  # guess: peers shown a false answer, of its callers and of its stage


class Witnesses:
    """Questions of a replica to others about answers, and comparisons of what they say."""

    def __init__(
        self,
        manifest: Manifest,
        run_id: str,
        me: PeerId,
        transport: Transport,
        replica: Replica,
        compute: Compute,
        swarm: Callable[[], Swarm],
        spent: Callable[[], None],
        rng: random.Random,
    ) -> None:
        """`spent` is called for each hop that was made again for a check of our own."""
        self.manifest = manifest
        self.run_id = run_id
        self.me = me
        self.transport = transport
        self.boundary_digest = replica.boundary_digest()
        self.at_work = Remembered[PeerId, None]()  # whose answers came: they are asked first
        self._replica = replica
        self._compute = compute
        self._swarm = swarm
        self._spent = spent
        self._rng = rng

    def others(self, stage: int, *but: PeerId, most: int = VOTES_MAX - 1) -> Sequence[PeerId]:
        """A few other replicas of `stage` that can recompute a hop, in random order."""
        return self._drawn([one.peer for one in self._swarm().serving(stage) if one.peer not in (*but, self.me)], most)

    def other_feeders(self, *but: PeerId) -> Sequence[PeerId]:
        """A few other nodes that feed, in random order."""
        return self._drawn([peer for peer in self._swarm().feeders() if peer not in (*but, self.me)])

    def _drawn(self, found: Sequence[PeerId], most: int = VOTES_MAX - 1) -> list[PeerId]:
        """`most` of `found` at most, in random order: first those seen at work, because a key that is none costs
        nothing and a check that waits for it finds nobody."""
        known = [peer for peer in found if peer in self.at_work]
        drawn = self._rng.sample(known, min(most, len(known)))
        others = [peer for peer in found if peer not in self.at_work]
        return drawn + self._rng.sample(others, min(most - len(drawn), len(others)))

    def is_noise(self, claim: HopClaim, loss_sum: float) -> bool:
        """Whether the text is memorised, so that its gradients are noise; a feeder sends none."""
        return claim.statement.stage > 0 and loss_sum / self._counted(claim) < LOSS_LEAST

    async def opened(self, claim: HopClaim) -> HopEvidence:
        """The evidence of an answer. Raises Unavailable, RemoteFault if its server does not show it, or shows what
        contradicts its statement."""
        stated = claim.statement
        request = wire.Opening(microbatch_id=stated.microbatch_id, position=stated.position)
        answer = await self.transport.call(
            claim.server,
            Call(wire.Request(run_id=self.run_id, opening=request)),
            timeout_s=ASKED_S,
            reply_bytes_max=claim.x.nbytes + claim.gradient.nbytes + REPLY_SLACK_BYTES,
        )
        if len(answer.tensors) != 2:
            raise RemoteFault(f"{len(answer.tensors)} tensors shown; expected activations and their gradient")
        sent, got = answer.tensors
        for tensor in (sent, got):
            check_activations(self.manifest, claim.samples, tensor, "tensor shown")
        shown = HopEvidence(sent, got, answer.header.opening.next)
        await self._compute.run(Priority.BACKWARD, 0, lambda: self._check_shown(claim, shown))
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
        charged = claim.came_s is not None  # what others show is bounded by their number
        answer = await self.ask(peer, call, charged=charged, timeout_s=ASKED_S, most=most)
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
        loss_apart = abs(one.loss_sum - other.loss_sum) / self._counted(claim)
        return AnswerSimilarity(cosine, loss_apart, longer, exact_distance(self.manifest.pipeline.boundary))

    def _counted(self, claim: HopClaim) -> int:
        """Tokens that its loss is of; at least 1, where it is zero."""
        return max(1, counted_targets(claim.tokens, self.manifest.data.document_end))

    async def ask(self, peer: PeerId, call: Call, *, charged: bool = True, timeout_s: float, most: int) -> Answer:
        """Have `peer` recompute a hop, `charged` to our budget if it answers. Raises Unavailable, RemoteFault."""
        call.header.run_id = self.run_id
        answer = await self.transport.call(peer, call, timeout_s=timeout_s, reply_bytes_max=most)
        if charged:
            self._spent()
        self.at_work[peer] = None
        return answer

    async def accuse(self, ours: int, claim: HopClaim, shown: HopEvidence | None, answered: HopAnswer) -> None:
        """Show a false answer for the hop of `claim` to its other callers, of stage `ours`, and to other replicas of
        its stage, one after another (accusation.py)."""
        stated = answered.statement or claim.statement
        accusation = wire.Accusation(statement=stated, samples=claim.samples, boundary_digest=self.boundary_digest)
        tensors: tuple[WireTensor, ...] = (claim.x, claim.tokens, answered.gradient)
        if shown is not None and answered.sent is not None:
            tensors += (answered.sent, shown.got)
            accusation.next.CopyFrom(shown.next)
        stages = (ours, stated.stage)
        callers, mates = (self.others(of, PeerId(stated.server), most=SHOWN_MAX) for of in stages)
        for peer in (*callers, *mates):
            call = Call(wire.Request(run_id=self.run_id, accusation=accusation), tensors)
            with contextlib.suppress(Unavailable, RemoteFault):  # the next one may accept it
                await self.transport.call(peer, call, timeout_s=ASKED_S, reply_bytes_max=REPLY_SLACK_BYTES)
