"""Run a node in this process: event loop, start messages, exit code."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable

from swarmnode.daemon import ready_file
from swarmnode.daemon.options import NodeOptions
from swarmnode.daemon.ready_file import Ready
from swarmnode.errors import NotPermitted


def launch(options: NodeOptions, tell: Callable[[Ready], None]) -> int:
    """Run the node until it leaves; `tell` is called once it is reachable. Returns its exit code.

    Raises NotPermitted if its home cannot be made, and the node's own errors.
    """
    try:
        options.home.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise NotPermitted(f"--home {options.home}: {error.strerror}") from None
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported; more threads per node run slower
    import uvloop

    from swarmnode.daemon.process import run_node

    async def run() -> int:
        async with asyncio.TaskGroup() as group:
            telling = group.create_task(_tell(options, tell))
            try:
                return await run_node(options)
            finally:
                telling.cancel()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(run())


async def _tell(options: NodeOptions, tell: Callable[[Ready], None]) -> None:
    tell(await ready_file.wait(options.home, os.getpid()))
