"""How a replica comes by the state of its stage, best way first. Pure: what was seen in, (rung, reason) out (design
section 7)."""

from __future__ import annotations

import enum
import functools
from collections.abc import Collection
from dataclasses import dataclass, replace

from swarmnode.ids import PeerId, RunId, digest64, short
from swarmnode.manifest import LimitsSpec, RecoverySpec
from swarmnode.membership.swarm import Member, Swarm
from swarmnode.wire import record_pb2

QUIET_PERIODS = 2  # guess: the same after which one of many is looked up again, and pinged if that tells nothing newer
LOST_PERIODS = 3  # issue 5: announce periods without a record after which a silent replica counts as gone
BUILDER_S, BUILDER_PERIODS = 3.0, 3  # guess: somebody who brings a stage back serves it after so long at least, and ...
BUILDER_BYTES_PER_S = 1e6  # guess: ... a line at home: its snapshot is fetched at this rate
CLAIMS_MAX = 2  # guess: of those who claim to build one after the other, so many are waited for
NEIGHBOUR_WAIT_S = 60.0  # guess: how long a builder waits for neighbours that are being brought back themselves


class Rung(enum.StrEnum):
    """A way to come by a stage's state, or why not yet."""

    FRESH = "fresh"  # initialised from the manifest's seed: the run has not trained
    REPLICA = "replica"  # a living replica's snapshot
    RING = "ring"  # the snapshot that a node of the stage before keeps
    DISK = "disk"  # this node's own disk
    CHECKPOINT = "checkpoint"  # the checkpoint this node was told to resume
    CHECKFREE = "checkfree"  # rebuilt from its neighbours
    WAIT = "wait"  # not yet: look again
    STOP = "stop"  # nothing is left to try


PLACES = {Rung.DISK: "on this disk", Rung.RING: "kept in the ring", Rung.CHECKPOINT: "in the checkpoint"}


@dataclass(frozen=True, slots=True)
class Sight:
    """What one look around showed a node that needs the state of `stage`. Rounds count from the run's beginning."""

    stage: int
    stages: int
    samples_total: int
    round_now: int
    donors: tuple[PeerId, ...] = ()  # replicas that serve and answer
    unsure: int = 0  # replicas that do not answer, heard of less than LOST_PERIODS announce periods ago
    builder: PeerId | None = None  # another node that brings the stage back, or will before us
    settled: bool = True  # others have had the time to hear of us
    kept: tuple[tuple[int, PeerId], ...] = ()  # (round, node that keeps a snapshot of it, and answers or is this one)
    ends: tuple[PeerId, ...] | None = None  # who keeps embedding or head, latest first; None: the stage has none
    disk_round: int | None = None  # of the state on our own disk
    saved_round: int | None = None  # of the checkpoint this node was told to resume
    below: bool = False  # the stage before serves and answers
    above: bool = False  # the stage after does
    failed: frozenset[Rung] = frozenset()  # rungs that broke when tried
    waited_s: float = 0.0


def climb(sight: Sight, spec: RecoverySpec) -> tuple[Rung, str]:
    """The rung to try now, and why. One that broke is not tried again."""
    stage = sight.stage
    if sight.samples_total == 0:
        return Rung.FRESH, "the run has not trained yet: initialised from the seed"
    if sight.saved_round == sight.round_now and Rung.CHECKPOINT not in sight.failed:
        if not sight.settled:  # one that comes late may not have heard yet how far the others are
            return Rung.WAIT, "a checkpoint of this very round; others may be further"
        return Rung.CHECKPOINT, "the run goes on from the checkpoint in this very round"
    if sight.donors and Rung.REPLICA not in sight.failed:
        return Rung.REPLICA, f"{len(sight.donors)} replicas of stage {stage} are alive"
    if sight.unsure:
        return Rung.WAIT, f"{sight.unsure} replicas of stage {stage} do not answer, but were heard of a moment ago"
    if sight.builder is not None:
        return Rung.WAIT, f"{short(sight.builder)} brings stage {stage} back"
    if not sight.settled:
        return Rung.WAIT, f"no replica of stage {stage} answers; others may be about to bring it back"
    lost = f"no replica of stage {stage} answers"
    if sight.round_now == 0:
        return Rung.FRESH, f"{lost}, and the run has not finished a round: initialised from the seed"
    rung, why = _snapshot(sight, spec.snapshot_rounds_max)
    if rung is not None:
        return rung, f"{lost}; {why}"
    if spec.method == "none":
        return Rung.STOP, f"{lost}, {why}, and recovery.method is none"
    if Rung.CHECKFREE in sight.failed:
        return Rung.STOP, f"{lost}, {why}, and rebuilding it from its neighbours failed"
    able, needs = neighbours_suffice(sight)
    if sight.ends == () and sight.round_now <= spec.snapshot_rounds:
        # Keepers come by the first snapshots about now; so early, a new embedding or head loses little.
        return Rung.FRESH, f"{lost}, {why}; {needs}, and the run is {sight.round_now} rounds old: begun from the seed"
    if able:
        return Rung.CHECKFREE, f"{lost}, {why}; {needs}"
    if sight.waited_s < NEIGHBOUR_WAIT_S:
        return Rung.WAIT, f"{lost}, {why}; {needs}"
    if neighbours_suffice(replace(sight, ends=None))[0]:
        # The other stages keep what they have learned; a run that stands still keeps it for nobody.
        return Rung.CHECKFREE, f"{lost}, {why}; {needs}: that part of it begins from the seed"
    return Rung.STOP, f"{lost}, {why}; {needs}"


def _snapshot(sight: Sight, rounds_max: int) -> tuple[Rung | None, str]:
    """The newest snapshot that is not too old: on our own disk, or kept by a node of the stage before."""
    kept = max((round_index for round_index, _ in sight.kept), default=None)
    found = [
        (round_index, rung)
        for rung, round_index in (
            (Rung.RING, kept),
            (Rung.DISK, sight.disk_round),
            (Rung.CHECKPOINT, sight.saved_round),
        )
        if round_index is not None and rung not in sight.failed
    ]
    if not found:
        return None, "no snapshot of it is kept"
    newest = max(round_index for round_index, _ in found)
    age = max(0, sight.round_now - newest)
    if age > rounds_max:
        return None, f"the newest snapshot of it is {age} rounds old (at most {rounds_max})"
    # The own disk costs no link, so it wins a tie.
    rung = next(rung for rung in PLACES if (newest, rung) in found)
    return rung, f"a snapshot {age} rounds old is {PLACES[rung]}"


def neighbours_suffice(sight: Sight) -> tuple[bool, str]:
    """Whether the stage can be rebuilt from its neighbours. An inner stage needs both: of two adjacent lost stages
    neither can be told from the other side alone (CheckFree, arXiv 2506.15461, section 3)."""
    needed = [stage for stage in (sight.stage - 1, sight.stage + 1) if 0 <= stage < sight.stages]
    serving = {sight.stage - 1: sight.below, sight.stage + 1: sight.above}
    absent = [stage for stage in needed if not serving[stage]]
    if not needed:
        return False, "it is the only stage"
    if absent:
        return False, f"its neighbours {_listed(absent)} do not serve"
    if sight.ends == ():
        return False, "nobody keeps its embedding or head"
    return True, f"its neighbours {_listed(needed)} serve"


def _listed(stages: list[int]) -> str:
    return " and ".join(map(str, stages))


def keeps(swarm: Swarm, stage: int, run_id: RunId, count: int, me: PeerId) -> bool:
    """Whether `me` is one of the `count` serving nodes of the stage before `stage` (before the first: of the last) that
    keep its snapshot, the same for everybody who sees the same swarm. For most, a few others tell that it is not."""
    before, mine, ahead = swarm.serving((stage - 1) % len(swarm.stages)), (_rank(run_id, stage, me), me), 0
    for member in before:
        ahead += (_rank(run_id, stage, member.peer), member.peer) < mine
        if ahead >= count:
            return False
    return any(member.peer == me for member in before)


@functools.lru_cache(maxsize=1 << 16)
def _rank(run_id: RunId, stage: int, peer: PeerId) -> int:
    """Asked of every replica by each of its mates, again and again."""
    return digest64(run_id, "keeper", stage, peer)


def first_builder(stage: tuple[Member, ...], answering: Collection[PeerId], me: PeerId) -> PeerId | None:
    """Another living node that brings the stage back before `me` may: it has the state already, or began earlier.

    None when it is on `me`, whether or not `me` is among the members.
    """
    others = [m for m in stage if m.peer in answering and m.peer != me]
    for member in others:
        if member.state == record_pb2.NODE_STATE_SYNCING:
            return member.peer
    able = [m for m in stage if m.peer in answering or m.peer == me]
    joining = [m for m in able if m.state == record_pb2.NODE_STATE_JOINING]
    first = min(joining, key=lambda m: (m.joined_unix_s, m.peer), default=None)
    return first.peer if first is not None and first.peer != me else None


class Claims:
    """Whom one node waits for, as they bring its stage back. A claim is a word in a record, and answering pings costs
    nothing: who has not come to serve within the time that a slow machine needs has no claim any more."""

    def __init__(self, limits: LimitsSpec) -> None:
        self._least_s = max(BUILDER_S, BUILDER_PERIODS * limits.announce_period_s)
        self._allowed_s = self._least_s
        self._since_s: dict[PeerId, float] = {}

    def begin(self, nbytes: int) -> None:
        """The stage's state has so many bytes."""
        self._allowed_s = self._least_s + nbytes / BUILDER_BYTES_PER_S
        self._since_s.clear()

    def builder(
        self, stage: tuple[Member, ...], answering: Collection[PeerId], me: PeerId, now_s: float
    ) -> PeerId | None:
        """`first_builder` of those whose time is not over; of all that come one after the other it is CLAIMS_MAX times
        as long."""
        able = set(answering)
        while (found := first_builder(stage, able, me)) is not None:
            since_s = self._since_s.setdefault(found, now_s)
            all_s = now_s - min(self._since_s.values())
            if now_s - since_s <= self._allowed_s and all_s <= CLAIMS_MAX * self._allowed_s:
                return found
            able.discard(found)
        return None


def latest(kept: Collection[tuple[int, int, PeerId]], rounds_max: int) -> list[tuple[int, PeerId]]:
    """(round, keeper) of the snapshots `kept` (round, inner steps, keeper), the latest first. None is of a round beyond
    `rounds_max`, which is yet to come."""
    return [(at, peer) for at, _, peer in sorted(kept, reverse=True) if at <= rounds_max]


def overdue(stage: Collection[Member], now_unix_s: float, limits: LimitsSpec) -> bool:
    """Whether `stage` has replicas, and none of them was heard of within LOST_PERIODS announce periods: time to ask
    whether any is alive. Those that join or say goodbye do not count."""
    left_s, found = _left_s(limits, LOST_PERIODS), False
    for member in stage:
        if member.state == record_pb2.NODE_STATE_TRAINING:
            if member.expires_unix_s - now_unix_s > left_s:
                return False
            found = True
    return found


def quiet(stage: tuple[Member, ...], now_unix_s: float, limits: LimitsSpec) -> list[PeerId]:
    """Serving replicas that were not heard of within QUIET_PERIODS announce periods."""
    due_unix_s = now_unix_s + _left_s(limits, QUIET_PERIODS)
    return [m.peer for m in stage if m.state == record_pb2.NODE_STATE_TRAINING and m.expires_unix_s <= due_unix_s]


def _left_s(limits: LimitsSpec, periods: int) -> float:
    """What a record of so many announce periods' age has to live."""
    return limits.record_ttl_s - periods * limits.announce_period_s


def silent(stage: tuple[Member, ...], answering: Collection[PeerId], now_unix_s: float, limits: LimitsSpec) -> int:
    """Serving replicas that do not answer and whose record is younger than LOST_PERIODS announce periods: they may only
    be out of reach for a moment."""
    return sum(
        member.state == record_pb2.NODE_STATE_TRAINING
        and member.peer not in answering
        and member.expires_unix_s - now_unix_s > _left_s(limits, LOST_PERIODS)
        for member in stage
    )
