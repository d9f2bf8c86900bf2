"""The arithmetic of a shaped line, against its stated rate, delay and loss, in virtual time."""

import random

import pytest

from swarmnode.app.bench.tcp_flow import QUEUE_S, SEGMENT, Flow, Line

CHUNK = 16 << 10


def carry(flows: list[Flow], seconds: float) -> tuple[list[int], float]:
    """Bytes that each of `flows` sends within `seconds`, all as fast as they may; the time the last ones arrive."""
    sent = [0] * len(flows)
    next_s = [0.0] * len(flows)
    came_s = 0.0
    while (now_s := min(next_s)) < seconds:
        one = next_s.index(now_s)
        room = flows[one].room(now_s)
        if room:
            nbytes = min(room, CHUNK)
            came_s = max(came_s, flows[one].send(now_s, nbytes))
            sent[one] += nbytes
        else:
            assert flows[one].next_s(now_s) > now_s, "a sender without room waits"
            next_s[one] = flows[one].next_s(now_s)
    return sent, came_s


def flow(up: Line, down: Line, delay_s: float = 0.05, loss: float = 0.0, seed: int = 1) -> Flow:
    return Flow(up, down, delay_s, loss, random.Random(seed))


@pytest.mark.parametrize(("up", "down"), [(20e6, 100e6), (100e6, 5e6), (1e6, 1e9)])
def test_the_thinner_line_sets_the_rate(up: float, down: float) -> None:
    one = flow(Line(up), Line(down))
    (sent,), came_s = carry([one], 20.0)
    assert 0.97 < 8 * sent / came_s / min(up, down) <= 1.0
    assert one.up.nbytes == one.down.nbytes == sent
    assert came_s < 20.0 + one.delay_s + 2 * QUEUE_S + 8 * CHUNK / min(up, down), "no long queue forms"


def test_connections_share_their_lines() -> None:
    up = Line(20e6)
    flows = [flow(up, Line(100e6), seed=seed) for seed in range(4)]
    sent, _ = carry(flows, 30.0)
    assert 8 * sum(sent) / 30.0 == pytest.approx(20e6, rel=0.03)
    assert min(sent) > 0.8 * max(sent)
    there = flow(Line(20e6), Line(100e6))
    back = flow(Line(20e6), Line(100e6))
    both, _ = carry([there, back], 10.0)
    assert 8 * min(both) / 10.0 > 0.95 * 20e6, "the two ways of a connection do not share a line"


def test_the_first_byte_takes_the_delay_and_its_own_time() -> None:
    one = flow(Line(8e6), Line(80e6), delay_s=0.03)
    assert one.send(1.0, 1000) == pytest.approx(1.0 + 0.001 + 0.03 + 0.0001)


def test_segments_are_lost_as_stated_and_come_a_round_trip_later_in_order() -> None:
    one = flow(Line(1e9), Line(1e9), loss=0.01)
    previous = 0.0
    late = 0
    for number in range(20_000):
        now_s = float(number)
        came_s = one.send(now_s, SEGMENT)
        late += came_s - now_s > 0.1
        assert came_s >= previous
        previous = came_s
    assert one.segments == 20_000 and 150 < one.lost < 250 and late == one.lost


@pytest.mark.parametrize(("loss", "least", "most"), [(0.01, 0.8e6, 2.5e6), (0.001, 3e6, 15e6), (0.0, 47e6, 50e6)])
def test_loss_costs_what_it_costs_cubic(loss: float, least: float, most: float) -> None:
    (sent,), came_s = carry([flow(Line(50e6), Line(50e6), loss=loss)], 120.0)
    assert least < 8 * sent / came_s < most
