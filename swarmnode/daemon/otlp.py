"""Push metrics by OTLP, if the standard variables ask for it and the package is installed."""

from __future__ import annotations

import contextlib
import os

from swarmnode.ids import RunId
from swarmnode.metrics import otlp
from swarmnode.metrics.exporter import PrometheusTelemetry
from swarmnode.ports import Clock
from swarmnode.transport.libp2p import Libp2pTransport


def push_metrics(
    telemetry: PrometheusTelemetry,
    transport: Libp2pTransport,
    run_id: RunId,
    clock: Clock,
    stack: contextlib.AsyncExitStack,
) -> None:
    """Push this process's metrics until `stack` ends, if OTEL_EXPORTER_OTLP_ENDPOINT is set."""

    def failed() -> None:
        reason = "the endpoint of OTEL_EXPORTER_OTLP_ENDPOINT accepts no metrics; tried again later"
        telemetry.event("metrics.push_failed", level="warning", reason=reason)

    if not otlp.wanted(os.environ):
        return
    try:
        push = otlp.OtlpPusher(telemetry.registry, run_id, transport.peer_id, clock.unix_s, failed)
    except ImportError:
        telemetry.event("metrics.push_failed", level="warning", reason=otlp.MISSING)
        return
    transport.spawn(push.run(otlp.interval_s(os.environ)))
    stack.push_async_callback(push.close)
