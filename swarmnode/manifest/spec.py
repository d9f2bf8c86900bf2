"""What a run is: the values of a manifest, frozen. Meanings, ranges and origins of the defaults are in field.py."""

from __future__ import annotations

from dataclasses import dataclass, field

OWN = "own"
"""gossip.alpha, beta and gamma: the value that belongs to gossip.method (meeting.py)."""


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A LLaMA-style decoder. Defaults: 1.0 M parameters, a size that two CPU cores train to readable bytes in minutes
    (measured, test-lab section 7)."""

    layers: int = 6
    width: int = 128
    heads: int = 4
    kv_heads: int = 2
    ffn: int = 352
    context: int = 128
    vocabulary: int = 256
    rope_theta: float = 10000.0
    norm_eps: float = 1e-5


@dataclass(frozen=True, slots=True)
class PipelineSpec:
    """How microbatches travel."""

    stages: int = 3
    boundary: str = "bf16"
    boundary_rank: int = 0
    epsilon: float = 0.1
    window_max: int = 64
    staleness_max: int = 1
    audit_share: float = 0.02
    validation_samples: int = 64
    validation_every_samples: int = 1024
    rebalance_period_s: float = 300.0
    rebalance_ratio: float = 1.1
    min_keep: int = 2


@dataclass(frozen=True, slots=True)
class DataSpec:
    """What text is read, and how it becomes tokens."""

    source: str = "python-stdlib"
    paths: tuple[str, ...] = ()
    field: str = "text"
    tokenizer: str = "bytes"
    validation_fraction: float = 0.02
    block_samples: int = 64

    @property
    def names_files(self) -> bool:
        """Whether whoever feeds the run needs files of its own machine, below the folder that its user names."""
        return bool(self.paths) or self.tokenizer != "bytes"


@dataclass(frozen=True, slots=True)
class InnerSpec:
    """Inner steps: the optimizer of one replica."""

    optimizer: str = "muon"
    learning_rate: float = 3e-3
    muon_learning_rate: float = 0.003
    muon_momentum: float = 0.95
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
    inner_batch: int = 8
    inner_batch_max: int = 0
    inner_batch_end: int = 0


@dataclass(frozen=True, slots=True)
class GossipSpec:
    """Rounds: how the replicas of a stage meet."""

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
class RecoverySpec:
    """How a stage whose replicas all died comes back (design section 7)."""

    method: str = "copy"
    keepers: int = 2
    snapshot_rounds: int = 64
    snapshot_rounds_max: int = 256
    snapshot_bytes_max: int = 4 << 30
    itinerary: str = "straight"
    while_lost: str = "wait"


@dataclass(frozen=True, slots=True)
class CheckpointSpec:
    """Where and how often the whole run is saved."""

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
    """Who may take part."""

    mode: str = "open"


@dataclass(frozen=True, slots=True)
class Manifest:
    """One training job. `Manifest()` is the demo."""

    name: str = "swarm"
    seed: int = 0
    model: ModelSpec = field(default_factory=ModelSpec)
    pipeline: PipelineSpec = field(default_factory=PipelineSpec)
    data: DataSpec = field(default_factory=DataSpec)
    inner: InnerSpec = field(default_factory=InnerSpec)
    gossip: GossipSpec = field(default_factory=GossipSpec)
    checkpoint: CheckpointSpec = field(default_factory=CheckpointSpec)
    limits: LimitsSpec = field(default_factory=LimitsSpec)
    recovery: RecoverySpec = field(default_factory=RecoverySpec)
    access: AccessSpec = field(default_factory=AccessSpec)
