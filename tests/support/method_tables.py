"""Tables over all outer methods and codecs, installed ones included."""

from __future__ import annotations

from swarmnode.gossip.compression import Codec, codec
from swarmnode.gossip_rules import codecs, methods, with_property

METHODS = tuple(methods())
CODECS: dict[str, type[Codec]] = {name: type(codec(name)) for name in codecs()}
CODECS_OF = {name: rules.codecs for name, rules in methods().items()}
OWN_ALPHA = {name: rules.alpha for name, rules in methods().items() if rules.alpha is not None}
IN_GROUPS = tuple(with_property("in_groups"))
IN_FRAGMENTS = tuple(with_property("in_fragments"))
FALLBACK = tuple(with_property("takes_fallback"))
NONE = "none"
