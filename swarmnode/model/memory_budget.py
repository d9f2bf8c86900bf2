"""The memory that a replica needs on its device and on the host, by formula, without tensors.

Stage choice, moves, `join`, `doctor`, `plan` and `simulate` use this one formula. Tests hold the device's part against
the books of a pretend device (tests/model/test_memory_budget.py): true stages peak within 15 % of it.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass

from swarmnode.gossip_rules import codecs
from swarmnode.manifest import Manifest, boundary_nbytes, boundary_width
from swarmnode.manifest.gossip_compat import averages_gradients, rules_of
from swarmnode.model.adapter import (
    adapter_graph,
    frozen_format,
    frozen_nbytes,
    frozen_shapes,
    has_adapters,
    trained_count,
    trained_shapes,
)
from swarmnode.model.memory_estimate import (
    COPIES_MAX,
    FILLED,
    PASS_SHARE,
    TAPES,
    GraphMemory,
    Passes,
    choose_passes,
    graph_nbytes,
    head_nbytes,
)
from swarmnode.model.section import ITEMSIZE, StepRule, section_sizes, snapshot_nbytes, state_nbytes, stepped
from swarmnode.model.split import StageLayers, stages_of

SNAPSHOTS = 0.5  # guess: share of its state that a node additionally holds, most of the time none
HALF = 2  # bytes of a bfloat16 number
NEWTON_SCHULZ = 3  # copies of a batch of matrices at once: itself, its normalised copy, the next iterate
SCRATCH_NBYTES = 3 << 26  # of the outer step, on a device
HOST_SCRATCH_NBYTES = 1 << 28  # guess: of parts of states, packets under way, chunks
AVERAGED = 4  # the own gradient, another's, their mean and what is gathered (swarmnode_methods/gradient.py)
PACKETS = 4  # guess
SCALED = 256  # moments.py: elements of a block with one scale
PART = 1 << 22  # moments.py: elements quantised at once
QUANTISING = 5  # float32 copies of a part while it is quantised
MUON_BATCH = 1 << 26  # muon.py: elements orthogonalised at once


@dataclass(frozen=True, slots=True)
class ComputeMode:
    """The way a machine computes. `separate`: its device has memory of its own, as a card has. `autocast`: matrices are
    multiplied in bfloat16, and attention on a separate device is fused. `optimizer_state`: as `--optimizer-state`
    (model/moments.py)."""

    separate: bool = False
    autocast: bool = False
    optimizer_state: str = "device"


CPU = ComputeMode()
CARD = ComputeMode(separate=True, autocast=True, optimizer_state="8bit")
CARD_KIND = "cuda"
SHARED = ("cpu", "mps")  # devices that compute in the host's memory


def mode_of(device: str, *, autocast: bool = False, optimizer_state: str = "device") -> ComputeMode:
    """The mode of a device by its name, as in `--device`."""
    return ComputeMode(device.partition(":")[0] not in SHARED, autocast, optimizer_state)


@dataclass(frozen=True, slots=True)
class MemoryNeed:
    """Bytes that a replica needs. `device` is 0 where the device shares the host's memory."""

    device: int
    host: int


def memory_need(
    manifest: Manifest, part: StageLayers, mode: ComputeMode = CPU, passes: Passes | None = None
) -> MemoryNeed:
    """Bytes that a machine needs to serve `part` with microbatches of `inner.microbatch` samples: its state, and the
    largest of its transients. A device of its own computes them in `passes` (None: at once). Tapes beyond the one in
    work are kept as long as memory allows."""
    if not mode.separate:
        return MemoryNeed(0, _shared_nbytes(manifest, part, mode))
    work = microbatch_nbytes(manifest, part, mode, passes)
    transient = max(work, step_nbytes(manifest, part, mode))
    if manifest.inner.average_share > 0.0:
        transient = max(transient, ITEMSIZE * trained_count(manifest, part) + work)  # other weights in their place
    return MemoryNeed(_held_nbytes(manifest, part, mode) + transient, _host_nbytes(manifest, part, mode))


def passes_in(manifest: Manifest, part: StageLayers, mode: ComputeMode, free: int | None) -> Passes:
    """The passes in which a replica computes a microbatch on a device of its own with `free` bytes, as
    machine/replica.py chooses them once its state is there. A device that shares the host's memory computes it at
    once, as long as memory does not run out."""
    samples = manifest.inner.microbatch
    if free is None or not mode.separate:
        return Passes(samples, False)
    left = max(0, free - _held_nbytes(manifest, part, mode))
    graph = GraphMemory(manifest, part, ITEMSIZE, mode.autocast, CARD_KIND)
    return choose_passes(samples, int(PASS_SHARE * left), graph.pass_nbytes)


def _held_nbytes(manifest: Manifest, part: StageLayers, mode: ComputeMode) -> int:
    """Bytes on a device of its own between two pieces of work."""
    return device_state_nbytes(manifest, part, mode) + _frozen_nbytes(manifest, part, mode)


# ---- a device that shares the host's memory


def _shared_nbytes(manifest: Manifest, part: StageLayers, mode: ComputeMode) -> int:
    """State, gradient and older weights, the kept snapshot of the next stage, a
    microbatch in work, waiting ones, and kept tapes (fewer when memory is short: the others are recomputed)."""
    model, width = manifest.model, boundary_width(manifest)
    sizes = section_sizes(manifest, part)
    state = state_nbytes(sizes) + SNAPSHOTS * snapshot_nbytes(sizes)
    state += ITEMSIZE * trained_count(manifest, part)
    state += older_weights_nbytes(manifest, part, mode)
    if manifest.inner.average_share > 0.0:
        state += ITEMSIZE * trained_count(manifest, part)
    state += _table_nbytes(manifest) + _frozen_nbytes(manifest, part, mode)
    tokens = manifest.inner.microbatch * model.context
    state += _kept_nbytes(manifest, part)
    state += manifest.limits.in_flight_max * boundary_nbytes(manifest.pipeline.boundary, tokens, width)
    graph = graph_nbytes(
        model, part, tokens, width, ITEMSIZE, mode.autocast, _filled(manifest), adapters=adapter_graph(manifest, part)
    )
    if part.has_head:
        return (
            int(state) + graph + head_nbytes(tokens, model.vocabulary, model.width, autocast=mode.autocast, kind="cpu")
        )
    return int(state) + graph + min(manifest.limits.tape_bytes_max, TAPES * graph)


def older_weights_nbytes(manifest: Manifest, part: StageLayers, mode: ComputeMode) -> int:
    """Bytes of the weights of other steps that tapes with an outstanding gradient need: a copy a step. With prediction,
    which only float32 has, also those one step on, and the last step (model/weight_stash.py)."""
    if part.has_head:
        return 0
    copies = math.ceil(TAPES * manifest.inner.microbatch / manifest.inner.inner_batch)
    if mode.autocast:
        return min(COPIES_MAX, copies) * HALF * (trained_count(manifest, part) - _own_table(manifest, part))
    copies = min(COPIES_MAX, 2 * copies) + 1 if manifest.pipeline.predicts_weights else min(COPIES_MAX, copies)
    return copies * ITEMSIZE * trained_count(manifest, part)


def _kept_nbytes(manifest: Manifest, part: StageLayers) -> int:
    """Bytes of the next stage's snapshot, if recovery/neighbour_backup.py keeps all of it."""
    stages = manifest.pipeline.stages
    if stages == 1:
        return 0
    nbytes = snapshot_nbytes(section_sizes(manifest, stages_of(manifest)[(part.stage + 1) % stages]))
    return nbytes if manifest.recovery.keepers and nbytes <= manifest.recovery.snapshot_bytes_max else 0


def _table_nbytes(manifest: Manifest) -> int:
    """With a subspace boundary every stage holds the token table."""
    if manifest.pipeline.boundary != "subspace":
        return 0
    return ITEMSIZE * manifest.model.vocabulary * manifest.model.width


def _frozen_nbytes(manifest: Manifest, part: StageLayers, mode: ComputeMode) -> int:
    """Bytes of the weights beside adapters, and of the largest of them while it is restored for a product."""
    dense = 0
    for name, shape in frozen_shapes(manifest, part).items():
        if frozen_format(manifest, name, shape) != ("bf16" if mode.autocast else "fp32"):
            dense = max(dense, math.prod(shape))
    return frozen_nbytes(manifest, part) + (HALF if mode.autocast else ITEMSIZE) * dense


def _filled(manifest: Manifest) -> float | None:
    return None if manifest.data.document_end is None else FILLED


# ---- a device of its own


def device_state_nbytes(manifest: Manifest, part: StageLayers, mode: ComputeMode) -> int:
    """Bytes on the device between two pieces of work: trained weights, gradient, moments, the working copy, and the
    older ones that tapes need; slow weights only if the run's method keeps them there."""
    count = trained_count(manifest, part)
    state = 2 * ITEMSIZE * count + moments_nbytes(manifest, part, mode.optimizer_state) + _table_nbytes(manifest)
    state += HALF * (count - _own_table(manifest, part)) if mode.autocast else 0
    state += older_weights_nbytes(manifest, part, mode)
    if not rules_of(manifest.gossip).slow_on_host:
        state += slow_nbytes(manifest, part) + SCRATCH_NBYTES
    return state


def moments_nbytes(manifest: Manifest, part: StageLayers, optimizer_state: str) -> int:
    """Bytes of the optimizer's moments on the device."""
    sizes = section_sizes(manifest, part)
    first, second = sizes.get("exp_avg", 0), sizes.get("exp_avg_sq", 0)
    if optimizer_state == "device":
        return ITEMSIZE * (first + second)
    if optimizer_state == "host":
        return 0
    frozen = _own_table(manifest, part) if _table_nbytes(manifest) else 0
    return int((1 + ITEMSIZE / SCALED) * (first - frozen + second))


def slow_nbytes(manifest: Manifest, part: StageLayers) -> int:
    """Bytes of the slow weights, the outer momentum, a tied table's other part, and the copy of the boundary."""
    sizes, fragments = section_sizes(manifest, part), manifest.gossip.fragments
    boundary = -(-trained_count(manifest, part) // fragments) * (1 if fragments == 1 else 2)
    if averages_gradients(manifest):
        boundary = AVERAGED * trained_count(manifest, part)
    return ITEMSIZE * (sizes["phi"] + sizes.get("momentum", 0) + sizes.get("table", 0) + boundary)


def _own_table(manifest: Manifest, part: StageLayers) -> int:
    """Elements of the token table among the stage's trained weights; it has no working copy."""
    if not part.has_embedding or has_adapters(manifest):
        return 0
    return manifest.model.vocabulary * manifest.model.width


def microbatch_nbytes(manifest: Manifest, part: StageLayers, mode: ComputeMode, passes: Passes | None = None) -> int:
    """Bytes that a microbatch takes on the device at its peak: its graph, or the head's logits, and what a backward
    holds beside the graph. In `passes` the largest of them, and the gradient of the whole input."""
    model, samples = manifest.model, manifest.inner.microbatch
    passes = passes or Passes(samples, False)
    tokens = passes.samples * model.context
    graph = graph_nbytes(
        model,
        part,
        tokens,
        model.width,
        ITEMSIZE,
        mode.autocast,
        _filled(manifest),
        fused=mode.separate,
        adapters=adapter_graph(manifest, part),
    )
    stream = ITEMSIZE * tokens * model.width
    held, copied = HALF if mode.autocast else ITEMSIZE, not has_adapters(manifest)
    layer = 2 * held * tokens * model.ffn + stream + (held + ITEMSIZE) * model.ffn * model.width
    head = 0
    if part.has_head:
        head = head_nbytes(tokens, model.vocabulary, model.width, autocast=mode.autocast, kind=CARD_KIND)
        head -= HALF * model.vocabulary * model.width if mode.autocast and copied else 0  # the working copy has it
    table = 0
    if part.has_embedding and not _table_nbytes(manifest) and not has_adapters(manifest):
        table = ITEMSIZE * model.vocabulary * model.width  # the gradient of the table, before it is added
    if mode.autocast and copied:
        graph -= _cast_nbytes(manifest, part)  # the working copy serves all graphs
    if passes.by_layer:
        graph = graph // max(1, len(part.layers)) + stream * (len(part.layers) + 1)
    whole = ITEMSIZE * samples * model.context * model.width if passes.samples < samples else 0
    return graph + max(layer, head, table) + stream + whole


def _cast_nbytes(manifest: Manifest, part: StageLayers) -> int:
    """Bytes of a graph's own casts of the weights, as graph_nbytes counts them."""
    ends = manifest.model.vocabulary * manifest.model.width * (part.has_embedding + part.has_head)
    return HALF * (part.parameters - ends)


def step_nbytes(manifest: Manifest, part: StageLayers, mode: ComputeMode) -> int:
    """Bytes that an inner step takes on the device at its peak: Muon iterates matrices of one shape together, and
    moments that are not float32 in place are read part by part, of Muon matrix by matrix."""
    batch, parts = 0, 0
    itemsize = HALF if mode.autocast else ITEMSIZE
    whole = mode.optimizer_state == "device"
    shapes: Counter[tuple[int, ...]] = Counter()
    for name, shape in trained_shapes(manifest, part).items():
        if stepped(manifest, name, shape) is StepRule.MUON:
            shapes[tuple(sorted(shape[-2:]))] += math.prod(shape[:-2])
    for shape, count in shapes.items():
        size = math.prod(shape)
        together = size * min(count, max(1, MUON_BATCH // size))
        batch = max(batch, NEWTON_SCHULZ * itemsize * together + ITEMSIZE * size)
        parts = max(parts, 0 if whole else QUANTISING * ITEMSIZE * min(size, PART) + ITEMSIZE * size)
    return batch + parts


def _host_nbytes(manifest: Manifest, part: StageLayers, mode: ComputeMode) -> int:
    """Bytes on the host of a card: slow weights with momentum and boundary, offloaded moments, the running mean, the
    packets of a round, waiting microbatches. States given, kept and fetched lie in files (large_buffer.py)."""
    sizes, gossip = section_sizes(manifest, part), manifest.gossip
    tokens = manifest.inner.microbatch * manifest.model.context
    width = boundary_width(manifest)
    nbytes = manifest.limits.in_flight_max * boundary_nbytes(manifest.pipeline.boundary, tokens, width)
    if rules_of(gossip).slow_on_host:
        nbytes += slow_nbytes(manifest, part)
    if mode.optimizer_state == "host":
        nbytes += ITEMSIZE * (sizes.get("exp_avg", 0) + sizes.get("exp_avg_sq", 0))
    if manifest.inner.average_share > 0.0:
        nbytes += ITEMSIZE * trained_count(manifest, part)
    packets = gossip.group or PACKETS  # of the whole stage only so many are held at once
    coded = codecs()[gossip.codec].nbytes * trained_count(manifest, part) / gossip.fragments
    return nbytes + int(packets * coded) + HOST_SCRATCH_NBYTES
