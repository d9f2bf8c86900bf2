"""Fit a new run to its fleet: what `swarmnode init` writes, by the search, and what it says of the run beforehand."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from swarmnode.app.planner.fleet import MachineKind
from swarmnode.app.planner.geography import Address
from swarmnode.app.planner.learning_efficiency import of_batch
from swarmnode.app.planner.plan import Plan, plan
from swarmnode.app.planner.plan_search import PAIR, SPARING, Candidate, search, with_values
from swarmnode.app.planner.simulated import Simulated
from swarmnode.base.errors import UsageError
from swarmnode.run.gossip_rules import codecs
from swarmnode.run.manifest import Manifest
from swarmnode.run.manifest.gossip_compat import averages_gradients, planned_meeting_steps
from swarmnode.run.manifest.recipe import Recipe, parameters_of, warmup_samples

CARD_FLOPS = ((80, 2.5e14), (24, 4e13), (16, 2e13), (0, 1e13))
"""FLOP/s that training gets of a card, by its least GB: an H100 by measurement (docs/learning.md), the others as in
examples/home-8b.csv [guess]."""
CARD_HOST_GB = 16.0  # guess
PROCESSOR_GB = 16.0  # guess
PROCESSOR_FLOPS = 1e11  # measured: two threads, a model of 2 M parameters
GIB = 1 << 30  # makers' gigabytes of a card
CARDS_FROM = 20_000_000  # guess: parameters from which machines have a card, and bytes no longer serve as tokens
LAN_BPS = 1e9  # bit/s up of a local network
HOME_BPS = 1e8  # a line with less up is a home's
# Guesses.
DOWN_OVER_UP = 5.0
HOME_LIFE_H = 10.0
HOME_ACCESS_S = 0.025
LAN_ACCESS_S = 0.0005
MICROBATCHES_ALONE = (8, 4, 2, 1)

SLOWER = (
    "so this model is too small for these lines: let one machine train it, or give them a larger one (`swarmnode init"
    " RUN --parameters N --nodes N --up RATE` fits it), or look for other settings: `swarmnode plan --search`"
)


def machines(nodes: int, card_gb: float | None, up_bps: float | None, parameters: int) -> MachineKind:
    """`nodes` equal machines with a card of `card_gb` (None: one of 12 GB if the model is large, else none) and a line
    of `up_bps` (None: a local network)."""
    card_gb = 12.0 if card_gb is None and parameters >= CARDS_FROM else card_gb
    up_bps = up_bps or LAN_BPS
    home = up_bps < HOME_BPS
    return MachineKind(
        f"{card_gb:g} GB" if card_gb else "CPU",
        nodes,
        next(flops for least, flops in CARD_FLOPS if card_gb >= least) if card_gb else PROCESSOR_FLOPS,
        up_bps / 8,
        up_bps / 8 * (DOWN_OVER_UP if home else 1.0),
        Address("eu" if home else "local", HOME_ACCESS_S if home else LAN_ACCESS_S),
        HOME_LIFE_H if home else math.inf,
        (card_gb * GIB if card_gb else PROCESSOR_GB * 1e9) / 1e9,
        max(CARD_HOST_GB * GIB / 1e9, card_gb) if card_gb else 0.0,
    )


@dataclass(frozen=True, slots=True)
class Fitted:
    """The run and its estimate. `alone`: tokens per second of the best machine of the fleet that trains the whole model
    by itself, 0 if it fits on none. `steps`: the best settings for each number of samples a step that was tried."""

    recipe: Recipe
    best: Candidate
    alone: float
    steps: tuple[Candidate, ...]


def fitted(recipe: Recipe, fleet: Sequence[MachineKind], *, stages: int | None = None) -> Fitted:
    """`recipe` with the settings with which `fleet` comes to its loss first, of `stages` stages if that is not None.
    Raises UsageError, with bytes, if nothing fits."""
    start = recipe.manifest
    tokens = float(start.inner.decay_samples * start.model.context)
    if stages is not None and stages > start.model.layers:
        raise UsageError(f"--stages {stages}: the model has {start.model.layers} layers")
    found = search(start, fleet, tokens, stages=stages)
    best = found.best
    made = best.manifest
    batch = best.manifest.inner.inner_batch
    nodes = sum(kind.count for kind in fleet)
    origin = f"searched for {nodes} machines: least time to a loss (docs/learning.md)"
    changed = {f"{table}.{key}": origin for table, key, _ in best.changes}
    more = rate_factor(batch * start.model.context, start.inner.inner_batch * start.model.context, tokens)
    inner = dataclasses.replace(
        made.inner,
        learning_rate=float(f"{more * made.inner.learning_rate:.1e}"),
        muon_learning_rate=float(f"{more * made.inner.muon_learning_rate:.1e}"),
        warmup_samples=warmup_samples(made.inner, batch, made.inner.decay_samples),
    )
    for key in ("learning_rate", "muon_learning_rate"):
        if more > 1.0 and f"inner.{key}" in recipe.origins:
            times = f"times {more:.2g} for the batch over Step Law's"
            changed[f"inner.{key}"] = f"{recipe.origins[f'inner.{key}']}; {times}"
    made = dataclasses.replace(made, inner=inner)
    return Fitted(
        Recipe(made, {**recipe.origins, **changed}),
        dataclasses.replace(best, manifest=made),
        alone(made, fleet, tokens),
        found.steps,
    )


def rate_factor(batch: float, start: float, tokens: float) -> float:
    """Times the rate for `start` tokens a step that suit `batch` in a run of `tokens`: the root of what a step learns
    more, so the root of the batch until batches cost samples, and less beyond."""
    return math.sqrt(max(1.0, batch * of_batch(batch, tokens) / (start * of_batch(start, tokens))))


def alone(manifest: Manifest, fleet: Sequence[MachineKind], tokens: float) -> float:
    """Tokens per second of the best machine of `fleet` that trains the whole model by itself; 0 if it fits on none.

    It meets nobody, so nothing that `manifest` has for its lines counts: it trains as it needs the least memory."""
    seconds = 0.0
    fragments, average_share = SPARING
    codec = min((rules for rules in codecs().values() if rules.planned), key=lambda rules: (rules.nbytes, rules.name))
    for kind in fleet:
        for microbatch in MICROBATCHES_ALONE:
            one = with_values(
                manifest,
                stages=1,
                boundary="bf16",
                boundary_rank=0,
                microbatch=microbatch,
                inner_batch=max(MICROBATCHES_ALONE),
                inner_batch_max=0,
                average_share=average_share,
                fragments=fragments,
                method="average",
                codec=codec.name,
                group=PAIR,
            )
            try:
                seconds = max(seconds, plan(one, [dataclasses.replace(kind, count=1)], tokens).tokens_per_s)
            except UsageError:
                continue
    return seconds


def _meetings(manifest: Manifest, simulated: Simulated | None) -> str:
    """Steps from one averaging to the next, as planned and as `simulated`."""
    found = 0.0 if simulated is None else simulated.meets_every_steps
    parts = manifest.gossip.fragments
    if not averages_gradients(manifest):
        planned = f"replicas meet every {planned_meeting_steps(manifest):,.0f} steps"
        return planned + (f" (simulated: every {found:,.3g})" if found else "")
    planned = "gradients are averaged before each" + (f", one in {parts} of their rows in turn" if parts > 1 else "")
    return planned + (f" (simulated: before one in {found / parts:,.3g})" if found else "")


def forecast(
    found: Plan, manifest: Manifest, tokens: float, one_alone: float, simulated: Simulated | None = None
) -> list[str]:
    """Lines for the organiser: what the run will do, by formula, or with the speed and the meetings of `simulated`."""
    how = ratio = "by formula"
    if simulated is not None:
        how = "simulated"
        ratio = "with the simulated speed and meetings"
        found = simulated.of(found, manifest, tokens)
    learned = tuple(found.tokens_per_s * share for share in found.likely)
    seconds = tuple(tokens / one if one else math.inf for one in reversed(learned))
    single = (
        f"{one_alone:,.0f} tokens/s, {took(tokens / one_alone)}; {ratio}, together they are"
        f" {times_as_fast(found, one_alone)} times as fast to a loss"
        if one_alone
        else "the model does not fit"
    )
    spans = f" in {found.hops:.1f} hops, as machines serve what they hold" if manifest.pipeline.span_max > 1 else ""
    shape = (
        f"{parameters_of(manifest.model) / 1e6:,.4g} M parameters; stages: {manifest.pipeline.stages}{spans}, of"
        f" {found.replicas_min} replicas or more; a step takes {manifest.inner.inner_batch} samples of"
        f" {manifest.model.context} tokens, {_meetings(manifest, simulated)}"
    )
    efficiency = (
        f"learning efficiency {span([f'{one:.2f}' for one in found.likely])} by formula: as much as"
        f" {span([f'{one:,.0f}' for one in learned])} tokens/s of one replica; the loss of {tokens:.3g} tokens in"
        f" {span([took(one) for one in seconds])}"
    )
    return [
        shape,
        (
            f"{found.tokens_per_s:,.0f} tokens/s {how}, {found.share:.0%} of what the machines could do (limit:"
            f" {found.limit})"
        ),
        efficiency,
        f"one of these machines alone: {single}",
        *([SLOWER] if one_alone and max(learned) < one_alone else []),
    ]


def steps_compared(found: Fitted) -> str:
    """The reason for the samples of a step: what the machines do and learn with the next smaller and larger ones; empty
    where no others were possible."""
    batches = [one.manifest.inner.inner_batch for one in found.steps]
    at = batches.index(found.best.manifest.inner.inner_batch)
    beside = found.steps[max(0, at - 1) : at + 2]
    if len(beside) < 2:
        return ""

    def listed(words: Iterable[str]) -> str:
        return ", ".join(words)

    return (
        f"why steps of {batches[at]:,} samples: with {listed(f'{one.manifest.inner.inner_batch:,}' for one in beside)}"
        f" machines do {listed(f'{one.plan.share:.0%}' for one in beside)} of what they could, and learn"
        f" {listed(f'{one.plan.efficiency:.2f}' for one in beside)} of what one replica does from a token"
    )


def span(ends: Sequence[str]) -> str:
    """`2.9 to 3.5`; `3` where both ends read so."""
    least, most = ends
    return least if least == most else f"{least} to {most}"


def times_as_fast(found: Plan, one_alone: float) -> str:
    """Times as fast to a loss as `one_alone` tokens/s, with its known error: `2.9 to 3.5`."""
    return span([f"{found.tokens_per_s * share / one_alone:.2g}" for share in found.likely])


def took(seconds: float) -> str:
    """`3.2 days`, `5.0 hours` or `12.1 minutes`."""
    hours = seconds / 3600.0
    if hours >= 48.0:
        return f"{hours / 24.0:,.1f} days"
    return f"{hours:.1f} hours" if hours >= 2.0 else f"{hours * 60.0:.1f} minutes"


def check_faster(found: Fitted) -> None:
    """Raises UsageError, with what to change, if the fleet comes to its loss later than its best machine alone, even
    where it learns the most that is likely."""
    learned = found.best.plan.tokens_per_s * found.best.plan.likely[1]
    if learned >= found.alone:
        return
    stages = found.best.manifest.pipeline.stages
    change = {
        "uplink": f"lines of {found.best.plan.egress * 8 / 1e6 * found.alone / learned:,.0f} Mbit/s up would carry it",
        "in flight": "it takes shorter ways between machines",
        "arithmetic": "it takes more machines, or a longer run (--tokens)",
    }[found.best.plan.limit_kind]
    fewer = f", or fewer stages than {stages}" if stages > 1 else ""
    raise UsageError(
        f"together these machines are {times_as_fast(found.best.plan, found.alone)} times as fast to a loss as one of"
        f" them alone (limit: {found.best.plan.limit}): {change}{fewer}; --anyway writes the run as it is"
    )
