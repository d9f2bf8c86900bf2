"""The manifest fields of training: pipeline, data, inner steps, gossip."""

from __future__ import annotations

from swarmnode.manifest import gossip_compat
from swarmnode.manifest.check import COUNT_MAX, Field, matching, odd, one_of, path, paths, real, text, whole, word_or
from swarmnode.manifest.location import locations
from swarmnode.manifest.model_field import LAYERS_MAX, MODEL_FIELDS
from swarmnode.manifest.spec import OWN

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
    *MODEL_FIELDS,
    Field(
        "pipeline",
        "stages",
        whole(1, LAYERS_MAX),
        "Stages of consecutive layers; at most layers.",
        "the demo: 3 x 2 nodes",
    ),
    Field(
        "pipeline",
        "memory_weight",
        real(0.0, 1.0),
        "Weight of the parameters against the arithmetic when layers are cut into stages; 0: stages take equally long;"
        " 1: they are equally large, so that smaller machines can hold each.",
        "the slowest stage sets the pace",
    ),
    Field(
        "pipeline",
        "boundary",
        one_of("bf16", "fp32", "int8", "fp8", "subspace"),
        "Number format of activations and gradients between stages; int8 and fp8: with a step for each 64;"
        " subspace: pipeline.boundary_rank bf16 numbers a token, with layer outputs restricted to a"
        " frozen subspace and a frozen token table.",
        "guess",
    ),
    Field(
        "pipeline",
        "boundary_rank",
        whole(0, 1 << 20),
        "k: dimensions of the subspace; 0 without one.",
        "no subspace",
    ),
    Field("pipeline", "epsilon", real(0.0, 1.0), "Share of hops routed uniformly, so that routes mix.", "guess"),
    Field(
        "pipeline",
        "window_max",
        whole(1, 65_536),
        "Most microbatches that a feeder keeps in flight; staleness_max usually allows fewer.",
        "guess",
    ),
    Field(
        "pipeline",
        "staleness_max",
        whole(0, 1024),
        "Inner steps that a replica may take between the forward and the backward of a microbatch. Feeders limit those"
        " in flight, and replicas postpone their steps; an older gradient is not added.",
        "measured: three steps cost 0.4 nat on the replica bench, two 0.25 in the demo's swarm",
    ),
    Field(
        "pipeline",
        "weight_prediction",
        one_of("last_step", "off"),
        "last_step: in float32, a forward whose gradient will come after the next inner step uses the weights expected"
        " by then, the present ones and the last step once more.",
        "measured: docs/methods.md",
    ),
    Field(
        "pipeline",
        "audit_share",
        real(0.0, 1.0),
        "Share of a replica's answers that a second one recomputes for comparison, once it has been right for a"
        " while; 0: no audits and no signatures.",
        "guess: costs a replica as much of its arithmetic; see docs/security.md",
    ),
    Field(
        "pipeline",
        "validation_samples",
        whole(1, 1 << 20),
        "Held-out samples in one validation, of the running mean of the weights if there is one (inner.average_share).",
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
        "Seconds between two checks whether a node should move to a stage that needs it more; 0: no moves.",
        "SWARM, arXiv 2301.11913, section 4.4",
    ),
    Field(
        "pipeline",
        "rebalance_ratio",
        real(1.0, 100.0),
        "Nodes move if the fastest stage is this many times as fast as the slowest.",
        "guess",
    ),
    Field("pipeline", "min_keep", whole(1, 65_536), "Replicas each stage should have before speed counts.", "guess"),
    Field(
        "base",
        "index",
        matching(r"(?:[0-9a-f]{64})?", '"" or the SHA-256 of a base index, 64 hex digits'),
        "SHA-256 of the pretrained model's base.json, which says where each parameter's numbers lie and holds the"
        ' hashes of all their chunks; "": the run starts from random weights.',
        "none needed",
    ),
    Field(
        "base",
        "locations",
        locations(models=True),
        "Sources of the model's files, besides members of the run that hold chunks of them.",
        "only members",
    ),
    Field(
        "data",
        "source",
        one_of("demo", "index", "text", "jsonl", "shards"),
        "demo: the corpus that comes with swarmnode, sources of Python 3.11.7's standard library; index: a data set of"
        " `swarmnode data make`, named by data.index and fetched by every feeder; the others read files on the"
        " node's disk: text: files and folders; jsonl: one object a line; shards: tokens.",
        "the same real text on every machine",
    ),
    Field(
        "data",
        "paths",
        paths(),
        "Files or folders, empty for demo and index. They must be below the folder that each machine's user names"
        " (--data-root; for `up` the run's folder).",
        "none needed",
    ),
    Field(
        "data",
        "index",
        matching(r"(?:[0-9a-f]{64})?", '"" or the SHA-256 of an index, 64 hex digits'),
        'SHA-256 of the data set\'s index.json, which holds the hashes of all its chunks; "" without data.source ='
        ' "index".',
        "none needed",
    ),
    Field(
        "data",
        "locations",
        locations(),
        "Sources of the data set's chunks, besides members of the run that hold some.",
        "only members",
    ),
    Field(
        "data",
        "end_token",
        whole(-1, (1 << 24) - 1),
        "The token that ends each document; -1: unknown. `init --data` copies it from the index.",
        "unknown for a tokenizer that the manifest only names",
    ),
    Field(
        "data",
        "documents",
        one_of("joined", "masked"),
        "joined: windows span several documents; masked: attention stays within a document, positions"
        " restart with each, and its first token is no target, as if each document were alone.",
        "guess: it costs nothing, and in long documents few windows cross an end",
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
        "Share of the documents, chosen by their hash, held out and never trained on.",
        "guess",
    ),
    Field("data", "block_samples", whole(1, 1 << 20), "Samples a feeder takes at a time.", "guess"),
    Field(
        "inner",
        "optimizer",
        one_of("muon", "adamw"),
        "The optimizer of a replica; muon: for matrices inside layers, with AdamW for embedding, head and norms.",
        "Muon keeps more of its progress under averaging, arXiv 2505.23725",
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
        "Muon: decay of the mean gradient. Runs of tens of thousands of steps may want 0.95 (Jordan et al., 2024).",
        "measured: docs/methods.md",
    ),
    Field("inner", "warmup_samples", whole(0, COUNT_MAX), "Samples of the whole run until the peak.", "guess"),
    Field(
        "inner",
        "decay",
        one_of("cosine", "linear", "wsd", "constant"),
        "Learning rate from the end of warm-up to inner.decay_samples; linear: best with a least ratio of 0"
        " (arXiv 2502.15938); wsd: constant until the last inner.cooldown_samples, then down as 1 - sqrt"
        " (arXiv 2404.06395, 2405.18392); constant: needs no known end.",
        _LLAMA,
    ),
    Field("inner", "decay_samples", whole(1, COUNT_MAX), "Samples of the whole run until the least rate.", "guess"),
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
        "Mean age of the weights in the running mean that each replica keeps for `export`, as a share of the"
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
        "Most samples of a microbatch; feeders choose by measurement (docs/methods.md).",
        _MEASURED,
    ),
    Field(
        "inner",
        "replica_batch_min",
        whole(1, 65_536),
        "Least samples of a replica's inner step: with many replicas per stage, each steps on its share of"
        " inner_batch. Smaller steps cost more time a sample.",
        "measured: four replicas a stage of the demo learn 0.08 nat more with 2 than with 4",
    ),
    Field(
        "inner",
        "replica_rate",
        one_of("root", "same"),
        "Learning rate of replicas that average: root: by the root of their number (at most 4) higher than that of one"
        " with the whole inner_batch, as averaging takes so much of a step's noise away; same: not higher.",
        "measured: early in the demo two replicas learn 0.03 nat more with root, four 0.11",
    ),
    Field(
        "inner",
        "inner_batch",
        whole(1, 1 << 24),
        "Samples that the replicas of a stage together average between two inner steps: the global batch. Each"
        " steps on its share, at least replica_batch_min.",
        "measured: `swarmnode bench learning`",
    ),
    Field(
        "inner",
        "inner_batch_max",
        whole(0, 1 << 24),
        "Samples to which inner batches may grow so that machines on slow links stay busy within staleness_max;"
        " the learning rate grows by the root of it. 0: as inner_batch. At most the critical batch (arXiv 1812.06162).",
        "no growth: larger batches learn less per sample",
    ),
    Field(
        "inner",
        "inner_batch_end",
        whole(0, 1 << 24),
        "Samples a replica averages from inner.decay_samples on; before, it grows as the root of the run's samples if"
        " that is more than inner.inner_batch (arXiv 2410.21676); 0: no growth.",
        "not measured on a run yet: off",
    ),
    Field(
        "gossip",
        "method",
        one_of(*gossip_compat.methods()),
        "The outer optimizer (docs/methods.md); average: no momentum; diloco to dion2: pseudo-gradients, in groups of"
        " the whole stage (gossip.group = 0); dion2: gradients, before Muon's step; desloc: also AdamW's moments; none:"
        " replicas never meet.",
        "NoLoCo, arXiv 2506.10911",
    ),
    Field(
        "gossip",
        "alpha",
        word_or(OWN, real(0.0, 1.0, below=True)),
        "Momentum of the outer step; own: the method's value (docs/methods.md). Not for average, sparseloco,"
        " partial_average and desloc, which have none.",
        "each method's paper",
    ),
    Field(
        "gossip",
        "beta",
        word_or(OWN, real(0.0, 2.0)),
        "Outer learning rate: weight of the mean pseudo-gradient; own: the method's value. Not for average,"
        " partial_average and desloc.",
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
        one_of(*gossip_compat.codecs()),
        "Number format of weights between replicas; modular: low bits, decoded near the receiver's own weights; needs"
        " gossip.gamma = gossip.beta. From e3m0 on: pseudo-gradients, for methods that use them.",
        "measured: 4 seeds, 0.002 nat better than fp32 (spread 0.008) at 0.55 byte a parameter",
    ),
    Field(
        "gossip",
        "acceptance",
        one_of("all", "clipped", "guarded"),
        "Acceptance of a partner's packet: all: every well-formed one; clipped: up to the usual distance; guarded:"
        " also less of a peer whose packets keep undoing the stage's progress (swarmnode/gossip/robust.py).",
        "measured: `swarmnode bench attack`; clipped costs .04 to .07 nat under a sign flip by a quarter, guarded .03"
        " to .06",
    ),
    Field(
        "gossip",
        "group",
        whole(0, 8),
        "Replicas that meet in a round: 2: pairs; 3 to 8; 0: all of the stage. Members that arrive before"
        " limits.exchange_timeout_s count.",
        "NoLoCo, arXiv 2506.10911",
    ),
    Field(
        "gossip",
        "fragments",
        odd(1, gossip_compat.FRAGMENTS_MAX),
        "F: a round averages only every F-th block of the weights, so F rounds cover all; 1: all in each round. "
        "Odd, so that replicas that meet at every second or fourth round reach all. For noloco, average and dion2.",
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
        "The rounds at which replicas meet; even: all; qsr: at every second, fourth, ... (at most 64th) as the learning"
        " rate falls, by the square of its peak over it (arXiv 2310.14423).",
        "not measured on a run yet: the simpler one",
    ),
    Field("gossip", "round_seconds_min", real(0.0, 86_400.0), "Least seconds between rounds.", "guess"),
    Field(
        "gossip",
        "uplink_share",
        real(0.0, 1.0, above=True),
        "Share of a machine's uplink for packets of rounds; if they need more, the machine meets only at"
        " every second round, or fourth, ... The uplink's rate is the highest observed one.",
        "guess: the rest is for activations",
    ),
)
