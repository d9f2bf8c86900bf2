"""Concurrent work that fails as a whole and can be cancelled, and work beside a notebook's event loop."""

from __future__ import annotations

import asyncio
import functools
import os
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Never, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

interrupted = threading.Event()
"""Set by Ctrl-C while a function of `beside_loop` is waited for: it ends in order."""


def beside_loop(function: Callable[P, T]) -> Callable[P, T]:
    """`function`, which runs an event loop, called in a thread of its own where this one runs a loop already, as in a
    notebook."""

    @functools.wraps(function)
    def call(*given: P.args, **named: P.kwargs) -> T:
        if asyncio._get_running_loop() is None:
            return function(*given, **named)
        interrupted.clear()
        pool = ThreadPoolExecutor(1)
        work = pool.submit(function, *given, **named)
        pool.shutdown(wait=False)
        try:
            return work.result()
        except KeyboardInterrupt:
            interrupted.set()
            return work.result()

    return call


def processors() -> int:
    """Processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


async def gather_or_cancel(works: Iterable[Callable[[], Awaitable[T]]]) -> list[T]:
    """Run `works` concurrently; return their results in order. The first failure cancels the others and is raised
    alone.

    A plain task group is not enough: before Python 3.13 it raises a child's failure and drops a cancellation of its own
    task that arrives in the same moment (python/cpython issue 116720). A caller that handles the failure and goes on,
    to the next donor or checkpoint, would then never end (simulated: everything, seed 101; a node outlived its
    cancellation).
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
            failures.clear()  # break the reference cycle: the error's traceback holds this frame
    return [task.result() for task in tasks]  # type: ignore[misc]  # none has failed


class _BlockEnded(Exception):
    """Ends the task group of `background_tasks` after its block."""


@asynccontextmanager
async def background_tasks() -> AsyncIterator[asyncio.TaskGroup]:
    """A task group for the length of a block: its tasks are cancelled when the block ends.

    A task that fails ends the block, as in any task group. When the surrounding task is cancelled while the tasks end,
    CancelledError is raised; a group that ends with an error would forget it (as above).
    """
    try:
        async with asyncio.TaskGroup() as tasks:
            yield tasks
            raise _BlockEnded
    except* _BlockEnded:
        pass
    if (task := asyncio.current_task()) is not None and task.cancelling():
        raise asyncio.CancelledError


async def forever() -> Never:
    """Wait until cancelled."""
    await asyncio.get_running_loop().create_future()
    raise AssertionError("nothing ends this wait")
