"""The run's sample counter: merged by maximum, bounded, never shrinking; nobody makes it jump beyond what can have been
trained."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarmnode.base.bounds import SAMPLES_MAX
from swarmnode.base.errors import RemoteFault
from swarmnode.base.ids import PeerId, RunId
from swarmnode.base.wire import record_pb2
from swarmnode.net.membership import progress
from swarmnode.net.membership.clock import WINDOW_S, ProgressBound
from swarmnode.net.membership.progress import (
    ENTRIES_MAX,
    FLOOR,
    FOLDED_MAX,
    NEWS_MAX,
    Progress,
    ProgressOverclaim,
    to_message,
)

A = PeerId("A")
B = PeerId("B")
C = PeerId("C")


def wire(**samples: int) -> record_pb2.Progress:
    return to_message(samples)


def test_a_feeder_that_returns_counts_on_top_of_its_earlier_life() -> None:
    reborn = Progress(A)
    reborn.add(A, 5)  # before it hears of the 100 it counted before
    assert reborn.merge(Progress.from_wire(wire(A=100, B=7))) == 112
    assert reborn.merge(Progress.from_wire(wire(A=100, B=7))) == 112
    assert reborn.add(A, 1) == 113
    assert reborn.merge(Progress.from_wire(wire(A=106))) == 113


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3), st.integers(0, 9)), max_size=40))
def test_twin_without_folding(steps: list[tuple[int, int, int]]) -> None:
    """Four nodes count and tell each other; the twin keeps plain dictionaries and takes maxima."""
    names = [PeerId(f"feeder{i}") for i in range(4)]
    nodes = [Progress(name) for name in names]
    twins: list[dict[str, int]] = [{} for _ in names]
    for who, whom, samples in steps:
        nodes[who].add(names[who], samples)
        twins[who][names[who]] = twins[who].get(names[who], 0) + samples
        nodes[whom].merge(Progress.from_wire(nodes[who].to_wire()))
        for name, count in twins[who].items():
            twins[whom][name] = max(twins[whom].get(name, 0), count)
        for node, twin in zip(nodes, twins, strict=True):
            assert node.total == sum(twin.values())
            assert dict(node.feeders) == twin


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3), st.integers(0, 11), st.integers(0, 9)), max_size=60))
def test_folding_never_shrinks_a_total(steps: list[tuple[int, int, int, int]]) -> None:
    """Twelve feeders, room for four entries. Only a feeder adds, so what feeders say arrives as records."""
    nodes = [Progress(entries_max=4) for _ in range(4)]
    counts = [0] * 12
    for who, whom, feeder, samples in steps:
        counts[feeder] += samples
        before = [node.total for node in nodes]
        nodes[who].merge(Progress.from_wire(to_message({f"feeder{feeder}": counts[feeder]})))
        message = nodes[who].to_wire()
        assert len(message.samples) <= 4
        nodes[whom].merge(Progress.from_wire(message, entries_max=4))
        assert nodes[whom].total >= nodes[who].total
        assert all(node.total >= old for node, old in zip(nodes, before, strict=True))


def test_folding_is_exact_when_everybody_had_heard() -> None:
    """Many feeders come and go one after the other, each heard by all: however often nodes merge, nothing is twice."""
    nodes = [Progress(entries_max=8) for _ in range(3)]
    for feeder in range(50):
        for samples in (3, 10):
            word = Progress.from_wire(to_message({f"feeder{feeder}": samples}))
            for node in nodes:
                node.merge(word)
            for node in nodes:
                for other in nodes:
                    node.merge(Progress.from_wire(other.to_wire()))
        assert [node.total for node in nodes] == [10 * (feeder + 1)] * 3
    late = Progress.from_wire(to_message({"feeder0": 10, "feeder1": 12}))
    assert nodes[0].merge(late) == 502  # the late word of feeder0 is known; feeder1 has fed again
    newcomer = Progress(A, entries_max=8)
    assert newcomer.merge(Progress.from_wire(nodes[0].to_wire())) == 502
    assert newcomer.add(A, 4) == 506
    assert nodes[1].merge(Progress.from_wire(newcomer.to_wire())) == 506
    assert FLOOR in nodes[1].to_wire().feeders


def test_own_entry_is_never_folded() -> None:
    ours = Progress(A, entries_max=4)
    ours.add(A, 7)
    for feeder in range(20):
        ours.merge(Progress.from_wire(to_message({f"feeder{feeder}": 1})))
    assert ours.feeders["A"] == 7 and ours.total == 27
    assert ours.add(A, 1) == 28


def test_memory_of_progress_is_bounded() -> None:
    ours = Progress()
    for start in range(0, FOLDED_MAX + 3 * ENTRIES_MAX, 128):
        samples = {f"feeder{start + i}": 1 for i in range(128)}
        ours.merge(Progress.from_wire(to_message(samples)))
    assert len(ours._folded) == FOLDED_MAX
    assert ours.total == FOLDED_MAX + 3 * ENTRIES_MAX
    assert len(ours.to_wire().samples) == ENTRIES_MAX


@pytest.mark.parametrize(
    ("samples", "words"),
    [
        ({f"f{i}": 1 for i in range(ENTRIES_MAX + 1)}, f"{ENTRIES_MAX + 1} entries"),
        ({"x" * 65: 1}, "65 characters"),
        ({"": 1}, "0 characters"),
        ({"x": SAMPLES_MAX + 1}, str(SAMPLES_MAX + 1)),
        ({"x": SAMPLES_MAX, "y": 1}, "in all"),
        ({FLOOR: SAMPLES_MAX + 1}, str(SAMPLES_MAX + 1)),
    ],
)
def test_absurd_progress_is_refused(samples: dict[str, int], words: str) -> None:
    with pytest.raises(RemoteFault, match=words):
        Progress.from_wire(to_message(samples))


def test_an_absurd_total_is_refused() -> None:
    message = wire(A=1)
    message.total = SAMPLES_MAX + 1
    with pytest.raises(RemoteFault, match="in all"):
        Progress().merge_wire(message)


def test_feeders_and_counts_belong_together() -> None:
    for feeders, counts in ((["A"], []), (["A"], [1, 2]), (["A", "A"], [1, 2])):
        with pytest.raises(RemoteFault, match="distinct"):
            Progress.from_wire(record_pb2.Progress(feeders=feeders, samples=counts))


def test_a_merge_to_an_absurd_total_is_refused_and_learns_nothing() -> None:
    ours = Progress.from_wire(wire(A=SAMPLES_MAX // 2 + 1))
    with pytest.raises(RemoteFault, match="in all"):
        ours.merge(Progress.from_wire(wire(B=SAMPLES_MAX // 2)))
    assert ours.total == SAMPLES_MAX // 2 + 1 and "B" not in ours.feeders


def test_news_is_what_changed_and_as_good_as_everything() -> None:
    here = Progress()
    there = Progress()
    told = 0
    rng = random.Random(5)
    for step in range(400):
        feeder = PeerId(f"feeder{int(rng.random() * 12)}")
        here.merge(Progress.from_wire(to_message({feeder: step * 8})))
        if rng.random() < 0.3:
            news = here.news(told)
            told = here.version
            assert len(news.samples) <= 12
            there.merge(Progress.from_wire(news))
            assert there.total == here.total and not here.news(told).samples
    small = Progress(entries_max=4)
    for number in range(9):
        small.merge(Progress.from_wire(to_message({f"feeder{number}": 10})))
    fresh = Progress(entries_max=4)
    fresh.merge(Progress.from_wire(small.news(0), entries_max=4))
    assert fresh.total == small.total == 90, "what was folded travels as the floor"


def test_a_thousand_feeders_are_counted_exactly_though_a_call_carries_a_few() -> None:
    here = Progress()
    there = Progress()
    for feeder in range(1000):
        here.merge(Progress.from_wire(to_message({f"feeder{feeder}": feeder})))
    news = here.news(0)
    assert len(news.samples) == NEWS_MAX and news.feeders[-1] == "feeder999"
    there.merge_wire(news)
    assert there.total == sum(range(1000)) > sum(there.feeders.values()) == sum(range(1000 - NEWS_MAX, 1000))
    there.merge_entries({f"feeder{feeder}": feeder for feeder in range(1000)})  # as their own records tell
    assert there.total == here.total == sum(there.feeders.values())
    there.merge_entries({"feeder0": 5})  # type: ignore[dict-item]
    assert there.total == here.total + 5, "what was told as a total is not counted again as entries"


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4), st.integers(0, 9)), max_size=60))
def test_a_total_told_is_known_at_once_and_never_more_than_was_trained(steps: list[tuple[int, int, int]]) -> None:
    """Five feeders whose calls carry one entry each, the newest."""
    names = [PeerId(f"feeder{i}") for i in range(5)]
    nodes = [Progress(name) for name in names]
    told = dict[tuple[int, int], int]()
    trained = 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(progress, "NEWS_MAX", 1)
        for who, whom, samples in steps:
            trained += samples
            nodes[who].add(names[who], samples)
            nodes[whom].merge_wire(nodes[who].news(told.get((who, whom), 0)))
            told[who, whom] = nodes[who].version
            assert nodes[who].total <= nodes[whom].total <= trained
    for node in nodes:
        nodes[0].merge(Progress.from_wire(node.to_wire()))
    assert nodes[0].total == sum(nodes[0].feeders.values()) == trained


SLACK = 100
AHEAD_S = 20.0
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
    at = 0.0
    top = 0.0
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
