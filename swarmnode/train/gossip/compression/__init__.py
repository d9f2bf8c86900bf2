"""Codecs: the encoding of the tensors that replicas exchange. `codec(name)` makes one."""

from __future__ import annotations

from swarmnode.base.errors import ManifestError
from swarmnode.base.plugin import implementation
from swarmnode.run.gossip_rules import codecs
from swarmnode.train.gossip.compression.codec import Codec


def codec_class(name: str) -> type[Codec]:
    """Raises ManifestError for an unknown name."""
    rules = codecs().get(name)
    if rules is None:
        raise ManifestError(f"gossip.codec is {name!r}; known: {', '.join(codecs())}")
    kind = implementation(rules.implementation)
    assert isinstance(kind, type) and issubclass(kind, Codec), rules
    return kind


def codec(name: str) -> Codec:
    """A codec for one replica. Raises ManifestError for an unknown name."""
    return codec_class(name)()


def build(*names: str) -> bool:
    """Compile the C code of codecs (of all), about a second each, once a machine. False if this machine cannot."""
    libraries = (codec_class(name).library for name in names or codecs())
    return all(library.build() for library in libraries if library is not None)


__all__ = ["Codec", "build", "codec", "codec_class"]
