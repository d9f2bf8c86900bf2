"""Search the split, boundary, microbatch and round of a run that suit a fleet, by the estimate of plan.py.

Every split is tried with every boundary that the manifest allows. Settings that cannot be faster by the estimate are
left out: shorter microbatches where memory binds nothing, longer rounds and coarser boundaries where the lines up do
not.

The loss that `pipeline.boundary` costs, and the speed that it is worth.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from swarmnode.errors import UsageError
from swarmnode.manifest import Manifest
from swarmnode.manifest.cross_field import ACROSS
from swarmnode.manifest.recipe import STEPS_OF_ROUND, parameters_of
from swarmnode.manifest.spec import GossipSpec, InnerSpec, PipelineSpec
from swarmnode.model.split import stages_of
from swarmnode.plan.fleet import MachineKind
from swarmnode.plan.plan import Plan, plan, sample_bytes
from swarmnode.plan.stage_memory import fit_of, tightest

# measured (docs/methods.md): 4 stages of width 96 over 300 steps, 3 seeds, nats a byte over fp32
NATS = {"fp32": 0.0, "bf16": 0.0, "int8": 0.003, "fp8": 0.007}
SUBSPACE_NATS = ((1 / 8, 0.191), (1 / 4, 0.097), (1 / 2, 0.041))  # by k / D; measured in the same table
LAW_B, LAW_BETA = 410.7, 0.28  # arXiv 2203.15556, eq. 10: loss = 1.69 + 406.4 / N^0.34 + 410.7 / D^0.28


def boundary_nats(manifest: Manifest) -> float:
    """Nats that the run's boundary costs by the measurement on a small model; ranks between the measured ones by
    interpolation of logarithms, below them in inverse proportion [guess]. Nothing crosses a boundary in one stage, but
    a subspace restricts its layers as well."""
    pipeline = manifest.pipeline
    if pipeline.boundary == "subspace":
        return _subspace_nats(pipeline.boundary_rank / manifest.model.width)
    return NATS[pipeline.boundary] if pipeline.stages > 1 else 0.0


def _subspace_nats(share: float) -> float:
    least, most = SUBSPACE_NATS[0], SUBSPACE_NATS[-1]
    if share <= least[0]:
        return least[1] * least[0] / share
    for (low, at_low), (high, at_high) in itertools.pairwise(SUBSPACE_NATS):
        if share <= high:
            way = math.log(share / low) / math.log(high / low)
            return float(at_low * (at_high / at_low) ** way)
    return most[1]


def worth(nats: float, tokens: float) -> float:
    """The share of `tokens` that a run without the loss of `nats` needs for the loss that one with it ends at, by the
    law of LAW_B and LAW_BETA."""
    learned = LAW_B / tokens**LAW_BETA
    return float((1.0 + nats / learned) ** (-1.0 / LAW_BETA))


ROWS = 5  # best splits and boundaries that are kept
ALIKE = 0.01  # guess: of settings so close the one that changes least is better
SURVIVAL_MIN = 0.9  # guess: odds that no stage dies out in a day, below which speed counts for little
REPLICAS_MIN = 2
MEMORY_BINDS = 1.05  # guess: memory is the limit if without it the run were so many times as fast
RANK_PARTS = (4, 8)  # measured: D / 4 and D / 8 (docs/methods.md); D / 2 sends as much as int8
MEMORY_WEIGHTS = (0.0, 0.5, 1.0)  # guess
LARGE = 1e9  # parameters above which subspaces are tried unasked
MICROBATCH_MORE = 4  # guess: at most so many times the manifest's microbatch
FIELDS = (
    ("pipeline", "stages"),
    ("pipeline", "memory_weight"),
    ("pipeline", "boundary"),
    ("pipeline", "boundary_rank"),
    ("inner", "microbatch"),
    ("gossip", "round_samples"),
)


@dataclass(frozen=True, slots=True)
class Candidate:
    """Settings and their estimate. `nats`: the loss that the boundary costs, measured on a small model. `score`: tokens
    per second, or for one unit of money, less what those nats are worth. `frailty`: 0 with two replicas a stage that
    survive the day, 1 with two, 2 with one. `left_out`: kinds of machine that cost more than they add."""

    manifest: Manifest
    fleet: tuple[MachineKind, ...]
    plan: Plan
    nats: float
    score: float
    frailty: int
    changes: tuple[tuple[str, str, str | float], ...]
    left_out: tuple[str, ...]

    @property
    def order(self) -> tuple[int, float, float, int]:
        """Less is better."""
        return self.frailty, -self.score, -self.plan.tokens_per_s, self.manifest.pipeline.stages

    @property
    def group(self) -> tuple[object, ...]:
        """Candidates that share it differ only in microbatch and round; one of them is shown."""
        pipeline = self.manifest.pipeline
        return pipeline.stages, pipeline.boundary, pipeline.boundary_rank, self.left_out


@dataclass(frozen=True, slots=True)
class Search:
    """The result: `rows` are the best of different splits and boundaries, the best one first. `own`: the manifest's
    settings, None if they do not fit (`own_fault` says why). `plain`: the best one without a subspace, if the best has
    one; `subspace`: the best one with one, if any was tried. `by_money`: ranked by tokens for money."""

    rows: tuple[Candidate, ...]
    own: Candidate | None
    own_fault: str
    plain: Candidate | None
    subspace: Candidate | None
    by_money: bool
    tried: int

    @property
    def best(self) -> Candidate:
        """The recommended settings."""
        return self.rows[0]


def search(
    manifest: Manifest,
    fleet: Sequence[MachineKind],
    tokens: float,
    *,
    by_money: bool | None = None,
    ranks: Sequence[int] = (),
) -> Search:
    """The best settings of `manifest` for `fleet` and a run of `tokens`. `by_money` None: if the fleet has prices.
    `ranks`: of subspaces to try, beside the manifest's own.

    Raises UsageError, with bytes, if no setting fits.
    """
    if by_money is None:
        by_money = any(kind.price or kind.egress_price for kind in fleet)
    own: Candidate | None = None
    own_fault = ""
    try:
        own = _candidate(manifest, manifest, fleet, (), tokens, by_money=by_money)
    except UsageError as error:
        own_fault = str(error)
    if own is not None and not own.plan.tokens_per_s:
        bare = next(stage.part.stage for stage in own.plan.stages if not stage.replicas)
        short = tightest(manifest, fleet)
        own, own_fault = None, short[1] if short else f"no machine is left for stage {bare}"
    _check_ranks(manifest, ranks)
    found = [own] if own else []
    for used, left_out in _fleets(fleet, by_money=by_money):
        _try_all(manifest, used, left_out, tokens, found, by_money=by_money, ranks=ranks)
    if not found:
        raise UsageError(_nothing(manifest, fleet))
    best = _chosen(found)
    plain = [one for one in found if one.manifest.pipeline.boundary != "subspace"]
    within = [one for one in found if one.manifest.pipeline.boundary == "subspace"]
    within = within or _same_in_subspace(manifest, best, tokens, by_money=by_money)
    rest = [one for one in _groups(found) if one.group != best.group]
    return Search(
        (best, *rest[: ROWS - 1]),
        own,
        own_fault,
        _chosen(plain) if plain and best not in plain else None,
        _chosen(within) if within else None,
        by_money,
        len({(one.manifest, one.left_out) for one in found}),
    )


def limit_of(candidate: Candidate, tokens: float) -> str:
    """The limit that binds, `arithmetic`, `uplink` or `in flight`; also `memory` if with more of it the machines would
    be faster: some idle, compute twice, or serve a stage that needs them less."""
    without = plan(candidate.manifest, candidate.fleet, tokens, memory=False)
    binds = without.tokens_per_s > MEMORY_BINDS * candidate.plan.tokens_per_s
    return candidate.plan.limit_kind + (", memory" if binds else "")


def idle_machines(candidate: Candidate) -> int:
    """Machines of the fleet, as used, that serve no stage."""
    return sum(kind.count for kind in candidate.fleet) - sum(stage.replicas for stage in candidate.plan.stages)


def _chosen(found: Sequence[Candidate]) -> Candidate:
    top = min(found, key=lambda one: one.order)
    near = [one for one in found if one.frailty == top.frailty and one.score >= (1.0 - ALIKE) * top.score]
    return min(near, key=lambda one: (len(one.changes), len(one.left_out), one.order))


def _groups(found: Sequence[Candidate]) -> list[Candidate]:
    groups: dict[tuple[object, ...], list[Candidate]] = {}
    for one in found:
        groups.setdefault(one.group, []).append(one)
    return sorted(map(_chosen, groups.values()), key=lambda one: one.order)


def _candidate(
    manifest: Manifest,
    origin: Manifest,
    fleet: Sequence[MachineKind],
    left_out: tuple[str, ...],
    tokens: float,
    *,
    by_money: bool,
) -> Candidate:
    found = plan(manifest, fleet, tokens)
    nats = boundary_nats(manifest)
    frailty = 2
    if found.replicas_min >= REPLICAS_MIN:
        frailty = 0 if found.survival >= SURVIVAL_MIN else 1
    score = worth(nats, tokens) * (found.tokens_per_money if by_money else found.tokens_per_s)
    changes = tuple(
        (table, key, getattr(getattr(manifest, table), key))
        for table, key in FIELDS
        if getattr(getattr(manifest, table), key) != getattr(getattr(origin, table), key)
    )
    return Candidate(manifest, tuple(fleet), found, nats, score, frailty, changes, left_out)


def _fleets(
    fleet: Sequence[MachineKind], *, by_money: bool
) -> Iterator[tuple[tuple[MachineKind, ...], tuple[str, ...]]]:
    """(the machines used, names of the kinds left out): all, and for money also without those that have the dearest
    arithmetic."""
    yield tuple(fleet), ()
    if by_money:
        order = sorted(range(len(fleet)), key=lambda i: (fleet[i].price / fleet[i].flops, i))
        for count in range(len(order) - 1, 0, -1):
            used = set(order[:count])
            yield (
                tuple(kind for i, kind in enumerate(fleet) if i in used),
                tuple(kind.name for i, kind in enumerate(fleet) if i not in used),
            )


def _memory_weights(manifest: Manifest, fleet: Sequence[MachineKind]) -> list[float]:
    """The manifest's own; where some machine cannot hold every stage, also others that cut the layers otherwise."""
    own = manifest.pipeline.memory_weight
    found = {tuple(part.layers for part in stages_of(manifest)): own}
    if any(fit_of(manifest, kind).unable for kind in fleet):
        for weight in MEMORY_WEIGHTS:
            cut = tuple(part.layers for part in stages_of(_with(manifest, memory_weight=weight)))
            found.setdefault(cut, weight)
    return list(found.values())


def _boundaries(manifest: Manifest, ranks: Sequence[int]) -> list[tuple[str, int]]:
    """Plain ones first; fp8 sends as much as int8 and costs more, fp32 more than bf16 and brings nothing."""
    own, width = (manifest.pipeline.boundary, manifest.pipeline.boundary_rank), manifest.model.width
    plain = [("bf16", 0), ("int8", 0), *([own] if own[0] != "subspace" else [])]
    tried = list(ranks)
    if not tried and parameters_of(manifest.model) > LARGE:
        tried = [width // parts for parts in RANK_PARTS]
    within = [("subspace", rank) for rank in tried] + ([own] if own[0] == "subspace" else [])
    return list(dict.fromkeys([*plain, *within]))


def _microbatches(manifest: Manifest, nodes: int) -> list[int]:
    """The manifest's own, then smaller powers of two, then larger ones that keep a microbatch in flight for each of
    `nodes`."""
    own = manifest.inner.microbatch
    powers = [1 << i for i in range((MICROBATCH_MORE * own).bit_length())]
    flight = manifest.inner.inner_batch * max(1, manifest.pipeline.staleness_max) // max(1, nodes)
    smaller = [size for size in reversed(powers) if size < own]
    return [own, *smaller, *(size for size in powers if own < size <= min(MICROBATCH_MORE * own, flight))]


def _rounds(manifest: Manifest) -> list[int]:
    """The manifest's own, then longer ones of at most STEPS_OF_ROUND inner steps."""
    own, step = manifest.gossip.round_samples, max(manifest.inner.inner_batch, manifest.inner.inner_batch_end)
    steps = [1 << i for i in range(STEPS_OF_ROUND.bit_length())]
    return [own, *(step * count for count in steps if step * count > own)]


def _with(manifest: Manifest, **changed: float | str) -> Manifest:
    """`manifest` with other values of FIELDS, by key."""
    tables: dict[str, PipelineSpec | InnerSpec | GossipSpec] = {}
    for table in ("pipeline", "inner", "gossip"):
        values = {key: changed[key] for of, key in FIELDS if of == table and key in changed}
        if values:
            tables[table] = dataclasses.replace(getattr(manifest, table), **values)
    return dataclasses.replace(manifest, **tables)  # type: ignore[arg-type]


def _allowed(manifest: Manifest) -> bool:
    return all(across.holds(manifest) for across in ACROSS)


def _try_all(
    manifest: Manifest,
    fleet: tuple[MachineKind, ...],
    left_out: tuple[str, ...],
    tokens: float,
    found: list[Candidate],
    *,
    by_money: bool,
    ranks: Sequence[int],
) -> None:
    """Append the candidates of all splits on `fleet` to `found`."""
    nodes = sum(kind.count for kind in fleet)
    bars = _Bars(found)
    for stages in range(1, min(manifest.model.layers, nodes) + 1):
        sated = False  # a plain boundary whose lines are not the limit
        weights = _memory_weights(_with(manifest, stages=stages), fleet)
        for weight, (boundary, rank) in itertools.product(weights, _boundaries(manifest, ranks)):
            if sated and boundary == "subspace" and not ranks and manifest.pipeline.boundary != "subspace":
                continue
            last: Candidate | None = None
            for microbatch in _microbatches(manifest, nodes):
                start = _with(
                    manifest,
                    stages=stages,
                    memory_weight=weight,
                    boundary=boundary,
                    boundary_rank=rank,
                    microbatch=microbatch,
                )
                if not _allowed(start) or not _may_gain(start, last, fleet):
                    continue
                if not by_money and bars.below(_bound(start, fleet) * worth(boundary_nats(start), tokens)):
                    continue
                for round_samples in _rounds(start):
                    made = _with(start, round_samples=round_samples)
                    one = _candidate(made, manifest, fleet, left_out, tokens, by_money=by_money)
                    if not one.plan.tokens_per_s:
                        break
                    found.append(one)
                    bars.add(one)
                    last = one if round_samples == start.gossip.round_samples else last
                    sated |= boundary != "subspace" and one.plan.limit_kind == "arithmetic"
                    if one.plan.limit_kind == "arithmetic":
                        break


def _may_gain(manifest: Manifest, last: Candidate | None, fleet: Sequence[MachineKind]) -> bool:
    """Whether `manifest`, which differs from the `last` candidate only in its microbatch, may be faster: some machine
    can serve a stage, and its memory allows more, or a larger microbatch has fewer fixed costs."""
    fits = [fit_of(manifest, kind) for kind in fleet]
    if all(len(fit.unable) == manifest.pipeline.stages for fit in fits):
        return False
    if last is None:
        return True
    before = [fit_of(last.manifest, kind) for kind in fleet]
    if any(new.unable != old.unable for new, old in zip(fits, before, strict=True)):
        return True
    if last.plan.limit_kind == "uplink":
        return False
    larger = manifest.inner.microbatch > last.manifest.inner.microbatch
    return larger or any(new.repeated != old.repeated for new, old in zip(fits, before, strict=True))


def _bound(manifest: Manifest, fleet: Sequence[MachineKind]) -> float:
    """Tokens per second that all lines up together carry, without any gossip: no placement does more."""
    parts = stages_of(manifest)
    traffic = sum(sample_bytes(manifest, part, len(parts)) for part in parts)
    return sum(kind.count * kind.up for kind in fleet) / traffic * manifest.model.context if traffic else math.inf


class _Bars:
    """The score of the last row that is shown: settings below it need no estimate."""

    def __init__(self, found: Sequence[Candidate]) -> None:
        self._best: dict[tuple[object, ...], float] = {}
        for one in found:
            self.add(one)

    def add(self, one: Candidate) -> None:
        if one.frailty == 0:
            self._best[one.group] = max(one.score, self._best.get(one.group, 0.0))

    def below(self, score: float) -> bool:
        best = sorted(self._best.values(), reverse=True)
        return len(best) >= ROWS and score < best[ROWS - 1]


def _check_ranks(manifest: Manifest, ranks: Sequence[int]) -> None:
    """Raises UsageError if the manifest does not go with a subspace of one of `ranks`."""
    for rank in ranks:
        made = _with(manifest, boundary="subspace", boundary_rank=rank)
        for across in ACROSS:
            if "pipeline.boundary" in across.names and not across.holds(made):
                raise UsageError(f"--rank {rank}: {across.names[0]}: allowed is {across.allowed(made)}")


def _same_in_subspace(manifest: Manifest, best: Candidate, tokens: float, *, by_money: bool) -> list[Candidate]:
    """The best candidate with the subspaces that would be tried, where the search had no reason to try them."""
    found = []
    for boundary, rank in _boundaries(manifest, ()):
        made = _with(best.manifest, boundary=boundary, boundary_rank=rank)
        if boundary == "subspace" and _allowed(made):
            try:
                one = _candidate(made, manifest, best.fleet, best.left_out, tokens, by_money=by_money)
            except UsageError:
                continue
            found += [one] if one.plan.tokens_per_s else []
    return found


def _nothing(manifest: Manifest, fleet: Sequence[MachineKind]) -> str:
    """The reason that no split fits: the bytes that the least demanding one needs."""
    nodes = sum(kind.count for kind in fleet)
    least: tuple[int, str] | None = None
    for stages in range(1, manifest.model.layers + 1):
        for weight, (boundary, rank) in itertools.product(MEMORY_WEIGHTS, _boundaries(manifest, ())):
            sizes = sorted(_microbatches(manifest, nodes))
            made = [
                _with(
                    manifest,
                    stages=stages,
                    memory_weight=weight,
                    boundary=boundary,
                    boundary_rank=rank,
                    microbatch=size,
                )
                for size in sizes
            ]
            one = next(filter(_allowed, made), None)
            if one is None:
                continue
            short = tightest(one, fleet)
            if short is None:
                return (
                    f"no split fits the fleet: with {stages} stages each fits some machine, but the {nodes} machines"
                    " cannot fill them all"
                )
            lacking, text = short
            if least is None or lacking < least[0]:
                words = f"with {stages} stages and microbatches of {one.inner.microbatch} {text}"
                least = lacking, f"no split fits the fleet: even {words}"
    assert least is not None, "a manifest has a split that its rules allow"
    return least[1]
