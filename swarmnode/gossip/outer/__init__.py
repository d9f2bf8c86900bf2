"""Outer optimizers: how replicas of a stage combine their weights at a round's boundary. `outer(...)` makes one."""

from __future__ import annotations

import torch

from swarmnode.errors import ManifestError
from swarmnode.gossip.compression import codec
from swarmnode.gossip.outer.average import Average
from swarmnode.gossip.outer.delayed import DelayedNesterov
from swarmnode.gossip.outer.desloc import DesLoc
from swarmnode.gossip.outer.diloco import DiLoCo
from swarmnode.gossip.outer.eager import Eager
from swarmnode.gossip.outer.edit import EDiT
from swarmnode.gossip.outer.mean import DeltaMean
from swarmnode.gossip.outer.method import Outer
from swarmnode.gossip.outer.noloco import NoLoCo
from swarmnode.gossip.outer.partial_average import PartialAverage
from swarmnode.gossip.outer.sparseloco import SparseLoCo
from swarmnode.gossip.outer.streaming import Streaming
from swarmnode.gossip.robust import guard
from swarmnode.manifest import GossipSpec, constants
from swarmnode.manifest.gossip_compat import IN_FRAGMENTS

NONE = "none"
"""No outer steps: replicas never meet. The slow weights are kept all the same, so that snapshots have one format."""

KIN: dict[str, type[Streaming | Eager | DelayedNesterov | EDiT]] = {
    kind.name: kind for kind in (Streaming, Eager, DelayedNesterov, EDiT)
}
"""The DiLoCo family: packets of pseudo-gradients, Nesterov momentum alpha, outer learning rate beta."""

METHODS = (NoLoCo.name, DiLoCo.name, Average.name, DesLoc.name, SparseLoCo.name, PartialAverage.name, *KIN, NONE)


def outer(
    gossip: GossipSpec, theta: torch.Tensor, sender: str = "", *, healing: bool = True, secret: str = ""
) -> Outer:
    """The manifest's outer optimizer over `theta` [P] for the replica `sender` (a peer id, which seeds the rounding).
    `secret` draws what others are judged by; a liar that knew it would be honest there alone.

    `healing`: send a fragment of the slow weights with pseudo-gradients, for groups in which not all members get every
    packet. Raises ManifestError for an unknown method or codec, or parameters that do not go together.
    """
    found = _outer(gossip, theta)
    found.name_replica(sender, secret)
    if isinstance(found, DeltaMean):
        found.healing = healing
    found.guard = guard(gossip.acceptance)
    return found


def _outer(gossip: GossipSpec, theta: torch.Tensor) -> Outer:
    coder, step, of = codec(gossip.codec), constants(gossip), gossip.fragments
    if of > 1 and gossip.method not in IN_FRAGMENTS:
        allowed = f"1, or gossip.method = {' or '.join(map(repr, IN_FRAGMENTS))}"
        raise ManifestError(f"gossip.fragments = {of}: allowed is {allowed}")
    match gossip.method:
        case NoLoCo.name | "none":
            return NoLoCo(theta, coder, step.alpha, step.beta, step.gamma, of)
        case Average.name:
            return Average(theta, coder, of)
        case DesLoc.name:
            return DesLoc(theta, coder)
        case DiLoCo.name if coder.of_delta:
            return DeltaMean(theta, coder, step.alpha, step.beta)
        case DiLoCo.name:
            return DiLoCo(theta, coder, step.alpha, step.beta)
        case SparseLoCo.name:
            return SparseLoCo(theta, coder, step.beta)
        case PartialAverage.name:
            return PartialAverage(theta, coder)
        case name if name in KIN:
            return KIN[name](theta, coder, step.alpha, step.beta)
        case _:
            raise ManifestError(f"gossip.method is {gossip.method!r}; known: {', '.join(METHODS)}")


__all__ = [
    "KIN",
    "METHODS",
    "NONE",
    "Average",
    "DeltaMean",
    "DesLoc",
    "DiLoCo",
    "NoLoCo",
    "Outer",
    "SparseLoCo",
    "outer",
]
