"""Links, places, cuts and fleets."""

import asyncio

import pytest

from swarmnode.app.planner.fleet import parse_fleet, scaled
from swarmnode.app.planner.geography import Address, Nat, rtt_s
from swarmnode.base.errors import UsageError
from swarmsim.link import SimLink
from swarmsim.network import NetworkCut, ReachabilityMap


@pytest.mark.loop("virtual")
async def test_a_dropped_flow_leaves_its_share_and_a_slower_line_is_slower() -> None:
    loop = asyncio.get_running_loop()
    link = SimLink(loop, 100.0)
    ends = list[float]()
    first = link.send(1000, lambda: ends.append(-1.0))
    link.send(1000, lambda: ends.append(loop.time()))
    await asyncio.sleep(2)  # each has moved 100
    link.drop(first)
    await asyncio.sleep(4)  # the other has moved 500
    link.set_rate(50.0)
    await asyncio.sleep(100)
    assert ends == [pytest.approx(2 + 4 + 10)]


def test_ways_and_walls() -> None:
    home = Address("eu", 0.02)
    far = Address("us-west", 0.01, Nat.RELAYED)
    assert rtt_s(home, home) == pytest.approx(0.04)
    assert rtt_s(home, far) == rtt_s(far, home) > 0.23
    reach = ReachabilityMap()
    assert not reach.can_dial("a", Nat.OPEN, "b", Nat.UNREACHABLE)
    assert reach.can_dial("b", Nat.UNREACHABLE, "a", Nat.OPEN), "the hidden one calls out ..."
    assert reach.can_dial("a", Nat.OPEN, "b", Nat.UNREACHABLE), "... and is then reached over its own connection"
    reach.forget("b")
    assert not reach.can_dial("a", Nat.OPEN, "b", Nat.UNREACHABLE)
    cut = NetworkCut(frozenset("ab"), frozenset("bc"), both_ways=False)
    reach.cuts.append(cut)
    assert reach.blocked("a", "c") and not reach.blocked("c", "a")
    assert not reach.blocked("a", "b") and not reach.blocked("b", "c"), "b is in both: a bridge"
    reach.heal(cut)
    assert not reach.blocked("a", "c")


def test_fleets_are_scaled_and_mistakes_are_named() -> None:
    row = {"count": "3", "flops": "1e12", "up_mbps": "8", "down_mbps": "80"}
    (kind,) = parse_fleet([row], "f.csv")
    assert (kind.up, kind.down, kind.address.nat) == (1e6, 1e7, Nat.OPEN)
    mixed = parse_fleet([row, row | {"count": "1"}], "f.csv")
    assert [k.count for k in scaled(mixed, 8)] == [6, 2]
    assert [k.count for k in scaled(mixed, 1)] == [1]
    for wrong, says in (
        ({"flops": ""}, "flops is missing"),
        ({"flops": "fast"}, "flops = 'fast'"),
        ({"region": "moon"}, "region 'moon'"),
        ({"nat": "cone"}, "nat 'cone'"),
        ({"gpu": "1"}, "unknown column 'gpu'"),
        ({"up_mbps": "0"}, "up_mbps"),
    ):
        with pytest.raises(UsageError, match=says):
            parse_fleet([row | wrong], "f.csv")
