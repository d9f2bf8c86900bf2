"""Whole nodes that train a step while the gradients of the one before travel: all replicas of a stage stay equal."""

import asyncio
import dataclasses
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import pytest

from swarmnode.run.manifest import Manifest
from swarmnode.train.node.notice import NoticeKind
from swarmnode.train.pipeline.stage_worker import HopInput, StageWorker
from tests.node.test_audit import short_waits
from tests.node.test_butterfly import ThinLines, add, check_alike, dies_at, weights
from tests.node.test_exact_audit import run_of as audited
from tests.node.test_exact_audit import verdicts
from tests.node.test_gradient import all_step
from tests.node.test_pipeline_steps import run_of
from tests.support.village import Village, Villager, excluded, told, village

__all__ = ["short_waits"]


def late(stages: int = 1) -> Manifest:
    return delayed(run_of(stages))


def delayed(run: Manifest, delay: int = 1) -> Manifest:
    return dataclasses.replace(run, gossip=dataclasses.replace(run.gossip, butterfly=True, delay=delay))


def stage_of(here: Village, stage: int) -> list[Villager]:
    return [person for person in here.people if person.node.stage == stage]


Seen = dict[tuple[int, int], set[tuple[int, bytes]]]


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Seen:
    """(stage, step) -> (inner steps, mark) of the weights that its microbatches were trained with."""
    found: Seen = defaultdict(set)

    def watched(inner: Any) -> Any:
        def work(worker: StageWorker, hop: HopInput) -> Any:
            if hop.train:
                replica = worker._replica
                found[worker._here.stage, hop.process.step].add((replica.inner_steps, replica.mark()))
            return inner(worker, hop)

        return work

    for name in ("forward", "loss"):
        monkeypatch.setattr(StageWorker, name, watched(getattr(StageWorker, name)))
    return found


@pytest.mark.parametrize("counts", [(3,), (1,), (2, 1, 3), (1, 1, 1)])
async def test_each_step_is_trained_with_the_means_of_all_but_the_last_one(counts: Sequence[int], seen: Seen) -> None:
    async with village(late(len(counts))) as here:
        for stage, count in enumerate(counts):
            add(here, count, stage)
        await all_step(here, 9)
        for stage, count in enumerate(counts):
            if count > 1:
                check_alike(stage_of(here, stage), 6)
        last = max(step for _, step in seen)
        assert last >= 9
        for (stage, step), weights_of_step in seen.items():
            assert {steps for steps, _ in weights_of_step} == {max(0, step - 2)}, (stage, step)
            assert len(weights_of_step) == 1, f"replicas of stage {stage} trained step {step} with other weights"
        for person in here.people:
            assert not excluded(person) and not told(person, "microbatch.lost")


@pytest.mark.parametrize("kind", ["commit", "roster", "pieces", "means", "close"])
async def test_a_node_that_dies_in_the_middle_of_a_step_stops_nobody(kind: str) -> None:
    async with village(late()) as here:
        add(here, 4)
        await all_step(here, 4)
        victim = here.people[1]
        dies_at(victim, kind, 5)
        await here.until(lambda: victim.task is not None and victim.task.done(), "it dies")
        here.people.remove(victim)
        await all_step(here, 6)
        check_alike(here.people, 3)
        assert not any(excluded(person) for person in here.people)


async def test_kills_at_each_stage_of_a_pipeline_stop_nobody() -> None:
    async with village(late(3)) as here:
        for stage in (0, 0, 1, 1, 2, 2):
            add(here, 1, stage)
        await all_step(here, 5)
        await here.people.pop(3).die()
        await all_step(here, 5)
        await here.people.pop(0).die()
        await all_step(here, 10)
        check_alike(stage_of(here, 2), 10)


@pytest.mark.parametrize("stage", [0, 1])
async def test_a_newcomer_joins_the_steps_and_the_others_stay_equal(stage: int) -> None:
    """Its moments come in bfloat16: it is as near as that."""
    async with village(late(2)) as here:
        for at in (0, 0, 0, 1, 1):
            add(here, 1, at)
        await all_step(here, 4)
        first = stage_of(here, stage)
        newcomer = here.add(stage)
        await here.until(lambda: newcomer.node.served is not None, "it serves")
        await all_step(here, 8)
        check_alike(first, 8)
        met = told(first[0], "exchange.group")[-1]["peers"] if len(first) > 1 else ()
        assert isinstance(met, list) and newcomer.node.me in met
        apart = float((weights(newcomer) - weights(first[0])).norm())
        assert apart < 0.1 * float(weights(first[0]).norm()), "a step apart at most"


async def test_a_node_that_leaves_hands_its_gradient_over_and_the_others_go_on() -> None:
    run = late()
    async with village(dataclasses.replace(run, inner=dataclasses.replace(run.inner, microbatch=1))) as here:
        add(here, 3)
        await all_step(here, 6)
        leaves = here.people.pop(1)
        served = leaves.served
        gossip = served.gossip

        def midway() -> bool:
            trained = served.hop.samples > gossip._samples_at_round
            return gossip._opened > gossip.done and gossip.room() > 0 and trained

        await here.until(midway, "a part of a step is trained, and the round before is under way", 20.0)
        leaves.notices.leave("told to", NoticeKind.LEAVE)
        assert leaves.task is not None
        report = await leaves.task
        assert report.held == report.finished and not report.cut
        await here.until(lambda: any(told(p, "final_delta.merged") for p in here.people), "its gradient counts", 20.0)
        await all_step(here, 6)
        check_alike(here.people, 6)


async def test_a_node_that_is_held_ends_its_round_and_steps_with_the_others_again() -> None:
    async with village(late()) as here:
        add(here, 3)
        await all_step(here, 4)
        held = here.people[1]
        held.served.held.hold("for a test")
        await held.served.gossip.idle.wait()
        here.people.remove(held)
        await all_step(here, 3)
        here.people.append(held)
        await held.served.catch_up.resume()
        await all_step(here, 6)
        check_alike([person for person in here.people if person is not held], 6)


async def test_answers_are_checked_with_equal_weights_and_every_honest_one_is_right() -> None:
    async with village(delayed(audited()), stages=(0, 0, 1, 1, 2, 2)) as here:
        await here.until(lambda: verdicts(here)["right", True] >= 20, "answers are right by equal weights")
        found = verdicts(here)
        assert not any(outcome in ("wrong", "undecided") for outcome, _ in found), found
        assert not any(excluded(person) for person in here.people)


async def test_over_thin_lines_a_step_takes_the_longer_of_training_and_packets() -> None:
    step_s = dict[int, float]()
    for delay in (0, 1):
        async with village(delayed(run_of(1), delay)) as here:
            here.sample_s = 0.15
            add(here, 3)
            here.network.link = ThinLines(1e5)
            await here.until(lambda: all(person.node.served is not None for person in here.people), "all serve")
            await all_step(here, 4)
            begun = asyncio.get_running_loop().time()
            before = min(person.served.gossip.done for person in here.people)
            await all_step(here, 12)
            taken = min(person.served.gossip.done for person in here.people) - before
            step_s[delay] = (asyncio.get_running_loop().time() - begun) / taken
    assert step_s[1] < 0.75 * step_s[0], step_s
