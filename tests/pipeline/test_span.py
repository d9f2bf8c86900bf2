"""The blocks of stages that machines serve: which, and when another one."""

from hypothesis import given
from hypothesis import strategies as st

from swarmnode.base.ids import PeerId, machine_of, part_id, part_of
from swarmnode.net.membership.swarm import SERVING, Member, Swarm
from swarmnode.train.pipeline.rebalance import RebalanceRules
from swarmnode.train.pipeline.span import block_around, entries, move_block, share_of

RULES = RebalanceRules(1.1, 2)


@given(st.integers(1, 64), st.integers(1, 64), st.integers(1, 64), st.data())
def test_blocks_nest_or_have_nothing_in_common(
    stages: int, one_most: int, other_most: int, data: st.DataObject
) -> None:
    one_at, other_at = (data.draw(st.integers(0, stages - 1)) for _ in range(2))
    one = block_around(one_at, stages, one_most, lambda block: True)
    other = block_around(other_at, stages, other_most, lambda block: True)
    assert one_at in one
    assert len(one) <= one_most
    shared = set(one) & set(other)
    assert shared in (set(), set(one), set(other))


@given(st.integers(1, 64), st.integers(1, 64), st.data())
def test_blocks_of_equal_machines_are_a_partition(stages: int, most: int, data: st.DataObject) -> None:
    block = block_around(data.draw(st.integers(0, stages - 1)), stages, most, lambda block: True)
    assert all(block_around(stage, stages, most, lambda block: True) == block for stage in block)


def test_a_block_is_as_large_as_memory_holds() -> None:
    assert block_around(5, 16, 16, lambda block: True) == range(16)
    assert block_around(5, 16, 16, lambda block: len(block) <= 7) == range(4, 8)
    assert block_around(5, 16, 2, lambda block: True) == range(4, 6)
    assert block_around(5, 16, 16, lambda block: False) == range(5, 6)


def test_a_part_is_named_by_its_machine_and_stage() -> None:
    machine = PeerId("12D3KooW" + "a" * 44)
    assert machine_of(part_id(machine, 7)) == machine
    assert part_of(part_id(machine, 7)) == 7
    assert part_of(machine) is None
    assert part_of(PeerId(f"{machine}:07")) == -1


def member(machine: str, stage: int, speed: float = 1.0, span: int = 1) -> Member:
    peer = PeerId(machine) if span == 1 else part_id(PeerId(machine), stage)
    return Member(peer, stage, SERVING, 1, 1e12, speed, 0, 0, span=span)


def test_microbatches_enter_a_machine_where_its_span_begins() -> None:
    before, here = ([member("a", stage, span=2), member("b", stage), member("c", stage)] for stage in (0, 1))
    heads, inner = entries(before[:2], here)
    assert [head.peer for head in heads] == ["c"]
    assert inner == {part_id(PeerId("a"), 1), "b"}


def test_a_machine_s_time_is_shared_by_arithmetic() -> None:
    assert share_of(1, range(2), (1.0, 3.0, 9.0)) == 0.75
    assert share_of(1, range(0), (1.0, 3.0, 9.0)) == 1.0


def halves(weak: float, strong: float, own: float) -> Swarm:
    """Four stages; machine "w" serves the second half."""
    members = [member(f"{name}{stage}", stage, weak if stage < 2 else strong) for stage in range(4) for name in "xyz"]
    return Swarm.of([*members, *(member("w", stage, own, span=2) for stage in (2, 3))], 4)


BLOCKS = (range(2), range(2, 4))


def test_a_block_moves_to_the_slower_half_when_that_is_worth_it() -> None:
    block, reason = move_block(halves(1.0, 2.0, 1.0), (1.0,) * 4, RULES, range(2, 4), 1.0, BLOCKS)
    assert block == range(2), reason


def test_a_block_stays_for_a_gain_below_the_ratio() -> None:
    assert move_block(halves(1.0, 1.3, 0.2), (1.0,) * 4, RULES, range(2, 4), 0.2, BLOCKS)[0] is None


def test_no_block_moves_back() -> None:
    swarm = halves(1.0, 2.0, 1.0)
    moved = Swarm.of(
        [*(m for m in swarm.members() if m.span == 1), *(member("w", stage, 1.0, span=2) for stage in (0, 1))], 4
    )
    assert move_block(moved, (1.0,) * 4, RULES, range(2), 1.0, BLOCKS)[0] is None


def test_a_block_leaves_no_stage_with_too_few() -> None:
    thin = Swarm.of([m for m in halves(1.0, 2.0, 1.0).members() if m.peer not in ("y2", "z2")], 4)
    assert move_block(thin, (1.0,) * 4, RULES, range(2, 4), 1.0, BLOCKS)[0] is None


def test_an_empty_stage_is_filled_at_the_price_of_a_thin_one() -> None:
    empty = Swarm.of([m for m in halves(1.0, 2.0, 1.0).members() if m.stage != 1 and m.peer not in ("y2", "z2")], 4)
    block, reason = move_block(empty, (1.0,) * 4, RULES, range(2, 4), 1.0, BLOCKS)
    assert block == range(2), reason
    assert reason == "nobody serves stage 2"
