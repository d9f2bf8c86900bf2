"""Whole nodes that are told to go: what they hold and what they learnt comes home, within the time there is."""

import pytest

from swarmnode.base.wire import record_pb2
from swarmnode.train.node.drain import DrainReport, DrainStep
from swarmnode.train.node.drain_steps import mates
from swarmnode.train.node.notice import GRACE_S, Notice, NoticeKind
from tests.support.village import Village, Villager, manifest, told, village


def taken(seconds: float) -> Notice:
    return Notice("test", NoticeKind.PREEMPT, seconds, "taken away")


def training(v: Village) -> bool:
    return all(p.node.state == record_pb2.NODE_STATE_TRAINING for p in v.people)


async def gone(v: Village, person: Villager, seconds: float) -> None:
    """Tell `person` and wait until it has left."""
    person.notices.give(taken(seconds))
    assert person.task is not None
    await v.until(person.task.done, "the node told has left")


@pytest.mark.parametrize("ways", [{}, pytest.param({"method": "average", "fragments": 3}, marks=pytest.mark.nightly)])
async def test_a_leavers_learning_counts_in_the_next_round(ways: dict[str, object]) -> None:
    """All of it, also where a round is about a third of the weights."""
    async with village(manifest(round_samples=256, **ways), stages=(0, 1, 2, 0, 1, 2)) as v:  # type: ignore[arg-type]
        await v.until(lambda: training(v) and v.total() >= 300, "the first round is over")
        leaver = v.people[1]
        stayer = v.people[4]
        hop = leaver.served.hop
        assert hop is not None
        before = hop.samples
        await v.until(lambda: hop.samples >= before + 16, "the leaver has learnt something")
        await gone(v, leaver, 60.0)
        assert leaver.task is not None
        drain_report = leaver.task.result()
        assert drain_report.clean and drain_report.finished == drain_report.held, drain_report
        assert drain_report.sent == drain_report.unsent > 0, drain_report
        assert len(leaver.saved) == 1
        await v.until(lambda: bool(told(stayer, "final_delta.merged")), "it counts")
        assert told(stayer, "final_delta.merged")[0]["samples"] == drain_report.sent
        await v.leave()


async def test_the_last_replicas_state_is_kept_and_taken_up_where_it_ended() -> None:
    async with village(manifest(), stages=(0, 1, 2, 0, 2)) as v:
        await v.until(lambda: training(v) and v.total() >= 256, "256 samples")
        leaver = v.people[1]
        await gone(v, leaver, 60.0)
        assert leaver.task is not None and leaver.replica is not None
        drain_report = leaver.task.result()
        assert drain_report.clean and drain_report.successor in {v.people[0].node.me, v.people[3].node.me}, drain_report
        joiner = v.add(1)
        await v.until(lambda: joiner.node.state == record_pb2.NODE_STATE_TRAINING, "another serves the stage")
        assert told(joiner, "recovery.done")[0]["method"] == "ring"
        assert joiner.replica is not None and joiner.replica.inner_steps >= leaver.replica.inner_steps
        await v.trains(64, "training goes on")
        await v.leave()


async def test_a_replica_that_comes_while_the_last_one_leaves_is_given_what_was_learnt() -> None:
    async with village(manifest(round_samples=1_000_000_000), stages=(0, 1, 2, 0, 2)) as v:
        await v.until(lambda: training(v) and v.total() >= 256, "256 samples")
        leaver = v.people[1].node
        served = v.people[1].served
        drain_report = DrainReport(taken(60.0))
        leaver.presence.own.set_state(record_pb2.NODE_STATE_DRAINING, "taken away")
        tasks = {
            task.step: task for task in served.drain_steps(drain_report)
        }  # planned while it is the last of its stage
        await tasks[DrainStep.FINISH].work()
        joiner = v.add(1)
        await v.until(lambda: bool(mates(leaver.presence.peer_table.swarm(), 1, leaver.me)), "another serves the stage")
        drain_report.expect(unsent=served.gossip.unsent)
        await tasks[DrainStep.HANDOVER].work()
        assert drain_report.sent == drain_report.unsent > 0 and not drain_report.successor, drain_report
        assert told(v.people[1], "final_delta.given")[0]["peer"] == joiner.node.me
        await v.leave()


async def test_without_time_everything_is_cut_and_said() -> None:
    async with village(manifest(), stages=(0, 1, 2, 0, 1, 2)) as v:
        await v.until(lambda: training(v) and v.total() >= 64, "64 samples")
        leaver = v.people[0]
        await gone(v, leaver, 0.0)
        assert leaver.task is not None
        drain_report = leaver.task.result()
        assert drain_report.cut and "save" in drain_report.cut[-1], drain_report
        assert [fields["step"] for fields in told(leaver, "drain.cut")][-1] == "save"
        await v.trains(64, "the others train on")
        await v.leave()


async def test_told_while_it_downloads_a_joiner_is_gone_at_once() -> None:
    async with village(manifest(), stages=(0, 1, 2, 0)) as v:
        await v.fed(128)
        joiner = v.add(None)
        await v.until(lambda: bool(told(joiner, "stage.chosen")), "it has chosen a stage")
        await gone(v, joiner, 30.0)
        assert joiner.task is not None
        assert joiner.task.result().clean and not joiner.saved
        await v.leave()


async def test_when_the_whole_run_stops_nobody_hands_anything_over() -> None:
    async with village(manifest(), stages=(0, 1, 2)) as v:
        await v.fed(128)
        await v.leave()
        assert not [p for p in v.people if told(p, "handover.done") or told(p, "drain.cut")]


async def test_when_the_whole_run_stops_nobody_waits_for_a_stage_that_has_left() -> None:
    async with village(manifest(), stages=(0, 1, 2)) as v:
        await v.fed(128)
        first, second, _ = v.people
        await v.until(lambda: first.served.held_work.held > 0, "a microbatch is under way")
        await second.die()
        first.notices.leave("the run goes on in other stages", NoticeKind.STOP)
        assert first.task is not None
        await v.until(first.task.done, "it leaves")
        report = first.task.result()
        assert report.seconds < GRACE_S / 3 and first.saved, report


async def test_nodes_that_leave_together_name_none_of_each_other() -> None:
    """Records of the others' leaving come after the state was given; the sentence is made after them."""
    async with village(manifest(), stages=(0, 1, 2)) as v:
        await v.until(lambda: training(v) and v.total() >= 128, "128 samples")
        for person in v.people:
            person.notices.give(taken(60.0))
        await v.until(lambda: all(p.task is not None and p.task.done() for p in v.people), "all have left")
        assert [p for p in v.people if told(p, "handover.done")], "a state was given before the records came"
        for person in v.people:
            assert person.task is not None
            assert not person.task.result().successor and "handed" not in person.task.result().text()
