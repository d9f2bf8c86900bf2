"""The manifest fields of the model."""

from __future__ import annotations

from swarmnode.manifest.check import Field, flag, matching, numbers, one_of, real, whole

LAYERS_MAX = 512  # guess: GPT-3 has 96; they are divided into stages within a second (model/split.py)
CONTEXT_MAX = 1 << 24
FFN_MAX = 1 << 22
EXPERTS_MAX = 4096  # guess: DeepSeek-V3 has 256

_LLAMA = "LLaMA, arXiv 2302.13971"
_MEASURED = "measured: this size trains at 10 000 tokens/s on one CPU thread"
_DENSE = "no experts, as " + _LLAMA

MODEL_FIELDS: tuple[Field, ...] = (
    Field("model", "layers", whole(1, LAYERS_MAX), "Decoder layers, cut into stages.", _MEASURED),
    Field("model", "width", whole(2, 1 << 20), "Width of the residual stream.", _MEASURED),
    Field("model", "heads", whole(1, 4096), "Attention heads; divides width unless head_width is given.", _MEASURED),
    Field("model", "kv_heads", whole(1, 4096), "Heads of keys and values; divides heads.", "guess: half of heads"),
    Field(
        "model",
        "ffn",
        whole(1, FFN_MAX),
        "Inner width of SwiGLU, in layers without experts.",
        "8/3 of width, rounded up to 32, as LLaMA, arXiv 2302.13971, section 2",
    ),
    Field("model", "context", whole(1, CONTEXT_MAX), "Tokens of a sample.", _MEASURED),
    Field("model", "vocabulary", whole(2, 1 << 24), "Token ids; 256 for the tokenizer bytes.", "the number of bytes"),
    Field("model", "rope_theta", real(1.0, 1e12), "Base of the rotary embedding.", "RoFormer, arXiv 2104.09864, 3.2.2"),
    Field(
        "model", "norm_eps", real(0.0, 0.1, above=True), "Added inside RMSNorm.", "Llama 2's published configuration"
    ),
    Field("model", "head_width", whole(0, 1 << 16), "Width of an attention head; 0: width / heads.", _LLAMA),
    Field("model", "qkv_bias", flag(), "Whether queries, keys and values have biases (Qwen2).", _LLAMA),
    Field("model", "output_bias", flag(), "Whether the attention's output has a bias.", _LLAMA),
    Field(
        "model",
        "qk_norm",
        one_of("none", "head", "whole"),
        "Norm of queries and keys: head: of each head alone (Qwen3); whole: of all heads together (OLMo 2).",
        _LLAMA,
    ),
    Field(
        "model",
        "norm_placement",
        one_of("pre", "post"),
        "pre: a layer normalises what attention and feed-forward read; post: what they add (OLMo 2).",
        _LLAMA,
    ),
    Field(
        "model",
        "tied",
        flag(),
        "Whether the head is the token table. In several stages both ends hold it: adapters leave it as it is, else"
        " each end takes the other's steps after each round (docs/models.md); `swarmnode init --from --untie`: a head"
        " of its own.",
        _LLAMA,
    ),
    Field(
        "model",
        "rope_scaling",
        one_of("none", "linear", "llama3", "yarn"),
        "Change of the rotary frequencies for a longer context: linear (arXiv 2306.15595), llama3 (Llama 3.1), yarn"
        " (arXiv 2309.00071).",
        "RoFormer, arXiv 2104.09864",
    ),
    Field("model", "rope_factor", real(1.0, 1e6), "Factor by which rope_scaling lengthens the context.", "no scaling"),
    Field(
        "model",
        "rope_original_context",
        whole(0, CONTEXT_MAX),
        "Context before it was lengthened, for llama3 and yarn; else 0.",
        "no scaling",
    ),
    Field(
        "model",
        "rope_low",
        real(0.0, 1e6, above=True),
        "llama3, yarn: frequencies that turn fewer times than this within rope_original_context are divided by"
        " rope_factor.",
        "Llama 3.1's configuration; arXiv 2309.00071, section 3.2",
    ),
    Field(
        "model",
        "rope_high",
        real(0.0, 1e6, above=True),
        "llama3, yarn: frequencies that turn more often than this are kept. YaRN's own is 32.",
        "Llama 3.1's configuration",
    ),
    Field(
        "model",
        "rope_attention_factor",
        real(0.0, 100.0),
        "yarn: factor of queries and keys; 0: 0.1 ln(rope_factor) + 1.",
        "arXiv 2309.00071, eq. 22",
    ),
    Field(
        "model",
        "unrotated_layers",
        numbers(LAYERS_MAX - 1),
        "Layers without rotary positions (SmolLM3; arXiv 2501.18795), from 0.",
        _LLAMA,
    ),
    Field(
        "model",
        "sliding_window",
        whole(0, CONTEXT_MAX),
        "Tokens that a token sees in sliding_layers, itself among them; 0: all before it.",
        _LLAMA,
    ),
    Field(
        "model",
        "sliding_layers",
        numbers(LAYERS_MAX - 1),
        "Layers with the sliding window, from 0; empty: all.",
        "Mistral, arXiv 2310.06825",
    ),
    Field("model", "experts", whole(0, EXPERTS_MAX), "Experts of a layer; 0: one feed-forward.", _DENSE),
    Field("model", "experts_active", whole(0, 256), "Experts that a token goes to; 0 without experts.", _DENSE),
    Field("model", "expert_ffn", whole(0, FFN_MAX), "Inner width of an expert; 0 without experts.", _DENSE),
    Field(
        "model",
        "shared_expert_ffn",
        whole(0, FFN_MAX),
        "Inner width of an expert that every token goes to, behind a gate (Qwen1.5-MoE); 0: none.",
        _DENSE,
    ),
    Field(
        "model",
        "dense_layers",
        numbers(LAYERS_MAX - 1),
        "Layers with one feed-forward where others have experts, from 0.",
        _DENSE,
    ),
    Field(
        "model",
        "router_normalised",
        flag(),
        "Whether the shares of a token's experts are scaled to a sum of 1 (Mixtral, Qwen3).",
        "OLMoE, arXiv 2409.02060",
    ),
    Field(
        "model",
        "router_balance",
        real(0.0, 100.0),
        "Weight of the loss that keeps experts evenly used (arXiv 2101.03961, eq. 4); 0: none. OLMoE has 0.01.",
        _DENSE,
    ),
    Field(
        "model",
        "architecture",
        matching(r"[a-z][a-z0-9_-]{0,63}", "1 to 64 small letters, digits, dashes, underscores, a letter first"),
        "decoder: the layers described here; else layers of a package that every node has installed (docs/models.md).",
        "the families of Hugging Face",
    ),
)
