"""This node's own record, its table of other peers, and the routers that are fed from the table."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

from swarmnode.base.errors import RemoteFault
from swarmnode.base.ids import PeerId, machine_of, seeded, stage_name
from swarmnode.base.ports import Clock
from swarmnode.base.wire import record_pb2
from swarmnode.net.membership.liveness import SOON_SHARE
from swarmnode.net.membership.peer_table import PeerTable
from swarmnode.net.membership.progress import Progress
from swarmnode.net.membership.record import (
    STRETCH_MAX,
    check_member,
    check_record,
    check_time,
    pass_of,
)
from swarmnode.net.membership.run_progress import RunProgress
from swarmnode.net.membership.swarm import SERVING, Member, Swarm, shared
from swarmnode.net.membership.trust import BelievedSwarm
from swarmnode.run.admission.access import too_old
from swarmnode.run.admission.admission import Admission
from swarmnode.run.manifest import Manifest
from swarmnode.train.node.own_record import LocalStatus, MemberPorts, OwnRecord, StageObserver
from swarmnode.train.pipeline.route import routers

LOOK_MIN_S = 2.0  # derived: the announce period of a run that says none
MANY_SHARE = 0.1  # guess: members that came or changed since the last look
OTHERS_PERIODS = 3  # as liveness.LOST_PERIODS: rarer, and the failure detector would look up each by itself
AHEAD_TOLERANCE_S = 0.001  # derived: of wall clocks; nodes foresee their pauses in whole seconds

Read = list[list[record_pb2.SignedRecord]]


def check_permitted(record: record_pb2.Record, peer: PeerId, admission: Admission | None) -> None:
    """Raises RemoteFault for a verified record of a `peer` that `admission` keeps out, or that says what its stage does
    not do."""
    if admission is not None:
        if reason := too_old(admission.rules.access_list.least_version, record.version):
            raise RemoteFault(f"record of {peer}: {reason}")
        permit, reason = admission.judge(peer, pass_of(record))
        if not permit:
            raise RemoteFault(f"record of {peer}: {reason}")
    if record.HasField("blocks") and record.stage:
        raise RemoteFault(
            f"record of {peer}: data blocks at {stage_name(record.stage)}; only replicas of the first stage feed"
        )


class LookPace:
    """The stages to look up, and when: some each time, all others within OTHERS_PERIODS.

    While many members come or change their state the looks begin anew at LOOK_MIN_S apart, and twice as far each time
    (Trickle, RFC 6206): a member tells others what it knows, which is little until all know of each other.
    """

    def __init__(self, often: Sequence[int], stages: Iterable[int], now_s: float) -> None:
        """All were looked up at `now_s`."""
        self._often = often
        self._others = [stage for stage in stages if stage not in often]
        self._turn = itertools.cycle(self._others)
        self._others_s = now_s
        self._wait_s = LOOK_MIN_S
        self._shape = 0

    def due(self, now_s: float, look_s: float) -> list[int]:
        """The stages to look up now; `look_s`: seconds between two looks while little changes."""
        at_once = 0
        if now_s >= self._others_s + look_s:
            self._others_s = now_s
            at_once = -(-len(self._others) // OTHERS_PERIODS)
        return [*self._often, *itertools.islice(self._turn, at_once)]

    def wait_s(self, shape: int, known: int, look_s: float) -> float:
        """Seconds until the next look, of a table with `known` members whose changes are counted by `shape`."""
        changed = shape - self._shape
        self._shape = shape
        self._wait_s = LOOK_MIN_S if changed > MANY_SHARE * known else 2.0 * self._wait_s
        return min(self._wait_s, look_s)


class StageRouters:
    """A router for each stage, fed from the table of peers. `sends_to`: the stages that get work from this node; none,
    before it has chosen its own."""

    def __init__(self, manifest: Manifest, me: PeerId, clock: Clock, confirmed: Callable[[PeerId], int]) -> None:
        self._me = me
        self._clock = clock
        self.banned = asyncio.Event()  # a router banned a peer; whoever waits clears it
        self._newly_banned: dict[PeerId, None] = {}
        self.routers = routers(manifest, me, confirmed, self._note_ban)
        self.sends_to: Collection[int] = ()
        self._unix_ahead_s = 0.0  # Unix time less loop time, as the routers were told

    def _note_ban(self, peer: PeerId) -> None:
        self._newly_banned[peer] = None
        self.banned.set()

    def newly_banned(self) -> list[PeerId]:
        """The peers that routers banned since the last call."""
        banned = list(self._newly_banned)
        self._newly_banned.clear()
        return banned

    def idle(self, stage: int, least_s: float) -> bool:
        """Whether this node sends to `stage`, and its replicas have refused all work for `least_s` at least."""
        now = asyncio.get_running_loop().time()
        return stage in self.sends_to and self.routers[stage].idle(now, least_s)

    @property
    def flooded(self) -> bool:
        """Whether strangers at a stage that gets work did nothing when they were tried."""
        return any(self.routers[stage].unknown.flooded for stage in self.sends_to)

    def attend(self, swarm: Swarm, sends_to: Collection[int]) -> None:
        """Send work to the members of `swarm` at `sends_to`, from now on."""
        self.sends_to = sends_to
        for other, router in enumerate(self.routers):
            router.update(swarm.serving(other) if other in sends_to else ())

    def learn(self, peer: PeerId, member: Member) -> None:
        """`member`, whose record is new, is `peer`."""
        self._tell_time()
        for stage in self.sends_to:
            router = self.routers[stage]
            if member.stage == stage and member.state == SERVING:
                router.learn(member)
            else:
                router.forget(peer)

    def update(self, peer_table: PeerTable) -> None:
        """The table has changed: feed the routers of the changed stages anew."""
        self._tell_time()
        swarm = peer_table.swarm()
        for stage in peer_table.take_changed():
            if stage in self.sends_to:
                self.routers[stage].update(member for member in swarm.serving(stage) if member.peer != self._me)

    def _tell_time(self) -> None:
        """Tell the routers how far Unix time is ahead of loop time: records hold wall clock times."""
        ahead_s = self._clock.unix_s() - asyncio.get_running_loop().time()
        if abs(ahead_s - self._unix_ahead_s) < AHEAD_TOLERANCE_S:
            return
        self._unix_ahead_s = ahead_s
        for router in self.routers:
            router.set_unix_ahead(ahead_s)


class Presence:
    """Announces this node, looks others up, and keeps the peer table and the routers current."""

    def __init__(
        self,
        ports: MemberPorts,
        stage: Callable[[], StageObserver],
        *,
        admission: Admission | None = None,
        unable: frozenset[int] = frozenset(),
        saves_checkpoints: bool = False,
    ) -> None:
        """`stage` returns the work in hand. `admission` None: every peer may take part. `unable`: the stages that this
        machine cannot serve."""
        manifest = ports.manifest
        self._manifest = manifest
        self._run_id = ports.run_id
        self._directory = ports.directory
        self._clock = ports.clock
        self._telemetry = ports.telemetry
        self._stage = stage
        self.me = ports.identity.peer_id
        self.admission = admission
        self.progress = Progress()
        self.peer_table = PeerTable(manifest.pipeline.stages)
        self.routing = StageRouters(manifest, self.me, ports.clock, lambda peer: stage().confirmed(peer))
        self.run_progress = RunProgress(
            manifest,
            self.me,
            self.peer_table,
            self.progress,
            ports.clock,
            ports.telemetry,
            self._refused,
            lambda: stage().on_progress(),
        )
        seen = self.run_progress.clock.history.times
        self.peer_table.prefer(seen)
        self._believed = BelievedSwarm(self.me, seen, self._strangers_work, stages=manifest.pipeline.stages)
        self.blocks_heard: dict[PeerId, record_pb2.Blocks] = {}
        self.parts: list[Presence] = []  # of the machine's further stages
        status = LocalStatus(unable=unable, saves_checkpoints=saves_checkpoints)
        self.own = OwnRecord(ports, stage, self.peer_table, self.run_progress, admission, status, self._reads)
        self._chance = seeded(manifest.seed, "look", self.me, self.own.incarnation)

    @property
    def status(self) -> LocalStatus:
        """The facts about this node in its next record."""
        return self.own.status

    @property
    def doubtful(self) -> bool:
        """Whether most replicas that were never seen at work did nothing when they were tried."""
        return self._believed.doubtful

    def believed(self) -> Swarm:
        """The swarm as this node counts it (net/membership/trust.py)."""
        return self._believed.of(self.peer_table.swarm(), self.status.stage, self.routing.sends_to)

    def _strangers_work(self) -> bool:
        return not self.routing.flooded and self._stage().strangers_come()

    def _reads(self) -> float:
        """Records that this node reads in an announce period: those of its stage, and a part of the others."""
        own = self.status.stage
        sizes = self.believed().sizes
        here = sizes[own] if own is not None and own < len(sizes) else 0
        return here + (sum(sizes) - here) / OTHERS_PERIODS

    def samples_total(self) -> int:
        """Samples that the whole run has trained, as far as known here."""
        return self.progress.total

    def note_of_machine(self, **facts: Any) -> None:
        """Note facts about this machine, for the records of all members that it is."""
        for presence in (self, *self.parts):
            presence.own.note(**facts)

    def attend(self, stage: int, sends_to: Collection[int], samples_per_second: float, saved_samples: int = 0) -> None:
        """Be at `stage` from now on: know all its members, and send work to those of `sends_to`. `samples_per_second`:
        the speed expected there; 0: not known yet. `saved_samples`: of the run, when this node saved that stage on its
        disk; 0: it has not."""
        self.own.note(stage=stage, samples_per_second=samples_per_second, saved_samples=saved_samples, moving_to=None)
        self.peer_table.attend(stage)
        self.routing.attend(self.peer_table.swarm(), sends_to)

    async def reserve(self, stage: int) -> None:
        """Announce that this node joins at `stage`, unless another one that chooses now does so before it."""
        self.own.note(stage=stage, moving_to=stage, samples_per_second=0.0)
        self.own.announce_change()
        await self.announce()

    async def announcing(self) -> None:
        """Publish our record every (stretched) announce period and whenever our state changes, until cancelled."""
        while True:
            self.own.changed.clear()
            await self.announce()
            try:
                async with asyncio.timeout(self.own.period_s):
                    await self.own.changed.wait()
            except TimeoutError:
                pass

    async def announce(self) -> None:
        """Publish our record of now, once. Hear of another one of our key whose place it takes, if there is one."""
        if (record := self.own.to_publish()) is None:
            return
        announced = await self._directory.announce(record)
        for signed in announced.others:
            with self._faults_logged():
                self._hear_own(signed, check_record(signed, run_id=self._run_id))
        if not announced.stored:
            self._telemetry.event("directory.failed", level="warning", reason="nobody stored our record; tried again")

    async def watching(self, stages: Sequence[int]) -> None:
        """Refresh `stages`, and all others more rarely (LookPace), until cancelled. Look sooner while there is nobody
        to send work to: nodes that start together see nobody at first."""
        loop = asyncio.get_running_loop()
        pace = LookPace(stages, range(self._manifest.pipeline.stages), loop.time())
        while True:
            await self._adopt(pace.due(loop.time(), self.own.look_s), self._directory.refresh)
            swarm = self.peer_table.swarm()
            if not all(swarm.serving(stage) for stage in self.routing.sends_to):
                await asyncio.sleep(SOON_SHARE * self._manifest.limits.announce_period_s)
                continue
            known = sum(here for here, _ in self.peer_table.counts())
            await asyncio.sleep(pace.wait_s(self.peer_table.shape, known, self.own.look_s))

    async def look(self, stages: Iterable[int]) -> None:
        """Read the records of `stages` from the directory once; forget peers whose records expired."""
        await self._adopt(list(stages), self._directory.lookups)

    async def _adopt(self, wanted: Sequence[int], read: Callable[[Sequence[int]], Awaitable[Read]]) -> None:
        values = await read(wanted)
        for stage, records in zip(wanted, values, strict=True):
            for signed in self.peer_table.news(stage, records, self._chance):
                with self._faults_logged():
                    record = check_record(signed, run_id=self._run_id)
                    if record.peer_id == self.me:
                        self._hear_own(signed, record)
                        continue
                    known = shared(signed)
                    if known is not None or not self.peer_table.knows(record):
                        self._take_in(record, known[2] if known is not None else None)
        expired = self.peer_table.expire(self._clock.unix_s())
        for peer in expired:
            self.blocks_heard.pop(peer, None)
            self._telemetry.event("peer.gone", peer=peer, reason="its record expired")
        self._stage().doubt(expired)
        self.routing.update(self.peer_table)
        self.run_progress.judge()

    async def claimed(self) -> int:
        return await self._directory.claimed()

    @contextlib.contextmanager
    def _faults_logged(self) -> Iterator[None]:
        """Log a RemoteFault in the block: one wrong record among many is no reason to stop."""
        try:
            yield
        except RemoteFault as fault:
            self._refused(fault)

    def _refused(self, fault: RemoteFault) -> None:
        self._telemetry.event("record.refused", level="warning", reason=str(fault))

    def _hear_blocks(self, told: Mapping[PeerId, record_pb2.Blocks]) -> None:
        self.blocks_heard.update(told)
        for fault in self._stage().hear_blocks(told, self.blocks_max):
            self._refused(fault)

    @property
    def blocks_max(self) -> int:
        """Blocks that can be finished at most."""
        return int(self.run_progress.samples_max) // self._manifest.data.block_samples

    def mark_dead(self, peers: Sequence[PeerId]) -> None:
        """Take `peers`, which answer no more, out of the table and the routers until they announce something newer.
        The blocks they finished are remembered: a feeder may have to go on from there."""
        for peer in peers:
            self.peer_table.mark_dead(peer)
            self._telemetry.event("peer.gone", peer=peer, reason="silent, and answers no ping")
        self.routing.update(self.peer_table)
        self._stage().doubt(peers)

    def exclude(self, peer: PeerId, reason: str) -> None:
        """Ignore `peer` from now on, because it was found to lie: its machine, at whatever stages that is."""
        machine = machine_of(peer)
        if machine == machine_of(self.me) or machine in self.peer_table.excluded:
            return
        self.peer_table.excluded.add(machine)
        there = [member.peer for member in self.peer_table.swarm().members() if machine_of(member.peer) == machine]
        for one in dict.fromkeys([peer, *there]):
            self.peer_table.forget(one)
            self.run_progress.clock.history.forget(one)
            self.blocks_heard.pop(one, None)
        self._telemetry.event("peer.excluded", level="warning", peer=peer, reason=reason)
        self.routing.update(self.peer_table)

    def evict_unauthorized(self) -> None:
        """Forget members that are not permitted any more, after the owner's rules changed."""
        if self.admission is None:
            return
        for part in self.parts:
            part.evict_unauthorized()
        for member in list(self.peer_table.swarm().members()):
            permit, reason = self.admission.judge(member.peer)
            if member.peer != self.me and not permit:
                self.peer_table.forget(member.peer)
                self.blocks_heard.pop(member.peer, None)
                self._telemetry.event("peer.gone", peer=member.peer, reason=reason)
        self.routing.update(self.peer_table)

    def learn(self, signed: record_pb2.SignedRecord) -> Member:
        """Take in a record; returns its member as known then. Raises RemoteFault when it is forged, expired or of
        another run."""
        record, member = check_member(signed, run_id=self._run_id)
        if member.peer == self.me:
            self._hear_own(signed, record)
            return member
        known = self.peer_table.member(member.peer)
        if known is not None and known.sequence >= member.sequence:
            return known
        if (peer := self._take_in(record, member)) is not None:
            self.routing.learn(peer, member)
        return member

    def _hear_own(self, signed: record_pb2.SignedRecord, record: record_pb2.Record) -> None:
        """Take in a record of our key as others hold it, and what our former life told in it."""
        if not self.own.hear(signed, record):
            return
        if record.progress.samples:
            self.run_progress.hear({self.me: record.progress.samples[0]})
        if record.HasField("blocks") and not record.stage:
            self._hear_blocks({self.me: record.blocks})

    def _take_in(self, record: record_pb2.Record, member: Member | None = None) -> PeerId | None:
        """`learn` of a verified record without the routers, which are told once of many records. Returns the peer if
        the record told something new. `member`: the record's content, if already parsed."""
        check_time(record, self._clock.unix_s(), STRETCH_MAX * self._manifest.limits.record_ttl_s)
        peer = PeerId(record.peer_id) if member is None else member.peer
        check_permitted(record, peer, self.admission)
        if not self.peer_table.learn(record, member):
            return None
        if member is not None and not member.fed:
            return peer
        if record.progress.samples:
            self.run_progress.hear({peer: record.progress.samples[0]})
        if record.HasField("blocks"):
            self._hear_blocks({peer: record.blocks})
        return peer
