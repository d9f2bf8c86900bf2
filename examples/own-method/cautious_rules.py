"""The row of the method, in a module without torch: a manifest is checked with it."""

from __future__ import annotations

from swarmnode.run.gossip_rules import MethodRules
from swarmnode_methods.rules import WEIGHTS

METHODS = (
    MethodRules(
        "cautious",
        "cautious_outer:CautiousOuter",
        WEIGHTS,
        alpha=0.9,  # as DiLoCo, arXiv 2311.08105
        beta=0.7,  # as DiLoCo
        of_progress=True,
        of_whole_weights=True,
    ),
)
