"""No gradient is believed: some answers are done again by a second replica of their stage, and compared.

The caller of a hop holds what it sent (x, tokens) and what it was answered (the gradient of x). To check hop s, it

1. asks the server to show what it sent on and what came back (`opening`); the server's signed statement names both, so
   it cannot make them up now, and the statement of the next server shows that they are what that one got and gave;
2. has another replica of stage s do forward and backward of this hop alone (`redo`), which adds nothing;
3. compares activations, gradient and, at the last stage, loss. Where the two differ, the stage's other replicas do it
   too, and who is far from the others is wrong; where there are only two, each is compared with our own arithmetic,
   done with the weights that it gives.

So a false answer is told from a true answer to a false gradient that came from a later stage. A hop that was right is
followed by a check of the next one at times: a server need not be honest about whom it works with.

Checks run beside training: the answer has been used by then. What a few lies do until their sender is excluded is
bounded by the clipping of gradients (model/incoming.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

from swarmnode.errors import LocalFault, RemoteFault, Unavailable
from swarmnode.identity import Identity
from swarmnode.ids import PeerId, short
from swarmnode.manifest import Manifest
from swarmnode.membership.swarm import Swarm
from swarmnode.metrics import name
from swarmnode.pipeline import statement as statements
from swarmnode.pipeline.audit import LOSS_LEAST, Audits, Likeness, middle, wrong, wrong_of_two
from swarmnode.pipeline.redo import Shown
from swarmnode.pipeline.request import check_activations
from swarmnode.pipeline.statement import Prints
from swarmnode.ports import Answer, Call, Compute, Priority, Replica, Telemetry, Transport, WireTensor
from swarmnode.wire import call_pb2 as wire

AT_ONCE_MAX = 2  # guess: checks under way at once; an answer that would be one more is not checked
DEEPER_SHARE = 0.5  # guess: of hops found right, after which the next hop is checked too
VOTES_MAX = 7  # guess: replicas whose answers are compared where two contradict each other
WARNED_MAX = 16  # guess: others told of a false answer
WARN_TIMEOUT_S = 5.0  # guess: one small message
WARNINGS_KEPT = 256  # guess: so that none counts twice
TIMEOUT_S = 30.0  # guess: for one of them
REPLY_SLACK_BYTES = 4096

Exclude = Callable[[PeerId, str], None]
Weigh = Callable[[PeerId, "Claim", Shown | None], Awaitable["Answered"]]


@dataclass(frozen=True, slots=True)
class Claim:
    """A server's answer for one hop: its statement, and the tensors that the statement names."""

    statement: wire.Statement
    samples: int
    x: WireTensor
    tokens: WireTensor
    gradient: WireTensor

    @property
    def server(self) -> PeerId:
        return PeerId(self.statement.server)


@dataclass(frozen=True, slots=True)
class Answered:
    """What a hop came to: the gradient of x; but at the last stage the activations sent on, there the loss."""

    gradient: WireTensor
    sent: WireTensor | None
    loss_sum: float


class Auditor:
    """One replica's checks of the answers of others."""

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
        weigh: Weigh,
        rng: random.Random,
    ) -> None:
        """`weigh` does a hop here with the weights that a peer gives. `exclude` is told of a replica that was found to
        lie. `rng` must be secret to others: who knows which answers are checked lies in the others."""
        self.manifest = manifest
        self._run_id = run_id
        self._stage = stage
        self._identity = identity
        self._transport = transport
        self._replica = replica
        self._compute = compute
        self._swarm = swarm
        self.tasks = tasks
        self._telemetry = telemetry
        self._exclude = exclude
        self._weigh = weigh
        self._rng = rng
        self.boundary_digest = replica.boundary_digest()
        self._under_way = 0
        self._warned: deque[bytes] = deque(maxlen=WARNINGS_KEPT)  # microbatches
        self.audits = Audits(manifest.pipeline.audit_share)

    # ---- our own answers, and those to us, on the compute thread

    def signed(
        self, process: wire.Process, client: PeerId, prints: Prints, loss_sum: float, report: wire.Processed
    ) -> None:
        """Put our statement on our answer to `client` into `report`."""
        mine = statements.stated(self._run_id, process, self._identity.peer_id, client, prints, loss_sum)
        statements.sign(mine, self._identity)
        report.sent, report.got, report.signature = mine.sent, mine.got, mine.signature

    def checked(self, process: wire.Process, server: PeerId, report: wire.Processed, prints: Prints) -> wire.Statement:
        """The statement of `server` on its answer `report` to us, of which `prints` are our own. Raises RemoteFault
        when it does not verify. `process` is as it arrived there."""
        theirs = Prints(prints.x, prints.tokens, prints.gradient, report.sent, report.got)
        me = self._identity.peer_id
        found = statements.stated(self._run_id, process, server, me, theirs, report.loss_sum)
        found.signature = report.signature
        statements.check(found)
        last = process.position == len(process.itinerary) - 1
        if last != (not report.sent):
            raise RemoteFault(f"statement of {short(server)} that names {'activations' if last else 'none'} sent on")
        return found

    # ---- checks

    def saw(self, claim: Claim) -> None:
        """An answer came and was used: it may be checked."""
        self.perhaps(claim.server, lambda: self._check(claim))

    def perhaps(self, peer: PeerId, check: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Begin a `check` of what `peer` sent, if it is chosen."""
        chosen = self.audits.chosen(peer, self._rng.random())
        if not chosen or self._under_way >= AT_ONCE_MAX:
            return
        self._under_way += 1
        checking = self._checking(check)
        try:
            self.tasks.create_task(checking)
        except RuntimeError:  # all that goes on here is being ended
            checking.close()
            self._under_way -= 1

    async def _checking(self, check: Callable[[], Coroutine[Any, Any, None]]) -> None:
        try:
            await check()
        finally:
            self._under_way -= 1

    async def _check(self, claim: Claim) -> None:
        found: Claim | None = claim
        try:
            while found is not None:
                found = await self._check_hop(found)
        except (Unavailable, RemoteFault, LocalFault) as error:
            self._tell(claim, "undone", str(error))

    async def _check_hop(self, claim: Claim) -> Claim | None:
        """Check one hop; returns the next one if that is to be checked too. Raises Unavailable, RemoteFault when that
        cannot be done."""
        last = claim.statement.stage == self.manifest.pipeline.stages - 1
        shown = None if last else await self._opened(claim)
        if not last and shown is None:
            return None
        stated_loss = claim.statement.loss_sum if last else 0.0  # elsewhere it is another's
        theirs = Answered(claim.gradient, None if shown is None else shown.sent, stated_loss)
        voters, failures = [(claim.server, theirs)], list[str]()
        for peer in self.others(claim.statement.stage, claim.server, PeerId(claim.statement.client)):
            try:
                voters.append((peer, await self._redone(peer, claim, shown)))
            except (Unavailable, RemoteFault) as error:
                failures.append(f"{short(peer)}: {error}")
                continue
            if len(voters) == 2:
                found = await self._like(claim, voters[0][1], voters[1][1])
                if found.close:
                    return self._right(claim, shown, str(found))
        if len(voters) < 2:
            self._tell(claim, "undone", "; ".join(failures) or "no other replica of the stage")
            return None
        return await self._vote(claim, shown, voters)

    async def _vote(self, claim: Claim, shown: Shown | None, voters: Sequence[tuple[PeerId, Answered]]) -> Claim | None:
        """The first two of `voters` contradict each other: find out who of them is wrong."""
        tokens = claim.samples * self.manifest.model.context
        loss_sum = max(one.loss_sum for _, one in voters) if shown is None else shown.next.loss_sum
        if loss_sum / tokens < LOSS_LEAST:
            self._tell(claim, "undecided", f"a loss of {loss_sum / tokens:.3g} nats a token: gradients are noise")
            return None
        if len(voters) == 2:
            likeness = [await self._weighed(claim, shown, peer, answered) for peer, answered in voters]
            false = wrong_of_two([one.cosine for one in likeness])
        else:
            likeness = []
            for peer, answered in voters:
                others = [one for other, one in voters if other != peer]
                likeness.append(middle([await self._like(claim, answered, one) for one in others]))
            false = wrong(likeness)
        reason = ", ".join(f"{short(peer)}: {one}" for (peer, _), one in zip(voters, likeness, strict=True))
        for (peer, _), is_wrong in zip(voters, false, strict=True):
            if is_wrong:
                self.wrong(peer, bytes(claim.statement.microbatch_id), reason)
        if false[0]:
            self._tell(claim, "wrong", reason)
            self._warn(claim)
            return None
        if any(false):
            return self._right(claim, shown, reason)
        self._tell(claim, "undecided", reason)
        return None

    def wrong(self, peer: PeerId, microbatch: bytes, reason: str) -> None:
        """What `peer` said of `microbatch` was found false."""
        self._telemetry.count(name.PEER_FAULTS, kind="wrong")
        if self.audits.wrong(peer, microbatch):
            self._exclude(peer, f"what it answers is false; how like the others (or its own weights) each is: {reason}")

    def _warn(self, claim: Claim) -> None:
        """Tell others who ask the same stage, by its statement: they check more of its answers themselves."""
        here = [member.peer for member in self._swarm().members() if member.stage == self._stage]
        others = [peer for peer in here if peer not in (claim.server, self._identity.peer_id)]
        for peer in self._rng.sample(others, min(WARNED_MAX, len(others))):
            self.tasks.create_task(self._warn_one(peer, claim.statement))

    async def _warn_one(self, peer: PeerId, statement: wire.Statement) -> None:
        call = Call(wire.Request(run_id=self._run_id, suspicion=wire.Suspicion(statement=statement)))
        with contextlib.suppress(Unavailable, RemoteFault):  # it will find out by itself
            await self._transport.call(peer, call, timeout_s=WARN_TIMEOUT_S, reply_bytes_max=0)

    async def serve_suspicion(self, peer: PeerId, call: Call) -> Answer:
        """Handler of method "suspicion". It proves nothing: more of the answers of the replica it is about are
        checked here, within the same budget. Raises RemoteFault for a statement that is not about an answer to `peer`
        in this run."""
        stated = call.header.suspicion.statement
        if (stated.run_id, stated.client) != (self._run_id, peer):
            raise RemoteFault(f"suspicion of an answer to {short(PeerId(stated.client))}, from {short(peer)}")
        statements.check(stated)
        about = PeerId(stated.server)
        if stated.microbatch_id not in self._warned:
            self._warned.append(bytes(stated.microbatch_id))
            self.audits.doubt(about)
            self._telemetry.event("audit.suspicion", peer=peer, about=about)
        return Answer(wire.Reply(suspicion=wire.SuspicionTaken()))

    def _right(self, claim: Claim, shown: Shown | None, reason: str) -> Claim | None:
        """The answer is confirmed; returns the next hop where that is to be checked too."""
        self.confirmed(claim.server, claim.statement.stage, reason)
        if shown is None or self._rng.random() >= DEEPER_SHARE:
            return None
        return Claim(shown.next, claim.samples, shown.sent, claim.tokens, shown.got)

    async def _weighed(self, claim: Claim, shown: Shown | None, peer: PeerId, answered: Answered) -> Likeness:
        """How like `answered` is to the hop done here with the weights of `peer`. Raises Unavailable, RemoteFault."""
        return await self._like(claim, answered, await self._weigh(peer, claim, shown))

    def others(self, stage: int, *but: PeerId) -> Sequence[PeerId]:
        """Replicas of `stage` that can do a hop again, a few, in the order of our chance."""
        here = [member.peer for member in self._swarm().serving(stage)]
        found = [peer for peer in here if peer not in (*but, self._identity.peer_id)]
        return self._rng.sample(found, min(VOTES_MAX - 1, len(found)))

    async def _opened(self, claim: Claim) -> Shown | None:
        """What the answer was made of; None where its server would not show it, or shows what it did not state."""
        stated = claim.statement
        try:
            asked = wire.Opening(microbatch_id=stated.microbatch_id, position=stated.position)
            answer = await self._transport.call(
                claim.server,
                Call(wire.Request(run_id=self._run_id, opening=asked)),
                timeout_s=TIMEOUT_S,
                reply_bytes_max=claim.x.nbytes + claim.gradient.nbytes + REPLY_SLACK_BYTES,
            )
            if len(answer.tensors) != 2:
                raise RemoteFault(f"{len(answer.tensors)} tensors shown; activations and their gradient are due")
            sent, got = answer.tensors
            for tensor in (sent, got):
                check_activations(self.manifest, claim.samples, tensor, "tensor shown")
            shown = Shown(sent, got, answer.header.opening.next)
            await self._compute.run(Priority.BACKWARD, 0, lambda: self._check_shown(claim, shown))
        except (Unavailable, RemoteFault) as error:
            if self.audits.unshown(claim.server):
                self._exclude(claim.server, f"it does not show what it answers by: {error}")
            self._tell(claim, "unshown", str(error))
            return None
        return shown

    def _check_shown(self, claim: Claim, shown: Shown) -> None:
        """Raises RemoteFault unless `shown` is what the claim's server stated, and the next one too."""
        stated, then, print_of = claim.statement, shown.next, self._replica.fingerprint
        sent, got = print_of(shown.sent), print_of(shown.got)
        if (sent, got) != (stated.sent, stated.got):
            raise RemoteFault("what is shown is not what was stated")
        due = (stated.run_id, stated.microbatch_id, stated.position + 1, stated.server, stated.tokens, sent, got)
        said = (then.run_id, then.microbatch_id, then.position, then.client, then.tokens, then.x, then.gradient)
        if said != due or then.stage == stated.stage or then.stage >= self.manifest.pipeline.stages:
            raise RemoteFault("the next server's statement is about something else")
        statements.check(then)

    async def _redone(self, peer: PeerId, claim: Claim, shown: Shown | None) -> Answered:
        """The hop of `claim`, done again by `peer`. Raises Unavailable, RemoteFault."""
        asked = wire.Redo(stage=claim.statement.stage, samples=claim.samples, boundary_digest=self.boundary_digest)
        tensors = (claim.x, claim.tokens) if shown is None else (claim.x, claim.tokens, shown.got)
        most = 2 * max(claim.x.nbytes, claim.gradient.nbytes) + REPLY_SLACK_BYTES
        answer = await self.ask(peer, Call(wire.Request(redo=asked), tensors), timeout_s=TIMEOUT_S, most=most)
        due = 1 if shown is None else 2
        if len(answer.tensors) != due:
            raise RemoteFault(f"{len(answer.tensors)} tensors of a hop done again; {due} are due")
        return Answered(answer.tensors[-1], None if shown is None else answer.tensors[0], answer.header.redo.loss_sum)

    async def _like(self, claim: Claim, one: Answered, other: Answered) -> Likeness:
        """How like two answers are; where a tensor is malformed, as unlike as can be."""
        pairs = [(one.gradient, other.gradient)]
        if one.sent is not None and other.sent is not None:
            pairs.append((one.sent, other.sent))

        tokens = claim.samples * self.manifest.model.context
        try:
            cosine = min([await self.cosine(*pair, claim.samples) for pair in pairs])
        except RemoteFault:
            cosine = -1.0
        return Likeness(cosine, abs(one.loss_sum - other.loss_sum) / tokens)

    def confirmed(self, peer: PeerId, stage: int, reason: str) -> None:
        """What `peer` sent was found right."""
        self.audits.right(peer)
        self.tell(peer, stage, "right", reason)

    async def ask(self, peer: PeerId, call: Call, *, timeout_s: float, most: int) -> Answer:
        """Have `peer` do a hop again, on our budget. Raises Unavailable, RemoteFault."""
        self.audits.spent()
        call.header.run_id = self._run_id
        return await self._transport.call(peer, call, timeout_s=timeout_s, reply_bytes_max=most)

    async def cosine(self, one: WireTensor, other: WireTensor, samples: int) -> float:
        """As ports.Replica. Raises RemoteFault."""
        return await self._compute.run(Priority.BACKWARD, 0, lambda: self._replica.cosine(one, other, samples))

    def _tell(self, claim: Claim, outcome: str, reason: str) -> None:
        self.tell(claim.server, claim.statement.stage, outcome, reason)

    def tell(self, peer: PeerId, stage: int, outcome: str, reason: str) -> None:
        """Count a check and write it down."""
        self._telemetry.count(name.AUDITS, outcome=outcome)
        level = "debug" if outcome == "right" else "info" if outcome in ("undone", "undecided") else "warning"
        self._telemetry.event("audit.done", level=level, peer=peer, stage_of_peer=stage, outcome=outcome, reason=reason)
