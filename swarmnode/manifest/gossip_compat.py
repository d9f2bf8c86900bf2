"""Valid combinations of gossip's methods, codecs, groups and constants. `swarmnode.gossip.outer` makes exactly these (a
test compares both)."""

from __future__ import annotations

from dataclasses import dataclass

from swarmnode.manifest.spec import OWN, GossipSpec, Manifest

WEIGHTS = ("fp32", "bf16", "int8")
MODULAR = ("modular6", "modular4", "modular3")
"""Codecs of weights that are near the receiver's own."""

UNBIASED = ("e3m0", "ternary")
SPARSE = ("topk", "topk512", "topk64")
DELTA = (*UNBIASED, *SPARSE, "powersgd")
"""Codecs of pseudo-gradients."""

CODECS = (*WEIGHTS, *MODULAR, *DELTA)

CODECS_OF: dict[str, tuple[str, ...]] = {
    "noloco": (*WEIGHTS, *MODULAR),
    "average": (*WEIGHTS, *MODULAR),
    "diloco": CODECS,
    "sparseloco": (*WEIGHTS, *DELTA),
    "partial_average": SPARSE,
    "streaming": (*WEIGHTS, *UNBIASED),  # a residual belongs to one fragment, but the next message is of another
    "eager": (*WEIGHTS, *DELTA),
    "delayed": (*WEIGHTS, *DELTA),
    "edit": (*WEIGHTS, *DELTA),
    "desloc": WEIGHTS,
    "none": (*WEIGHTS, *MODULAR),
}
"""Allowed codecs by method."""

METHODS = tuple(CODECS_OF)
IN_GROUPS = ("noloco", "average", "desloc", "none")
"""Methods with which any part of a stage can meet; with the others slow weights are shared by the whole stage."""


FRAGMENTS_MAX = 255  # guess; each has the state of its own codec
IN_FRAGMENTS = ("noloco", "average", "none")
"""Methods that can average fragments of the weights (gossip/outer/weight_fragment.py)."""

OF_PROGRESS = ("sparseloco", "partial_average", "streaming", "eager", "delayed", "edit")
"""Methods that send pseudo-gradients whatever the codec; diloco does so with those of DELTA."""

IN_SUBSPACE = ("noloco", "average", "none")
"""Methods that only average weights: codec errors outside the subspace of pipeline.boundary are projected away. With
pseudo-gradients residuals and equal bits would suffer, with moments AdamW's shared ones."""

OF_WHOLE_WEIGHTS = ("noloco", "average", "diloco", "sparseloco", "eager", "delayed", "edit")
"""Methods of which a round replaces all fast weights and nothing but weights."""


@dataclass(frozen=True, slots=True)
class OuterConstants:
    """Constants of an outer step: momentum, weight of the mean pseudo-gradient (the outer learning rate), pull towards
    the partner's slow weights."""

    alpha: float
    beta: float
    gamma: float


OWN_ALPHA = {
    "noloco": 0.5,  # the code published with NoLoCo
    "diloco": 0.9,  # DiLoCo, arXiv 2311.08105 (Nesterov)
    "streaming": 0.9,  # Streaming DiLoCo, arXiv 2501.18512 (Nesterov)
    "eager": 0.9,  # Eager updates, arXiv 2502.12996: as Streaming DiLoCo, of the same authors (Nesterov)
    "delayed": 0.9,  # Async Local-SGD, arXiv 2401.09135: as DiLoCo (Nesterov)
    "edit": 0.85,  # EDiT, arXiv 2412.07210 (Nesterov)
}
OWN_BETA = {
    "noloco": 0.7,  # the code published with NoLoCo
    "diloco": 0.7,  # DiLoCo, arXiv 2311.08105
    "sparseloco": 1.0,  # SparseLoCo, arXiv 2508.15706: the residual replaces momentum
    "streaming": 0.4,  # Streaming DiLoCo, arXiv 2501.18512
    "eager": 0.4,  # as Streaming DiLoCo
    "delayed": 0.7,  # as DiLoCo
    "edit": 0.8,  # EDiT, arXiv 2412.07210
}
"""The values of "own", by method; methods that are missing have no such constant. gamma's own value is beta, as in the
code published with NoLoCo; only noloco has one."""


def constants(gossip: GossipSpec) -> OuterConstants:
    """The values of gossip.alpha, beta and gamma. Methods without them are plain means: alpha = 0, beta = gamma = 1."""
    alpha = _number(gossip.alpha, OWN_ALPHA.get(gossip.method, 0.0))
    beta = _number(gossip.beta, OWN_BETA.get(gossip.method, 1.0))
    return OuterConstants(alpha, beta, _number(gossip.gamma, beta))


def _number(given: float | str, own: float) -> float:
    return float(given) if given != OWN else own


def has_alpha(m: Manifest) -> bool:
    """Whether a number in gossip.alpha has an effect; likewise the next two."""
    return m.gossip.alpha == OWN or m.gossip.method in OWN_ALPHA


def has_beta(m: Manifest) -> bool:
    return m.gossip.beta == OWN or m.gossip.method in OWN_BETA


def has_gamma(m: Manifest) -> bool:
    return m.gossip.gamma == OWN or m.gossip.method == "noloco"


def sends_weights_alone(m: Manifest) -> bool:
    """Whether gamma equals beta if the codec needs it."""
    found = constants(m.gossip)
    return m.gossip.method != "noloco" or m.gossip.codec not in MODULAR or found.gamma == found.beta


def allowed_codecs(m: Manifest) -> str:
    """Description of valid alternatives to gossip.codec, for an error."""
    method, codec = m.gossip.method, m.gossip.codec
    takers = [name for name, codecs in CODECS_OF.items() if codec in codecs]
    return f"{' or '.join(CODECS_OF[method])} with gossip.method = {method!r}; {codec} goes with {' or '.join(takers)}"


def goes_together(m: Manifest) -> bool:
    return m.gossip.codec in CODECS_OF.get(m.gossip.method, ())


def begins_from_slow_weights(gossip: GossipSpec) -> bool:
    """Whether a newcomer may begin from the slow weights and the outer momentum alone. In fragments, slow weights are
    as old as the last round of theirs; other methods leave some fast weights to each replica, or average moments."""
    return gossip.method in OF_WHOLE_WEIGHTS and gossip.fragments == 1


def sends_pseudo_gradients(gossip: GossipSpec) -> bool:
    """Whether packets hold a round's progress, so that a member which misses a round lacks its outer step; else they
    hold weights, and the next round brings both together."""
    return gossip.method in OF_PROGRESS or gossip.codec in DELTA


def takes_fragments(m: Manifest) -> bool:
    return m.gossip.fragments == 1 or m.gossip.method in IN_FRAGMENTS


def keeps_subspace(m: Manifest) -> bool:
    """Whether the method keeps weights in the subspace of pipeline.boundary, if there is one."""
    return m.pipeline.boundary != "subspace" or m.gossip.method in IN_SUBSPACE


def meets_all(m: Manifest) -> bool:
    """Whether the method's slow weights can be equal in such a group."""
    return m.gossip.group == 0 or m.gossip.method in IN_GROUPS
