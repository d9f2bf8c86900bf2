"""The router against its simplest form."""

import random

import pytest

from swarmnode.base.errors import Unavailable
from swarmnode.base.ids import PeerId, seeded
from swarmnode.train.pipeline.route import Router
from swarmnode.train.pipeline.route_simple import SimpleRouter, send
from tests.support.records import member

SAMPLES = 8
SPEEDS = {PeerId("a"): 100.0, PeerId("b"): 50.0, PeerId("c"): 50.0, PeerId("d"): 25.0}


def both(draw: random.Random) -> tuple[Router, SimpleRouter]:
    """Routers that have had one answer of each replica, and gave each the same work."""
    real = Router(random.Random(1), epsilon=0.0, samples=SAMPLES, faster_max=float("inf"))
    real.update([member(peer, samples_per_second=speed) for peer, speed in SPEEDS.items()])
    simple = SimpleRouter({peer: 1.0 / speed for peer, speed in SPEEDS.items()}, 0.0, random.Random(2))
    for peer, speed in SPEEDS.items():
        seconds = SAMPLES / speed * draw.uniform(0.8, 1.25)
        real.record_answer(peer, SAMPLES, seconds)
        simple.record_answer(peer, SAMPLES, seconds)
        simple.virtual_s[peer] = real.runtime(peer)
    return real, simple


@pytest.mark.parametrize("seed", range(5))
def test_the_router_chooses_as_its_simplest_form(seed: int) -> None:
    draw = seeded("simple route", seed)
    real, simple = both(draw)
    chosen = dict.fromkeys(SPEEDS, 0)
    for _ in range(800):
        tried = draw.sample(list(SPEEDS), draw.choice([0, 0, 0, 1, 2]))
        peer, reason = real.choose(0.0, SAMPLES, tried)
        assert peer is not None, reason
        assert simple.choose(SAMPLES, tried) == peer
        assert simple.seconds(peer) * SAMPLES == pytest.approx(real.seconds(peer, SAMPLES))
        seconds = SAMPLES / SPEEDS[peer] * draw.uniform(0.8, 1.25)
        real.record_answer(peer, SAMPLES, seconds)
        simple.record_answer(peer, SAMPLES, seconds)
        chosen[peer] += 1
    assert chosen[PeerId("a")] > 1.5 * chosen[PeerId("b")] > 2.0 * chosen[PeerId("d")]


def test_a_dead_replica_costs_one_retry() -> None:
    simple = SimpleRouter({PeerId("a"): 0.01, PeerId("dead"): 0.001}, 0.0, random.Random(0))
    calls: list[PeerId] = []

    def call(peer: PeerId) -> tuple[str, float]:
        calls.append(peer)
        if peer == "dead":
            raise Unavailable("no answer")
        return f"gradient of {peer}", 0.08

    assert send(simple, SAMPLES, call) == "gradient of a"
    assert calls.count(PeerId("dead")) <= 1
    simple.leave(PeerId("a"))
    with pytest.raises(Unavailable, match="all 1 replicas"):
        send(simple, SAMPLES, call)


def test_a_newcomer_is_neither_flooded_nor_starved() -> None:
    draw = seeded("newcomer", 0)
    _, simple = both(draw)
    for _ in range(100):
        simple.choose(SAMPLES)
    simple.enter(PeerId("new"), 1.0 / 50.0)
    chosen = [simple.choose(SAMPLES) for _ in range(90)]
    assert 10 <= chosen.count(PeerId("new")) <= 30
