"""Formulas for the memory of a graph, on the manifest's model, without tensors. The memory of a whole replica is
memory_budget.py's."""

from __future__ import annotations

from swarmnode.manifest import ModelSpec
from swarmnode.model.adapter import AdapterGraph
from swarmnode.model.architecture import architecture_of
from swarmnode.model.split import StageLayers

# guess: copies of older weights, kept while tapes need them; the demo has two, a large model one at most
COPIES_MAX = 4
TAPES = 4  # guess: microbatches with an outstanding gradient
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
