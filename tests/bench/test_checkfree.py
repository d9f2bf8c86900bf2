"""CheckFree's experiment at a size of seconds: what is reckoned, and that every way of going on trains."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from swarmnode.bench.method import checkfree
from swarmnode.bench.method.checkfree import CheckfreeRun, Death, ReplicaRows, at_time, deaths, reached, rolled_back
from swarmnode.errors import UsageError

SIZE = replace(checkfree.PRESETS["tiny"][0], width=8, ffn=16, context=8, batch=2)


def test_roll_back_repeats_what_came_after_the_checkpoint() -> None:
    assert rolled_back(5, []) == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]
    wall = rolled_back(250, [Death(130, 2)])
    assert wall[100] == 100.0
    # Steps 101 to 130 are done, the last in vain; after the standstill they come again.
    assert wall[101] == 130 + checkfree.DOWN_STEPS + 1
    assert wall[250] == 130 + checkfree.DOWN_STEPS + 150


def test_deaths_are_the_same_for_a_seed_and_spare_neighbours() -> None:
    found = deaths(3, 0.2, 200, 6)
    assert found == deaths(3, 0.2, 200, 6) != deaths(4, 0.2, 200, 6)
    assert len(found) > 50
    for one in found:
        assert not any(o.step == one.step and abs(o.stage - one.stage) == 1 for o in found)


def test_curves_are_read_between_their_points() -> None:
    assert at_time([0, 10], [4.0, 2.0], 5) == 3.0
    assert reached([0, 10, 20, 30], [4.0, 2.0, 2.5, 1.0], 2.2) == 30
    assert reached([0, 10], [4.0, 3.0], 2.0) == math.inf


def test_a_death_touches_one_stage_of_one_row() -> None:
    ways = [
        ("fault-free", 0.0),
        ("copy", 0.5),
        ("average", 0.5),
        ("swapped", 0.5),
        ("identity", 0.5),
        ("checkfree+", 0.5),
    ]
    rows = ReplicaRows(CheckfreeRun(SIZE, 10, 0), ways)
    tokens = torch.randint(0, 256, (2, 9), generator=torch.Generator().manual_seed(1))
    rows.learn(1, [tokens, tokens])
    before = rows.theta.detach().clone()
    for row in range(1, len(ways)):
        rows.die(row, 2, 2)
    here = rows.spans[2]
    outside = torch.ones(before.shape[1], dtype=torch.bool)
    outside[here] = False
    assert torch.equal(rows.theta[:, outside], before[:, outside]) and torch.equal(rows.theta[0], before[0])
    assert torch.equal(rows.theta[1, here], before[1, rows.spans[1]]), "copy: the stage before"
    assert torch.equal(rows.theta[3, here], before[3, rows.spans[1]]), "swapped: its partner"
    assert rows.count[:, 2].tolist() == [1, 0, 0, 0, 0, 0] and rows.count[:, 1].tolist() == [1] * 6
    rows.die(5, 0, 2)
    assert torch.equal(rows.theta[5, rows.spans[0]], rows.theta[5, rows.spans[1]]), (
        "checkfree+: the second for the first"
    )
    rows.learn(2, [tokens, tokens])
    assert rows.theta.isfinite().all()


def test_every_way_trains(monkeypatch: pytest.MonkeyPatch) -> None:
    draw = np.random.Generator(np.random.Philox(key=1))
    text = np.tile(draw.integers(32, 64, 61), 300).astype(np.uint8)
    monkeypatch.setattr(checkfree, "read_text", lambda path: (text, text[:3000]))
    monkeypatch.setattr(checkfree, "RATES", (0.02,))
    monkeypatch.setitem(checkfree.PRESETS, "tiny", (replace(SIZE, warmup=5, learning_rate=1e-2), 40, 1))
    found = checkfree.run("tiny", jobs=1)
    names = [row["way"] for row in found["ways"]]
    assert names == ["fault-free", "checkpoint", "redundant", *checkfree.WAYS]
    first = found["lives"][0]["curves"][0][0]
    nats = {row["way"]: row["nats at the same wall time"] for row in found["ways"]}
    assert nats["fault-free"] < first - 0.02 and all(value < first + 0.1 for value in nats.values()), (first, nats)
    with pytest.raises(UsageError, match="preset"):
        checkfree.run("huge")
