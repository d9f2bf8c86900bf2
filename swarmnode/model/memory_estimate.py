"""Formulas for the memory of a stage's graphs, without tensors: of a tape, of the chunks in which the head's loss is
computed (backprop.py), and at the peak of a pass. The memory of a whole replica is memory_budget.py's.

A microbatch is cut into passes of some samples: the gradients are sums over samples, so nothing is computed twice. If
even a single sample's graph is too large, a pass keeps only the inputs of its layers and recomputes each layer in the
backward [checkpointing: arXiv 1604.06174], a third more arithmetic.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from swarmnode.manifest import Manifest, ModelSpec, boundary_width
from swarmnode.model.adapter import AdapterGraph, adapter_graph
from swarmnode.model.architecture import architecture_of
from swarmnode.model.split import StageLayers

HALF = 2  # bytes of a bfloat16 or float16 number


@dataclass(frozen=True, slots=True)
class GraphMemory:
    """Memory of `part` on a device of type `kind`, with weights of `itemsize` bytes."""

    manifest: Manifest
    part: StageLayers
    itemsize: int
    autocast: bool
    kind: str

    def tape_nbytes(self, samples: int, by_layer: bool, filled: float | None) -> int:
        """Bytes of the graph of a forward over `samples`. `filled`: as in `graph_nbytes`."""
        model, count = self.manifest.model, samples * self.manifest.model.context
        width = boundary_width(self.manifest)
        if by_layer:
            return count * self.itemsize * (model.width * len(self.part.layers) + width)
        sizes = model, self.part, count, width, self.itemsize, self.autocast, filled
        adapters = adapter_graph(self.manifest, self.part)
        return graph_nbytes(*sizes, fused=self.kind != "cpu", adapters=adapters)

    def pass_nbytes(self, samples: int, by_layer: bool) -> int:
        """Bytes of a forward and backward over `samples` at their peak: the graph, and what a layer's backward or the
        head holds beside it. By layer, the graph of the layer in work is made only then."""
        model, count = self.manifest.model, samples * self.manifest.model.context
        held = HALF if self.autocast else self.itemsize
        filled = None if self.manifest.data.document_end is None else FILLED
        layer = 3 * held * count * model.ffn + 2 * self.itemsize * count * model.width
        layer += (held + self.itemsize) * model.ffn * model.width  # the gradient of a matrix, before it is added
        if by_layer:
            layer += self.tape_nbytes(samples, False, filled) // max(1, len(self.part.layers))
        head = 0
        if self.part.has_head:
            head = head_nbytes(count, model.vocabulary, model.width, autocast=self.autocast, kind=self.kind)
        return self.tape_nbytes(samples, by_layer, filled) + max(layer, head)


CHUNK_NBYTES = {"cpu": 16 << 20}
"""Bytes of logits in a chunk, by type of device [measured on one thread of a CPU, vocabulary 49,152, width 256: 1,024
rows in chunks of 2, 8, 16, 64 MiB and all at once take 10.4, 4.9, 4.2, 5.6 and 8.7 s on a busy machine]."""

CHUNK_NBYTES_ELSEWHERE = 256 << 20
"""The same for an accelerator, where each chunk reads and writes the whole gradient of the head once [guess: at a
vocabulary of 128,256 a thousand rows, whose products take longer than that]."""

TILE_NBYTES = 64 << 20  # guess: of the head's gradient this much is made at a time, if products are narrower than it
SOFTMAX_NBYTES = TILE_NBYTES // 2  # of a chunk's logits so much is float32 at a time, twice: logits and softmax
EXACT = 4  # bytes of float32


def chunk_rows(rows: int, vocabulary: int, itemsize: int, kind: str) -> int:
    """Rows in a chunk of logits on a device of type `kind`, of CHUNK_NBYTES at most; `rows` if all fit."""
    nbytes = CHUNK_NBYTES.get(kind, CHUNK_NBYTES_ELSEWHERE)
    return min(rows, max(1, nbytes // (vocabulary * itemsize)))


def head_nbytes(rows: int, vocabulary: int, width: int, *, autocast: bool, kind: str) -> int:
    """Memory that the loss of `rows` rows and its gradients take at their peak beside float32 weights and gradients,
    in products of bfloat16 with `autocast`."""
    product = 2 if autocast else EXACT
    here = chunk_rows(rows, vocabulary, product, kind)
    cast = product * vocabulary * width if autocast else 0
    by_rows = EXACT * rows * width
    tile = min(TILE_NBYTES, product * vocabulary * width) if autocast else 0
    softmax = min(SOFTMAX_NBYTES, EXACT * here * vocabulary)
    return cast + by_rows + product * here * (vocabulary + 2 * width) + max(softmax, tile)


PASS_SHARE = 0.4  # guess: of a dedicated device's free memory for the pass in work; kept tapes take a half (hop.py)


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


TAPES = 4  # guess: microbatches with an outstanding gradient
COPIES_MAX = TAPES  # of older weights: each tape may need its own; the demo has two, a large model one at most
FILLED = 1.5  # guess: documents of about even lengths, up to twice as long in a group; at most 2
INDICES = 4 * 8  # of a choice of expert: itself, its order and the way back, int64


def graph_nbytes(
    model: ModelSpec,
    part: StageLayers,
    tokens: int,
    output: int,
    itemsize: int,
    autocast: bool,
    filled: float | None = None,
    *,
    fused: bool = False,
    adapters: AdapterGraph | None = None,
) -> int:
    """Estimated memory of the graph of a forward over `tokens` tokens (without the head), including the part's output
    of `output` numbers per token; weights have `itemsize` bytes.

    `filled`: rows per token in attention if documents are separated (documents.py); None: whole windows. `fused`:
    attention runs in bfloat16 with autocast, as on a card, and its output needs no further cast. `adapters`: the
    change by them, if only they are trained. Within 8 % of what autograd saves (test_stage), which would take too long
    to count by hooks.
    """
    positions = 0 if filled is None else 2 * model.head_dim * itemsize  # cosine and sine of each token
    layers = sum(_layer_nbytes(model, layer, itemsize, autocast, filled, fused and autocast) for layer in part.layers)
    tables = min(part.has_embedding + part.has_head, 1 if model.tied else 2)
    ends = model.vocabulary * model.width * tables  # not cast, and not in this graph
    cast_weights = 2 * (part.parameters - ends) if autocast else 0
    if adapters is not None:
        layers += adapters.width * (2 if autocast else itemsize)
        cast_weights = 2 * adapters.parameters if autocast else 0
    return tokens * (layers + positions + output * itemsize) + cast_weights


def _layer_nbytes(
    model: ModelSpec, layer: int, itemsize: int, autocast: bool, filled: float | None, fused: bool
) -> int:
    """Bytes that autograd saves in `layer` for each token, without casts of weights. See decoder.py."""
    if (own := architecture_of(model)) is not None:
        return own.layer_nbytes(model, layer, itemsize)
    width, heads, keys = model.width, model.heads * model.head_dim, model.kv_heads * model.head_dim
    cast = 2 if autocast else itemsize  # of what enters a matrix
    stream = 2 * width * itemsize  # both norms' inputs
    inner = 2 if fused else itemsize
    # q, k, v, output; two small rows
    attention = (2 * heads + 2 * keys) * inner + (model.heads + 2) * itemsize
    window = model.window(layer)
    if 0 < window < model.context:
        attention += heads * inner  # outputs of the blocks, which are then joined
    if filled is not None:
        # gathered copies, and the output scattered back
        attention = int(filled * attention) + (0 if autocast else heads * itemsize)
    if model.qk_norm != "none":
        attention += (heads + keys + model.heads + model.kv_heads) * itemsize
    entering = 2 * width * cast + (heads * cast if autocast and not fused else 0)  # o_proj's is cast, too
    return stream + attention + entering + _feed_forward_nbytes(model, layer, itemsize, autocast)


def _feed_forward_nbytes(model: ModelSpec, layer: int, itemsize: int, autocast: bool) -> int:
    cast = 2 if autocast else itemsize
    if not model.is_sparse(layer):
        return 4 * model.ffn * cast  # gate, its SiLU, up, their product
    routed = model.experts_active * ((2 * model.width + 4 * model.expert_ffn) * cast + itemsize + INDICES)
    router = model.experts * itemsize + (model.width * itemsize if autocast else 0)
    shared = (4 * model.shared_expert_ffn + model.width) * cast if model.shared_expert_ffn else 0
    return routed + router + shared
