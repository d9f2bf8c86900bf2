"""Measurements of one replica by its batch: the rows that the term for batches is held against
(learning_efficiency.py)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class BatchRow:
    """One replica with `batch` tokens a step learns `least` to `most` of what it learns with the best batch, in a run
    of `tokens`. Muon."""

    source: str
    tokens: float
    batch: int
    least: float
    most: float


_REPLICA_BENCH = "`bench gossip --replicas 1`, docs/learning.md, one seed"
_WITHIN = (
    "arXiv 2505.23725, github.com/bentherien/muloco-1 at 33cc333, assets/batch_size_k1_tokens.png: the largest power of"
    " two that ends within 1 % of the best loss, 150 M to 3.1 B parameters; nats by the law of LAW_B"
)
_CURVE = "the same, assets/hook_cbs.png: 3.1 B parameters, losses of 2.128 over 1.000, .9973, .9927 and .9772"
MEASURED = (
    BatchRow(_REPLICA_BENCH, 983_040, 2048, 1.0, 1.0),
    BatchRow(_REPLICA_BENCH, 983_040, 4096, 0.92, 0.92),
    BatchRow(_REPLICA_BENCH, 983_040, 8192, 0.62, 0.62),
    BatchRow(_WITHIN, 3.0e9, 1 << 19, 0.89, 1.0),
    BatchRow(_WITHIN, 3.0e9, 1 << 20, 0.0, 0.89),
    BatchRow(_WITHIN, 8.2e9, 1 << 20, 0.87, 1.0),
    BatchRow(_WITHIN, 8.2e9, 1 << 21, 0.0, 0.87),
    BatchRow(_WITHIN, 1.8e10, 1 << 21, 0.86, 1.0),
    BatchRow(_WITHIN, 1.8e10, 1 << 22, 0.0, 0.86),
    BatchRow(_WITHIN, 3.5e10, 1 << 22, 0.84, 1.0),
    BatchRow(_WITHIN, 3.5e10, 1 << 23, 0.0, 0.84),
    BatchRow(_CURVE, 6.2e10, 1 << 22, 0.95, 0.95),
    BatchRow(_CURVE, 6.2e10, 1 << 23, 0.87, 0.87),
    BatchRow(_CURVE, 6.2e10, 1 << 24, 0.65, 0.65),
)
