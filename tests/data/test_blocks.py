"""Who draws which samples: nothing twice while views agree, nothing skipped when feeders die."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swarmnode.base.errors import RemoteFault
from swarmnode.base.ids import PeerId
from swarmnode.base.wire import record_pb2
from swarmnode.data.blocks import AHEAD_MAX, CLAIMS_MAX, RECORD_ENTRIES_MAX, BlockLedger, owner

A, B, C, D = (PeerId(name) for name in ("A", "B", "C", "D"))
ALL = (A, B, C, D)
MOST = 1 << 40  # blocks that can be finished


def test_owner_moves_only_the_dead_ones_blocks_and_shares_evenly() -> None:
    before = [owner(b, ALL, 1) for b in range(2000)]
    after = [owner(b, (C, A, D), 1) for b in range(2000)]
    assert all(x == y for x, y in zip(before, after, strict=True) if x != B)
    assert all(400 < before.count(feeder) < 600 for feeder in ALL)
    assert [owner(b, ALL[::-1], 1) for b in range(100)] == before[:100]


def gossip(ledgers: dict[PeerId, BlockLedger], hearers: set[PeerId], talkers: set[PeerId]) -> None:
    for hearer in sorted(hearers):
        for talker in sorted(talkers - {hearer}):
            said = record_pb2.Blocks.FromString(ledgers[talker].record().SerializeToString())
            ledgers[hearer].merge(talker, said, MOST)


@given(
    seed=st.integers(0, 2**32),
    steps=st.lists(st.tuples(st.sampled_from(ALL), st.sampled_from(["work", "work", "hear"])), max_size=200),
)
@settings(max_examples=80, deadline=None)
def test_late_news_draws_nothing_twice(seed: int, steps: list[tuple[PeerId, str]]) -> None:
    live = set(ALL)
    ledgers = {feeder: BlockLedger(feeder, seed) for feeder in live}
    drawn: list[int] = []
    for feeder, what in steps:
        if what == "hear":
            gossip(ledgers, {feeder}, live)
            continue
        block, _ = ledgers[feeder].take(live)
        ledgers[feeder].finish(block)
        drawn.append(block)
    assert len(drawn) == len(set(drawn))
    gossip(ledgers, live, live)
    frontier = next(b for b in itertools.count() if b not in drawn)
    gossip(ledgers, live, live)
    assert all(ledger.frontier == frontier and ledger.duplicates == 0 for ledger in ledgers.values())


@given(
    seed=st.integers(0, 2**32),
    deaths=st.lists(st.integers(0, 120), min_size=1, max_size=3),
    order=st.lists(st.sampled_from(ALL), min_size=120, max_size=120),
    heard=st.lists(st.booleans(), min_size=120, max_size=120),
)
@settings(max_examples=60, deadline=None)
def test_every_block_is_finished_though_feeders_die(
    seed: int, deaths: list[int], order: list[PeerId], heard: list[bool]
) -> None:
    live = list(ALL)
    ledgers = {feeder: BlockLedger(feeder, seed) for feeder in live}
    finished: set[int] = set()
    for step, feeder in enumerate(order):
        for _ in range(deaths.count(step)):
            dead = live.pop()  # with a block under way, and whatever nobody heard of
            ledgers[dead].take(live)
        if feeder not in live:
            continue
        block, _ = ledgers[feeder].take(live)
        ledgers[feeder].finish(block)
        finished.add(block)
        if heard[step]:
            gossip(ledgers, set(live), set(live))
    top = max(finished)
    for _ in range(4 * (top + 1)):  # progress is demanded of the survivors
        if all(ledgers[feeder].frontier > top for feeder in live):
            break
        for feeder in live:
            block, _ = ledgers[feeder].take(live)
            ledgers[feeder].finish(block)
            finished.add(block)
            gossip(ledgers, set(live), set(live))
    assert all(ledgers[feeder].frontier > top for feeder in live)
    assert finished >= set(range(top + 1))


def test_a_stuck_feeder_is_overtaken_from_the_top_and_at_last_replaced() -> None:
    live = {A, B}
    fast = BlockLedger(A, 5)
    stuck = BlockLedger(B, 5)
    held, _ = stuck.take(live)
    reasons = []
    while fast.frontier <= held:
        block, reason = fast.take(live)
        fast.finish(block)
        reasons.append(reason)
        assert len(reasons) <= AHEAD_MAX + held + 1
        assert len(fast.record().finished) <= RECORD_ENTRIES_MAX
    assert reasons[0] == "own" and reasons[-1] == "overdue"
    stuck.merge(A, fast.record(), MOST)
    stuck.finish(held)
    assert stuck.duplicates == 1
    assert stuck.frontier == fast.frontier


def test_duplicates_are_counted_once_also_behind_the_frontier() -> None:
    mine = BlockLedger(A, 0)
    for _ in range(3):
        block, _ = mine.take([A])
        mine.finish(block)
    assert mine.frontier == 3
    claim = record_pb2.Blocks(finished_below=1, finished=[1, 2, 5])
    mine.merge(B, claim, MOST)
    mine.merge(B, claim, MOST)
    mine.merge(C, claim, MOST)
    assert mine.duplicates == 2


def test_a_newcomer_starts_at_the_frontier_and_a_restarted_feeder_remembers() -> None:
    old = BlockLedger(A, 0)
    for _ in range(50):
        old.finish(old.take([A, B])[0])
    record = old.record()
    again = BlockLedger(A, 0)
    again.merge(A, record, MOST)
    assert again.record() == record
    assert again.duplicates == 0
    newcomer = BlockLedger(C, 0)
    newcomer.merge(A, record, MOST)
    block, _ = newcomer.take([A, B, C])
    assert block >= record.finished_below and block not in record.finished


def test_records_are_bounded_and_name_first_what_others_would_draw() -> None:
    live = [A, B]
    ledger = BlockLedger(A, 9)
    while not (len(ledger.record().finished) == RECORD_ENTRIES_MAX and ledger.take(live)[1] == "overdue"):
        for block in sorted(ledger.under_way):
            ledger.finish(block)
        ledger.finish(ledger.take(live)[0])
    (overdue,) = ledger.under_way
    ledger.finish(overdue)
    record = ledger.record()
    assert overdue in record.finished
    assert list(record.finished) == sorted(record.finished)
    assert record.ByteSize() < 64 * 5 + 16


@pytest.mark.parametrize(
    ("blocks", "says"),
    [
        (record_pb2.Blocks(finished_below=1000), "at most"),
        (record_pb2.Blocks(finished_below=5, finished=[4]), "not ascending"),
        (record_pb2.Blocks(finished=[3, 2]), "not ascending"),
        (record_pb2.Blocks(finished=[3, 3]), "not ascending"),
        (record_pb2.Blocks(finished=range(CLAIMS_MAX + 1)), "are accepted"),
        (record_pb2.Blocks(finished=[1 << 40]), "too far"),
    ],
)
def test_unbelievable_claims_teach_nothing(blocks: record_pb2.Blocks, says: str) -> None:
    ledger = BlockLedger(A, 0)
    with pytest.raises(RemoteFault, match=says):
        ledger.merge(B, blocks, 100)
    assert ledger.record() == record_pb2.Blocks()


def test_long_runs_hold_little() -> None:
    ledger = BlockLedger(A, 1)
    for _ in range(5000):
        ledger.finish(ledger.take([A])[0])
    assert ledger.frontier == 5000
    assert len(ledger._own) <= AHEAD_MAX and not ledger._others and len(ledger._owners) <= 2 * AHEAD_MAX


def test_blocks_of_one_piece_of_text_belong_to_one_feeder() -> None:
    """So that a feeder fetches few chunks; and it knows which it will draw."""
    ledgers = {feeder: BlockLedger(feeder, 3, span=16) for feeder in (A, B, C)}
    pieces: dict[int, set[PeerId]] = {}
    for feeder, ledger in ledgers.items():
        coming = list(ledger.coming([A, B, C]))
        taken = []
        while (found := ledger.take([A, B, C]))[1] == "own":
            taken.append(found[0])
            ledger.finish(found[0])
        assert taken == coming and taken
        for block in taken:
            pieces.setdefault(block // 16, set()).add(feeder)
    assert len(pieces) == 16 and all(len(owners) == 1 for owners in pieces.values())
    assert len(set.union(*pieces.values())) == 3
