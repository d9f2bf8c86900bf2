"""Bytes under way: what has arrived counts, one peer has a share, and a message larger than it passes by itself."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarmnode.base.errors import Busy
from swarmnode.base.ids import PeerId
from swarmnode.net.transport.serve import ByteBudget, ByteLease

A = PeerId("a")
B = PeerId("b")
TOTAL = 320
SHARE = 20


@given(st.lists(st.tuples(st.sampled_from("abcdefgh"), st.integers(0, 300), st.integers(0, 30)), max_size=120))
def test_never_more_than_the_bounds_except_for_one_message_alone(steps: list[tuple[str, int, int]]) -> None:
    """Each step announces a message, lets a piece of an older one arrive, or ends one."""
    budget = ByteBudget(TOTAL)
    open_leases = list[tuple[str, ByteLease, int]]()
    arrived = list[int]()
    for peer, nbytes, piece in steps:
        if piece % 3 == 0:
            try:
                lease = budget.admit(PeerId(peer), nbytes)
            except Busy:
                continue
            open_leases.append((peer, lease, nbytes))
            arrived.append(0)
        elif open_leases:
            at = piece % len(open_leases)
            left = open_leases[at][2] - arrived[at]
            try:
                open_leases[at][1].arrive(min(piece, left))
                arrived[at] += min(piece, left)
            except Busy:
                left = 0
            if left <= piece:
                open_leases.pop(at)[1].close()
                arrived.pop(at)
        small = [(p, n) for (p, lease, _), n in zip(open_leases, arrived, strict=True) if not lease.large]
        large = [n for (_, lease, _), n in zip(open_leases, arrived, strict=True) if lease.large]
        assert budget.used_bytes == sum(n for _, n in small) + sum(large)
        assert all(sum(n for p, n in small if p == peer) <= SHARE for peer in "abcdefgh")
        assert sum(n for _, n in small) <= TOTAL
        assert len(large) <= 1 or sum(large) <= TOTAL
    for _, lease, _ in open_leases:
        lease.close()
        lease.close()
    assert budget.used_bytes == 0


def test_only_arrived_bytes_hold_budget() -> None:
    budget = ByteBudget(TOTAL)
    silent = [budget.admit(A, SHARE) for _ in range(100)]
    assert budget.used_bytes == 0
    silent[0].arrive(15)
    with pytest.raises(Busy, match="a peer's share"):
        silent[1].arrive(6)
    with pytest.raises(Busy, match="a peer's share"):
        budget.admit(A, 6)
    budget.admit(B, SHARE).arrive(SHARE)
    assert budget.used_bytes == 15 + SHARE


def test_large_messages_pass_one_at_a_time_and_leave_half_to_others() -> None:
    budget = ByteBudget(TOTAL)
    first = budget.admit(A, 10 * TOTAL)
    first.arrive(10 * TOTAL)
    with pytest.raises(Busy, match="of yours"):
        budget.admit(A, SHARE + 1)
    with pytest.raises(Busy, match="of large messages"):
        budget.admit(B, SHARE + 1)
    for i in range(8):
        budget.admit(PeerId(f"small{i}"), SHARE).arrive(SHARE)
    with pytest.raises(Busy, match="already"):
        budget.admit(PeerId("small8"), SHARE)
    first.close()
    budget.admit(B, SHARE + 1).arrive(SHARE + 1)
