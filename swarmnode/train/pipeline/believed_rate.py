"""Bound how fast a replica is believed to be, by what was observed of it and of its stage. Pure.

A replica announces its speed, and reports how much of an answer's time the later stages took. Both are unverified. A
replica that lied and answered at once would get nearly all microbatches of its stage. Three bounds prevent that:

    announced       counts until the first answer, and at most ANNOUNCED_MAX times the stage's median
    answered        never less than the stage's usual time over FASTER_MAX; usual: the time its replicas take when
                    little is queued (the lowest tenth of each one's answers; the median of these)
    impossible      an answer faster than the arithmetic on the fastest known device counts as the usual time

Of n equal replicas, one that answers at once gets FASTER_MAX / (n - 1 + FASTER_MAX) of the work. A machine that really
is that fast still gets its part: the others take a little longer than usual while all are busy. A faster one must be
audited first: confirmed answers (auditor.py) raise its bound. If the manifest turns audits off, only the announced
speed is bounded.

False announcements do not draw replicas away from a stage that seems strong (rebalance.py): they are bounded the same
way, and a replica about to leave compares them with the work its stage is asked for (`witnessed`).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import replace

from swarmnode.base.wire import record_pb2
from swarmnode.model.split import stages_of
from swarmnode.net.membership.clock import OUTLIER
from swarmnode.net.membership.swarm import Member, Swarm
from swarmnode.run.manifest import Manifest, boundary_codes, boundary_nbytes, boundary_width

ANNOUNCED_MAX = OUTLIER  # of the median: home machines differ by five to one
# Measured (tests/pipeline/test_credible.py): a liar's share among 3 and among 20 replicas; and the work that three
# usual replicas and an unchecked one of five times their speed do, of what they can, with three microbatches in flight
# for each. 2: 50 %, 10 % and 75 %; 3: 60, 14, 88; 4: 67, 18, 98; without a bound 93, 90, 100. Simulated, home-links and
# two-continents, 5 minutes, two seeds each, samples compared with no bound: 2: -1 % to +3 %, 3: -1 to +2, 4: 0 to +1.
FASTER_MAX = 2.0
CONFIRMED_DOUBLE = 4  # guess: so many right answers in a row double the bound
DOUBLINGS_MAX = 5.0  # guess: with FASTER_MAX 64 times the usual speed at most, an H100 among laptops
SEEN_FACTOR = 1.5  # guess: chance gives a slow replica half as much again as its part
LOW = 0.1  # guess: quantile of a replica's answers that found little queued
LOW_STEP = 0.05  # guess: the quantile moves by this share for an answer below it, and by a ninth of it for one above
FASTEST_FLOP_PER_S = 5e15  # twice a B200's dense bfloat16, by its data sheet


LABEL_NBYTES = 2  # of a token, for vocabularies up to 65,536


def sample_nbytes(manifest: Manifest, stage: int) -> tuple[int, int]:
    """Bytes that a replica of `stage` sends and receives per sample, for microbatches only.

    Activations and tokens go to the next stage and the gradient comes back; the same happens between the previous stage
    and this one. Rounds add a few per cent.
    """
    context = manifest.model.context
    there, back = (
        boundary_nbytes(code, context, boundary_width(manifest)) for code in boundary_codes(manifest.pipeline.boundary)
    )
    labels = LABEL_NBYTES * (context + 1)
    before = int(stage > 0)
    after = int(stage < manifest.pipeline.stages - 1)
    return after * (there + labels) + before * back, before * (there + labels) + after * back


def link_samples_per_s(manifest: Manifest, stage: int, up_bps: float, down_bps: float) -> float:
    """Samples per second that a link of these bit rates carries for a replica of `stage`; inf with a single stage. 0
    means no limit in that direction."""
    rates = [
        bps / (8.0 * nbytes)
        for bps, nbytes in zip((up_bps, down_bps), sample_nbytes(manifest, stage), strict=True)
        if bps and nbytes
    ]
    return min(rates, default=math.inf)


def allowed_samples_per_s(
    manifest: Manifest, stage: int, speed: float, allowance: record_pb2.Allowance | None
) -> float:
    """`speed` (samples per second) as limited by the link: the rate that others should expect and balance by."""
    if allowance is None:
        return speed
    return min(speed, link_samples_per_s(manifest, stage, allowance.up_bps, allowance.down_bps))


def possible_s(manifest: Manifest, stage: int) -> float:
    """Least seconds that a sample takes, forward and backward, at a replica of `stage`: its arithmetic alone."""
    part = stages_of(manifest)[stage]
    return 3.0 * part.cost * manifest.model.context / FASTEST_FLOP_PER_S  # backward costs twice as much as forward


def median_speed(told: Iterable[float]) -> float:
    """Lower median of announced samples per second; 0 if none is announced."""
    known = [speed for speed in told if speed > 0.0]
    return statistics.median_low(known) if known else 0.0


def bounded(swarm: Swarm, costs: Sequence[float]) -> Swarm:
    """`swarm` with announced speeds capped at ANNOUNCED_MAX times the median of all, compared as work: samples per
    second times the stage's relative cost. Returns the same object if none is capped."""
    rates = [m.samples_per_second * costs[m.stage] for m in swarm.members() if m.samples_per_second > 0.0]
    most = ANNOUNCED_MAX * median_speed(rates)
    if max(rates, default=0.0) <= most:
        return swarm

    def bound(member: Member) -> Member:
        limit = most / costs[member.stage]
        return replace(member, samples_per_second=limit) if member.samples_per_second > limit else member

    return Swarm.frozen([tuple(map(bound, members)) for members in swarm.stages], sizes=swarm.sizes)


def evened(swarm: Swarm, stage: int) -> Swarm:
    """`swarm` where the fastest announcement of `stage` is lowered to the second fastest: a decision that no single
    announcement makes."""
    members = swarm.stages[stage]
    order = sorted(members, key=lambda member: member.samples_per_second)
    if len(order) < 2:
        return swarm
    most = order[-2].samples_per_second
    even = tuple([replace(m, samples_per_second=most) if m is order[-1] else m for m in members])
    return Swarm.frozen([even if at == stage else other for at, other in enumerate(swarm.stages)], sizes=swarm.sizes)


def witnessed(used: float, rate: float, claimed: float) -> tuple[bool, str]:
    """(whether the speeds that a stage announces agree with one member's observation, the reason).

    The member was asked for the share `used` of its own speed; the run does `rate` samples per second and the stage
    claims `claimed` in all. Routers distribute work by speed, so `used` should be near rate / claimed.
    """
    if claimed <= 0.0:
        return True, "nothing is announced"
    due = rate / claimed
    reason = f"this node is asked for {used:.3g} of what it can do; of what its stage announces, {due:.3g} is needed"
    return used <= SEEN_FACTOR * due, reason


def lowest(before_s: float, seconds: float) -> float:
    """The low quantile of a replica's times after one more; `before_s` 0: it is the first. Stochastic approximation
    with proportional steps."""
    if before_s <= 0.0:
        return seconds
    return before_s * (1.0 - LOW_STEP * (1.0 - LOW) if seconds < before_s else 1.0 + LOW_STEP * LOW)


def faster(most: float, confirmed: int) -> float:
    """Factor over the usual speed that is believed after `confirmed` right answers in a row; `most` with none."""
    return float(most * 2.0 ** min(DOUBLINGS_MAX, confirmed / CONFIRMED_DOUBLE))


def usual(lows: Iterable[float]) -> float:
    """Seconds that a replica of the stage takes when little is queued: upper median; 0 if none has answered."""
    known = [low for low in lows if low > 0.0]
    return statistics.median_high(known) if known else 0.0
