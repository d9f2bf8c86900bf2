"""A round of a stage, in its simplest form: all its replicas in one process, each with weights of its own.

Sources: DiLoCo, arXiv 2311.08105 (inner steps, then an outer step on what they gained); NoLoCo, arXiv 2506.10911 (the
outer step among two random replicas instead of all, eqs. 1 to 3). With alpha = 0 and beta = gamma = 1 a round is the
plain mean of a group (`gossip.method = "average"`). pairing.py, exchange.py and swarmnode_methods/noloco.py do the same
among machines that know of each other what they were told, send few bits, and die in the middle of an exchange.
tests/gossip/test_round_simple.py holds them against this module.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch

from swarmnode.base.ids import PeerId, RunId
from swarmnode.train.gossip.pairing import draws

MASK = (1 << 64) - 1


@dataclass(slots=True)
class SimpleReplica:
    """One replica's fast weights, slow weights and outer momentum, each [P]."""

    theta: torch.Tensor
    phi: torch.Tensor
    momentum: torch.Tensor


def common_number(one: int, other: int) -> int:
    """A number of two members, from the 64 bits that each drew (the finaliser of MurmurHash3)."""
    x = one ^ other
    x = ((x ^ (x >> 33)) * 0xFF51AFD7ED558CCD) & MASK
    x = ((x ^ (x >> 33)) * 0xC4CEB9FE1A85EC53) & MASK
    return x ^ (x >> 33)


def pairs(run_id: RunId, stage: int, round_index: int, members: Iterable[PeerId]) -> list[tuple[PeerId, ...]]:
    """The pairs of a round, and the odd one out. Each member computes the same ones by itself: no message is needed.

    Each two members have a number, which nobody else's presence changes; the least number of all meets, then the least
    of the rest. So a member that one replica does not know of changes few pairs.
    """
    drawn = draws(run_id, stage, round_index, members)
    names = sorted(drawn)
    numbers = [
        (common_number(drawn[one], drawn[other]), one, other)
        for at, one in enumerate(names)
        for other in names[at + 1 :]
    ]
    met: list[tuple[PeerId, ...]] = []
    free = set(names)
    for _, one, other in sorted(numbers):
        if {one, other} <= free:
            met.append((one, other))
            free -= {one, other}
    return [*met, *((name,) for name in sorted(free))]


def outer_step(group: list[SimpleReplica], alpha: float, beta: float, gamma: float) -> None:
    """Let the replicas of a group exchange delta = theta - phi and phi, and step.

    m     <- alpha m + beta mean(delta) + gamma (mean(phi) - phi)
    phi   <- phi + m
    theta <- phi                                   (a real replica adds what it gained during the exchange)
    """
    delta = torch.stack([replica.theta - replica.phi for replica in group]).mean(0)
    phi = torch.stack([replica.phi for replica in group]).mean(0)
    for replica in group:
        pull = gamma * (phi - replica.phi)
        replica.momentum = alpha * replica.momentum + beta * delta + pull
        replica.phi = replica.phi + replica.momentum
        replica.theta = replica.phi.clone()


def end_of_round(
    replicas: Mapping[PeerId, SimpleReplica],
    run_id: RunId,
    stage: int,
    round_index: int,
    *,
    alpha: float,
    beta: float,
    gamma: float,
) -> None:
    """Let the pairs of a stage meet where a round ends, which all count in samples of the whole run; nobody waits for
    anybody else."""
    for group in pairs(run_id, stage, round_index, replicas):
        outer_step([replicas[name] for name in group], alpha, beta, gamma)
