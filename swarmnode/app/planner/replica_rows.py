"""Measurements of replicas that average weights: the rows that the term for replicas is fitted to
(learning_efficiency.py)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Row:
    """`replicas` that each take `own` tokens a step of a run of `tokens`, and meet every `steps_of_round` steps in
    groups of `group` (0: all), learn `efficiency` of what one replica with all tokens of a step learns; `over_best`: of
    what it learns with the best batch, so that the efficiency of the batch is in it, too."""

    source: str
    replicas: int
    own: int
    tokens: float
    steps_of_round: float
    efficiency: float
    group: int = 4
    over_best: bool = False


_REPLICA_BENCH = "`bench gossip`, docs/learning.md, Many replicas of a stage; one replica with batches of 64 has .92"
_ONE_SCHEDULE = "`bench gossip --decay wsd`, docs/learning.md, Averaging before the step"
_PILOT = "the same network, WSD, rates tried by hand, one seed; a factor of two in samples is .13 nat there"
_SCALING = "`bench scaling`, docs/learning.md, one seed; in virtual time"
_LIVE = "`bench learning --replicas 1,2,4`, docs/learning.md; over one replica's .88"
_MULOCO = "MuLoCo with 16 workers over 1, github.com/bentherien/muloco-1 at 33cc333; nats by the law of LAW_B"
MEASURED = (
    Row(_REPLICA_BENCH, 4, 1024, 983_040, 8, 0.64),
    Row(_REPLICA_BENCH, 16, 256, 983_040, 8, 0.24),
    Row(_REPLICA_BENCH, 64, 64, 983_040, 8, 0.11),
    Row(_REPLICA_BENCH, 16, 256, 983_040, 2, 0.39),
    Row(_ONE_SCHEDULE, 4, 1024, 983_040, 8, 0.84),
    Row(_ONE_SCHEDULE, 4, 1024, 983_040, 4, 0.92),
    Row(_ONE_SCHEDULE, 16, 256, 983_040, 8, 0.39),
    Row(_ONE_SCHEDULE, 16, 256, 983_040, 4, 0.56),
    Row(_ONE_SCHEDULE, 16, 256, 983_040, 8, 0.30, 2),
    Row(_ONE_SCHEDULE, 16, 256, 983_040, 4, 0.41, 2),
    Row(_PILOT, 4, 1024, 983_040, 8, 0.64),
    Row(_PILOT, 4, 1024, 3_932_160, 8, 0.88),
    Row(_PILOT, 4, 1024, 3_932_160, 32, 0.70),
    Row(_PILOT, 4, 1024, 3_932_160, 96, 0.59),
    Row(_SCALING, 8, 512, 1_024_000, 3.5, 0.58),
    Row(_LIVE, 2, 512, 960_000, 8, 0.88),
    Row(_LIVE, 4, 256, 960_000, 8, 0.72),
    Row(_MULOCO, 16, 262_144, 3.0e9, 30, 0.69, 0, True),
    Row(_MULOCO, 16, 262_144, 1.8e10, 30, 0.74, 0, True),
    Row(_MULOCO, 16, 262_144, 6.2e10, 30, 0.69, 0, True),
    Row(_MULOCO, 16, 262_144, 3.0e11, 30, 0.64, 0, True),
)
