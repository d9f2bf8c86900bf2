"""Choose how a replica comes by the state of its stage: sources as values, one order of them, and the choice.

All functions are pure: they take what one look at the swarm showed and return (answer, reason).
keep/recovery/recovery_look.py looks, and keep/recovery/restore.py carries the choice out.
"""

from __future__ import annotations

import enum
import functools
import sys
import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, replace
from statistics import median_low

from swarmnode.base.ids import PeerId, RunId, digest64, rank, short, stage_name
from swarmnode.base.wire import record_pb2
from swarmnode.keep.recovery.resumption import Resumption
from swarmnode.keep.transfer.snapshot import CHUNK_NBYTES
from swarmnode.net.membership.liveness import LOST_PERIODS, SMALL_CALL_S, TRIES
from swarmnode.net.membership.state_line import StateLine
from swarmnode.net.membership.swarm import Member, Swarm
from swarmnode.run.manifest import LimitsSpec, RecoverySpec

SLOW_SHARE = 0.5  # guess: of the median speed of a stage's replicas
QUIET_PERIODS = LOST_PERIODS - 1  # before that it is looked up again, and pinged if that tells nothing newer
CLAIM_WAIT_S = 300.0  # guess: a node waits so long for a run that it heard of before it begins anew
RETURN_WAIT_S = 60.0  # guess: where most of a run is gone, a node waits so long for those that hold its stage. One that
# announces itself and cannot be called (behind a NAT without a relay) holds nobody up for longer.
LOST_WAIT_S = CLAIM_WAIT_S  # then what nobody brought back counts as lost, and its stage begins from the seed
NEIGHBOUR_WAIT_S = RETURN_WAIT_S  # a node waits so long for neighbour stages that are being brought back themselves
TRIES_MAX = TRIES  # times that sources which may work the next time are tried before this process gives up


class RecoverySource(enum.StrEnum):
    """A way to come by a stage's state, or why there is none yet. The values appear in events and metrics."""

    FRESH = "fresh"  # initialised from the manifest's seed: the run has not trained
    BASE = "base"  # the pretrained model that the run started from
    OWN = "own"  # this replica itself has it, after a pause
    REPLICA = "replica"  # a living replica's snapshot
    RING = "ring"  # the snapshot that a node of the stage before keeps, or what a paused replica holds
    DISK = "disk"  # this node's own disk
    PIECES = "pieces"  # what members saved of the stages as they were cut before
    ARCHIVE = "archive"  # the slow weights of the owner's archive, from a bootstrap that this node's user named
    CHECKPOINT = "checkpoint"  # the checkpoint this node was told to resume
    CHECKFREE = "checkfree"  # rebuilt from its neighbours
    WAIT = "wait"  # not yet: look again
    STOP = "stop"  # nothing is left to try


Choice = tuple[RecoverySource, str]
"""A kind of source, and why it is the best one."""

ORDER = (
    (RecoverySource.REPLICA,),
    (
        RecoverySource.OWN,
        RecoverySource.DISK,
        RecoverySource.RING,
        RecoverySource.PIECES,
        RecoverySource.CHECKPOINT,
    ),
    (RecoverySource.ARCHIVE,),
    (RecoverySource.BASE,),
    (RecoverySource.CHECKFREE,),
    (RecoverySource.FRESH,),
)
"""The order of sources: a replica that serves, copies (the latest round first, and at one round this machine's own,
which cost no link), the owner's archive, then what makes a state anew."""

RANKS = {kind: (tier, at) for tier, kinds in enumerate(ORDER) for at, kind in enumerate(kinds)}

COPIES = {
    RecoverySource.OWN: "in this replica",
    RecoverySource.DISK: "on this disk",
    RecoverySource.RING: "kept by a neighbour or a paused replica",
    RecoverySource.PIECES: "with members, by the stages as they were before",
    RecoverySource.CHECKPOINT: "in the checkpoint",
}


@dataclass(frozen=True, slots=True)
class OwnState:
    """The state that a replica has already: samples of the run in it, and its line."""

    samples: int
    line: StateLine


Place = PeerId | Resumption | OwnState | None
"""A peer (this node itself: its memory), a folder or bucket, the replica itself. None: members, found when needed."""


@dataclass(frozen=True, slots=True)
class StateSource:
    """A state of the stage that somebody has: how it is kept, the rounds of the run behind it, and where.

    A round has a fraction where the state was copied between two. The place says how far it is trusted: states of peers
    are compared with others' (state_check.py), the archive's needs the owner's warrant, and this machine's own are
    loaded as they are.
    """

    kind: RecoverySource
    round: float
    place: Place = None


def best_first(sources: Iterable[StateSource]) -> list[StateSource]:
    """`sources` in ORDER. Of one kind and round the first given stays first."""

    def key(source: StateSource) -> tuple[int, float, int]:
        tier, at = RANKS[source.kind]
        return tier, -source.round, at

    return sorted(sources, key=key)


@dataclass(frozen=True, slots=True)
class RecoveryView:
    """The swarm as seen once by a node that needs the state of `stage`. Rounds count from the run's beginning."""

    stage: int
    stages: int
    samples_total: int  # the median of what the peers that answer claim; so is round_now
    round_now: int
    claimed: int = 0  # samples that bootstraps, contacts or this disk remember, where nobody serves
    little: bool = False  # they are less than a round: before its first one a run has no copies
    unanswered: bool = False  # nobody that this node knows of says how far the run is
    samples_least: int = 0  # the lower third of it
    sources: tuple[StateSource, ...] = ()  # states of the stage that somebody has, and answers
    unsure: int = 0  # replicas that do not answer, heard of less than LOST_PERIODS announce periods ago
    builder: PeerId | None = None  # another node that brings the stage back, or will before this one
    settled: bool = True  # others have had the time to hear of this node
    asleep: str = ""  # a paused replica of the stage that answers, and until when it sleeps
    ends: tuple[PeerId, ...] | None = None  # nodes that keep embedding or head, latest first; None: the stage has none
    returning: bool = False  # other stages had no replica either when this node first looked
    below: bool = False  # the stage before serves and answers
    above: bool = False  # the stage after does
    has_base: bool = False  # the run started from a pretrained model
    failed: frozenset[RecoverySource] = frozenset()  # kinds that failed when tried
    waited_s: float = 0.0  # since this node began to look

    def of(self, *kinds: RecoverySource) -> list[StateSource]:
        """The sources of `kinds` that did not fail, the best first."""
        return best_first(one for one in self.sources if one.kind in kinds and one.kind not in self.failed)

    @property
    def resumed_now(self) -> bool:
        """Whether the checkpoint that this node resumes is of the round that the run is in."""
        return any(source.round == self.round_now for source in self.of(RecoverySource.CHECKPOINT))


def choose_source(view: RecoveryView, spec: RecoverySpec) -> Choice:
    """The source to try now, and why: the answer of the first rule that has one. A source that failed is not tried
    again."""
    if view.of(RecoverySource.OWN):
        return _go_on(view)
    if view.samples_total == 0:
        return _not_trained(view)
    return _same_round(view) or _living(view) or _lost(view, spec)


def _not_trained(view: RecoveryView) -> Choice:
    """Nobody that answers has trained: the beginning, unless the run may have gone further elsewhere."""
    claim_wait_s = RETURN_WAIT_S if view.little else CLAIM_WAIT_S
    if view.claimed and view.waited_s < claim_wait_s:
        return RecoverySource.WAIT, f"the run has trained {view.claimed} samples, but no node that has them is here yet"
    if view.unanswered and view.waited_s < CLAIM_WAIT_S:
        return RecoverySource.WAIT, "no machine that this one knows answers, so that nobody says how far the run is"
    return _begun(view, "the run has not trained yet")


def _same_round(view: RecoveryView) -> Choice | None:
    """The checkpoint that this node resumes, if it is of the round that the run is in."""
    if not view.resumed_now:
        return None
    if not view.settled:  # a late joiner may not have heard yet how far the others are
        return RecoverySource.WAIT, "a checkpoint of this very round; others may be further"
    return RecoverySource.CHECKPOINT, "the run goes on from the checkpoint in this very round"


def _living(view: RecoveryView) -> Choice | None:
    """A replica that serves, or a wait for one that may serve soon."""
    stage = view.stage
    if donors := view.of(RecoverySource.REPLICA):
        return RecoverySource.REPLICA, f"{len(donors)} replicas of {stage_name(stage)} are alive"
    if view.unsure and view.waited_s < RETURN_WAIT_S:
        silent = f"{view.unsure} replicas of {stage_name(stage)} do not answer, but were heard of a moment ago"
        return RecoverySource.WAIT, silent
    if view.builder is not None:
        return RecoverySource.WAIT, f"{short(view.builder)} brings {stage_name(stage)} back"
    if not view.settled:
        return RecoverySource.WAIT, f"no replica of {stage_name(stage)} answers; others may be about to bring it back"
    return None


def _lost(view: RecoveryView, spec: RecoverySpec) -> Choice:
    """No replica serves: a copy that somebody keeps, a node that returns, the base model, neighbours, or the seed."""
    lost = f"no replica of {stage_name(view.stage)} answers"
    copied = any(source.kind in (RecoverySource.DISK, RecoverySource.RING) for source in view.sources)
    if view.round_now == 0 and not copied:
        return _begun(view, f"{lost}, and the run has not finished a round")
    source, why = _snapshot(view, spec.snapshot_rounds_max)
    if source is not None:
        return source, f"{lost}; {why}"
    lost = f"{lost}, {why}"
    return _elsewhere(view, lost) or _remade(view, spec, lost)


def _elsewhere(view: RecoveryView, lost: str) -> Choice | None:
    """The owner's archive, or a wait for a node that has the state and may give it soon; else the base model, which is
    nearer to what was lost than other stages' layers."""
    if view.of(RecoverySource.ARCHIVE):
        return RecoverySource.ARCHIVE, f"{lost}; a coordinator may have it in the owner's archive"
    if view.asleep and view.waited_s < RETURN_WAIT_S:
        return RecoverySource.WAIT, f"{lost}; {view.asleep} has it, and could not give it"
    if view.returning and view.waited_s < RETURN_WAIT_S:
        return RecoverySource.WAIT, (
            f"the run has trained {view.samples_total} samples, and the state of {stage_name(view.stage)} left with its"
            f" last node: waiting for that node, or for an archive, {RETURN_WAIT_S:.0f} s at most"
        )
    if view.has_base and RecoverySource.BASE not in view.failed:
        return _begun(view, lost)
    return None


def _remade(view: RecoveryView, spec: RecoverySpec, lost: str) -> Choice:
    """The state rebuilt from the neighbour stages (CheckFree), or from the seed where they do not suffice in time."""
    if spec.method == "none" and view.asleep:
        return RecoverySource.WAIT, f"{lost}; {view.asleep} has it, and recovery.method is none"
    if spec.method == "none":
        return RecoverySource.STOP, f"{lost}, and recovery.method is none"
    if RecoverySource.CHECKFREE in view.failed:
        return RecoverySource.STOP, f"{lost}, and rebuilding it from its neighbours failed"
    able, needs = neighbours_suffice(view)
    if able:
        return RecoverySource.CHECKFREE, f"{lost}; {needs}"
    if view.waited_s < (LOST_WAIT_S if view.returning else NEIGHBOUR_WAIT_S):
        return RecoverySource.WAIT, f"{lost}; {needs}"
    if neighbours_suffice(replace(view, ends=None))[0] and not view.has_base:  # a new head would undo the pretraining
        # The other stages keep what they have learned. A run that waits longer would gain nothing by it.
        return RecoverySource.CHECKFREE, f"{lost}; {needs}: that part of it begins from the seed"
    if view.asleep:  # what it has is not lost
        return RecoverySource.WAIT, f"{lost}; {needs}: {view.asleep} has it"
    if view.returning and not view.has_base:
        return RecoverySource.FRESH, f"{lost}; {needs}: its {view.samples_total} samples are lost"
    return RecoverySource.STOP, f"{lost}; {needs}"


def _go_on(view: RecoveryView) -> Choice:
    """The source of a replica that comes back from a pause with a state: replicas that served meanwhile, else the
    newest of its own and what is kept."""
    if donors := view.of(RecoverySource.REPLICA):
        return RecoverySource.REPLICA, f"{len(donors)} replicas of {stage_name(view.stage)} are alive"
    if view.unsure and view.waited_s < RETURN_WAIT_S:
        return RecoverySource.WAIT, f"{view.unsure} replicas of {stage_name(view.stage)} do not answer"
    source, why = _snapshot(view, sys.maxsize)
    assert source is not None, "its own state is one"
    return source, f"no replica of {stage_name(view.stage)} answers; {why}"


def _begun(view: RecoveryView, why: str) -> Choice:
    """The weights that the run began with."""
    if not view.has_base:
        return RecoverySource.FRESH, f"{why}: initialised from the seed"
    return RecoverySource.BASE, f"{why}: the base model's weights"


def _snapshot(view: RecoveryView, rounds_max: int) -> tuple[RecoverySource | None, str]:
    """The kind of the newest copy at most `rounds_max` rounds old, None without one, and why."""
    copies = view.of(*COPIES)
    if not copies:
        return None, "no snapshot of it is kept"
    age = max(0.0, view.round_now - copies[0].round)
    if age > rounds_max:
        return None, f"the newest snapshot of it is {age:.3g} rounds old (at most {rounds_max})"
    return copies[0].kind, f"a snapshot {age:.3g} rounds old is {COPIES[copies[0].kind]}"


class AfterFailure(enum.Enum):
    """The next step of a restore whose source failed."""

    AGAIN = enum.auto()  # look again at once
    LATER = enum.auto()  # look again after an announce period
    OTHERS = enum.auto()  # believe only replicas that were seen at work from now on


class SourceFailures:
    """The failures of one restore: `kinds` of sources that are not tried again, and `copies` of keepers, by round.

    Later copies of the same keepers may come: of a replica that leaves, or with a renewal.
    """

    def __init__(self) -> None:
        self.kinds = set[RecoverySource]()
        self.copies = set[tuple[float, Place]]()
        self.tries = 0  # of sources that may work the next time
        self._tried_at = -1  # the run's samples at the last of them
        self._vain_times = 0  # that no copy could be had

    @property
    def over(self) -> bool:
        """Whether this process gives up."""
        return self.tries >= TRIES_MAX

    def record(self, source: RecoverySource, view: RecoveryView) -> AfterFailure:
        """Note that `source` failed, chosen by `view`."""
        if source is RecoverySource.RING and self._vain_times < TRIES_MAX:
            self._vain_times += 1
            self.copies.update((copy.round, copy.place) for copy in view.of(source))
        elif source is RecoverySource.REPLICA or view.round_now == 0:
            # A replica is one of several and may answer the next time; before the first round there is nothing but the
            # beginning to go to.
            return self._count_try(source, view.samples_total)
        elif source is RecoverySource.PIECES and view.waited_s < LOST_WAIT_S:  # their holders are on the way
            return AfterFailure.LATER
        else:
            self.kinds.add(source)
        return AfterFailure.AGAIN

    def _count_try(self, source: RecoverySource, samples_total: int) -> AfterFailure:
        """Count a try. If the run stood still meanwhile, its replicas are keys that do nothing: others are to count."""
        self.tries += 1
        stands = source is RecoverySource.REPLICA and samples_total == self._tried_at
        self._tried_at = samples_total
        return AfterFailure.OTHERS if self.over and stands else AfterFailure.AGAIN


def sleeper_text(member: Member) -> str:
    """A paused `member` in words, and until when it sleeps: "12D3…abcd, asleep until 22:00 UTC"."""
    until = time.strftime(" until %H:%M UTC", time.gmtime(member.resumes_unix_s)) if member.resumes_unix_s else ""
    return f"{short(member.peer)}, asleep{until},"


def neighbours_suffice(view: RecoveryView) -> tuple[bool, str]:
    """Whether the stage can be rebuilt from its neighbours, and why.

    An inner stage needs both: two adjacent lost stages cannot be rebuilt from the outer sides alone (CheckFree,
    arXiv 2506.15461, section 3).
    """
    needed = [stage for stage in (view.stage - 1, view.stage + 1) if 0 <= stage < view.stages]
    serving = {view.stage - 1: view.below, view.stage + 1: view.above}
    absent = [stage for stage in needed if not serving[stage]]
    if not needed:
        return False, "it is the only stage"
    if absent:
        return False, f"its neighbours {_listed(absent)} do not serve"
    if view.ends == ():
        return False, "nobody keeps its embedding or head"
    return True, f"its neighbours {_listed(needed)} serve"


def _listed(stages: list[int]) -> str:
    return " and ".join(map(str, stages))


def donors_of(swarm: Swarm, stage: int, me: PeerId) -> tuple[PeerId, ...]:
    """Replicas that can give the state of `stage`, in an order of `me`'s own: by lot, the slow ones last.

    A replica is slow below SLOW_SHARE of the median speed: a copy waits for the piece of work under way, which takes a
    slow machine a minute (simulated: swarm48). A higher announced speed brings nobody forward.
    """
    serving = [member for member in swarm.serving(stage) if member.peer != me]
    if not serving:
        return ()
    enough = SLOW_SHARE * median_low([member.samples_per_second for member in serving])
    salt = digest64("donors", me)
    serving.sort(key=lambda member: (member.samples_per_second < enough, rank(member.peer, salt)))
    return tuple([member.peer for member in serving])


def keeps(
    swarm: Swarm, stage: int, run_id: RunId, count: int, me: PeerId, works: Callable[[PeerId], bool] = lambda peer: True
) -> bool:
    """Whether `me` is one of the `count` serving nodes of the stage before `stage` that keep its snapshot.

    The last stage is the one before the first. Only nodes that `me` saw at work (`works`) rank before it: keys, which
    cost nothing, can be made to rank first. So nodes that have met few others keep more copies, and those that have met
    all compute the same keepers. The scan ends early for most nodes, at the first `count` members before them.
    """
    before = swarm.serving((stage - 1) % len(swarm.stages))
    mine = (_rank(run_id, stage, me), me)
    ahead = 0
    for member in before:
        ahead += (_rank(run_id, stage, member.peer), member.peer) < mine and works(member.peer)
        if ahead >= count:
            return False
    return any(member.peer == me for member in before)


@functools.lru_cache(maxsize=1 << 16)
def _rank(run_id: RunId, stage: int, peer: PeerId) -> int:
    """The order of keepers. Cached: every replica asks it of each of its mates, again and again."""
    return digest64(run_id, "keeper", stage, peer)


def first_builder(stage: tuple[Member, ...], answering: Collection[PeerId], me: PeerId) -> PeerId | None:
    """Another living node that brings the stage back before `me` may: it has the state already, has saved a later
    one on its disk, or joined earlier.

    None when it is the turn of `me`, whether or not `me` is among the members.
    """
    others = [m for m in stage if m.peer in answering and m.peer != me]
    for member in others:
        if member.state == record_pb2.NODE_STATE_SYNCING:
            return member.peer
    able = [m for m in stage if m.peer in answering or m.peer == me]
    joining = [m for m in able if m.state == record_pb2.NODE_STATE_JOINING]
    first = min(joining, key=lambda m: (-m.saved_samples, m.joined_unix_s, m.peer), default=None)
    return first.peer if first is not None and first.peer != me else None


class RecoveryClaims:
    """The nodes that one node waits for while they bring its stage back.

    A claim is one field of a record, and answering pings costs nothing. A node has no claim any more that does not
    serve after a second for each chunk of the snapshot, and as long as a silent replica takes to count as gone, or a
    busy machine to answer.
    """

    def __init__(self, limits: LimitsSpec, nbytes: int) -> None:
        """`nbytes` of the stage's state."""
        self._allowed_s = max(SMALL_CALL_S, LOST_PERIODS * limits.announce_period_s) + nbytes / CHUNK_NBYTES
        self._since_s: dict[PeerId, float] = {}

    def builder(
        self, stage: tuple[Member, ...], answering: Collection[PeerId], me: PeerId, now_s: float
    ) -> PeerId | None:
        """`first_builder` of the nodes whose time is not over at loop time `now_s`.

        All nodes that claim one after the other have TRIES times the time of one.
        """
        able = set(answering)
        while (peer := first_builder(stage, able, me)) is not None:
            since_s = self._since_s.setdefault(peer, now_s)
            all_s = now_s - min(self._since_s.values())
            if now_s - since_s <= self._allowed_s and all_s <= TRIES * self._allowed_s:
                return peer
            able.discard(peer)
        return None


def latest(kept: Collection[tuple[float, PeerId]], rounds_max: int) -> list[tuple[float, PeerId]]:
    """The snapshots `kept` (round, keeper), the latest first, without those beyond `rounds_max`, which the run cannot
    have reached."""
    return [(at, peer) for at, peer in sorted(kept, reverse=True) if at <= rounds_max]


def overdue(stage: Collection[Member], now_unix_s: float, limits: LimitsSpec) -> bool:
    """Whether `stage` has training replicas, and none of them was heard of within LOST_PERIODS announce periods.

    Then it is time to ping them. Replicas that join or drain do not count.
    """
    left_s = _left_s(limits, LOST_PERIODS)
    late = False
    for member in stage:
        if member.state == record_pb2.NODE_STATE_TRAINING:
            if member.expires_unix_s - now_unix_s > member.stretch * left_s:
                return False
            late = True
    return late


def quiet(stage: tuple[Member, ...], now_unix_s: float, limits: LimitsSpec) -> list[PeerId]:
    """Training replicas that were not heard of within QUIET_PERIODS announce periods."""
    left_s = _left_s(limits, QUIET_PERIODS)
    training = [member for member in stage if member.state == record_pb2.NODE_STATE_TRAINING]
    return [member.peer for member in training if member.expires_unix_s <= now_unix_s + member.stretch * left_s]


def _left_s(limits: LimitsSpec, periods: int) -> float:
    """Seconds until a record expires that is `periods` announce periods old, if its writer does not stretch them."""
    return limits.record_ttl_s - periods * limits.announce_period_s


def silent(stage: tuple[Member, ...], answering: Collection[PeerId], now_unix_s: float, limits: LimitsSpec) -> int:
    """The number of training replicas that do not answer, with a record younger than LOST_PERIODS announce periods.

    They may be out of reach for a moment only.
    """
    return sum(
        member.state == record_pb2.NODE_STATE_TRAINING
        and member.peer not in answering
        and member.expires_unix_s - now_unix_s > member.stretch * _left_s(limits, LOST_PERIODS)
        for member in stage
    )
