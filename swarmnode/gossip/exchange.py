"""One replica's rounds: at each boundary meet one random other replica of the stage, or a group of them (gossip.group),
or step alone (design section 5).

The lower peer id of a pair calls, the other answers with its own packet and applies what it was sent only after the
caller's commit, so that in the common failures both average or neither does. Inner steps go on meanwhile; the gain is
added back by the outer step. A node holds one exchange at a time, by construction: one coroutine runs the rounds. Where
the partner fails, another replica's packet stands in for its own (standin.py).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from swarmnode.errors import RemoteFault, Unavailable
from swarmnode.gossip.acceptance import Acceptance
from swarmnode.gossip.bequest import Bequests
from swarmnode.gossip.calling import Message, swap, weight_of
from swarmnode.gossip.meeting import Meeting, while_written
from swarmnode.gossip.pairing import partners
from swarmnode.gossip.round import Pace, Rounds, usual
from swarmnode.gossip.standin import StandIns, stand_ins, stands_in
from swarmnode.gossip.taking import Taking, Took
from swarmnode.identity import Identity
from swarmnode.ids import PeerId, RunId, short
from swarmnode.manifest import Manifest
from swarmnode.membership.liveness import patiently
from swarmnode.membership.swarm import GOSSIPING, Member, Swarm
from swarmnode.metrics import name
from swarmnode.ports import Answer, Call, Compute, Packet, Priority, Replica, Telemetry, Transport, WireTensor
from swarmnode.wire import call_pb2 as wire

PARTNER_PATIENCE_S = 2.0  # guess: a partner that has not called by then is asked whether it lives
METHODS = ("exchange", "commit", "packet_receipt", "standin")  # what rounds are made of


class Gossip:
    """Runs the outer rounds of one replica. `run` is the only coroutine that changes the slow weights."""

    def __init__(
        self,
        manifest: Manifest,
        run_id: RunId,
        stage: int,
        transport: Transport,
        replica: Replica,
        compute: Compute,
        swarm: Callable[[], Swarm],
        samples_total: Callable[[], int],
        samples_here: Callable[[], int],
        telemetry: Telemetry,
        *,
        identity: Identity,
        done: int,
        newcomer: bool,
    ) -> None:
        self._manifest = manifest
        self._run_id = run_id
        self._stage = stage
        self._transport = transport
        self._replica = replica
        self._compute = compute
        self._swarm = swarm
        self._samples_total = samples_total
        self._samples_here = samples_here
        self._telemetry = telemetry
        self.acceptance = Acceptance(
            run_id, stage, identity, transport, telemetry, lambda: self._swarm().gossiping(stage)
        )
        self.serve_receipt = self.acceptance.serve_receipt
        self.standins = StandIns(
            run_id, stage, transport, manifest.limits.exchange_timeout_s, self._left_out, lambda: self._round_max
        )
        self.serve_standin = self.standins.serve
        self._taking = Taking(replica, compute, self.acceptance, self.standins, telemetry)
        self._tasks = asyncio.TaskGroup()  # of `run`
        self.done = done  # the last round finished
        self.newcomer = newcomer  # this replica's first round of each fragment of the weights counts nothing of its own
        self._received = set[int]()  # a newcomer's: fragments that had a round
        self._rounds = Rounds.of(manifest)
        self.stride = 1  # this replica meets at multiples of it; announced in its record
        self._pace = Pace()
        self._ended = (asyncio.get_running_loop().time(), compute.worked_s)  # the last round: when, device seconds
        self._sent = 0  # bytes for rounds, by the last one's end
        self._gone: dict[PeerId, int] = {}  # partners that could not be reached, until a record newer than this
        self._samples_before = 0
        self._wake = asyncio.Event()
        self._meetings: dict[PeerId, Meeting] = {}  # of the round under way, where the others call
        self.held = False  # while this node is paused: no rounds
        self._met = asyncio.Condition()
        self.finished = asyncio.Event()  # set after each round; whoever waits clears it
        self._stepping = done  # the last round whose packets were gathered: a bequest is for a later one
        self.bequests = Bequests(manifest, stage, lambda: self._after(max(self.done, self._stepping)), telemetry)
        self.serve_bequest = self.bequests.serve
        self._resting, self.idle = False, asyncio.Event()  # no round is under way: the replica may be given a state
        self.idle.set()
        self._parted: tuple[wire.Bequest, Sequence[WireTensor]] | None = None  # what `parting` made last

    def progressed(self) -> None:
        """The run's sample count grew: is a round due?"""
        if self._rounds.newest(self._samples_total(), self.stride) > self.done:
            self._wake.set()

    @property
    def exchange_s(self) -> float:
        """What an exchange with a partner takes, smoothed; 0 before the first."""
        return self._pace.exchange_s

    @property
    def next_round(self) -> int:
        """The round this replica takes part in next, if none is skipped."""
        return self._after(self.done)

    def _after(self, round_index: int) -> int:
        return self._rounds.following(round_index, self.stride)

    @property
    def left(self) -> int:
        """Samples of the run until the next round this replica takes part in."""
        return self._rounds.left(self._samples_total(), self.stride)

    @property
    def unsent(self) -> int:
        """Samples trained here since the last round: no other replica has a part of them."""
        met = self._manifest.gossip.method != "none" and not self.newcomer
        return self._samples_here() - self._samples_before if met else 0

    async def parting(self, round_index: int | None = None) -> tuple[wire.Bequest, Sequence[WireTensor]]:
        """After `rest`: what was learnt since the last round of each fragment of the weights, as a message of the round
        given, None: the next one here. Raises Unavailable for one that is over here: one packet a round, each time."""
        due = self.next_round if round_index is None else round_index
        if due <= self.done:
            raise Unavailable(f"round {due} is over here")
        said = wire.Bequest(round=due, stage=self._stage, codec=self._manifest.gossip.codec, samples=self.unsent)

        def message() -> tuple[wire.Bequest, Sequence[WireTensor]]:
            if self._parted is None or self._parted[0].round != due:
                if self._replica.accumulated:
                    self._replica.step(self._samples_total())
                self._parted = said, self._replica.bequest(due)
            return self._parted

        return await self._compute.run(Priority.OUTER, 0, message)

    async def rest(self) -> None:
        """Begin no round any more; returns when the one under way is over."""
        self._resting = True
        await self.idle.wait()

    async def run(self) -> None:
        """Round after round until cancelled. A newcomer begins at the pace of most who are here."""
        here, me = self._swarm().stages[self._stage], self._transport.peer_id
        self.stride = usual(member.round_stride for member in here if member.peer != me)
        async with self._tasks:
            await self._run()

    async def _run(self) -> None:
        while not self._resting:
            due, _ = self._rounds.due(self._samples_total(), self.done, self.stride)
            if due is not None and not self.held:
                self.idle.clear()
                try:
                    await self._round(due)
                    self._keep_pace()
                finally:
                    self.idle.set()
                continue
            self._wake.clear()
            await self._wake.wait()

    def _keep_pace(self) -> None:
        """Choose the stride anew from how fast samples come, how long exchanges take and what the line carries."""
        gossip, sent = self._manifest.gossip, self._transport.bytes_by_method().items()
        sent_nbytes = sum(nbytes for (_, direction), nbytes in sent if direction == "sent")
        self._pace.boundary(asyncio.get_running_loop().time(), self._samples_total(), sent_nbytes)
        needed_s, why = self._pace.needed_s(gossip.uplink_share)
        needed_s = max(gossip.round_seconds_min, needed_s)
        stride, reason = self._rounds.stride(self._pace.samples_per_second, needed_s, self.stride)
        if stride != self.stride:
            self._telemetry.event("round.stride", stride=stride, before=self.stride, reason=f"{reason}; {why}")
            self.stride = stride

    def _members(self, round_index: int) -> tuple[PeerId, ...]:
        """Who meets at `round_index`: replicas whose stride it is a multiple of, without those known to be gone and
        those whose packets were refused too often, by us or by most of the others."""
        me, left_out, gone = self._transport.peer_id, self._left_out(), self._gone.get

        def meets(member: Member) -> bool:
            return not round_index % member.round_stride and gone(member.peer, -1) < member.sequence

        here = [m for m in self._swarm().stages[self._stage] if m.state in GOSSIPING and m.peer not in left_out]
        return tuple([member.peer for member in here if member.peer == me or meets(member)])  # in order of names

    def _left_out(self) -> set[PeerId]:
        """The stage's replicas whose packets were refused too often."""
        return self.acceptance.left_out() - {self._transport.peer_id}

    @property
    def _round_max(self) -> int:
        """One after the newest that the samples seen here complete."""
        return self._after(self._rounds.newest(self._samples_total(), self.stride))

    def _lost(self, peer: PeerId) -> None:
        """`peer` could not be reached: rounds go on without it until it says something new."""
        for member in self._swarm().stages[self._stage]:
            if member.peer == peer:
                self._gone[peer] = member.sequence

    async def beyond(self, round_index: int) -> None:
        """Wait until a later round than `round_index` is done."""
        async with self._met:
            await self._met.wait_for(lambda: self.done > round_index)

    async def _round(self, round_index: int) -> None:
        if self._manifest.gossip.method == "none":
            self.done = round_index
            async with self._met:
                self._met.notify_all()
            self.finished.set()
            return
        members = self._members(round_index)
        me = self._transport.peer_id
        size = self._manifest.gossip.group or None
        others, reason = partners(self._run_id, self._stage, round_index, members, me, size)
        fragment = round_index % self._manifest.gossip.fragments
        weight = 0.0 if self.newcomer and fragment not in self._received else 1.0
        samples = self._samples_here() - self._samples_before
        loop = asyncio.get_running_loop()
        begun, worked_s = loop.time(), self._compute.worked_s
        between = (begun - self._ended[0], worked_s - self._ended[1])
        self.standins.drop()
        draft = await self._compute.run(Priority.OUTER, 0, lambda: self._replica.draft(round_index))
        ours = Message(round_index, weight, samples, draft.tensors)
        came, why = await while_written(draft, self._meet_all(others, ours))
        reason = why or reason
        if came:
            self._pace.exchanged(loop.time() - begun, ours.nbytes * len(came))
        await self.standins.offer(ours)
        self._stepping = round_index
        took = await self._taking.take(
            self._tasks,
            ours,
            came,
            self.bequests.take(round_index, samples),
            self._to_ask(round_index, members, others),
            min(self._patience_s(ours), self._pace.seconds(self.left)),
            reason,
            others_here=any(m.peer != me and m.state in GOSSIPING for m in self._swarm().stages[self._stage]),
        )
        self._samples_before += samples
        self.done = round_index
        # Also after a lone step: where rounds are slow, a newcomer that waited for a pair stood by for minutes
        # (simulated: everything, seeds 102 and 104).
        self._received.add(fragment)
        if not self.newcomer or len(self._received) == self._manifest.gossip.fragments:
            self.newcomer, self._received = False, set()
        async with self._met:
            self._met.notify_all()  # whoever asks for this round is told that it is over
        self._ended = (loop.time(), self._compute.worked_s)
        within = (self._ended[0] - begun, self._ended[1] - worked_s)
        self._report(round_index, took, within, between)
        self.finished.set()

    def _to_ask(
        self, round_index: int, members: Sequence[PeerId], others: Sequence[PeerId]
    ) -> Callable[[], Sequence[PeerId]] | None:
        """Of a round's `members` those who may stand in for `others`, with whom we were to meet, if none comes."""
        me, against = self._transport.peer_id, self.acceptance.against
        if not others or not stands_in(self._manifest.gossip) or len({*members, me}) <= 1 + len(others):
            return None
        able = {*members} - {me, *others}
        return lambda: stand_ins(self._run_id, self._stage, round_index, me, able, against)[0]

    async def _meet_all(self, others: Sequence[PeerId], ours: Message) -> tuple[dict[PeerId, Packet], str]:
        """(the packets of those of `others` who came before the deadline, in their order; why the last one missing did
        not). Of every two members the one with the lower id calls; in a group all do at once."""
        found: dict[PeerId, Packet] = {}
        why = ""
        async with self._met:
            for other in others:
                if other < self._transport.peer_id:
                    self._meetings[other] = Meeting(ours.round_index, other, ours.tensors, ours.weight, ours.samples)
            self._met.notify_all()

        async def meet(other: PeerId) -> None:
            nonlocal why
            try:
                found[other] = await self._meet_one(other, ours)
            except (TimeoutError, RemoteFault, Unavailable) as error:
                late = f"did not come within {self._patience_s(ours):g} s"
                why = f"partner {short(other)}" + (f" {late}" if isinstance(error, TimeoutError) else f": {error}")
                if isinstance(error, RemoteFault):
                    self._lost(other)

        try:
            if len(others) == 1:
                await meet(others[0])
            else:
                async with asyncio.TaskGroup() as group:
                    for other in others:
                        group.create_task(meet(other))
        finally:
            self._meetings.clear()
        return {other: found[other] for other in others if other in found}, why

    def _patience_s(self, ours: Message) -> float:
        return ours.patience_s(self._manifest.limits.exchange_timeout_s)

    async def _meet_one(self, other: PeerId, ours: Message) -> Packet:
        """Raises TimeoutError, RemoteFault and Unavailable."""
        timeout_s = self._patience_s(ours)
        if (meeting := self._meetings.get(other)) is None:
            return await swap(self._transport, self._telemetry, self._run_id, self._stage, other, ours, timeout_s)
        try:
            async with asyncio.timeout(timeout_s):
                await self._await_call(meeting)
        except (TimeoutError, RemoteFault, Unavailable):
            if not meeting.over():
                raise
        assert meeting.packet is not None
        return meeting.packet

    async def _await_call(self, meeting: Meeting) -> None:
        """The responder's side: stand ready for a partner until it has called and committed."""
        # Who has not called when the next round is near goes by another view, or is at another round.
        rounds = self._after(meeting.round_index) - meeting.round_index
        round_s = self._pace.seconds(rounds * self._manifest.gossip.round_samples)
        verdict = meeting.said(max(PARTNER_PATIENCE_S, round_s))
        if not await patiently(self._transport, self._run_id, meeting.partner, verdict, PARTNER_PATIENCE_S):
            raise Unavailable("it gave the exchange up, or went on to a later round")

    async def serve_exchange(self, peer: PeerId, call: Call) -> Answer:
        """Handler of method "exchange". Waits a bounded time for our own boundary of that round. Raises Unavailable."""
        asked = call.header.exchange
        if asked.stage != self._stage:
            raise RemoteFault(f"exchange for stage {asked.stage} sent to a replica of stage {self._stage}")
        meeting = await self._meet(peer, asked.round)
        if meeting.packet is not None or meeting.verdict.done():
            raise Unavailable("already in this exchange, or it is over")
        meeting.packet = Packet(weight_of(asked), asked.samples, call.tensors, sender=peer)
        meeting.arrived.set()
        reply = wire.Exchanged(round=meeting.round_index, newcomer=meeting.weight == 0.0, samples=meeting.samples)
        return Answer(wire.Reply(exchanged=reply), meeting.tensors)

    async def _meet(self, peer: PeerId, round_index: int) -> Meeting:
        """Our side of the round `peer` asks for, once it is there."""
        async with self._met:
            while True:
                meeting = self._meetings.get(peer)
                if meeting is not None and meeting.round_index == round_index:
                    return meeting
                for other, met in self._meetings.items():
                    if met.round_index == round_index:
                        raise Unavailable(f"paired with {short(other)} in round {round_index}: another view")
                if self.done >= round_index:
                    raise Unavailable(f"round {round_index} is over here")
                if self._rounds.before(round_index, self.stride) != round_index:
                    raise Unavailable(f"round {round_index} is none of those met at here, every {self.stride}")
                if meeting is not None and round_index > meeting.round_index:
                    meeting.end(False)  # we wait for its call of a round that it has left behind
                if round_index > self._round_max:
                    raise Unavailable(f"round {round_index} is beyond {self._round_max}, the next one here")
                await self._met.wait()

    async def serve_commit(self, peer: PeerId, call: Call) -> Answer:
        """Handler of method "commit": the caller has our packet, so we may apply its own."""
        commit = call.header.commit
        meeting = self._meetings.get(peer)
        good = meeting is not None and meeting.round_index == commit.round and meeting.packet is not None
        if meeting is None or not good or meeting.verdict.done():
            raise Unavailable(f"no exchange of round {commit.round} with you is open here")
        meeting.end(commit.apply)
        return Answer(wire.Reply(committed=wire.Committed()))

    def _sent_since(self) -> int:
        """Bytes that rounds cost since this was last asked; receipts, sent on the side, may count in the next."""
        by_method = self._transport.bytes_by_method()
        before, self._sent = self._sent, sum(by_method.get((method, "sent"), 0) for method in METHODS)
        return self._sent - before

    def _report(self, round_index: int, took: Took, within: tuple[float, float], between: tuple[float, float]) -> None:
        """`within` this round and `between` the last one and it: seconds, and of these those the device worked."""
        outcome = "paired" if took.met else "lone"
        self._telemetry.count(name.ROUNDS)
        self._telemetry.count(name.EXCHANGES, outcome=outcome)
        self._telemetry.observe(name.EXCHANGE_SECONDS, within[0])
        self._telemetry.gauge(name.ROUND, float(round_index))
        self._telemetry.event(
            f"exchange.{outcome}",
            round=round_index,
            **took.fields(),
            seconds=round(within[0], 4),
            worked_s=round(within[1], 4),
            between_s=round(between[0], 4),
            between_worked_s=round(between[1], 4),
            sent_bytes=self._sent_since(),
            samples_total=self._samples_total(),
        )
        if len(took.met) > 1:
            self._telemetry.event("exchange.group", round=round_index, peers=list(took.met))
