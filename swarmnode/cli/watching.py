"""Both ends of watching: what a node tells a coordinator, and the coordinator's page on its real ports."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence

from swarmnode.cli.desk import Process
from swarmnode.membership.invite import Invite, encode
from swarmnode.node.report import REPORT_LINKS_MAX, Reporter
from swarmnode.ports import Clock
from swarmnode.transport.links import measure
from swarmnode.wire import control_pb2, report_pb2


def tell_watchers(process: Process, status: Callable[[], control_pb2.StatusReply], clock: Clock) -> None:
    """Answer coordinators that ask this node how it is, and keep its links measured for them."""
    transport = process.transport
    loop = asyncio.get_running_loop()

    def facts() -> report_pb2.Report:
        told = status()
        told.ClearField("peers")
        told.ClearField("addresses")
        told.ClearField("metrics_address")
        told.ClearField("home")
        for key in [key for key, value in told.counters.items() if not value]:
            del told.counters[key]
        return report_pb2.Report(
            unix_ms=int(clock.unix_s() * 1000),
            name=process.options.name,
            status=told,
            links=transport.links.report(REPORT_LINKS_MAX, loop.time()),
        )

    reporter = Reporter(facts, process.recent, int(clock.unix_s() * 1000))
    transport.serve("report", reporter.answer, tensor_bytes_max=0)
    transport.spawn(measure(transport, transport.daemon.connections, transport.links))


async def watch(process: Process, addresses: Sequence[str], clock: Clock, stack: contextlib.AsyncExitStack) -> str:
    """Serve the run's page until `stack` ends; returns its URL."""
    from swarmnode.dashboard.start import Place, dashboard

    options = process.options
    assert options.dashboard is not None
    host, _, port = options.dashboard.rpartition(":")
    invite = Invite(process.run_id, process.signed.owner, tuple(addresses))
    join = [f"swarmnode join {encode(invite)}"] if addresses else []
    opened = await stack.enter_async_context(
        dashboard(
            process.manifest,
            process.run_id,
            process.signed,
            options.home,
            Place(host.strip("[]"), int(port), options.public, join),
            transport=process.transport,
            directory=process.directory,
            clock=clock,
            telemetry=process.telemetry,
        )
    )
    return opened.url
