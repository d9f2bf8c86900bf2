"""A single full merge at the end: all replicas become their mean.

    phi, theta <- (1/n) sum_j theta_j ;   m <- 0

After rounds in pairs replicas still differ by their spread. The mean of n of them has 1/n of its variance, and a lower
loss than each (model soups, arXiv 2203.05482; the end of NoLoCo's own runs, arXiv 2506.10911). The cost is one message
to every member.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from swarmnode.gossip.outer.noloco import NoLoCo
from swarmnode.ports import OuterReport, Packet


@torch.no_grad()
def full_merge(outer: NoLoCo, round_index: int, own_weight: float, packets: Sequence[Packet]) -> OuterReport:
    """The outer step of the boundary that `outer.final_delta` marked, as a plain mean over all packets. The result is
    equal at all members up to codec rounding and packets that a member refused."""
    before = outer.alpha, outer.beta, outer.gamma
    outer.alpha, outer.beta, outer.gamma = 0.0, 1.0, 1.0
    try:
        report = outer.apply(round_index, own_weight, packets)
    finally:
        outer.alpha, outer.beta, outer.gamma = before
    outer.momentum.zero_()
    return report
