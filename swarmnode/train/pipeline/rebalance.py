"""Choose the stage a node should serve. Pure; SWARM's rule (arXiv 2301.11913, section 3.2): help the weakest stage.

A stage with fewer than `min_keep` replicas takes precedence over speed: one more death there would lose all it learned
since the last snapshot. SWARM compares queues and moves the least loaded node. Here stages are compared by the samples
per second that their replicas announce: queues follow from these numbers, but also from the feeders' windows. With
machines that differ by five to one, the moving node must fit the gap, or the next period moves it back.
"""

from __future__ import annotations

import bisect
import math
import random
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from swarmnode.base.ids import PeerId, seeded, short, stage_name
from swarmnode.net.membership.liveness import PINGED_MAX
from swarmnode.net.membership.swarm import COMING, JOINING, PAUSED, SERVING, Member, Swarm

Reason = str
NEARLY_SAFE = 0.75  # guess: in the best mover's place and sooner, if a stage has too few replicas, a worse fit may go
SMALL = PINGED_MAX  # in larger swarms a single moving node matters little
TOGETHER_S = 30.0  # guess: from the start of a node until others know its measured speed
EQUAL = 1.0 + 1e-9  # speeds that differ only by rounding are equal
LASTS_S = 1800.0  # guess: duration of a gain (at 16 %/h, one node in twelve has changed by then)
# Cost of a move in seconds of the mover's work: the way, and above all the microbatches that it holds, whose work here
# and in later stages others must repeat. Simulated (swarm48, 32 h, seed 0): with 70 s 826 moves instead of 700, places
# better by 0.06 %, and 2.2 % fewer samples.
AWAY_S = 600.0


@dataclass(frozen=True, slots=True)
class RebalanceRules:
    """The manifest's rules. `ratio`: strongest to weakest stage from which nodes move. `min_keep`: replicas that stay,
    and that every stage should have before speed counts."""

    ratio: float
    min_keep: int

    @property
    def gain_min(self) -> float:
        """Least share by which the weaker stage must gain: half of the tolerated unevenness. Below it, noise in
        measured speeds would move nodes to and fro."""
        return (self.ratio - 1.0) / 2.0


@dataclass(frozen=True, slots=True)
class StageMove:
    """`peer` moves from `source` to `target`. The weaker of the two goes from `before` to `after` samples/s; the mover
    brings `speed`.

    `safety`: the target has too few replicas, whatever their speed.
    """

    peer: PeerId
    source: int
    target: int
    before: float
    after: float
    speed: float
    safety: bool = False

    @property
    def worth(self) -> float:
        """Samples gained while the gain lasts, minus the work lost by moving."""
        return (self.after - self.before) * LASTS_S - self.speed * AWAY_S


@dataclass(frozen=True, slots=True)
class StageLoad:
    """Samples per second and replicas of every stage; moving nodes count at their destination."""

    capacity: tuple[float, ...]
    sure: tuple[float, ...]  # without joiners that have not announced a speed
    replicas: tuple[int, ...]
    mean: float  # samples per second assumed of a replica that announced none

    def speed(self, member: Member) -> float:
        return member.samples_per_second or self.mean


def load(swarm: Swarm, costs: Sequence[float], without: PeerId | None = None) -> StageLoad:
    """The load of all stages, excluding the node `without`. `costs`: relative costs per sample of the stages; a node is
    faster by their ratio after a move. In a crowded stage the known members stand for all."""
    mean = _mean_speed(swarm)
    stages = len(swarm.stages)
    capacity = [0.0] * stages
    replicas = [0.0] * stages
    unsure = [0.0] * stages
    for stage, members in enumerate(swarm.stages):
        each = swarm.sizes[stage] / len(members) if members else 1.0
        speed, count = _settled(swarm, stage, mean, without)
        capacity[stage] += each * speed
        replicas[stage] += each * count
        for member in swarm.unsettled(stage):
            there = _destination(member, stage, stages)
            if there is None or member.peer == without:
                continue
            weight = 1.0 if there == member.moving_to else each  # movers are always known
            own = weight * (member.samples_per_second or mean) * costs[stage] / costs[there]
            capacity[there] += own
            replicas[there] += weight
            if member.state == JOINING and not member.samples_per_second:
                unsure[there] += own
    sure = tuple(whole - part for whole, part in zip(capacity, unsure, strict=True))
    return StageLoad(tuple(capacity), sure, tuple(map(round, replicas)), mean)


def _mean_speed(swarm: Swarm) -> float:
    """Samples per second of a member that announced a speed; 1 where none did."""
    stages = range(len(swarm.stages))
    speeds = [swarm.speeds(stage) for stage in stages]
    known = [m.samples_per_second for stage in stages for m in swarm.unsettled(stage) if m.samples_per_second]
    count = sum(len(swarm.settled(stage)) - untold for stage, (_, untold) in enumerate(speeds)) + len(known)
    return (sum(speed for speed, _ in speeds) + sum(known)) / count if count else 1.0


def _settled(swarm: Swarm, stage: int, mean: float, without: PeerId | None) -> tuple[float, int]:
    """(samples per second, number) of the settled members of `stage` other than `without`."""
    settled = swarm.settled(stage)
    if without is None:
        speed, untold = swarm.speeds(stage)
        return speed + untold * mean, len(settled)
    left = [member for member in settled if member.peer != without]
    return sum(member.samples_per_second or mean for member in left), len(left)


def _destination(member: Member, stage: int, stages: int) -> int | None:
    """The stage to which an unsettled `member` of `stage` will bring its speed, if any. A mover finishes what it holds
    before it goes: it drains, and comes all the same."""
    if member.state == PAUSED:
        return None
    if member.moving_to is not None and member.moving_to < stages:
        return member.moving_to
    return stage if member.state in COMING else None


def staying(swarm: Swarm, now_unix_s: float, ahead_s: float = LASTS_S) -> Swarm:
    """`swarm` without members that announced a pause within `ahead_s`: they will need a replacement."""
    until_unix_s = now_unix_s + ahead_s
    stages = list(swarm.stages)
    sizes = list(swarm.sizes)
    for stage, members in enumerate(swarm.stages):
        kept = tuple([m for m in members if not 0 < m.pauses_unix_s <= until_unix_s])
        if len(kept) < len(members):
            sizes[stage] = swarm.sizes[stage] * len(kept) // len(members)  # the known ones stand for all
            stages[stage] = kept
    return Swarm.frozen(stages, swarm, sizes)


def pause_ahead_s(swarm: Swarm, now_unix_s: float, ahead_s: float) -> float:
    """Seconds until the next member is `ahead_s` from its announced pause; infinite without one."""
    due = [m.pauses_unix_s - ahead_s - now_unix_s for m in swarm.members() if m.pauses_unix_s]
    return min((left_s for left_s in due if left_s > 0.0), default=math.inf)


def choose_stage(
    swarm: Swarm, costs: Sequence[float], rules: RebalanceRules, rng: random.Random, unable: Collection[int] = ()
) -> tuple[int, Reason]:
    """The stage a joiner should serve: an empty one, else one with fewer than `min_keep` replicas, else the slowest;
    never one its machine is `unable` to serve. At least one stage must remain.

    Of stages equal within the ratio, the one with the fewest replicas is chosen. `rng` breaks ties, so that joiners
    with the same view spread out.
    """
    now = load(swarm, costs)
    capacity = now.capacity
    replicas = now.replicas
    able = [stage for stage in range(len(capacity)) if stage not in unable]
    empty = [stage for stage in able if not replicas[stage]]
    if empty:
        # Costlier stages first: they will need more than one replica.
        dearest = max(costs[stage] for stage in empty)
        stage = rng.choice([stage for stage in empty if costs[stage] == dearest])
        return stage, f"{stage_name(stage)} has no replica"
    thin = _thin(replicas, rules.min_keep, able)
    if thin:
        stage = rng.choice(thin)
        return (
            stage,
            f"{stage_name(stage)} has {replicas[stage]} of the {rules.min_keep} replicas that each should have",
        )
    least = min(capacity[stage] for stage in able)
    needy = [stage for stage in able if capacity[stage] <= least * rules.ratio]
    fewest = min(replicas[stage] for stage in needy)
    stage = rng.choice([stage for stage in needy if replicas[stage] == fewest])
    return stage, f"{stage_name(stage)} is the slowest: samples/s by stage {_listing(capacity)}"


def reserved_stage(
    swarm: Swarm, me: PeerId, costs: Sequence[float], rules: RebalanceRules, seed: int, unable: Collection[int] = ()
) -> tuple[int, Reason]:
    """The stage for `me`, one of the members of `swarm` that choose at the same time. Each in turn, the first to join
    first, keeps the stage that it has reserved if nobody else is there, else chooses as by `choose_stage`. So members
    with the same view take different stages. All who joined within TOGETHER_S count as equally fast. `unable` are the
    stages that `me` cannot serve."""
    turns = sorted((m for m in swarm.members() if m.choosing), key=lambda member: (member.joined_unix_s, member.peer))
    since_s = max((m.joined_unix_s for m in turns), default=0.0) - TOGETHER_S
    # Whoever chose a moment ago tells a first speed, which others with the same reservations may not know yet.
    told = (replace(m, samples_per_second=0.0) if m.joined_unix_s > since_s else m for m in swarm.members())
    members = {m.peer: m for m in told if not m.choosing}
    stages = len(swarm.stages)
    for member in turns:
        taken = Swarm.of(members.values(), stages)
        stage = member.stage
        reason = f"{stage_name(member.stage)} is reserved, and has nobody else"
        if load(taken, costs).replicas[stage]:
            rng = seeded(seed, "stage", member.peer)
            own = unable if member.peer == me else member.unable
            stage, reason = choose_stage(taken, costs, rules, rng, own)
        if member.peer == me:
            return stage, reason
        members[member.peer] = replace(member, stage=stage, moving_to=None)
    # Of a crowd not all are known, perhaps not even `me`.
    return choose_stage(Swarm.of(members.values(), stages), costs, rules, seeded(seed, "stage", me), unable)


def shifted(before: Sequence[int], now: Sequence[int], rules: RebalanceRules) -> bool:
    """Whether a stage's replica count changed since `before` by more than the gain a move must bring, so that a move
    may help."""
    return any(abs(a - b) > rules.gain_min * max(a, b) for a, b in zip(before, now, strict=True))


def on_the_way(swarm: Swarm) -> tuple[tuple[PeerId, int, bool], ...]:
    """Moving or joining members: (peer, destination, whether its speed is known). A change here may change the best
    move. Empty for large swarms."""
    if sum(swarm.sizes) > SMALL:
        return ()
    return tuple(
        (m.peer, m.stage if m.moving_to is None else m.moving_to, m.samples_per_second > 0.0)
        for m in swarm.members()
        if m.moving_to is not None or m.state != SERVING
    )


def plan_move(
    swarm: Swarm, costs: Sequence[float], rules: RebalanceRules, me: PeerId | None = None
) -> tuple[StageMove | None, Reason]:
    """The most helpful move, or None and the reason. The move of `me` if it is nearly as good: nodes look at different
    times, and a good mover need not wait for the best. None if `me` is not in the source stage.

    Target: an empty stage, else one with fewer than `min_keep` replicas, else the weakest. Source: the strongest with
    replicas to spare; for the weakest target any such stage stronger by more than the ratio, as the strongest may have
    no small enough node. The speed of a joiner that has not measured itself does not count for its stage: a slow one
    was taken for average and sent three others round (simulated: swarm48, seed 1). The mover is the node that leaves
    the weaker of the two strongest. Every such move raises the weaker stage and leaves the other above it. So with
    constant speeds moves come to an end, and no move undoes the previous one. Exchanges of two nodes where no single
    one fits the gap would bring little: stages .983 as strong as even ones instead of .987 (Monte Carlo of swarm48's
    machines, one event after the other).
    """
    now = load(swarm, costs)
    need = _need(swarm, now, costs, rules)
    target = need.target
    before = now.capacity[need.target]
    there = need.there
    listing = _listing(now.capacity)
    if not need.sources and not need.urgent:
        return None, f"stages are alike: samples/s by stage {listing}"
    if me is not None:
        mine = next((member for stage in need.sources if (member := _find(there[stage], me)) is not None), None)
        if mine is None or not mine.may_move_to(target):
            return None, f"no node of this stage should move: samples/s by stage {listing}"
        # In a large swarm others' moves are considered only if this node's own would help: that is most of the work.
        if sum(swarm.sizes) > SMALL and not need.urgent:
            after = _weaker(now, costs, mine, target)
            move = _move(now, costs, mine, target, min(before, now.sure[mine.stage]), after, safety=False)
            if not _helps(move, rules):
                return None, f"this node's move does not help: samples/s by stage {listing}"
    best, own = _best_move(now, costs, need, rules, me)
    if best is None:
        return None, f"no move helps: samples/s by stage {listing}"
    if own is not None and len(there[own.source]) <= need.keep + 1:
        own = None  # two nodes leaving at the same time would leave too few
    # Slightly worse movers may go instead.
    good = best.after * (NEARLY_SAFE if need.urgent else 1.0 - rules.gain_min / 4.0)
    if own is not None and own.after >= good:
        best = own
    reason = f"{stage_name(target)} {need.what} (samples/s by stage {listing}); "
    return best, reason + f"with {short(best.peer)} it would have {before + best.speed:.3g}"


@dataclass(frozen=True, slots=True)
class _Need:
    """The stage that needs a replica most, `what` is wrong there, and the stages that can give one. `there`: by stage
    the replicas that stay; a source keeps `keep` of them. `empty`, or `thin`: with fewer than it should have."""

    target: int
    what: str
    there: Sequence[Sequence[Member]]
    sources: Sequence[int]
    keep: int
    empty: bool
    thin: bool

    @property
    def urgent(self) -> bool:
        """Whether a move helps whatever it costs the source in speed."""
        return self.empty or self.thin


def _need(swarm: Swarm, now: StageLoad, costs: Sequence[float], rules: RebalanceRules) -> _Need:
    capacity = now.capacity
    replicas = now.replicas
    stages = len(now.capacity)
    empty = [stage for stage, count in enumerate(replicas) if not count]
    thin = _thin(replicas, rules.min_keep)
    target = max(empty, key=lambda s: (costs[s], -s)) if empty else min(thin or range(stages), key=capacity.__getitem__)
    # An empty stage stops the whole run, so a stage may give all but its last replica.
    keep = 1 if empty else rules.min_keep
    # A stage whose relief is still on its way gives none: it needs more than `keep` present and staying.
    there = [swarm.settled(stage) for stage in range(stages)]
    able = [
        stage
        for stage in range(stages)
        if stage != target and len(there[stage]) > keep and any(m.may_move_to(target) for m in there[stage])
    ]
    if thin:
        # Replicas count here and not speed: the stage that misses one least gives it.
        sources = sorted(able, key=capacity.__getitem__)[-1:]
    else:
        sources = [stage for stage in able if now.sure[stage] > rules.ratio * capacity[target] * EQUAL]
    what = "is empty" if empty else f"has {replicas[target]} of {rules.min_keep} replicas" if thin else "is the slowest"
    return _Need(target, what, there, sources, keep, bool(empty), bool(thin))


def _best_move(
    now: StageLoad, costs: Sequence[float], need: _Need, rules: RebalanceRules, me: PeerId | None
) -> tuple[StageMove | None, StageMove | None]:
    """(the move after which the weaker of the two stages is strongest, the move of `me`), of those that help."""
    best = None
    own = None
    target = need.target
    safety = need.thin and not need.empty
    for stage in need.sources:
        before = min(now.capacity[target], now.sure[stage])
        least = -math.inf if need.urgent else (1.0 + rules.gain_min) * before
        for member in need.there[stage]:
            after = _weaker(now, costs, member, target)
            worse = best is not None and after < best.after and member.peer != me
            if not member.may_move_to(target) or after < least or worse:
                continue  # the usual case: skip it cheaply
            move = _move(now, costs, member, target, before, after, safety)
            if need.urgent or _helps(move, rules):
                best = move if best is None else max(best, move, key=lambda one: (one.after, -one.speed, one.peer))
                own = move if member.peer == me else own
    return best, own


def still_good(swarm: Swarm, costs: Sequence[float], move: StageMove, rules: RebalanceRules) -> tuple[bool, Reason]:
    """Whether `move`, planned some time ago, still helps; asked again once the state has arrived."""
    now = load(swarm, costs, without=move.peer)
    if now.replicas[move.source] < rules.min_keep:
        return (
            False,
            f"{stage_name(move.source)} would keep {now.replicas[move.source]} replicas; at least {rules.min_keep}",
        )
    if move.safety:
        count = now.replicas[move.target]
        return count < rules.min_keep, f"{stage_name(move.target)} has {count} replicas without it"
    own = move.speed * costs[move.target] / costs[move.source]
    before = min(now.capacity[move.target], now.sure[move.source] + own)
    after = min(now.capacity[move.target] + move.speed, now.sure[move.source])
    listing = f"{stage_name(move.source)} and {stage_name(move.target)} without it have {now.sure[move.source]:.3g} and"
    listing += f" {now.capacity[move.target]:.3g} samples/s, it brings {move.speed:.3g}"
    return after >= (1.0 + rules.gain_min / 2.0) * before, listing


def worth_it(move: StageMove, download_s: float) -> tuple[bool, Reason]:
    """Whether the gain of `move` outweighs the state's download and the mover's lost work."""
    if move.safety or not move.before:
        return True, "its stage must not risk one more death" if move.safety else "the stage is empty"
    left = move.worth - (move.after - move.before) * download_s
    return left > 0.0, f"{left:.3g} samples gained in {LASTS_S:g} s less a download of {download_s:.3g} s and the move"


def _thin(replicas: Sequence[int], min_keep: int, among: Sequence[int] | None = None) -> list[int]:
    """The stages (of `among`) with the fewest replicas, if these are fewer than `min_keep`."""
    stages = range(len(replicas)) if among is None else among
    fewest = min(replicas[stage] for stage in stages)
    return [stage for stage in stages if replicas[stage] == fewest < min_keep]


def _helps(move: StageMove, rules: RebalanceRules) -> bool:
    """Whether the weaker stage gains enough, and more than the mover's lost work."""
    return move.worth > 0.0 and move.after >= (1.0 + rules.gain_min) * move.before and move.after > move.before * EQUAL


def _find(members: Sequence[Member], peer: PeerId) -> Member | None:
    """`peer` among `members`, which are sorted by peer id; None if absent."""
    at = bisect.bisect_left(members, peer, key=lambda member: member.peer)
    return members[at] if at < len(members) and members[at].peer == peer else None


def _weaker(now: StageLoad, costs: Sequence[float], member: Member, target: int) -> float:
    """The weaker stage's samples per second after `member` has moved to `target`."""
    own = member.samples_per_second or now.mean
    here = member.stage
    return min(now.capacity[target] + own * costs[here] / costs[target], now.sure[here] - own)


def _move(
    now: StageLoad, costs: Sequence[float], member: Member, target: int, before: float, after: float, safety: bool
) -> StageMove:
    brings = now.speed(member) * costs[member.stage] / costs[target]
    return StageMove(member.peer, member.stage, target, before, after, brings, safety)


def _listing(capacity: Sequence[float]) -> str:
    return ", ".join(f"{value:.3g}" for value in capacity)
