"""All replicas of a stage die at once; a newcomer brings it back and training goes on."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from benchmarks.memory_network import MemoryDirectory
from swarmnode.base.errors import Unavailable
from swarmnode.base.wire import record_pb2
from tests.support.false_donor import giving
from tests.support.stranger import Stranger
from tests.support.village import Village, Villager, lose, losses, manifest, told, village, with_recovery

BOUND_S = 120.0


async def back(v: Village, joiners: list[Villager]) -> None:
    training = record_pb2.NODE_STATE_TRAINING
    await v.until(lambda: all(j.node.state == training for j in joiners), "the stage is served again", BOUND_S)
    await v.trains(128, "training goes on", BOUND_S)


@pytest.mark.parametrize("stage", [0, pytest.param(2, marks=pytest.mark.nightly)])
async def test_a_stage_comes_back_from_the_ring(stage: int) -> None:
    run = with_recovery(manifest())

    async with village(run, stages=(0, 1, 2, 0, 1, 2)) as v:
        await v.fed(512)
        keepers = [p for p in v.people if p.node.stage == (stage - 1) % 3]
        await v.until(lambda: any(p.served.backup.kept_round for p in keepers), "a snapshot is kept")
        await lose(v, stage)
        joiners = [v.add(stage), v.add(stage)]
        await back(v, joiners)
        methods = sorted(str(told(j, "recovery.done")[0]["method"]) for j in joiners)
        assert methods == ["replica", "ring"], "one builds, the other copies it"
        if stage == 0:
            blocks = joiners[0].served.status().blocks
            assert blocks is not None and blocks.finished_below > 0, "no feeder begins from the first sample again"
        assert losses(v)[-1] < losses(v)[0] - 1.0


async def test_an_inner_stage_is_rebuilt_from_its_neighbours(method: str = "weighted") -> None:
    run = with_recovery(manifest(), method=method, keepers=0)

    async with village(run, stages=(0, 1, 2, 0, 1, 2)) as v:
        await v.fed(256)
        await lose(v, 1)
        joiners = [v.add(None), v.add(None)]
        await back(v, joiners)
        assert sorted(str(told(j, "recovery.done")[0]["method"]) for j in joiners) == sorted([method, "replica"])
        builder = next(j for j in joiners if told(j, "recovery.began"))
        assert all(j.node.stage == 1 for j in joiners), "they went where they were needed"
        assert builder.replica is not None and builder.replica.stage.bump_steps < 500


async def test_no_stage_is_rebuilt_from_what_one_neighbour_says() -> None:
    """Two strangers beside two honest replicas of a neighbour stage, each with other noise for slow weights."""
    run = with_recovery(manifest(), method="copy", keepers=0)

    async with village(run, stages=(0, 0, 1, 2)) as v:
        await v.fed(256)

        def noise(number: int) -> Callable[[np.ndarray], np.ndarray]:
            return lambda phi: np.random.default_rng(number).standard_normal(len(phi)) * 100.0

        strangers = [Stranger(v, number) for number in range(2)]
        for number, stranger in enumerate(strangers):
            giving(v, stranger, run, 0, noise(number), 0)
            await stranger.say(v, stage=0, samples_per_second=10.0)
        await lose(v, 1)
        joiner = v.add(1)
        await v.until(lambda: bool(told(joiner, "recovery.done")), "the stage is rebuilt")
        assert told(joiner, "state.failed"), "a stranger was asked, and nobody confirmed what it said"
        assert joiner.replica is not None
        rebuilt = np.frombuffer(joiner.replica.snapshot().sections["phi"], "<f4")
        assert float(np.abs(rebuilt).max()) < 20.0


@pytest.mark.nightly  # others lose one, or an inner one
async def test_two_neighbours_lost_at_once_come_back_as_far_as_they_are_kept() -> None:
    run = with_recovery(manifest())

    async with village(run, stages=(0, 1, 2, 0)) as v:
        v.add(0)
        await v.fed(256)
        here = lambda stage: [p for p in v.people if p.node.stage == stage]  # noqa: E731
        # Stage 1's is kept by stage 0, which lives; stage 2's, and its head, by stage 1, which dies with it.
        await v.until(lambda: any(p.served.backup.kept_round for p in here(0)), "a snapshot is kept")
        await lose(v, 1)
        await lose(v, 2)
        first = v.add(1)
        second = v.add(2)
        await v.until(lambda: bool(told(first, "recovery.done")), "stage 1 is back", BOUND_S)
        assert told(first, "recovery.done")[0]["method"] == "ring"

        def waits() -> bool:
            reasons = [str(fields["reason"]) for fields in told(second, "recovery.waiting")]
            return any("nobody keeps its embedding or head" in reason for reason in reasons)

        await v.until(waits, "stage 2 waits for somebody who keeps its head, and says so", BOUND_S)


async def test_a_node_that_goes_to_a_lost_stage_takes_along_what_it_kept_of_it() -> None:
    """Two replicas of stage 1, of which the first keeps stage 0: whichever goes there, the snapshot is not lost."""
    run = with_recovery(manifest(stages=2))
    run = replace(
        run, pipeline=replace(run.pipeline, rebalance_period_s=1.0), recovery=replace(run.recovery, keepers=1)
    )

    async with village(run, stages=(0, 1, 1)) as v:
        first, *others = v.people
        await v.until(lambda: any(p.node.served and p.served.backup.kept_round for p in others), "a snapshot is kept")
        await first.die()
        await v.until(lambda: any(told(p, "recovery.done") for p in others), "stage 0 is back", BOUND_S)
        mover = next(p for p in others if told(p, "recovery.done"))
        assert mover.node.stage == 0 and told(mover, "recovery.done")[0]["method"] == "ring"
        backup = next(p for p in others if told(p, "recovery.kept"))
        if mover is backup:
            assert told(mover, "recovery.done")[0]["nbytes"] == 0, "nothing had to be downloaded"
        await v.trains(128, "training goes on", BOUND_S)


async def test_a_joiner_waits_though_the_node_that_claimed_progress_left(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = list[int]()

    async def claimed(_: MemoryDirectory) -> int:
        looks.append(2422 if len(looks) == 1 else 0)
        if len(looks) == 1:
            raise Unavailable("nobody answers")
        return looks[-1]

    monkeypatch.setattr(MemoryDirectory, "claimed", claimed)
    async with village(manifest()) as v:
        joiner = v.add(0)
        await v.until(lambda: len(looks) > 3, "the joiner looks again and again")
        reasons = [str(fields["reason"]) for fields in told(joiner, "recovery.waiting")]
        assert "nobody says how far" in reasons[0] and "trained 2422 samples" in reasons[1], reasons
        assert not told(joiner, "state.fresh"), "it began the run anew"
