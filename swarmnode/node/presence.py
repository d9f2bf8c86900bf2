"""What this node says of itself and knows of others: its record, the book of records, the routers fed from it."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

from swarmnode import __version__
from swarmnode.bounds import FIELDS, QUEUE_MAX, SPEED_MAX
from swarmnode.errors import RemoteFault
from swarmnode.identity import Identity
from swarmnode.ids import PeerId, RunId, seeded
from swarmnode.manifest import Manifest
from swarmnode.membership.book import Book
from swarmnode.membership.door import Door
from swarmnode.membership.progress import Progress
from swarmnode.membership.record import check_member, check_record, check_time, pass_of, sign_record
from swarmnode.membership.swarm import SERVING, Member, shared
from swarmnode.membership.view import View, view_of
from swarmnode.metrics import name
from swarmnode.node.beliefs import Beliefs
from swarmnode.node.own import Self_
from swarmnode.pipeline.allowed import allowed_samples_per_s
from swarmnode.pipeline.route import routers
from swarmnode.ports import Clock, Directory, Telemetry
from swarmnode.wire import record_pb2

FRESH_SHARE = 1.0  # guess: our record is signed anew on request when older than this share of the announce period
EXPIRY_STEP_S = 0.002  # records tell milliseconds, and of two that expire at the same one a directory keeps the first
JUST_SHARE = 0.1  # guess: who changes its state has signed its record just before it is published
EMPTY_SHARE = 0.25  # guess: of the announce period, between two looks while a stage that work goes to stands empty
OTHERS_PERIODS = 3  # as recovery/ladder.LOST_PERIODS: rarer, and the roll call would have to look at each by itself
ADDRESSES_MAX = 8
AHEAD_TOLERANCE_S = 0.001  # guess: of wall clocks; nodes foresee their pauses in whole seconds
HearBlocks = Callable[[Mapping[PeerId, record_pb2.Blocks], int], Iterable[RemoteFault]]


class Presence:
    """Announces this node, looks others up, and keeps book and routers current."""

    def __init__(
        self,
        manifest: Manifest,
        run_id: RunId,
        directory: Directory,
        clock: Clock,
        identity: Identity,
        telemetry: Telemetry,
    ) -> None:
        self._manifest = manifest
        self._run_id = run_id
        self._directory = directory
        self._clock = clock
        self._identity = identity
        self._telemetry = telemetry
        self.me = identity.peer_id
        self.self = Self_()
        self.progress = Progress()
        self.book = Book(manifest.pipeline.stages)
        self.routers = routers(manifest, self.me)
        self.progressed: Callable[[], None] = lambda: None  # the run's sample count grew
        here = self.me, self.book, self.progress, clock, telemetry, self._refused, self._grown
        self.beliefs = Beliefs(manifest, *here)
        self.blocks_heard: dict[PeerId, record_pb2.Blocks] = {}
        self.heard_blocks: HearBlocks = lambda told, frontier_max: ()
        self.doubted: Callable[[Iterable[PeerId]], None] = lambda peers: None  # they went silent
        self._joined_unix_ms = int(clock.unix_s() * 1000)
        self._sequence = self._joined_unix_ms
        self._signed: record_pb2.SignedRecord | None = None
        self._signed_at = float("-inf")
        self._published_at = float("-inf")  # when the last one published was signed
        self.door: Door | None = None  # None: everybody may take part
        self._announce_now = asyncio.Event()
        self._sends_to: Collection[int] = ()  # nobody, before a stage is chosen
        self._chance = seeded(manifest.seed, "look", self.me, self._joined_unix_ms)

    def _grown(self) -> None:
        self.progressed()

    @property
    def incarnation(self) -> int:
        """Differs between two lives of the same key."""
        return self._joined_unix_ms

    def moved(self, addresses: list[str]) -> None:
        """Others reach this node at `addresses` from now on."""
        self.self.addresses = addresses

    def attend(self, stage: int, sends_to: Collection[int]) -> None:
        """From now on this node is at `stage`, whose replicas it knows all, and sends work to those of `sends_to`."""
        self.book.own, self._sends_to = stage, sends_to
        swarm = self.book.swarm()
        for other, router in enumerate(self.routers):
            router.update(swarm.serving(other) if other in sends_to else ())

    def set_state(self, state: record_pb2.NodeState, reason: str) -> None:
        """Change the state others see; announced at once."""
        self.self.state = state
        self._telemetry.gauge(name.STATE, float(state))
        self._telemetry.event("node.state", state=record_pb2.NodeState.Name(state)[11:].lower(), reason=reason)
        self.changed()

    def changed(self) -> None:
        """Something of our record changed: it is signed anew and announced at once."""
        self._signed = None
        self.record()
        self._announce_now.set()

    def record(self) -> tuple[int, record_pb2.SignedRecord] | None:
        """(sequence, our record), signed anew when the last one is old; None before a stage is chosen."""
        now = asyncio.get_running_loop().time()
        if self.self.stage is None:
            return None
        if self._signed is None or now - self._signed_at > FRESH_SHARE * self._manifest.limits.announce_period_s:
            self._sequence += 1
            record = self._describe(self._clock.unix_s())
            self._signed, self._signed_at = sign_record(record, self._identity), now
            self.book.learn(*check_member(self._signed, run_id=self._run_id))
        return self._sequence, self._signed

    def _describe(self, now_unix_s: float) -> record_pb2.Record:
        us = self.self
        assert us.stage is not None
        record = record_pb2.Record(
            run_id=self._run_id,
            peer_id=self.me,
            sequence=self._sequence,
            expires_unix_ms=int((now_unix_s + self._manifest.limits.record_ttl_s) * 1000),
            stage=us.stage,
            state=us.state,
            addresses=us.addresses[:ADDRESSES_MAX],
            samples_per_second=min(
                SPEED_MAX, allowed_samples_per_s(self._manifest, us.stage, us.speed(), us.allowance)
            ),
            queue=min(QUEUE_MAX, us.queue()),
            round=us.round_index(),
            round_stride=us.round_stride(),
            joined_unix_ms=self._joined_unix_ms,
            version=__version__,
            progress=self.progress.entry(self.me),
            moving_to=us.moving_to,
            saves_checkpoints=us.saves_checkpoints,
            unable=sorted(us.unable)[: FIELDS["Record.unable"].many],
            boundary_digest=us.boundary_digest,
        )
        if (kept := us.kept()) is not None:
            record.kept_round, record.kept_steps = kept.round_index, kept.state.inner_steps
        if us.allowance is not None:
            record.allowance.CopyFrom(us.allowance)
        if self.door is not None and self.door.mine is not None:
            getattr(record, "pass").CopyFrom(self.door.mine)
        if (blocks := us.blocks()) is not None:
            record.blocks.CopyFrom(blocks)
        return record

    async def announcing(self) -> None:
        """Publish our record every announce period and whenever our state changes, until cancelled."""
        while True:
            self._announce_now.clear()
            await self.announce()
            try:
                async with asyncio.timeout(self._manifest.limits.announce_period_s):
                    await self._announce_now.wait()
            except TimeoutError:
                pass

    async def announce(self) -> None:
        """Publish our record of now, once: the one signed a moment ago, if it expires after what was published."""
        old_s = asyncio.get_running_loop().time() - JUST_SHARE * self._manifest.limits.announce_period_s
        if self._signed_at < max(old_s, self._published_at + EXPIRY_STEP_S):
            self._signed = None
        if (current := self.record()) is None:
            return
        self._published_at = self._signed_at
        if not await self._directory.announce(current[1]):
            self._telemetry.event("directory.failed", level="warning", reason="nobody stored our record; tried again")

    async def watching(self, stages: Sequence[int]) -> None:
        """Look `stages` up every announce period, and all others within OTHERS_PERIODS, until cancelled. Sooner while
        there is nobody to send work to: in a swarm that begins, all come at once and see nobody."""
        others = [stage for stage in range(self._manifest.pipeline.stages) if stage not in stages]
        turn, at_once = itertools.cycle(others), 0  # all were looked up when the stage was chosen
        while True:
            await self.look([*stages, *itertools.islice(turn, at_once)])
            at_once = -(-len(others) // OTHERS_PERIODS)
            swarm = self.book.swarm()
            share = 1.0 if all(swarm.serving(stage) for stage in self._sends_to) else EMPTY_SHARE
            await asyncio.sleep(share * self._manifest.limits.announce_period_s)

    async def look(self, stages: Iterable[int]) -> None:
        """Read what the directory says of `stages` once; forget whose record ran out."""
        wanted = list(stages)
        found = await self._directory.lookups(wanted)
        for stage, records in zip(wanted, found, strict=True):
            if (view := view_of(records)) is not None and self._believes(view):
                self._take_view(stage, view)
                continue
            for signed in self.book.news(stage, records, self._chance):
                with self._faults_logged():
                    record = check_record(signed, run_id=self._run_id)
                    known = shared(signed)
                    if known is not None or not self.book.knows(record):
                        self._take_in(record, known[2] if known is not None else None)
        expired = self.book.expire(self._clock.unix_s())
        for peer in expired:
            self.blocks_heard.pop(peer, None)
            self._telemetry.event("peer.gone", peer=peer, reason="its record expired")
        self.doubted(expired)
        self._view_changed()
        self.beliefs.judge()

    def _believes(self, view: View) -> bool:
        """Whether all of `view` would be taken in, as far as time and the door go; else each is looked at alone."""
        now, (first, last) = self._clock.unix_s(), view.expires_unix_s
        return self.door is None and first > now and last <= now + 10.0 * self._manifest.limits.record_ttl_s

    def _take_view(self, stage: int, view: View) -> None:
        """`_take_in` of all that is news in `view`."""
        fed = self.book.renew(stage, view, self.me, self._chance)
        told = {peer: view.samples[peer] for peer in fed if peer in view.samples}
        self.beliefs.hear(told)
        self._hear_blocks({peer: view.blocks[peer] for peer in fed if peer in view.blocks})

    @contextlib.contextmanager
    def _faults_logged(self) -> Iterator[None]:
        """One record among many that is wrong is no reason to stop."""
        try:
            yield
        except RemoteFault as fault:
            self._refused(fault)

    def _refused(self, fault: RemoteFault) -> None:
        self._telemetry.event("record.refused", level="warning", reason=str(fault))

    def _hear_blocks(self, told: Mapping[PeerId, record_pb2.Blocks]) -> None:
        self.blocks_heard.update(told)
        for fault in self.heard_blocks(told, self.blocks_max):
            self._refused(fault)

    @property
    def blocks_max(self) -> int:
        """Blocks that can be finished at most."""
        return int(self.beliefs.samples_max) // self._manifest.data.block_samples

    def bury(self, peers: Sequence[PeerId]) -> None:
        """`peers` answer no more: out of the book and the routers until they say something newer. What they finished
        is remembered: a feeder may have to go on from there."""
        for peer in peers:
            self.book.bury(peer)
            self._telemetry.event("peer.gone", peer=peer, reason="silent, and answers no ping")
        self._view_changed()
        self.doubted(peers)

    def exclude(self, peer: PeerId, reason: str) -> None:
        """`peer` was found to lie: for this node it is not there any more, whatever it says."""
        if peer == self.me or peer in self.book.excluded:
            return
        self.book.excluded.add(peer)
        self.book.forget(peer)
        self.beliefs.clock.observed.forget(peer)
        self.blocks_heard.pop(peer, None)
        self._telemetry.event("peer.excluded", level="warning", peer=peer, reason=reason)
        self._view_changed()

    def turn_out(self) -> None:
        """The owner's rules have changed: forget whom the door permits no more."""
        if self.door is None:
            return
        for member in list(self.book.swarm().members()):
            permit, reason = self.door.judge(member.peer)
            if member.peer != self.me and not permit:
                self.book.forget(member.peer)
                self.blocks_heard.pop(member.peer, None)
                self._telemetry.event("peer.gone", peer=member.peer, reason=reason)
        self._view_changed()

    def learn(self, signed: record_pb2.SignedRecord) -> Member:
        """Take in a record; its peer as known then. Raises RemoteFault when it is forged, expired or of another run."""
        record, member = check_member(signed, run_id=self._run_id)
        known = self.book.member(member.peer)
        if known is not None and known.sequence >= member.sequence:
            return known
        if (peer := self._take_in(record, member)) is None:
            return member
        self._tell_time()
        for stage in self._sends_to:
            router = self.routers[stage]
            if member.stage == stage and member.state == SERVING:
                router.learn(member)
            else:
                router.forget(peer)
        return member

    def _take_in(self, record: record_pb2.Record, member: Member | None = None) -> PeerId | None:
        """`learn` of a verified record without telling the routers: of many at once they are told once. Who it told
        something of. `member`: as the record tells, if that is known."""
        check_time(record, self._clock.unix_s(), 10.0 * self._manifest.limits.record_ttl_s)
        peer = PeerId(record.peer_id) if member is None else member.peer
        if self.door is not None:
            permit, reason = self.door.judge(peer, pass_of(record))
            if not permit:
                raise RemoteFault(f"record of {peer}: {reason}")
        if peer == self.me or not self.book.learn(record, member):
            return None
        if member is not None and not member.fed:
            return peer
        if record.progress.samples:
            self.beliefs.hear({peer: record.progress.samples[0]})
        if record.HasField("blocks"):
            self._hear_blocks({peer: record.blocks})
        return peer

    def _tell_time(self) -> None:
        """Records speak of wall clocks, routers of the loop's time."""
        ahead_s = self._clock.unix_s() - asyncio.get_running_loop().time()
        if abs(ahead_s - self.routers[0].unix_ahead_s) < AHEAD_TOLERANCE_S:
            return
        for router in self.routers:
            router.unix_ahead_s = ahead_s

    def _view_changed(self) -> None:
        self._tell_time()
        self.book.swarm()
        for stage in self.book.changed():
            if stage in self._sends_to:
                serving, special = self.book.choices(stage)
                serving.pop(self.me, None)
                special.pop(self.me, None)
                self.routers[stage].renew(serving, special)
