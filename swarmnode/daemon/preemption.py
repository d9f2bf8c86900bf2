"""Choose the cloud whose preemption notices a node process watches."""

from __future__ import annotations

import contextlib

from swarmnode.cloud import detect
from swarmnode.cloud.metadata_client import ADDRESS, Metadata
from swarmnode.cloud.watch import Watcher
from swarmnode.errors import SwarmnodeError, Unavailable
from swarmnode.node.notice import Notice
from swarmnode.ports import Clock, Telemetry


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
        watcher = detect.by_dmi(detect.read_dmi())
        if watcher is None:
            return None
        cloud, reason = watcher, "this machine's firmware says so"
    metadata = Metadata(url or ADDRESS)
    stack.push_async_callback(metadata.close)
    if cloud == "auto":
        watcher = await detect.by_asking(metadata)
        if watcher is None:
            raise Unavailable(f"--notice-url {url}: no metadata service of AWS, GCP or Azure answers there")
        cloud, reason = watcher, "it answers"
    telemetry.event("notice.watching", source=cloud, url=metadata.base, reason=reason)
    return detect.watcher_of(cloud, metadata, clock, telemetry)


async def acknowledge(watcher: Watcher, told: Notice, telemetry: Telemetry) -> None:
    """Tell `watcher`'s cloud that this machine is ready to go; a failure is only logged."""
    try:
        if told.source == watcher.source and await watcher.acknowledge(told):
            telemetry.event("notice.acknowledged", source=told.source, id=told.id)
    except SwarmnodeError as error:
        telemetry.event("notice.unreadable", level="warning", source=told.source, reason=str(error))
