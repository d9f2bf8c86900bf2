"""Bytes sent in a run's rounds, by the formulas of its method and codec."""

from __future__ import annotations

import functools
import math

import torch

from swarmnode.run.manifest import GossipSpec
from swarmnode.run.manifest.gossip_compat import meets
from swarmnode.train.gossip.butterfly.recheck import CHECKED_SHARE
from swarmnode.train.gossip.outer import outer

SETTLED = 1 << 20  # a round after every warm-up: k of topk has fallen, fragments are few
ROUNDS = 12  # whole periods of streaming's fragments (4) and of desloc's moments (3, 6)


@functools.lru_cache(maxsize=1024)
def message_nbytes(gossip: GossipSpec, parameters: int, seconds: int) -> float:
    """Bytes of tensors in one message of a stage of `parameters`, of which `seconds` have a second moment: the mean
    over the rounds of a settled run. Raises ManifestError for a method and codec that do not go together."""
    theta = torch.empty(parameters, device="meta")
    method = outer(gossip, theta)
    if method.averages_moments:
        method.attend(torch.empty_like(theta), theta.new_empty(seconds))
    return sum(method.nbytes_of(SETTLED + number) for number in range(ROUNDS)) / ROUNDS


def messages(gossip: GossipSpec, replicas: int) -> int:
    """Messages that the replicas of a stage send per round: each goes to every other member of its group. In pieces a
    member sends all but its own share of a packet twice, and some of that again to those that check."""
    if not meets(gossip):
        return 0
    size = min(gossip.group, replicas) if gossip.group else replicas
    if size < 2:
        return 0
    if gossip.butterfly:
        return math.ceil((2.0 + 1.0 / CHECKED_SHARE) * (replicas - 1))
    rest = replicas % size
    return replicas // size * size * (size - 1) + rest * max(rest - 1, 0)
