"""How fast a replica is believed to be: by what was seen of it and of the others of its stage. Pure.

A replica announces a speed, and says which part of an answer's time later stages took; both are its own words, and a
lie that answers at once would get nearly all microbatches of a stage. So three bounds:

    announced       counts until the first answer, and no more than ANNOUNCED_MAX times the stage's median
    answered        never as less than the stage's usual time over FASTER_MAX: what the replicas of the stage take when
                    little waits there (the lowest tenth of each one's answers; of these the median)
    not possible    below what the arithmetic takes on the fastest device known: counts as usual, no faster

Of n like replicas one that answers at once gets FASTER_MAX / (n - 1 + FASTER_MAX) of the work. A machine that is really
so many times as fast gets its part all the same: the others take a little longer than usual where all are busy. One
that is faster still has to be checked first: answers that others found right (auditor.py) raise its bound. Where a
run's manifest has all believed, nothing is bounded but what is announced.

Nor do false announcements draw replicas away from a stage that seems strong by them (rebalance.py): they are bounded in
the same way, and a replica that is about to leave compares them with what its stage asks of it (`witnessed`).
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import replace

from swarmnode.manifest import Manifest
from swarmnode.membership.swarm import Member, Swarm
from swarmnode.model.split import split

ANNOUNCED_MAX = 4.0  # guess: machines at homes differ by five to one, the median by less
# Measured (tests/pipeline/test_credible.py): what a liar gets of 3 and of 20 replicas, and what three usual replicas
# and one of five times their speed, unchecked, do of what they can with three microbatches for each under way:
# 2: 50 %, 10 % and 75 %; 3: 60, 14, 88; 4: 67, 18, 98; without a bound 93, 90, 100. Simulated, home-links and
# two-continents, 5 minutes, two seeds each, samples against no bound: 2: -1 % to +3 %, 3: -1 to +2, 4: 0 to +1.
FASTER_MAX = 2.0
CONFIRMED_DOUBLE = 4  # guess: so many right answers in a row double what is believed
DOUBLINGS_MAX = 5.0  # guess: 64 times the usual speed, an H100 among laptops
SEEN_FACTOR = 1.5  # guess: chance gives a slow replica half as much again as its part
SEEN_SLACK = 0.01  # guess: of a replica's speed, where next to nothing is to be done
LOW = 0.1  # guess: of a replica's answers, those that found it with little to do
LOW_STEP = 0.05  # guess: the tenth moves by so much with an answer below it, and by a ninth of that with one above
FASTEST_FLOP_PER_S = 5e15  # twice a B200's dense bfloat16, by its data sheet


def possible_s(manifest: Manifest, stage: int) -> float:
    """Seconds that a sample takes at least, forward and back, at a replica of `stage`: its arithmetic alone."""
    part = split(manifest.model, manifest.pipeline.stages)[stage]
    return 3.0 * part.cost * manifest.model.context / FASTEST_FLOP_PER_S  # backward costs twice as much as forward


def median_speed(told: Iterable[float]) -> float:
    """Of announced samples per second; 0 where nobody told. Of two the lower."""
    known = [speed for speed in told if speed > 0.0]
    return statistics.median_low(known) if known else 0.0


def bounded(swarm: Swarm, costs: Sequence[float]) -> Swarm:
    """`swarm` with no announced speed above ANNOUNCED_MAX times the median of all, each in work done: samples a second
    times its stage's relative cost. The same where nobody announces so much."""
    told = [m.samples_per_second * costs[m.stage] for m in swarm.members() if m.samples_per_second > 0.0]
    most = ANNOUNCED_MAX * median_speed(told)
    if max(told, default=0.0) <= most:
        return swarm

    def bound(member: Member) -> Member:
        limit = most / costs[member.stage]
        return replace(member, samples_per_second=limit) if member.samples_per_second > limit else member

    return Swarm.frozen([tuple(map(bound, members)) for members in swarm.stages], sizes=swarm.sizes)


def evened(swarm: Swarm, stage: int) -> Swarm:
    """`swarm` where the member of `stage` that announces most is no faster than the next one there: what no single
    announcement decides."""
    members = swarm.stages[stage]
    order = sorted(members, key=lambda member: member.samples_per_second)
    if len(order) < 2:
        return swarm
    most = order[-2].samples_per_second
    even = tuple([replace(m, samples_per_second=most) if m is order[-1] else m for m in members])
    return Swarm.frozen([even if at == stage else other for at, other in enumerate(swarm.stages)], sizes=swarm.sizes)


def witnessed(used: float, rate: float, claimed: float) -> tuple[bool, str]:
    """(whether the speeds that the replicas of a stage announce agree with what one of them sees, the reason). Of its
    own speed it was asked for the share `used`, the run does `rate` samples a second, its stage together claims
    `claimed`. Routers give each replica by its speed, so the stage was asked for about the same share of what it has.
    """
    if claimed <= 0.0:
        return True, "nothing is announced"
    due = rate / claimed
    reason = f"this node is asked for {used:.3g} of what it can do; of what its stage announces, {due:.3g} is needed"
    return used <= SEEN_FACTOR * due + SEEN_SLACK, reason


def lowest(before_s: float, seconds: float) -> float:
    """The low quantile of a replica's times after one more; `before_s` 0: it is the first. The usual stochastic
    approximation, in steps of a share."""
    if before_s <= 0.0:
        return seconds
    return before_s * (1.0 - LOW_STEP * (1.0 - LOW) if seconds < before_s else 1.0 + LOW_STEP * LOW)


def faster(most: float, confirmed: int) -> float:
    """How many times the usual speed is believed of a replica with so many right answers in a row; `most` with none."""
    return float(most * 2.0 ** min(DOUBLINGS_MAX, confirmed / CONFIRMED_DOUBLE))


def usual(lows: Iterable[float]) -> float:
    """Seconds that a replica of the stage takes when little waits there; 0 where nobody has answered. Of two the
    longer."""
    known = [low for low in lows if low > 0.0]
    return statistics.median_high(known) if known else 0.0
