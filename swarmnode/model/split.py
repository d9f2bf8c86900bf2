"""Division of the model into stages: pure arithmetic on the manifest's model, no tensors.

A stage is a range of consecutive layers; the first also holds the embedding, the last the final norm and the head. The
slowest stage sets the pace of a pipeline, so the division minimises the largest cost of a stage. That is its
arithmetic; with `pipeline.memory_weight` also its parameters, which decide the machines that can hold it.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from swarmnode.base.errors import ManifestError
from swarmnode.base.ids import seeded
from swarmnode.model.architecture import Shapes, architecture_of
from swarmnode.run.manifest import Manifest, ModelSpec

TABLE = "model.embed_tokens.weight"
HEAD = "lm_head.weight"
WRITERS = ("o_proj.weight", "down_proj.weight")


@dataclass(frozen=True, slots=True)
class StageLayers:
    """The content of one stage. `cost` is forward FLOPs per token; `parameters` counts elements."""

    stage: int
    layers: range
    has_embedding: bool
    has_head: bool
    cost: float
    parameters: int


def layer_flops(model: ModelSpec, layer: int) -> float:
    """Forward FLOPs per token of `layer`: its matrices, of experts only the active ones, and causal attention over half
    the context, or over the tokens that a sliding window shows."""
    if (own := architecture_of(model)) is not None:
        return own.layer_flops(model, layer)
    matrices = 0.0
    for name, shape in layer_shapes(model, layer).items():
        if len(shape) > 1:
            used = model.experts_active / model.experts if ".experts." in name else 1.0
            matrices += used * math.prod(shape)
    window = model.window(layer)
    seen = model.context / 2
    if 0 < window < model.context:
        seen = window * (1.0 - window / (2.0 * model.context))
    return 2.0 * matrices + 4.0 * seen * model.heads * model.head_dim


def embedding_flops(model: ModelSpec) -> float:
    """FLOPs of one token: a row read, and a row added in backward. Counted as one operation per element of each
    [guess]."""
    return 2.0 * model.width


def head_flops(model: ModelSpec) -> float:
    """Forward FLOPs per token of the output projection."""
    return 2.0 * model.width * model.vocabulary


Floats = npt.NDArray[np.float64]


def _best_cut(costs: Sequence[float], parts: int, add: Callable[[Floats, Floats], Floats]) -> list[range]:
    """Dynamic programme: the division whose parts' costs, folded by `add(value so far, cost of a part)`, give the
    least."""
    sums = np.array([0.0, *accumulate(costs)])
    slack = len(costs) - parts  # layers that a prefix of k parts may have beyond k
    values = np.zeros(slack + 1)
    begins = list[npt.NDArray[np.intp]]()
    values[1:] = np.inf  # of no part's prefix but the empty one; values[i] is of the prefix of k + i layers
    later = np.tri(slack + 1, dtype=bool)  # [end, start]: a part is not empty
    for part in range(parts):
        starts = np.arange(part, part + slack + 1)
        ends = np.arange(part + 1, part + slack + 2)
        folded = add(values[None, :], sums[ends][:, None] - sums[starts][None, :])
        folded = np.where(later, folded, np.inf)
        begins.append(starts[folded.argmin(axis=1)])
        values = folded.min(axis=1)
    cut = list[range]()
    end = len(costs)
    for part in range(parts - 1, -1, -1):
        start = int(begins[part][end - part - 1])
        cut.append(range(start, end))
        end = start
    return cut[::-1]


def partition(costs: Sequence[float], parts: int) -> list[range]:
    """`parts` consecutive non-empty ranges over `costs` whose largest sum is least; of those the most even ones (least
    sum of squares). O(parts · len(costs)²).

    Raises ValueError if there are fewer costs than parts, or no part.
    """
    if not 1 <= parts <= len(costs):
        raise ValueError(f"{len(costs)} layers cannot be cut into {parts} non-empty parts")
    sums = [0.0, *accumulate(costs)]
    limit = max(sums[cut.stop] - sums[cut.start] for cut in _best_cut(costs, parts, np.maximum))
    return _best_cut(costs, parts, lambda value, cost: np.where(cost <= limit, value + cost * cost, np.inf))


def layer_shapes(model: ModelSpec, layer: int) -> Shapes:
    """Shapes of the parameters of `layer` by their names in it."""
    if (own := architecture_of(model)) is not None:
        return _checked(own.layer_shapes(model, layer), f"model.architecture = {model.architecture!r}, layer {layer}")
    width = model.width
    head = model.head_dim
    heads = model.heads * head
    keys = model.kv_heads * head
    shapes: Shapes = {
        "self_attn.q_proj.weight": (heads, width),
        "self_attn.k_proj.weight": (keys, width),
        "self_attn.v_proj.weight": (keys, width),
        "self_attn.o_proj.weight": (width, heads),
    }
    if model.is_sparse(layer):
        shapes["mlp.gate.weight"] = (model.experts, width)
        for expert in range(model.experts):
            shapes |= _feed_forward(f"mlp.experts.{expert}.", width, model.expert_ffn)
        if model.shared_expert_ffn:
            shapes |= _feed_forward("mlp.shared_expert.", width, model.shared_expert_ffn)
            shapes["mlp.shared_expert_gate.weight"] = (1, width)
    else:
        shapes |= _feed_forward("mlp.", width, model.ffn)
    if model.qkv_bias:
        shapes |= {
            "self_attn.q_proj.bias": (heads,),
            "self_attn.k_proj.bias": (keys,),
            "self_attn.v_proj.bias": (keys,),
        }
    if model.output_bias:
        shapes["self_attn.o_proj.bias"] = (width,)
    if model.qk_norm != "none":
        each = model.qk_norm == "head"
        shapes["self_attn.q_norm.weight"] = (head if each else heads,)
        shapes["self_attn.k_norm.weight"] = (head if each else keys,)
    if model.norm_placement == "pre":
        shapes["input_layernorm.weight"] = (width,)
    shapes["post_attention_layernorm.weight"] = (width,)
    if model.norm_placement == "post":
        shapes["post_feedforward_layernorm.weight"] = (width,)
    return shapes


def _checked(shapes: Shapes, where: str) -> Shapes:
    """`shapes` of matrices and vectors that a flat buffer can hold. Raises ManifestError."""
    for name, shape in shapes.items():
        if not 1 <= len(shape) <= 2 or not all(type(side) is int and side > 0 for side in shape):
            raise ManifestError(f"{where}: {name} has shape {shape}; allowed are matrices and vectors")
    return shapes


def _feed_forward(prefix: str, width: int, ffn: int) -> Shapes:
    shapes = {"gate_proj.weight": (ffn, width), "up_proj.weight": (ffn, width), "down_proj.weight": (width, ffn)}
    return {prefix + name: shape for name, shape in shapes.items()}


def parameter_shapes(model: ModelSpec, part: StageLayers) -> Shapes:
    """Names (Hugging Face's) and shapes of a stage's parameters in the order of its flat buffer: first the matrices,
    with weight decay, then norms and biases, without. Of a tied model the first and the
    last stage hold the token table."""
    shapes: Shapes = {}
    if part.has_embedding:
        shapes[TABLE] = (model.vocabulary, model.width)
    for layer in part.layers:
        shapes |= {f"model.layers.{layer}.{name}": shape for name, shape in layer_shapes(model, layer).items()}
    if part.has_head:
        shapes[TABLE if model.tied else HEAD] = (model.vocabulary, model.width)
        shapes["model.norm.weight"] = (model.width,)
    matrices = {name: shape for name, shape in shapes.items() if len(shape) > 1}
    return matrices | shapes


def ends(model: ModelSpec, part: StageLayers) -> tuple[int, int]:
    """(first element, count) of the part of the flat buffer that no neighbour of `part` has.

    It is the embedding, or the head with the norms behind it up to the end of the buffer. Count 0 for an inner stage.
    """
    if part.has_embedding and part.has_head:
        return 0, part.parameters
    if part.has_embedding:
        return 0, model.vocabulary * model.width
    if not part.has_head:
        return 0, 0
    first = 0
    for name, shape in parameter_shapes(model, part).items():
        if name in (HEAD, TABLE):
            break
        first += math.prod(shape)
    return first, part.parameters - first


def is_writer(name: str) -> bool:
    """Whether the parameter `name` is a matrix that adds to the stream between layers."""
    return name.endswith(WRITERS)


def is_hidden_matrix(name: str, shape: tuple[int, ...]) -> bool:
    """Whether a parameter is a matrix inside a layer: neither the token table, nor the head, nor a norm or bias."""
    return len(shape) == 2 and ".layers." in name


@functools.lru_cache(maxsize=64)
def split(model: ModelSpec, stages: int, memory_weight: float = 0.0) -> tuple[StageLayers, ...]:
    """The layers of `stages` stages in order; `split(model, 1)[0]` is the whole model.

    The largest of the stages' costs is least: (1 - memory_weight) · share of the FLOPs + memory_weight · share of the
    parameters. Raises ManifestError if there are more stages than layers (a stage holds at least one).
    """
    if not 1 <= stages <= model.layers:
        raise ManifestError(
            f"pipeline.stages = {stages} cannot cut model.layers = {model.layers}: use 1 to {model.layers} stages"
        )
    costs = [layer_flops(model, layer) for layer in range(model.layers)]
    costs[0] += embedding_flops(model)
    costs[-1] += head_flops(model)
    parts = []
    for stage, layers in enumerate(partition(_weighed(model, costs, memory_weight), stages)):
        cost = sum(costs[layer] for layer in layers)
        part = StageLayers(stage, layers, stage == 0, stage == stages - 1, cost, 0)
        count = _count(parameter_shapes(model, part))
        parts.append(StageLayers(stage, layers, part.has_embedding, part.has_head, cost, count))
    return tuple(parts)


def stages_of(manifest: Manifest) -> tuple[StageLayers, ...]:
    """The stages of a run, in order. Raises ManifestError as `split` does."""
    return split(manifest.model, manifest.pipeline.stages, manifest.pipeline.memory_weight)


def costs(manifest: Manifest) -> tuple[float, ...]:
    """The stages' costs per sample, relative."""
    return tuple(part.cost for part in stages_of(manifest))


def _weighed(model: ModelSpec, flops: Sequence[float], memory_weight: float) -> Sequence[float]:
    """A cost for each layer, from its `flops`, with what the first and the last hold beside."""
    if not memory_weight:
        return flops
    sizes = [_count(layer_shapes(model, layer)) for layer in range(model.layers)]
    sizes[0] += model.vocabulary * model.width
    sizes[-1] += model.vocabulary * model.width
    return [
        (1.0 - memory_weight) * arithmetic / math.fsum(flops) + memory_weight * size / sum(sizes)
        for arithmetic, size in zip(flops, sizes, strict=True)
    ]


def _count(shapes: Shapes) -> int:
    """Elements of all parameters of `shapes`."""
    return sum(math.prod(shape) for shape in shapes.values())


INIT_CHUNK_ELEMENTS = 1 << 22  # 32 MiB of random bytes at a time


def initial(model: ModelSpec, seed: int, name: str, shape: tuple[int, ...]) -> Tensor:
    """The initial float32 value of parameter `name`: ones for norms, zeros for biases; else a bell with standard
    deviation sqrt(2 / 5D) [SmallInit, arXiv 1910.05895], divided by sqrt(2 · layers) for the projections that write
    into the stream [GPT-2]. GPT-2's own 0.02 suits D = 1000: the demo's model (D = 128) after 130 steps has 1.945 nats
    with it, 1.727 with this [measured, whole model, bf16 autocast, the demo corpus].

    It depends only on (seed, name, shape), so any node can initialise its stage alone. The bell is the sum of four
    uniform 16-bit integers (within ±3.46 standard deviations), times one rounded constant. It is bit-identical on every
    machine, unlike torch's own normal_, whose vectorised form differs between processors.
    """
    if len(shape) == 1:
        return torch.zeros(shape) if name.endswith(".bias") else torch.ones(shape)
    std = math.sqrt(2 / (5 * model.width))
    if is_writer(name):
        std /= math.sqrt(2 * model.layers)
    scale = std / math.sqrt(4 * (2**32 - 1) / 12)
    value = torch.empty(math.prod(shape))
    chance = seeded("init", seed, name)
    for start in range(0, value.numel(), INIT_CHUNK_ELEMENTS):
        chunk = value[start : start + INIT_CHUNK_ELEMENTS]
        raw = torch.frombuffer(bytearray(chance.randbytes(8 * chunk.numel())), dtype=torch.int16).view(-1, 4)
        chunk.copy_(raw.sum(1, dtype=torch.int32)).add_(2.0).mul_(scale)  # exact up to the product: |sum| < 2^18
    return value.view(shape)
