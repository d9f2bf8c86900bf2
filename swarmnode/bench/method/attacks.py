"""The false weights sent by liars in `bench attack`. They are made with full knowledge of all replicas."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from swarmnode.bench.method.replica_batch import ToySpec
from swarmnode.gossip.outer import Outer

LIARS = (2, 5)  # of 8
REPLAYED = 5  # rounds
ALIE_Z = 1.0  # standard deviations; guess, not the formula of arXiv 1902.06156
DRIP = 0.3  # of |D| per round, always in the same direction


class AttackerView(Protocol):
    """State visible to an attacker: weights and outer optimizers of all replicas, and its own history."""

    size: ToySpec
    theta: Tensor
    outers: list[Outer]
    past: dict[int, list[Tensor]]


def _honest(view: AttackerView, of: Callable[[int], Tensor]) -> Tensor:
    return torch.stack([of(i) for i in range(view.size.replicas) if i not in LIARS])


def _theta(view: AttackerView) -> Tensor:
    return _honest(view, lambda i: view.theta.detach()[i])


def _delta(view: AttackerView) -> Tensor:
    return _honest(view, lambda i: view.theta.detach()[i] - view.outers[i].phi)


Attack = Callable[[AttackerView, int, int], Tensor]
"""(view, liar, round) -> weights claimed by the liar."""


def sign_flip(view: AttackerView, liar: int, round_index: int) -> Tensor:
    phi = view.outers[liar].phi
    return phi - (view.theta.detach()[liar] - phi)


def scale(factor: float) -> Attack:
    def attack(view: AttackerView, liar: int, round_index: int) -> Tensor:
        phi = view.outers[liar].phi
        return phi + factor * (view.theta.detach()[liar] - phi)

    return attack


def gaussian(view: AttackerView, liar: int, round_index: int) -> Tensor:
    phi = view.outers[liar].phi
    size = float(_delta(view).norm(dim=1).mean()) / math.sqrt(phi.numel())
    draw = torch.Generator().manual_seed(round_index * 1000 + liar)
    return phi + size * torch.randn(phi.shape, generator=draw)


def alie(view: AttackerView, liar: int, round_index: int) -> Tensor:
    """A Little Is Enough [arXiv 1902.06156]: the honest mean minus as many deviations as remain unnoticed."""
    theta = _theta(view)
    return theta.mean(0) - ALIE_Z * theta.std(0)


def inner_product(view: AttackerView, liar: int, round_index: int) -> Tensor:
    """Fall of Empires [arXiv 1903.03936]: the honest step, reversed and small enough to look harmless."""
    phi = _honest(view, lambda i: view.outers[i].phi)
    return phi.mean(0) - 0.5 * _delta(view).mean(0)


def zero(view: AttackerView, liar: int, round_index: int) -> Tensor:
    return view.outers[liar].phi.clone()


def replay(view: AttackerView, liar: int, round_index: int) -> Tensor:
    past = view.past.setdefault(liar, [])
    past.append(view.theta.detach()[liar].clone())
    del past[: -REPLAYED - 1]
    return past[0]


def mimic(view: AttackerView, liar: int, round_index: int) -> Tensor:
    """The weights of replica 0, so that its text counts three times."""
    return view.theta.detach()[0].clone()


def slow_drip(view: AttackerView, liar: int, round_index: int) -> Tensor:
    theta = view.theta.detach()[liar]
    draw = torch.Generator().manual_seed(99)
    way = torch.randn(theta.shape, generator=draw)
    return theta + way * (DRIP * float((theta - view.outers[liar].phi).norm()) / float(way.norm()))


def not_finite(view: AttackerView, liar: int, round_index: int) -> Tensor:
    theta = view.theta.detach()[liar].clone()
    theta[:: 1 + round_index] = math.nan
    return theta


def honest(view: AttackerView, liar: int, round_index: int) -> Tensor:
    return view.theta.detach()[liar]


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
    "slander": sign_flip,  # and claims to refuse all others
    "malformed": honest,  # then bytes are changed
    "label flip": honest,  # of weights trained on inverted text
}
