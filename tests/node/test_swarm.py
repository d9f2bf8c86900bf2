"""Whole nodes together, in one process: training, in rounds of two and more, dying, joining late, leaving."""

from __future__ import annotations

import asyncio
import math
import re
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch

from swarmnode.base.ids import PeerId
from swarmnode.base.metrics import name
from swarmnode.base.ports import Answer, Call
from swarmnode.base.wire import record_pb2
from swarmnode.model.stage import StageReplica
from swarmnode.run.manifest import ModelSpec
from swarmnode.train.node import stage_return
from tests.node.test_documents import Documents, documents
from tests.support.village import TINY, Numbers, Village, Villager, losses, manifest, told, village


async def test_a_swarm_trains_meets_and_leaves() -> None:
    async with village(manifest(), stages=(0, 1, 2, 0, 1, 2)) as v:
        await v.fed(1024)
        backlogs = [p.served.parts.backlog for p in v.people]
        await v.leave()
        outcomes = [p.quiet.total("swarmnode_exchanges_total", outcome="paired") for p in v.people]
        assert sum(outcomes) >= 6, f"rounds met in pairs: {outcomes}"
        assert losses(v)[-1] < losses(v)[0] - 1.0
        assert all(len(p.saved) == 1 for p in v.people), "each saved its stage once"
        feeders = [p for p in v.people if p.node.stage == 0]
        fed = sum(p.quiet.total("swarmnode_samples_total") for p in feeders)
        assert v.total() == fed, "the counter of the run is what the feeders fed, nothing lost, nothing twice"
        for stage in (0, 1):
            counted = sum(p.replica.counted for p in v.people if p.node.stage == stage and p.replica)
            # On a busy machine a replica waits for no straggler: its gradient may then be too old.
            late = sum(p.quiet.total(name.STALE_GRADIENTS) for p in v.people if p.node.stage == stage)
            assert 0 <= fed - counted <= late * v.run.inner.microbatch, f"stage {stage} added each gradient once"
        assert all(len(backlog) == 0 for backlog in backlogs)


@pytest.mark.parametrize("stage", [0, pytest.param(1, marks=pytest.mark.nightly), 2])
async def test_a_replica_dies_and_training_goes_on(stage: int) -> None:
    async with village(manifest(), stages=(0, 1, 2, 0, 1, 2)) as v:
        await v.fed(128)
        await v.people[stage].die()
        await v.trains(128, f"progress after the death of a replica of stage {stage}")


async def test_a_late_joiner_downloads_receives_a_round_and_serves() -> None:
    async with village(manifest(), stages=(0, 1, 2, 0)) as v:
        await v.fed(256)
        joiner = v.add(None)
        await v.until(lambda: joiner.node.state == record_pb2.NODE_STATE_TRAINING, "the joiner serves")
        assert joiner.node.stage in (1, 2), "the two stages with one replica are the needy ones"
        states = [fields["state"] for fields in told(joiner, "node.state")]
        assert states[:2] == ["joining", "syncing"]
        assert "training" in states
        assert told(joiner, "state.downloaded")
        hop = joiner.served.hop
        assert hop is not None
        await v.until(lambda: hop.samples > 0, "the joiner trains")
        assert joiner.replica is not None and joiner.replica.inner_steps > 0


@pytest.mark.parametrize("text", [Numbers, Documents])
async def test_one_replica_a_stage_without_gossip_is_single_process_adamw(text: type[Numbers]) -> None:
    """Whole nodes, one microbatch at a time, against the same stages in one loop: equal to 1e-5 after 20 steps. A
    microbatch asked for twice would be learnt twice: on a busy machine none may look late. What counts of documents
    read apart is known at every stage."""
    run = manifest(method="none", window_max=1)
    run = documents(run) if text is Documents else run
    run = replace(
        run, limits=replace(run.limits, record_ttl_s=60.0, hop_timeout_min_s=60.0, microbatch_timeout_s=100.0)
    )

    async with village(run, text, stages=(0, 1, 2)) as v:
        await v.until(lambda: v.total() >= 20 * run.inner.inner_batch, "20 inner steps")
        await v.leave()
    replicas = [p.replica for p in v.people]
    assert all(replica is not None for replica in replicas)
    steps = replicas[0].inner_steps  # type: ignore[union-attr]
    assert steps >= 20
    counted = [replica.counted for replica in replicas[:2] if replica is not None]
    assert counted == [v.total()] * 2, "each microbatch was learnt once, or there is nothing to compare"

    alone = [StageReplica(run, stage) for stage in range(3)]
    numbers = text(run)
    batch = run.inner.microbatch
    inner_batch = run.inner.inner_batch
    for first in range(0, steps * inner_batch, batch):
        tokens = numbers.train(range(first, first + batch))
        y0, tape0 = alone[0].forward(tokens, keep=True)
        y1, tape1 = alone[1].forward(y0, keep=True, tokens=tokens)
        result = alone[2].loss(y1, tokens, batch, train=True)
        assert tape0 is not None and tape1 is not None and result.gradient is not None
        dy1 = alone[1].backward(tape1, result.gradient, batch)
        assert dy1 is not None
        alone[0].backward(tape0, dy1, batch)
        if alone[0].accumulated >= inner_batch:
            for each in alone:
                each.step(first)  # the feeder counts a microbatch when it is back: after the steps it caused
    for each, replica in zip(alone, replicas, strict=True):
        assert replica is not None and replica.inner_steps == steps
        torch.testing.assert_close(replica.stage.theta, each.theta, rtol=0, atol=1e-5)


def chosen(person: Villager) -> list[object]:
    return [fields["serves"] for fields in told(person, "stage.chosen")]


@pytest.mark.parametrize(("joiners", "stages"), [(3, 3), (6, 3), (12, 4)])
async def test_joiners_at_once_take_all_stages_evenly(joiners: int, stages: int) -> None:
    run = manifest(stages=stages)
    model: ModelSpec = replace(TINY, layers=stages)
    async with village(replace(run, model=model)) as v:
        people = [v.add(None) for _ in range(joiners)]
        await v.until(lambda: all(map(chosen, people)), "all have chosen")
        assert Counter(chosen(p)[0] for p in people) == dict.fromkeys(range(stages), joiners // stages)


def bans(v: Village, of: Villager) -> list[str]:
    said = [fields for person in v.people for fields in told(person, "peer.banned")]
    return [str(fields["reason"]) for fields in said if fields["peer"] == of.node.me]


async def test_a_node_that_answers_pings_and_nothing_else_is_banned_and_comes_back() -> None:
    async def never(peer: PeerId, call: Call) -> Answer:
        await asyncio.Event().wait()
        raise AssertionError

    async with village(manifest(), stages=(0, 1, 2, 0, 1, 2)) as v:
        await v.fed(128)
        gray = v.people[1]
        hop = gray.served.hop
        handlers = gray.served.handlers
        gray.served.handlers = {**handlers, "process": never}
        await v.until(lambda: bool(bans(v, gray)), "the gray node is banned")
        assert any("answers pings" in reason for reason in bans(v, gray)), bans(v, gray)
        await v.trains(128, "the others train on")
        gray.served.handlers = handlers
        samples = hop.samples
        await v.until(lambda: hop.samples > samples, "it gets work again when it works again")


async def test_the_last_validation_outlives_the_stage() -> None:
    async with village(manifest(stages=2)) as v:
        feeder = v.add(0)
        v.add(1)
        await v.until(lambda: (feeder.node.stage_status().loss_validation_samples) > 0, "it validates")
        before = feeder.node.stage_status()
        await v.leave()
        after = feeder.node.stage_status()
        assert feeder.node.served is None and after.loss_train is None
        assert after.loss_validation_first == before.loss_validation_first
        assert after.loss_validation is not None and after.loss_validation_samples >= before.loss_validation_samples


@pytest.mark.parametrize("stage", [0, pytest.param(1, marks=pytest.mark.nightly)])
async def test_a_replica_that_is_rounds_behind_takes_the_state_before_a_round(
    stage: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stage_return, "APART_ROUNDS", 2)
    async with village(manifest(stages=2), stages=(0, 1, 0, 1, 0, 1)) as v:
        await v.until(
            lambda: all(p.node.state == record_pb2.NODE_STATE_TRAINING for p in v.people) and v.total() > 64,
            "everybody trains",
        )
        cut = next(person for person in v.people if person.node.stage == stage)
        gossip = cut.served.gossip
        rounds = list[int]()
        cut.served.gossip._held = True  # no round reaches it, as on an island
        begun = gossip._round
        restored = len(told(cut, "recovery.done"))

        async def watched(round_index: int) -> bool:
            rounds.append(len(told(cut, "recovery.done")) - restored)
            return await begun(round_index)

        gossip._round = watched  # type: ignore[method-assign]
        before = gossip.done
        await v.until(lambda: bool(told(cut, "state.behind")), "it is told that others are further")
        await v.until(lambda: len(told(cut, "recovery.done")) > restored, "it takes their state")
        behind, *_ = told(cut, "state.behind")
        said = re.search(r"are in round (\d+)", str(behind["reason"]))
        assert said is not None and int(said[1]) > before + 2
        await v.until(lambda: cut.node.state == record_pb2.NODE_STATE_TRAINING, "it serves again")
        steps = cut.served.hop.inner_steps
        await v.until(lambda: cut.served.hop.inner_steps > steps + 1, "it works again")
        await v.until(lambda: bool(rounds), "it meets others again")
        assert rounds[0] > 0, "no round with weights that far behind"


def groups(v: Village, index: int) -> list[set[PeerId]]:
    """Whom person `index` met, round by round, where it met more than one."""
    events = v.people[index].quiet.events
    return [set(fields["peers"]) for event, fields in events if event == "exchange.group"]  # type: ignore[call-overload]


@pytest.mark.parametrize(("group", "most"), [(0, 4), (3, 2)])
async def test_groups_meet_and_the_swarm_learns(group: int, most: int) -> None:
    """Five replicas of the last stage: all of them, or cut into groups."""
    async with village(manifest(stages=2, codec="fp32", group=group), stages=(0, 1, 1, 1, 1, 1)) as v:
        last = range(1, 6)

        def met() -> bool:
            return all(any(len(one) == most for one in groups(v, i)) for i in (last if group == 0 else last[:1]))

        learnt = math.log(v.run.model.vocabulary) - 0.5
        await v.until(
            lambda: met() and min(losses(v)[-1:], default=9.0) < learnt,
            f"groups of {most + 1}, and below a guess at random",
        )
        assert max(len(one) for i in last for one in groups(v, i)) == most


async def test_members_that_came_make_the_round() -> None:
    """One of four dies without a word: the other three meet without it."""
    async with village(manifest(stages=2, codec="modular4", group=0), stages=(0, 1, 1, 1, 1)) as v:
        dead = v.people[4]
        await v.until(lambda: any(len(one) == 3 for one in groups(v, 1)), "all four met", 120)
        await dead.die()
        before = [len(groups(v, i)) for i in (1, 2, 3)]

        def goes_on() -> bool:
            since = [groups(v, i)[count:] for i, count in zip((1, 2, 3), before, strict=True)]
            return all(any(len(one) == 2 and dead.node.me not in one for one in mine) for mine in since)

        await v.until(goes_on, "rounds of three", 120)
        for person in v.people[1:4]:
            assert person.replica is not None and np.isfinite(person.replica.outer.phi.numpy()).all()
