"""Requirements of the kinds of training (training.kind) on other fields."""

from __future__ import annotations

from swarmnode.run.manifest.gossip_compat import rules_of
from swarmnode.run.manifest.spec import ADAPTERS, PRETRAIN, Manifest, ModelSpec

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")


def from_base(m: Manifest) -> bool:
    """Whether the run changes a trained model. A lost stage then starts from that model again, not from neighbours."""
    return m.training.kind != PRETRAIN or bool(m.base.index)


def ties(m: Manifest) -> bool:
    """Whether a tied model's table stays one matrix: it lies in one stage, both ends hold it frozen, or both train it
    and meet (model/tied_table.py), which takes rounds that only average weights."""
    alone = m.pipeline.stages == 1 or m.training.kind == ADAPTERS
    rules = rules_of(m.gossip)
    return alone or (rules.meets and rules.in_subspace)


def trains_both_ends(m: Manifest) -> bool:
    """Whether the first and the last stage both train the table of a tied model."""
    return m.model.tied and m.pipeline.stages > 1 and m.training.kind != ADAPTERS


def targets_exist(m: Manifest) -> bool:
    """Whether each layer has a matrix in training.targets; experts' matrices have no adapters."""
    everywhere = not m.model.experts or m.model.shared_expert_ffn > 0
    return m.training.kind != ADAPTERS or everywhere or bool({*m.training.targets} & {*ATTENTION})


def rank_max(m: Manifest) -> int:
    """The shortest side of a matrix in training.targets: an adapter of that rank can be any matrix."""
    return min(_shorter_side(m.model, target) for target in m.training.targets)


def _shorter_side(model: ModelSpec, target: str) -> int:
    match target:
        case "q_proj" | "o_proj":
            return min(model.width, model.heads * model.head_dim)
        case "k_proj" | "v_proj":
            return min(model.width, model.kv_heads * model.head_dim)
    dense = model.sparse_layers < model.layers
    inner = [size for size, there in ((model.ffn, dense), (model.shared_expert_ffn, model.sparse_layers > 0)) if there]
    return min([model.width, *(size for size in inner if size)])
