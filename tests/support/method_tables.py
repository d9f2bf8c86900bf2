"""Tables over all outer methods and codecs, installed ones included."""

import contextlib

from swarmnode.run.gossip_rules import codecs, methods, with_property
from swarmnode.train.gossip.compression import Codec, codec_class

METHODS = tuple(methods())
CODECS: dict[str, type[Codec]] = {name: codec_class(name) for name in codecs()}
CODECS_OF = {name: rules.codecs for name, rules in methods().items()}
OWN_ALPHA = {name: rules.alpha for name, rules in methods().items() if rules.alpha is not None}
IN_GROUPS = tuple(with_property("in_groups"))
IN_FRAGMENTS = tuple(with_property("in_fragments"))
FALLBACK = tuple(with_property("takes_fallback"))
NONE = "none"


def without_c(name: str) -> contextlib.AbstractContextManager[None]:
    """Where codecs called `name` are made that use torch and numpy alone."""
    library = CODECS[name].library
    return contextlib.nullcontext() if library is None else library.unused()
