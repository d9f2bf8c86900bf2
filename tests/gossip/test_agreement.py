"""Whom disagreement speaks against, and how soon: on vectors made by chance."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest

from swarmnode.gossip.sequential_test import Agreement
from swarmnode.ids import seeded
from swarmnode.sequential_test import LIMIT, PEERS_MAX, WORST, share_kept

SIZE = 400


def told(
    tested: Agreement, signs: dict[str, float], common: float, rounds: int, chance: random.Random
) -> dict[str, list[float]]:
    """The kept shares of each peer's packets. In a round each replica learns `common` of what all learn, and noise;
    the packet has it times the sender's sign."""
    kept: dict[str, list[float]] = {name: [] for name in signs}
    for _ in range(rounds):
        draw = np.random.default_rng(chance.randrange(1 << 30))
        way = draw.standard_normal(SIZE)

        def learned(draw: np.random.Generator = draw, way: np.ndarray = way) -> np.ndarray:  # type: ignore[type-arg]
            return common * way + draw.standard_normal(SIZE)

        ours = learned()
        for name, sign in signs.items():
            gap = sign * learned() - ours
            against, _ = tested.heard(name, float(np.linalg.norm(ours)), float(np.linalg.norm(gap)), float(ours @ gap))
            kept[name].append(share_kept(against))
    return kept


@pytest.mark.parametrize("common", [0.0, 0.2, 0.5, 2.0])
@pytest.mark.parametrize("peers", [1, 3, 15])
def test_honest_packets_are_taken_whole_whatever_they_share(common: float, peers: int) -> None:
    kept = told(Agreement(), {f"p{i}": 1.0 for i in range(peers)}, common, 1000 // peers, seeded(common, peers))
    whole = [keep == 1.0 for keeps in kept.values() for keep in keeps]
    assert sum(whole) / len(whole) > 0.995


@pytest.mark.parametrize(("common", "most"), [(2.0, 3), (1.0, 4), (0.7, 8)])
def test_flipped_signs_are_refused_the_sooner_the_more_the_others_agree(common: float, most: int) -> None:
    for seed in range(3):
        tested, chance = Agreement(), seeded(common, seed)
        kept = told(tested, {"one": 1.0, "other": 1.0, "third": 1.0, "liar": -1.0}, common, 30, chance)
        assert 0.0 in kept["liar"][:most] and kept["liar"][-1] == 0.0, kept["liar"]
        assert min(kept["one"] + kept["other"] + kept["third"]) == 1.0
        assert tested.against("liar") <= WORST * LIMIT


def test_where_nobody_agrees_nobody_is_blamed_and_the_repentant_are_taken_again() -> None:
    tested = Agreement()
    assert min(told(tested, {"one": 1.0, "liar": -1.0}, 0.0, 60, seeded(1))["liar"]) == 1.0
    tested = Agreement()
    told(tested, {"one": 1.0, "other": 1.0, "liar": -1.0}, 2.0, 10, seeded(1))
    assert told(tested, {"one": 1.0, "other": 1.0, "liar": 1.0}, 2.0, 3, seeded(2))["liar"][-1] == 1.0


def test_what_is_not_a_number_or_learned_nothing_says_nothing_and_memory_is_bounded() -> None:
    tested = Agreement()
    for own, gap, dot in ((0.0, 1.0, 0.0), (1.0, 1.0, math.nan), (1.0, 1.0, -1.0), (1.0, math.inf, 0.0)):
        assert tested.heard("one", own, gap, dot)[0] == 0.0
    for number in range(PEERS_MAX + 1):
        tested.heard(f"p{number}", 1.0, 1.0, 0.0)
    assert len(tested._peers) == PEERS_MAX
