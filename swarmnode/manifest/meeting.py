"""Which of gossip's methods, codecs and groups go together. `swarmnode.gossip.outer` makes the pairs named here, and
refuses the others (a test holds both together)."""

from __future__ import annotations

from swarmnode.manifest.spec import Manifest

WEIGHTS = ("fp32", "bf16", "int8")
MODULAR = ("modular6", "modular4", "modular3")
"""Of weights that the receiver's own are near to."""

UNBIASED = ("e3m0", "ternary")
SPARSE = ("topk", "topk512", "topk64")
DELTA = (*UNBIASED, *SPARSE, "powersgd")
"""Of pseudo-gradients."""

CODECS = (*WEIGHTS, *MODULAR, *DELTA)

CODECS_OF: dict[str, tuple[str, ...]] = {
    "noloco": (*WEIGHTS, *MODULAR),
    "average": (*WEIGHTS, *MODULAR),
    "diloco": CODECS,
    "sparseloco": (*WEIGHTS, *DELTA),
    "keeping": SPARSE,
    "streaming": (*WEIGHTS, *UNBIASED),  # a residual is of one fragment, and the next message is of another
    "eager": (*WEIGHTS, *DELTA),
    "delayed": (*WEIGHTS, *DELTA),
    "edit": (*WEIGHTS, *DELTA),
    "desloc": WEIGHTS,
    "none": (*WEIGHTS, *MODULAR),
}
"""By method."""

METHODS = tuple(CODECS_OF)
IN_GROUPS = ("noloco", "average", "desloc", "none")
"""Methods that any part of a stage can meet by; slow weights of the others are a whole stage's."""


FRAGMENTS_MAX = 255  # guess; each has the state of a codec of its own
IN_FRAGMENTS = ("noloco", "average", "none")
"""Methods that can meet by fragments of the weights (gossip/outer/blocks.py)."""

IN_SUBSPACE = ("noloco", "average", "none")
"""Methods that meet by weights alone: what codecs leave outside the subspace of pipeline.boundary is projected away.
With pseudo-gradients residuals and equal bits would suffer, with moments AdamW's shared ones."""


def allowed_codecs(m: Manifest) -> str:
    """What would do instead of gossip.codec, for an error."""
    method, codec = m.gossip.method, m.gossip.codec
    takers = [name for name, codecs in CODECS_OF.items() if codec in codecs]
    return f"{' or '.join(CODECS_OF[method])} with gossip.method = {method!r}; {codec} goes with {' or '.join(takers)}"


def goes_together(m: Manifest) -> bool:
    return m.gossip.codec in CODECS_OF.get(m.gossip.method, ())


def takes_fragments(m: Manifest) -> bool:
    return m.gossip.fragments == 1 or m.gossip.method in IN_FRAGMENTS


def keeps_subspace(m: Manifest) -> bool:
    """Whether weights stay in the subspace that pipeline.boundary may ask for."""
    return m.pipeline.boundary != "subspace" or m.gossip.method in IN_SUBSPACE


def meets_all(m: Manifest) -> bool:
    """Whether the group is one that the method's slow weights can be equal in."""
    return m.gossip.group == 0 or m.gossip.method in IN_GROUPS
