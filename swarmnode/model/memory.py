"""What memory a replica takes: formulas on the manifest's model, no tensors."""

from __future__ import annotations

import math

from swarmnode.manifest import Manifest, ModelSpec, boundary_nbytes, boundary_width
from swarmnode.model.section import ITEMSIZE, section_sizes, snapshot_nbytes, state_nbytes
from swarmnode.model.split import Part, split

SNAPSHOTS = 0.5  # guess: of its state that a node holds besides, most of the time none
COPIES_MAX = 4  # guess: of older weights, kept while tapes need them; the demo has two, a large model one at most
TAPES = 4  # guess: microbatches whose gradient is awaited at a time
LOGITS = 3  # the last stage's, their logarithms of softmax, and their gradient, all float32


def graph_nbytes(model: ModelSpec, part: Part, tokens: int, output: int, itemsize: int, autocast: bool) -> int:
    """An estimate of the memory that the graph of a forward over `tokens` tokens holds (without the head), the part's
    output of `output` numbers a token included; weights have `itemsize` bytes. Within 8 % of what autograd saves
    (test_stage), which hooks would take too long to count."""
    width, key_width = model.width, model.kv_heads * (model.width // model.heads)
    cast = 2 if autocast else itemsize  # of what enters a matrix
    stream = 2 * width * itemsize  # both norms' inputs
    attention = (2 * width + 2 * key_width + model.heads + 2) * itemsize  # q, k, v, output; two small rows
    entering = (3 if autocast else 2) * width * cast  # of attention and feed-forward; o_proj's is cast, too
    feed_forward = 4 * model.ffn * cast
    layers = len(part.layers) * (stream + attention + entering + feed_forward)
    return tokens * (layers + output * itemsize) + (2 * part.parameters if autocast else 0)  # and the cast weights


def replica_nbytes(manifest: Manifest, part: Part) -> int:
    """What a node needs to serve `part` in float32: state, gradient and older weights, the snapshot that it keeps of
    the next stage, a microbatch in work, those that wait, and the tapes it keeps (fewer when memory is short: what is
    not kept is computed twice)."""
    model, width = manifest.model, boundary_width(manifest)
    steps = math.ceil(TAPES * manifest.inner.microbatch / manifest.inner.inner_batch)  # while a gradient is awaited
    copies = 0 if part.has_head else min(COPIES_MAX, steps)
    sizes = section_sizes(manifest, part)
    state = state_nbytes(sizes) + SNAPSHOTS * snapshot_nbytes(sizes) + (1 + copies) * ITEMSIZE * part.parameters
    if manifest.inner.average_share > 0.0:
        state += ITEMSIZE * part.parameters
    if manifest.pipeline.boundary == "subspace":
        state += ITEMSIZE * model.vocabulary * model.width  # every stage holds the table
    tokens = manifest.inner.microbatch * model.context
    state += _kept_nbytes(manifest, part)
    state += manifest.limits.in_flight_max * boundary_nbytes(manifest.pipeline.boundary, tokens, width)
    graph = graph_nbytes(model, part, tokens, width, ITEMSIZE, autocast=False)
    if part.has_head:
        return int(state) + graph + LOGITS * ITEMSIZE * tokens * model.vocabulary
    return int(state) + graph + min(manifest.limits.tape_bytes_max, TAPES * graph)


def _kept_nbytes(manifest: Manifest, part: Part) -> int:
    """Of the next stage's snapshot, where recovery/keeper.py keeps all of it."""
    stages = manifest.pipeline.stages
    if stages == 1:
        return 0
    nbytes = snapshot_nbytes(section_sizes(manifest, split(manifest.model, stages)[(part.stage + 1) % stages]))
    return nbytes if manifest.recovery.keepers and nbytes <= manifest.recovery.snapshot_bytes_max else 0
