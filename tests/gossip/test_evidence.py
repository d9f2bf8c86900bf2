"""Whom direction speaks against, and how soon: on leads made by chance, then on replicas that really meet."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
import torch

from swarmnode.gossip.outer import outer
from swarmnode.gossip.sequential_test import Evidence
from swarmnode.gossip.update_direction import LAG, LEAST, SAMPLED, UpdateDirection, sampled
from swarmnode.ids import seeded
from swarmnode.manifest import GossipSpec
from swarmnode.ports import Packet
from swarmnode.sequential_test import LIMIT, PEERS_MAX, WORST, share_kept

pytestmark = pytest.mark.node  # some seconds


def told(
    evidence: Evidence, leads: dict[str, float], noise: float, rounds: int, chance: random.Random
) -> dict[str, list[float]]:
    """How much of each peer's packets is kept, by packet; all are met in every round, and we gain 1 in each."""
    kept: dict[str, list[float]] = {name: [] for name in leads}
    for r in range(rounds):
        for name, lead in leads.items():
            evidence.heard(name, r, 1.0, lead + chance.gauss(0.0, noise))
            kept[name].append(share_kept(evidence.against(name)))
    return kept


@pytest.mark.parametrize("noise", [0.1, 0.5, 1.0, 2.0, 5.0])
@pytest.mark.parametrize("peers", [1, 3, 15])
def test_honest_packets_are_taken_whole_whatever_the_noise(noise: float, peers: int) -> None:
    kept = told(Evidence(), {f"p{i}": 0.0 for i in range(peers)}, noise, 4000 // peers, seeded(noise, peers))
    whole = [keep == 1.0 for keeps in kept.values() for keep in keeps]
    assert sum(whole) / len(whole) > 0.995


@pytest.mark.parametrize(("noise", "most"), [(0.1, 2), (0.5, 6), (1.0, 60)])
def test_who_always_pulls_back_is_refused_the_sooner_the_cleaner_the_measure(noise: float, most: int) -> None:
    leads = {"liar": -2.0, "one": 0.0, "other": 0.0, "third": 0.0}
    for seed in range(5):
        evidence, chance = Evidence(), seeded(noise, seed)
        told(evidence, dict.fromkeys(leads, 0.0), noise, 10, chance)
        keeps = told(evidence, leads, noise, 100, chance)["liar"]
        refused = [i for i, keep in enumerate(keeps) if keep == 0.0]
        assert refused[0] <= most and (noise > 0.1 or refused[0] == 1), (seed, refused[:3])
        assert evidence.against("liar") <= WORST * LIMIT


def test_no_single_packet_is_refused_and_a_repentant_liar_is_taken_again() -> None:
    evidence = Evidence()
    told(evidence, {"one": 0.0, "other": 0.0}, 0.1, 10, seeded(1))
    assert 0.0 < told(evidence, {"one": -1e9}, 0.0, 1, seeded(1))["one"][0] < 1.0
    assert told(evidence, {"one": -1e9}, 0.0, 1, seeded(1))["one"] == [0.0]
    assert told(evidence, {"one": 0.0}, 0.1, 3, seeded(1))["one"][-1] == 1.0


def test_a_replica_much_faster_or_slower_than_the_others_blames_nobody() -> None:
    """In pairs, theta lies 2 (s_j - s_i) ahead where replicas gain s a round."""
    for mine in (0.25, 4.0):
        speeds = {f"p{i}": 1.0 + 0.1 * i for i in range(5)}
        evidence, chance = Evidence(), seeded(mine)
        for r in range(300):
            for name, speed in speeds.items():
                evidence.heard(name, r, mine, 2.0 * (speed - mine) + chance.gauss(0.0, 0.2))
                assert share_kept(evidence.against(name)) == 1.0, (mine, r, name)


def test_who_goes_nowhere_judges_nobody_and_memory_is_bounded() -> None:
    evidence = Evidence()
    for i in range(PEERS_MAX + 3):
        assert evidence.heard(f"p{i}", 1, 0.0, -5.0) == (0.0, "no course to measure by")
    for i in range(PEERS_MAX + 3):
        evidence.heard(f"p{i}", 2, 1.0, 0.0)
    assert len(evidence._peers) == PEERS_MAX


def test_the_course_is_where_all_go_and_not_the_noise_of_the_last_rounds() -> None:
    draw = np.random.Generator(np.random.Philox(key=2))
    course, phi, way = UpdateDirection(sampled(200)), np.zeros(200), draw.normal(size=200)
    way /= np.linalg.norm(way)
    for r in range(LAG + 1 + LEAST):
        assert not course.known and course.along(way, 0) == 0.0, r
        course.moved(phi)
        phi = phi + way
    course.moved(phi)
    assert course.known and course.along(way, 0) == pytest.approx(1.0)
    assert course.along(way[50:90], 50) + course.along(way[90:], 90) == pytest.approx(float((way[50:] ** 2).sum()))
    for _ in range(LAG):  # whatever happened last
        phi = phi + draw.normal(size=200)
        course.moved(phi)
    assert course.along(way, 0) == pytest.approx(1.0)
    course.restart()
    course.moved(phi + 1e6)
    assert course.along(way, 0) == pytest.approx(1.0), "another replica's state is no movement"


def test_a_sample_is_enough_to_measure_along() -> None:
    generator = torch.Generator().manual_seed(3)
    count = 8 * SAMPLED
    at = sampled(count, "a")
    assert not np.array_equal(at, sampled(count, "b")) and np.array_equal(at, sampled(count, "a"))
    course, way = UpdateDirection(at, torch.from_numpy(at)), torch.randn(count, generator=generator)
    for r in range(LAG + 2 + LEAST):
        course.moved(r * way)
    noise = torch.randn(count, generator=generator)
    lead, gap = course.along(way, 0), course.along(0.2 * way + noise, 0)
    assert gap / lead == pytest.approx(0.2, abs=4 / math.sqrt(len(at)))
    assert course.along(way[: count // 2], 0) + course.along(way[count // 2 :], count // 2) == pytest.approx(
        lead, rel=1e-5
    )


@pytest.mark.parametrize("fragments", [1, 3])
def test_replicas_that_meet_refuse_the_one_that_turns_back_alone(fragments: int) -> None:
    """Six in pairs, whose gradients are mostly noise: the cosine of a packet with our own D means nothing there."""
    size, names = 4000, [f"r{i}" for i in range(6)]
    draw = torch.Generator().manual_seed(5)
    way = torch.randn(size, generator=draw)
    spec = GossipSpec(method="average", codec="fp32", acceptance="guarded", fragments=fragments)
    outers = [outer(spec, torch.zeros(size), name) for name in names]
    refused = dict.fromkeys(names, 0)
    whole = packets = 0
    for r in range(1, 150 * fragments):
        for one in outers:
            one.theta.add_(0.3 * way + torch.randn(size, generator=draw))
        messages = [one.message(r) for one in outers]
        liar = outers[0]
        theta = liar.theta.clone()
        liar.theta.copy_(2 * liar.phi - theta)
        messages[0] = liar.message(r)
        liar.theta.copy_(theta)
        liar.message(r)
        order = list(range(6))
        seeded("pairs", r).shuffle(order)
        for a, b in zip(order[::2], order[1::2], strict=True):
            for me, other in ((a, b), (b, a)):
                report = outers[me].apply(r, 1.0, [Packet(1.0, 1, messages[other], sender=names[other])])
                keep = report.verdicts[0].keep
                if me and other:
                    packets, whole = packets + 1, whole + (keep == 1.0)
                elif me and r > 100 * fragments:
                    refused[names[me]] += keep == 0.0
    assert whole / packets > 0.995
    assert sum(refused.values()) >= 45 * fragments, refused  # of 50 in the last third


def test_what_others_are_judged_by_is_secret() -> None:
    """Coordinates and probed rounds follow from a secret where there is one, not from the peer id that all know."""
    spec, theta = GossipSpec(codec="fp32", acceptance="guarded"), torch.zeros(1 << 20)
    public, one, other = (outer(spec, theta.clone(), "me", secret=secret) for secret in ("", "one", "other"))
    drawn = [tuple(made._course(0, 1 << 20)._at[:64]) for made in (public, one, other)]
    assert len({*drawn}) == 3
    again = outer(spec, theta.clone(), "me", secret="one")
    assert tuple(again._course(0, 1 << 20)._at[:64]) == drawn[1], "a replica that restarts judges alike"
