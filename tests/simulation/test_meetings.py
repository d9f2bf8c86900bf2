"""Replicas meet as often as the plan says, on lines that just carry it, and what a life says of it."""

import dataclasses

import pytest

from swarmnode.app.planner.fitted import Fitted, alone, check_faster, fitted, forecast
from swarmnode.app.planner.fleet import MachineKind
from swarmnode.app.planner.geography import Address
from swarmnode.app.planner.plan import plan
from swarmnode.app.planner.simulated import Simulated
from swarmnode.base.errors import UsageError
from swarmnode.run.manifest import GossipSpec, Manifest
from swarmnode.run.manifest.recipe import PRESETS, Recipe, fit
from swarmsim.life import simulate
from swarmsim.report import rows
from swarmsim.scenario import RecoveryBounds, Scenario
from swarmsim.simulated_rate import simulated_rate

PARAMETERS = 10_000_000
TOKENS_A_PARAMETER = 20
ROUNDS = 14


def homes(count: int, up_mbps: float, memory_gb: float = 12.9) -> MachineKind:
    up = up_mbps * 1e6 / 8
    return MachineKind("home", count, 1e12, up, 5 * up, Address("eu", 0.025), 10.0, memory_gb, 17.2)


def recipe(parameters: int = PARAMETERS) -> Recipe:
    demo = PRESETS["demo"]
    start = dataclasses.replace(demo, pipeline=dataclasses.replace(demo.pipeline, stages=1))
    return fit(start, parameters=parameters, samples=TOKENS_A_PARAMETER * parameters // demo.model.context)


def thin_line(manifest: Manifest, kind: MachineKind, round_s: float) -> float:
    """Bytes that the packets of a round take of a machine's line, as a share of the round."""
    from swarmnode.run.manifest.recipe import parameters_of
    from swarmnode.train.gossip.outer.traffic import message_nbytes

    return message_nbytes(manifest.gossip, parameters_of(manifest.model), 0) / kind.up / round_s


def test_four_home_machines_meet_as_often_as_planned() -> None:
    """The planned round leaves a packet's time on the line and no more than it must: half-duplex, or with half of the
    measured line, they met at every second or fourth."""
    kind = homes(4, 4.0)
    found = fitted(recipe(), [kind], stages=1)
    manifest = found.recipe.manifest
    plan = found.best.plan
    assert manifest.gossip.method == "average", "a gradient each step does not fit such a line"
    round_s = manifest.gossip.round_samples / plan.samples_per_s
    assert 0.6 < thin_line(manifest, kind, round_s) < 0.8
    life = simulate(
        Scenario(
            "homes",
            seconds=ROUNDS * round_s,
            join_s=0.1,
            fleet=(kind,),
            manifest=manifest,
            bounds=RecoveryBounds(window_s=1.0, throughput=0.0),
            state_share=0.01,
        ),
        0,
    )
    steps = life.meets_every_steps(life.storm.at_s / 2)
    planned = life.meets_every_steps_planned
    assert not life.failures and life.storm.lone == 0
    assert 0.9 * planned < steps < 1.2 * planned
    assert f"planned: every {planned:,.3g}" in dict(rows(life))["replicas meet"]

    tokens = 1e9
    one = 1000.0
    half = Simulated(plan.tokens_per_s / 2.0, 4.0 * planned)
    by_formula, simulated = (forecast(plan, manifest, tokens, one, given) for given in (None, half))
    assert f"replicas meet every {planned:,.0f} steps (simulated: every {4 * planned:,.3g})" in simulated[0]
    assert "by formula, together" in by_formula[-1] and "with the simulated speed and meetings" in simulated[-1]
    best, worst = (float(lines[-1].split(" times as fast")[0].split()[-1]) for lines in (by_formula, simulated))
    assert worst < best / 2.0, "half of the speed, and learning of rarer meetings"


def test_eight_home_machines_step_on_means_in_pieces_as_planned() -> None:
    """Large packets on thin lines: all average pieces from the first round on, and a validator hurries nobody. One
    owner of all pieces, or patience learned from a validator's few samples, left a fifth of the speed."""
    kind = homes(8, 20.0)
    begun = recipe(125_000_000).manifest
    manifest = dataclasses.replace(
        begun,
        model=dataclasses.replace(begun.model, context=1024),
        inner=dataclasses.replace(begun.inner, inner_batch=2048),
        gossip=GossipSpec(method="gradient", codec="huffman", group=0, butterfly=True, round_samples=2048),
        limits=dataclasses.replace(begun.limits, exchange_timeout_s=120.0),
    )
    kind = dataclasses.replace(kind, flops=1e13)
    planned = plan(manifest, (kind,), 1.0).samples_per_s
    found = simulated_rate(manifest, (kind,), 480.0, lambda text: None)
    assert found.tokens_per_s / manifest.model.context > 0.7 * planned
    assert found.meets_every_steps < 1.1


@pytest.mark.parametrize("stages", [None, 3])
def test_a_card_that_holds_the_model_holds_it_at_every_line_speed(stages: int | None) -> None:
    """What the search chose for the fleet's lines, such as stages or fragments, is nothing to a machine alone."""
    speeds = set()
    for up_mbps in (4.0, 100.0, 10_000.0):
        kind = homes(4, up_mbps)
        speeds.add(alone(fitted(recipe(), [kind], stages=stages).recipe.manifest, [kind], 2e8))
    assert len(speeds) == 1 and speeds.pop() > 0.0


def test_a_fleet_that_is_slower_than_one_of_it_is_refused_in_stages_too() -> None:
    kind = homes(4, 0.2)
    found: Fitted = fitted(recipe(), [kind], stages=3)
    assert found.alone > 0.0
    with pytest.raises(UsageError, match="times as fast to a loss as one of them alone"):
        check_faster(found)
