"""One replica's rounds: at each boundary it meets other replicas of its stage (gossip.group) or steps alone.

Of two members the one with the lower peer id calls, and the other averages only after the caller's commit. So both
average or neither does, unless the commit is lost (exchange_machine.py). Inner steps go on meanwhile; the outer step
adds back what they gained. One coroutine runs the rounds, so a replica is in the exchanges of one round at a time.
Where a partner fails, another replica's packet may take the place of its own (fallback_partner.py).

Where gradients are averaged, all members meet before each step. Four rules bring members together that are a step or a
part of a step apart, as all are where many join at once, and keep a slow one from holding the others up:
    - All members are called, but a member that was waited for in vain is not waited for, until a packet of it comes.
    - A caller that gave a round up, or refuses a call for it, is past it: nobody waits for it there.
    - A replica goes on from the round that most others are past, and trains nothing more before the next one if most
      were ahead of it.
    - A replica that expects less than half of the members waits for all of them.
(Simulated: 32 machines at home joined at once, and all met all within nine rounds in three seeds, also where they did
not wait for one another first. Without these rules they met half of them, for ever, in steps of 11 s instead of 4.)

With gossip.delay = 1 a round is held while the next step is trained:

    round k     draft its packet | meet the others                 | apply the mean of k
    training    of k             | of k + 1, by the means to k - 1 |                     | of k + 2, by the means to k

A replica applies the mean of k once both are over: its round k, and its part of step k + 1. So all microbatches of a
step see the same weights at all replicas of a stage, and a step takes the longer of the two instead of their sum.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
import sys
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median_low

from swarmnode.base.ema import Ema, EmaStart
from swarmnode.base.errors import Busy, Unavailable
from swarmnode.base.ids import PeerId
from swarmnode.base.metrics import name
from swarmnode.base.ports import Answer, Call, OuterReport, Packet, Priority, StepReport, Verdict, WireTensor
from swarmnode.base.wire import call_pb2 as wire
from swarmnode.net.membership.state_line import UNBROKEN, StateLine
from swarmnode.net.membership.swarm import GOSSIPING, Member, StageContext
from swarmnode.net.membership.trust import FLOOD
from swarmnode.run.manifest.gossip_compat import (
    averages_gradients,
    meeting_steps,
    meets,
    sends_pseudo_gradients,
    step_rounds,
)
from swarmnode.train.gossip.acceptance import NEWCOMER, Acceptance
from swarmnode.train.gossip.butterfly.driver import Butterfly, HeldRound, Meeting
from swarmnode.train.gossip.exchange_driver import PARTNER_PATIENCE_S, ExchangeDriver
from swarmnode.train.gossip.exchange_machine import ExchangeMachine
from swarmnode.train.gossip.fallback_partner import FallbackPartner, allows_fallback, fallback_order
from swarmnode.train.gossip.final_delta import FinalDeltas, OwnFinalDelta
from swarmnode.train.gossip.outer_step import OuterStep, OuterStepResult
from swarmnode.train.gossip.outgoing_packet import OutgoingPacket, RoundWeight, SentBytes, packets_s, while_written
from swarmnode.train.gossip.pairing import ALONE, partners, shuffled
from swarmnode.train.gossip.round import RATES, RoundPace, Rounds, Share, Spent, least, spent_since
from swarmnode.train.gossip.step_end import StepEnds, pass_on_step_end, tell_step_end
from swarmnode.train.gossip.strangers import Strangers

STEPS_WAITED = 2  # guess: so many usual steps are a slow member's; pings find a dead one sooner
FIRST_STEP_SHARE = 0.25  # guess: of an exchange's limit; so long a pipeline's first step may take to train
SETTLING_MAX = 6  # guess: announce periods; a key that joins for ever keeps nobody from training
WAIT_MIN_S = 1e-3  # the rest of a wait may be less than a step of the clock


@dataclass(frozen=True, slots=True)
class RoundPlan:
    """A round that begins: the weight of our packet, samples behind it, those `trained` since the last round, our
    partners, the members that are not waited for, the partners that were never met, whether the stage has other
    replicas, why it is as it is, and whom to ask where no partner's packet comes (None: nobody)."""

    round_index: int
    weight: float
    samples: int
    trained: int
    others: Sequence[PeerId]
    not_awaited: Sequence[PeerId]
    strangers: Collection[PeerId]
    others_here: bool
    reason: str
    to_ask: Callable[[], Sequence[PeerId]] | None


def _verdict_in_pieces(held: HeldRound, peer: PeerId) -> Verdict:
    """The verdict on the packet of a member of a round in pieces."""
    if peer in held.newcomers:
        return Verdict(0.0, NEWCOMER, "a newcomer gives nothing")
    if peer in held.elsewhere:
        return Verdict(0.0, "direction", "it leads elsewhere than most")
    return Verdict(1.0, "accepted", "its pieces were averaged")


class Gossip:
    """Runs the outer rounds of one replica. `run` is the only coroutine that changes the slow weights."""

    def __init__(
        self,
        here: StageContext,
        samples_here: Callable[[], int],
        *,
        done: int,
        newcomer: bool,
        packet_taken: Callable[[PeerId], None] = lambda peer: None,
        line: StateLine = UNBROKEN,
        fed: Callable[[PeerId], bool] = lambda peer: True,
    ) -> None:
        """`done`: the last round behind the replica's state; `newcomer`: its next round of each fragment counts nothing
        of its own; `packet_taken` is told each peer whose packet was averaged; `line` of its state; `fed`: whether a
        microbatch of a feeder was trained here."""
        self._here = here
        self._samples_here = samples_here
        self._fed = fed
        self.line = line  # replicas of another one are not met
        gossip = here.manifest.gossip
        self.acceptance = Acceptance(here, packet_taken)
        self.fallback = FallbackPartner(here, self._left_out, lambda: self._newest_round)
        self._outer_step = OuterStep(here, self.acceptance, self.fallback)
        self.weight = RoundWeight(gossip.fragments, samples_here, newcomer=newcomer, least=lambda: self._half_a_round)
        self._rounds = Rounds(gossip.round_samples)
        self._share = Share(here.manifest.inner.inner_batch) if averages_gradients(here.manifest) else None
        self._all_meet = self._share is not None and gossip.group == 0
        self._delay = gossip.delay  # steps that are trained while a round is held
        # Of a later stage whose steps are rounds: when they are over. The first stage's feeders know by themselves.
        self._step_ends = StepEnds() if self._share is not None and here.stage > 0 else None
        self.strangers = Strangers(here.run_id, here.stage, self.acceptance.packets_taken)
        self._machine = ExchangeMachine(here.me, done, off_stride=self._off_stride, newest=lambda: self._newest_round)
        self.exchanges = ExchangeDriver(here, self._machine, self._lost)
        self.butterfly = Butterfly(
            here,
            done=lambda: max(self.done, self._stepping) if self._delay else self.done,
            met=self.acceptance.packets_taken,
            left_out=self._left_out,
            lost=self._lost,
            called_for=self._called_for,
            past=self._machine.is_past,
        )
        self.final_deltas = FinalDeltas(here, lambda: self._after(max(self.done, self._stepping)), self.acceptance)
        self._final_delta = OwnFinalDelta(here)
        self._of_progress = sends_pseudo_gradients(gossip)
        self._begin(done)

    def _begin(self, done: int) -> None:
        """Set what rounds change, as after round `done`."""
        self._tasks = asyncio.TaskGroup()  # of `run`
        # This replica meets at multiples of it; announced in its record.
        self.stride = 1 if self._share is None else step_rounds(self._here.manifest)
        self.pace = RoundPace()
        now_s = asyncio.get_running_loop().time()
        self._ended = now_s, self._here.compute.worked_s  # the last round: when, and the device's seconds until then
        self._met_at = self._ended  # the same, when its packets were here
        self._sent = SentBytes(self._here.transport)
        # Partners that could not be reached or were waited for in vain, by the sequence of their last record.
        self._gone: dict[PeerId, int] = {}
        self._meetings: deque[int] = deque(maxlen=RATES + 1)  # samples of the run at the last rounds that met somebody
        self._met = Ema(start=EmaStart.FIRST)  # share of its partners that a round is done with
        self._met.add(1.0)
        self._absent = 0  # of the stage's replicas, as of the last round: left out, gone, or strangers that do not come
        self._samples_before = 0  # trained here by the last round whose packet counted
        self._samples_at_round = 0  # and by the beginning of the last round
        self._share_of_step = sys.maxsize  # the least that this replica's share of the step under way was
        # Whether it knows with whom it takes its first step, and they know of it.
        self._settled = self._share is None or (self.done > 0 and not self.weight.newcomer)
        self._through = done  # the last step that this replica said to be over here
        self._opened = done  # the last round whose packet was drafted before the next step was trained
        self._passed_on = 0  # the last step of which a mate said that it is over
        self._in_vain = False  # nothing was learned in the last round: the next one waits for all
        self._late = False  # most were ahead in the last round: it goes on to the next one with what it has
        self._trained_s: deque[float] = deque(maxlen=RATES)  # seconds that the last steps were trained in, no wait
        self._wake = asyncio.Event()
        self._held = False  # while this node is paused, or takes another state: no rounds
        self._away = False  # while it is paused: others are not to wait for it
        self._ended_here: Callable[[], None] | None = None  # told of each round that is done; None: nothing is fed here
        self._spared: Callable[[], bool] = lambda: False  # whether it does other work, so that no step waits for it
        # A newcomer met nobody in a round of pseudo-gradients, or its packets were clipped: it lacks that outer step.
        self.missed = False
        self._advanced = asyncio.Event()  # set when `done` grows, and replaced
        self._stepping = done  # the last round whose packets were gathered: a final delta is for a later one
        self.behind: Callable[[int], bool] = lambda due: False  # whether to take the state of others before round `due`
        self.stepped: Callable[[StepReport], None] = lambda step: None  # told of inner steps that rounds take
        self.met: Callable[[], None] = lambda: None  # called when `meeting` may have changed
        self._resting = False
        self.idle = asyncio.Event()  # set while no round is under way: then the replica may be given a state
        self.idle.set()

    def feed_by(self, ended: Callable[[], None], spared: Callable[[], bool]) -> None:
        """This node feeds its replica, unless it is `spared` for other work. `ended` is told of each round."""
        self._ended_here = ended
        self._spared = spared

    def on_progress(self) -> None:
        """Begin a round if one is due: the run's sample count grew."""
        self._wake.set()

    def _advance(self) -> None:
        """Wake whoever waits for a round to end, or for this replica to leave one out."""
        self._advanced.set()
        self._advanced = asyncio.Event()

    def _due(self) -> int | None:
        """The round whose boundary is now, or None. A replica that was away is due for the newest round at once: its
        packet holds what it did in those it missed."""
        if self._share is None:
            newest = self._rounds.newest(self._here.samples_total(), self.stride)
            return newest if newest > self._machine.done else None
        due = self._next_step()
        return due if self._is_trained(due) else None

    def _is_trained(self, step: int) -> bool:
        """Whether this replica trains no more of `step`, the one under way."""
        called = max((call.round_index for call in self._machine.waiting), default=self.butterfly.called)
        if self._passed_on == step:
            called = max(called, step)
        idle = self._late or ((self.weight.newcomer or self._spared()) and len(self._members(step)) > 1)
        through = self.room() <= 0 if self._step_ends is None else self._step_wait_s(step) == 0.0
        return through or idle or (called > self._begun and self._ended_here is None)

    @property
    def _begun(self) -> int:
        """The last round that is over here, or was opened."""
        return max(self.done, self._opened)

    def _next_step(self) -> int:
        """The round that this replica takes part in next, where rounds are steps: what most others are past would be in
        vain here."""
        others = [m for m in self._in_rounds() if m.peer != self._here.me]
        met = [m for m in others if self.acceptance.packets_taken(m.peer)]
        done = median_low([max(m.round_index, self._machine.round_of.get(m.peer, 0) - 1) for m in met or others] or [0])
        if not met:  # keys say any round: it is no further than samples say
            done = min(done, self._rounds.newest(self._here.samples_total(), self.stride))
        past = max(self._begun, done)
        if self._step_ends is not None:
            past = max(past, self._step_ends.newest(self._feeders()) - self.stride)
        return self._after(past)

    def _feeders(self) -> Sequence[PeerId]:
        """The feeders whose ends of steps count: those of whom a microbatch was trained here, as others may be keys
        alone; all that are announced where none was yet."""
        feeders = self._here.swarm().feeders()
        return [feeder for feeder in feeders if self._fed(feeder)] or feeders

    def _step_wait_s(self, step: int) -> float:
        """Seconds until this replica of a later stage takes `step`, whichever feeder is silent."""
        if self._step_ends is None or not self._settled:
            return math.inf
        patience_s = self._step_patience_s(0) + PARTNER_PATIENCE_S  # the first stage is to give a feeder up first
        return self._step_ends.wait_s(step, self._feeders(), patience_s, asyncio.get_running_loop().time())

    def step_ended(self, feeder: PeerId, step: int) -> None:
        """`feeder` told this replica that it is through with `step`."""
        if self._step_ends is not None:
            self._step_ends.heard(feeder, step)
            self.on_progress()

    async def serve_step_end(self, peer: PeerId, call: Call) -> Answer:
        """Handler of method "step_end", of a feeder, or of a mate that has heard of all feeders."""
        step = call.header.step_end.step
        if any(member.peer == peer for member in self._mates()):
            self._passed_on = step
            self.on_progress()
        else:
            self.step_ended(peer, step)
        return Answer(wire.Reply(step_end=wire.StepEndTaken()))

    async def step_begun(self, step: int) -> None:
        """Return when this replica has the weights with which microbatches of `step` are trained. Raises Busy for a
        step that is further ahead: this replica is behind."""
        while self._share is not None and step > (due := max(self.next_round, self._next_step())):
            if step > self._after(due):
                raise Busy(f"this replica is before step {due}", retry_after_s=PARTNER_PATIENCE_S)
            await self._advanced.wait()

    def room(self) -> int:
        """Samples that this replica trains before its next round, at most: where that is a step, more wait for it.

        Within a step the share only falls. If it grew with the speeds that others announce, a feeder that was through
        would have room again without being told, and the round would wait for it for ever."""
        if self._share is None:
            return sys.maxsize
        if not self._settled or self._through >= self.next_round:  # others heard that it is through with the step
            return 0
        self._share_of_step = min(self._share_of_step, self._own_share(self._share))
        return self._share_of_step - (self._samples_here() - self._samples_at_round)

    def _own_share(self, share: Share) -> int:
        """By who is here now: where many join at once, the first are not to train for minutes what all could share."""
        speeds = {m.peer: m.samples_per_second for m in self._known(self._in_rounds())}
        return share.of(self._here.me, {self._here.me: 0.0} | speeds)

    @property
    def done(self) -> int:
        """The last round finished, or behind the state that this replica was given."""
        return self._machine.done

    def hold(self, held: bool, *, away: bool = False) -> None:
        """Begin no round while `held`; the round under way goes on. `away`: for long, because this node is paused, so
        that calls for further rounds are refused instead of waiting."""
        self._held = held
        self._away = held and away
        if self._away and self.idle.is_set():
            self._finish(self.done)  # answers the calls that wait
        if not held or self._delay:
            self.on_progress()

    def restored(self, done: int, line: StateLine, *, newcomer: bool) -> None:
        """The replica was given the stage's state of `line` after round `done`; `newcomer` as in the constructor."""
        self.line = line
        self.weight.restored(newcomer=newcomer)
        self.missed = False
        self.butterfly.restored()
        self._finish(done)

    @property
    def _half_a_round(self) -> int:
        """Samples that a replica of this stage trains in half a round."""
        size = self._here.manifest.gossip.round_samples * self.stride
        return size // (2 * max(1, self.meeting(self._here.swarm().sizes[self._here.stage])))

    def meeting(self, replicas: int) -> int:
        """The number of the stage's `replicas`, this one included, that meet in rounds: keys that only announce
        themselves send no packet that is believed."""
        if not meets(self._here.manifest.gossip):
            return replicas
        return 1 + round(max(0, replicas - 1 - self._absent) * self._met.value)

    @property
    def meets_every_steps(self) -> float:
        """Inner steps between two meetings about the same weights, as they were: the median of the last; 0: unknown."""
        apart = [later - earlier for earlier, later in itertools.pairwise(self._meetings)]
        return meeting_steps(self._here.manifest, median_low(apart or [0]))

    @property
    def next_round(self) -> int:
        """The round this replica takes part in next, if none is skipped. Where rounds are steps it is in training."""
        return self._after(self._begun)

    def _after(self, round_index: int) -> int:
        return self._rounds.following(round_index, self.stride)

    @property
    def left(self) -> int:
        """Samples of the run until the next round this replica takes part in."""
        return self._rounds.left(self._here.samples_total(), self.stride)

    @property
    def unsent(self) -> int:
        """Samples trained here since the last round, of which no other replica has a part."""
        met = meets(self._here.manifest.gossip) and not self.weight.newcomer
        return self._samples_here() - self._samples_before if met else 0

    def drop_unsent(self) -> None:
        """Pass on nothing of what was trained here since the last round: others have it, or went on without it."""
        self._samples_before = self._samples_here()

    async def parting(self, round_index: int | None = None) -> tuple[wire.FinalDelta, Sequence[WireTensor]]:
        """After `rest`: what this replica learned since the last round of each fragment of the weights, as the message
        of a round (None: the next one here). Raises Unavailable for a round that is over here: a replica sends one
        packet a round."""
        due = self.next_round if round_index is None else round_index
        if due <= self.done:
            raise Unavailable(f"round {due} is over here")
        return await self._final_delta.of(due, self.unsent)

    async def rest(self) -> None:
        """Begin no more rounds; returns when the one under way is over."""
        self._resting = True
        if not self.idle.is_set():
            self.on_progress()
        await self.idle.wait()

    async def run(self) -> None:
        """Run round after round until cancelled. A replica begins with the least stride of its stage's others, which a
        key that only announces itself cannot raise; its own pace raises it."""
        here = self._mates()
        me = self._here.me
        if self._share is None:
            self.stride = least(member.round_stride for member in here if member.peer != me)
        elif not self._settled:
            if self.done == 0:
                await self._all_known()
            else:  # others do not wait for a newcomer in the steps before they hear that it has the state
                await asyncio.sleep(self._here.manifest.limits.announce_period_s)
            self._settled = True
            if self._ended_here is not None:
                self._ended_here()  # there is room now
        async with self._tasks:
            await self._run()

    async def _all_known(self) -> None:
        """Before the run's first step: wait until no further member has come for an announce period; a member alone
        does not wait. Steps that each takes with the few it has heard of lead weights and momenta apart. Nor does it
        train meanwhile: a first sum of six steps' samples would lead the momentum for forty steps (simulated: 32
        machines that join at once needed 2,500 samples instead of 1,200 to the first loss)."""
        for _ in range(SETTLING_MAX):
            before = [(member.peer, member.state) for member in self._mates()]
            if len(before) <= 1:
                return
            await asyncio.sleep(self._here.manifest.limits.announce_period_s)
            now = [(member.peer, member.state) for member in self._mates()]
            if now == before and len(now) == len(self._in_rounds()):
                return

    async def _run(self) -> None:
        while not self._resting:
            due = self._due()
            if due is not None and not self._held and not self.behind(due):
                self.idle.clear()
                try:
                    learned = await self._round(due)
                    self._keep_pace()
                    if self._share is not None and not (learned or self._late):  # nothing sets the pace of such rounds
                        await asyncio.sleep(self._here.manifest.limits.announce_period_s)
                finally:
                    self.idle.set()
                continue
            await self._woken()

    async def _woken(self) -> None:
        """Return when something has changed, or a round may be due although nobody told this replica."""
        self._wake.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._look_again_s()):
                await self._wake.wait()

    def _look_again_s(self) -> float | None:
        """Seconds until a round may be due although nobody told this replica; None: never."""
        if self._step_ends is None or self._held:
            return None
        wait_s = self._step_wait_s(self._next_step())
        return max(wait_s, WAIT_MIN_S) if wait_s < math.inf else None

    def _keep_pace(self) -> None:
        """Choose the stride anew from how fast samples come, how long exchanges take and what the line carries."""
        gossip = self._here.manifest.gossip
        sent = self._here.transport.bytes_by_method().items()
        sent_nbytes = sum(nbytes for (_, direction), nbytes in sent if direction == "sent")
        self.pace.boundary(asyncio.get_running_loop().time(), self._here.samples_total(), sent_nbytes)
        self.pace.carried(self._here.transport.line_bytes_per_s)
        needed_s, why = self.pace.needed_s(gossip.uplink_share)
        needed_s = max(gossip.round_seconds_min, needed_s)
        stride, reason = self._rounds.stride(self.pace.samples_per_second, needed_s, self.stride)
        if stride != self.stride and self._share is None:
            self._here.telemetry.event("round.stride", stride=stride, before=self.stride, reason=f"{reason}; {why}")
            self.stride = stride

    def _mates(self) -> Sequence[Member]:
        """The members of this stage, this one included."""
        return self._here.swarm().stages[self._here.stage]

    def _known(self, members: Sequence[Member]) -> Sequence[Member]:
        """The `members` whose packets were taken here, and this replica; all where nobody's was, or where each
        step is taken with some of them."""
        met = [m for m in members if m.peer == self._here.me or self.acceptance.packets_taken(m.peer)]
        return met if self._all_meet and len(met) > 1 else members

    def _in_rounds(self) -> list[Member]:
        """The members that are in rounds, and whose state is of the line of ours."""
        me = self._here.me
        line = self.line
        return [m for m in self._mates() if m.state in GOSSIPING and (m.line == line or m.peer == me)]

    @property
    def _others_here(self) -> bool:
        """Whether the stage has other replicas in rounds."""
        return any(member.peer != self._here.me for member in self._in_rounds())

    def _members(self, round_index: int) -> tuple[PeerId, ...]:
        """The replicas that meet at `round_index`, by name: it is a multiple of their stride, they are not known to be
        gone or past it, and their packets were not refused too often, by this replica or by most others."""
        me = self._here.me
        left_out = self._left_out()

        def takes_part(member: Member) -> bool:
            over = self._share is not None and member.round_index >= round_index
            return not round_index % member.round_stride and not over and not self._is_gone(member)

        return tuple([m.peer for m in self._in_rounds() if m.peer not in left_out and (m.peer == me or takes_part(m))])

    def _gossiping(self) -> set[PeerId]:
        """The stage's replicas that are in rounds, and whose packets were not refused too often."""
        return {member.peer for member in self._in_rounds()} - self._left_out()

    def _count_absent(self) -> int:
        """The stage's replicas that are left out of rounds, or could not be reached."""
        left_out = self._left_out()
        here = self._mates()
        return sum(m.peer in left_out or self._is_gone(m) for m in here)

    def _is_gone(self, member: Member) -> bool:
        """Whether `member` could not be reached or was waited for in vain. Where all meet in each step, a packet of it
        brings it back; else a new record, which a member that lacks text, say, announces, too."""
        return member.peer in self._gone and (self._all_meet or self._gone[member.peer] >= member.sequence)

    def _left_out(self) -> set[PeerId]:
        """The stage's replicas whose packets were refused too often."""
        return self.acceptance.left_out() - {self._here.me}

    @property
    def _newest_round(self) -> int:
        """The round after the newest that the samples seen here complete."""
        if self._away:
            return self.done
        if self._share is not None:  # one that is ahead waits for this replica in any round
            return sys.maxsize
        return self._after(self._rounds.newest(self._here.samples_total(), self.stride))

    def _off_stride(self, round_index: int) -> str:
        """Why this replica skips a round, "" where it does not."""
        met = round_index % self.stride == 0
        return "" if met else f"round {round_index} is none of those met at here, every {self.stride}"

    def _lost(self, peer: PeerId) -> None:
        """Wait no more for a peer that could not be reached or was waited for in vain, until it is back."""
        for member in self._mates():
            if member.peer == peer:
                self._gone[peer] = member.sequence

    def _called_for(self, peer: PeerId, round_index: int) -> None:
        """`peer` begins a round that has not begun here."""
        self._machine.round_of[peer] = max(round_index, self._machine.round_of.get(peer, 0))
        self._on_call()

    def _on_call(self) -> None:
        """A member called: where rounds are steps, this replica may be behind it."""
        if self._share is not None:
            self.on_progress()
            self._advance()

    async def serve_exchange(self, peer: PeerId, call: Call) -> Answer:
        """Handler of method "exchange"."""
        asyncio.get_running_loop().call_soon(self._on_call)
        return await self.exchanges.serve_exchange(peer, call)

    async def beyond(self, round_index: int) -> None:
        """Return when a later round than `round_index` is done."""
        while self.done <= round_index:
            await self._advanced.wait()

    def _finish(self, round_index: int) -> None:
        """`round_index` is done: answer the calls for it, and wake whoever waits for a round to end."""
        self.exchanges.finished(round_index)
        if self._ended_here is not None:
            self._ended_here()
        self._advance()

    async def _round(self, round_index: int) -> bool:
        if not meets(self._here.manifest.gossip):
            self._finish(round_index)
            return True
        members, kept_out = self._called_members(round_index)
        if self.weight.newcomer and self._here.me not in members and not self._of_progress:
            self._finish(round_index)  # over before it came: it receives the next one
            return True
        self._absent = self._count_absent() + len(kept_out)
        self.met()
        plan = self._plan(round_index, members)
        begun = self._spent()
        between = spent_since(self._ended, begun)
        whole = plan.trained > 0 and not (self._late or self._spared())  # a part of a share tells nothing of the rest
        if whole and not self._delay:
            self._trained_s.append(between[0])
        self._say_step_end(round_index)
        self.fallback.drop()
        hold = self._in_pieces if plan.others and self._here.manifest.gossip.butterfly else self._whole
        took, came, patience_s = await hold(plan)
        opened = self._opened == round_index
        met = self._met_at if opened else self._spent()
        self._record_meeting(plan, took, came, kept_out)
        learned = took.report.members > 0
        if learned or self._share is None:  # else the gradient stays for the next packet
            self._samples_before += plan.samples
        self.weight.on_round_end(round_index, self._samples_before)
        if not opened:
            self._begin_step(plan)
        if self._share is not None:
            self._in_vain = not learned
            late = spent_since(begun, met)[0] >= patience_s
            self._on_step_end(self._share, plan, came, late=late)
        self._finish(round_index)
        if not opened:
            met = self._ended = self._spent()
        self._report(round_index, took, plan.samples, spent_since(begun, met), between)
        return learned

    def _begin_step(self, plan: RoundPlan) -> None:
        """Count the samples trained from now on to the step after `plan`'s."""
        self._samples_at_round += plan.trained
        self._share_of_step = sys.maxsize

    def _open(self, plan: RoundPlan) -> asyncio.Task[None] | None:
        """With a delay: the packet of the round is drafted, and the next step is trained from now on. Returns what ends
        when that is over here."""
        if not self._delay:
            return None
        self._opened = plan.round_index
        self._begin_step(plan)
        self._ended = self._spent()
        if self._ended_here is not None:
            self._ended_here()
        self._advance()
        return self._tasks.create_task(self._train(self._after(plan.round_index)))

    async def _train(self, step: int) -> None:
        """Return when this replica trains no more of `step`, or others are past it. Whoever waits for that is told at
        once, while the round before may still be under way."""
        begun_s = asyncio.get_running_loop().time()
        while not (self._resting or self._held) and self._next_step() == step:
            if self._is_trained(step):
                if self._samples_here() > self._samples_at_round:
                    self._trained_s.append(asyncio.get_running_loop().time() - begun_s)
                self._say_step_end(step)
                return
            await self._woken()

    async def _until_trained(self, training: asyncio.Task[None] | None) -> None:
        """The round's packets are here: wait for the step that is trained meanwhile."""
        self._met_at = self._spent()
        if training is not None:
            await training

    def _plan(self, round_index: int, members: Sequence[PeerId]) -> RoundPlan:
        """The round of `members` that begins now."""
        here = self._here
        size = here.manifest.gossip.group or None
        others, reason = partners(here.run_id, here.stage, round_index, members, here.me, size)
        samples = self._samples_here() - self._samples_before
        return RoundPlan(
            round_index,
            self.weight.of(round_index),
            samples,
            self._samples_before + samples - self._samples_at_round,
            others,
            self._not_awaited(round_index, others) if self._all_meet else (),
            frozenset(self.strangers.among(others)),
            self._others_here,
            reason,
            self._to_ask(round_index, members, others),
        )

    def _spent(self) -> Spent:
        """The loop's time, and the seconds that the device has worked until now."""
        return asyncio.get_running_loop().time(), self._here.compute.worked_s

    def _record_meeting(
        self, plan: RoundPlan, took: OuterStepResult, came: Collection[PeerId], kept_out: set[PeerId]
    ) -> None:
        """Note what a round did, and with whom."""
        if took.report.inner is not None:
            self.stepped(took.report.inner)
        if took.met:
            self._meetings.append(plan.round_index * self._rounds.round_samples)
        for peer in plan.others:
            if peer in plan.strangers:
                self.strangers.record_try(peer in came, peer)
        if plan.others and not kept_out.issuperset(plan.others):
            self._met.add(min(1.0, took.count_believed(len(came)) / len(plan.others)))
            self.met()
        lacking = not took.met if self._of_progress else took.is_far
        self.missed = lacking and self.weight.newcomer and plan.others_here

    def _say_step_end(self, step: int) -> None:
        """Tell those that need to know that this feeder is through with `step`, or that all feeders are; once."""
        if self._share is None or step <= self._through:
            return
        self._through = step
        if self._step_ends is None and self._ended_here is not None:
            self._tasks.create_task(tell_step_end(self._here, step))
        elif self._passed_on != step and self._step_wait_s(step) == 0.0:
            know = {peer for peer, begun in self._machine.round_of.items() if begun >= step}
            self._tasks.create_task(pass_on_step_end(self._here, step, know))

    def _called_members(self, round_index: int) -> tuple[tuple[PeerId, ...], set[PeerId]]:
        """(the members of a round, those that it leaves out because they were never met)."""
        members = self._members(round_index)
        kept_out = self.strangers.kept_out(members, self._here.me)
        if kept_out and not self.strangers.is_open(round_index):
            members = tuple([peer for peer in members if peer not in kept_out])
        everybody = self._gossiping() - kept_out
        if self._all_meet and (self._in_vain or 2 * len(members) < len(everybody)):
            members = tuple(sorted(everybody))  # a few that left the others out would run ahead, or stay behind
        return members, kept_out

    async def _whole(self, plan: RoundPlan) -> tuple[OuterStepResult, Collection[PeerId], float]:
        """A round of whole packets: (the outer step; whose packets came; seconds that a step waits for a member)."""
        begun = asyncio.get_running_loop().time()
        draft = await self._here.compute.run(Priority.OUTER, 0, lambda: self._here.replica.draft(plan.round_index))
        ours = OutgoingPacket(plan.round_index, plan.weight, plan.samples, draft.tensors)
        training = self._open(plan)
        came, why = await while_written(draft, self._meet(plan.others, ours, plan.not_awaited))
        if came:
            took_s = asyncio.get_running_loop().time() - begun
            self.pace.exchanged(took_s - self.exchanges.waited_s, ours.nbytes * len(came))
        await self.fallback.offer(ours)
        self._stepping = plan.round_index
        final_deltas = self.final_deltas.take(plan.round_index, plan.samples if self._share is None else 1)
        await self._until_trained(training)
        took = await self._outer_step.take(  # a gradient that was left counts whole
            self._tasks,
            ours,
            came,
            final_deltas,
            plan.to_ask,
            min(self._patience_s(ours), self.pace.seconds(self.left)),
            why or plan.reason,
            others_here=self._others_here,
        )
        return took, came, self._step_patience_s(len(plan.others) * ours.nbytes)

    async def _in_pieces(self, plan: RoundPlan) -> tuple[OuterStepResult, Collection[PeerId], float]:
        """`_whole`, where each member averages some pieces for all."""
        replica = self._here.replica
        compute = self._here.compute
        begun = asyncio.get_running_loop().time()
        drafted = await compute.run(Priority.OUTER, 0, lambda: replica.draft_pieces(plan.round_index))
        packet_nbytes = sum(memoryview(piece).nbytes for piece in drafted.pieces)
        # A member may still be in the round before, as long as one takes here. A liar cannot make that longer.
        commit_s = self._step_patience_s(0) + min(self.pace.exchange_s, packets_s(2 * packet_nbytes))
        meeting = Meeting(
            plan.round_index,
            drafted,
            plan.samples,
            plan.weight > 0.0,
            plan.others,
            plan.not_awaited,
            commit_s,
            commit_s + packets_s(packet_nbytes),
        )
        training = self._open(plan)
        held = await self.butterfly.meet(self._tasks, meeting)
        self._stepping = plan.round_index
        if held is None:
            await self._until_trained(training)
            return OuterStepResult([], OuterReport(0, 0.0, 0.0), f"nobody was met: {plan.reason}"), (), math.inf
        self.pace.exchanged(asyncio.get_running_loop().time() - begun, 2 * packet_nbytes)
        final_deltas = self.final_deltas.take(plan.round_index, 1)
        await self._until_trained(training)
        step = partial(replica.apply_pieces, plan.round_index, held.means, held.ours, final_deltas)
        report = await compute.run(Priority.OUTER, 0, step)
        self.acceptance.record_final_deltas(final_deltas, report.verdicts, plan.round_index)
        came = {
            peer: Packet(float(peer in held.counted), held.samples[peer], (), sender=peer)
            for peer in held.members
            if peer != self._here.me and (peer in held.counted or peer in held.newcomers)
        }
        report.verdicts = [_verdict_in_pieces(held, peer) for peer in came]
        report.members = len(held.counted)
        met = self.acceptance.judged(self._tasks, plan.round_index, came, report)
        return OuterStepResult(met, report, held.reason or plan.reason), held.members, math.inf

    def _on_step_end(self, share: Share, plan: RoundPlan, came: Collection[PeerId], *, late: bool) -> None:
        """Note where the others are. A replica that was behind most goes on to the next round with what it has: it
        trains one step less, and meets them from then on. `late`: the round took as long as one waits for a member; the
        next one waits for none that did not come."""
        for peer in {*plan.others} - {*came} if late else ():
            self._lost(peer)
        for peer in came:
            self._gone.pop(peer, None)
        through = max(plan.round_index, self._through)
        ahead = {peer for peer, begun in self._machine.round_of.items() if begun > through}
        if came:  # keys, which cost nothing, cannot keep it from training beside others
            ahead.difference_update(self.strangers.among(ahead))
        self._late = len(ahead) > len(came) and plan.trained > 0
        share.late = through * self._rounds.round_samples - self._here.samples_total()

    def _to_ask(
        self, round_index: int, members: Sequence[PeerId], others: Sequence[PeerId]
    ) -> Callable[[], Sequence[PeerId]] | None:
        """The `members` of a round to ask for a packet if none of `others`, our partners, sends one; None: nobody."""
        me = self._here.me
        if not others or not allows_fallback(self._here.manifest.gossip) or len({*members, me}) <= 1 + len(others):
            return None
        able = {*members} - {me, *others}
        return lambda: fallback_order(self._here.run_id, self._here.stage, round_index, me, able)[0]

    def _not_awaited(self, round_index: int, others: Sequence[PeerId]) -> Sequence[PeerId]:
        """The members beside our partners, the `others`. No step waits for them, but what comes in time counts: one
        that was away or late is back at once. Of those that were never met a round tries no more than of the rest."""
        rest = sorted(self._gossiping() - {self._here.me, *others})
        strangers = shuffled(self._here.run_id, self._here.stage, round_index, self.strangers.among(rest))
        met = [peer for peer in rest if peer not in strangers]
        return [*met, *strangers[: max(FLOOD, len(others) + len(met))]]

    async def _meet(
        self, others: Sequence[PeerId], ours: OutgoingPacket, not_awaited: Sequence[PeerId] = ()
    ) -> tuple[dict[PeerId, Packet], str]:
        """(the packets of `others` and `not_awaited` that are to be averaged; why the last other one failed)."""
        # A partner that has not called when the next round is near has another view, or is at another round.
        rounds = self._after(ours.round_index) - ours.round_index
        round_s = self.pace.seconds(rounds * self._here.manifest.gossip.round_samples)
        patience_s = self._patience_s(ours)
        silence_s = max(PARTNER_PATIENCE_S, round_s)
        if self._share is not None and math.isfinite(step_s := self._step_patience_s(len(others) * ours.nbytes)):
            patience_s = silence_s = step_s
        return await self.exchanges.meet(others, ours, patience_s, silence_s, not_awaited)

    def _step_patience_s(self, nbytes: int) -> float:
        """Seconds that a step of packets of `nbytes` waits for a member that takes longer. By what steps are trained in
        here and what packets take: by the pace of rounds, each wait in vain would make the next one longer (simulated:
        32 machines at home, whose first views differ, waited 20 to 45 s in each step of 3 s for ever)."""
        step_s = self._usual_step_s()
        if self.done == 0:  # the others end their wait for members within an announce period
            step_s = max(step_s, self._here.manifest.limits.announce_period_s)
        return max(PARTNER_PATIENCE_S, STEPS_WAITED * step_s) + packets_s(nbytes)

    def _usual_step_s(self) -> float:
        """Seconds in which a step is trained; infinite while that is not known."""
        if self._trained_s:
            return median_low(self._trained_s)
        manifest = self._here.manifest
        speeds = [m.samples_per_second for m in self._known(self._mates()) if m.samples_per_second > 0.0]
        speed = median_low(speeds or [0.0])
        by_records = self._own_share(self._share) / speed if self._share is not None and speed else math.inf
        if manifest.pipeline.stages == 1:
            return by_records
        # Speeds know nothing of the way through the other stages, which also get to know each other in a first step.
        return max(by_records, FIRST_STEP_SHARE * manifest.limits.exchange_timeout_s)

    def _patience_s(self, ours: OutgoingPacket) -> float:
        return ours.patience_s(self._here.manifest.limits.exchange_timeout_s)

    def _report(self, round_index: int, took: OuterStepResult, samples: int, within: Spent, between: Spent) -> None:
        """`samples` trained for it; time `within` this round, and `between` the last one and it."""
        outcome = "paired" if took.met else "lone"
        self._here.telemetry.count(name.ROUNDS)
        self._here.telemetry.count(name.EXCHANGES, outcome=outcome)
        self._here.telemetry.observe(name.EXCHANGE_SECONDS, within[0])
        self._here.telemetry.gauge(name.ROUND, float(round_index))
        self._here.telemetry.event(
            f"exchange.{outcome}",
            level="debug" if took.reason.endswith(ALONE) else "info",  # no news: nobody is there to meet
            round=round_index,
            **took.fields(),
            seconds=round(within[0], 4),
            worked_s=round(within[1], 4),
            samples=samples,
            between_s=round(between[0], 4),
            between_worked_s=round(between[1], 4),
            sent_bytes=self._sent.since_last(),
            samples_total=self._here.samples_total(),
            every_steps=round(self.meets_every_steps, 2),
        )
        if len(took.met) > 1:
            self._here.telemetry.event("exchange.group", round=round_index, peers=list(took.met))
