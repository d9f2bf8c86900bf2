"""Codecs: the encoding of the tensors that replicas exchange. `codec(name)` makes one."""

from __future__ import annotations

from swarmnode.errors import ManifestError
from swarmnode.gossip.compression.codec import Codec
from swarmnode.gossip.compression.dense import Bf16, Fp32
from swarmnode.gossip.compression.int8 import Int8
from swarmnode.gossip.compression.low_bit import E3M0, Ternary
from swarmnode.gossip.compression.modular import Modular3, Modular4, Modular6
from swarmnode.gossip.compression.powersgd import PowerSGD
from swarmnode.gossip.compression.topk import TopK64, TopK512, TopKWarm

KINDS: tuple[type[Codec], ...] = (
    *(Fp32, Bf16, Int8),
    *(Modular6, Modular4, Modular3),
    *(E3M0, Ternary, TopKWarm, TopK512, TopK64, PowerSGD),
)
CODECS: dict[str, type[Codec]] = {kind.name: kind for kind in KINDS}


def codec(name: str) -> Codec:
    """A codec for one replica. Raises ManifestError for an unknown name."""
    kind = CODECS.get(name)
    if kind is None:
        raise ManifestError(f"gossip.codec is {name!r}; known: {', '.join(CODECS)}")
    return kind()


__all__ = ["CODECS", "Codec", "codec"]
