"""Watch the preemption notices of a cloud, and tell it when this machine is ready to go."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

from swarmnode.app.cloud import watch
from swarmnode.app.cloud.metadata_client import ADDRESS, Metadata
from swarmnode.app.cloud.watch import Watcher
from swarmnode.app.daemon.control_api import DaemonContext
from swarmnode.base.errors import SwarmnodeError, Unavailable
from swarmnode.base.ports import Clock, Telemetry
from swarmnode.train.node.notice import Notice, Notices


@contextlib.asynccontextmanager
async def watching(
    process: DaemonContext, notices: Notices, tasks: asyncio.TaskGroup, stack: contextlib.AsyncExitStack
) -> AsyncIterator[None]:
    """Watch the cloud's notices meanwhile; at the end tell the cloud that this machine is ready to go."""
    options = process.options
    telemetry = process.telemetry

    def give(notice: Notice) -> None:
        if notices.give(notice):
            fields = {"source": notice.source, "kind": notice.kind, "left_s": notice.deadline_s, "id": notice.id}
            telemetry.event("notice.received", level="warning", **fields, reason=notice.reason)

    watcher = await watched(options.notice, options.notice_url, process.clock, telemetry, stack)
    if watcher is None:
        yield
        return
    watching = tasks.create_task(watcher.run(give))
    yield
    watching.cancel()
    assert notices.told is not None
    await acknowledge(watcher, notices.told, telemetry)


async def watched(
    cloud: str, url: str | None, clock: Clock, telemetry: Telemetry, stack: contextlib.AsyncExitStack
) -> Watcher | None:
    """The watcher of `cloud` at `url` (None: the cloud's own address), closed by `stack`; None if there is none.

    "auto" outside of clouds sends no request. Raises Unavailable if no metadata service answers at a given `url`.
    """
    if cloud == "none":
        return None
    reason = "asked for"
    if cloud == "auto" and url is None:
        watcher = watch.by_dmi(watch.read_dmi())
        if watcher is None:
            return None
        cloud = watcher
        reason = "this machine's firmware says so"
    metadata = Metadata(url or ADDRESS)
    stack.push_async_callback(metadata.close)
    if cloud == "auto":
        watcher = await watch.by_asking(metadata)
        if watcher is None:
            raise Unavailable(f"--notice-url {url}: no metadata service of AWS, GCP or Azure answers there")
        cloud = watcher
        reason = "it answers"
    telemetry.event("notice.watching", source=cloud, url=metadata.base, reason=reason)
    return watch.watcher_of(cloud, metadata, clock, telemetry)


async def acknowledge(watcher: Watcher, told: Notice, telemetry: Telemetry) -> None:
    """Tell `watcher`'s cloud that this machine is ready to go; a failure is only logged."""
    try:
        if told.source == watcher.source and await watcher.acknowledge(told):
            telemetry.event("notice.acknowledged", source=told.source, id=told.id)
    except SwarmnodeError as error:
        telemetry.event("notice.unreadable", level="warning", source=told.source, reason=str(error))
