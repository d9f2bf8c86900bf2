"""The loss that `pipeline.boundary` costs, and the speed that it is worth."""

from __future__ import annotations

import itertools
import math

from swarmnode.manifest import Manifest

# measured (docs/methods.md): 4 stages of width 96 over 300 steps, 3 seeds, nats a byte over fp32
NATS = {"fp32": 0.0, "bf16": 0.0, "int8": 0.003, "fp8": 0.007}
SUBSPACE_NATS = ((1 / 8, 0.191), (1 / 4, 0.097), (1 / 2, 0.041))  # by k / D; measured in the same table
LAW_B, LAW_BETA = 410.7, 0.28  # arXiv 2203.15556, eq. 10: loss = 1.69 + 406.4 / N^0.34 + 410.7 / D^0.28


def boundary_nats(manifest: Manifest) -> float:
    """Nats that the run's boundary costs by the measurement on a small model; ranks between the measured ones by
    interpolation of logarithms, below them in inverse proportion [guess]. Nothing crosses a boundary in one stage, but
    a subspace restricts its layers as well."""
    pipeline = manifest.pipeline
    if pipeline.boundary == "subspace":
        return _subspace_nats(pipeline.boundary_rank / manifest.model.width)
    return NATS[pipeline.boundary] if pipeline.stages > 1 else 0.0


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
    """The share of `tokens` that a run without the loss of `nats` needs for the loss that one with it ends at, by the
    law of LAW_B and LAW_BETA."""
    learned = LAW_B / tokens**LAW_BETA
    return float((1.0 + nats / learned) ** (-1.0 / LAW_BETA))
