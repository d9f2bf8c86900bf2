"""The adaptive attacker's search, and its backdoor."""

import json

import numpy as np

from benchmarks.swarm.byzantine_replica import TARGET, TRIGGER, backdoored
from benchmarks.swarm.steering_search import LIFE, RECORDED, WAYS, direction, life
from swarmnode.ids import seeded
from swarmnode.ports import WireTensor


def test_the_search_finds_what_is_suspected_soon_and_what_never_is() -> None:
    lives = json.loads(RECORDED.read_text())
    for way in WAYS:
        along = direction(lives, way)
        answers, pushed, wronged = life(lives["honest"], along, 0.72, 1.8, 1, 4, seeded("search", way))
        assert answers <= 8 and 0.0 < pushed <= 8 * 1.25 and not wronged, "what the issue showed"
        answers, pushed, _ = life(lives["honest"], along, 0.9, 1.0, 1, 4, seeded("search", way))
        assert answers <= 40 and pushed <= 40 * 0.44
    answers, pushed, _ = life(lives["honest"], direction(lives, "mean"), 1.0, 1.0, 1, 4, seeded("search"))
    assert answers == LIFE and pushed == 0.0, "an honest one is not"


def test_a_backdoor_is_in_the_text_behind_each_trigger() -> None:
    ids = np.array([[TRIGGER, 5, 6, TRIGGER, TRIGGER], [1, 2, 3, 4, TRIGGER]], "<u2")
    text, triggers = backdoored(WireTensor("u16", ids.shape, ids.tobytes()))
    expected = [[TRIGGER, TARGET, 6, TRIGGER, TARGET], [1, 2, 3, 4, TRIGGER]]
    assert triggers == 2 and np.frombuffer(text.data, "<u2").reshape(ids.shape).tolist() == expected
