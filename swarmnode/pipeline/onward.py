"""The way to the next stage: each hop owns the repair of the next: it still holds what it sent (design section 3)."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial

from swarmnode.errors import Broken, Busy, MicrobatchLost, PeerTimeout, Refused, RemoteFault, Unavailable
from swarmnode.ids import PeerId, short
from swarmnode.manifest import LimitsSpec
from swarmnode.membership.liveness import Watch, late
from swarmnode.metrics import name
from swarmnode.pipeline.patience import patience
from swarmnode.pipeline.reserve import ASKED_MAX, Reserving
from swarmnode.pipeline.route import Ema, Router
from swarmnode.pipeline.statement import Prints
from swarmnode.ports import Call, Telemetry, Transport, WireTensor
from swarmnode.wire import call_pb2 as wire

WAIT_MIN_S = 0.005  # guess: a Busy answer without a hint is not asked again sooner
WAIT_MAX_S = 0.5  # guess: how long to wait before looking at the replicas again
# Share of the time left that the next hop may use; the rest is for our own backward. Guess: for the last hop; of eight
# stages, were it as much for each, the last would have half of the time (simulated: simulate-1000, a half hour of work
# lost in its sixtieth minute).
FINISH_SHARE = 0.9
HOPELESS_SHARE = 0.5  # guess: of the time that the way onward takes; with less left nobody else is asked
# Of a wait for a line, so much counts as time in queues. A machine whose line is the limit keeps it busy only if more
# waits for it than for its compute thread, of which one at a time is enough (simulated: home-8b without faults, samples
# a second after the first 40 minutes: counted whole 7.9, half 8.5, not at all 8.8 with all windows at their maximum).
LINE_SHARE = 0.5
REPLY_SLACK_BYTES = 4096
TIMEOUT_SLACK_S = 1.0  # guess: we give up before the transport does


@dataclass(slots=True)
class Carried:
    """What came back for a microbatch: the gradient of what was sent, and the report of the stages it went through."""

    gradient: WireTensor | None
    loss_sum: float
    tokens: int
    path: list[str] = field(default_factory=list)
    retries: int = 0
    peer: PeerId | None = None
    report: wire.Processed | None = None  # of `peer`
    prints: Prints | None = None  # of our own hop's tensors, where answers are signed
    onward_s: float = 0.0  # waited for the later stages, without the time in which we sent
    sent_s: float = 0.0  # until our line had carried the microbatch to `peer`
    queued_s: float = 0.0  # waited for compute threads and replicas with room, there and back; for lines by LINE_SHARE


class Onward:
    """Carries microbatches to the next stage and repairs what breaks there."""

    def __init__(
        self, run_id: str, transport: Transport, routers: Sequence[Router], telemetry: Telemetry, limits: LimitsSpec
    ) -> None:
        self._run_id = run_id
        self._transport = transport
        self._routers = routers
        self._telemetry = telemetry
        self._limits = limits
        self._watches: dict[PeerId, dict[Watch, None]] = {}  # over what waits for each peer
        self._reserving = Reserving(run_id, transport, telemetry)
        self._usual: dict[int, Ema] = {}  # seconds that the way from each stage on takes, there and back

    @property
    def line_queue(self) -> int:
        """Messages of bulk that wait for their turn on this node's line."""
        return self._transport.line_queue

    async def send(self, process: wire.Process, y: WireTensor, tokens: WireTensor, deadline: float) -> Carried:
        """Carry `y` to the stage after `process.position` and wait for its gradient until loop time `deadline`.

        Raises MicrobatchLost when no replica could do it in time.
        """
        loop = asyncio.get_running_loop()
        stage = process.itinerary[process.position + 1]
        router = self._routers[stage]
        begun, retries, no_room_s, tried = loop.time(), 0, 0.0, set[PeerId]()
        reason = "deadline passed"
        while (left_s := deadline - loop.time()) > 0:
            peer, choice = await self._choose(stage, process.samples, tried, deadline)
            if peer is None:
                reason = f"stage {stage}: {choice}" + (f"; last: {reason}" if tried else "")
                tried.clear()
                asked = loop.time()
                await asyncio.sleep(min(left_s, max(WAIT_MIN_S, min(WAIT_MAX_S, router.ready_in_s(asked)))))
                no_room_s += loop.time() - asked
                continue
            try:
                others = router.able(loop.time(), {*tried, peer})
                ask = partial(self._ask, peer, router, process, y, tokens, deadline, others)
                carried = await self._once_more(peer, ask, deadline)
                carried.retries += retries
                carried.queued_s += no_room_s
                carried.onward_s = loop.time() - begun - carried.sent_s
                self.took(stage, loop.time() - begun)
                return carried
            except (Unavailable, RemoteFault) as error:
                self._refused(peer, stage, error)
                reason = str(error)
                if isinstance(error, Busy):
                    continue
            tried.add(peer)
            retries += 1
            if (usual := self._usual.get(stage)) and deadline - loop.time() < HOPELESS_SHARE * usual.value:
                break  # its feeder begins anew: what others did until the deadline would be done for nothing
            self._telemetry.count(name.MICROBATCHES, outcome="retried")
        raise MicrobatchLost(f"no way to stage {stage} in time: {reason}")

    async def _choose(
        self, stage: int, samples: int, tried: Collection[PeerId], deadline: float
    ) -> tuple[PeerId | None, str]:
        """The replica of `stage` whose turn it is; where a microbatch takes long, the first of a few at which nothing
        waits, or the one that would be at it first. Nobody when `deadline` passes meanwhile."""
        loop, router = asyncio.get_running_loop(), self._routers[stage]
        peer, choice = router.choose(loop.time(), samples, tried)
        charged: dict[PeerId, float] = {}  # those asked: seconds
        ahead: dict[PeerId, float] = {}  # of them who have something to do: seconds until ours would be done
        while peer is not None and (charged or self._reserving.worth_it(router, peer, samples)):
            charged[peer] = seconds = router.seconds(peer, samples)
            try:
                waits = await self._reserving.ask(peer, deadline - loop.time())
                if waits is None:
                    break
                ahead[peer] = (1 + waits) * seconds
            except (Unavailable, RemoteFault) as error:
                self._refused(peer, stage, error)
            peer = None
            if len(charged) < ASKED_MAX:
                peer, choice = router.choose(loop.time(), samples, {*tried, *charged})
        if peer is None and ahead:
            peer, choice = min(ahead, key=ahead.__getitem__), f"the least of {len(ahead)}"
        if charged and deadline <= loop.time():
            peer, choice = None, "the deadline passed while replicas were asked"
        for other, seconds in charged.items():
            if other != peer:
                router.refund(other, seconds)
        return peer, choice

    def _refused(self, peer: PeerId, stage: int, error: Unavailable | RemoteFault) -> None:
        """`peer` will not or cannot take a microbatch now."""
        router, now = self._routers[stage], asyncio.get_running_loop().time()
        if isinstance(error, Busy):
            router.delay(peer, now + max(WAIT_MIN_S, error.retry_after_s))
        elif isinstance(error, Unavailable):
            # A refusal brings no record: until the next look a mover would be asked every few ms while the others of
            # its stage are busy (simulated: swarm48, seed 0, hour 10: 6,000 times).
            router.delay(peer, now + max(WAIT_MAX_S, error.retry_after_s))
        elif isinstance(error, Refused):
            # The fault may be ours; but one that refuses everything must not be asked each time.
            router.delay(peer, now + WAIT_MAX_S)
            self._telemetry.count(name.PEER_FAULTS, kind="refused")
            self._telemetry.event("microbatch.refused", level="warning", peer=peer, reason=str(error))
        else:
            self.blame(peer, stage, error)

    def took(self, stage: int, seconds: float) -> None:
        """The way from `stage` on, there and back."""
        self._usual.setdefault(stage, Ema()).add(seconds)

    def doubt(self, peers: Iterable[PeerId]) -> None:
        """`peers` went silent: who waits for one of them asks at once whether it lives."""
        for peer in peers:
            for watch in list(self._watches.get(peer, ())):
                watch.doubt()

    def blame(self, peer: PeerId, stage: int, fault: RemoteFault) -> None:
        """`peer` broke: no microbatch goes there until it is heard of again."""
        banned_s = self._routers[stage].ban(peer, asyncio.get_running_loop().time())
        self._telemetry.count(name.PEER_FAULTS, kind="broken")
        self._telemetry.event(
            "peer.banned", level="warning", peer=peer, stage_of_peer=stage, seconds=banned_s, reason=str(fault)
        )

    async def _once_more(self, peer: PeerId, ask: Callable[[], Awaitable[Carried]], deadline: float) -> Carried:
        """`ask`, again where only the connection broke: who lives may have added the gradient, and gives it again;
        another would add its own."""
        try:
            return await ask()
        except Broken:
            silent = await late(self._transport, self._run_id, peer)
            if silent is not None or asyncio.get_running_loop().time() >= deadline:
                raise
        self._telemetry.count(name.MICROBATCHES, outcome="retried")
        carried = await ask()
        carried.retries += 1
        return carried

    async def _ask(
        self,
        peer: PeerId,
        router: Router,
        process: wire.Process,
        y: WireTensor,
        tokens: WireTensor,
        deadline: float,
        others: bool,
    ) -> Carried:
        loop = asyncio.get_running_loop()
        left_s = deadline - loop.time()
        hops = len(process.itinerary) - process.position - 1
        own_s = router.expected_s(peer, process.samples)
        # Where replicas are many each is new: pinged by the minimum, a quarter as many pings as microbatches went
        # (simulated: thousand).
        expected_s = own_s if own_s is not None else router.typical_s(process.samples)
        known = own_s is not None
        waits = patience(expected_s, hops, self._limits.hop_timeout_min_s, left_s, others, known=known)
        onward = wire.Process()
        onward.CopyFrom(process)
        onward.position += 1
        onward.deadline_ms = int(left_s * FINISH_SHARE ** (1.0 / hops) * 1000)
        sent_at = loop.time()
        call = self._transport.call(
            peer,
            Call(wire.Request(run_id=self._run_id, process=onward), (y, tokens)),
            timeout_s=left_s + TIMEOUT_SLACK_S,
            reply_bytes_max=y.nbytes + REPLY_SLACK_BYTES,
        )
        watch = Watch(self._transport, self._run_id, peer, waits.ping_s)
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
        report = _report(answer.header.processed, tokens, peer)
        train = process.purpose == wire.PURPOSE_TRAIN
        gradient = _gradient(answer.tensors, y, peer) if train else None
        seconds = loop.time() - sent_at
        own_s = seconds - answer.waited_s - _within(report.onward_s, seconds - answer.waited_s)
        coming_in_s = _within(report.received_s, own_s)
        sent_s = answer.waited_s
        self._reserving.came(sent_s + coming_in_s)
        if train:
            sent_s += router.completed(peer, process.samples, own_s, coming_in_s)
        return Carried(
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


def _within(said_s: float, most_s: float) -> float:
    """What a peer says it took, as far as that can be; 0 where it says no number. A NaN would stay in every average it
    gets into, and the router could not tell its peers apart any more."""
    return min(said_s, most_s) if said_s > 0.0 else 0.0


def _report(report: wire.Processed, tokens: WireTensor, peer: PeerId) -> wire.Processed:
    """Raises RemoteFault for a loss that no microbatch has: it would stay in what is shown of the run."""
    due = tokens.shape[0] * (tokens.shape[1] - 1)
    if not (report.tokens == due and 0.0 <= report.loss_sum < math.inf):
        raise RemoteFault(
            f"peer {short(peer)} answered with a loss of {report.loss_sum} nats over {report.tokens} tokens; "
            f"a finite one over {due} is due"
        )
    return report


def _gradient(tensors: Sequence[WireTensor], y: WireTensor, peer: PeerId) -> WireTensor:
    if len(tensors) != 1:
        raise RemoteFault(f"peer {short(peer)} answered a microbatch with {len(tensors)} tensors; one gradient is due")
    gradient = tensors[0]
    if gradient.shape != y.shape or gradient.dtype != y.dtype or gradient.codec != y.codec:
        raise RemoteFault(
            f"peer {short(peer)} answered with a gradient {gradient.dtype}{list(gradient.shape)}; "
            f"{y.dtype}{list(y.shape)} is due"
        )
    return gradient
