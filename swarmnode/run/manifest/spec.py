"""All fields of a manifest, frozen: each once, with its default, allowed values, meaning and the default's origin.

They drive validation and the commented template. Conditions between fields are in cross_field.py.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import TypeVar

from swarmnode.base import plugin
from swarmnode.run.gossip_rules import codecs, methods
from swarmnode.run.manifest.check import (
    BYTES_MAX,
    COUNT_MAX,
    Value,
    ValueCheck,
    bucket,
    flag,
    list_of,
    matching,
    numbers,
    odd,
    one_of,
    path,
    real,
    some_of,
    text,
    whole,
    word_or,
)
from swarmnode.run.manifest.location import location

BYTES_END = 0
"""End of documents with data.tokenizer = "bytes": a byte that text does not contain."""

OWN = "own"
"""gossip.alpha, beta and gamma: use the value of gossip.method (gossip_compat.py)."""

TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""training.targets: the matrices of a layer that adapters can change."""

KINDS = ("pretrain", "finetune", "adapters")
PRETRAIN, FINETUNE, ADAPTERS = KINDS

LAYERS_MAX = 512  # guess: GPT-3 has 96; they are divided into stages within a second (model/split.py)
CONTEXT_MAX = 1 << 24
FFN_MAX = 1 << 22
EXPERTS_MAX = 4096  # guess: DeepSeek-V3 has 256
FRAGMENTS_MAX = 255  # guess; each has the state of its own codec

_LLAMA = "LLaMA, arXiv 2302.13971"
_SECTION = f"{_LLAMA}, section 2"
_DENSE = f"no experts, as {_LLAMA}"
_MEASURED = "measured: this size trains at 10 000 tokens/s on one CPU thread"
_SMALL_CALL = "derived: as long as a call that carries little (net/membership/liveness.py)"
_TWO = "derived: the fewest of which one may die"
_ONCE = "derived: the demo's text once is 92,280 samples"
_WARMUP = "derived: half a per cent of the run; GPT-3 and LLaMA took 0.1 to 1"
_SECONDS = real(0.0, 86_400.0, above=True)

T = TypeVar("T")


def key(default: T, check: ValueCheck, meaning: str, origin: str) -> T:
    """A field. `origin` signs the default: paper, measured or guess."""
    declared: T = field(default=default, metadata={"check": check, "meaning": meaning, "origin": origin})
    return declared


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """The model: a decoder. Defaults: Llama's architecture, 1.2 M parameters; two CPU cores train it fast."""

    layers: int = key(6, whole(1, LAYERS_MAX), "Decoder layers, cut into stages.", _MEASURED)
    width: int = key(128, whole(2, 1 << 20), "Width of the residual stream.", _MEASURED)
    heads: int = key(4, whole(1, 4096), "Attention heads; divides width unless head_width is given.", _MEASURED)
    kv_heads: int = key(2, whole(1, 4096), "Heads of keys and values; divides heads.", "guess: half of heads")
    ffn: int = key(
        352,
        whole(1, FFN_MAX),
        "Inner width of SwiGLU, in layers without experts.",
        "8/3 of width, rounded up to 32, as LLaMA, arXiv 2302.13971, section 2",
    )
    context: int = key(128, whole(1, CONTEXT_MAX), "Tokens of a sample.", _MEASURED)
    vocabulary: int = key(256, whole(2, 1 << 24), "Token ids; 256 for the tokenizer bytes.", "the number of bytes")
    rope_theta: float = key(
        10000.0, real(1.0, 1e12), "Base of the rotary embedding.", "RoFormer, arXiv 2104.09864, 3.2.2"
    )
    norm_eps: float = key(
        1e-5, real(0.0, 0.1, above=True), "Added inside RMSNorm.", "Llama 2's published configuration"
    )
    head_width: int = key(0, whole(0, 1 << 16), "Width of an attention head; 0: width / heads.", _LLAMA)
    qkv_bias: bool = key(False, flag(), "Whether queries, keys and values have biases (Qwen2).", _LLAMA)
    output_bias: bool = key(False, flag(), "Whether the attention's output has a bias.", _LLAMA)
    qk_norm: str = key(
        "none",
        one_of("none", "head", "whole"),
        "Norm of queries and keys: head: of each head alone (Qwen3); whole: of all heads together (OLMo 2).",
        _LLAMA,
    )
    norm_placement: str = key(
        "pre",
        one_of("pre", "post"),
        "pre: a layer normalises what attention and feed-forward read; post: what they add (OLMo 2).",
        _LLAMA,
    )
    tied: bool = key(
        False,
        flag(),
        "Whether the head is the token table. In several stages both ends hold it: adapters leave it as it is, else"
        " each end takes the other's steps after each round (docs/models.md); `swarmnode init --from --untie`: a head"
        " of its own.",
        _LLAMA,
    )
    rope_scaling: str = key(
        "none",
        one_of("none", "linear", "llama3", "yarn"),
        "Change of the rotary frequencies for a longer context: linear (arXiv 2306.15595), llama3 (Llama 3.1), yarn"
        " (arXiv 2309.00071).",
        "RoFormer, arXiv 2104.09864",
    )
    rope_factor: float = key(1.0, real(1.0, 1e6), "Factor by which rope_scaling lengthens the context.", "no scaling")
    rope_original_context: int = key(
        0, whole(0, CONTEXT_MAX), "Context before it was lengthened, for llama3 and yarn; else 0.", "no scaling"
    )
    rope_low: float = key(
        1.0,
        real(0.0, 1e6, above=True),
        "llama3, yarn: frequencies that turn fewer times than this within rope_original_context are divided by"
        " rope_factor.",
        "Llama 3.1's configuration; arXiv 2309.00071, section 3.2",
    )
    rope_high: float = key(
        4.0,
        real(0.0, 1e6, above=True),
        "llama3, yarn: frequencies that turn more often than this are kept. YaRN's own is 32.",
        "Llama 3.1's configuration",
    )
    rope_attention_factor: float = key(
        0.0,
        real(0.0, 100.0),
        "yarn: factor of queries and keys; 0: 0.1 ln(rope_factor) + 1.",
        "arXiv 2309.00071, eq. 22",
    )
    unrotated_layers: tuple[int, ...] = key(
        (), numbers(LAYERS_MAX - 1), "Layers without rotary positions (SmolLM3; arXiv 2501.18795), from 0.", _LLAMA
    )
    sliding_window: int = key(
        0,
        whole(0, CONTEXT_MAX),
        "Tokens that a token sees in sliding_layers, itself among them; 0: all before it.",
        _LLAMA,
    )
    sliding_layers: tuple[int, ...] = key(
        (), numbers(LAYERS_MAX - 1), "Layers with the sliding window, from 0; empty: all.", "Mistral, arXiv 2310.06825"
    )
    experts: int = key(0, whole(0, EXPERTS_MAX), "Experts of a layer; 0: one feed-forward.", _DENSE)
    experts_active: int = key(0, whole(0, 256), "Experts that a token goes to; 0 without experts.", _DENSE)
    expert_ffn: int = key(0, whole(0, FFN_MAX), "Inner width of an expert; 0 without experts.", _DENSE)
    shared_expert_ffn: int = key(
        0,
        whole(0, FFN_MAX),
        "Inner width of an expert that every token goes to, behind a gate (Qwen1.5-MoE); 0: none.",
        _DENSE,
    )
    dense_layers: tuple[int, ...] = key(
        (), numbers(LAYERS_MAX - 1), "Layers with one feed-forward where others have experts, from 0.", _DENSE
    )
    router_normalised: bool = key(
        False,
        flag(),
        "Whether the shares of a token's experts are scaled to a sum of 1 (Mixtral, Qwen3).",
        "OLMoE, arXiv 2409.02060",
    )
    router_balance: float = key(
        0.0,
        real(0.0, 100.0),
        "Weight of the loss that keeps experts evenly used (arXiv 2101.03961, eq. 4); 0: none. OLMoE has 0.01.",
        _DENSE,
    )
    architecture: str = key(
        "decoder",
        matching(r"[a-z][a-z0-9_-]{0,63}", "1 to 64 small letters, digits, dashes, underscores, a letter first"),
        "decoder: the layers described here; else layers of a package that every node has installed (docs/models.md).",
        "the families of Hugging Face",
    )

    @property
    def head_dim(self) -> int:
        """Width of an attention head."""
        return self.head_width or self.width // self.heads

    def rotates(self, layer: int) -> bool:
        """Whether `layer` has rotary positions."""
        return layer not in self.unrotated_layers

    def window(self, layer: int) -> int:
        """Tokens that a token sees in `layer`, itself among them; 0: all before it."""
        return self.sliding_window if not self.sliding_layers or layer in self.sliding_layers else 0

    def is_sparse(self, layer: int) -> bool:
        """Whether `layer` has experts instead of one feed-forward."""
        return self.experts > 0 and layer not in self.dense_layers

    @property
    def sparse_layers(self) -> int:
        """Layers with experts."""
        return sum(map(self.is_sparse, range(self.layers)))


@dataclass(frozen=True, slots=True)
class PipelineSpec:
    """The route of microbatches through the stages."""

    stages: int = key(3, whole(1, LAYERS_MAX), "Stages of consecutive layers; at most layers.", "the demo: 3 x 2 nodes")
    memory_weight: float = key(
        0.0,
        real(0.0, 1.0),
        "Weight of the parameters against the arithmetic when layers are cut into stages; 0: stages take equally long;"
        " 1: they are equally large, so that smaller machines can hold each.",
        "the slowest stage sets the pace",
    )
    boundary: str = key(
        "bf16",
        one_of("bf16", "fp32", "int8", "int4", "int4_int2", "subspace"),
        "Number format of activations and gradients between stages; int8: with a step for each 64;"
        " int4: half a byte a number, after each 64 are turned by signs of their place and a Hadamard matrix;"
        " int4_int2: so, and gradients in a quarter of a byte;"
        " subspace: pipeline.boundary_rank bf16 numbers a token, with layer outputs restricted to a"
        " frozen subspace and a frozen token table.",
        "measured: 0.002 nat beside float32 (examples/finetune-smollm2)",
    )
    boundary_rank: int = key(0, whole(0, 1 << 20), "k: dimensions of the subspace; 0 without one.", "no subspace")
    span_max: int = key(
        1,
        whole(1, LAYERS_MAX),
        "Consecutive stages that one machine serves, if its memory holds them: microbatches pass them in one hop.",
        "every machine bears one; init writes more where the fleet gains by it",
    )
    # CONSTANTS: the share of hops routed uniformly, so that routes mix; none where gradients are averaged before each
    # step. Guess.
    epsilon: float = 0.1
    window_max: int = key(
        64,
        whole(1, 65_536),
        "Most microbatches that a feeder keeps in flight; staleness_max usually allows fewer.",
        "guess",
    )
    staleness_max: int = key(
        1,
        whole(0, 1024),
        "Inner steps that a replica may take between the forward and the backward of a microbatch. Feeders limit those"
        " in flight, and replicas postpone their steps; an older gradient is not added.",
        "measured: three steps cost 0.4 nat on the replica bench, two 0.25 in the demo's swarm",
    )
    weight_prediction: str = key(
        "last_step",
        one_of("last_step", "off"),
        "last_step: in float32, a forward whose gradient will come after the next inner step uses the weights expected"
        " by then, the present ones and the last step once more.",
        "measured in plain PyTorch, 0.04 to 0.06 nat; not told apart in a live swarm: docs/methods.md",
    )
    audit_share: float = key(
        0.02,
        real(0.0, 1.0),
        "Share of a replica's answers that a second one recomputes for comparison, once it has been right for a"
        " while; 0: no audits, no signatures, and no check of states.",
        "guess: costs a replica as much of its arithmetic; see docs/security.md",
    )
    validation_samples: int = key(
        64,
        whole(1, 1 << 20),
        "Held-out samples in one validation, of the running mean of the weights if there is one (inner.average_share).",
        "guess",
    )
    validation_every_samples: int = key(
        1024,
        whole(1, COUNT_MAX),
        "Samples of the whole run between two validations; a round may be longer.",
        "guess: two feeders then spend 4 % of the demo's arithmetic on it",
    )
    rebalance_period_s: float = key(
        300.0,
        real(0.0, 86_400.0),
        "Seconds between two checks whether a node should move to a stage that needs it more; 0: no moves.",
        "SWARM, arXiv 2301.11913, section 4.4",
    )
    rebalance_ratio: float = key(
        1.1, real(1.0, 100.0), "Nodes move if the fastest stage is this many times as fast as the slowest.", "guess"
    )
    min_keep: int = key(2, whole(1, 65_536), "Replicas each stage should have before speed counts.", _TWO)

    @property
    def predicts_weights(self) -> bool:
        """Whether a forward whose gradient comes late uses the weights that the next inner step should leave."""
        return self.weight_prediction == "last_step"


@dataclass(frozen=True, slots=True)
class DataSpec:
    """The training text and its tokens."""

    source: str = key(
        "demo",
        one_of("demo", "index"),
        "demo: the corpus that comes with swarmnode, sources of Python 3.11.7's standard library; index: a data set of"
        " `swarmnode data make`, named by data.index and fetched by every feeder.",
        "the same real text on every machine",
    )
    index: str = key(
        "",
        matching(r"(?:[0-9a-f]{64})?", '"" or the SHA-256 of an index, 64 hex digits'),
        'SHA-256 of the data set\'s index.json, which holds the hashes of all its chunks; "" without data.source ='
        ' "index".',
        "none needed",
    )
    locations: tuple[str, ...] = key(
        (),
        list_of(location(), 16, different=False),
        "Sources of the data set's chunks, besides members of the run that hold some.",
        "only members",
    )
    end_token: int = key(
        -1,
        whole(-1, (1 << 24) - 1),
        "The token that ends each document; -1: unknown. `init --data` copies it from the index.",
        "unknown for a tokenizer that the manifest only names",
    )
    documents: str = key(
        "joined",
        one_of("joined", "masked"),
        "joined: windows span several documents; masked: attention stays within a document, positions"
        " restart with each, and its first token is no target, as if each document were alone.",
        "guess: it costs nothing, and in long documents few windows cross an end",
    )
    tokenizer: str = key(
        "bytes",
        path(),
        "bytes, or a Hugging Face tokenizer.json in the data set; with demo below the folder that each machine's user"
        ' names (--data-root; for `up` the run\'s folder). "./bytes" for a file called bytes.',
        "nothing to download",
    )
    block_samples: int = key(64, whole(1, 1 << 20), "Samples a feeder takes at a time.", "guess")

    @property
    def document_end(self) -> int | None:
        """The token after which attention and positions restart; None if windows are read across documents."""
        if self.documents == "joined":
            return None
        by_bytes = self.tokenizer == "bytes" and self.source != "index"
        return BYTES_END if self.end_token < 0 and by_bytes else self.end_token

    @property
    def names_files(self) -> bool:
        """Whether feeders need files of their own machine, below the folder that the user names."""
        return self.source != "index" and self.tokenizer != "bytes"


@dataclass(frozen=True, slots=True)
class BaseSpec:
    """The pretrained model that the run starts from, named by content (`swarmnode init --from`)."""

    index: str = key(
        "",
        matching(r"(?:[0-9a-f]{64})?", '"" or the SHA-256 of a base index, 64 hex digits'),
        "SHA-256 of the pretrained model's base.json, which says where each parameter's numbers lie and holds the"
        ' hashes of all their chunks; "": the run starts from random weights.',
        "none needed",
    )
    locations: tuple[str, ...] = key(
        (),
        list_of(location(models=True), 16, different=False),
        "Sources of the model's files, besides members of the run that hold chunks of them.",
        "only members",
    )


@dataclass(frozen=True, slots=True)
class InnerSpec:
    """Inner steps: the optimizer of one replica, on its own accumulated gradient."""

    optimizer: str = key(
        "muon",
        one_of("muon", "adamw"),
        "The optimizer of a replica; muon: for matrices inside layers, with AdamW for embedding, head and norms.",
        "Muon keeps more of its progress under averaging, arXiv 2505.23725",
    )
    learning_rate: float = key(3e-3, real(0.0, 10.0, above=True), "Peak learning rate of AdamW.", _MEASURED)
    muon_learning_rate: float = key(
        0.003,
        real(0.0, 10.0, above=True),
        "Peak learning rate of Muon, in units in which an element's step is as large as AdamW's (arXiv 2502.16982).",
        "measured: `swarmnode bench learning`",
    )
    muon_momentum: float = key(
        0.9,
        real(0.0, 1.0, below=True),
        "Muon: decay of the mean gradient. Runs of tens of thousands of steps may want 0.95 (Jordan et al., 2024).",
        "measured: docs/methods.md",
    )
    warmup_samples: int = key(512, whole(0, COUNT_MAX), "Samples of the whole run until the peak.", _WARMUP)
    decay: str = key(
        "cosine",
        one_of("cosine", "linear", "wsd", "constant"),
        "Learning rate from the end of warm-up to inner.decay_samples; linear: best with a least ratio of 0"
        " (arXiv 2502.15938); wsd: constant until the last inner.cooldown_samples, then down as 1 - sqrt"
        " (arXiv 2404.06395, 2405.18392); constant: needs no known end.",
        _SECTION,
    )
    decay_samples: int = key(100_000, whole(1, COUNT_MAX), "Samples of the whole run until the least rate.", _ONCE)
    cooldown_samples: int = key(
        20_000,
        whole(1, COUNT_MAX),
        'inner.decay = "wsd": samples of the whole run over which the rate falls, the last before inner.decay_samples.',
        "arXiv 2405.18392, section 3: a fifth of inner.decay_samples",
    )
    learning_rate_min_ratio: float = key(0.1, real(0.0, 1.0), "Least learning rate, as a share of the peak.", _SECTION)
    average_share: float = key(
        0.07,
        real(0.0, 0.5),
        "Mean age of the weights in the running mean that each replica keeps for `export`, as a share of the"
        " run's samples so far; 0: none is kept. It takes 4 bytes a parameter (arXiv 2507.17634, 2312.02696).",
        "measured: `swarmnode bench learning`, plain runs: .07 to .08 nat less than the last weights",
    )
    beta1: float = key(0.9, real(0.0, 1.0, below=True), "AdamW: decay of the mean.", _SECTION)
    beta2: float = key(0.95, real(0.0, 1.0, below=True), "AdamW: decay of the mean square.", _SECTION)
    eps: float = key(1e-8, real(0.0, 1.0, above=True), "AdamW: added to the divisor.", "PyTorch's own default")
    weight_decay: float = key(0.1, real(0.0, 10.0), "AdamW: decoupled weight decay.", _SECTION)
    clip_norm: float = key(1.0, real(0.0, 1e6, above=True), "c: each stage clips to c / sqrt(stages).", _SECTION)
    microbatch: int = key(
        8, whole(1, 65_536), "Most samples of a microbatch; feeders choose by measurement (docs/methods.md).", _MEASURED
    )
    replica_batch_min: int = key(
        2,
        whole(1, 65_536),
        "Least samples of a replica's inner step: with many replicas per stage, each steps on its share of"
        " inner_batch. Smaller steps cost more time a sample.",
        "measured: four replicas a stage of the demo learn 0.08 nat more with 2 than with 4",
    )
    replica_rate: str = key(
        "root",
        one_of("root", "same"),
        "Learning rate of replicas that average: root: by the root of their number (at most 4) higher than that of one"
        " with the whole inner_batch, as averaging takes so much of a step's noise away; same: not higher.",
        "measured: early in the demo two replicas learn 0.03 nat more with root, four 0.11; after 7,500 samples 0.01"
        " less, which one seed does not tell apart",
    )
    inner_batch: int = key(
        8,
        whole(1, 1 << 24),
        "Samples that the replicas of a stage together average between two inner steps: the global batch. Each"
        " steps on its share, at least replica_batch_min.",
        "measured: `swarmnode bench learning`",
    )
    inner_batch_max: int = key(
        0,
        whole(0, 1 << 24),
        "Samples to which inner batches may grow so that machines on slow links stay busy within staleness_max;"
        " the learning rate grows by the root of it. 0: as inner_batch. At most the critical batch (arXiv 1812.06162).",
        "no growth: larger batches learn less per sample",
    )


@dataclass(frozen=True, slots=True)
class GossipSpec:
    """Rounds: the averaging of a stage's replicas (NoLoCo, arXiv 2506.10911)."""

    method: str = key(
        "average",
        one_of(*methods()),
        "The outer optimizer (docs/methods.md); average: no momentum; diloco to edit: pseudo-gradients, in groups of"
        " the whole stage (gossip.group = 0); gradient: gradients, likewise, before each inner step; desloc: also"
        " AdamW's moments; none: replicas never meet.",
        "NoLoCo, arXiv 2506.10911",
    )
    alpha: float | str = key(
        OWN,
        word_or(OWN, real(0.0, 1.0, below=True)),
        "Momentum of the outer step; own: the method's value (docs/methods.md). Not for average, sparseloco,"
        " partial_average and desloc, which have none.",
        "each method's paper",
    )
    beta: float | str = key(
        OWN,
        word_or(OWN, real(0.0, 2.0)),
        "Outer learning rate: weight of the mean pseudo-gradient; own: the method's value. Not for average,"
        " partial_average and desloc.",
        "each method's paper",
    )
    gamma: float | str = key(
        OWN,
        word_or(OWN, real(0.0, 2.0)),
        "noloco: pull towards the partner's slow weights; own: beta.",
        "the code published with NoLoCo",
    )
    codec: str = key(
        "modular4",
        one_of(*codecs()),
        "Number format of weights between replicas; modular: low bits, decoded near the receiver's own weights; needs"
        " gossip.gamma = gossip.beta. From e3m0 on: pseudo-gradients, for methods that use them.",
        "measured: 4 seeds, 0.002 nat better than fp32 (spread 0.008) at 0.55 byte a parameter",
    )
    acceptance: str = key(
        "clipped",
        one_of("all", "clipped"),
        "Acceptance of a partner's packet: all: every well-formed one; clipped: up to the usual distance"
        " (swarmnode/trust/robust.py).",
        "measured: `swarmnode bench attack`; clipped costs .05 nat under a sign flip by a quarter",
    )
    group: int = key(
        4,
        whole(0, 8),
        "Replicas that meet in a round: 2: pairs; 3 to 8; 0: all of the stage. Members that arrive before"
        " limits.exchange_timeout_s count.",
        "NoLoCo, arXiv 2506.10911",
    )
    butterfly: bool = key(
        False,
        flag(),
        "Whether each member averages some pieces of all packets, a butterfly all-reduce: a member sends twice a packet"
        " for any number of members, instead of one to each. For gradient.",
        "BTARD, arXiv 2106.11257",
    )
    fragments: int = key(
        1,
        odd(1, FRAGMENTS_MAX),
        "F: a round averages only every F-th block of the weights, so F rounds cover all; 1: all in each round. "
        "Odd, so that replicas that meet at every second or fourth round reach all. For noloco and average; for"
        " gradient a step moves every F-th row of each matrix.",
        "whole packets",
    )
    delay: int = key(
        0,
        whole(0, 1),
        "Steps that are trained while the gradients of one travel: 0: a step begins with the mean of the one before; 1:"
        " with that of the one before that, and weights look ahead by a step. For gradient with gossip.butterfly and"
        " inner.optimizer = muon.",
        "the correction: arXiv 2606.30634",
    )
    round_samples: int = key(
        64,
        whole(1, COUNT_MAX),
        "Samples of the whole run in a round.",
        "measured: `swarmnode bench learning`; eight inner steps of the demo",
    )
    round_seconds_min: float = key(0.2, real(0.0, 86_400.0), "Least seconds between rounds.", "guess")
    uplink_share: float = key(
        0.5,
        real(0.0, 1.0, above=True),
        "Share of a machine's uplink for packets of rounds; if they need more, the machine meets only at"
        " every second round, or fourth, ... The uplink's rate is the highest observed one.",
        "guess: the rest is for activations; `init` has .9 in one stage, where there are none",
    )


@dataclass(frozen=True, slots=True)
class TrainingSpec:
    """The trained part of the model: all weights, or adapters beside frozen ones."""

    kind: str = key(
        "pretrain",
        one_of(*KINDS),
        "pretrain: all weights, on running text; finetune: all weights of a trained model, on conversations or other"
        ' separate documents (data.documents = "masked"; only answers count in the loss if the data set says so);'
        " adapters: small matrices beside the frozen weights of a trained model; only these are sent and saved.",
        "no model to start from is needed",
    )
    rank: int = key(
        16,
        whole(1, 1 << 14),
        "adapters: rows of A and columns of B in W + alpha / rank · B A (arXiv 2106.09685).",
        "LoRA, arXiv 2106.09685, table 6, finds 4 to 64 alike; QLoRA, arXiv 2305.14314, uses 64",
    )
    alpha: float = key(
        32.0,
        real(0.0, 1e6, above=True),
        "adapters: the change B A is multiplied by alpha / rank.",
        "twice the rank: arXiv 2405.09673 for mathematics, and common",
    )
    targets: tuple[str, ...] = key(
        TARGETS,
        some_of(*TARGETS),
        "adapters: the matrices of each layer that have one.",
        "all of them: QLoRA, arXiv 2305.14314, figure 2",
    )
    base_format: str = key(
        "bf16",
        one_of("bf16", "fp32", "int8", "nf4"),
        "adapters: number format of the frozen weights in memory; int8: matrices of layers with a step for each row"
        " (arXiv 2208.07339); nf4: these in 4 bits with a scale for each 64 (arXiv 2305.14314); all else bf16.",
        "the format most models are published in",
    )


@dataclass(frozen=True, slots=True)
class RecoverySpec:
    """Recovery of a stage whose replicas all died."""

    method: str = key(
        "copy",
        one_of("copy", "weighted", "none"),
        "Rebuilding a stage: copy of its nearer neighbours' layers, or their mean weighted by gradient norms"
        " (CheckFree); none: only snapshots.",
        "measured (docs/measurements/lost-stages.md): at p = .004 copy loses 0.11 nat, weighted 0.13, average 0.18",
    )
    keepers: int = key(
        2,
        whole(0, 64),
        "Nodes of a stage that keep a snapshot of the next one (the last keeps the first's).",
        _TWO,
    )
    # CONSTANTS: copies of a state, at neighbours and on the disk, are behind by this many seconds of training at most,
    # or by this part of the run's samples if that is less, where line and disk carry it. Guesses: nobody would miss it.
    snapshot_seconds: float = 60.0
    snapshot_part: float = 0.01
    # CONSTANTS: the share of a line's time for renewing the copies that neighbours keep, and of a disk's for those that
    # it keeps. Guess: a tenth less for training where the line bounds it.
    snapshot_share: float = 0.1
    snapshot_rounds_max: int = key(
        256,
        whole(0, COUNT_MAX),
        "Largest age in rounds of a snapshot for recovery; if it is older, the stage is rebuilt from its neighbours.",
        "guess",
    )
    # CONSTANTS: the largest snapshot that a keeper holds in memory; of a larger one it keeps only embedding and head.
    # Guess.
    snapshot_bytes_max: int = 4 << 30


@dataclass(frozen=True, slots=True)
class CheckpointSpec:
    """Place and frequency of checkpoints of the whole run, with which it can be stopped and resumed."""

    url: str = key(
        "",
        bucket(),
        "The bucket for checkpoints of nodes started with --use-bucket (with their own keys, from their"
        " environment). A folder is not allowed here: --checkpoints names one on each machine.",
        "none: volunteers cannot write there",
    )
    every_rounds: int = key(160, whole(1, COUNT_MAX), "Rounds between two checkpoints.", "guess")
    keep: int = key(3, whole(1, 1_000_000), "Checkpoints kept; older ones are deleted.", "guess")


@dataclass(frozen=True, slots=True)
class LimitsSpec:
    """Bounds that every node keeps."""

    microbatch_timeout_s: float = key(
        120.0,
        _SECONDS,
        "Seconds that a microbatch may take, there and back; adapts upwards if they are seen to take longer.",
        "measured by simulation: of pieces of work of 5 s and three stages, 60 s lost 19 of 400 and 120 s none",
    )
    hop_timeout_min_s: float = key(5.0, _SECONDS, "Least seconds that a hop may take.", _SMALL_CALL)
    in_flight_max: int = key(
        8, whole(1, 65_536), "Microbatches a replica holds per position in the itinerary.", "guess"
    )
    tape_bytes_max: int = key(
        256 << 20,
        whole(0, BYTES_MAX),
        "Bytes of tapes a replica keeps; the others are recomputed. A GPU keeps more if it has free memory.",
        "guess",
    )
    frame_bytes_max: int = key(1 << 30, whole(1024, BYTES_MAX), "Most bytes of tensors in one call.", "guess")
    exchange_timeout_s: float = key(
        20.0, _SECONDS, "Seconds an exchange between two replicas may take, plus 2 for each MB of a packet.", "guess"
    )
    announce_period_s: float = key(2.0, _SECONDS, "Seconds between records of a node.", "guess")
    record_ttl_s: float = key(15.0, _SECONDS, "Seconds until a record is forgotten.", "guess: several announce periods")


@dataclass(frozen=True, slots=True)
class AccessSpec:
    """Access to the run (docs/security.md)."""

    mode: str = key(
        "open",
        one_of("open", "invited"),
        "open: machines with an invite or an address; invited: only machines with an invite signed by its owner, or on"
        " the owner's access list.",
        "the simplest among friends",
    )
    recovery: str = key(
        "",
        matching(r"([0-9a-f]{64})?", "64 hex digits, or nothing"),
        "Public half of the recovery key, which replaces the owner's keys when one is stolen or lost"
        " (docs/bad-version.md).",
        "`swarmnode init` makes one",
    )


@dataclass(frozen=True, slots=True)
class TransportSpec:
    """The way in which nodes reach each other (docs/p2pd.md). The default is left out of the signed manifest."""

    kind: str = key(
        "libp2p",
        one_of("libp2p", *plugin.names(plugin.TRANSPORTS)),
        "libp2p: over TCP, through p2pd, with relays for machines that let nothing in; or one of an installed package"
        " (iroh: docs/p2pd.md).",
        "measured: docs/p2pd.md",
    )


@dataclass(frozen=True, slots=True)
class EvaluationSpec:
    """Measurements of each checkpoint by the owner's archive, beside the validation loss."""

    sets: tuple[str, ...] = key(
        (),
        list_of(path(), 16),
        "Texts beside the run's own held-out part: files or folders below the data folder of the machine that keeps"
        " the archive. Each gives nats per token.",
        "none: the run's own held-out part is always measured",
    )
    prompts: tuple[str, ...] = key(
        (), list_of(text(), 16), "Texts that each checkpoint continues; the page shows the continuations.", "none"
    )
    prompt_tokens: int = key(
        48,
        whole(1, 1024),
        "Tokens of a continuation, always the most likely ones.",
        "guess: two or three lines of text",
    )


_LINE = matching(r"[ -~\u00a1-\u1fff\u3001-\ud7ff]{0,240}", "one line of at most 240 characters")


@dataclass(frozen=True, slots=True)
class AboutSpec:
    """Facts that people read before they join; the page shows them. Empty ones are left out of the signed manifest."""

    by: str = key("", _LINE, "Who runs this, and where to ask.", "none")
    why: str = key("", _LINE, "What the model is for.", "none")
    data: str = key("", _LINE, "What it is trained on, in words.", "none")
    licence: str = key("", _LINE, "The licence under which the model is given away.", "none")
    page: str = key(
        "",
        matching(r"(https?://[A-Za-z0-9.:-]{1,100}(/[A-Za-z0-9._~-]{1,60}){0,8}/?)?", "empty, or a http(s) address"),
        "Where the coordinator's page is; `join` shows each machine its own place there.",
        "none",
    )


@dataclass(frozen=True, slots=True)
class Manifest:
    """A training job. `Manifest()` is the demo."""

    name: str = key(
        "swarm",
        matching(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", "1 to 64 letters, digits, dots, dashes, underscores"),
        "Name of the run, for people; the run's id is the hash of this whole manifest and of its owner.",
        "any will do",
    )
    seed: int = key(0, whole(0, (1 << 63) - 1), "Seed of everything random in the run.", "any will do")
    model: ModelSpec = field(default_factory=ModelSpec)
    pipeline: PipelineSpec = field(default_factory=PipelineSpec)
    base: BaseSpec = field(default_factory=BaseSpec)
    data: DataSpec = field(default_factory=DataSpec)
    inner: InnerSpec = field(default_factory=InnerSpec)
    gossip: GossipSpec = field(default_factory=GossipSpec)
    training: TrainingSpec = field(default_factory=TrainingSpec)
    checkpoint: CheckpointSpec = field(default_factory=CheckpointSpec)
    limits: LimitsSpec = field(default_factory=LimitsSpec)
    recovery: RecoverySpec = field(default_factory=RecoverySpec)
    access: AccessSpec = field(default_factory=AccessSpec)
    transport: TransportSpec = field(default_factory=TransportSpec)
    evaluation: EvaluationSpec = field(default_factory=EvaluationSpec)
    about: AboutSpec = field(default_factory=AboutSpec)


@dataclass(frozen=True, slots=True)
class Field:
    """A key: `table` is "" for the top level. `origin` signs the default (paper, measured or guess)."""

    table: str
    key: str
    check: ValueCheck
    meaning: str
    origin: str

    @property
    def name(self) -> str:
        return f"{self.table}.{self.key}" if self.table else self.key


def _fields(table: str, spec: type) -> list[Field]:
    return [Field(table, f.name, **f.metadata) for f in dataclasses.fields(spec) if f.metadata]


_SPECS: dict[str, type] = {
    f.name: type(getattr(Manifest(), f.name)) for f in dataclasses.fields(Manifest) if not f.metadata
}
TABLES = {table: " ".join((spec.__doc__ or "").split()) for table, spec in _SPECS.items()}
FIELDS = (*_fields("", Manifest), *(each for table, spec in _SPECS.items() for each in _fields(table, spec)))
BY_NAME = {each.name: each for each in FIELDS}


@dataclass(frozen=True, slots=True)
class Constant:
    """A field of earlier manifests that has one `value` in all runs. `signed`: it stands in canonical bytes."""

    value: Value
    signed: bool = True


CONSTANTS = {
    "data.field": Constant("text"),
    "data.paths": Constant(()),
    "data.validation_fraction": Constant(0.02),
    "evaluation.tasks": Constant(()),
    "gossip.rounds": Constant("even"),
    "inner.inner_batch_end": Constant(0),
    "pipeline.epsilon": Constant(PipelineSpec().epsilon),
    "recovery.itinerary": Constant("straight"),
    "recovery.snapshot_bytes_max": Constant(RecoverySpec().snapshot_bytes_max),
    "recovery.snapshot_part": Constant(RecoverySpec().snapshot_part, signed=False),
    "recovery.snapshot_rounds": Constant(64),
    "recovery.snapshot_seconds": Constant(RecoverySpec().snapshot_seconds, signed=False),
    "recovery.snapshot_share": Constant(RecoverySpec().snapshot_share, signed=False),
    "recovery.while_lost": Constant("wait"),
    "training.experts_trained": Constant(0),
    "training.method": Constant("lora"),
    "training.perturbation": Constant(1e-3),
}
"""A manifest that has such a field with another value is refused. Runs that were signed before stay the same, and nodes
of earlier versions read those signed now."""
