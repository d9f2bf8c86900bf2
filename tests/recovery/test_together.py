"""Work side by side: all of it, or its first failure, or the end that was asked for."""

import asyncio
from functools import partial

import pytest

from swarmnode.base.concurrency import gather_or_cancel
from swarmnode.base.errors import RemoteFault


async def test_the_first_failure_ends_the_others_and_is_raised_alone() -> None:
    ended: list[int] = []

    async def work(number: int) -> None:
        try:
            if number == 2:
                raise RemoteFault("the second")
            await asyncio.Event().wait()
        finally:
            ended.append(number)

    with pytest.raises(RemoteFault, match="the second"):
        await gather_or_cancel([partial(work, number) for number in (1, 2, 3)])
    assert sorted(ended) == [1, 2], "the third had not begun"


@pytest.mark.parametrize("told_first", [True, False])
async def test_a_cancel_while_a_part_fails_ends_the_work(told_first: bool) -> None:
    async def fails() -> None:
        await asyncio.sleep(0)
        if told_first:
            task.cancel()
        asyncio.get_running_loop().call_soon(task.cancel)
        raise RemoteFault("in the same moment")

    async def goes_on() -> None:
        while True:
            try:
                await gather_or_cancel([fails, asyncio.Event().wait])
            except RemoteFault:
                await asyncio.sleep(0)

    task = asyncio.create_task(goes_on())
    async with asyncio.timeout(10):
        await asyncio.wait([task])
    assert task.cancelled()
