"""What liars say in `bench attack`: weights that they do not have, made with all that the others know."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from swarmnode.bench.attack import AttackedVillage

LIARS = (2, 5)  # of 8
REPLAYED = 5  # rounds
ALIE_Z = 1.0  # standard deviations; guess, not the formula of arXiv 1902.06156
DRIP = 0.3  # of |D| a round, always the same way


def _honest(village: AttackedVillage, of: Callable[[int], Tensor]) -> Tensor:
    return torch.stack([of(i) for i in range(village.size.replicas) if i not in LIARS])


def _theta(village: AttackedVillage) -> Tensor:
    return _honest(village, lambda i: village.theta.detach()[i])


def _delta(village: AttackedVillage) -> Tensor:
    return _honest(village, lambda i: village.theta.detach()[i] - village.outers[i].phi)


Attack = Callable[["AttackedVillage", int, int], Tensor]
"""(village, liar, round) -> the weights the liar says it has."""


def sign_flip(village: AttackedVillage, liar: int, round_index: int) -> Tensor:
    phi = village.outers[liar].phi
    return phi - (village.theta.detach()[liar] - phi)


def scale(factor: float) -> Attack:
    def attack(village: AttackedVillage, liar: int, round_index: int) -> Tensor:
        phi = village.outers[liar].phi
        return phi + factor * (village.theta.detach()[liar] - phi)

    return attack


def gaussian(village: AttackedVillage, liar: int, round_index: int) -> Tensor:
    phi = village.outers[liar].phi
    size = float(_delta(village).norm(dim=1).mean()) / math.sqrt(phi.numel())
    draw = torch.Generator().manual_seed(round_index * 1000 + liar)
    return phi + size * torch.randn(phi.shape, generator=draw)


def alie(village: AttackedVillage, liar: int, round_index: int) -> Tensor:
    """A Little Is Enough [arXiv 1902.06156]: the honest mean less as many deviations as hide."""
    theta = _theta(village)
    return theta.mean(0) - ALIE_Z * theta.std(0)


def inner_product(village: AttackedVillage, liar: int, round_index: int) -> Tensor:
    """Fall of Empires [arXiv 1903.03936]: the honest step, reversed and small enough to look harmless."""
    phi = _honest(village, lambda i: village.outers[i].phi)
    return phi.mean(0) - 0.5 * _delta(village).mean(0)


def zero(village: AttackedVillage, liar: int, round_index: int) -> Tensor:
    return village.outers[liar].phi.clone()


def replay(village: AttackedVillage, liar: int, round_index: int) -> Tensor:
    past = village.past.setdefault(liar, [])
    past.append(village.theta.detach()[liar].clone())
    del past[: -REPLAYED - 1]
    return past[0]


def mimic(village: AttackedVillage, liar: int, round_index: int) -> Tensor:
    """Always what replica 0 has, so that its text counts for three."""
    return village.theta.detach()[0].clone()


def slow_drip(village: AttackedVillage, liar: int, round_index: int) -> Tensor:
    theta = village.theta.detach()[liar]
    draw = torch.Generator().manual_seed(99)
    way = torch.randn(theta.shape, generator=draw)
    return theta + way * (DRIP * float((theta - village.outers[liar].phi).norm()) / float(way.norm()))


def not_finite(village: AttackedVillage, liar: int, round_index: int) -> Tensor:
    theta = village.theta.detach()[liar].clone()
    theta[:: 1 + round_index] = math.nan
    return theta


def honest(village: AttackedVillage, liar: int, round_index: int) -> Tensor:
    return village.theta.detach()[liar]


ATTACKS: dict[str, Attack] = {
    "sign flip": sign_flip,
    "scale 100": scale(100.0),
    "scale -100": scale(-100.0),
    "gaussian": gaussian,
    "alie": alie,
    "inner product": inner_product,
    "zero": zero,
    "replay": replay,
    "mimic": mimic,
    "slow drip": slow_drip,
    "nan": not_finite,
    "slander": sign_flip,  # and says it refuses everybody
    "malformed": honest,  # and then bytes are changed
    "label flip": honest,  # of what it learned from reversed text
}
