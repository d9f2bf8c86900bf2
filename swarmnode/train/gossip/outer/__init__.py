"""Outer optimizers: how replicas of a stage combine their weights at a round's boundary. `outer(...)` makes one."""

from __future__ import annotations

import torch

from swarmnode.base.errors import ManifestError
from swarmnode.base.plugin import implementation
from swarmnode.run.gossip_rules import codecs, methods, with_property
from swarmnode.run.manifest import GossipSpec, constants
from swarmnode.train.gossip.compression import codec
from swarmnode.train.gossip.outer.method import Outer

ALL = "all"
CLIPPED = "clipped"
"""gossip.acceptance: what is well-formed; up to the usual distance."""


def outer(gossip: GossipSpec, theta: torch.Tensor, sender: str = "", *, healing: bool = True) -> Outer:
    """The manifest's outer optimizer over `theta` [P] for the replica `sender` (a peer id, which seeds the rounding).

    `healing`: send a fragment of the slow weights with pseudo-gradients, for groups in which not all members get every
    packet. Raises ManifestError for an unknown method or codec, or parameters that do not go together.
    """
    rules = methods().get(gossip.method)
    if rules is None:
        raise ManifestError(f"gossip.method is {gossip.method!r}; known: {', '.join(methods())}")
    if gossip.fragments > 1 and not rules.in_fragments:
        allowed = f"1, or gossip.method = {' or '.join(map(repr, with_property('in_fragments')))}"
        raise ManifestError(f"gossip.fragments = {gossip.fragments}: allowed is {allowed}")
    if gossip.codec in codecs() and gossip.codec not in rules.codecs:
        raise ManifestError(f"gossip.codec = {gossip.codec!r}: allowed is {' or '.join(rules.codecs)} here")
    kind = implementation(rules.implementation)
    assert isinstance(kind, type) and issubclass(kind, Outer), rules
    method = kind.make(theta, codec(gossip.codec), constants(gossip), gossip.fragments)
    method.sender = sender
    method.healing = healing
    if gossip.delay:
        method.delay()
    if gossip.acceptance != ALL:
        from swarmnode.trust.robust import PacketGuard

        method.guard = PacketGuard()
    return method


__all__ = ["Outer", "outer"]
