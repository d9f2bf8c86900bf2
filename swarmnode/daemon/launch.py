"""Run a node in this process: what can be checked at once, event loop, start messages, exit code."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Awaitable, Callable, Iterator

from swarmnode.atomic_file import check_free, check_writable
from swarmnode.control.socket_path import take_home
from swarmnode.daemon import ready_file
from swarmnode.daemon.options import HOME_ADVICE, LOGS_NBYTES, NodeOptions
from swarmnode.daemon.ready_file import Ready
from swarmnode.daemon.service_manager import doing
from swarmnode.errors import NotPermitted
from swarmnode.transport.address import Endpoint, check_listenable, parse_endpoint


def launch(options: NodeOptions, tell: Callable[[Ready], Awaitable[None]]) -> int:
    """Run the node until it leaves; `tell` runs beside it once it is reachable. Returns its exit code.

    Home, disk and ports are checked before torch is imported, which takes seconds. Raises NotPermitted if the home
    cannot be made, UsageError if another daemon or program has home or port, and the node's own errors.
    """
    try:
        options.home.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise NotPermitted(f"--home {options.home}: {error.strerror}") from None
    lock = take_home(options.home)
    check_writable(options.home, HOME_ADVICE)
    check_free(options.home, LOGS_NBYTES, "what this node keeps", HOME_ADVICE)
    _check_ports(options)
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported; more threads per node run slower
    with doing("loading PyTorch"), _nothing_to_end():
        import uvloop

        from swarmnode.daemon.process import run_node

    async def run() -> int:
        async with asyncio.TaskGroup() as group:
            telling = group.create_task(_tell(options, tell))
            try:
                return await run_node(options, lock)
            finally:
                telling.cancel()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(run())


async def _tell(options: NodeOptions, tell: Callable[[Ready], Awaitable[None]]) -> None:
    await tell(await ready_file.wait(options.home, os.getpid()))


def _check_ports(options: NodeOptions) -> None:
    check_listenable(parse_endpoint(options.listen), "--listen")
    check_listenable(_endpoint(options.metrics_host, options.metrics_port), "--metrics-port")
    if options.dashboard is not None:
        host, _, port = options.dashboard.rpartition(":")
        check_listenable(_endpoint(host.strip("[]"), int(port)), "--port")


def _endpoint(host: str, port: int) -> Endpoint:
    return Endpoint("ip6" if ":" in host else "ip4", host, port)


@contextlib.contextmanager
def _nothing_to_end() -> Iterator[None]:
    """Let Ctrl-C end the process without a word: nothing is held yet."""
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:  # ignored, or a test's
        yield
        return
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
