"""Both sides of monitoring: a node's reports to a coordinator, and the coordinator's page on its real ports."""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from swarmnode.app.daemon.control_api import ControlApi, DaemonContext
from swarmnode.app.daemon.options import NodeOptions
from swarmnode.app.machine.receipt_store import Receipts
from swarmnode.base.ids import PeerId
from swarmnode.base.ports import Answer, Call, Clock
from swarmnode.base.wire import report_pb2
from swarmnode.net.transport.address import is_circuit, parse_bootstraps
from swarmnode.net.transport.links import measure
from swarmnode.run import owner as owner_key
from swarmnode.run.admission.invite import Invite, encode
from swarmnode.train.node.report import REPORT_LINKS_MAX, Reporter
from swarmnode.train.node.waiting import BY_NAME, PRIVATE

if TYPE_CHECKING:
    from swarmnode.app.dashboard.heartbeat import Heartbeat
    from swarmnode.app.dashboard.start import Dashboard
    from swarmnode.app.machine.run_archive import Archive


def tell_watchers(process: DaemonContext, api: ControlApi, kept: Receipts, clock: Clock) -> None:
    """Answer coordinators' requests for this node's report, and keep its links measured for them. `api` learns the
    run's page from those that this node was told to meet."""
    transport = process.transport
    loop = asyncio.get_running_loop()
    met = dict(parse_bootstraps(process.options.bootstrap))
    if named := process.manifest.about.page:
        api.show_page(f"{named.rstrip('/')}/")

    def facts() -> report_pb2.Report:
        told = api.status()
        told.ClearField("peers")
        told.ClearField("addresses")
        told.ClearField("metrics_address")
        told.ClearField("home")
        for wait in told.waits:
            if wait.cause in PRIVATE:
                wait.says = BY_NAME[wait.cause].public
        for key in [key for key, value in told.counters.items() if not value]:
            del told.counters[key]
        return report_pb2.Report(
            unix_ms=int(clock.unix_s() * 1000),
            name=process.options.name,
            credited=process.options.credited,
            watts=process.options.watts,
            status=told,
            links=transport.links.report(REPORT_LINKS_MAX, loop.time()),
        )

    receipts = functools.partial(kept.after, process.run_id)
    reporter = Reporter(facts, process.recent, int(clock.unix_s() * 1000), receipts)

    async def answer(peer: PeerId, call: Call) -> Answer:
        if (port := call.header.report.page_port) and peer in met and not named:
            host = next((one.split("/")[2] for one in met[peer] if not is_circuit(one)), "")
            api.show_page(f"http://{f'[{host}]' if ':' in host else host}:{port}/" if host else "")
        return await reporter.answer(peer, call)

    transport.serve("report", answer, tensor_bytes_max=0)
    transport.spawn(measure(transport, transport.connections, transport.links))


def report_folder(options: NodeOptions) -> Path:
    """The folder that gets the run's report: that of the run on its owner's machine, else the home."""
    folder = options.run_folder
    return folder if folder is not None and (folder / owner_key.FILE_NAME).is_file() else options.home


def _archive(process: DaemonContext, reported: Callable[[int], float | None]) -> Archive | None:
    """The archive that this daemon keeps, with the nearest validation loss that the swarm `reported`; None without."""
    if process.options.archive is None:
        return None
    from swarmnode.app.daemon.archive import archive_of

    return archive_of(process, reported)


async def open_page(
    process: DaemonContext, addresses: Sequence[str], clock: Clock, stack: contextlib.AsyncExitStack
) -> tuple[str, Archive | None, Heartbeat | None]:
    """(URL of the run's page, the archive it offers, what it shows) until `stack` ends, as far as this daemon has
    them."""
    if process.options.dashboard is None:
        return "", _archive(process, lambda samples: None), None
    opened = await watch(process, addresses, clock, stack)
    return opened.url, opened.archive, opened.live


async def watch(
    process: DaemonContext, addresses: Sequence[str], clock: Clock, stack: contextlib.AsyncExitStack
) -> Dashboard:
    """Serve the run's page until `stack` ends."""
    from swarmnode.app.dashboard.start import PageAddress, dashboard

    options = process.options
    assert options.dashboard is not None
    host, _, port = options.dashboard.rpartition(":")
    invite = Invite(process.run_id, process.signed.owner, tuple(addresses))
    join = [f"swarmnode join {encode(invite)}"] if addresses else []
    publish = process.manifest.access.mode == "open" or (options.archive is not None and options.archive.publish)
    return await stack.enter_async_context(
        dashboard(
            process.manifest,
            process.run_id,
            process.signed,
            options.home,
            PageAddress(
                host.strip("[]"),
                int(port),
                options.public,
                join,
                publish or not options.public,
                options.track,
                options.notify,
                report_folder(options),
            ),
            transport=process.transport,
            directory=process.directory,
            clock=clock,
            telemetry=process.telemetry,
            archive_of=functools.partial(_archive, process),
            amendments=process.admission.lines,
            swarm=process.swarm,
        )
    )
