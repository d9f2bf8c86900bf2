"""Search the settings of a run that suit a fleet: those with which it comes to a loss first, by the estimate of plan.py
and learning_efficiency.py.

Tried: stages from one on and how they are cut, boundary and rank, inner batch, microbatch, codec, length and fragments
of rounds, kinds of machine left out. Slots, the batch that keeps machines busy, timeouts and periods follow from these.
Settings that cannot be better by the estimate are left out.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from swarmnode.app.planner.fleet import MachineKind
from swarmnode.app.planner.learning_efficiency import boundary_nats, critical_batch, efficiency
from swarmnode.app.planner.plan import ALIKE, Plan, in_flight_needed, plan, sample_bytes
from swarmnode.app.planner.stage_memory import blocks_of, fit_of, tightest
from swarmnode.base.errors import UsageError
from swarmnode.base.ids import stage_name
from swarmnode.model.adapter import trained_count
from swarmnode.model.split import stages_of
from swarmnode.net.membership.liveness import LOST_PERIODS
from swarmnode.run.gossip_rules import codecs
from swarmnode.run.manifest import Manifest
from swarmnode.run.manifest.cross_field import ACROSS
from swarmnode.run.manifest.gossip_compat import averages_gradients
from swarmnode.run.manifest.recipe import STEPS_OF_ROUND, law_batch, parameters_of
from swarmnode.train.gossip.outer.traffic import message_nbytes
from swarmnode.train.gossip.round import ALONE_SHARE

ROWS = 5  # best splits and boundaries that are kept
SURVIVAL_MIN = 0.9  # guess: odds that no stage dies out in a day, below which speed counts for little
REPLICAS_MIN = 2
RANK_PARTS = (4, 8)  # measured: D / 4 and D / 8 (docs/methods.md); D / 2 sends as much as int8
MEMORY_WEIGHTS = (0.0, 0.5, 1.0)  # guess
LARGE = 1e9  # parameters above which subspaces are tried unasked
MICROBATCH_MORE = 4  # guess: at most so many times the manifest's microbatch
BATCHES = (1, 2, 4, 8, 16, 32)  # inner batches, as multiples of Step Law's
ROUND_STEPS = (8, 10, 12, 15, 20, 30, 60, 125, 250, 500)  # inner steps of a round; 500: DiLoCo's, arXiv 2311.08105
PAIR = 2  # the least group of replicas: NoLoCo's, arXiv 2506.10911
SPARING = (5, 0.0)  # gossip.fragments and inner.average_share where memory is short
BATCH_MAX_PARTS = (4, 2)  # of the best settings' largest batch, tried last
FALLING_MAX = 3  # guess: numbers of stages in a row that are no better, where every machine holds every stage
FIELDS = {
    "pipeline": (
        "stages",
        "span_max",
        "memory_weight",
        "boundary",
        "boundary_rank",
        "window_max",
        "validation_every_samples",
    ),
    "inner": ("microbatch", "inner_batch", "inner_batch_max", "average_share"),
    "gossip": ("method", "codec", "group", "butterfly", "delay", "fragments", "round_samples", "uplink_share"),
    "limits": (
        "microbatch_timeout_s",
        "hop_timeout_min_s",
        "in_flight_max",
        "exchange_timeout_s",
        "announce_period_s",
        "record_ttl_s",
    ),
    "recovery": ("snapshot_rounds_max",),
    "checkpoint": ("every_rounds",),
}
TABLE_OF = {key: table for table, keys in FIELDS.items() for key in keys}
SLOTS_MAX = 256  # guess
WAITS = 4.0  # guess: a round trip or an exchange takes at most so many times what it should
HOP_SHARE = 6.0  # guess: a hop's least patience, as a part of a microbatch's
ANNOUNCE_S_PER_REPLICA = 0.3  # .2 Mbit/s a node: a look-up moves 5.5 copies of a stage's records of 270 bytes, measured
VALIDATED_STEPS = 16  # simulated: two of eight members validate instead of training; each 2 to 4 steps takes a quarter
VALIDATIONS_MIN = 24  # guess: points of a run's curve
RECORD_PERIODS = LOST_PERIODS + 1  # announce periods until a record is forgotten; a silent replica is gone before


def group_of(manifest: Manifest, left_out: tuple[str, ...]) -> tuple[object, ...]:
    """The split, the boundary, and the kinds of machine left out: each row that is shown has others."""
    pipeline = manifest.pipeline
    return pipeline.stages, pipeline.boundary, pipeline.boundary_rank, left_out


@dataclass(frozen=True, slots=True)
class Candidate:
    """Settings and their estimate. `nats`: the loss that the boundary costs, measured on a small model. `score`: tokens
    per second, or for one unit of money, times the learning efficiency. `frailty`: 0 with two replicas a stage that
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
        return group_of(self.manifest, self.left_out)


@dataclass(frozen=True, slots=True)
class Search:
    """The result: `rows` are the best of different splits and boundaries, the best one first. `own`: the manifest's
    settings, None if they do not fit (`own_fault` says why). `steps`: the best one of each inner batch. `plain`: the
    best one without a subspace, if the best has one; `subspace`: the best one with one, if any was tried. `by_money`:
    ranked by tokens for money."""

    rows: tuple[Candidate, ...]
    own: Candidate | None
    own_fault: str
    steps: tuple[Candidate, ...]
    plain: Candidate | None
    subspace: Candidate | None
    by_money: bool
    tried: int

    @property
    def best(self) -> Candidate:
        """The recommended settings."""
        return self.rows[0]


def _own(
    manifest: Manifest, fleet: Sequence[MachineKind], tokens: float, *, by_money: bool
) -> tuple[Candidate | None, str]:
    """(the manifest's own settings, None if they do not fit the fleet; why they do not)."""
    try:
        own = _candidate(manifest, manifest, fleet, (), tokens, by_money=by_money)
    except UsageError as error:
        return None, str(error)
    if own.plan.tokens_per_s:
        return own, ""
    bare = next(stage.part.stage for stage in own.plan.stages if not stage.replicas)
    short = tightest(manifest, fleet)
    return None, short[1] if short else f"no machine is left for {stage_name(bare)}"


def search(
    manifest: Manifest,
    fleet: Sequence[MachineKind],
    tokens: float,
    *,
    by_money: bool | None = None,
    ranks: Sequence[int] = (),
    stages: int | None = None,
) -> Search:
    """The best settings of `manifest` for `fleet` and a run of `tokens`. `by_money` None: if the fleet has prices.
    `ranks`: of subspaces to try, beside the manifest's own. `stages`: the only number of them to try.

    Raises UsageError, with bytes, if no setting fits.
    """
    if by_money is None:
        by_money = any(kind.price or kind.egress_price for kind in fleet)
    own, own_fault = _own(manifest, fleet, tokens, by_money=by_money)
    _check_ranks(manifest, ranks)
    candidates = [own] if own and stages in (None, manifest.pipeline.stages) else []
    for used, left_out in _fleets(fleet, by_money=by_money):
        trials = _Trials(manifest, used, left_out, tokens, by_money, ranks, candidates, _Bars(candidates))
        trials.run(stages)
    if not candidates:
        raise UsageError(_nothing(manifest, fleet, stages))
    best = _chosen(candidates)
    plain = [one for one in candidates if one.manifest.pipeline.boundary != "subspace"]
    within = [one for one in candidates if one.manifest.pipeline.boundary == "subspace"]
    within = within or _same_in_subspace(manifest, best, tokens, by_money=by_money)
    rest = [one for one in _groups(candidates) if one.group != best.group]

    def patient(one: Candidate) -> Candidate:
        if one is own:
            return one
        return dataclasses.replace(one, manifest=(made := with_patience(one)), changes=_changes(manifest, made))

    return Search(
        tuple(patient(one) for one in (best, *rest[: ROWS - 1])),
        own,
        own_fault,
        _by_step(candidates),
        patient(_chosen(plain)) if plain and best not in plain else None,
        patient(_chosen(within)) if within else None,
        by_money,
        len({(one.manifest, one.left_out) for one in candidates}),
    )


def limit_of(candidate: Candidate, tokens: float) -> str:
    """The limit that binds, `arithmetic`, `uplink` or `in flight`; also `memory` if with more of it the machines would
    be faster: some idle, compute twice, or serve a stage that needs them less."""
    without = plan(candidate.manifest, candidate.fleet, tokens, memory=False)
    binds = without.tokens_per_s > (1.0 + ALIKE) * candidate.plan.tokens_per_s
    return candidate.plan.limit_kind + (", memory" if binds else "")


def idle_machines(candidate: Candidate) -> int:
    """Machines of the fleet, as used, that serve no stage."""
    return sum(kind.count for kind in candidate.fleet) - candidate.plan.machines


def _chosen(found: Sequence[Candidate]) -> Candidate:
    top = min(found, key=lambda one: one.order)
    near = [one for one in found if one.frailty == top.frailty and one.score >= (1.0 - ALIKE) * top.score]
    return min(near, key=lambda one: (len(one.changes), len(one.left_out), one.order))


def _by_step(found: Sequence[Candidate]) -> tuple[Candidate, ...]:
    """The best of each inner batch, the smallest batch first."""
    batches: dict[int, list[Candidate]] = {}
    for one in found:
        batches.setdefault(one.manifest.inner.inner_batch, []).append(one)
    return tuple(_chosen(batches[batch]) for batch in sorted(batches))


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
    forecast = plan(manifest, fleet, tokens)
    frailty = 2
    if forecast.replicas_min >= REPLICAS_MIN:
        frailty = 0 if forecast.survival >= SURVIVAL_MIN else 1
    score = forecast.efficiency * (forecast.tokens_per_money if by_money else forecast.tokens_per_s)
    changes = _changes(origin, manifest)
    return Candidate(manifest, tuple(fleet), forecast, boundary_nats(manifest), score, frailty, changes, left_out)


def _changes(origin: Manifest, manifest: Manifest) -> tuple[tuple[str, str, str | float], ...]:
    return tuple(
        (table, key, getattr(getattr(manifest, table), key))
        for key, table in TABLE_OF.items()
        if getattr(getattr(manifest, table), key) != getattr(getattr(origin, table), key)
    )


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


class _Packet(NamedTuple):
    codec: str
    fragments: int
    in_pieces: bool


PACKETS = (
    _Packet("int8", 1, False),
    _Packet("int8", 1, True),
    _Packet("lloyd4", 1, True),
    _Packet("lloyd3", 1, True),
    _Packet("whitened", 1, True),
    _Packet("lloyd3", 3, True),
    _Packet("huffman", 3, True),
    _Packet("huffman", 5, True),
    _Packet("huffman", 9, True),
)
"""Gradients as they are averaged, each with fewer bytes than the one before: the best of those measured at their bytes
(docs/learning.md)."""


class _Cut(NamedTuple):
    memory_weight: float
    fragments: int
    average_share: float


class _Boundary(NamedTuple):
    boundary: str
    boundary_rank: int


def _cuts(manifest: Manifest, fleet: Sequence[MachineKind]) -> list[_Cut]:
    """The manifest's own; where some machine cannot hold every stage, also others that cut the layers otherwise, and
    need less memory."""
    pipeline = manifest.pipeline
    gossip = manifest.gossip
    inner = manifest.inner
    own = _Cut(pipeline.memory_weight, gossip.fragments, inner.average_share)
    cuts = {tuple(part.layers for part in stages_of(manifest)): pipeline.memory_weight}
    if not any(fit_of(with_values(manifest, microbatch=1), kind).unable for kind in fleet):
        return [own]
    for weight in MEMORY_WEIGHTS:
        cut = tuple(part.layers for part in stages_of(with_values(manifest, memory_weight=weight)))
        cuts.setdefault(cut, weight)
    return list(dict.fromkeys(_Cut(weight, *rest) for rest in (own[1:], SPARING) for weight in cuts.values()))


def _boundaries(manifest: Manifest, ranks: Sequence[int]) -> list[_Boundary]:
    """Plain ones first; fp32 sends more than bf16 and brings nothing."""
    own = _Boundary(manifest.pipeline.boundary, manifest.pipeline.boundary_rank)
    width = manifest.model.width
    plain = [
        _Boundary("bf16", 0),
        _Boundary("int8", 0),
        _Boundary("int4", 0),
        _Boundary("int4_int2", 0),
        *([own] if own.boundary != "subspace" else []),
    ]
    tried = list(ranks)
    if not tried and parameters_of(manifest.model) > LARGE:
        tried = [width // parts for parts in RANK_PARTS]
    within = [_Boundary("subspace", rank) for rank in tried] + ([own] if own.boundary == "subspace" else [])
    return list(dict.fromkeys([*plain, *within]))


def _microbatches(manifest: Manifest, nodes: int, batch: int) -> list[int]:
    """The manifest's own, then smaller powers of two, then larger ones that keep a microbatch in flight for each of
    `nodes` with inner batches of `batch`."""
    own = manifest.inner.microbatch
    powers = [1 << i for i in range((MICROBATCH_MORE * own).bit_length())]
    flight = batch * max(1, manifest.pipeline.staleness_max) // max(1, nodes)
    smaller = [size for size in reversed(powers) if size < own]
    return [own, *smaller, *(size for size in powers if own < size <= min(MICROBATCH_MORE * own, flight))]


def _batches(manifest: Manifest, tokens: float) -> list[int]:
    """The manifest's own, and powers of two near multiples of Step Law's batch, in samples."""
    law = law_batch(tokens) / manifest.model.context
    return list(dict.fromkeys([manifest.inner.inner_batch, *(1 << max(0, round(math.log2(n * law))) for n in BATCHES)]))


def _rounds(manifest: Manifest) -> list[tuple[int, int]]:
    """(gossip.round_samples, gossip.group): the manifest's own, then pairs, as long and after more of ROUND_STEPS inner
    steps. Pairs after H steps send less and lose less than groups of four after 1.5 H (learning_efficiency.py)."""
    own = manifest.gossip.round_samples
    step = manifest.inner.inner_batch
    least = max(own, step)
    group = manifest.gossip.group
    longer = [samples for steps in ROUND_STEPS if (samples := -(-step * steps // manifest.gossip.fragments)) > least]
    pairs = PAIR if group > PAIR else group
    return list(dict.fromkeys([(least, group), (least, pairs), *((samples, pairs) for samples in longer)]))


def _round_choices(manifest: Manifest) -> Iterator[Manifest]:
    """`manifest` with each of `_rounds`, and where nothing but packets uses its lines also with all of the line that a
    round may have."""
    own = manifest.gossip.uplink_share
    shares = [own] if manifest.pipeline.stages > 1 else sorted({own, max(own, ALONE_SHARE)})
    for (round_samples, group), share in itertools.product(_rounds(manifest), shares):
        yield with_values(manifest, round_samples=round_samples, group=group, uplink_share=share)


def together(manifest: Manifest, codec: str = "int8", fragments: int = 1, *, butterfly: bool = False) -> Manifest:
    """`manifest` with gradients averaged before each step instead of weights after some."""
    batch = manifest.inner.inner_batch
    made = with_values(manifest, method="gradient", codec=codec, group=0, fragments=fragments, butterfly=butterfly)
    return with_values(made, delay=0, round_samples=batch, inner_batch_max=0)


def _averaged(manifest: Manifest, nodes: int) -> Iterator[Manifest]:
    """`manifest` with gradients averaged by each of PACKETS. In pieces, three members or more save bytes."""
    for packet in PACKETS if nodes > 1 else ():
        in_pieces = packet.in_pieces and nodes > 2 * manifest.pipeline.stages
        yield together(manifest, packet.codec, packet.fragments, butterfly=in_pieces)


def with_values(manifest: Manifest, **changed: float | str) -> Manifest:
    """`manifest` with other values of FIELDS, by key."""
    tables = {
        table: dataclasses.replace(getattr(manifest, table), **{key: changed[key] for key in keys if key in changed})
        for table, keys in FIELDS.items()
        if not changed.keys().isdisjoint(keys)
    }
    return dataclasses.replace(manifest, **tables)


def _kept_busy(manifest: Manifest, nodes: int, needed: float, tokens: float) -> Manifest:
    """`manifest` with slots, windows and a largest batch for the `needed` samples in flight, the last at most the
    critical batch; and records as rare as so many `nodes` want them."""
    pipeline = manifest.pipeline
    inner = manifest.inner
    limits = manifest.limits
    replicas = max(1, nodes // pipeline.stages)
    period_s = max(limits.announce_period_s, float(round(ANNOUNCE_S_PER_REPLICA * replicas)))
    ttl_s = max(limits.record_ttl_s, RECORD_PERIODS * period_s)
    made = with_values(manifest, announce_period_s=period_s, record_ttl_s=ttl_s)
    if pipeline.stages == 1:
        return with_values(made, inner_batch_max=0)
    most = min(critical_batch(tokens) / manifest.model.context, needed)
    slots = min(SLOTS_MAX, 1 << math.ceil(math.log2(max(1.0, needed / replicas / inner.microbatch))))
    return with_values(
        made,
        inner_batch_max=int(most) if most > inner.inner_batch else 0,
        in_flight_max=max(limits.in_flight_max, slots),
        window_max=max(pipeline.window_max, slots),
    )


def with_patience(candidate: Candidate) -> Manifest:
    """Its manifest with timeouts for the bytes and samples that are under way, and as many inner steps between two
    checkpoints, and until a snapshot is too old, as without longer rounds."""
    manifest = candidate.manifest
    forecast = candidate.plan
    limits = manifest.limits
    inner = manifest.inner
    recovery = manifest.recovery
    trip_s = max(inner.inner_batch, inner.inner_batch_max) / forecast.samples_per_s
    slowest = min(kind.up for kind in candidate.fleet)
    sent = max(
        message_nbytes(manifest.gossip, trained_count(manifest, stage.part), 0)
        * max(1, (manifest.gossip.group or stage.replicas) - 1)
        for stage in forecast.stages
    )
    patience_s = max(limits.microbatch_timeout_s, float(math.ceil(WAITS * trip_s))) if len(forecast.stages) > 1 else 0.0
    least = 0.0 if averages_gradients(manifest) else 1.0
    rounds = max(least, manifest.gossip.round_samples / inner.inner_batch / STEPS_OF_ROUND)
    made = with_values(
        manifest,
        exchange_timeout_s=max(limits.exchange_timeout_s, float(math.ceil(WAITS * sent / slowest))),
        snapshot_rounds_max=max(1, round(recovery.snapshot_rounds_max / rounds)),
        every_rounds=max(1, round(manifest.checkpoint.every_rounds / rounds)),
        validation_every_samples=_validated_every(manifest, forecast),
    )
    if patience_s <= limits.microbatch_timeout_s:
        return made
    hop_s = max(limits.hop_timeout_min_s, float(math.ceil(patience_s / HOP_SHARE)))
    return with_values(made, microbatch_timeout_s=patience_s, hop_timeout_min_s=hop_s)


def _validated_every(manifest: Manifest, forecast: Plan) -> int:
    """Samples between two validations: a validator misses a step where gradients are averaged before each."""
    own = manifest.pipeline.validation_every_samples
    if not averages_gradients(manifest):
        return own
    of_run = forecast.days * 86400.0 * forecast.samples_per_s
    return max(own, int(min(VALIDATED_STEPS * manifest.inner.inner_batch, of_run / VALIDATIONS_MIN)))


def _allowed(manifest: Manifest) -> bool:
    return all(across.holds(manifest) for across in ACROSS)


class _Bars:
    """The scores below which settings need no estimate: one is shown as the best of its group, if that is among the
    ROWS best ones, or as the best of its inner batch. Of those that are ALIKE the one with fewer changes is shown."""

    def __init__(self, found: Sequence[Candidate]) -> None:
        self._of_group: dict[tuple[object, ...], float] = {}
        self._of_batch: dict[int, float] = {}
        for one in found:
            self.add(one)

    def add(self, one: Candidate) -> None:
        if one.frailty == 0:
            batch = one.manifest.inner.inner_batch
            self._of_group[one.group] = max(one.score, self._of_group.get(one.group, 0.0))
            self._of_batch[batch] = max(one.score, self._of_batch.get(batch, 0.0))

    def below(self, score: float, made: Manifest, left_out: tuple[str, ...]) -> bool:
        """Whether `made`, with this score at most, is not shown. The best subspace is shown in any case."""
        best = sorted(self._of_group.values(), reverse=True)
        last = best[ROWS - 1] if len(best) >= ROWS and made.pipeline.boundary != "subspace" else 0.0
        of_group = self._of_group.get(group_of(made, left_out), 0.0)
        of_batch = self._of_batch.get(made.inner.inner_batch, 0.0)
        return score < (1.0 - ALIKE) * min(max(last, of_group), of_batch)


@dataclass(slots=True)
class _Trials:
    """The search among the settings of `manifest` on one `fleet`. `found` has the candidates of other fleets already;
    settings that cannot be better than those get no estimate."""

    manifest: Manifest
    fleet: tuple[MachineKind, ...]
    left_out: tuple[str, ...]
    tokens: float
    by_money: bool
    ranks: Sequence[int]
    found: list[Candidate]
    bars: _Bars

    @property
    def nodes(self) -> int:
        return sum(kind.count for kind in self.fleet)

    def run(self, only: int | None) -> None:
        """Try all numbers of stages, or `only` that one, until FALLING_MAX in a row are no better; then variants of the
        best settings."""
        falling = 0
        for stages in range(1, min(self.manifest.model.layers, self.nodes) + 1) if only is None else (only,):
            best = min((one.order for one in self.found), default=None)
            before = len(self.found)
            held = self._try_stages(with_values(self.manifest, stages=stages))
            if best is None or not held:
                continue
            falling = 0 if any(one.order < best for one in self.found[before:]) else falling + 1
            if falling > FALLING_MAX:
                break
        if self.found:
            self._try_parts()
            self._try_codecs()
            self._try_spans()

    def _try_stages(self, manifest: Manifest) -> bool:
        """Try each cut and boundary. Returns whether every machine holds every stage of the last settings tried."""
        sated = False  # a plain boundary whose lines are not the limit: a subspace would bring nothing
        asked = bool(self.ranks) or manifest.pipeline.boundary == "subspace"
        last = manifest
        lines = _boundaries(self.manifest, self.ranks)
        if manifest.pipeline.stages == 1:  # nothing is sent between stages
            lines = [line for line in lines if line.boundary == manifest.pipeline.boundary] or lines[:1]
        for cut, line in itertools.product(_cuts(manifest, self.fleet), lines):
            within = line.boundary == "subspace"
            if within and sated and not asked:
                continue
            last = with_values(manifest, **cut._asdict(), **line._asdict())
            limits = self._try_microbatches(last)
            sated |= not within and "arithmetic" in limits
        sizes = _microbatches(self.manifest, self.nodes, max(_batches(self.manifest, self.tokens)))
        largest = with_values(last, microbatch=sizes[-1])
        return not any(fit_of(largest, kind).unable for kind in self.fleet)

    def _try_microbatches(self, manifest: Manifest) -> set[str]:
        """Try each microbatch that may be faster, with each inner batch. Returns the kinds of limits that were met."""
        limits = set[str]()
        last: Candidate | None = None
        batches = _batches(self.manifest, self.tokens)
        for microbatch in _microbatches(self.manifest, self.nodes, max(batches)):
            sized = with_values(manifest, microbatch=microbatch)
            if not _may_gain(sized, last, self.fleet):
                continue
            needed = in_flight_needed(sized, self.fleet)
            for batch in batches:
                start = with_values(sized, inner_batch=batch)
                start = with_values(start, round_samples=_rounds(start)[0][0])
                start = _kept_busy(start, self.nodes, needed, self.tokens)
                self._try_averaged(start)
                for last in self._try_rounds(start):
                    limits.add(last.plan.limit_kind)
        return limits

    def _try_averaged(self, start: Manifest) -> None:
        """Try gradients averaged before each step, with fewer and fewer bytes until they cost more than they bring."""
        for made in _averaged(start, self.nodes):
            if not self._worth_a_look(made):
                return  # the others learn less from a token
            self._keep(self._candidate(made))
            if made.gossip.butterfly and self.found[-1].order > self.found[-2].order:
                return

    def _try_rounds(self, start: Manifest) -> Iterator[Candidate]:
        """Try longer and longer rounds, until lines are no longer the limit."""
        if not self._worth_a_look(start):
            return
        for made in _round_choices(start):
            one = self._candidate(made)
            if not one.plan.tokens_per_s:
                return
            if not _too_often(one):
                self._keep(one)
            yield one
            if not one.plan.lines_bind:
                return

    def _try_parts(self) -> None:
        """Try the best settings with less in flight: lines that are the limit need no more than they carry."""
        for part in BATCH_MAX_PARTS:
            first = _chosen(self.found)
            inner = first.manifest.inner
            if inner.inner_batch_max // part > inner.inner_batch and first.left_out == self.left_out:
                made = with_values(first.manifest, inner_batch_max=inner.inner_batch_max // part)
                self.found.append(self._candidate(made))

    def _try_codecs(self) -> None:
        """Try the best settings with each other codec and length of rounds."""
        chosen = _chosen(self.found)
        planned = [rules.name for rules in codecs().values() if rules.planned]
        if chosen.manifest.gossip.codec not in planned or chosen.left_out != self.left_out:
            return
        gossip = self.manifest.gossip
        own = with_values(chosen.manifest, round_samples=gossip.round_samples, group=gossip.group)
        for codec, (round_samples, group) in itertools.product(planned, _rounds(own)):
            made = with_values(chosen.manifest, codec=codec, round_samples=round_samples, group=group)
            if _allowed(made) and not _too_often(one := self._candidate(made)):
                self.found.append(one)

    def _try_spans(self) -> None:
        """Try the best settings of each split and boundary where machines serve all stages that their memory holds, if
        some machine of the fleet holds several: fewer hops, and more replicas to average."""
        for one in _groups([one for one in self.found if one.left_out == self.left_out]):
            wide = with_values(one.manifest, span_max=one.manifest.pipeline.stages)
            if not any(len(block) > 1 for kind in self.fleet for block in blocks_of(wide, kind)):
                continue
            for made in [wide] if averages_gradients(wide) else _round_choices(wide):
                if _allowed(made):
                    self.found.append(self._candidate(made))

    def _worth_a_look(self, made: Manifest) -> bool:
        """Whether the fleet can run `made`, which may be better than what was found."""
        replicas = max(1, self.nodes // made.pipeline.stages)
        most = _bound(made, self.fleet) * efficiency(made, replicas, self.tokens)
        may_win = self.by_money or not self.bars.below(most, made, self.left_out)
        return _allowed(made) and may_win and tightest(made, self.fleet) is None

    def _candidate(self, made: Manifest) -> Candidate:
        return _candidate(made, self.manifest, self.fleet, self.left_out, self.tokens, by_money=self.by_money)

    def _keep(self, one: Candidate) -> None:
        self.found.append(one)
        self.bars.add(one)


def _too_often(one: Candidate) -> bool:
    """Whether replicas of a single stage would leave rounds out: nothing else keeps them from training faster than
    their lines carry the packets. Longer rounds are the truth then."""
    steps = one.manifest.gossip.round_samples * one.manifest.gossip.fragments / one.manifest.inner.inner_batch
    return len(one.plan.stages) == 1 and one.plan.lines_bind and steps < ROUND_STEPS[-1]


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
    if last.plan.lines_bind:
        return False
    larger = manifest.inner.microbatch > last.manifest.inner.microbatch
    return larger or any(new.repeated != old.repeated for new, old in zip(fits, before, strict=True))


def _bound(manifest: Manifest, fleet: Sequence[MachineKind]) -> float:
    """Tokens per second that all machines together compute, and their lines up carry without any gossip: no placement
    does more. Machines that serve several stages may send nothing."""
    flop = 3.0 * sum(part.cost for part in stages_of(manifest))
    computed = sum(kind.count * kind.flops for kind in fleet) / flop
    if manifest.pipeline.span_max > 1:
        return computed
    traffic = sum(sample_bytes(manifest, range(stage, stage + 1)) for stage in range(manifest.pipeline.stages))
    carried = sum(kind.count * kind.up for kind in fleet) / traffic * manifest.model.context if traffic else math.inf
    return min(computed, carried)


def _check_ranks(manifest: Manifest, ranks: Sequence[int]) -> None:
    """Raises UsageError if the manifest does not go with a subspace of one of `ranks`."""
    for rank in ranks:
        made = with_values(manifest, boundary="subspace", boundary_rank=rank)
        for across in ACROSS:
            if "pipeline.boundary" in across.names and not across.holds(made):
                raise UsageError(f"--rank {rank}: {across.names[0]}: allowed is {across.allowed(made)}")


def _same_in_subspace(manifest: Manifest, best: Candidate, tokens: float, *, by_money: bool) -> list[Candidate]:
    """The best candidate with the subspaces that would be tried, where the search had no reason to try them."""
    candidates = []
    for line in _boundaries(manifest, ()):
        made = with_values(best.manifest, **line._asdict())
        if line.boundary == "subspace" and _allowed(made):
            try:
                one = _candidate(made, manifest, best.fleet, best.left_out, tokens, by_money=by_money)
            except UsageError:
                continue
            candidates += [one] if one.plan.tokens_per_s else []
    return candidates


def _nothing(manifest: Manifest, fleet: Sequence[MachineKind], only: int | None) -> str:
    """The reason that no split fits: the bytes that the least demanding one needs."""
    nodes = sum(kind.count for kind in fleet)
    least: tuple[int, str] | None = None
    for stages in range(1, manifest.model.layers + 1) if only is None else (only,):
        for weight, line in itertools.product(MEMORY_WEIGHTS, _boundaries(manifest, ())):
            one = with_values(manifest, stages=stages, memory_weight=weight, microbatch=1, **line._asdict())
            if not _allowed(one):
                continue
            short = tightest(one, fleet)
            if short is None:
                return (
                    f"no split fits the fleet: with {stages} stages each fits some machine, but the {nodes} machines"
                    " cannot fill them all"
                )
            lacking, text = short
            if least is None or lacking < least[0]:
                least = lacking, f"no split fits the fleet: even with {stages} stages and microbatches of 1 {text}"
    assert least is not None, "a manifest has a split that its rules allow"
    return least[1]
