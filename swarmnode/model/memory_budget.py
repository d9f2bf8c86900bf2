"""The memory that a replica needs on its device and on the host, by formula, without tensors.

Replicas choose by it how much of a microbatch they compute at once; stage choice, moves, `join`, `doctor`, `plan` and
`simulate` choose stages. Tests hold the device's part against the books of a pretend device
(tests/model/test_memory_budget.py): true stages peak within 15 % of it.

A microbatch is cut into passes of some samples: the gradients are sums over samples, so nothing is computed twice. If
even a single sample's graph is too large, a pass keeps only the inputs of its layers and recomputes each layer in the
backward [checkpointing: arXiv 1604.06174], a third more arithmetic.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from swarmnode.base.large_buffer import IN_MEMORY_NBYTES
from swarmnode.model.adapter import (
    adapter_graph,
    frozen_format,
    frozen_nbytes,
    frozen_shapes,
    has_adapters,
    trained_count,
    trained_shapes,
)
from swarmnode.model.architecture import architecture_of
from swarmnode.model.section import ITEMSIZE, StepRule, section_sizes, snapshot_nbytes, state_nbytes, stepped
from swarmnode.model.split import StageLayers, stages_of
from swarmnode.run.gossip_rules import codecs
from swarmnode.run.manifest import Manifest, boundary_codes, boundary_nbytes, boundary_width
from swarmnode.run.manifest.gossip_compat import averages_gradients, rules_of

HALF = 2  # bytes of a bfloat16 or float16 number
SNAPSHOTS = 0.5  # guess: share of its state that a node additionally holds, most of the time none
NEWTON_SCHULZ = 3  # copies of a batch of matrices at once: itself, its normalised copy, the next iterate
SCRATCH_NBYTES = 3 << 26  # of the outer step, on a device
AVERAGED = 1  # the own gradient or the mean, while it is worked on, beside what is gathered (gradient.py)
PACKETS = 4  # guess
SCALED = 256  # moments.py: elements of a block with one scale
PART = 1 << 22  # moments.py: elements quantised at once
QUANTISING = 5  # float32 copies of a part while it is quantised
MUON_BATCH = 1 << 26  # muon.py: elements orthogonalised at once


TAPES = 4  # guess: microbatches with an outstanding gradient
COPIES_MAX = TAPES  # of older weights: each tape may need its own; the demo has two, a large model one at most
FILLED = 1.5  # guess: documents of about even lengths, up to twice as long in a group; at most 2
INDICES = 4 * 8  # of a choice of expert: itself, its order and the way back, int64
PASS_SHARE = 0.4  # guess: of a dedicated device's free memory for the pass in work; kept tapes take a half (hop.py)

CHUNK_NBYTES = {"cpu": 16 << 20}
"""Bytes of logits in a chunk, by type of device [measured on one thread of a CPU, vocabulary 49,152, width 256: 1,024
rows in chunks of 2, 8, 16, 64 MiB and all at once take 10.4, 4.9, 4.2, 5.6 and 8.7 s on a busy machine]."""

CHUNK_NBYTES_ELSEWHERE = 256 << 20
"""The same for an accelerator, where each chunk reads and writes the whole gradient of the head once [guess: at a
vocabulary of 128,256 a thousand rows, whose products take longer than that]."""

TILE_NBYTES = 64 << 20  # guess: of the head's gradient this much is made at a time, if products are narrower than it
SOFTMAX_NBYTES = TILE_NBYTES // 2  # of a chunk's logits so much is float32 at a time, twice: logits and softmax


def chunk_rows(rows: int, vocabulary: int, itemsize: int, kind: str) -> int:
    """Rows in a chunk of logits on a device of type `kind`, of CHUNK_NBYTES at most; `rows` if all fit."""
    nbytes = CHUNK_NBYTES.get(kind, CHUNK_NBYTES_ELSEWHERE)
    return min(rows, max(1, nbytes // (vocabulary * itemsize)))


def head_nbytes(rows: int, vocabulary: int, width: int, *, autocast: bool, kind: str, copied: bool = False) -> int:
    """Memory that the loss of `rows` rows and its gradients take at their peak beside float32 weights and gradients,
    in products of bfloat16 with `autocast`; `copied`: a working copy has the head's matrix."""
    product = HALF if autocast else ITEMSIZE
    here = chunk_rows(rows, vocabulary, product, kind)
    cast = product * vocabulary * width if autocast and not copied else 0
    by_rows = ITEMSIZE * rows * width
    tile = min(TILE_NBYTES, product * vocabulary * width) if autocast else 0
    softmax = min(SOFTMAX_NBYTES, ITEMSIZE * here * vocabulary)
    return cast + by_rows + product * here * (vocabulary + 2 * width) + max(softmax, tile)


@dataclass(frozen=True, slots=True)
class Passes:
    """`samples` of a microbatch at once; `by_layer`: graphs hold only the inputs of layers."""

    samples: int
    by_layer: bool

    def spans(self, first: int, last: int) -> Iterator[tuple[int, int]]:
        """(first, last) of each pass over samples [first, last)."""
        for at in range(first, last, self.samples):
            yield at, min(last, at + self.samples)


def repeated_forwards(passes: Passes, samples: int, *, last: bool) -> int:
    """Forwards that a backward over `samples` does again beside its own work, if memory for tapes lasts: by layer, or,
    but in the `last` stage, which has no forward of its own, in the passes."""
    return int(passes.by_layer or (passes.samples < samples and not last))


def choose_passes(samples: int, budget: int | None, nbytes: Callable[[int, bool], int]) -> Passes:
    """The fewest passes over `samples` whose graph fits into `budget` bytes (None: any does), by `nbytes` (samples, by
    layer); the smallest there are if none does."""
    if budget is None:
        return Passes(samples, False)
    for by_layer in (False, True):
        size = samples
        while True:
            if nbytes(size, by_layer) <= budget:
                return Passes(size, by_layer)
            if size == 1:
                break
            size = -(-size // 2)
    return Passes(1, True)


@dataclass(frozen=True, slots=True)
class GraphMemory:
    """Memory of the graphs of `part` on a device of type `kind`, with weights of `itemsize` bytes. `copied`: a working
    copy serves all graphs, so none has casts of its own (weight_stash.py)."""

    manifest: Manifest
    part: StageLayers
    itemsize: int
    autocast: bool
    kind: str
    copied: bool = False
    _tapes: dict[tuple[int, bool], int] = field(default_factory=dict, compare=False, repr=False)

    @property
    def _cast(self) -> int:
        """Bytes of a number that enters a matrix."""
        return HALF if self.autocast else self.itemsize

    def tape_nbytes(self, samples: int, by_layer: bool, filled: float | None) -> int:
        """`_tape_nbytes`, which is reckoned once for each size of a microbatch of whole windows."""
        if filled is not None:
            return self._tape_nbytes(samples, by_layer, filled)
        nbytes = self._tapes.get((samples, by_layer))
        if nbytes is None:
            nbytes = self._tapes[samples, by_layer] = self._tape_nbytes(samples, by_layer, None)
        return nbytes

    def _tape_nbytes(self, samples: int, by_layer: bool, filled: float | None) -> int:
        """Bytes of the graph of a forward over `samples` (without the head), including the part's output.

        `filled`: rows per token in attention if documents are separated (documents.py); None: whole windows. Within
        8 % of what autograd saves (test_stage), which would take too long to count by hooks.
        """
        tokens = samples * self.manifest.model.context
        output = boundary_width(self.manifest)
        if by_layer:
            return tokens * self.itemsize * (self.manifest.model.width * len(self.part.layers) + output)
        return self._graph_nbytes(tokens, filled, output)

    def pass_nbytes(self, samples: int, by_layer: bool) -> int:
        """Bytes of a forward and backward over `samples` at their peak: the graph, its input, and what a layer's
        backward, the head or the table's gradient takes beside them."""
        model = self.manifest.model
        tokens = samples * self.manifest.model.context
        inner = self._cast
        filled = None if self.manifest.data.document_end is None else FILLED
        graph = self._graph_nbytes(tokens, filled, model.width)
        stream = self.itemsize * tokens * model.width
        layer = 2 * inner * tokens * model.ffn + stream
        layer += (inner + self.itemsize) * model.ffn * model.width  # the gradient of a matrix, before it is added
        head = table = 0
        if self.part.has_head:
            sizes = tokens, model.vocabulary, model.width
            head = head_nbytes(*sizes, autocast=self.autocast, kind=self.kind, copied=self.copied)
        if self.part.has_embedding and not _table_nbytes(self.manifest) and not has_adapters(self.manifest):
            table = self.itemsize * model.vocabulary * model.width  # the gradient of the table, before it is added
        if by_layer:
            graph = graph // max(1, len(self.part.layers)) + stream * (len(self.part.layers) + 1)
        return graph + max(layer, head, table) + stream

    def later_nbytes(self, samples: int) -> int:
        """`pass_nbytes` of a pass that leaves the gradients of matrices for later: what enters their backward is kept
        beside the graph (matrix_gradients.py)."""
        return self.pass_nbytes(samples, False) + samples * self.manifest.model.context * self.left_nbytes

    @property
    def left_nbytes(self) -> int:
        """Bytes for each token of the gradients of all products' outputs, in the layers of this part."""
        model = self.manifest.model
        attention = (model.heads + 2 * model.kv_heads) * model.head_dim + model.width
        dense = 2 * model.ffn + model.width
        return self._cast * (attention + dense) * len(self.part.layers)

    def _graph_nbytes(self, tokens: int, filled: float | None, output: int) -> int:
        """Bytes of a graph whose output has `output` numbers per token."""
        model = self.manifest.model
        part = self.part
        positions = 0 if filled is None else 2 * model.head_dim * self.itemsize  # cosine and sine of each token
        layers = sum(self._layer_nbytes(layer, filled) for layer in part.layers)
        tables = min(part.has_embedding + part.has_head, 1 if model.tied else 2)  # not cast, and not in this graph
        cast = part.parameters - model.vocabulary * model.width * tables
        if (adapters := adapter_graph(self.manifest, part)) is not None:  # only they are trained
            layers += adapters.width * self._cast
            cast = adapters.parameters
        cast_nbytes = HALF * cast if self.autocast and not self.copied else 0
        return tokens * (layers + positions + output * self.itemsize) + cast_nbytes

    def _layer_nbytes(self, layer: int, filled: float | None) -> int:
        """Bytes that autograd saves in `layer` for each token, without casts of weights. See decoder.py."""
        model = self.manifest.model
        itemsize = self.itemsize
        if (own := architecture_of(model)) is not None:
            return own.layer_nbytes(model, layer, itemsize)
        width = model.width
        heads = model.heads * model.head_dim
        keys = model.kv_heads * model.head_dim
        # On a card attention runs in bfloat16 with autocast, and its output needs no further cast.
        fused = self.autocast and self.kind != "cpu"
        stream = 2 * width * itemsize  # both norms' inputs
        inner = HALF if fused else itemsize
        # q, k, v, output; two small rows
        attention = (2 * heads + 2 * keys) * inner + (model.heads + 2) * itemsize
        window = model.window(layer)
        if 0 < window < model.context:
            attention += heads * inner  # outputs of the blocks, which are then joined
        if filled is not None:
            # gathered copies, and the output scattered back
            attention = int(filled * attention) + (0 if self.autocast else heads * itemsize)
        if model.qk_norm != "none":
            attention += (heads + keys + model.heads + model.kv_heads) * itemsize
        # o_proj's input is cast, too
        entering = 2 * width * self._cast + (heads * self._cast if self.autocast and not fused else 0)
        return stream + attention + entering + self._feed_forward_nbytes(layer)

    def _feed_forward_nbytes(self, layer: int) -> int:
        model = self.manifest.model
        cast = self._cast
        if not model.is_sparse(layer):
            return 4 * model.ffn * cast  # gate, its SiLU, up, their product
        routed = model.experts_active * ((2 * model.width + 4 * model.expert_ffn) * cast + self.itemsize + INDICES)
        router = model.experts * self.itemsize + (model.width * self.itemsize if self.autocast else 0)
        shared = (4 * model.shared_expert_ffn + model.width) * cast if model.shared_expert_ffn else 0
        return routed + router + shared


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
    """Bytes that a replica needs. `device` is 0 where the device shares the host's memory. `working`: those of `device`
    that are needed only while a piece of work runs; a machine's stages take turns."""

    device: int
    host: int
    working: int = 0


def need_together(needs: Sequence[MemoryNeed]) -> MemoryNeed:
    """Bytes that one machine needs for several stages."""
    working = max(need.working for need in needs)
    device = sum(need.device - need.working for need in needs) + working
    return MemoryNeed(device, sum(need.host for need in needs), working)


def memory_need(
    manifest: Manifest, part: StageLayers, mode: ComputeMode = CPU, passes: Passes | None = None
) -> MemoryNeed:
    """Bytes that a machine needs to serve `part` with microbatches of `inner.microbatch` samples: its state, and the
    largest of its transients. A device of its own computes them in `passes` (None: at once). Tapes beyond the one in
    work are kept as long as memory allows."""
    mean = ITEMSIZE * trained_count(manifest, part) if manifest.inner.average_share > 0.0 else 0
    tokens = manifest.inner.microbatch * manifest.model.context
    code = boundary_codes(manifest.pipeline.boundary)[0]  # the larger one
    waiting = manifest.limits.in_flight_max * boundary_nbytes(code, tokens, boundary_width(manifest))
    if not mode.separate:
        return MemoryNeed(0, _shared_nbytes(manifest, part, mode) + mean + waiting)
    work = microbatch_nbytes(manifest, part, mode, passes)
    transient = max(work, step_nbytes(manifest, part, mode), mean and mean + work)  # other weights in their place
    host = _host_nbytes(manifest, part, mode) + mean + waiting
    return MemoryNeed(_held_nbytes(manifest, part, mode) + transient, host, transient)


def passes_in(manifest: Manifest, part: StageLayers, mode: ComputeMode, free: int | None) -> Passes:
    """The passes in which a replica computes a microbatch on a device of its own with `free` bytes, as
    app/machine/replica.py chooses them once its state is there. A device that shares the host's memory computes it at
    once, as long as memory does not run out."""
    samples = manifest.inner.microbatch
    if free is None or not mode.separate:
        return Passes(samples, False)
    left = max(0, free - _held_nbytes(manifest, part, mode))
    return choose_passes(samples, int(PASS_SHARE * left), _graph_of(manifest, part, mode).pass_nbytes)


def microbatch_nbytes(manifest: Manifest, part: StageLayers, mode: ComputeMode, passes: Passes | None = None) -> int:
    """Bytes that a microbatch takes on the device at its peak: the largest of its `passes`, and the gradient of the
    whole input."""
    model = manifest.model
    samples = manifest.inner.microbatch
    passes = passes or Passes(samples, False)
    whole = ITEMSIZE * samples * model.context * model.width if passes.samples < samples else 0
    return _graph_of(manifest, part, mode).pass_nbytes(passes.samples, passes.by_layer) + whole


def _graph_of(manifest: Manifest, part: StageLayers, mode: ComputeMode) -> GraphMemory:
    copied = mode.separate and mode.autocast and not has_adapters(manifest)
    return GraphMemory(manifest, part, ITEMSIZE, mode.autocast, CARD_KIND if mode.separate else "cpu", copied)


def _held_nbytes(manifest: Manifest, part: StageLayers, mode: ComputeMode) -> int:
    """Bytes on a device of its own between two pieces of work."""
    return device_state_nbytes(manifest, part, mode) + _frozen_nbytes(manifest, part, mode)


# ---- a device that shares the host's memory


def _shared_nbytes(manifest: Manifest, part: StageLayers, mode: ComputeMode) -> int:
    """State, gradient and older weights, the kept snapshot of the next stage, a microbatch in work, and kept tapes
    (fewer when memory is short: the others are recomputed)."""
    model = manifest.model
    sizes = section_sizes(manifest, part)
    state = state_nbytes(sizes) + int(SNAPSHOTS * snapshot_nbytes(sizes)) + _kept_nbytes(manifest, part)
    state += ITEMSIZE * trained_count(manifest, part) + older_weights_nbytes(manifest, part, mode)
    state += _table_nbytes(manifest) + _frozen_nbytes(manifest, part, mode)
    filled = None if manifest.data.document_end is None else FILLED
    samples = manifest.inner.microbatch
    state += (graph := _graph_of(manifest, part, mode).tape_nbytes(samples, False, filled))
    if not part.has_embedding and not model.experts and architecture_of(model) is None:
        state += samples * model.context * _graph_of(manifest, part, mode).left_nbytes
    if part.has_head:
        return state + head_nbytes(
            samples * model.context, model.vocabulary, model.width, autocast=mode.autocast, kind="cpu"
        )
    return state + min(manifest.limits.tape_bytes_max, TAPES * graph)


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
    """Bytes of the next stage's snapshot, if keep/recovery/neighbour_backup.py keeps all of it."""
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
    first = sizes.get("exp_avg", 0)
    second = sizes.get("exp_avg_sq", 0)
    if optimizer_state == "device":
        return ITEMSIZE * (first + second)
    if optimizer_state == "host":
        return 0
    frozen = _own_table(manifest, part) if _table_nbytes(manifest) else 0
    return int((1 + ITEMSIZE / SCALED) * (first - frozen + second))


def slow_nbytes(manifest: Manifest, part: StageLayers) -> int:
    """Bytes of the slow weights, the outer momentum, a tied table's other part, and the copy of the boundary."""
    sizes = section_sizes(manifest, part)
    fragments = manifest.gossip.fragments
    boundary = -(-trained_count(manifest, part) // fragments) * (1 if fragments == 1 else 2)
    if averages_gradients(manifest):
        boundary = (AVERAGED + manifest.gossip.delay) * trained_count(manifest, part)
    return ITEMSIZE * (sizes["phi"] + sizes.get("momentum", 0) + sizes.get("table", 0) + boundary)


def _own_table(manifest: Manifest, part: StageLayers) -> int:
    """Elements of the token table among the stage's trained weights; it has no working copy."""
    if not part.has_embedding or has_adapters(manifest):
        return 0
    return manifest.model.vocabulary * manifest.model.width


def step_nbytes(manifest: Manifest, part: StageLayers, mode: ComputeMode) -> int:
    """Bytes that an inner step takes on the device at its peak: Muon iterates matrices of one shape together, and
    moments that are not float32 in place are read part by part, of Muon matrix by matrix."""
    batch = 0
    parts = 0
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
    """Bytes on the host of a card: slow weights with momentum and boundary, offloaded moments, the packets of a round.
    States given, kept and fetched lie in files, but one buffer (large_buffer.py)."""
    sizes = section_sizes(manifest, part)
    gossip = manifest.gossip
    nbytes = slow_nbytes(manifest, part) if rules_of(gossip).slow_on_host else 0
    if mode.optimizer_state == "host":
        nbytes += ITEMSIZE * (sizes.get("exp_avg", 0) + sizes.get("exp_avg_sq", 0))
    packets = gossip.group or PACKETS  # of the whole stage only so many are held at once
    coded = codecs()[gossip.codec].nbytes * trained_count(manifest, part) / gossip.fragments
    return nbytes + int(packets * coded) + IN_MEMORY_NBYTES
