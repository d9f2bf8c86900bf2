"""Learning efficiency: the formula is the fit of the measured table, and says what the measurements say."""

import math
from dataclasses import dataclass, replace

import numpy as np
import pytest

from swarmnode.manifest import Manifest
from swarmnode.manifest.recipe import law_batch
from swarmnode.planner.learning_efficiency import FIT, apart, efficiency, likely, of_batch, of_replicas

TOKENS = 2.5e9


@dataclass(frozen=True, slots=True)
class Row:
    """`replicas` that each take `own` tokens a step of a run of `tokens`, and meet every `steps_of_round` steps in
    groups of `group` (0: all), learn `efficiency` of what one replica with all tokens of a step learns."""

    source: str
    replicas: int
    own: int
    tokens: float
    steps_of_round: float
    efficiency: float
    group: int = 4


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
    Row(_MULOCO, 16, 262_144, 3.0e9, 30, 0.69, 0),
    Row(_MULOCO, 16, 262_144, 1.8e10, 30, 0.74, 0),
    Row(_MULOCO, 16, 262_144, 6.2e10, 30, 0.69, 0),
    Row(_MULOCO, 16, 262_144, 3.0e11, 30, 0.64, 0),
)


def test_the_formula_is_the_fit_of_the_table() -> None:
    lost = [math.log((1.0 / row.efficiency - 1.0) / apart(row.replicas, row.group)) for row in MEASURED]
    rows = [
        [
            1.0,
            math.log(row.replicas - 1),
            math.log(law_batch(row.tokens) / row.own),
            math.log(row.steps_of_round),
            -math.log(row.tokens / (row.replicas * row.own)),
        ]
        for row in MEASURED
    ]
    found = np.linalg.lstsq(np.array(rows), np.array(lost), rcond=None)[0]
    assert list(FIT) == pytest.approx(list(found), abs=0.02)
    for row in MEASURED:
        reckoned = of_replicas(row.replicas, row.own, row.tokens, row.steps_of_round, row.group)
        assert 0.4 < (1.0 / reckoned - 1.0) / (1.0 / row.efficiency - 1.0) < 2.5, row


@pytest.mark.parametrize(("times", "measured"), [(0.33, 1.0), (1.33, 1.0), (2.67, 0.92), (5.33, 0.62)])
def test_a_batch_costs_about_what_was_measured(times: float, measured: float) -> None:
    assert of_batch(times * law_batch(983_040), 983_040) == pytest.approx(measured, abs=0.09)


@pytest.mark.parametrize(
    ("method", "codec", "replicas", "over"),
    [
        ("average", "modular4", 8, (1.7, 1.4)),
        ("average", "modular4", 1, (1.0, 1.0)),
        ("gradient", "int8", 8, (1.0, 1.0)),
    ],
)
def test_local_steps_are_given_with_their_known_error(
    method: str, codec: str, replicas: int, over: tuple[float, float]
) -> None:
    run = Manifest(
        gossip=replace(Manifest().gossip, method=method, codec=codec, group=0),
        pipeline=replace(Manifest().pipeline, stages=1),
    )
    assert likely(run, replicas, 0.5) == tuple(pytest.approx(0.5 / one) for one in over)


def test_more_replicas_shorter_shares_longer_rounds_and_stages_learn_less() -> None:
    assert of_replicas(1, 1e5, TOKENS, 8) == 1.0
    for less, more in (((4, 1e5, 8), (16, 1e5, 8)), ((4, 1e4, 8), (4, 1e5, 8)), ((4, 1e5, 8), (4, 1e5, 500))):
        learned = [of_replicas(replicas, own, TOKENS, steps) for replicas, own, steps in (less, more)]
        assert (learned[0] < learned[1]) == (less[1] < more[1])
    run = Manifest(
        inner=replace(Manifest().inner, inner_batch=512), gossip=replace(Manifest().gossip, round_samples=4096)
    )
    whole = replace(run, pipeline=replace(run.pipeline, stages=1))
    assert efficiency(run, 1, TOKENS) < efficiency(whole, 1, TOKENS) <= 1.0
    apart = replace(whole, gossip=replace(whole.gossip, method="none"))
    assert efficiency(apart, 8, TOKENS) == pytest.approx(efficiency(whole, 1, TOKENS) / 8)
    grown = replace(whole, inner=replace(whole.inner, inner_batch_max=1 << 15))
    assert efficiency(grown, 1, TOKENS) < efficiency(whole, 1, TOKENS)
