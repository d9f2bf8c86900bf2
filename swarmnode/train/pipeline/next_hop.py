"""Send a microbatch to the next stage and repair failures there: each hop still holds what it sent, so it owns the
retry."""

from __future__ import annotations

import asyncio
import itertools
import math
from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial

from swarmnode.base.ema import Ema
from swarmnode.base.errors import (
    Broken,
    Busy,
    MicrobatchLost,
    PeerTimeout,
    Refused,
    RemoteFault,
    StartAnew,
    Unavailable,
)
from swarmnode.base.ids import PeerId, RunId, machine_of, part_id, short, stage_name
from swarmnode.base.metrics import name
from swarmnode.base.ports import Answer, Call, Telemetry, Transport, WireTensor
from swarmnode.base.wire import call_pb2 as wire
from swarmnode.data.sample import counted_targets
from swarmnode.net.membership.judge import TensorFingerprints
from swarmnode.net.membership.liveness import SMALL_CALL_S, LivenessWatch, ping_fault
from swarmnode.net.membership.swarm import Member, Swarm
from swarmnode.run.manifest import LimitsSpec, Manifest, boundary_codes
from swarmnode.train.pipeline.route import Router
from swarmnode.train.pipeline.span import entries

WAIT_MIN_S = 0.005  # guess: without a hint, a Busy peer is not asked again sooner
WAIT_MAX_S = 0.5  # guess: wait before looking at the replicas again
# Share of the time left that the next hop may use; the rest is for our own backward. Guess: for the last hop. If all of
# eight stages took as much, the last would have half of the time (simulated: simulate-1000, a half hour of work lost in
# its sixtieth minute).
FINISH_SHARE = 0.9
# Share of the wait for an uplink that counts as queueing. A machine limited by its uplink keeps it busy only if more is
# queued for it than for its compute thread, which needs one piece at a time (simulated: home-8b without faults, samples
# a second after the first 40 minutes: counted whole 7.9, half 8.5, not at all 8.8 with all windows at their maximum).
LINE_SHARE = 0.5
# Guess: a machine does the next stage itself unless another is so many times as fast: a hop costs line and time, and
# where stages are equally fast all queues are alike. Less, and it would send out what others send in.
ESCAPE = 3.0
REPLY_SLACK_BYTES = 4096


# When a hop pings the peer it waits for, and when it gives the microbatch to another replica. Pure.
#
# A microbatch is moved, never duplicated: two replicas working on it would both add its gradient, and the later one
# cannot take it back. (One replica counts a microbatch once, but two replicas, and the replicas behind them, count it
# twice.) So the first call is cancelled before the second is made. The cancellation follows the same calls, and only a
# replica whose device has begun to add the gradient completes it. That one, and the finished replicas behind it, count
# twice: the second replica cannot know them.
#
# A microbatch is moved when its peer is far later than expected, not because its deadline is near. Moving by deadline
# cost more work than it saved with slow hops (simulated: calm, seed 7: 76 done and 8 lost instead of 95 and none).

# What is late: a peer is pinged then, a place reserved for a microbatch is free again, no step waits for a gradient.
LATE_FACTOR = 4.0  # guess: of the time expected
LIMIT_MAX_S = 86_400.0  # as the manifest's, at most
GRAY_FACTOR = 2.0  # guess: a peer so many times later still, though it answers pings, does not do its work


# Ask replicas for a free place before sending a microbatch, one after the other.
#
# In a large swarm a router sends each replica one microbatch in minutes, and cannot know what others send there. By
# chance some replicas queue while others are idle. So it asks the chosen replica, and the next one if work is queued
# there, up to ASKED_MAX ("threshold" of Eager, Lazowska and Zahorjan, Adaptive load sharing in homogeneous distributed
# systems, 1986). A replica that grants a place counts it as work at once. Otherwise all concurrent askers would find it
# idle.

READY_AHEAD = 1  # the piece in work
# Simulated: thousand, 20 minutes, seed 0; more microbatches than without asking: 2 asked 10 %, 3 19, 4 24, 8 32.
ASKED_MAX = 4
WORTH = 20.0  # guess: ask only if a microbatch takes so many times as long as asking
WORTH_MIN_S = 1.0  # guess: for shorter microbatches nobody is asked; routers learn enough from the answers
ASKING_S = 0.2  # guess: until the first answer; with 0, home-links trains 1.7 % less in its first minute [simulated]
UNHEARD_AHEAD = 1 << 20  # for a replica that did not answer in time: chosen only if all others did not either
SLACK_S = 1.0  # guess: for what a time limit does not count; also so that we give up before the transport does
HOLD_MAX_S = LimitsSpec().microbatch_timeout_s  # derived: after it the microbatch is given up


class Reservations:
    """A replica's reservations: announced work counts as queued."""

    def __init__(self, waiting: Callable[[], int]) -> None:
        """`waiting`: pieces of work here, including the running one, and bulk messages queued on our uplink."""
        self._waiting = waiting
        self._until_s: dict[PeerId, float] = {}  # expiry of each caller's reservation, in loop time

    def serve(self, peer: PeerId, call: Call) -> Answer:
        """Handler of method "reserve"."""
        now_s = asyncio.get_running_loop().time()
        self._until_s = {other: until_s for other, until_s in self._until_s.items() if until_s > now_s}
        ahead = self._waiting() + len(self._until_s)
        granted = ahead <= READY_AHEAD
        if granted:
            self._until_s[peer] = now_s + min(HOLD_MAX_S, call.header.reserve.hold_ms / 1000.0)
        return Answer(wire.Reply(reserved=wire.Reserved(granted=granted, ahead=ahead)))

    def on_arrival(self, peer: PeerId) -> None:
        """Drop the reservation of `peer`: its microbatch has arrived and counts as ordinary work."""
        self._until_s.pop(peer, None)


class ReservationClient:
    """A sender's side of reservations: asks replicas whether they are idle."""

    def __init__(self, run_id: str, transport: Transport, telemetry: Telemetry) -> None:
        self._run_id = run_id
        self._transport = transport
        self._telemetry = telemetry
        self._asking = Ema()  # seconds until an answer
        self.transit = Ema()  # seconds from sending a microbatch until it arrives, our uplink's queue included

    def worth_it(self, router: Router, peer: PeerId, samples: int) -> bool:
        """Whether asking costs little compared with a microbatch of `samples`."""
        asking_s = self._asking.value if self._asking.known else ASKING_S
        return len(router) > 1 and router.seconds(peer, samples) >= max(WORTH_MIN_S, WORTH * asking_s)

    async def ask(self, peer: PeerId, left_s: float) -> int | None:
        """Pieces of work ahead of our microbatch at `peer`; None if a place was granted. Waits at most SMALL_CALL_S and
        `left_s`. Raises RemoteFault if `peer` cannot be reached, Unavailable if it serves no microbatches."""
        loop = asyncio.get_running_loop()
        begun_s = loop.time()
        timeout_s = max(0.0, min(SMALL_CALL_S, left_s))
        hold_s = min(HOLD_MAX_S, SLACK_S + LATE_FACTOR * self.transit.value)
        request = wire.Request(run_id=self._run_id, reserve=wire.Reserve(hold_ms=int(1000.0 * hold_s)))
        try:
            answer = await self._transport.call(peer, Call(request), timeout_s=timeout_s, reply_bytes_max=0)
        except PeerTimeout:
            self._telemetry.count(name.RESERVATIONS, outcome="unheard")
            return UNHEARD_AHEAD
        except Refused:
            return None  # an older version that does not know the method
        self._asking.add(loop.time() - begun_s)
        reserved = answer.header.reserved
        self._telemetry.count(name.RESERVATIONS, outcome="granted" if reserved.granted else "full")
        return None if reserved.granted else reserved.ahead


class RoundTrip:
    """The time limit of a microbatch, there and back: TCP's retransmission timer (RFC 6298, section 2: mean plus four
    deviations), with the manifest's time as minimum. Before the first completion it doubles with each loss, as in TCP,
    so nobody must know in advance how long a large model takes on home machines."""

    def __init__(self, least_s: float) -> None:
        self._least_s = least_s
        self.seconds = self._deviation_s = 0.0  # smoothed seconds of a microbatch, there and back; 0 before the first
        self._known = False
        self._grown_s = -math.inf  # when it was last doubled

    @property
    def limit_s(self) -> float:
        """Time limit in seconds of a microbatch started now."""
        return min(LIMIT_MAX_S, max(self._least_s, self.seconds + 4.0 * self._deviation_s))

    def record_trip(self, seconds: float) -> None:
        """Record a completed microbatch."""
        if not self._known:
            self._known = True
            self.seconds = seconds
            self._deviation_s = seconds / 2.0
        else:
            self._deviation_s += (abs(seconds - self.seconds) - self._deviation_s) / 4.0
            self.seconds += (seconds - self.seconds) / 8.0

    def record_loss(self, begun_s: float, now_s: float) -> None:
        """Record a microbatch, begun at `begun_s`, that missed its limit. Of those begun under one limit only the first
        counts."""
        if not self._known and begun_s >= self._grown_s:
            self._least_s = min(LIMIT_MAX_S, 2.0 * self._least_s)
            self._grown_s = now_s


@dataclass(frozen=True, slots=True)
class HopTimeout:
    """`ping_s`: wait before pinging the peer. `give_up_s`: wait before trying another replica. `blames`: giving up is
    the peer's fault."""

    ping_s: float
    give_up_s: float
    blames: bool


def hop_timeout(
    expected_s: float, hops: int, minimum_s: float, left_s: float, others: bool, *, known: bool = True
) -> HopTimeout:
    """Timeouts for a peer expected to need `expected_s` itself, `hops` before the last stage, with `left_s` to the
    microbatch's deadline.

    `others`: another replica could take it. `known`: the expectation comes from the peer's own answers, else from
    others'. Hops nearer the end give up first, because they repair their own next hop.
    """
    ping_s = max(minimum_s, LATE_FACTOR * expected_s * hops)
    # Nothing is known of a peer before its first answer, so only the deadline counts.
    gray_s = (GRAY_FACTOR + hops) * ping_s if known and expected_s > 0.0 else float("inf")
    give_up_s = min(gray_s, left_s) if others else left_s
    return HopTimeout(ping_s, give_up_s, give_up_s >= gray_s)


@dataclass(slots=True)
class MicrobatchResult:
    """Result of a microbatch: the gradient of what was sent, and the report of the stages it visited."""

    gradient: WireTensor | None
    loss_sum: float
    tokens: int
    path: list[str] = field(default_factory=list)
    retries: int = 0
    peer: PeerId | None = None
    report: wire.Processed | None = None  # from `peer`
    prints: TensorFingerprints | None = None  # fingerprints of our own hop's tensors, if answers are signed
    onward_s: float = 0.0  # wait for the later stages, without our own sending time
    sent_s: float = 0.0  # until our uplink had sent the microbatch to `peer`
    queued_s: float = 0.0  # wait for compute threads and free replicas, there and back; for uplinks by LINE_SHARE


class NextHop:
    """Sends microbatches to the next stage and repairs failures there."""

    def __init__(
        self,
        run_id: RunId,
        transport: Transport,
        routers: Sequence[Router],
        telemetry: Telemetry,
        manifest: Manifest,
        swarm: Callable[[], Swarm] | None = None,
    ) -> None:
        """`passed_over`: replicas of a stage that do not get the next microbatch, in training (True) or validation.
        `swarm`: who is there; asked where machines may serve several stages."""
        self._run_id = run_id
        self._swarm = swarm if manifest.pipeline.span_max > 1 else None
        self.transport = transport
        self._routers = routers
        self.passed_over: Callable[[int, bool], Collection[PeerId]] = lambda stage, train: ()
        self._telemetry = telemetry
        self._limits = manifest.limits
        self._document_end = manifest.data.document_end
        self._gradient_code = boundary_codes(manifest.pipeline.boundary)[1]
        self._watches: dict[PeerId, dict[LivenessWatch, None]] = {}  # calls waiting for each peer
        self._reserving = ReservationClient(run_id, transport, telemetry)
        self._usual: dict[int, Ema] = {}  # seconds from each stage to the last and back

    async def send(self, process: wire.Process, y: WireTensor, tokens: WireTensor, deadline: float) -> MicrobatchResult:
        """Send `y` to the stage at `process.position` and wait for its gradient until loop time `deadline`.

        Raises MicrobatchLost if no replica could do it in time.
        """
        loop = asyncio.get_running_loop()
        stage = process.itinerary[process.position]
        router = self._routers[stage]
        begun = loop.time()
        retries = 0
        no_room_s = 0.0
        tried = set[PeerId]()
        reason = "deadline passed"
        while (left_s := deadline - loop.time()) > 0:
            without = {*tried, *self.passed_over(stage, process.purpose == wire.PURPOSE_TRAIN)}
            peer, choice = await self._choose(stage, process.samples, without, deadline)
            asked_at = loop.time()
            if peer is None:
                reason = f"{stage_name(stage)}: {choice}" + (f"; last: {reason}" if tried else "")
                tried.clear()
                await asyncio.sleep(min(left_s, max(WAIT_MIN_S, min(WAIT_MAX_S, router.ready_in_s(asked_at)))))
                no_room_s += loop.time() - asked_at
                continue
            try:
                others = router.able(loop.time(), {*without, peer})
                ask = partial(self._ask, peer, router, process, y, tokens, deadline, others)
                outcome = await self._once_more(peer, ask, deadline)
                outcome.retries += retries
                outcome.queued_s += no_room_s
                outcome.onward_s = loop.time() - begun - outcome.sent_s
                if self._swarm is not None and peer == self._mate(stage) and outcome.report is not None:
                    outcome.onward_s = _within(outcome.report.onward_s, outcome.onward_s)  # its time is our machine's
                self.record_latency(stage, loop.time() - begun)
                return outcome
            except (Unavailable, RemoteFault) as error:
                self._refused(peer, stage, error, loop.time() - asked_at)
                reason = str(error)
                if isinstance(error, Busy):
                    continue
                if isinstance(error, StartAnew) and not router.able(loop.time(), {*tried, peer}):
                    raise
            tried.add(peer)
            retries += 1
            if (usual := self._usual.get(stage)) and deadline - loop.time() < usual.value:
                break  # the feeder starts anew: work until the deadline would be wasted
            self._telemetry.count(name.MICROBATCHES, outcome="retried")
        raise MicrobatchLost(f"no route to {stage_name(stage)} in time: {reason}")

    def _pick(self, stage: int, samples: int, tried: Collection[PeerId]) -> tuple[PeerId | None, str]:
        """The router's choice for `stage`, of the replicas that begin a span there as long as one of them can take it:
        the others get their microbatches from the stage before on their own machine (train/pipeline/span.py)."""
        router = self._routers[stage]
        now = asyncio.get_running_loop().time()
        if self._swarm is not None and (inner := self._entries(stage)[1]):
            peer, choice = router.choose(now, samples, {*tried, *inner})
            if peer is not None:
                return peer, choice
        return router.choose(now, samples, tried)

    def _entries(self, stage: int) -> tuple[list[Member], frozenset[PeerId]]:
        """(the replicas of `stage` that begin a span there, the peer ids of the others)."""
        if self._swarm is None or not stage:
            return [], frozenset()
        swarm = self._swarm()
        return entries(swarm.stages[stage - 1], swarm.stages[stage])

    def _mate(self, stage: int) -> PeerId:
        """The id that this machine has at `stage`, if it serves that stage."""
        own = machine_of(self.transport.peer_id)
        part = part_id(own, stage)
        return part if part in self._routers[stage] else own

    def _keeps(self, mate: PeerId, stage: int, samples: int, tried: Collection[PeerId]) -> bool:
        """Whether the microbatch goes to `mate`, this machine's own replica of `stage`: unless that one is ESCAPE times
        as slow, for a stage, as another machine whose span begins there."""
        router = self._routers[stage]
        now = asyncio.get_running_loop().time()
        if mate in tried or not router.takes(mate, now):
            return False
        heads = [head for head in self._entries(stage)[0] if head.peer not in tried and router.takes(head.peer, now)]
        least_s = min((router.seconds(head.peer, samples) / head.span for head in heads), default=math.inf)
        return router.seconds(mate, samples) <= ESCAPE * least_s * self._left(stage)

    def _left(self, stage: int) -> int:
        """Consecutive stages that this machine serves from `stage` on, which it does."""
        own = machine_of(self.transport.peer_id)
        later = () if self._swarm is None else self._swarm().stages[stage + 1 :]
        ours = (any(machine_of(member.peer) == own for member in members) for members in later)
        return 1 + sum(itertools.takewhile(bool, ours))

    async def _choose(
        self, stage: int, samples: int, tried: Collection[PeerId], deadline: float
    ) -> tuple[PeerId | None, str]:
        """The replica of `stage` to use: one on this machine first. If a microbatch takes long, a few replicas are
        asked: the first that is idle, else the one that would finish first. None if `deadline` passes meanwhile."""
        loop = asyncio.get_running_loop()
        router = self._routers[stage]
        if self._swarm is not None and self._keeps(mate := self._mate(stage), stage, samples, tried):
            return mate, "on this machine"
        peer, choice = self._pick(stage, samples, tried)
        charged: dict[PeerId, float] = {}  # peer asked -> seconds charged
        ahead: dict[PeerId, float] = {}  # peer with queued work -> seconds until ours would be done
        # Once one replica was asked, the others are too, however short their work: an answer is compared with answers.
        while peer is not None and (charged or self._reserving.worth_it(router, peer, samples)):
            # The router has charged the choice to the peer's queue; what is not sent there is given back below.
            charged[peer] = seconds = router.seconds(peer, samples)
            asked_at = loop.time()
            try:
                waits = await self._reserving.ask(peer, deadline - loop.time())
                if waits is None:
                    break  # idle, and the place is ours: no other can be sooner
                ahead[peer] = (1 + waits) * seconds
            except (Unavailable, RemoteFault) as error:
                self._refused(peer, stage, error, loop.time() - asked_at)
            peer = None  # else the last one asked would be taken, not the best
            if len(charged) < ASKED_MAX:
                peer, choice = self._pick(stage, samples, {*tried, *charged})
        if peer is None and ahead:
            peer = min(ahead, key=ahead.__getitem__)
            choice = f"the least of {len(ahead)}"
        # Whoever is chosen now could not finish; the caller must hear of the deadline, not blame a peer.
        if charged and deadline <= loop.time():
            peer = None
            choice = "the deadline passed while replicas were asked"
        for other, seconds in charged.items():
            if other != peer:
                router.refund(other, seconds)
        return peer, choice

    def _refused(self, peer: PeerId, stage: int, error: Unavailable | RemoteFault, lost_s: float) -> None:
        """Handle the refusal or failure of `peer` to take a microbatch, known after `lost_s`."""
        router = self._routers[stage]
        now = asyncio.get_running_loop().time()
        router.unknown.record_stage_refusal(now)
        if isinstance(error, Unavailable):
            router.record_refusal(peer, lost_s)
        if isinstance(error, Busy):
            router.delay(peer, now + max(WAIT_MIN_S, error.retry_after_s))
        elif isinstance(error, Unavailable):
            # A refusal brings no record. Until the next look a mover would be asked every few ms while the others of
            # its stage are busy (simulated: swarm48, seed 0, hour 10: 6,000 times).
            router.delay(peer, now + max(WAIT_MAX_S, error.retry_after_s))
        elif isinstance(error, Refused):
            # The fault may be ours, but a peer that refuses everything must not be asked each time, and one that never
            # did anything else ever more rarely.
            if router.expected_s(peer, 1) is None:
                router.ban(peer, now, lost_s=lost_s)
            else:
                router.delay(peer, now + WAIT_MAX_S)
            self._telemetry.count(name.PEER_FAULTS, kind="refused")
            self._telemetry.event("microbatch.refused", level="warning", peer=peer, reason=str(error))
        else:
            self.blame(peer, stage, error, lost_s)

    def record_latency(self, stage: int, seconds: float) -> None:
        """Record the seconds from `stage` to the last stage and back."""
        self._usual.setdefault(stage, Ema()).add(seconds)

    def doubt(self, peers: Iterable[PeerId]) -> None:
        """Have every call that waits for one of the silent `peers` ping it at once."""
        for peer in peers:
            for watch in list(self._watches.get(peer, ())):
                watch.doubt()

    def blame(self, peer: PeerId, stage: int, fault: RemoteFault, lost_s: float = 0.0) -> None:
        """Ban `peer` after a fault, which cost `lost_s`: it gets no microbatch until it is heard of again."""
        now = asyncio.get_running_loop().time()
        banned_s = self._routers[stage].ban(peer, now, lost_s=lost_s)
        self._telemetry.count(name.PEER_FAULTS, kind="broken")
        self._telemetry.event(
            "peer.banned", level="warning", peer=peer, stage_of_peer=stage, seconds=banned_s, reason=str(fault)
        )

    async def _once_more(
        self, peer: PeerId, ask: Callable[[], Awaitable[MicrobatchResult]], deadline: float
    ) -> MicrobatchResult:
        """Run `ask`, and once again if only the connection broke: a living peer may have added the gradient and returns
        it again, while another replica would add its own."""
        try:
            return await ask()
        except Broken:
            silent = await ping_fault(self.transport, self._run_id, peer)
            if silent is not None or asyncio.get_running_loop().time() >= deadline:
                raise
        self._telemetry.count(name.MICROBATCHES, outcome="retried")
        outcome = await ask()
        outcome.retries += 1
        return outcome

    async def _ask(
        self,
        peer: PeerId,
        router: Router,
        process: wire.Process,
        y: WireTensor,
        tokens: WireTensor,
        deadline: float,
        others: bool,
    ) -> MicrobatchResult:
        loop = asyncio.get_running_loop()
        left_s = max(0.0, deadline - loop.time())
        hops = len(process.itinerary) - process.position
        own_s = router.expected_s(peer, process.samples)
        # With many replicas each is new: pinged after the minimum, a quarter as many pings as microbatches were sent
        # (simulated: thousand).
        expected_s = own_s if own_s is not None else router.typical_s(process.samples)
        known = own_s is not None
        waits = hop_timeout(expected_s, hops, self._limits.hop_timeout_min_s, left_s, others, known=known)
        next_hop = wire.Process()
        next_hop.CopyFrom(process)
        next_hop.deadline_ms = int(left_s * FINISH_SHARE ** (1.0 / hops) * 1000)
        sent_at = loop.time()
        call = self.transport.call(
            peer,
            Call(wire.Request(run_id=self._run_id, process=next_hop), (y, tokens)),
            timeout_s=left_s + SLACK_S,
            reply_bytes_max=y.nbytes + REPLY_SLACK_BYTES,
        )
        watch = LivenessWatch(self.transport, self._run_id, peer, waits.ping_s)
        watches = self._watches.setdefault(peer, {})
        watches[watch] = None
        try:
            answer = await watch.over(call, waits.give_up_s)
        except TimeoutError:
            reason = f"{short(peer)} has not done the microbatch in {waits.give_up_s:.1f} s"
            if waits.blames or router.late(peer):
                raise PeerTimeout(f"{reason}, though it answers pings") from None
            self._telemetry.event("microbatch.moved", peer=peer, others=others, reason=reason)
            raise Unavailable(reason) from None
        finally:
            del watches[watch]
            if not watches:
                del self._watches[peer]
        report = _report(answer.header.processed, counted_targets(tokens, self._document_end), peer)
        train = process.purpose == wire.PURPOSE_TRAIN
        gradient = _gradient(answer.tensors, y, self._gradient_code, peer) if train and process.position else None
        seconds = loop.time() - sent_at
        own_s = seconds - answer.waited_s - _within(report.onward_s, seconds - answer.waited_s)
        coming_in_s = _within(report.received_s, own_s)
        sent_s = answer.waited_s
        self._reserving.transit.add(sent_s + coming_in_s)
        if train:
            sent_s += router.record_answer(peer, process.samples, own_s, coming_in_s)
        return MicrobatchResult(
            gradient,
            report.loss_sum,
            report.tokens,
            list(report.path),
            report.retries,
            peer,
            report,
            sent_s=sent_s,
            queued_s=_within(report.queued_s, seconds)
            + LINE_SHARE * (answer.waited_s + _within(answer.header.waited_s, seconds)),
        )


def onward(process: wire.Process) -> wire.Process:
    """`process` as the next stage of its itinerary gets it."""
    request = wire.Process()
    request.CopyFrom(process)
    request.position += 1
    request.mark_position = request.position
    return request


def _within(said_s: float, most_s: float) -> float:
    """The seconds a peer reports, capped at `most_s`; 0 if not positive or NaN. A NaN would stay in every average, and
    the router could no longer compare peers."""
    return min(said_s, most_s) if said_s > 0.0 else 0.0


def _report(report: wire.Processed, due: int, peer: PeerId) -> wire.Processed:
    """Return `report`, or raise RemoteFault for a loss that no microbatch with `due` counted targets has: it would stay
    in the run's displayed loss."""
    if not (report.tokens == due and 0.0 <= report.loss_sum < math.inf and (due or not report.loss_sum)):
        raise RemoteFault(
            f"peer {short(peer)} answered with a loss of {report.loss_sum} nats over {report.tokens} tokens; "
            f"expected a finite loss over {due}"
        )
    return report


def _gradient(tensors: Sequence[WireTensor], y: WireTensor, code: str, peer: PeerId) -> WireTensor:
    """The gradient of the activations `y`, in `code` if these are coded. Raises RemoteFault."""
    codec = "raw" if y.codec == "raw" else code
    if len(tensors) != 1:
        raise RemoteFault(
            f"peer {short(peer)} answered a microbatch with {len(tensors)} tensors; expected one gradient"
        )
    gradient = tensors[0]
    if gradient.shape != y.shape or gradient.dtype != y.dtype or gradient.codec != codec:
        found = f"{gradient.codec[:16]} {gradient.dtype}{list(gradient.shape)}"
        due = f"{codec} {y.dtype}{list(y.shape)}"
        raise RemoteFault(f"peer {short(peer)} answered with a gradient {found}; {due} is due")
    return gradient
