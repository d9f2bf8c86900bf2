"""Hugging Face's config.json and tensor names, and ModelSpec: each from the other.

`FAMILIES` is the table: what each `model_type` fixes, and the keys by which its config.json says the rest. Keys are
those of transformers 4 (rope_theta, rope_scaling, torch_dtype) and 5 (rope_parameters); both are read and written.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from swarmnode.base.errors import DataError
from swarmnode.model.split import HEAD, TABLE, parameter_shapes, split
from swarmnode.run.manifest import Manifest, ModelSpec, PipelineSpec
from swarmnode.run.manifest.cross_field import MODEL_ACROSS
from swarmnode.run.manifest.spec import BY_NAME

CONFIG = "config.json"
SHOWN = 60  # characters of a wrong value

Config = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Family:
    """A `model_type`. `fixed`: fields that all its models share. `keys`: fields that config.json gives under this key,
    beside COMMON_KEYS, with the value where the key is missing. `refused`: keys that must be missing or have this
    value. `layers`: how it says which layers slide or do not rotate ("" without windows). `head_dim`: the width of a
    head where the key is missing, 0 for width / heads; None where the key is not read."""

    architecture: str
    fixed: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    keys: Mapping[str, tuple[str, Any]] = dataclasses.field(default_factory=dict)
    refused: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    layers: str = ""
    head_dim: int | None = 0
    rope_theta: float = 10000.0
    tied: bool = False


COMMON_KEYS = {
    "layers": "num_hidden_layers",
    "width": "hidden_size",
    "heads": "num_attention_heads",
    "ffn": "intermediate_size",
    "vocabulary": "vocab_size",
    "norm_eps": "rms_norm_eps",
}
BIASES = {"qkv_bias": ("attention_bias", False), "output_bias": ("attention_bias", False)}
ROUTED = {"experts_active": ("num_experts_per_tok", None), "router_balance": ("router_aux_loss_coef", 0.001)}
QWEN_ROUTED = {
    **ROUTED,
    "experts": ("num_experts", None),
    "expert_ffn": ("moe_intermediate_size", None),
    "router_normalised": ("norm_topk_prob", False),
}
ALIASES = {"num_experts": "num_local_experts", "num_local_experts": "num_experts"}  # transformers 5 writes either

FAMILIES: dict[str, Family] = {
    "llama": Family("LlamaForCausalLM", keys=BIASES, refused={"mlp_bias": False}),
    "mistral": Family("MistralForCausalLM", layers="all:4096"),
    "qwen2": Family("Qwen2ForCausalLM", fixed={"qkv_bias": True}, layers="types"),
    "qwen3": Family("Qwen3ForCausalLM", fixed={"qk_norm": "head"}, keys=BIASES, layers="types", head_dim=128),
    "smollm3": Family(
        "SmolLM3ForCausalLM",
        keys=BIASES,
        refused={"mlp_bias": False},
        layers="smollm3",
        rope_theta=2e6,
        tied=True,
    ),
    "olmo2": Family("Olmo2ForCausalLM", fixed={"qk_norm": "whole", "norm_placement": "post"}, keys=BIASES),
    "olmoe": Family(
        "OlmoeForCausalLM",
        fixed={"qk_norm": "whole"},
        keys={
            **BIASES,
            **ROUTED,
            "experts": ("num_experts", None),
            "expert_ffn": ("intermediate_size", None),
            "router_normalised": ("norm_topk_prob", False),
            "router_balance": ("router_aux_loss_coef", 0.01),
        },
        refused={"clip_qkv": None},
        head_dim=None,
    ),
    "mixtral": Family(
        "MixtralForCausalLM",
        fixed={"router_normalised": True},
        keys={**ROUTED, "experts": ("num_local_experts", None), "expert_ffn": ("intermediate_size", None)},
        refused={"router_jitter_noise": 0.0},
        layers="all:0",
        rope_theta=1e6,
    ),
    "qwen3_moe": Family(
        "Qwen3MoeForCausalLM", fixed={"qk_norm": "head"}, keys={**BIASES, **QWEN_ROUTED}, layers="used"
    ),
    "qwen2_moe": Family(
        "Qwen2MoeForCausalLM",
        keys={
            **QWEN_ROUTED,
            "qkv_bias": ("qkv_bias", True),
            "shared_expert_ffn": ("shared_expert_intermediate_size", None),
        },
        layers="types",
    ),
}


def spec_of(config: Config, *, context: int | None = None) -> ModelSpec:
    """The model of a config.json at `context` tokens; None: the most it was made for. A head that is the token table
    there is `tied` here.

    Raises DataError, one line, for an unknown architecture or feature and for values that no manifest may have.
    """
    kind = config.get("model_type")
    family = FAMILIES.get(kind) if isinstance(kind, str) else None
    if family is None:
        raise DataError(f"{CONFIG}: model_type = {_shown(kind)}; known are {', '.join(FAMILIES)}")
    refused = {"hidden_act": "silu", "quantization_config": None, "partial_rotary_factor": 1.0, **family.refused}
    for key, usual in refused.items():
        if config.get(key, usual) not in (usual, None):
            raise DataError(f"{CONFIG}: {key} = {_shown(config[key])}; known is {_shown(usual)}")
    values: dict[str, Any] = {
        **{ours: _value(config, ours, key) for ours, key in COMMON_KEYS.items()},
        **{ours: _value(config, ours, key, usual) for ours, (key, usual) in family.keys.items()},
        **family.fixed,
        "tied": _value(config, "tied", "tie_word_embeddings", family.tied),
        "kv_heads": _value(config, "kv_heads", "num_key_value_heads", config["num_attention_heads"]),
    }
    longest = _value(config, "context", "max_position_embeddings")
    if context is not None and context > longest:
        raise DataError(f"{CONFIG}: the model was made for {longest} tokens at most, not for {context}")
    values |= {"context": longest if context is None else context, **_rope(config, family, longest)}
    if family.head_dim is not None:
        values["head_width"] = _value(config, "head_width", "head_dim", family.head_dim)
    values |= _windows(config, family, values["layers"])
    if "experts" in values:
        values["dense_layers"] = _dense_layers(config, values["layers"])
    return _checked(canonical(ModelSpec(**values)))


def canonical(spec: ModelSpec) -> ModelSpec:
    """`spec` with each choice written in one way: layers are listed only where they differ from the others."""
    layers = range(spec.layers)
    sliding = tuple(layer for layer in layers if spec.window(layer))
    width = 0 if spec.head_dim * spec.heads == spec.width else spec.head_width
    every = len(sliding) in (0, spec.layers)
    window = spec.sliding_window if sliding else 0
    sparse = spec.experts > 0 and spec.sparse_layers > 0
    return dataclasses.replace(
        spec,
        head_width=width,
        sliding_window=window,
        sliding_layers=() if every else sliding,
        ffn=spec.expert_ffn if sparse and not spec.dense_layers else spec.ffn,
    )


def _value(config: Config, ours: str, key: str, usual: Any = None) -> Any:
    """The value of field `ours` from `key`, or `usual` where it is missing or null. Raises DataError."""
    given = config.get(key)
    if given is None and key in ALIASES:
        given = config.get(ALIASES[key])
    given = usual if given is None else given
    if given is None:
        raise DataError(f"{CONFIG}: {key} is missing")
    check = BY_NAME[f"model.{ours}"].check
    if (value := check.accept(given)) is None:
        raise DataError(f"{CONFIG}: {key} = {_shown(given)}: allowed is {check.allowed}")
    return value


def _checked(spec: ModelSpec) -> ModelSpec:
    manifest = Manifest(model=spec, pipeline=PipelineSpec(stages=1))
    for across in MODEL_ACROSS:
        if not across.holds(manifest):
            name = across.names[0].removeprefix("model.")
            raise DataError(f"{CONFIG}: {name} = {_shown(getattr(spec, name))}: allowed is {across.allowed(manifest)}")
    return spec


def _rope(config: Config, family: Family, longest: int) -> dict[str, Any]:
    """The rotary fields."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(rope, Mapping) or any(isinstance(value, Mapping) for value in rope.values()):
        raise DataError(f"{CONFIG}: rope_parameters = {_shown(rope)}; known is one set for all layers")
    theta = _value({"rope_theta": rope.get("rope_theta") or config.get("rope_theta")}, "rope_theta", "rope_theta",
                   family.rope_theta)  # fmt: skip
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return {"rope_theta": theta}
    if kind not in ("linear", "llama3", "yarn"):
        raise DataError(f"{CONFIG}: rope_type = {_shown(kind)}; known are default, linear, llama3, yarn")
    for key, usual in (("partial_rotary_factor", 1.0), ("truncate", True)):
        if rope.get(key, usual) not in (usual, None):
            raise DataError(f"{CONFIG}: {key} of the rotary positions = {_shown(rope[key])}; known is {usual}")
    values = {"rope_theta": theta, "rope_scaling": kind, "rope_factor": _value(rope, "rope_factor", "factor")}
    if kind != "linear":
        yarn = kind == "yarn"
        low, high = ("beta_slow", "beta_fast") if yarn else ("low_freq_factor", "high_freq_factor")
        values["rope_low"] = _value(rope, "rope_low", low, 1.0 if yarn else None)
        values["rope_high"] = _value(rope, "rope_high", high, 32.0 if yarn else None)
        defaults = {"original_max_position_embeddings": config.get("original_max_position_embeddings"), **rope}
        values["rope_original_context"] = _value(
            defaults, "rope_original_context", "original_max_position_embeddings", longest
        )
    if kind == "yarn":
        values["rope_attention_factor"] = _attention_factor(rope, values["rope_factor"])
    return values


def _attention_factor(rope: Config, factor: float) -> float:
    """YaRN's attention factor; 0 for its own."""

    def scale(key: str) -> float:
        return 0.1 * float(_value(rope, "rope_attention_factor", key)) * math.log(factor) + 1.0

    if rope.get("attention_factor") is None and rope.get("mscale") and rope.get("mscale_all_dim"):
        return scale("mscale") / scale("mscale_all_dim")
    return float(_value(rope, "rope_attention_factor", "attention_factor", 0.0))


def _windows(config: Config, family: Family, layers: int) -> dict[str, Any]:
    """Sliding windows, and layers without rotary positions."""
    kind, _, usual = family.layers.partition(":")
    values: dict[str, Any] = {}
    if kind == "smollm3":
        interval = config.get("no_rope_layer_interval", 4)
        marks = config.get("no_rope_layers")
        if marks is None and type(interval) is int and interval > 0:
            marks = [int((layer + 1) % interval != 0) for layer in range(layers)]
        if not isinstance(marks, list) or len(marks) < layers or not all(mark in (0, 1) for mark in marks):
            raise DataError(f"{CONFIG}: no_rope_layers = {_shown(marks)}: allowed is a list of 0 and 1, one a layer")
        values["unrotated_layers"] = tuple(layer for layer in range(layers) if not marks[layer])
    if kind == "all":
        given = config.get("sliding_window", int(usual))
        return {"sliding_window": _value({"sliding_window": given or 0}, "sliding_window", "sliding_window")}
    if not kind or not config.get("use_sliding_window"):
        return values
    window = _value(config, "sliding_window", "sliding_window", 0)
    if kind == "used" or not window:
        return {**values, "sliding_window": window}
    types = config.get("layer_types")
    if types is None:  # as transformers fills it in
        first = _value({"max_window_layers": config.get("max_window_layers", 28)}, "sliding_window",
                       "max_window_layers")  # fmt: skip
        sliding: Callable[[int], bool] = lambda layer: layer >= first  # noqa: E731
        if kind == "smollm3":
            sliding = lambda layer: layer in values["unrotated_layers"]  # noqa: E731
        elif config["model_type"] == "qwen2_moe":
            sliding = lambda layer: layer % 2 == 0 and layer < first  # noqa: E731
        types = ["sliding_attention" if sliding(layer) else "full_attention" for layer in range(layers)]
    known = ("sliding_attention", "full_attention")
    if not isinstance(types, list) or len(types) != layers or not all(each in known for each in types):
        raise DataError(f"{CONFIG}: layer_types = {_shown(types)}: allowed are sliding_attention and full_attention")
    where = tuple(layer for layer in range(layers) if types[layer] == "sliding_attention")
    return {**values, "sliding_window": window, "sliding_layers": where} if where else values


def _dense_layers(config: Config, layers: int) -> tuple[int, ...]:
    """Layers with one feed-forward where others have experts (Qwen)."""
    step = config.get("decoder_sparse_step", 1)
    only = config.get("mlp_only_layers") or []
    if type(step) is not int or step < 1:
        raise DataError(f"{CONFIG}: decoder_sparse_step = {_shown(step)}: allowed is a whole number above 0")
    if not isinstance(only, list) or not all(type(layer) is int for layer in only):
        raise DataError(f"{CONFIG}: mlp_only_layers = {_shown(only)}: allowed is a list of layers")
    dense = {*only, *(layer for layer in range(layers) if (layer + 1) % step)}
    return tuple(layer for layer in range(layers) if layer in dense)


def _shown(value: Any) -> str:
    return ascii(value)[:SHOWN]


# The way back


def family_of(spec: ModelSpec) -> str:
    """The `model_type` whose config.json says all of `spec`. Raises DataError if transformers has none."""
    wanted = canonical(spec)
    for kind in FAMILIES:
        try:
            if spec_of(_config(spec, kind), context=spec.context) == wanted:
                return kind
        except DataError:
            continue
    raise DataError(
        "no architecture of transformers has all that [model] asks for; `swarmnode export` can write none of its models"
    )


def config_of(spec: ModelSpec) -> dict[str, Any]:
    """config.json of `spec`, for transformers 4 and 5 alike. Raises DataError if transformers has no such model."""
    return _config(spec, family_of(spec))


def _config(spec: ModelSpec, kind: str) -> dict[str, Any]:
    """config.json of `spec` as a model of family `kind`, which may not say all of it."""
    family = FAMILIES[kind]
    rope: dict[str, Any] = {"rope_type": "default"}
    if spec.rope_scaling != "none":
        rope = {"rope_type": spec.rope_scaling, "factor": spec.rope_factor}
    if spec.rope_scaling in ("llama3", "yarn"):
        yarn = spec.rope_scaling == "yarn"
        low, high = ("beta_slow", "beta_fast") if yarn else ("low_freq_factor", "high_freq_factor")
        rope |= {low: spec.rope_low, high: spec.rope_high}
        rope["original_max_position_embeddings"] = spec.rope_original_context
        if spec.rope_attention_factor:
            rope["attention_factor"] = spec.rope_attention_factor
    config: dict[str, Any] = {
        "architectures": [family.architecture],
        "model_type": kind,
        **{key: getattr(spec, ours) for ours, key in COMMON_KEYS.items()},
        "num_key_value_heads": spec.kv_heads,
        "head_dim": spec.head_dim,
        "max_position_embeddings": spec.context,
        "rope_theta": spec.rope_theta,
        "rope_parameters": {**rope, "rope_theta": spec.rope_theta},
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": spec.tied,
        "pad_token_id": None,
        "bos_token_id": None,
        "eos_token_id": None,
        "torch_dtype": "float32",
    }
    if spec.rope_scaling != "none":
        config["rope_scaling"] = rope
    config |= {key: getattr(spec, ours) for ours, (key, _) in family.keys.items()}
    layers = range(spec.layers)
    if kind == "smollm3":
        config["no_rope_layers"] = [int(spec.rotates(layer)) for layer in layers]
    if family.layers.startswith("all"):
        config["sliding_window"] = spec.sliding_window or None
    elif family.layers:
        slides = [spec.window(layer) > 0 for layer in layers]
        first = slides.index(True) if any(slides) else spec.layers
        config |= {"use_sliding_window": any(slides), "sliding_window": spec.sliding_window or None}
        if family.layers != "used":
            config["layer_types"] = ["sliding_attention" if each else "full_attention" for each in slides]
            config["max_window_layers"] = first
    if "moe_intermediate_size" in config:
        config |= {"decoder_sparse_step": 1, "mlp_only_layers": list(spec.dense_layers)}
    return config


# Names

_MIXTRAL = (
    (".mlp.", ".block_sparse_moe."),
    (".gate_proj.", ".w1."),
    (".down_proj.", ".w2."),
    (".up_proj.", ".w3."),
)


def their_name(spec: ModelSpec, ours: str) -> str:
    """The published name of parameter `ours`; the same but for Mixtral's feed-forwards."""
    if ".mlp." in ours and spec.experts and family_of(spec) == "mixtral":
        for here, there in _MIXTRAL:
            ours = ours.replace(here, there)
    return ours


def source_names(spec: ModelSpec, shared: str = "") -> dict[str, str]:
    """For each parameter of `spec` as a whole: the name of the published tensor that holds it. `shared`: the published
    tensor that is token table and head, "" where each is its own; an untied head begins as a copy of it."""
    renamed = bool(spec.experts) and family_of(spec) == "mixtral"
    shapes = parameter_shapes(spec, split(spec, 1)[0])
    names = {name: their_name(spec, name) if renamed else name for name in shapes}
    if shared:
        names |= {end: shared for end in (TABLE, HEAD) if end in names}
    return names
