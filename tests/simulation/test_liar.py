"""Simulated replicas guard themselves as real ones do: what a liar sends moves nobody far."""

import math
import random
from dataclasses import replace

import pytest

from swarmnode.manifest import GossipSpec, Manifest
from swarmnode.model.split import stages_of
from swarmnode.ports import Packet
from swarmnode.wire import call_pb2 as wire
from swarmsim.fault import forger
from swarmsim.replica import DIMENSIONS, FakeReplica


class Nobody:
    """A witness that looks away."""

    def __getattr__(self, name: str) -> object:
        return lambda *args: None


def two(acceptance: str, codec: str = "modular4") -> list[FakeReplica]:
    run = replace(Manifest(), gossip=GossipSpec(acceptance=acceptance, codec=codec))
    part = stages_of(run)[1]
    return [FakeReplica(run, part, i, Nobody(), random.Random(i), 1.0) for i in range(2)]  # type: ignore[arg-type]


def meet(acceptance: str, mode: str) -> tuple[float, float]:
    """(how far the honest one moved in the end, how far it learned by itself), over 20 rounds with a liar."""
    honest, liar = two(acceptance)
    forge, learned = forger(mode), 0.0
    for round_index in range(1, 21):
        for one in (honest, liar):
            one.accumulated = 1
            one.step(0)
        learned += math.dist(honest.theta, honest.phi)
        messages = [one.message(round_index) for one in (honest, liar)]
        packet = Packet(1.0, 1, forge("exchange", wire.Request(), messages[1]))
        honest.apply(round_index, 1.0, [packet])
        liar.apply(round_index, 1.0, [])
    return math.dist(honest.theta, (0.0,) * DIMENSIONS), learned


@pytest.mark.parametrize("mode", ["huge", "sign", "zero", "nan"])
def test_a_liar_moves_nobody_far(mode: str) -> None:
    moved, learned = meet("clipped", mode)
    assert moved < 5 * learned


def test_without_a_guard_it_does() -> None:
    moved, _ = meet("all", "huge")
    assert moved > 1e20
