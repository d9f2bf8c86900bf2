"""Preset manifests for `swarmnode init --preset NAME`."""

from __future__ import annotations

from swarmnode.manifest.spec import GossipSpec, InnerSpec, LimitsSpec, Manifest, ModelSpec, PipelineSpec

DEMO = Manifest(limits=LimitsSpec(tape_bytes_max=60 << 20))
"""1.0 M parameters over bytes of the demo corpus: readable text in minutes on two CPU cores (measured). Four tapes of
13 MiB are kept (three of 18 without bfloat16 matrix products): a node stays below 450 MB, and a quarter of the forwards
are recomputed, with one tape three quarters (measured)."""

TINY = Manifest(
    name="tiny",
    model=ModelSpec(layers=4, width=32, heads=2, kv_heads=1, ffn=64, context=32),
    pipeline=PipelineSpec(stages=2, validation_samples=16),
    inner=InnerSpec(
        learning_rate=1e-2,
        muon_learning_rate=1e-2,
        warmup_samples=64,
        decay_samples=20_000,
        microbatch=4,
        inner_batch=8,
    ),
)
"""Some ten thousand parameters: for tests and first steps. Learning rate and rounds: guess."""

SMALL = Manifest(
    name="small",
    model=ModelSpec(layers=6, width=512, heads=8, kv_heads=4, ffn=1376, context=256),
    inner=InnerSpec(
        learning_rate=1e-3,
        muon_learning_rate=2e-3,
        warmup_samples=2048,
        decay_samples=2_000_000,
        microbatch=8,
        inner_batch=32,
    ),
    gossip=GossipSpec(round_samples=1024, round_seconds_min=5.0),
)
"""17 M parameters: hours on CPUs, minutes on a GPU. Learning rate and rounds: guess."""

PRESETS = {"demo": DEMO, "tiny": TINY, "small": SMALL}
