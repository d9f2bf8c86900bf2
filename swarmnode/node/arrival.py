"""How a node comes by the state of its stage: looks around, climbs the ladder (recovery/ladder.py), says what came."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median_low

from swarmnode.errors import DataError, HardwareFault, LocalFault, RemoteFault, Unavailable
from swarmnode.ids import PeerId, RunId, digest64
from swarmnode.manifest import Manifest
from swarmnode.membership.liveness import late
from swarmnode.membership.progress import Progress
from swarmnode.membership.swarm import SERVING, Swarm
from swarmnode.metrics import name
from swarmnode.model.section import snapshot_nbytes
from swarmnode.node.fetching import Fetching
from swarmnode.node.lifecycle import donors_of
from swarmnode.node.line import Line
from swarmnode.node.moving import Brought
from swarmnode.node.presence import Presence
from swarmnode.node.saver import Resumption, Saving, resume
from swarmnode.pipeline.itinerary import partner
from swarmnode.pipeline.rebalance import staying
from swarmnode.ports import Clock, Compute, Neighbour, Priority, Replica, State, Telemetry
from swarmnode.recovery.asking import DownloadLimits
from swarmnode.recovery.checkpoint import ROOT
from swarmnode.recovery.download import Accept
from swarmnode.recovery.keeper import to_keep
from swarmnode.recovery.ladder import Claims, Rung, Sight, climb, latest, silent
from swarmnode.recovery.saving import find
from swarmnode.recovery.snapshot import SLOW, WHOLE, Cut, Snapshot
from swarmnode.wire import record_pb2

LOOK_SHARE = 0.25  # guess: of the announce period, between two looks at a stage that has no replica
FEW = 8  # guess: of a larger stage so many are asked first; if half of them live, the others are believed
FIRST = 1  # guess: the same where no record tells of a sample: nobody has a state, it is asked whether that is still so
SETTLE_SHARE = 0.5  # guess: of the announce period, that others who bring the same stage back have to hear of us
ASKED_MAX = 64  # guess: members a joiner pings before it believes their records; in larger swarms one more or less
POLITE = DownloadLimits(rest=0.5)
"""A joiner of a stage that others serve leaves a third of its donor's uplink to training at any time. Guess."""
TRIES_MAX = 3  # guess: times state is sought from living replicas before this process gives up


@dataclass(frozen=True, slots=True)
class Arrived:
    """`newcomer`: the first round is to be received at weight 0. `done`: the last round behind the state."""

    newcomer: bool
    done: int
    rung: Rung


class Arrival:
    """Brings one replica to the state of its stage, whatever is left of it in the swarm."""

    def __init__(
        self,
        manifest: Manifest,
        run_id: RunId,
        line: Line,
        presence: Presence,
        compute: Compute,
        clock: Clock,
        telemetry: Telemetry,
    ) -> None:
        self._manifest = manifest
        self._run_id = run_id
        self._line = line
        self._presence = presence
        self._compute = compute
        self._clock = clock
        self._telemetry = telemetry
        self._swarm = presence.book.swarm
        self._failed: set[Rung] = set()
        self._claims = Claims(manifest.limits)
        self.saving = Saving()  # what this node was told about checkpoints
        self.received: Snapshot | None = None  # as a living replica gave it
        self._disk: Resumption | None = None
        self._looked = False
        self.fetching = Fetching(manifest, run_id, line, presence, telemetry)

    async def answering(self, peers: Sequence[PeerId]) -> frozenset[PeerId]:
        """Those of `peers` that answer a ping: records outlive their nodes by up to their time to live."""
        async with asyncio.TaskGroup() as tasks:
            asked = [(peer, tasks.create_task(late(self._line, self._run_id, peer))) for peer in peers[:ASKED_MAX]]
        return frozenset(peer for peer, answer in asked if answer.result() is None) | frozenset(peers[ASKED_MAX:])

    async def _answering_near(self, swarm: Swarm, near: Sequence[int], count: int = FEW) -> frozenset[PeerId]:
        """Those of the stages `near` that live, as far as it matters: of a crowd `count` tell for all."""
        me, few, rest = self._presence.me, [], []
        for stage in dict.fromkeys(near):
            peers = [member.peer for member in swarm.stages[stage] if member.peer != me]
            first = digest64("few", me) % max(1, len(peers))  # not always the same ones
            peers = peers[first:] + peers[:first]
            few.append(peers[:count])
            rest.append(peers[count:])
        answer = set(await self.answering([peer for peers in few for peer in peers]))
        for asked, others in zip(few, rest, strict=True):
            doubtful = 2 * len(answer.intersection(asked)) < len(asked)
            answer |= await self.answering(others) if doubtful else set(others)
        return frozenset(answer)

    async def living(self, swarm: Swarm) -> Swarm:
        """`swarm` without members that answer no ping, or have announced to pause soon."""
        swarm = staying(swarm, self._clock.unix_s())
        peers = [member.peer for member in swarm.members() if member.peer != self._presence.me]
        answering = await self.answering(peers) if len(peers) <= ASKED_MAX else frozenset(peers)
        gone = [peer for peer in peers if peer not in answering]
        if gone:
            self._telemetry.event("peer.gone", peers=gone, reason="no answer to a ping")
        return Swarm.of((member for member in swarm.members() if member.peer not in gone), len(swarm.stages))

    async def begin_with(self, brought: Brought | None, replica: Replica, stage: int) -> tuple[bool, int]:
        """(newcomer, last round done) once `replica` holds the state of `stage`: the one brought along, or what is to
        be had. Raises Unavailable, HardwareFault when this machine does not understand the others' activations."""
        await self._agree(replica)
        if brought is not None and brought.state is not None:
            try:
                await self._loading(replica)(brought.state)
                brought.state = None  # as large as the replica itself
                self._merge(brought.offer.progress)
                return self._manifest.gossip.method != "none", brought.offer.round
            except RemoteFault as fault:
                self._telemetry.event("state.failed", level="warning", stage=stage, lied=True, reason=str(fault))
        arrived = await self.begin(replica, stage)
        return arrived.newcomer, arrived.done

    async def _agree(self, replica: Replica) -> None:
        """Each node makes the run's frozen subspace for itself. Raises HardwareFault when all who train have another:
        what would be sent to them would be noise. One liar does not keep anybody away."""
        if self._manifest.pipeline.boundary != "subspace":
            return
        us = self._presence.self
        us.boundary_digest = mine = await self._compute.run(Priority.OUTER, 0, replica.boundary_digest)
        training = [m for m in self._swarm().members() if m.state == SERVING and m.peer != self._presence.me]
        if training and all(member.boundary_digest != mine for member in training):
            theirs = training[0].boundary_digest.hex() or "none"
            raise HardwareFault(
                f"this machine makes the subspace {mine.hex()} where the {len(training)} nodes that train"
                f" have {theirs}: its PyTorch computes otherwise; install the version they use, then join again"
            )

    async def begin(self, replica: Replica, stage: int) -> Arrived:
        """The state of `stage` in `replica`. Raises Unavailable when it is nowhere to be had."""
        loop = asyncio.get_running_loop()
        begun, tries, said = loop.time(), 0, ""
        self._claims.begin(snapshot_nbytes(replica.sizes_of(stage)))
        while True:
            sight = await self._look(replica, stage, loop.time() - begun)
            rung, reason = climb(sight, self._manifest.recovery)
            if rung is Rung.STOP or tries >= TRIES_MAX:
                self._telemetry.event("recovery.failed", level="error", reason=reason)
                raise Unavailable(f"{reason}; join again when one is back")
            if rung is Rung.WAIT:
                if reason != said:
                    self._telemetry.event("recovery.waiting", stage=stage, reason=reason)
                said = reason
                await asyncio.sleep(LOOK_SHARE * self._manifest.limits.announce_period_s)
                continue
            if rung not in (Rung.FRESH, Rung.REPLICA):
                self._telemetry.event("recovery.began", stage=stage, method=self._method(rung), reason=reason)
            try:
                arrived = await self._climb(rung, sight, replica)
            except (Unavailable, RemoteFault, DataError) as error:
                self._telemetry.event("recovery.rung", level="warning", stage=stage, method=rung, reason=str(error))
                if rung is Rung.REPLICA:
                    tries += 1
                else:
                    self._failed.add(rung)
                continue
            if rung in (Rung.RING, Rung.DISK, Rung.CHECKFREE) and await self._overtaken(stage):
                continue
            self._presence.beliefs.begin(sight.samples_total)  # unless it came with the state
            self._say(arrived, stage, reason, loop.time() - begun)
            self.fetching.carried = None
            return arrived

    async def _look(self, replica: Replica, stage: int, waited_s: float) -> Sight:
        """One look at the directory, and a ping to whoever matters to `stage`."""
        stages, me = self._manifest.pipeline.stages, self._presence.me
        near = [(stage + step) % stages for step in (0, -1, 1)]
        swarm = self._swarm()  # all stages were looked up when this one was chosen
        await self._presence.look([at for at in range(stages) if at in near or not (waited_s or swarm.stages[at])])
        begun = self._presence.beliefs.suppose(()) > 0
        answer = await self._answering_near(self._swarm(), near, FEW if begun else FIRST)
        if not begun and self._presence.beliefs.suppose(answer) > 0:
            answer = await self._answering_near(self._swarm(), near)
        swarm, total = self._swarm(), self._presence.beliefs.suppose(answer)  # answers carry records
        round_now = total // self._manifest.gossip.round_samples
        before = swarm.serving((stage - 1) % stages)
        cut, _ = to_keep(self._manifest.recovery.snapshot_bytes_max, replica.sizes_of(stage), replica.ends_of(stage))
        kept = [(m.kept_round, m.kept_steps, m.peer) for m in before if m.kept_round is not None and m.peer in answer]
        if self.fetching.carried is not None and self.fetching.carried.stage == stage:
            kept.append((self.fetching.carried.round_index, self.fetching.carried.state.inner_steps, me))
        snapshots = latest(kept, self._presence.beliefs.rounds_max)
        donors = tuple(peer for peer in donors_of(swarm, stage, me) if peer in answer)
        return Sight(
            stage,
            stages,
            total,
            round_now,
            donors=donors,
            unsure=silent(swarm.stages[stage], answer, self._clock.unix_s(), self._manifest.limits),
            builder=self._claims.builder(swarm.stages[stage], answer, me, asyncio.get_running_loop().time()),
            settled=waited_s >= SETTLE_SHARE * self._manifest.limits.announce_period_s,
            kept=tuple(snapshots) if cut == WHOLE else (),
            ends=tuple(peer for _, peer in snapshots) if replica.ends_of(stage)[1] else None,
            below=stage > 0 and any(m.peer in answer for m in before),
            above=stage < stages - 1 and any(m.peer in answer for m in swarm.serving(stage + 1)),
            disk_round=await self._disk_round() if total and not donors else None,
            saved_round=self._saved_round(),
            failed=frozenset(self._failed),
            waited_s=waited_s,
        )

    async def _disk_round(self) -> int | None:
        """Of the newest whole checkpoint of this run where this node saves its own, in rounds; looked for once."""
        store = self.saving.store
        if store is not None and not self._looked:
            self._looked = True
            try:
                for found in reversed(await find(store)):
                    kept = found.checkpoint
                    if kept is not None and found.fault is None and kept.origin.run_id == self._run_id:
                        self._disk = Resumption(store, found.name.removesuffix(ROOT), kept)
                        break
            except (DataError, LocalFault) as error:
                self._telemetry.event("recovery.rung", level="warning", method=Rung.DISK, reason=str(error))
        return None if self._disk is None else self._disk.checkpoint.samples // self._manifest.gossip.round_samples

    async def _read_checkpoint(self, sight: Sight, saved: Resumption) -> State:
        """The stage's state from the checkpoint. When the whole run goes on from it, one that cannot be read stops this
        node: LocalFault. Later there are other ways: Unavailable."""
        shapes = self.saving.shapes(self._manifest, sight.stage)
        try:
            return await resume(saved, shapes, self._telemetry, sight.stage)
        except (DataError, LocalFault) as error:
            raise (LocalFault if sight.saved_round == sight.round_now else Unavailable)(str(error)) from error

    def _saved_round(self) -> int | None:
        """Of the checkpoint we were told to resume, in rounds of this run."""
        given = self.saving.resume
        return None if given is None else given.checkpoint.samples // self._manifest.gossip.round_samples

    async def _overtaken(self, stage: int) -> bool:
        """Whether somebody else brought the stage back while we did: then theirs is the state, ours is dropped."""
        await self._presence.look([stage])
        donors = donors_of(self._swarm(), stage, self._presence.me)
        return bool(await self.answering(donors))

    async def _climb(self, rung: Rung, sight: Sight, replica: Replica) -> Arrived:
        """Do what `rung` says. Raises Unavailable, RemoteFault when it breaks."""
        newcomer = self._manifest.gossip.method != "none"
        self.fetching.nbytes = 0
        match rung:
            case Rung.REPLICA:
                donors = partial(self.fetching.still, frozenset(sight.donors), sight.stage)
                words, compare = self.fetching.second(sight, replica, donors)
                state, offer = await self.fetching.download(
                    replica, sight.stage, donors, compare=compare, accept=self._loading(replica), limits=POLITE
                )
                # Of the donor, of who gave the second word, and of those that answered, one may lie about the clock.
                said = [offer.progress.total, sight.samples_total, *(word.total for word in words[:1])]
                total = median_low(said)
                self._presence.beliefs.begin(total)
                self._merge(offer.progress)
                self.received = Snapshot.received(offer, state)
                return Arrived(newcomer, min(offer.round, total // self._manifest.gossip.round_samples), rung)
            case Rung.RING:
                keepers = [peer for _, peer in sight.kept]
                _, compare = self.fetching.second(sight, replica, tuple)
                _, progress = await self.fetching.kept(
                    replica, sight.stage, keepers, WHOLE, compare, self._loading(replica)
                )
                self._presence.beliefs.begin(sight.samples_total)
                self._merge(progress)
            case Rung.CHECKPOINT | Rung.DISK:
                saved = self.saving.resume if rung is Rung.CHECKPOINT else self._disk
                assert saved is not None
                state = await self._read_checkpoint(sight, saved)
                self.fetching.nbytes = sum(section.nbytes for section in state.sections.values())
                await self._compute.run(Priority.OUTER, 0, lambda: replica.load(state))
            case Rung.CHECKFREE:
                await self._rebuild(sight, replica)
            case Rung.FRESH:
                pass
            case _:
                raise AssertionError(f"{rung} is not a way to a state")
        self._presence.beliefs.begin(sight.samples_total)
        return Arrived(False, self._presence.progress.total // self._manifest.gossip.round_samples, rung)

    def _merge(self, told: record_pb2.Progress) -> None:
        """What came with a state is believed as far as anything is: who gave it may be wrong about the run's count."""
        with contextlib.suppress(RemoteFault):
            self._presence.progress.merge(Progress.from_wire(told))

    async def _rebuild(self, sight: Sight, replica: Replica) -> None:
        """CheckFree: the slow weights of the neighbours, and the mirrored embedding or head, become this stage."""
        neighbours, method = [], self._manifest.recovery.method
        twin = partner(sight.stage, sight.stages) if self._manifest.recovery.itinerary == "swapped" else None
        if twin is not None:  # CheckFree+: it has learned this stage's work on odd microbatches
            method = "copy"
        for stage, serves in ((sight.stage - 1, sight.below), (sight.stage + 1, sight.above)):
            if serves and twin in (None, stage):
                donors = partial(self.fetching.still, frozenset(), stage)
                state, offer = await self.fetching.download(replica, stage, donors, cut=SLOW)
                neighbours.append(Neighbour(stage, state.sections["phi"], offer.gradient_norm))
        mirrored = None
        if sight.ends:
            cut = Cut(SLOW.sections, *replica.ends_of(sight.stage))
            mirrored = (await self.fetching.kept(replica, sight.stage, sight.ends, cut))[0].sections["phi"]
        await self._compute.run(Priority.OUTER, 0, lambda: replica.rebuild(method, neighbours, mirrored))

    def _loading(self, replica: Replica) -> Accept:
        return lambda state: self._compute.run(Priority.OUTER, 0, lambda: replica.load(state))

    def _method(self, rung: Rung) -> str:
        if rung is not Rung.CHECKFREE:
            return str(rung)
        spec = self._manifest.recovery
        return f"{spec.method}, swapped" if spec.itinerary == "swapped" else spec.method

    def _say(self, arrived: Arrived, stage: int, reason: str, seconds: float) -> None:
        if arrived.rung is Rung.FRESH:
            self._telemetry.event("state.fresh", reason=reason)
            return
        self._telemetry.count(name.RECOVERIES, method=str(arrived.rung))
        self._telemetry.event(
            "recovery.done",
            stage=stage,
            method=self._method(arrived.rung),
            seconds=round(seconds, 3),
            nbytes=self.fetching.nbytes,
            reason=reason,
        )
