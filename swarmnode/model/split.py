"""Which layers each stage holds: pure arithmetic on the manifest's model, no tensors.

A stage is a cut of consecutive layers; the first also holds the embedding, the last the final norm and the head. The
slowest stage sets the pace of a pipeline, so the cut minimises the largest cost of a stage.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import numpy.typing as npt

from swarmnode.errors import ManifestError
from swarmnode.manifest import ModelSpec

Shapes = dict[str, tuple[int, ...]]

TABLE = "model.embed_tokens.weight"
WRITERS = ("o_proj.weight", "down_proj.weight")


@dataclass(frozen=True, slots=True)
class Part:
    """What one stage holds. `cost` is forward FLOPs per token; `parameters` counts elements."""

    stage: int
    layers: range
    has_embedding: bool
    has_head: bool
    cost: float
    parameters: int


def layer_flops(model: ModelSpec) -> float:
    """Forward FLOPs per token of one decoder layer: its seven matrices, and causal attention over half the context."""
    head_width = model.width // model.heads
    matrices = 2 * model.width * (model.width + model.kv_heads * head_width) + 3 * model.width * model.ffn
    return 2.0 * matrices + 2.0 * model.context * model.width


def embedding_flops(model: ModelSpec) -> float:
    """Of one token: a row read, and a row added in backward. Counted as one operation an element of each [guess]."""
    return 2.0 * model.width


def head_flops(model: ModelSpec) -> float:
    """Forward FLOPs per token of the output projection."""
    return 2.0 * model.width * model.vocabulary


Floats = npt.NDArray[np.float64]


def _best_cut(costs: Sequence[float], parts: int, add: Callable[[Floats, Floats], Floats]) -> list[range]:
    """Dynamic programme: the cut whose parts' costs, folded by `add(value so far, cost of a part)`, give the least."""
    sums = np.array([0.0, *accumulate(costs)])
    slack = len(costs) - parts  # layers that a prefix of k parts may have more than k
    values, begins = np.zeros(slack + 1), list[npt.NDArray[np.intp]]()
    values[1:] = np.inf  # of no part's prefix but the empty one; values[i] is of the prefix of k + i layers
    later = np.tri(slack + 1, dtype=bool)  # [end, start]: a part is not empty
    for part in range(parts):
        starts, ends = np.arange(part, part + slack + 1), np.arange(part + 1, part + slack + 2)
        folded = add(values[None, :], sums[ends][:, None] - sums[starts][None, :])
        folded = np.where(later, folded, np.inf)
        begins.append(starts[folded.argmin(axis=1)])
        values = folded.min(axis=1)
    cut, end = list[range](), len(costs)
    for part in range(parts - 1, -1, -1):
        start = int(begins[part][end - part - 1])
        cut.append(range(start, end))
        end = start
    return cut[::-1]


def partition(costs: Sequence[float], parts: int) -> list[range]:
    """`parts` consecutive non-empty ranges over `costs` whose largest sum is least; of those the most even ones (least
    sum of squares). O(parts · len(costs)²).

    Raises ValueError when there are fewer costs than parts, or no part.
    """
    if not 1 <= parts <= len(costs):
        raise ValueError(f"{len(costs)} layers cannot be cut into {parts} non-empty parts")
    sums = [0.0, *accumulate(costs)]
    limit = max(sums[cut.stop] - sums[cut.start] for cut in _best_cut(costs, parts, np.maximum))
    return _best_cut(costs, parts, lambda value, cost: np.where(cost <= limit, value + cost * cost, np.inf))


def parameter_shapes(model: ModelSpec, part: Part) -> Shapes:
    """Names (Hugging Face's LlamaForCausalLM) and shapes of a stage's parameters in the order of its flat buffer: the
    matrices, which decay, and then the norms, which do not."""
    key_width = model.kv_heads * (model.width // model.heads)
    matrices: Shapes = {}
    norms: Shapes = {}
    if part.has_embedding:
        matrices[TABLE] = (model.vocabulary, model.width)
    for layer in part.layers:
        prefix = f"model.layers.{layer}."
        matrices[prefix + "self_attn.q_proj.weight"] = (model.width, model.width)
        matrices[prefix + "self_attn.k_proj.weight"] = (key_width, model.width)
        matrices[prefix + "self_attn.v_proj.weight"] = (key_width, model.width)
        matrices[prefix + "self_attn.o_proj.weight"] = (model.width, model.width)
        matrices[prefix + "mlp.gate_proj.weight"] = (model.ffn, model.width)
        matrices[prefix + "mlp.up_proj.weight"] = (model.ffn, model.width)
        matrices[prefix + "mlp.down_proj.weight"] = (model.width, model.ffn)
        norms[prefix + "input_layernorm.weight"] = (model.width,)
        norms[prefix + "post_attention_layernorm.weight"] = (model.width,)
    if part.has_head:
        matrices["lm_head.weight"] = (model.vocabulary, model.width)
        norms["model.norm.weight"] = (model.width,)
    return matrices | norms


def is_writer(name: str) -> bool:
    """Whether the parameter `name` adds to the stream between layers."""
    return name.endswith(WRITERS)


def is_hidden_matrix(name: str, shape: tuple[int, ...]) -> bool:
    """Whether a parameter is a matrix inside a layer: neither the token table, nor the head, nor a norm."""
    return len(shape) == 2 and ".layers." in name


@functools.lru_cache(maxsize=64)
def split(model: ModelSpec, stages: int) -> tuple[Part, ...]:
    """The parts of `stages` stages in order; `split(model, 1)[0]` is the whole model.

    Raises ManifestError when there are more stages than layers (a stage holds at least one).
    """
    if not 1 <= stages <= model.layers:
        raise ManifestError(
            f"pipeline.stages = {stages} cannot cut model.layers = {model.layers}: use 1 to {model.layers} stages"
        )
    costs = [layer_flops(model)] * model.layers
    costs[0] += embedding_flops(model)
    costs[-1] += head_flops(model)
    parts = []
    for stage, layers in enumerate(partition(costs, stages)):
        cost = sum(costs[layer] for layer in layers)
        part = Part(stage, layers, stage == 0, stage == stages - 1, cost, 0)
        count = sum(math.prod(shape) for shape in parameter_shapes(model, part).values())
        parts.append(Part(stage, layers, part.has_embedding, part.has_head, cost, count))
    return tuple(parts)
