"""Nobody makes the run's counter jump: what is said is held against what can have been trained."""

from __future__ import annotations

from typing import Any

import pytest

from swarmnode.bounds import SAMPLES_MAX
from swarmnode.errors import RemoteFault
from swarmnode.identity import Identity
from swarmnode.ids import PeerId, RunId
from swarmnode.membership.clock import WINDOW_S, ProgressBound
from swarmnode.membership.progress import Progress, ProgressOverclaim
from swarmnode.membership.record import _DOMAIN, check_record
from swarmnode.wire import record_pb2

SLACK, AHEAD_S = 100, 20.0
RUN = RunId("ab" * 32)


def test_the_progress_bound_rises_as_samples_can_have_been_trained() -> None:
    progress_bound = ProgressBound(SLACK, AHEAD_S)
    assert progress_bound.look(1000.0, 50, 10.0) == pytest.approx(50 + SLACK + 10 * AHEAD_S)
    assert progress_bound.look(1060.0, 400, 10.0) == pytest.approx(50 + 600 + SLACK + 10 * AHEAD_S)
    assert progress_bound.look(1030.0, 400, 10.0) == pytest.approx(50 + 600 + SLACK + 10 * AHEAD_S), (
        "a clock was put back"
    )


def test_a_claim_after_silence_is_bounded_by_a_window() -> None:
    progress_bound = ProgressBound(SLACK, AHEAD_S)
    at, top = 0.0, 0.0
    while at < 4 * WINDOW_S:
        top = progress_bound.look(at, int(at), 10.0)  # a tenth of what is possible is trained
        at += 10.0
    assert top < at + 10.0 * 1.1 * WINDOW_S + SLACK + 10 * AHEAD_S


def test_a_machine_that_slept_believes_what_was_trained_meanwhile() -> None:
    progress_bound = ProgressBound(SLACK, AHEAD_S)
    progress_bound.look(0.0, 0, 10.0)
    assert progress_bound.look(36_000.0, 0, 10.0) > 36_000


def test_while_nobody_tells_its_speed_it_goes_on_as_before() -> None:
    progress_bound = ProgressBound(SLACK, AHEAD_S)
    assert progress_bound.look(0.0, 0, 0.0) == SLACK
    progress_bound.look(10.0, 0, 5.0)
    assert progress_bound.look(20.0, 0, 0.0) == pytest.approx(100 + SLACK + 5 * AHEAD_S)


def test_a_boast_teaches_nothing_and_what_is_possible_is_taken() -> None:
    ours = Progress()
    ours.merge_entries({PeerId("a"): 100})
    ours.believe_up_to(1000.0)
    with pytest.raises(ProgressOverclaim, match="progress of 1100 samples; 1000 can have been trained at most"):
        ours.merge_entries({PeerId("b"): 1000})
    with pytest.raises(ProgressOverclaim):
        ours.merge_wire(record_pb2.Progress(total=10**12))
    with pytest.raises(ProgressOverclaim):
        ours.merge_wire(record_pb2.Progress(feeders=["+"], samples=[10**12]))
    assert ours.total == 100 and dict(ours.feeders) == {"a": 100}
    assert ours.merge_entries({PeerId("b"): 900}) == 1000
    assert ours.merge_wire(record_pb2.Progress(total=7)) == 1000


def test_a_feeders_own_count_is_not_bounded() -> None:
    ours = Progress(PeerId("a"))
    ours.believe_up_to(10.0)
    assert ours.add(PeerId("a"), 50) == 50
    assert ours.merge_wire(record_pb2.Progress(total=50)) == 50
    with pytest.raises(ProgressOverclaim):
        ours.merge_entries({PeerId("b"): 1})


@pytest.mark.parametrize(
    "told", [{"total": SAMPLES_MAX + 1}, {"feeders": ["me"], "samples": [SAMPLES_MAX + 1]}], ids=["total", "entry"]
)
def test_a_record_of_an_impossible_count_is_refused_whole(told: dict[str, Any]) -> None:
    """Were it taken in, a joiner that knows nobody else would go by it."""
    identity = Identity.of_seed(b"1" * 32)
    if "feeders" in told:
        told = told | {"feeders": [identity.peer_id]}
    record = record_pb2.Record(
        run_id=RUN, peer_id=identity.peer_id, state=record_pb2.NODE_STATE_TRAINING, progress=record_pb2.Progress(**told)
    )
    raw = record.SerializeToString(deterministic=True)
    signed = record_pb2.SignedRecord(record=raw, signature=identity.sign(_DOMAIN + raw))
    with pytest.raises(RemoteFault, match=rf"Progress\.\w+ = {SAMPLES_MAX + 1}; expected 0 to {SAMPLES_MAX} samples"):
        check_record(signed, run_id=RUN)
