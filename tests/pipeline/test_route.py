"""Routing: shares follow speed, broken peers are left out, newcomers are not flooded."""

import heapq
import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarmnode.base.ids import PeerId
from swarmnode.train.pipeline.route import BAN_FIRST_S, Router
from tests.support.records import member


def route(router: Router, seconds: dict[str, float], calls: int) -> Counter[str]:
    """`calls` microbatches of one sample, each answered at once after the peer's own time."""
    shares: Counter[str] = Counter()
    for _ in range(calls):
        peer, _ = router.choose(0.0, 1)
        assert peer is not None
        shares[peer] += 1
        router.record_answer(peer, 1, seconds[peer])
    return shares


def test_shares_follow_speed() -> None:
    router = Router(random.Random(1), epsilon=0.0)
    router.update([member("a"), member("b"), member("c")])
    calls = 7000
    shares = route(router, {"a": 4.0, "b": 2.0, "c": 1.0}, calls)
    assert shares["a"] / calls == pytest.approx(1 / 7, abs=0.01)
    assert shares["b"] / calls == pytest.approx(2 / 7, abs=0.01)
    assert shares["c"] / calls == pytest.approx(4 / 7, abs=0.01)


@pytest.mark.parametrize("told", ["at once", "later"])
def test_fast_replicas_of_a_large_stage_get_more_from_the_first_microbatch(told: str) -> None:
    """A hundred replicas, half of them three times as fast, and as many microbatches: of these three quarters go to the
    fast ones, although hardly any replica gets a second one. Also when speeds come with newer records."""
    speeds = {f"peer{i:02}": 3.0 if i % 2 else 1.0 for i in range(100)}
    fast = 0
    for seed in range(20):
        router = Router(random.Random(seed), epsilon=0.0, samples=8)
        router.update(
            [member(name, samples_per_second=0.0 if told == "later" else speed) for name, speed in speeds.items()]
        )
        for name, speed in speeds.items():
            router.learn(member(name, 2, speed))
        chosen = [router.choose(0.0, 8)[0] for _ in range(100)]
        fast += sum(speeds[peer] == 3.0 for peer in chosen if peer is not None)
    assert fast / 2000 == pytest.approx(0.75, abs=0.03)


def test_an_unknown_peer_is_expected_to_queue_like_others() -> None:
    """Machines announce the time of their work, answers take four times as long by the wait in queues. A slow machine
    that nobody asked yet gets a microbatch for four of a fast one that was asked, not as many."""
    router = Router(random.Random(3), epsilon=0.0)
    fast = [member(f"fast{i}", samples_per_second=4.0) for i in range(5)]
    router.update(fast)
    for one in fast:
        router.record_answer(one.peer, 1, 4 / 4.0)
    router.update([*fast, *(member(f"slow{i}", samples_per_second=1.0) for i in range(20))])
    chosen = [router.choose(0.0, 1)[0] for _ in range(400)]
    assert sum(peer is not None and peer.startswith("fast") for peer in chosen) / 400 == pytest.approx(0.5, abs=0.05)


def test_epsilon_is_chosen_uniformly() -> None:
    router = Router(random.Random(2), epsilon=1.0)
    router.update([member("a"), member("b")])
    shares = route(router, {"a": 100.0, "b": 1.0}, 2000)
    assert shares["a"] / 2000 == pytest.approx(0.5, abs=0.05)


def test_heterogeneous_stages_reach_the_bottleneck() -> None:
    """Three stages in a row, replicas of very different speed: throughput near that of the weakest stage as a whole,
    where uniform choice is held back by the slowest replica."""
    stages = [{"a": 1.0, "b": 4.0}, {"c": 2.0, "d": 3.0}, {"e": 1.0, "f": 5.0}]
    capacity = min(sum(stage.values()) for stage in stages)

    def throughput(epsilon: float) -> float:
        routers = []
        for index, stage in enumerate(stages):
            # All have been checked (test_believed_rate.py).
            router = Router(random.Random(index), epsilon=epsilon, confirmed=lambda peer: 8)
            router.update([member(name) for name in stage])
            routers.append(router)
        free = {name: 0.0 for stage in stages for name in stage}
        under_way = [(0.0, serial) for serial in range(40)]  # the moments a feeder's window frees a place
        done = 0.0
        total = 4000
        for serial in range(total):
            now, _ = heapq.heappop(under_way)
            for router, stage in zip(routers, stages, strict=True):
                peer, _ = router.choose(now, 1)
                assert peer is not None
                begun = max(now, free[peer])
                free[peer] = begun + 1.0 / stage[peer]
                router.record_answer(peer, 1, free[peer] - now)
                now = free[peer]
            heapq.heappush(under_way, (now, serial))
            done = max(done, now)
        return total / done

    assert throughput(0.0) / capacity > 0.9
    assert throughput(0.0) > throughput(1.0) * 1.3


def test_a_banned_peer_comes_back_only_with_a_newer_record_and_after_the_ban() -> None:
    router = Router(random.Random(3), epsilon=0.5)
    router.update([member("a"), member("b")])
    assert router.ban(PeerId("a"), now=10.0) == BAN_FIRST_S
    assert {router.choose(10.0 + i, 1)[0] for i in range(200)} == {"b"}
    router.update([member("a", sequence=2), member("b")])
    assert router.banned(PeerId("a"), 10.5)
    assert not router.banned(PeerId("a"), 10.0 + BAN_FIRST_S)
    assert router.ban(PeerId("a"), now=20.0) == 2 * BAN_FIRST_S, "a second fault in a row bans twice as long"
    router.record_answer(PeerId("a"), 1, 1.0)
    router.update([member("a", sequence=3), member("b")])
    assert router.ban(PeerId("a"), now=90.0) == BAN_FIRST_S, "an answer in between starts anew"


def test_busy_peers_wait_and_are_not_banned() -> None:
    router = Router(random.Random(4), epsilon=0.0)
    router.update([member("a")])
    router.delay(PeerId("a"), until=5.0)
    assert router.choose(4.0, 1)[0] is None
    assert router.ready_in_s(4.0) == pytest.approx(1.0)
    assert router.choose(5.0, 1)[0] == "a"


def test_a_newcomer_starts_at_the_least_runtime() -> None:
    router = Router(random.Random(5), epsilon=0.0)
    router.update([member("a"), member("b")])
    route(router, {"a": 1.0, "b": 1.0}, 100)
    router.update([member("a"), member("b"), member("c")])
    shares = route(router, {"a": 1.0, "b": 1.0, "c": 1.0}, 30)
    assert 8 <= shares["c"] <= 13, "a third, not all of them and not none"


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("update"), st.sets(st.sampled_from("abcde"))),
            st.tuples(st.just("choose"), st.sets(st.sampled_from("abcde"), max_size=2)),
            st.tuples(st.just("ban"), st.sampled_from("abcde")),
            st.tuples(st.just("delay"), st.sampled_from("abcde")),
        ),
        max_size=60,
    )
)
def test_choices_are_always_able_peers_against_a_dumb_twin(actions: list[tuple[str, object]]) -> None:
    """Whatever happens, the chosen peer is present, not banned, busy or excluded; None only if there is none."""
    router = Router(random.Random(7))
    present: set[str] = set()
    banned: dict[str, float] = {}
    busy: dict[str, float] = {}
    for step, (action, subject) in enumerate(actions):
        now = float(step)
        if action == "update":
            assert isinstance(subject, set)
            for gone in present - subject:
                banned.pop(gone, None)
                busy.pop(gone, None)
            present = set(subject)
            router.update([member(name) for name in sorted(present)])
        elif action == "ban" and subject in present:
            router.ban(PeerId(str(subject)), now)
            banned[str(subject)] = now  # no newer record ever comes here
        elif action == "delay" and subject in present:
            router.delay(PeerId(str(subject)), now + 3.0)
            busy[str(subject)] = now + 3.0
        elif action == "choose":
            assert isinstance(subject, set)
            able = {p for p in present if p not in banned and busy.get(p, 0.0) <= now and p not in subject}
            peer, _ = router.choose(now, 1, {PeerId(p) for p in subject})
            assert (peer in able) if able else (peer is None)


def test_a_banned_peer_that_answers_a_ping_is_chosen_again() -> None:
    router = Router(random.Random(1), epsilon=0.0)
    router.update([member("a"), member("b")])
    seconds = router.ban(PeerId("a"), 10.0)
    assert router.due(10.0, 8) == [] and router.banned(PeerId("a"), 10.0 + seconds + 1.0)
    assert router.due(10.0 + seconds, 8) == ["a"]
    router.unban(PeerId("a"))
    assert not router.banned(PeerId("a"), 10.0 + seconds)
    assert router.due(100.0, 8) == []
    assert router.ban(PeerId("a"), 100.0) == 2 * seconds, "it broke again without having done any work"
    router.forget(PeerId("a"))
    assert router.due(1e6, 8) == [] and len(router) == 1
    router.learn(member("a"))
    assert len(router) == 2


def test_a_peer_that_alone_misses_deadlines_is_blamed() -> None:
    router = Router(random.Random(1))
    router.update([member(f"p{i}") for i in range(3)])
    gray = PeerId("p0")
    other = PeerId("p1")
    assert not any(router.late(gray) for _ in range(3)), "nobody else answered either"
    router.record_answer(other, 8, 1.0)
    assert router.late(gray)
    router.record_answer(gray, 8, 1.0)
    router.record_answer(other, 8, 1.0)
    assert not router.late(gray), "it answered: once may be chance"


def test_our_own_line_is_nobody_elses_slowness_and_a_peers_line_is_its_own() -> None:
    router = Router(random.Random(0))
    quick = PeerId("a")
    slow = PeerId("b")
    thin = PeerId("c")
    router.update([member("a"), member("b"), member("c")])
    assert router.typical_s(4) == 0.0
    for _ in range(20):
        for peer, own_s in ((quick, 1.0), (slow, 4.0)):
            ours_s = router.record_answer(peer, 2, 10.0 + own_s, 10.0)
            assert ours_s == pytest.approx(10.0), "what our line takes with any peer"
    assert 2.0 < router.typical_s(4) < 8.0, "of all peers"
    assert router.expected_s(quick, 2) == pytest.approx(1.0) and router.expected_s(slow, 2) == pytest.approx(4.0)
    assert router.record_answer(thin, 2, 31.0, 30.0) == pytest.approx(10.0), "it took 20 s longer to come in there"
    assert router.expected_s(thin, 2) == pytest.approx(21.0)
    assert router.record_answer(quick, 2, 1.0, 30.0) <= 30.0 and router.expected_s(quick, 2) >= 0.0  # type: ignore[operator]


def test_many_replicas_that_never_answer_get_few_microbatches() -> None:
    """Keys cost nothing: five hundred that are announced must not keep work from two that are real."""
    router = Router(random.Random(3))
    shares = Counter[str]()
    real = {"a", "b"}
    router.update([member(name, samples_per_second=10.0) for name in real])
    route(router, {"a": 0.1, "b": 0.1}, 100)
    for number in range(500):
        router.learn(member(f"key {number}", samples_per_second=1e4))
    for call in range(2000):
        now = float(call)
        peer, _ = router.choose(now, 1)
        assert peer is not None
        shares[peer] += 1
        if peer in real:
            router.record_answer(peer, 1, 0.1)
        else:
            router.ban(peer, now)
    wasted = sum(count for peer, count in shares.items() if peer not in real)
    assert wasted <= 2000 / 32, shares


def test_new_replicas_that_answer_are_all_tried_at_once() -> None:
    router = Router(random.Random(3))
    names = [f"r{number}" for number in range(40)]
    router.update([member(name, samples_per_second=10.0) for name in names])
    assert len(route(router, dict.fromkeys(names, 0.1), 80)) >= 36


def test_the_slower_strangers_refuse_the_more_seldom_they_are_tried() -> None:
    """An answer takes a second. Tries in vain of ten seconds cost no more than a sixty-fourth of the time."""
    router = Router(random.Random(3), epsilon=0.0)
    router.update([member("a", samples_per_second=1.0)])
    route(router, {"a": 1.0}, 50)
    for number in range(50):
        router.learn(member(f"key {number}", samples_per_second=1.0))
    now = lost_s = 0.0
    for _ in range(20_000):
        peer, _ = router.choose(now, 1)
        now += 1.0
        if peer == "a":
            router.record_answer(PeerId("a"), 1, 1.0)
        elif peer is not None:
            router.ban(peer, now, lost_s=10.0)
            lost_s += 10.0
            now += 9.0
    assert 0.0 < lost_s / now < 1 / 32
    assert router.unknown_share() < 1 / 300


def test_a_quick_no_of_a_stranger_is_none_and_a_slow_one_is() -> None:
    router = Router(random.Random(3))
    router.update([member("a"), member("new")])
    assert router.unknown_share() == 1.0
    router.record_refusal(PeerId("new"), 0.5)
    assert router.unknown_share() == 1.0, "nobody answered yet: a second is slow"
    route(router, {"a": 0.1, "new": 0.1}, 1)
    for peer in {"a", "new"} - {p for p, known in router._peers.items() if known.seconds_per_sample.known}:
        router.record_refusal(PeerId(peer), 0.05)
        assert router.unknown_share() == 1.0
        router.record_refusal(PeerId(peer), 5.0)
        router.record_refusal(PeerId(peer), 5.0)
        assert router.unknown_share() < 1.0


def test_a_ban_survives_a_move_and_return() -> None:
    router = Router(random.Random(3))
    now = 0.0
    banned = list[float]()
    for sequence in range(8):
        router.learn(member("flits", sequence))
        assert not router.banned(PeerId("flits"), now)
        banned.append(router.ban(PeerId("flits"), now))
        router.forget(PeerId("flits"))
        router.learn(member("flits", sequence))
        assert router.banned(PeerId("flits"), now), "no newer record ends a ban before its time"
        now += banned[-1]
    assert banned == [min(60.0, BAN_FIRST_S * 2**faults) for faults in range(8)]


def test_a_stage_where_all_refuse_for_long_is_idle_until_one_answers() -> None:
    router = Router(random.Random(3))
    router.update([member("a"), member("b")])
    for now in range(20):
        assert router.idle(now, 10.0) == (now >= 10), "eight refusals, over ten seconds"
        router.unknown.record_stage_refusal(float(now))
    router.record_answer(PeerId("b"), 1, 1.0)
    for now in range(20, 60):
        router.unknown.record_stage_refusal(float(now))
    assert not router.idle(60.0, 10.0), "one of them works"
    router.forget(PeerId("b"))
    assert router.idle(60.0, 10.0), "it is gone"
    router.forget(PeerId("a"))
    assert not router.idle(60.0, 10.0), "an empty stage is another matter"
