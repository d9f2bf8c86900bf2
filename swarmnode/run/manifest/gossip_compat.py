"""Valid combinations of gossip's methods, codecs, groups and constants; train.gossip.outer makes exactly these."""

from __future__ import annotations

from dataclasses import dataclass

from swarmnode.base.bounds import STRIDE_MAX
from swarmnode.run.gossip_rules import MethodRules, codecs, methods
from swarmnode.run.manifest.spec import OWN, GossipSpec, Manifest


def rules_of(gossip: GossipSpec) -> MethodRules:
    return methods()[gossip.method]


@dataclass(frozen=True, slots=True)
class OuterConstants:
    """Constants of an outer step: momentum, weight of the mean pseudo-gradient (the outer learning rate), pull towards
    the partner's slow weights."""

    alpha: float
    beta: float
    gamma: float


def constants(gossip: GossipSpec) -> OuterConstants:
    """The values of gossip.alpha, beta and gamma. Methods without them are plain means: alpha = 0, beta = gamma = 1.
    gamma's own value is beta, as in the code published with NoLoCo."""
    rules = rules_of(gossip)
    alpha = _number(gossip.alpha, rules.alpha or 0.0)
    beta = _number(gossip.beta, 1.0 if rules.beta is None else rules.beta)
    return OuterConstants(alpha, beta, _number(gossip.gamma, beta))


def _number(given: float | str, own: float) -> float:
    return float(given) if given != OWN else own


def sends_weights_alone(m: Manifest) -> bool:
    """Whether gamma equals beta if the codec needs it."""
    step = constants(m.gossip)
    return not (rules_of(m.gossip).pull and codecs()[m.gossip.codec].relative) or step.gamma == step.beta


def allowed_codecs(m: Manifest) -> str:
    """Description of valid alternatives to gossip.codec, for an error."""
    method = m.gossip.method
    codec = m.gossip.codec
    takers = [name for name, rules in methods().items() if codec in rules.codecs]
    allowed = " or ".join(rules_of(m.gossip).codecs)
    return f"{allowed} with gossip.method = {method!r}; {codec} goes with {' or '.join(takers)}"


def begins_from_slow_weights(gossip: GossipSpec) -> bool:
    """Whether a newcomer may begin from the slow weights and the outer momentum alone. In fragments, slow weights are
    as old as the last round of theirs; other methods leave some fast weights to each replica, or average moments."""
    return rules_of(gossip).of_whole_weights and gossip.fragments == 1


def planned_meeting_steps(m: Manifest) -> float:
    """`meeting_steps` where no round is left out; 0 where replicas do not meet."""
    return meeting_steps(m, m.gossip.round_samples) if meets(m.gossip) else 0.0


def sends_pseudo_gradients(gossip: GossipSpec) -> bool:
    """Whether packets hold a round's progress, so that a member which misses a round lacks its outer step; else they
    hold weights, and the next round brings both together."""
    return rules_of(gossip).of_progress or codecs()[gossip.codec].of_delta


def averages_gradients(m: Manifest) -> bool:
    """Whether rounds average gradients and take the inner steps."""
    return rules_of(m.gossip).averages_gradients


def step_rounds(m: Manifest) -> int:
    """The rounds of an inner step where gradients are averaged: 1, 2, 4, ... as a record's stride; 0 if it is none."""
    rounds, rest = divmod(m.inner.inner_batch, m.gossip.round_samples)
    return rounds if not rest and rounds.bit_count() == 1 and rounds <= STRIDE_MAX else 0


def meeting_steps(m: Manifest, samples: float) -> float:
    """The inner steps between two meetings of a replica about the same weights, if it meets every `samples` of the
    run."""
    return m.gossip.fragments * samples / m.inner.inner_batch


def meets(gossip: GossipSpec) -> bool:
    """Whether replicas of a stage meet in rounds."""
    return rules_of(gossip).meets
