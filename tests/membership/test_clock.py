"""The run's clock goes by machines seen at work, not by keys."""

import pytest

from swarmnode.base.ids import PeerId
from swarmnode.base.remembered import REMEMBERED_MAX
from swarmnode.base.wire import record_pb2
from swarmnode.net.membership.clock import (
    CONFIRMED,
    FACTOR,
    OUTLIER,
    ClockVerdict,
    RunClock,
    Supposed,
)
from swarmnode.net.membership.peer_table import PeerTable
from swarmnode.net.membership.progress import Progress
from swarmnode.net.membership.run_progress import RunProgress
from swarmnode.net.membership.swarm import Member, Swarm
from swarmnode.net.membership.trust import PeerHistory, machines
from swarmnode.run.manifest import Manifest
from tests.support.fake_telemetry import Quiet
from tests.support.village import LoopClock

ME = PeerId("me")
SLACK = 100
AHEAD_S = 10.0
TRAINING = record_pb2.NODE_STATE_TRAINING
LIE = 2**52


def member(peer: str, total: int, stage: int = 0, speed: float = 1.0) -> Member:
    return Member(PeerId(peer), stage, TRAINING, 1, 1e12, speed, queue=0, round_index=0, total=total)


def swarm(*members: Member) -> Swarm:
    return Swarm.of(members, 2)


def look(clock: RunClock, now_unix_s: float, total: int, here: Swarm) -> ClockVerdict:
    by_name = {m.peer: m for m in here.members()}
    return clock.look(now_unix_s, total, by_name.get, len(here.stages), ME)


def keys(count: int, total: int = LIE) -> list[Member]:
    return [member(f"key{number:03}", total, stage=number % 2, speed=1e9) for number in range(count)]


def seen(clock: RunClock, *peers: str, times: int = 9) -> RunClock:
    for peer in peers:
        for _ in range(times):
            clock.history.record_work(PeerId(peer))
    return clock


def honest(total: int, count: int = 4) -> list[Member]:
    return [member(f"honest{number}", total, stage=number % 2) for number in range(count)]


@pytest.mark.node
@pytest.mark.parametrize("count", [0, 6, 200])
def test_no_number_of_keys_moves_a_clock_of_machines_seen_at_work(count: int) -> None:
    clock = RunClock(SLACK, AHEAD_S)
    own = member("me", 0)
    total = 1000
    seen(clock, *[m.peer for m in honest(0)])
    for at in range(0, 3600, 5):
        total = 1000 + 2 * at
        found = look(clock, 1e9 + at, total, swarm(own, *honest(total), *keys(count)))
        assert found.raised is None
        assert found.top <= total + SLACK + FACTOR * 3.0 * (min(at, 1860) + AHEAD_S), "three machines a stage at most"


def test_liars_among_those_seen_move_it_no_faster_than_machines_can() -> None:
    """Also when they are most of them."""
    clock = RunClock(SLACK, AHEAD_S)
    own = member("me", 0)
    liars = [member(f"liar{number}", 0, stage=number % 2) for number in range(6)]
    seen(clock, *[m.peer for m in (*honest(0), *liars)])
    look(clock, 1e9, 1000, swarm(own, *honest(1000), *[member(m.peer, 1000, m.stage) for m in liars]))
    lying = [member(m.peer, LIE, m.stage, 1e9) for m in liars]
    found = look(clock, 1e9 + 60, 1000, swarm(own, *honest(1000), *lying))
    most = 10 * FACTOR * 4 * 1e9
    assert found.top < LIE and found.top <= 1000 + 2 * SLACK + most * (60 + 2 * AHEAD_S)


def test_a_node_that_was_cut_off_for_days_catches_up_with_most_of_those_it_sees_at_work() -> None:
    clock = RunClock(SLACK, AHEAD_S)
    own = member("me", 0)
    day_s = 86_400.0
    seen(clock, *[m.peer for m in honest(0)])
    look(clock, 1e9, 1000, swarm(own, *honest(1000)))
    for at in range(1, 200):  # alone, and it trains what it can by itself
        look(clock, 1e9 + at * 3 * day_s / 200, 1000, swarm(own))
    trained = 1000 + int(2 * 3 * day_s)
    found = look(clock, 1e9 + 3 * day_s, 1000, swarm(own, *honest(trained)))
    assert found.raised == trained and found.top >= trained


def test_a_joiner_supposes_what_a_third_of_honest_ones_hold_down() -> None:
    clock = RunClock(SLACK, AHEAD_S)
    everybody = [*honest(1000, 5), *keys(9)]
    answering = [m.peer for m in everybody]
    assert clock.suppose(swarm(*everybody), answering).least == 1000
    silent = RunClock(SLACK, AHEAD_S)
    assert silent.suppose(swarm(*honest(1000, 2), *keys(50)), [PeerId("honest0")]) == Supposed(1000, 1000)
    assert RunClock(SLACK, AHEAD_S).suppose(swarm(), []) == Supposed(0, 0)


@pytest.mark.parametrize("says", [0, 1])
@pytest.mark.parametrize(("true", "little"), [(3, 2), (6, 5), (2, 0)])
def test_less_than_half_of_those_who_answer_make_a_joiner_refuse_nobody(true: int, little: int, says: int) -> None:
    """A third of them did: the joiner took the run for a new one, or every honest donor for a liar."""
    everybody = [*honest(1000, true), *keys(little, says)]
    assert RunClock(SLACK, AHEAD_S).suppose(swarm(*everybody), [m.peer for m in everybody]).middle == 1000


async def test_a_joiner_whose_donor_and_confirmer_lie_begins_where_most_that_answered_are() -> None:
    table = PeerTable(2)
    progress = Progress(ME)
    run_progress = RunProgress(Manifest(), ME, table, progress, LoopClock(), Quiet(), print, print)
    everybody = [*honest(10**5, 3), *keys(2)]
    assert run_progress.suppose([m.peer for m in everybody]) == Supposed()
    for each in everybody:  # their records ride on their answers
        table._keep(None, each)
    assert 10**5 <= run_progress.begin_at_most(LIE) < 2 * 10**5
    assert progress.total < 2 * 10**5


@pytest.mark.parametrize("fast", [5.0, 50.0])
@pytest.mark.parametrize("mates", [1, 9])
def test_a_slow_node_of_the_last_stage_keeps_up_with_fast_ones(mates: int, fast: float) -> None:
    """It sees at work only those that it meets in rounds; the others ask it for work. Capped at its own speed, they
    left it hundreds of rounds behind."""
    rate = mates * fast
    clock = RunClock(int(4 * 10.0 * rate), 4.0)  # rounds of ten seconds
    feeding = [f"before{number}" for number in range(2 * mates)]
    for at in range(0, 1800, 2):
        total = int(rate * at)
        own = member("me", total, 1)
        others = [member(f"mate{number}", total, 1, fast) for number in range(mates)]
        before = [member(name, total, 0, fast / 2) for name in feeding]
        assert look(clock, 1e9 + at, total, swarm(own, *others, *before)).top >= total + 2 * rate, at
        seen(clock, others[at // 2 % mates].peer, times=at % 20 == 0)
        clock.history.record_request(PeerId(feeding[at // 2 % len(feeding)]))


@pytest.mark.parametrize("asks", [1, 50])
def test_keys_that_ask_for_work_have_no_vote_and_count_as_ordinary_machines(asks: int) -> None:
    """Ten keys that sent one microbatch each made this node believe 65 times what twenty honest machines do. Ten that
    go on sending count as four machines each."""
    clock = RunClock(SLACK, AHEAD_S)
    own = member("me", 0, speed=8.0)
    mates = [member(f"honest{number}", 0, stage=number % 2, speed=8.0) for number in range(20)]
    asking = [member(f"liar{number}", 0, stage=0, speed=1e9) for number in range(10)]
    seen(clock, *[m.peer for m in mates])
    for liar in asking:
        for _ in range(asks):
            clock.history.record_request(liar.peer)
    total = 0
    for at in range(0, 600, 2):
        there = [member(m.peer, LIE, m.stage, m.samples_per_second) for m in asking]
        here = [member(m.peer, total, m.stage, m.samples_per_second) for m in mates]
        found = look(clock, 1e9 + at, total, swarm(own, *here, *there))
        assert found.raised is None, "a key that asks has no vote"
        total = int(found.top)
    most = 2 * 21 if asks == 1 else 11 + 10 * OUTLIER  # twice those seen of this stage
    assert total <= most * FACTOR * 8.0 * (600 + AHEAD_S) + SLACK


def test_a_joiners_first_clock_is_corrected_once_by_working_peers() -> None:
    clock = RunClock(SLACK, AHEAD_S)
    own = member("me", 0)
    look(clock, 1e9, 7, swarm(own, *honest(10**9)))
    seen(clock, *[m.peer for m in honest(0)][: CONFIRMED - 1])
    assert look(clock, 1e9 + 1, 7, swarm(own, *honest(10**9))).top < 10**6, "two are not enough"
    seen(clock, *[m.peer for m in honest(0)])
    found = look(clock, 1e9 + 2, 7, swarm(own, *honest(10**9), *keys(9)))
    assert found.raised == 10**9


@pytest.mark.parametrize(("first", "later", "true"), [((7, LIE, LIE), (7,) * 4, 7), ((10**9, 10**9, 7), (), 10**9)])
def test_neither_liars_nor_a_stale_replica_among_the_first_three_decide(
    first: tuple[int, ...], later: tuple[int, ...], true: int
) -> None:
    clock = RunClock(SLACK, AHEAD_S)
    own = member("me", 0)
    machines = [member(f"m{number}", total, number % 2) for number, total in enumerate((*first, *later))]
    look(clock, 1e9, 7, swarm(own, *machines))
    seen(clock, *[m.peer for m in machines[: len(first)]])
    assert look(clock, 1e9 + 1, 7, swarm(own, *machines)).top < 10**6
    seen(clock, *[m.peer for m in machines])
    found = look(clock, 1e9 + 61, 7, swarm(own, *machines))
    assert found.raised == (true if true > 7 else None)
    assert true <= found.top < true + 10**6


def test_one_machine_that_works_and_lies_moves_nobody() -> None:
    clock = RunClock(SLACK, AHEAD_S)
    own = member("me", 0)
    seen(clock, "liar")
    for at in range(0, 600, 5):
        found = look(clock, 1e9 + at, 1000, swarm(own, member("liar", LIE, 1, 1e9)))
        assert found.top <= 1000 + SLACK + 2 * FACTOR * 4 * (at + AHEAD_S)


def test_two_that_only_answered_move_nobody_and_two_at_work_do() -> None:
    clock = RunClock(SLACK, AHEAD_S)
    own = member("me", 0)
    pair = honest(10**5, 2)
    clock.suppose(swarm(own, *pair), [m.peer for m in pair])
    for at in range(0, 10**5, 1000):
        found = look(clock, 1e9 + at, 1000, swarm(own, *pair))
        assert found.raised is None and found.top < 10**5
    seen(clock, *[m.peer for m in pair])
    assert look(clock, 1e9 + 10**5, 1000, swarm(own, *pair)).raised == 10**5


@pytest.mark.parametrize("size", [2, 8, 40, 125])
def test_the_number_of_machines_is_estimated_from_a_part_of_them(size: int) -> None:
    from swarmnode.base.ids import seeded

    rng = seeded("observed", size)
    observed = PeerHistory()
    for _ in range(3 * size):
        observed.record_work(PeerId(f"peer{rng.randrange(size)}"))
    assert 0.7 * size <= machines(observed.times.values()) <= 1.6 * size


def test_memory_of_machines_is_bounded_and_who_lied_is_forgotten() -> None:
    observed = PeerHistory()
    for number in range(REMEMBERED_MAX + 5):
        observed.record_work(PeerId(f"peer{number}"))
    observed.forget(PeerId(f"peer{REMEMBERED_MAX}"))
    assert len(observed.times) == REMEMBERED_MAX - 1 and PeerId("peer0") not in observed.times
    observed.record_request(PeerId("caller"))
    assert observed.at_work == {*observed.times} - {PeerId("caller")} and PeerId("caller") in observed.times
