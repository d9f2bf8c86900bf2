"""Rules of an outer method and of a codec: what goes with what, and which class does it. No torch is imported, so that
a manifest can be checked anywhere."""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass

from swarmnode.base import plugin


@dataclass(frozen=True, slots=True)
class CodecRules:
    """A codec: its name in manifests, the class as "module:Class", and whether it needs weights that are near the
    receiver's own (`relative`) or pseudo-gradients (`of_delta`)."""

    name: str
    implementation: str
    relative: bool = False
    of_delta: bool = False
    nbytes: float = 4.0
    """Most bytes of a parameter, by which memory is reckoned."""
    coding_ns: float = 4.0
    """Nanoseconds of a processor to code a parameter and to read it again: measured on an EPYC for int8, lloyd4 and
    lloyd3, elsewhere int8's. By this `plan` reckons steps by averaged gradients."""
    nats: float = 0.0
    """Measured: what a run loses by it, per byte of text."""
    planned: bool = False
    """Whether `plan` tries it."""


@dataclass(frozen=True, slots=True)
class MethodRules:
    """An outer method: its name in manifests, the class as "module:Class", the codecs it takes.

    A package of its own lists its methods under the entry point `swarmnode.methods`, its codecs under
    `swarmnode.codecs` (swarmnode/base/plugin.py).
    """

    name: str
    implementation: str
    codecs: tuple[str, ...] = ()
    """Empty: all codecs of weights, those of other packages too."""
    alpha: float | None = None
    """Its own momentum, where gossip.alpha says "own"; None: it has none."""
    beta: float | None = None
    """Its own outer learning rate; None: it has none."""
    pull: bool = False
    """Whether gossip.gamma has an effect: the pull towards the partner's slow weights."""
    meets: bool = True
    """Whether replicas of a stage meet in rounds."""
    in_groups: bool = False
    """Whether any part of a stage can meet; else slow weights are shared by the whole stage."""
    in_fragments: bool = False
    """Whether a round may average a fragment of the weights."""
    of_progress: bool = False
    """Whether it sends pseudo-gradients whatever the codec."""
    in_subspace: bool = False
    """Whether it only averages weights, so that codec errors outside the subspace of pipeline.boundary can be projected
    away. With pseudo-gradients residuals and equal bits would suffer, with moments AdamW's shared ones."""
    of_whole_weights: bool = False
    """Whether a round replaces all fast weights and nothing but weights."""
    slow_on_host: bool = False
    """Whether slow weights, momentum and boundary lie in main memory where the fast weights lie on another device."""
    takes_fallback: bool = False
    """Whether a replica whose partner is missing may ask another for its packet; else all need equal slow weights."""
    averages_gradients: bool = False
    """Whether rounds average gradients and take the inner steps: each replica trains its share, then waits for it."""


@functools.cache
def codecs() -> dict[str, CodecRules]:
    """All codecs of installed packages by name."""
    return {rules.name: rules for rules in plugin.rows(plugin.CODECS, CodecRules)}


@functools.cache
def methods() -> dict[str, MethodRules]:
    """All outer methods of installed packages by name."""
    of_weights = tuple(name for name, rules in codecs().items() if not rules.of_delta)
    return {
        rules.name: dataclasses.replace(rules, codecs=rules.codecs or of_weights)
        for rules in plugin.rows(plugin.METHODS, MethodRules)
    }


def with_property(name: str) -> list[str]:
    """Names of the methods with a property of MethodRules."""
    return [rules.name for rules in methods().values() if getattr(rules, name)]
