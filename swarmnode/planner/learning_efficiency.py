"""The learning efficiency of a run: what it learns from a token over what one replica with Step Law's batch learns.

    efficiency = batch * replicas * late * boundary
    batch      (1 + 1/K) / (1 + x/K), x = B / law >= 1     K = CRITICAL; the form of arXiv 1812.06162, section 2.2
    replicas   1 / (1 + n), n = e^a (R - 1)^p (law / b)^q H^r T^-u A   R replicas of a stage, each b = B / R tokens a
               step, H steps a round, T steps in the run, law = Step Law's batch for the run (manifest/recipe.py),
               A = 3/4 g / (g - 1) for groups of g: a round takes 1 / g of their variance for 1, and the steps between
               two bring as much again, so it stays at g / (g - 1). Measured for 2 over 4: 1.48
               1 where gossip.method averages gradients before each step: measured, docs/learning.md
    late       gradients that come a step late in a pipeline of several stages; 1 where gradients are averaged, as
               stages then wait for each other's steps
    boundary   tokens that the nats of pipeline.boundary and gossip.codec are worth, by the law of LAW_B and LAW_BETA

n is fitted to the measurements in tests/simulation/test_learning_efficiency.py, within a factor of 2.5 of each row's.
Limits: docs/learning.md.
"""

from __future__ import annotations

import itertools
import math

from swarmnode.gossip_rules import codecs
from swarmnode.manifest import Manifest
from swarmnode.manifest.gossip_compat import averages_gradients, meets
from swarmnode.manifest.recipe import law_batch

LAW_B, LAW_BETA = 410.7, 0.28  # arXiv 2203.15556, eq. 10: loss = 1.69 + 406.4 / N^0.34 + 410.7 / D^0.28
BOUNDARY_NATS = {"fp32": 0.0, "bf16": 0.0, "int8": 0.003}
"""Measured (docs/methods.md): 4 stages of width 96 over 300 steps, 3 seeds, nats a byte over fp32."""
SUBSPACE_NATS = ((1 / 8, 0.191), (1 / 4, 0.097), (1 / 2, 0.041))  # by k / D; measured in the same table
CRITICAL = 8.0
"""Measured: the replica bench with one replica and 983,040 tokens, batches of 8, 32, 64, 128 samples (.3, 1.3, 2.7,
5.3 times the law's) 1.693, 1.683, 1.703 and 1.795 nats at the best of two rates: efficiency 1, 1, .92, .62."""
LATE = 0.88  # measured: docs/learning.md, the demo's swarm of one replica a stage, over plain Muon


LOCAL_STEPS_OVER = (1.4, 1.7)
"""Measured: what this formula gives too much where replicas step by themselves and average their weights. `bench
scaling`, eight machines and `average/modular4` (docs/learning.md, "What eight machines lack of eight times one")."""

FIT = (-1.397, 0.723, 0.520, 0.416, 0.331)  # a, p, q, r and u of n


def apart(replicas: int, group: int) -> float:
    """A: how far replicas stay apart that meet in groups of `group` (0: all), over those that meet in fours."""
    size = max(2, min(group or replicas, replicas))
    return 0.75 * size / (size - 1)


def of_replicas(replicas: int, own: float, tokens: float, steps_of_round: float, group: int = 4) -> float:
    """Efficiency of `replicas` replicas, each with `own` tokens a step, in a run of `tokens`."""
    if replicas < 2:
        return 1.0
    steps = max(1.0, tokens / (replicas * own))
    rounds = min(max(1.0, steps_of_round), steps)
    of = (1.0, math.log(replicas - 1), math.log(law_batch(tokens) / own), math.log(rounds), -math.log(steps))
    n = apart(replicas, group) * math.exp(sum(a * b for a, b in zip(FIT, of, strict=True)))
    return 1.0 / (1.0 + n)


def of_batch(batch: float, tokens: float) -> float:
    """Efficiency of one replica with `batch` tokens a step in a run of `tokens`."""
    return (1.0 + 1.0 / CRITICAL) / (1.0 + max(1.0, batch / law_batch(tokens)) / CRITICAL)


def critical_batch(tokens: float) -> float:
    """Tokens of a step at which the batch alone takes half of what is learned from a token."""
    return law_batch(tokens) * (CRITICAL + 2.0)


def efficiency(manifest: Manifest, replicas: int, tokens: float) -> float:
    """Learning efficiency of `manifest` in a run of `tokens`, with so many replicas of each stage."""
    inner, gossip, context = manifest.inner, manifest.gossip, manifest.model.context
    together = averages_gradients(manifest)
    least = 1 if together else min(inner.replica_batch_min, inner.microbatch)
    batch = max(inner.inner_batch, inner.inner_batch_max, replicas * least) * context
    share = of_batch(batch, tokens) * (LATE if manifest.pipeline.stages > 1 and not together else 1.0)
    if replicas > 1 and not meets(gossip):
        return share / replicas
    if together:
        return share * worth(boundary_nats(manifest), tokens)
    steps_of_round = gossip.fragments * gossip.round_samples * context / batch
    share *= of_replicas(replicas, batch / replicas, tokens, steps_of_round, gossip.group)
    return share * worth(boundary_nats(manifest) + codecs()[gossip.codec].nats * (replicas > 1), tokens)


def likely(manifest: Manifest, replicas: int, reckoned: float) -> tuple[float, float]:
    """The least and the most of what `reckoned`, an `efficiency`, is by measurement: less by LOCAL_STEPS_OVER where
    replicas step by themselves, the same elsewhere."""
    least_over, most_over = LOCAL_STEPS_OVER
    if replicas < 2 or averages_gradients(manifest) or not meets(manifest.gossip):
        return reckoned, reckoned
    return reckoned / most_over, reckoned / least_over


def boundary_nats(manifest: Manifest) -> float:
    """Nats that the run's boundary costs by the measurement on a small model; ranks between the measured ones by
    interpolation of logarithms, below them in inverse proportion [guess]. Nothing crosses a boundary in one stage, but
    a subspace restricts its layers as well."""
    pipeline = manifest.pipeline
    if pipeline.boundary == "subspace":
        return _subspace_nats(pipeline.boundary_rank / manifest.model.width)
    return BOUNDARY_NATS[pipeline.boundary] if pipeline.stages > 1 else 0.0


def _subspace_nats(share: float) -> float:
    least, most = SUBSPACE_NATS[0], SUBSPACE_NATS[-1]
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
