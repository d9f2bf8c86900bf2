"""Gossip rounds without training among saved replicas, like those of a swarm that stops training."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from swarmnode.ids import PeerId, RunId

if TYPE_CHECKING:
    from swarmnode.model.gather import Gathered, StageCopy

PAIRED = ("noloco", "average")
"""Methods whose outer step is NoLoCo's with their own constants."""


def mixed(found: Gathered, rounds: int) -> Gathered:
    """`found` after `rounds` in which the copies of each stage meet in pairs, by the run's own outer step if it is one
    of pairs, else by NoLoCo's. Nothing is lost on the wire.

    Without training the mean of all copies stays the same and each copy approaches it, so that any one of them
    suffices. A swarm can do this even if no node can fetch all copies.
    """
    stages: dict[tuple[str, ...], list[StageCopy]] = {}
    for copy in found.copies:
        stages.setdefault(tuple(copy.tensors), []).append(copy)
    copies: list[StageCopy] = []
    for stage, group in enumerate(stages.values()):
        copies += _met(found, stage, group, rounds) if len(group) > 1 else group
    return replace(found, copies=tuple(copies))


def _met(found: Gathered, stage: int, group: list[StageCopy], rounds: int) -> list[StageCopy]:
    from swarmnode.gossip.compression import codec
    from swarmnode.gossip.outer.noloco import NoLoCo
    from swarmnode.gossip.pairing import pairs
    from swarmnode.manifest import GossipSpec, constants
    from swarmnode.model.gather import flat, with_flat
    from swarmnode.ports import Packet

    spec = found.manifest.gossip
    step = constants(spec if spec.method in PAIRED else GossipSpec(method=NoLoCo.name))
    members = {
        PeerId(f"{at:06d} {copy.peer}"): NoLoCo(flat(copy), codec("fp32"), step.alpha, step.beta, step.gamma)
        for at, copy in enumerate(group)
    }
    for number in range(found.round + 1, found.round + 1 + rounds):
        sent = {peer: Packet(1.0, 0, member.message(number)) for peer, member in members.items()}
        for met in pairs(RunId(found.run_id), stage, number, members):
            for peer in met:
                members[peer].apply(number, 1.0, [sent[other] for other in met if other != peer])
    return [with_flat(copy, member.theta) for copy, member in zip(group, members.values(), strict=True)]
