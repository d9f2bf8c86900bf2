"""The values of a manifest, frozen. Meanings, ranges and origins of the defaults are in field.py."""

from __future__ import annotations

from dataclasses import dataclass, field

BYTES_END = 0
"""End of documents with data.tokenizer = "bytes": a byte that text does not contain."""

OWN = "own"
"""gossip.alpha, beta and gamma: use the value of gossip.method (gossip_compat.py)."""

TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""training.targets: the matrices of a layer that adapters can change."""


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A decoder. Defaults: 1.0 M parameters of Llama's architecture, which two CPU cores train to readable text in
    minutes (measured)."""

    layers: int = 6
    width: int = 128
    heads: int = 4
    kv_heads: int = 2
    ffn: int = 352
    context: int = 128
    vocabulary: int = 256
    rope_theta: float = 10000.0
    norm_eps: float = 1e-5
    head_width: int = 0
    qkv_bias: bool = False
    output_bias: bool = False
    qk_norm: str = "none"
    norm_placement: str = "pre"
    tied: bool = False
    rope_scaling: str = "none"
    rope_factor: float = 1.0
    rope_original_context: int = 0
    rope_low: float = 1.0
    rope_high: float = 4.0
    rope_attention_factor: float = 0.0
    unrotated_layers: tuple[int, ...] = ()
    sliding_window: int = 0
    sliding_layers: tuple[int, ...] = ()
    experts: int = 0
    experts_active: int = 0
    expert_ffn: int = 0
    shared_expert_ffn: int = 0
    dense_layers: tuple[int, ...] = ()
    router_normalised: bool = False
    router_balance: float = 0.0
    architecture: str = "decoder"

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

    stages: int = 3
    memory_weight: float = 0.0
    boundary: str = "bf16"
    boundary_rank: int = 0
    epsilon: float = 0.1
    window_max: int = 64
    staleness_max: int = 1
    weight_prediction: str = "last_step"
    audit_share: float = 0.02
    validation_samples: int = 64
    validation_every_samples: int = 1024
    rebalance_period_s: float = 300.0
    rebalance_ratio: float = 1.1
    min_keep: int = 2

    @property
    def predicts_weights(self) -> bool:
        """Whether a forward whose gradient comes late uses the weights that the next inner step should leave."""
        return self.weight_prediction == "last_step"


@dataclass(frozen=True, slots=True)
class DataSpec:
    """The training text and its tokens."""

    source: str = "demo"
    paths: tuple[str, ...] = ()
    index: str = ""
    locations: tuple[str, ...] = ()
    end_token: int = -1
    documents: str = "joined"
    field: str = "text"
    tokenizer: str = "bytes"
    validation_fraction: float = 0.02
    block_samples: int = 64

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
        return self.source != "index" and (bool(self.paths) or self.tokenizer != "bytes")


@dataclass(frozen=True, slots=True)
class BaseSpec:
    """The pretrained model that the run starts from; without `index` it starts from random weights."""

    index: str = ""
    locations: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class InnerSpec:
    """Inner steps: the optimizer of one replica."""

    optimizer: str = "muon"
    learning_rate: float = 3e-3
    muon_learning_rate: float = 0.003
    muon_momentum: float = 0.9
    warmup_samples: int = 512
    decay: str = "cosine"
    decay_samples: int = 100_000
    cooldown_samples: int = 20_000
    learning_rate_min_ratio: float = 0.1
    average_share: float = 0.07
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.1
    clip_norm: float = 1.0
    microbatch: int = 8
    replica_batch_min: int = 2
    replica_rate: str = "root"
    inner_batch: int = 8
    inner_batch_max: int = 0
    inner_batch_end: int = 0


@dataclass(frozen=True, slots=True)
class GossipSpec:
    """Rounds: the averaging of a stage's replicas."""

    method: str = "average"
    alpha: float | str = OWN
    beta: float | str = OWN
    gamma: float | str = OWN
    codec: str = "modular4"
    acceptance: str = "clipped"
    group: int = 4
    fragments: int = 1
    round_samples: int = 64
    rounds: str = "even"
    round_seconds_min: float = 0.2
    uplink_share: float = 0.5


@dataclass(frozen=True, slots=True)
class TrainingSpec:
    """The trained part of the model, and the adapters' form if it is adapters."""

    kind: str = "pretrain"
    method: str = "lora"
    rank: int = 16
    alpha: float = 32.0
    targets: tuple[str, ...] = TARGETS
    base_format: str = "bf16"
    perturbation: float = 1e-3
    experts_trained: int = 0


@dataclass(frozen=True, slots=True)
class RecoverySpec:
    """Recovery of a stage whose replicas all died."""

    method: str = "copy"
    keepers: int = 2
    snapshot_rounds: int = 64
    snapshot_rounds_max: int = 256
    snapshot_bytes_max: int = 4 << 30
    itinerary: str = "straight"
    while_lost: str = "wait"


@dataclass(frozen=True, slots=True)
class CheckpointSpec:
    """Location and frequency of checkpoints of the whole run."""

    url: str = ""
    every_rounds: int = 160
    keep: int = 3


@dataclass(frozen=True, slots=True)
class LimitsSpec:
    """Bounds that every node of the run keeps."""

    microbatch_timeout_s: float = 120.0
    hop_timeout_min_s: float = 5.0
    in_flight_max: int = 8
    tape_bytes_max: int = 256 << 20
    frame_bytes_max: int = 1 << 30
    exchange_timeout_s: float = 20.0
    announce_period_s: float = 2.0
    record_ttl_s: float = 15.0


@dataclass(frozen=True, slots=True)
class AccessSpec:
    """Access to the run."""

    mode: str = "open"


@dataclass(frozen=True, slots=True)
class EvaluationSpec:
    """The evaluation of each checkpoint that an archive makes."""

    sets: tuple[str, ...] = ()
    tasks: tuple[str, ...] = ()
    prompts: tuple[str, ...] = ()
    prompt_tokens: int = 48


@dataclass(frozen=True, slots=True)
class Manifest:
    """A training job. `Manifest()` is the demo."""

    name: str = "swarm"
    seed: int = 0
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
    evaluation: EvaluationSpec = field(default_factory=EvaluationSpec)
