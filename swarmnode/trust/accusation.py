"""Find a replica that gives false answers, by what one of its callers shows: to the other replicas of its stage, which
never see each other's answers, and to its other callers, of whom each sees few.

A caller that found an answer false shows the server's signed statement and the tensors that the statement names. A
replica of that stage recomputes the hop with its own weights; another caller has one of them do so. If that contradicts
the answer, it recomputes with the weights that the accused gives. So an accusation needs no trust. A false accusation
only costs its sender's reputation, because an honest answer fits the weights that made it, whatever the request was.

Without accusations, a replica that no longer gets work would still take part in its stage's rounds, and in a stage of
eight each of eight callers would have to gather all evidence itself.

An accuser chooses the input that it shows. It may have been made so that the gradient vanishes at the weights of the
accused: then the answers of two replicas, or of one a step later, have nothing in common, and an honest one looks
false. At any other weights of the stage that gradient is much shorter than usual (`UsualNorm`).
"""

from __future__ import annotations

import asyncio
import contextlib
import statistics
from collections import deque
from functools import partial

from swarmnode.base.errors import Busy, RemoteFault, Unavailable
from swarmnode.base.ids import PeerId, short, stage_name
from swarmnode.base.ports import Answer, Call, Compute, Priority, Replica, WireTensor
from swarmnode.base.token_bucket import PeerBudget
from swarmnode.base.wire import call_pb2 as wire
from swarmnode.data.microbatch_shape import check_activations, check_inputs, check_samples
from swarmnode.trust import statement as statements
from swarmnode.trust.auditor import Auditor
from swarmnode.trust.recompute import hop_again
from swarmnode.trust.statement import HopAnswer, HopClaim, HopEvidence
from swarmnode.trust.verdict import LATER, Evidence, by_own_weights

PER_MINUTE_MAX = 4  # guess: accusations of one caller that are examined; two exclude a liar
WAITING_MAX = PER_MINUTE_MAX  # accusations of all callers whose tensors are held here
MEASURED_EVERY = 8  # guess: of so many answers one is measured
NORMS_MAX = 16
NORMS_LEAST = 4  # guess: measurements; lengths fall fast at the start of a run
KNOWN_S = 30  # guess: at most so long a newcomer waits for its own first answers before it judges those of others
# Measured on a last stage of two layers: of the usual norm, an input made for its weights has .03 four inner steps
# later and .13 after 32; ordinary inputs differ by a fifth.
VANISHING = 0.25


class UsualNorm:
    """The usual length of the gradients of one stage's answers. Called on the compute thread."""

    def __init__(self, replica: Replica) -> None:
        self._replica = replica
        self._answers = 0
        self._norms: deque[float] = deque(maxlen=NORMS_MAX)

    def record(self, gradient: WireTensor, samples: int) -> None:
        """Note an answer to a microbatch of `samples`; one that is not finite is no measure."""
        self._answers += 1
        if self._answers <= NORMS_LEAST or self._answers % MEASURED_EVERY == 0:
            with contextlib.suppress(RemoteFault):  # its receiver judges it
                self._norms.append(self._replica.norm(gradient, samples))

    @property
    def known(self) -> bool:
        """Whether enough answers were measured."""
        return len(self._norms) >= NORMS_LEAST

    def vanishes(self, gradient: WireTensor, samples: int) -> bool:
        """Whether our own gradient of an input is far shorter than usual, or nothing is known of what is."""
        return not self.known or self._replica.norm(gradient, samples) < VANISHING * statistics.median(self._norms)


class Accusations:
    """A replica's handling of accusations against others of its stage; part of its `auditor`."""

    def __init__(self, auditor: Auditor, stage: int, replica: Replica, compute: Compute) -> None:
        self._auditor = auditor
        self._stage = stage
        self._replica = replica
        self._compute = compute
        self._one = asyncio.Lock()  # one at a time: each may need a whole replica's state
        self._rate = PeerBudget(PER_MINUTE_MAX / 60.0, PER_MINUTE_MAX)
        self._waiting = 0
        self._norms = dict[int, UsualNorm]()

    def usual_norm(self, stage: int) -> UsualNorm:
        """The usual length of the answers of `stage`: our own, or those to us."""
        return self._norms.setdefault(stage, UsualNorm(self._replica))

    async def serve(self, peer: PeerId, call: Call) -> Answer:
        """Handler of method "accusation". The answer only confirms receipt, so a liar learns nothing from it.

        Raises RemoteFault if the tensors do not fit the statement, Busy if the caller sends too many, or others did.
        """
        if self._waiting >= WAITING_MAX:
            raise Busy(f"{WAITING_MAX} accusations are examined already", retry_after_s=10.0)
        claim, shown = self._claim(call)
        if not self._rate.take(peer, asyncio.get_running_loop().time()):
            raise Busy(f"{PER_MINUTE_MAX} of your accusations were examined within a minute", retry_after_s=10.0)
        await self._compute.run(Priority.BACKWARD, 0, lambda: self._check_prints(claim, shown))
        self._waiting += 1
        if not self._auditor.spawn(self._looking(peer, claim, shown)):
            self._waiting -= 1
        return Answer(wire.Reply(accusation=wire.AccusationTaken()))

    def _claim(self, call: Call) -> tuple[HopClaim, HopEvidence | None]:
        """The claim and evidence in `call`, checked except for fingerprints. Raises RemoteFault."""
        charge = call.header.accusation
        manifest = self._auditor.manifest
        stated = charge.statement
        samples = charge.samples
        if stated.run_id != self._auditor.run_id or not 0 < stated.stage < manifest.pipeline.stages:
            raise RemoteFault(f"accusation of a replica of {stage_name(stated.stage)} in another run or of none")
        if stated.server == self._auditor.me:
            raise RemoteFault("accusation of this replica itself")
        last = stated.stage == manifest.pipeline.stages - 1
        if len(call.tensors) != (3 if last else 5) or last == bool(stated.sent):
            raise RemoteFault(f"accusation of a replica of {stage_name(stated.stage)} with {len(call.tensors)} tensors")
        check_samples(manifest, samples, charge.boundary_digest, self._auditor.witnesses.boundary_digest)
        x, tokens = check_inputs(manifest, samples, call.tensors[:2])
        for tensor, of in zip(call.tensors[2:], ("gradient", "activations", "gradient"), strict=False):
            check_activations(manifest, samples, tensor, of)
        statements.check(stated)
        if not last:
            statements.check(charge.next)
            named = (charge.next.run_id, charge.next.microbatch_id, charge.next.tokens, charge.next.gradient)
            if named != (stated.run_id, stated.microbatch_id, stated.tokens, stated.got):
                raise RemoteFault("accusation with the next server's statement on something else")
        shown = None if last else HopEvidence(call.tensors[3], call.tensors[4], charge.next)
        return HopClaim(stated, samples, x, tokens, call.tensors[2]), shown

    def _check_prints(self, claim: HopClaim, shown: HopEvidence | None) -> None:
        """Raises RemoteFault unless the tensors match the fingerprints of the statement."""
        stated = claim.statement
        print_of = self._replica.fingerprint
        pairs = [(claim.x, stated.x), (claim.tokens, stated.tokens), (claim.gradient, stated.gradient)]
        if shown is not None:
            pairs += [(shown.sent, stated.sent), (shown.got, stated.got)]
        if any(print_of(tensor) != due for tensor, due in pairs):
            raise RemoteFault(f"accusation of {short(claim.server)} with tensors that do not match its statement")

    async def _looking(self, peer: PeerId, claim: HopClaim, shown: HopEvidence | None) -> None:
        try:
            for _ in range(KNOWN_S):
                if self.usual_norm(claim.statement.stage).known:
                    break
                await asyncio.sleep(1.0)
            await self._look(peer, claim, shown)
        finally:
            self._waiting -= 1

    async def _again(self, claim: HopClaim, shown: HopEvidence | None) -> HopAnswer:
        """The hop of `claim` by our own weights, or another replica's of its stage. Raises Unavailable, RemoteFault."""
        witnesses = self._auditor.witnesses
        stated = claim.statement
        if stated.stage == self._stage:
            got = None if shown is None else shown.got
            again = partial(hop_again, self._replica, claim.x, claim.tokens, claim.samples, got)
            loss_sum, tensors = await self._compute.run(Priority.BACKWARD, claim.samples, again)
            return HopAnswer.of(tensors, loss_sum)
        for peer in witnesses.others(stated.stage, claim.server):
            with contextlib.suppress(Unavailable, RemoteFault):  # the next one may do it
                return await witnesses.recomputed(peer, claim, shown)
        raise Unavailable(f"no other replica of {stage_name(stated.stage)} recomputes the hop")

    async def _look(self, peer: PeerId, claim: HopClaim, shown: HopEvidence | None) -> None:
        """Decide whether the accused's answer is false, and record the outcome."""
        stage = claim.statement.stage
        auditor = self._auditor
        try:
            async with self._one:
                if not auditor.audits.convicted(claim.server):  # by others that were shown before
                    await self._judge(peer, claim, shown)
        except (Unavailable, RemoteFault) as error:
            auditor.findings.tell(claim.server, stage, "undone", str(error))

    async def _judge(self, peer: PeerId, claim: HopClaim, shown: HopEvidence | None) -> None:
        """`_look` at one that others did not convict before. Raises Unavailable, RemoteFault."""
        theirs = claim.answer(None if shown is None else shown.sent)
        stage = claim.statement.stage
        auditor = self._auditor
        again = await self._again(claim, shown)
        measured = partial(self.usual_norm(stage).vanishes, again.gradient, claim.samples)
        vanishes = await self._compute.run(Priority.BACKWARD, 0, measured)
        mine = await auditor.witnesses.like(claim, theirs, again)
        loss_sum = again.loss_sum if shown is None else shown.next.loss_sum
        decides = not vanishes and not auditor.witnesses.is_noise(claim, loss_sum)
        if decides and not mine.close:
            # Whatever its weights say: if they met others meanwhile, our own checks decide.
            auditor.audits.doubt(claim.server)
        reason = f"shown by {short(peer)}; like ours: {mine}"
        due = not mine.close or auditor.audits.weighable(claim.server, asyncio.get_running_loop().time())
        if decides and due:
            await self._by_own_weights(claim, shown, theirs, reason)
        else:
            auditor.findings.tell(claim.server, stage, "undecided", reason)

    async def _by_own_weights(self, claim: HopClaim, shown: HopEvidence | None, theirs: HopAnswer, reason: str) -> None:
        """Judge an answer that was shown. Its accuser chose what to show, and when: the very weights that answered
        convict, and others where they have nothing in common with the answer. Raises Unavailable, RemoteFault."""
        stage = claim.statement.stage
        auditor = self._auditor
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        async with auditor.weights(claim.server, stage) as given:
            made = await given.again(claim, shown)
        auditor.audits.weighed(claim.server, stage, loop.time() - began_s, loop.time())
        own = await auditor.witnesses.like(claim, theirs, made)
        found, comparable = by_own_weights(own, made.apart, marked=made.marked)
        reason = f"{reason}; like its own weights: {own}"
        if found is Evidence.OWN_OTHER and ((comparable and made.apart == 0) or own.cosine < LATER[-1][1]):
            microbatch = bytes(claim.statement.microbatch_id)
            auditor.findings.conclude(claim.server, stage, found, microbatch, reason, comparable=comparable)
        else:
            auditor.findings.tell(claim.server, stage, "undecided", reason)
