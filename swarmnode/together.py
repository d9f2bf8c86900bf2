"""Work side by side that fails as one, and ends when it is told to."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from typing import TypeVar

T = TypeVar("T")


async def together(works: Iterable[Callable[[], Awaitable[T]]]) -> list[T]:
    """The results of all `works`, in their order. The first that fails ends the others; its error is raised alone.

    A task group would do, but before Python 3.13 it raises the failure of a child and forgets that its own task was
    told to end in the same moment (python/cpython issue 116720). Whoever goes on after a failure, to the next donor or
    the next checkpoint, would never end (simulated: everything, seed 101; a node outlived itself).
    """
    failures: list[Exception] = []
    tasks: list[asyncio.Task[T | None]] = []

    async def guarded(work: Callable[[], Awaitable[T]]) -> T | None:
        try:
            return await work()
        except Exception as error:  # noqa: BLE001  raised below, by the task that waits for all
            failures.append(error)
            for task in tasks:
                if task is not asyncio.current_task():
                    task.cancel()
            return None

    async with asyncio.TaskGroup() as group:
        tasks += [group.create_task(guarded(work)) for work in works]
    if failures:
        try:
            raise failures[0]
        finally:
            failures.clear()  # it knows this frame
    return [task.result() for task in tasks]  # type: ignore[misc]  # none has failed


__all__ = ["together"]
