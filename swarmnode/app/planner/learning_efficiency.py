"""The learning efficiency of a run: what it learns from a token over what one replica with Step Law's batch learns.

    efficiency = batch * replicas * late * boundary / over
    batch      (1 + 1/K) / (1 + x/K), x = B / law >= 1     K: `critical`; the form of arXiv 1812.06162, section 2.2
    replicas   1 / (1 + n), n = e^a (R - 1)^p (law / b)^q H^r T^-u A   R replicas of a stage, each b = B / R tokens a
               step, H steps a round, T steps in the run, law = Step Law's batch for the run (run/manifest/recipe.py),
               A = 3/4 g / (g - 1) for groups of g: a round takes 1 / g of their variance for 1, and the steps between
               two bring as much again, so it stays at g / (g - 1). Measured for 2 over 4: 1.48
               where gossip.method averages gradients before each step: by its packets alone (OF_CODEC, TURNS)
    late       gradients that come a step late in a pipeline of several stages; 1 where gradients are averaged, as
               stages then wait for each other's steps, but with gossip.delay, which costs so many steps (DELAYED)
    boundary   tokens that the nats of pipeline.boundary and gossip.codec are worth, by the law of LAW_B and LAW_BETA
    over       how much too high the other terms together were measured to be, where replicas meet

n is fitted by least squares to the logarithms of the rows in replica_rows.py, in which a source of many rows weighs as
the root of their number. `Learned` has an interval with each number: one standard deviation of a new row of n by that
fit, or what packets were measured to cost by other batches (PACKETS_KNOWN), and the spread of `over`. Where the rows of
one source are left out of the fit, each of them lies within a factor of 1.25 of its interval
(tests/simulation/test_learning_efficiency.py). Limits: docs/learning.md.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from swarmnode.app.planner.replica_rows import MEASURED, Row
from swarmnode.run.gossip_rules import codecs
from swarmnode.run.manifest import Manifest
from swarmnode.run.manifest.gossip_compat import averages_gradients, meets, planned_meeting_steps
from swarmnode.run.manifest.recipe import law_batch
from swarmnode.run.manifest.spec import GossipSpec

# arXiv 2203.15556, eq. 10: loss = 1.69 + 406.4 / N^0.34 + 410.7 / D^0.28.
LAW_B = 410.7
LAW_BETA = 0.28
OF_CODEC = {
    "lloyd4": 0.97,
    "e3m0": 0.95,
    "lloyd3": 0.93,
    "whitened": 0.91,
    "lloyd2": 0.82,
    "huffman": 0.82,
    "ternary": 0.82,
}
"""Measured: `swarmnode bench averaging`, 16 replicas of 4 samples, width 64 (docs/learning.md). Of ternary a guess."""
TURNS = (0.073, 1.33)
"""Measured there: F = 3 has .845 of all rows in each step, 9 has .46; beyond 9 the power is a guess."""
PACKETS_KNOWN = 1.8
"""Measured (docs/learning.md, "A share of a run, or a number of steps"): runs of 120 to 1,920 steps with other batches
and rates have the efficiency by these two, to a power between 1 / PACKETS_KNOWN and PACKETS_KNOWN. It is a share of a
run, not a number of steps: it does not come back in longer ones."""
DELAYED = (66.0, 1.1)
"""Measured (docs/measurements/wide-area.md): the steps that gossip.delay costs with all rows in each, by runs of 224 to
480 steps; with F turns so many times F to that power, by runs of 480 with three."""
DELAYED_KNOWN = (0.1, 1.2)
"""Measured (docs/learning.md, as above): by other batches and rates, in up to 1,920 steps, so many times as many."""
BOUNDARY_NATS = {"fp32": 0.0, "bf16": 0.0, "int8": 0.003}
"""Measured (docs/methods.md): 4 stages of width 96 over 300 steps, 3 seeds, nats a byte over fp32."""
FEW_BITS_NATS = {"int4": 0.0065, "int4_int2": 0.015}
"""Of each boundary between two stages. Measured (docs/measurements/boundary.md, protocol.md): over bf16, int4 .014 with
two boundaries and .043 with seven, int4_int2 .03 with two; in proportion to their number beyond [guess]."""
SUBSPACE_NATS = ((1 / 8, 0.191), (1 / 4, 0.097), (1 / 2, 0.041))  # by k / D; measured in the same table
CRITICAL = 8.0
CRITICAL_TOKENS = 983_040
"""Measured: the replica bench with one replica and so many tokens, batches of 8, 32, 64, 128 samples (.3, 1.3, 2.7,
5.3 times the law's) 1.693, 1.683, 1.703 and 1.795 nats at the best of two rates: efficiency 1, 1, .92, .62."""
CRITICAL_EXPONENT = 0.16
"""Through that and Muon's published losses by batch, 3e9 to 6.2e10 tokens (batch_rows.py)."""
ALIKE = 0.88  # guess: the most that a row of one seed tells apart from one replica with the same batch
LATE = 0.88  # measured: docs/learning.md, the demo's swarm of one replica a stage, over plain Muon


LOCAL_STEPS_OVER = (1.4, 1.7)
"""Measured: what the other terms give too much where replicas step by themselves and average their weights. `bench
scaling`, eight machines and `average/modular4` (docs/learning.md, "What eight machines lack of eight times one")."""
FEW = 4
FEW_OVER = (1.0, LOCAL_STEPS_OVER[1])
"""The same with so few replicas. Measured: 1.0 with two and four of each of three stages (`bench learning`)."""
STEPS_TOGETHER_OVER = (1.03, 1.13)
"""Measured: the same, with the speed, where gradients are averaged before each step. `bench scaling`, eight machines,
two lines, three seeds: 6.9 and 6.7 times by formula, 6.1 to 6.7 and 5.9 to 6.6 measured."""


@dataclass(frozen=True, slots=True)
class Learned:
    """An efficiency by formula, and the least and the most of it that are likely by measurement."""

    least: float
    reckoned: float
    most: float


@dataclass(frozen=True, slots=True)
class ReplicaFit:
    """The term for replicas, fitted: (a, p, q, r, u) of n, their covariance, and the variance of a row beside it."""

    of: tuple[float, ...]
    covariance: npt.NDArray[np.float64]
    variance: float

    def spread(self, features: Sequence[float]) -> float:
        """The standard deviation of the logarithm of a new row's n."""
        at = np.array(features)
        return math.sqrt(float(at @ self.covariance @ at) + self.variance)


def critical(tokens: float) -> float:
    """K of the batch's term in a run of `tokens`: longer runs, of larger models, bear more of Step Law's batch."""
    return CRITICAL * math.pow(max(1.0, tokens / CRITICAL_TOKENS), CRITICAL_EXPONENT)


def of_batch(batch: float, tokens: float) -> float:
    """Efficiency of one replica with `batch` tokens a step in a run of `tokens`."""
    bears = critical(tokens)
    return (1.0 + 1.0 / bears) / (1.0 + max(1.0, batch / law_batch(tokens)) / bears)


def _features(replicas: int, own: float, tokens: float, steps_of_round: float) -> tuple[float, ...]:
    steps = max(1.0, tokens / (replicas * own))
    rounds = min(max(1.0, steps_of_round), steps)
    return 1.0, math.log(replicas - 1), math.log(law_batch(tokens) / own), math.log(rounds), -math.log(steps)


def fit(rows: Sequence[Row]) -> ReplicaFit:
    """The term for replicas by least squares."""
    x = np.array([_features(row.replicas, row.own, row.tokens, row.steps_of_round) for row in rows])
    y = np.array([math.log((1.0 / term_of(row) - 1.0) / apart(row.replicas, row.group)) for row in rows])
    many = Counter(row.source for row in rows)
    weights = np.array([many[row.source] ** -0.5 for row in rows])
    normal = np.linalg.inv(x.T @ (weights[:, None] * x))
    of = normal @ (x.T @ (weights * y))
    left = y - x @ of
    variance = float(left @ (weights * left)) / float(weights.sum()) * len(rows) / (len(rows) - len(of))
    return ReplicaFit(tuple(float(one) for one in of), normal * variance, variance)


def term_of(row: Row) -> float:
    """The term for replicas that `row` measured: what it lacks beside its batch."""
    if not row.over_best:
        return row.efficiency
    return min(ALIKE, row.efficiency / of_batch(row.replicas * row.own, row.tokens))


def apart(replicas: int, group: int) -> float:
    """A: how far replicas stay apart that meet in groups of `group` (0: all), over those that meet in fours."""
    size = max(2, min(group or replicas, replicas))
    return 0.75 * size / (size - 1)


def of_replicas(replicas: int, own: float, tokens: float, steps_of_round: float, group: int = 4) -> float:
    """Efficiency of `replicas` replicas, each with `own` tokens a step, in a run of `tokens`."""
    return replicas_between(TERM, replicas, own, tokens, steps_of_round, group).reckoned


def replicas_between(
    term: ReplicaFit, replicas: int, own: float, tokens: float, steps_of_round: float, group: int = 4
) -> Learned:
    """`of_replicas` by `term`, with its interval."""
    if replicas < 2:
        return Learned(1.0, 1.0, 1.0)
    features = _features(replicas, own, tokens, steps_of_round)
    log_n = math.log(apart(replicas, group)) + sum(a * b for a, b in zip(term.of, features, strict=True))
    spread = term.spread(features)
    least, reckoned, most = (1.0 / (1.0 + math.exp(log_n + by)) for by in (spread, 0.0, -spread))
    return Learned(least, reckoned, most)


TERM = fit(MEASURED)
FIT = TERM.of  # a, p, q, r and u of n


def critical_batch(tokens: float) -> float:
    """Tokens of a step at which the batch alone takes half of what is learned from a token."""
    return law_batch(tokens) * (critical(tokens) + 2.0)


def of_packets(codec: str, fragments: int, optimizer: str = "muon") -> float:
    """Efficiency of steps by averaged gradients in `codec`, of which each moves one row in `fragments`."""
    factor, power = TURNS
    if codec == "whitened" and optimizer != "muon":
        codec = "huffman"  # there is no momentum of Muon's to whiten by
    return OF_CODEC.get(codec, 1.0) / float(1.0 + factor * (fragments - 1) ** power)


def of_delay(fragments: int, steps: float, times: float = 1.0) -> float:
    """Efficiency of `steps` steps by gradients that are averaged while the next step is trained, if that costs so many
    `times` the steps that DELAYED says."""
    lost, power = DELAYED
    return max(1.0, steps) / (max(1.0, steps) + times * lost * float(fragments**power))


def together_between(gossip: GossipSpec, optimizer: str, steps: float) -> Learned:
    """Efficiency of `steps` steps by averaged gradients, with its interval."""
    packets = of_packets(gossip.codec, gossip.fragments, optimizer)
    few, many = DELAYED_KNOWN

    def delayed(times: float) -> float:
        return of_delay(gossip.fragments, steps, times) if gossip.delay else 1.0

    return Learned(
        packets**PACKETS_KNOWN * delayed(many),
        packets * delayed(1.0),
        packets ** (1.0 / PACKETS_KNOWN) * delayed(few),
    )


def efficiency(manifest: Manifest, replicas: int, tokens: float) -> float:
    """Learning efficiency of `manifest` in a run of `tokens`, with so many replicas of each stage."""
    return learned(manifest, replicas, tokens).reckoned


def learned(manifest: Manifest, replicas: int, tokens: float, steps_of_round: float | None = None) -> Learned:
    """`efficiency` with its interval. `steps_of_round`: inner steps between two meetings, as simulated; None: as the
    manifest has them."""
    inner = manifest.inner
    gossip = manifest.gossip
    context = manifest.model.context
    together = averages_gradients(manifest)
    least = 1 if together else min(inner.replica_batch_min, inner.microbatch)
    batch = max(inner.inner_batch, inner.inner_batch_max, replicas * least) * context
    share = of_batch(batch, tokens) * (LATE if manifest.pipeline.stages > 1 and not together else 1.0)
    if replicas < 2 or not meets(gossip):
        share *= worth(boundary_nats(manifest), tokens) / replicas
        return Learned(share, share, share)
    if together:
        term = together_between(gossip, inner.optimizer, tokens / batch)
        over = STEPS_TOGETHER_OVER
        nats = boundary_nats(manifest)
    else:
        steps = planned_meeting_steps(manifest) if steps_of_round is None else steps_of_round
        steps *= inner.inner_batch * context / batch  # larger ones than the manifest's, where many replicas take them
        term = replicas_between(TERM, replicas, batch / replicas, tokens, steps, gossip.group)
        over = FEW_OVER if replicas <= FEW else LOCAL_STEPS_OVER
        nats = boundary_nats(manifest) + codecs()[gossip.codec].nats
    return _over(share * worth(nats, tokens), term, over)


def _over(share: float, term: Learned, over: tuple[float, float]) -> Learned:
    """`share` times `term`, less what that is too high by: `over` by its least and its most. The two spreads have
    nothing to do with each other, so their logarithms add up as squares do."""
    middle = math.sqrt(over[0] * over[1])
    reckoned = share * term.reckoned / middle
    half = math.log(over[1] / middle)
    down = math.hypot(math.log(term.reckoned / term.least), half)
    up = math.hypot(math.log(term.most / term.reckoned), half)
    return Learned(reckoned * math.exp(-down), reckoned, min(share, reckoned * math.exp(up)))


def boundary_nats(manifest: Manifest) -> float:
    """Nats that the run's boundary costs by the measurement on a small model; ranks between the measured ones by
    interpolation of logarithms, below them in inverse proportion [guess]. Nothing crosses a boundary in one stage, but
    a subspace restricts its layers as well."""
    pipeline = manifest.pipeline
    if pipeline.boundary == "subspace":
        return _subspace_nats(pipeline.boundary_rank / manifest.model.width)
    if pipeline.boundary in FEW_BITS_NATS:
        return FEW_BITS_NATS[pipeline.boundary] * (pipeline.stages - 1)
    return BOUNDARY_NATS[pipeline.boundary] if pipeline.stages > 1 else 0.0


def _subspace_nats(share: float) -> float:
    least = SUBSPACE_NATS[0]
    most = SUBSPACE_NATS[-1]
    if share <= least[0]:
        return least[1] * least[0] / share
    for (low, at_low), (high, at_high) in itertools.pairwise(SUBSPACE_NATS):
        if share <= high:
            way = math.log(share / low) / math.log(high / low)
            return float(at_low * (at_high / at_low) ** way)
    return most[1]


def worth(nats: float, tokens: float) -> float:
    """The share of `tokens` that a run without the loss of `nats` needs for the loss that one with it ends at."""
    learned = LAW_B / tokens**LAW_BETA
    return float((1.0 + nats / learned) ** (-1.0 / LAW_BETA))
