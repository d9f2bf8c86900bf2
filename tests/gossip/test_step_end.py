"""When a step is over at a later stage of a pipeline, by what its feeders told."""

import math

from swarmnode.base.ids import PeerId, RunId
from swarmnode.train.gossip.step_end import FEW_WAIT, LISTENERS, StepEnds, listeners

A, B, C, D = (PeerId(letter) for letter in "abcd")
PATIENCE_S = 10.0


def test_a_step_is_over_once_every_feeder_is_through() -> None:
    ends = StepEnds()
    assert ends.wait_s(1, [A, B], PATIENCE_S, 0.0) == math.inf
    ends.heard(A, 1)
    assert ends.wait_s(1, [A, B], PATIENCE_S, 1.0) == PATIENCE_S
    ends.heard(B, 1)
    assert ends.wait_s(1, [A, B], PATIENCE_S, 2.0) == 0.0
    assert ends.wait_s(2, [A, B], PATIENCE_S, 3.0) == math.inf


def test_a_silent_feeder_delays_one_step_and_is_awaited_again_once_it_tells() -> None:
    ends = StepEnds()
    for feeder in (A, B):
        ends.heard(feeder, 1)
    assert ends.wait_s(1, [A, B, C], PATIENCE_S, 5.0) == PATIENCE_S
    assert ends.wait_s(1, [A, B, C], PATIENCE_S, 5.0 + PATIENCE_S) == 0.0
    for feeder in (A, B):
        ends.heard(feeder, 2)
    assert ends.wait_s(2, [A, B, C], PATIENCE_S, 20.0) == 0.0
    ends.heard(C, 2)
    for feeder in (A, B):
        ends.heard(feeder, 3)
    assert ends.wait_s(3, [A, B, C], PATIENCE_S, 30.0) > 0.0


def test_few_feeders_that_are_through_wait_longer_for_the_others() -> None:
    ends = StepEnds()
    ends.heard(A, 1)
    assert ends.wait_s(1, [A, B, C, D], PATIENCE_S, 0.0) == FEW_WAIT * PATIENCE_S
    assert ends.wait_s(1, [A, B, C, D], PATIENCE_S, PATIENCE_S) > 0.0, "a lone key ends nobody's step early"
    assert ends.wait_s(1, [A, B, C, D], PATIENCE_S, FEW_WAIT * PATIENCE_S) == 0.0


def test_a_replica_that_is_far_behind_hears_where_most_feeders_are() -> None:
    ends = StepEnds()
    ends.heard(A, 2**53)
    assert ends.newest([A, B, C]) == 0, "one feeder decides nothing"
    for feeder in (B, C):
        ends.heard(feeder, 40)
    assert ends.newest([A, B, C]) == 40
    assert ends.newest([]) == 0


def test_listeners_are_few_the_same_at_all_feeders_and_others_in_each_step() -> None:
    run = RunId("run")
    stage = [PeerId(f"peer {number}") for number in range(91)]
    drawn = [listeners(run, 1, step, stage) for step in range(1, 41)]
    assert all(len({*one}) == LISTENERS for one in drawn)
    assert drawn[7] == listeners(run, 1, 8, reversed(stage)), "in whatever order a feeder knows the members"
    assert len({peer for one in drawn for peer in one}) > len(stage) // 2, "no key is drawn for good"
    assert {*listeners(run, 1, 1, stage[:2])} == {*stage[:2]}, "few are all told"
