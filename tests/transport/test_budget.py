from __future__ import annotations

import asyncio

from hypothesis import given
from hypothesis import strategies as st

from swarmnode.ids import PeerId
from swarmnode.transport.budget import Budget

A, B = PeerId("a"), PeerId("b")


@given(st.lists(st.tuples(st.sampled_from([A, B]), st.integers(0, 40)), max_size=40))
def test_never_more_than_the_bounds_except_for_one_message_alone(takes: list[tuple[PeerId, int]]) -> None:
    budget, held = Budget(30, 20), []
    for peer, nbytes in takes:
        mine = [n for p, n in held if p == peer]
        everything = sum(n for _, n in held)
        fits = (not everything or everything + nbytes <= 30) and (not sum(mine) or sum(mine) + nbytes <= 20)
        assert budget.try_take(peer, nbytes) == fits
        if fits:
            held.append((peer, nbytes))
        elif held:
            budget.give(*held.pop(0))
        assert budget.used_bytes == sum(n for _, n in held)
    for peer, nbytes in held:
        budget.give(peer, nbytes)
    assert budget.used_bytes == 0


def test_waiting_ends_when_bytes_are_given_back_and_a_cancelled_wait_takes_nothing() -> None:
    async def main() -> None:
        budget = Budget(10, 10)
        order = []

        async def take(name: str, nbytes: int) -> None:
            async with budget.taken(A, nbytes):
                order.append(name)

        assert budget.try_take(A, 10)
        async with asyncio.TaskGroup() as group:
            given_up = group.create_task(take("given up", 5))
            group.create_task(take("patient", 5))
            await asyncio.sleep(0)
            given_up.cancel()
            await asyncio.sleep(0)
            assert order == []
            budget.give(A, 10)
        assert order == ["patient"]
        assert budget.used_bytes == 0

    asyncio.run(main())
