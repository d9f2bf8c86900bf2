"""Copies of every stage's slow weights for an archive: choose donors, pull copies, and select one of each stage."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median_low

import numpy as np

from swarmnode.app.machine.slow_copy import LIMITS, SlowCopy, distance, distance_to
from swarmnode.base.concurrency import gather_or_cancel
from swarmnode.base.errors import Busy, RemoteFault, Unavailable
from swarmnode.base.ids import PeerId, RunId, seeded, short, stage_name
from swarmnode.base.metrics import name
from swarmnode.base.ports import Clock, Directory, Telemetry, Transport
from swarmnode.base.wire import access_pb2, record_pb2
from swarmnode.keep.recovery.archive import COPIES_MAX, CopyVerdict, Deserted, choose_copy, sampled, together_within
from swarmnode.keep.transfer.download import DonorClient, DonorLied
from swarmnode.keep.transfer.snapshot import DOWNLOAD_RATE, SLOW
from swarmnode.keep.transfer.state_slices import ROUNDS_APART_MAX
from swarmnode.model.section import section_sizes
from swarmnode.model.split import stages_of
from swarmnode.net.membership.liveness import TRIES
from swarmnode.net.membership.record import STRETCH_MAX, check_member, check_time
from swarmnode.net.membership.swarm import SERVING, Member, Swarm
from swarmnode.run.manifest import Manifest

LEAVERS = (record_pb2.NODE_STATE_TRAINING, record_pb2.NODE_STATE_DRAINING)  # its new record may be under way
GOODBYE_MIN_S = 30.0  # guess: a small copy, on a busy machine
ASKED_MAX = 8  # derived: if half of a stage's replicas give a copy, so many give COPIES_MAX six times in seven
ALONE_TRIES = TRIES  # then a single copy is accepted although others give none: silence must not stop the archive

PreviousWeights = Callable[[int, int, int], np.ndarray]
"""Elements [first, last) of a stage's slow weights in the previous checkpoint: (stage, first, last)."""


@dataclass(frozen=True, slots=True)
class TakenCopy:
    """The selected copy of one stage, and the verdict on it."""

    copy: SlowCopy
    verdict: CopyVerdict


@dataclass(frozen=True, slots=True)
class RunCopy:
    """The copies of all stages. `progress` and `blocks` are what most donors and feeders report of the run."""

    stages: tuple[TakenCopy, ...]
    progress: record_pb2.Progress
    blocks: record_pb2.Blocks

    @property
    def round_index(self) -> int:
        return median_low([taken.copy.offer.round for taken in self.stages])


class PartingCopies:
    """Copies of stages that their last replicas gave as they left, of each stage COPIES_MAX at most."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._given = dict[int, dict[PeerId, SlowCopy]]()

    def __contains__(self, copy: SlowCopy) -> bool:
        return any(copy is kept for given in self._given.values() for kept in given.values())

    @property
    def stages(self) -> list[int]:
        """Stages of which there is a copy."""
        return [stage for stage, given in self._given.items() if given]

    def path(self, file: str) -> Path:
        """The place of a copy to come. Raises OSError."""
        self._folder.mkdir(parents=True, exist_ok=True)
        return self._folder / file

    def of(self, stage: int) -> list[SlowCopy]:
        """The copies of `stage`."""
        return list(self._given.get(stage, {}).values())

    def round_of(self, stage: int) -> int:
        """The latest round of the copies of `stage`; 0 without one."""
        return max((copy.offer.round for copy in self.of(stage)), default=0)

    def keep(self, stage: int, copy: SlowCopy) -> None:
        """Keep `copy` instead of the one that its peer gave before, or of the oldest."""
        given = self._given.setdefault(stage, {})
        for old in [given.pop(copy.peer, None), *([given.pop(next(iter(given)))] if len(given) >= COPIES_MAX else [])]:
            if old is not None:
                old.drop()
        given[copy.peer] = copy

    def drop(self, stage: int) -> None:
        """Delete the copies of `stage`."""
        for copy in self._given.pop(stage, {}).values():
            copy.drop()


@dataclass(slots=True)
class ArchiveSources:
    """The replicas of a run from the archive's view. `scratch` holds copies in progress."""

    manifest: Manifest
    run_id: RunId
    transport: Transport
    directory: Directory
    clock: Clock
    telemetry: Telemetry
    warrant: access_pb2.Warrant
    scratch: Path
    liars: set[PeerId] = field(default_factory=set)  # asked last from now on
    alone: dict[int, float] = field(default_factory=dict)  # by stage: attempts in which one of several gave a copy
    parting: PartingCopies = field(init=False)
    sizes: list[dict[str, int]] = field(init=False)
    _tries: int = 0
    _blocks: record_pb2.Blocks = field(default_factory=record_pb2.Blocks)  # finished, as feeders said last

    def __post_init__(self) -> None:
        self.sizes = [section_sizes(self.manifest, part) for part in stages_of(self.manifest)]
        self.parting = PartingCopies(self.scratch.with_name("parting"))

    async def trains(self) -> None:
        """Raises Unavailable unless every stage is served and something is trained."""
        swarm = await self._look()
        if not any(member.total for member in swarm.members()):
            raise Unavailable("nothing is trained yet")

    async def copy_run(self, before: PreviousWeights | None = None, newer_than: int = 0) -> RunCopy | None:
        """A copy of every stage that its replicas agree on, all of about the same round; None if that is `newer_than`
        or earlier. Of a stage that nobody serves it is the one that its last replica gave as it left.

        Raises Unavailable if a stage has neither, no round is finished, replicas contradict each other, or donors
        are busy; a later attempt may succeed. Raises Deserted where nobody serves anything.
        """
        self._tries += 1
        swarm = await self._look()
        stages = range(self.manifest.pipeline.stages)
        serving = [swarm.holding(stage) for stage in stages]
        _check_round(
            max((member.round_index for member in members), default=0) or self.parting.round_of(stage)
            for stage, members in enumerate(serving)
        )
        offered = await gather_or_cancel([partial(self._offers, serving[stage], stage) for stage in stages])
        stride = max((member.round_stride for members in serving for member in members), default=1)
        middle = [median_low([copy.offer.round for copy in copies]) for copies in offered]
        fit, why = together_within(middle, stride, ROUNDS_APART_MAX)
        if not fit:
            raise Unavailable(why)
        _check_round(middle)
        if median_low([max(copy.offer.round for copy in copies) for copies in offered]) <= newer_than:
            return None
        works = [partial(self._stage, stage, offered[stage], middle[stage], stride, before) for stage in stages]
        taken = await gather_or_cancel(works)
        progresses = sorted((copy.offer.progress for copies in offered for copy in copies), key=lambda one: one.total)
        return RunCopy(tuple(taken), progresses[(len(progresses) - 1) // 2], self._blocks)

    async def take_over(self, peer: PeerId, stage: int) -> int:
        """Keep the slow weights of `peer`, the last replica of `stage`, which waits for this before it leaves. Returns
        their round. `copy_run` judges them like those of replicas that serve.

        Raises RemoteFault for a peer that does not serve the stage, Unavailable while others do, or if the copy does
        not come within the time that a slow line takes.
        """
        leaver = self._leaver(await self._look_at([stage]), peer, stage)
        with contextlib.suppress(Unavailable, RemoteFault):  # it is connected: it has just called
            await self.transport.connect(peer, leaver.addresses)
        offer = await self._donor(stage).offer(peer)
        self._tries += 1
        copy = SlowCopy(peer, offer, self.parting.path(f"stage-{stage}-{short(peer)}-{self._tries}"))
        try:
            async with asyncio.timeout(GOODBYE_MIN_S + offer.nbytes / DOWNLOAD_RATE):
                await self._pull(stage, [copy])
        except BaseException as failure:
            copy.drop()
            if isinstance(failure, TimeoutError):
                raise Unavailable(f"{stage_name(stage)}: {short(peer)} gave no whole copy in time") from None
            raise
        self.parting.keep(stage, copy)
        return offer.round

    def _leaver(self, swarm: Swarm, peer: PeerId, stage: int) -> Member:
        member = next((one for one in swarm.stages[stage] if one.peer == peer and one.state in LEAVERS), None)
        if member is None:
            raise RemoteFault(f"goodbye of {short(peer)}, who does not serve {stage_name(stage)}")
        if others := [short(one.peer) for one in swarm.serving(stage) if one.peer != peer]:
            raise Unavailable(f"{stage_name(stage)} is copied from {others[0]}, who stays")
        return member

    def release(self, copy: SlowCopy) -> None:
        """Delete the file of `copy`, unless it is a stage's last word."""
        if copy not in self.parting:
            copy.drop()

    async def _look_at(self, stages: Sequence[int]) -> Swarm:
        """The members of `stages` with a record in the directory. Keeps the blocks of data that most feeders that
        serve, else that have left, report as finished."""
        listed = await self.directory.lookups(stages)
        members = list[Member]()
        blocks = dict[bool, list[record_pb2.Blocks]]()
        now_s = self.clock.unix_s()
        for signed in (signed for records in listed for signed in records):
            with contextlib.suppress(RemoteFault):  # skip a single bad record
                record, member = check_member(signed, run_id=self.run_id)
                check_time(record, now_s, STRETCH_MAX * self.manifest.limits.record_ttl_s)
                members.append(member)
                if record.HasField("blocks"):
                    blocks.setdefault(member.state == SERVING, []).append(record.blocks)
        told = sorted(blocks.get(True) or blocks.get(False) or [], key=lambda one: one.finished_below)
        if told:
            self._blocks = told[(len(told) - 1) // 2]
        return Swarm.of(members, self.manifest.pipeline.stages)

    async def _look(self) -> Swarm:
        """All members with a record in the directory. Raises Unavailable if nobody serves some stage whose last replica
        left no copy, Deserted if nobody serves any."""
        stages = range(self.manifest.pipeline.stages)
        swarm = await self._look_at(stages)
        served = [stage for stage in stages if swarm.holding(stage)]
        empty = [stage for stage in stages if stage not in served and not self.parting.of(stage)]
        if empty:
            kind = Unavailable if served or self.parting.stages else Deserted
            raise kind(f"{stage_name(empty[0])} has no replica that serves ({len(empty)} of {len(stages)} stages)")
        return swarm

    async def _offers(self, serving: Sequence[Member], stage: int) -> list[SlowCopy]:
        """New snapshots of COPIES_MAX of `serving`, not yet pulled; if nobody serves the stage, what its last replica
        gave. Raises Unavailable if there is none, or only one although the stage has more replicas."""
        if not serving:
            return self.parting.of(stage)
        drawn = sorted(serving, key=lambda member: member.peer)
        seeded("archive", self.transport.peer_id, stage, self._tries).shuffle(drawn)
        drawn.sort(key=lambda member: member.peer in self.liars)
        waiting = drawn[:ASKED_MAX]
        copies = list[SlowCopy]()
        reasons = list[str]()
        later_s = list[float]()

        async def ask() -> None:
            while waiting and len(copies) < COPIES_MAX:
                member = waiting.pop(0)
                try:
                    with contextlib.suppress(Unavailable, RemoteFault):  # it may be connected already
                        await self.transport.connect(member.peer, member.addresses)
                    offer = await self._donor(stage).offer(member.peer)
                except Busy as busy:
                    later_s.append(busy.retry_after_s)
                    reasons.append(f"{short(member.peer)}: {busy}")
                except (RemoteFault, Unavailable) as failure:
                    self._refuse(member.peer, stage, failure)
                    reasons.append(f"{short(member.peer)}: {failure}")
                else:
                    copies.append(SlowCopy(member.peer, offer, self.scratch / f"stage-{stage}-{short(member.peer)}"))

        await gather_or_cancel([ask] * COPIES_MAX)
        more = float(len(copies) <= 1 < len(serving))
        self.alone[stage] = self.alone.get(stage, 0.0) + more if more else 0.0
        if not copies or 0.0 < self.alone[stage] < ALONE_TRIES:
            note = f"{stage_name(stage)}: {len(copies)} of {len(serving)} replicas gave a copy"
            raise Unavailable("; ".join([note, *reasons[-1:]]), max(later_s, default=0.0))
        if max(copy.offer.round for copy in copies) >= self.parting.round_of(stage):
            self.parting.drop(stage)  # others serve it again, and went on
        return copies[:COPIES_MAX]

    async def _stage(
        self, stage: int, offered: list[SlowCopy], middle: int, stride: int, before: PreviousWeights | None
    ) -> TakenCopy:
        """The selected copy of `stage`. Raises Unavailable."""
        near = [copy for copy in offered if abs(copy.offer.round - middle) <= ROUNDS_APART_MAX * max(1, stride)]
        if len(near) == 1 < len(offered) and self.alone[stage] < ALONE_TRIES:
            self.alone[stage] += 1.0
            rounds = sorted(copy.offer.round for copy in offered)
            raise Unavailable(f"{stage_name(stage)}: its copies are of rounds {rounds}: too far apart to be compared")
        return await self._accepted(stage, await self._pull(stage, near), before)

    async def _accepted(self, stage: int, copies: list[SlowCopy], before: PreviousWeights | None) -> TakenCopy:
        """The copy that most of `copies` agree with, whole. The others are dropped. Raises Unavailable."""
        last = None if before is None else partial(before, stage)
        verdict = await asyncio.to_thread(judged, copies, last)
        self._tell(stage, copies, verdict)
        for index, copy in enumerate(copies):
            if index != verdict.taken:
                self.release(copy)
        if verdict.taken is None:
            raise Unavailable(f"{stage_name(stage)}: {verdict.reason}")
        taken = copies[verdict.taken]
        with self._blaming(taken.peer, stage):
            await taken.pull(self._donor(stage), range(len(taken.offer.hashes)))
            if not math.isfinite(await asyncio.to_thread(distance, taken, taken)):
                raise DonorLied("slow weights that are not finite")
        return TakenCopy(taken, verdict)

    async def _pull(self, stage: int, copies: list[SlowCopy]) -> list[SlowCopy]:
        """The copies that could be pulled: the first one whole, of the others only the compared parts. Raises
        Unavailable."""
        left = list(copies)
        rng = seeded("archive", self.transport.peer_id, *(copy.offer.id.hex() for copy in copies))
        parts = {copy.peer: sampled(len(copy.offer.hashes), rng) for copy in copies}

        async def pull(copy: SlowCopy, whole: bool) -> None:
            indices = range(len(copy.offer.hashes)) if whole else parts[copy.peer]
            try:
                with self._blaming(copy.peer, stage):
                    await copy.pull(self._donor(stage), indices)
            except Unavailable:
                left.remove(copy)
                copy.drop()

        await gather_or_cancel([partial(pull, copy, index == 0) for index, copy in enumerate(copies)])
        while left and not any(copy.whole for copy in left):
            await pull(left[0], whole=True)
        if not left:
            raise Unavailable(f"{stage_name(stage)}: none of {len(copies)} replicas gave a whole copy")
        return left

    def _tell(self, stage: int, copies: Sequence[SlowCopy], verdict: CopyVerdict) -> None:
        taken = None if verdict.taken is None else copies[verdict.taken].peer
        self.telemetry.event(
            "archive.compared",
            level="info" if taken is not None and not verdict.liars else "warning",
            stage=stage,
            peer=taken,
            copies=len(copies),
            agree=verdict.agree,
            reason=verdict.reason,
        )
        for liar in verdict.liars:
            self._refuse(
                liar, stage, DonorLied(f"slow weights far from those of {verdict.agree + 1} replicas that agree")
            )

    @contextlib.contextmanager
    def _blaming(self, peer: PeerId, stage: int) -> Iterator[None]:
        """Log faults of `peer`, and raise them as Unavailable."""
        try:
            yield
        except (RemoteFault, Unavailable) as failure:
            self._refuse(peer, stage, failure)
            raise Unavailable(f"{stage_name(stage)}: {short(peer)}: {failure}") from failure

    def _refuse(self, peer: PeerId, stage: int, failure: RemoteFault | Unavailable) -> None:
        lied = isinstance(failure, DonorLied)
        if lied:
            self.liars.add(peer)
            self.telemetry.count(name.PEER_FAULTS, kind="state")
        self.telemetry.event("archive.refused", level="warning", peer=peer, stage=stage, lied=lied, reason=str(failure))

    def _donor(self, stage: int) -> DonorClient:
        here = self.transport, self.run_id, stage, self.sizes[stage], self.telemetry
        return DonorClient(*here, limits=LIMITS, cut=SLOW, warrant=self.warrant)


def judged(copies: Sequence[SlowCopy], before: Callable[[int, int], np.ndarray] | None) -> CopyVerdict:
    """The verdict on `copies` of one stage, compared with each other and with the previous checkpoint, whose elements
    [first, last) `before` returns. Blocks: reads all of them."""
    count = len(copies)
    apart = {(i, j): distance(copies[i], copies[j]) for i in range(count) for j in range(i + 1, count)}
    last = None if before is None else [distance_to(copy, before) for copy in copies]
    ready = [index for index, copy in enumerate(copies) if copy.whole]
    return choose_copy([copy.peer for copy in copies], apart, last, ready)


def _check_round(rounds: Iterable[int]) -> None:
    """Raises Unavailable for copies of `rounds`, one a stage, in which nothing is trained yet."""
    if not median_low(rounds):
        raise Unavailable("the run has not finished its first round: there is nothing to copy yet")
