"""What travels between replicas, and in how many bits. `codec(name)` makes one."""

from __future__ import annotations

from swarmnode.errors import ManifestError
from swarmnode.gossip.compression.codec import Codec
from swarmnode.gossip.compression.dense import Bf16, Fp32

CODECS: dict[str, type[Codec]] = {kind.name: kind for kind in (Fp32, Bf16)}


def codec(name: str) -> Codec:
    """A codec for one replica. Raises ManifestError for a name that is not in CODECS."""
    kind = CODECS.get(name)
    if kind is None:
        raise ManifestError(f"gossip.codec is {name!r}; known: {', '.join(CODECS)}")
    return kind()


__all__ = ["CODECS", "Codec", "codec"]
