"""One full merge at the end: all replicas become their mean, once.

    phi, theta <- (1/n) sum_j theta_j ;   m <- 0

After rounds in pairs replicas still lie apart by their spread; the mean of n of them has 1/n of its variance, and lower
loss than each (model soups, arXiv 2203.05482; the end of NoLoCo's own runs, arXiv 2506.10911). What it costs is one
message to everybody.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from swarmnode.gossip.outer.noloco import NoLoCo
from swarmnode.ports import OuterReport, Packet


@torch.no_grad()
def full_merge(outer: NoLoCo, round_index: int, own_weight: float, packets: Sequence[Packet]) -> OuterReport:
    """The outer step of the boundary `outer.bequest` marked, as a plain mean over everybody's packets. Equal at all up
    to what the codec rounds and to packets that one of them refused."""
    before = outer.alpha, outer.beta, outer.gamma
    outer.alpha, outer.beta, outer.gamma = 0.0, 1.0, 1.0
    try:
        report = outer.apply(round_index, own_weight, packets)
    finally:
        outer.alpha, outer.beta, outer.gamma = before
    outer.momentum.zero_()
    return report
