"""Alarms: literals in, reasons out; and what no picture may do to them."""

from dataclasses import replace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from swarmnode.app.dashboard.alarm import REPEAT_S, Alarm, AlarmNews, Health, alarms, parties
from swarmnode.base.ids import PeerId

WELL = Health(
    replicas=[2, 3, 2],
    versions=["0.1.0"] * 7,
    skews_s=[(f"n{index}", 0.01 * index) for index in range(7)],
    silent=[],
    groups=[["a", "b", "c"]],
    losses=[5.0 - 0.1 * index for index in range(30)],
    stalled_s=3.0,
    stall_s=60.0,
    rounds=[(6, 1)] * 8,
    trained=True,
)


def kinds(**changed: Any) -> list[tuple[str, str]]:
    return [(alarm.kind, alarm.level) for alarm in alarms(replace(WELL, **changed))]


def test_a_healthy_run_is_quiet() -> None:
    assert kinds() == []
    assert kinds(replicas=[0, 0, 0], trained=False, groups=[]) == [], "a run that has not begun is no cause for alarm"
    assert kinds(replicas=[1, 0, 0], trained=False) == [], "nor one that assembles"
    assert kinds(replicas=[1, 0, 1], trained=False, stalled_s=90.0) == [], "however long it takes"
    assert kinds(replicas=[0, 0, 0]) == [("stage_empty", "error")], "but one that lost its stages"
    assert kinds(replicas=[0, 0, 0], living=0) == [("stopped", "warning")], "or that everybody left"


def test_stages_by_how_many_serve_them() -> None:
    assert kinds(replicas=[2, 1, 2]) == [("stage_thin", "warning")]
    assert kinds(replicas=[2, 1, 0]) == [("stage_empty", "error"), ("stage_thin", "warning")]
    told = alarms(replace(WELL, replicas=[1, 1, 2]))[0]
    assert told.title == "Stages 1-2 hang by one node each"
    assert "two more volunteers," in told.reason, "as many as are needed"
    assert alarms(replace(WELL, replicas=[2, 1, 2]))[0].title == "Stage 2 hangs by one node"


def test_a_slow_swarm_is_told_as_found() -> None:
    assert kinds(slowness=("2 of 6 machines work at a time", "samples in flight")) == [("slow", "warning")]


def test_islands_need_two_groups_of_two() -> None:
    assert kinds(groups=[["a", "b"], ["c"]]) == []
    found = alarms(replace(WELL, groups=[["a", "b", "e"], ["c", "d"]]))
    assert [alarm.kind for alarm in found] == ["islands"]
    assert "3 and 2 nodes" in found[0].reason and "c, d" in found[0].reason


def test_a_loss_spike_is_judged_by_the_noise_before_it() -> None:
    calm = [2.0] * 20
    assert kinds(losses=[*calm, 2.4]) == []
    assert kinds(losses=[*calm, 2.6]) == [("loss_spike", "warning")]
    assert kinds(losses=[*calm, 9.0]) == [("loss_spike", "error")]
    noisy = [2.0, 2.4] * 10
    assert kinds(losses=[*noisy, 2.9]) == []
    assert kinds(losses=[9.0] * 5) == [], "too few points to judge"


def test_a_standstill_is_told_only_when_every_stage_is_served() -> None:
    assert kinds(stalled_s=90.0) == [("stalled", "error")]
    assert kinds(stalled_s=90.0, replicas=[2, 0, 2]) == [("stage_empty", "error")]


def test_clocks_theirs_or_ours() -> None:
    skews = [("a", 4.0), *[(f"n{index}", 0.0) for index in range(6)]]
    found = alarms(replace(WELL, skews_s=skews))
    assert found[0].title == "One node with a wrong clock" and "a +4.0 s" in found[0].reason
    found = alarms(replace(WELL, skews_s=[(f"n{index}", -7.0) for index in range(6)]))
    assert found[0].title == "This coordinator's clock seems wrong" and "-7.0 s" in found[0].reason


def test_silence_versions_and_lone_rounds() -> None:
    assert kinds(silent=["a"]) == [("silent", "warning")]
    assert kinds(silent=["a", "b", "c"]) == [("silent", "error")]
    assert kinds(versions=["0.1.0", "0.1.0", "0.2.0"]) == [("version_mix", "warning")]
    assert "2 × 0.1.0, 1 × 0.2.0" in alarms(replace(WELL, versions=["0.1.0", "0.1.0", "0.2.0"]))[0].reason
    assert kinds(rounds=[(1, 6)] * 5) == [("lone_rounds", "warning")]
    assert kinds(rounds=[(1, 6)] * 5, replicas=[2, 1, 2]) == [("stage_thin", "warning")], "who has no partner is lone"


NAMES = st.lists(st.text(min_size=1, max_size=5), max_size=5)


PEERS = st.integers(0, 9).map(lambda index: PeerId(str(index)))


@given(st.lists(st.tuples(PEERS, PEERS), max_size=30), st.sets(PEERS, max_size=10))
def test_parties_are_what_walking_finds(links: list[tuple[PeerId, PeerId]], members: set[PeerId]) -> None:
    def walk(start: PeerId) -> frozenset[PeerId]:
        seen = {start}
        edge = [start]
        while edge:
            at = edge.pop()
            for a, b in links:
                for one, other in ((a, b), (b, a)):
                    if one == at and other in members and other not in seen:
                        seen.add(other)
                        edge.append(other)
        return frozenset(seen)

    found = parties(links, members)
    assert {frozenset(group) for group in found} == {walk(member) for member in members}
    assert [len(group) for group in found] == sorted((len(group) for group in found), reverse=True)


def test_a_node_with_another_text_is_named_with_both_digests() -> None:
    texts = [("ada", "aa" * 8), ("bob", "aa" * 8), ("eve", "bb" * 8)]
    assert kinds(texts=texts) == [("text_mix", "warning")]
    (alarm,) = alarms(replace(WELL, texts=texts))
    assert "eve has " + "bb" * 8 in alarm.reason and "2 have " + "aa" * 8 in alarm.reason
    assert kinds(texts=texts[:2]) == []


def test_an_alarm_that_comes_and_goes_is_told_once_in_a_while_with_how_often() -> None:
    news = AlarmNews()
    begun = list[tuple[float, int]]()
    ended = list[float]()
    for tick in range(1000):  # a tick of 2 s: 50 s there, 50 s away
        now_s = 2.0 * tick
        slow = [Alarm("slow", "warning", f"The swarm does {tick} tokens/s", "They wait")] if tick % 50 < 25 else []
        fresh, over = news.look(slow, now_s)
        begun += [(now_s, times) for _, times in fresh]
        ended += [now_s for _ in over]
    assert begun == [(0.0, 1), (REPEAT_S, 9), (2 * REPEAT_S, 9)]
    assert ended == [50.0, REPEAT_S + 50.0, 2 * REPEAT_S + 50.0]


def test_an_alarm_that_came_again_and_stays_is_told_after_all() -> None:
    news = AlarmNews()
    slow = Alarm("slow", "warning", "It is slow", "They wait")
    assert news.look([slow], 0.0) == ([(slow, 1)], [])
    assert news.look([], 10.0) == ([], [slow])
    assert news.look([slow], 20.0) == ([], [])
    assert news.look([slow], REPEAT_S - 1.0) == ([], [])
    assert news.look([slow], REPEAT_S) == ([(slow, 1)], [])
    assert news.look([], REPEAT_S + 1.0) == ([], [slow])


def test_an_error_is_told_each_time() -> None:
    news = AlarmNews()
    lost = Alarm("thin", "error", "Stage 1 is lost", "Nobody serves it", "1")
    for second in range(0, 100, 2):
        assert news.look([lost], second) == ([(lost, 1)], [])
        assert news.look([], second + 1.0) == ([], [lost])
