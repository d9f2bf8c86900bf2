"""The fields of a manifest that say what is trained and how: model, pipeline, data, inner steps, gossip."""

from __future__ import annotations

from swarmnode.manifest import meeting
from swarmnode.manifest.check import COUNT_MAX, Field, matching, odd, one_of, path, paths, real, text, whole, word_or
from swarmnode.manifest.spec import OWN

LAYERS_MAX = 512  # guess: GPT-3 has 96; into stages they are cut within a second (model/split.py)
SEED_MAX = (1 << 63) - 1

_LLAMA = "LLaMA, arXiv 2302.13971, section 2"
_MEASURED = "measured: this size trains at 10 000 tokens/s on one CPU thread"

TRAINING_FIELDS: tuple[Field, ...] = (
    Field(
        "",
        "name",
        matching(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", "1 to 64 letters, digits, dots, dashes, underscores"),
        "Name of the run, for people; the run's id is the hash of this whole manifest and of its owner.",
        "guess",
    ),
    Field("", "seed", whole(0, SEED_MAX), "Seed of everything random in the run.", "guess"),
    Field("model", "layers", whole(1, LAYERS_MAX), "Decoder layers, cut into stages.", _MEASURED),
    Field("model", "width", whole(2, 1 << 20), "Width of the residual stream.", _MEASURED),
    Field("model", "heads", whole(1, 4096), "Attention heads; divides width.", _MEASURED),
    Field("model", "kv_heads", whole(1, 4096), "Heads of keys and values; divides heads.", "guess: half of heads"),
    Field("model", "ffn", whole(1, 1 << 22), "Inner width of SwiGLU.", "8/3 of width, rounded up to 32, as " + _LLAMA),
    Field("model", "context", whole(1, 1 << 24), "Tokens of a sample.", _MEASURED),
    Field("model", "vocabulary", whole(2, 1 << 24), "Token ids; 256 for the tokenizer bytes.", "the bytes there are"),
    Field("model", "rope_theta", real(1.0, 1e12), "Base of the rotary embedding.", "RoFormer, arXiv 2104.09864, 3.2.2"),
    Field(
        "model", "norm_eps", real(0.0, 0.1, above=True), "Added inside RMSNorm.", "Llama 2's published configuration"
    ),
    Field(
        "pipeline",
        "stages",
        whole(1, LAYERS_MAX),
        "Cuts of consecutive layers; at most layers.",
        "the demo: 3 x 2 nodes",
    ),
    Field(
        "pipeline",
        "boundary",
        one_of("bf16", "fp32", "int8", "fp8", "subspace"),
        "Numbers in which activations and gradients travel between stages; int8 and fp8: with a step for each 64;"
        " subspace: pipeline.boundary_rank bf16 numbers a token, for which what is added to the stream is kept in a"
        " frozen subspace and the token table does not learn.",
        "guess",
    ),
    Field(
        "pipeline",
        "boundary_rank",
        whole(0, 1 << 20),
        "k: dimensions of the subspace that the stream is kept in; 0 without one.",
        "no subspace",
    ),
    Field("pipeline", "epsilon", real(0.0, 1.0), "Share of hops routed uniformly, so that routes mix.", "guess"),
    Field(
        "pipeline",
        "window_max",
        whole(1, 65_536),
        "Microbatches a feeder keeps under way, at most; staleness_max mostly allows fewer.",
        "guess",
    ),
    Field(
        "pipeline",
        "staleness_max",
        whole(0, 1024),
        "Inner steps that a replica may take between the forward and the backward of a microbatch. Feeders keep so few"
        " under way, and replicas put off their steps; an older gradient is not added.",
        "measured: three steps cost 0.4 nat on the replica bench, two 0.25 in the demo's swarm",
    ),
    Field(
        "pipeline",
        "audit_share",
        real(0.0, 1.0),
        "Share of a replica's answers that are done again by a second one and compared, once it has been right for a"
        " while; 0: answers are believed, and not signed.",
        "guess: costs a replica as much of its arithmetic; see docs/security.md",
    ),
    Field(
        "pipeline",
        "validation_samples",
        whole(1, 1 << 20),
        "Held-out samples in one validation, of the running mean where there is one (inner.average_share).",
        "guess",
    ),
    Field(
        "pipeline",
        "validation_every_samples",
        whole(1, COUNT_MAX),
        "Samples of the whole run between two validations; a round may be longer.",
        "guess: two feeders then spend 4 % of the demo's arithmetic on it",
    ),
    Field(
        "pipeline",
        "rebalance_period_s",
        real(0.0, 86_400.0),
        "Seconds between two looks whether a node should move to a needier stage; 0: nobody moves.",
        "SWARM, arXiv 2301.11913, section 4.4",
    ),
    Field(
        "pipeline",
        "rebalance_ratio",
        real(1.0, 100.0),
        "A node moves when the fastest stage is so many times as fast as the slowest.",
        "guess",
    ),
    Field("pipeline", "min_keep", whole(1, 65_536), "Replicas each stage should have before speed counts.", "guess"),
    Field(
        "data",
        "source",
        one_of("python-stdlib", "text", "jsonl", "shards"),
        "python-stdlib: the sources of this interpreter's standard library; text: files and folders; jsonl: an object"
        " a line; shards: already tokens.",
        "real text on every machine",
    ),
    Field(
        "data",
        "paths",
        paths(),
        "Files or folders, empty for python-stdlib. They lie below the folder that each machine's user names"
        " (--data-root; of `up` the run's folder), or nothing is opened.",
        "none needed",
    ),
    Field("data", "field", text(), "jsonl: the key that holds the text.", "the usual name"),
    Field(
        "data",
        "tokenizer",
        path(),
        'bytes, or a Hugging Face tokenizer.json below the same folder ("./bytes" for a file called bytes).',
        "nothing to download",
    ),
    Field(
        "data",
        "validation_fraction",
        real(0.0, 0.5, above=True),
        "Share of the documents, chosen by their hash, that is held out and never trained on.",
        "guess",
    ),
    Field("data", "block_samples", whole(1, 1 << 20), "Samples a feeder takes at a time.", "guess"),
    Field(
        "inner",
        "optimizer",
        one_of("muon", "adamw"),
        "The optimizer of a replica; muon: of matrices inside layers, and AdamW for embedding, head and norms.",
        "Muon keeps more of what it learns under averaging, arXiv 2505.23725",
    ),
    Field("inner", "learning_rate", real(0.0, 10.0, above=True), "Peak learning rate of AdamW.", _MEASURED),
    Field(
        "inner",
        "muon_learning_rate",
        real(0.0, 10.0, above=True),
        "Peak learning rate of Muon, in units in which an element's step is as large as AdamW's (arXiv 2502.16982).",
        "measured: `swarmnode bench learning`",
    ),
    Field(
        "inner",
        "muon_momentum",
        real(0.0, 1.0, below=True),
        "Muon: decay of the mean gradient.",
        "Jordan et al., Muon, 2024",
    ),
    Field("inner", "warmup_samples", whole(0, COUNT_MAX), "Samples of the whole run until the peak.", "guess"),
    Field(
        "inner",
        "decay",
        one_of("cosine", "linear", "wsd", "constant"),
        "Course of the learning rate from the end of warm-up to inner.decay_samples; linear: best to a least ratio of 0"
        " (arXiv 2502.15938); wsd: at its peak until the last inner.cooldown_samples, then down as 1 - sqrt"
        " (arXiv 2404.06395, 2405.18392); constant: no end need be known.",
        _LLAMA,
    ),
    Field("inner", "decay_samples", whole(1, COUNT_MAX), "Samples of the whole run until the rate is least.", "guess"),
    Field(
        "inner",
        "cooldown_samples",
        whole(1, COUNT_MAX),
        'inner.decay = "wsd": samples of the whole run over which the rate falls, the last before inner.decay_samples.',
        "arXiv 2405.18392, section 3: a fifth of inner.decay_samples",
    ),
    Field("inner", "learning_rate_min_ratio", real(0.0, 1.0), "Least learning rate, as a share of the peak.", _LLAMA),
    Field(
        "inner",
        "average_share",
        real(0.0, 0.5),
        "Mean age of the weights in the running mean that each replica keeps of them for `export`, as a share of the"
        " run's samples so far; 0: none is kept. It takes 4 bytes a parameter (arXiv 2507.17634, 2312.02696).",
        "measured: `swarmnode bench learning`, plain runs: .07 to .08 nat less than the last weights",
    ),
    Field("inner", "beta1", real(0.0, 1.0, below=True), "AdamW: decay of the mean.", _LLAMA),
    Field("inner", "beta2", real(0.0, 1.0, below=True), "AdamW: decay of the mean square.", _LLAMA),
    Field("inner", "eps", real(0.0, 1.0, above=True), "AdamW: added to the divisor.", "PyTorch's own default"),
    Field("inner", "weight_decay", real(0.0, 10.0), "AdamW: decoupled weight decay.", _LLAMA),
    Field("inner", "clip_norm", real(0.0, 1e6, above=True), "c: each stage clips to c / sqrt(stages).", _LLAMA),
    Field(
        "inner",
        "microbatch",
        whole(1, 65_536),
        "Samples that travel together, at most; feeders choose from measurement (docs/methods.md).",
        _MEASURED,
    ),
    Field(
        "inner",
        "replica_batch_min",
        whole(1, 65_536),
        "Samples that a replica steps on, at least: where a stage has many replicas, each steps on its share of"
        " inner_batch. Steps on fewer cost more time a sample.",
        "measured: four replicas a stage of the demo learn 0.08 nat more with 2 than with 4",
    ),
    Field(
        "inner",
        "inner_batch",
        whole(1, 1 << 24),
        "Samples that the replicas of a stage average between two inner steps, all together: the global batch. Each"
        " steps on its share, at least replica_batch_min.",
        "measured: `swarmnode bench learning`",
    ),
    Field(
        "inner",
        "inner_batch_max",
        whole(0, 1 << 24),
        "Samples to which inner batches may grow so that machines on slow lines stay busy while no gradient is too old;"
        " the learning rate grows by the root of it. 0: as inner_batch. At most the critical batch (arXiv 1812.06162).",
        "no growth: larger batches learn less from a sample",
    ),
    Field(
        "inner",
        "inner_batch_end",
        whole(0, 1 << 24),
        "Samples a replica averages from inner.decay_samples on; before, as the square root of the run's samples where"
        " that is more than inner.inner_batch (arXiv 2410.21676); 0: it does not grow.",
        "measured on no run yet: off",
    ),
    Field(
        "gossip",
        "method",
        one_of(*meeting.METHODS),
        "The outer optimizer (docs/methods.md); average: no momentum; diloco to edit: pseudo-gradients, in groups of"
        " the whole stage (gossip.group = 0); desloc: AdamW's moments, too; none: replicas never meet.",
        "NoLoCo, arXiv 2506.10911",
    ),
    Field(
        "gossip",
        "alpha",
        word_or(OWN, real(0.0, 1.0, below=True)),
        "Momentum of the outer step; own: what belongs to the method (docs/methods.md). Not of average, sparseloco,"
        " keeping and desloc, which have none.",
        "each method's paper",
    ),
    Field(
        "gossip",
        "beta",
        word_or(OWN, real(0.0, 2.0)),
        "Outer learning rate: weight of the mean pseudo-gradient; own: what belongs to the method. Not of average,"
        " keeping and desloc.",
        "each method's paper",
    ),
    Field(
        "gossip",
        "gamma",
        word_or(OWN, real(0.0, 2.0)),
        "noloco: pull towards the partner's slow weights; own: beta.",
        "the code published with NoLoCo",
    ),
    Field(
        "gossip",
        "codec",
        one_of(*meeting.CODECS),
        "Numbers in which weights travel between replicas; modular: bits a weight, nearest to the receiver's own; needs"
        " gossip.gamma = gossip.beta. From e3m0 on: of pseudo-gradients, for methods that take them.",
        "measured: 4 seeds, 0.002 nat better than fp32 (spread 0.008) at 0.55 byte a parameter",
    ),
    Field(
        "gossip",
        "acceptance",
        one_of("all", "clipped", "guarded"),
        "What is believed of a partner's packet: all: whatever is well-formed; clipped: no farther than usual; guarded:"
        " less, too, of a peer whose packets keep undoing what the stage learned (swarmnode/gossip/robust.py).",
        "measured: `swarmnode bench attack`; clipped costs .04 to .07 nat under a sign flip by a quarter, guarded .03"
        " to .06",
    ),
    Field(
        "gossip",
        "group",
        whole(0, 8),
        "Replicas that meet in a round: 2: pairs; 3 to 8; 0: all of the stage. Whoever came before"
        " limits.exchange_timeout_s counts.",
        "NoLoCo, arXiv 2506.10911",
    ),
    Field(
        "gossip",
        "fragments",
        odd(1, meeting.FRAGMENTS_MAX),
        "F: a round is about each F-th block of the weights only, F rounds about all of them; 1: all in each round. "
        "Odd, so that replicas that meet at every second or fourth round come to all of them. noloco and average.",
        "whole packets",
    ),
    Field(
        "gossip",
        "round_samples",
        whole(1, COUNT_MAX),
        "Samples of the whole run in a round.",
        "measured: `swarmnode bench learning`; eight inner steps of the demo",
    ),
    Field(
        "gossip",
        "rounds",
        one_of("even", "qsr"),
        "At which rounds replicas meet; even: at each; qsr: at every second, fourth, ... (at most 64th) as the learning"
        " rate falls, by the square of its peak over it (arXiv 2310.14423).",
        "measured on no run yet: the simpler one",
    ),
    Field("gossip", "round_seconds_min", real(0.0, 86_400.0), "Seconds between rounds, at least.", "guess"),
    Field(
        "gossip",
        "uplink_share",
        real(0.0, 1.0, above=True),
        "Share of a machine's line up that packets of rounds may take; where they would take more, the machine meets at"
        " every second round only, or fourth, ... The line is what it was seen to carry.",
        "guess: the rest is for activations",
    ),
)
