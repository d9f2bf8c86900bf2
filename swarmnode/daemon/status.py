"""A node's status for `swarmnode status` and `up`."""

from __future__ import annotations

import asyncio

import psutil

from swarmnode import __version__
from swarmnode.ids import PeerId, RunId
from swarmnode.manifest import Manifest
from swarmnode.membership.place import feeder_place
from swarmnode.metrics import name
from swarmnode.metrics.exporter import PrometheusTelemetry
from swarmnode.node.node import Node
from swarmnode.wire import control_pb2, record_pb2


def describe(
    node: Node | None,
    me: PeerId,
    run_id: RunId,
    manifest: Manifest,
    telemetry: PrometheusTelemetry,
    metrics_address: str,
    started_s: float,
) -> control_pb2.StatusReply:
    """The complete reply of the control API; `node` None is a bootstrap, which serves no stage."""
    now = asyncio.get_running_loop().time()
    resident = psutil.Process().memory_info().rss
    telemetry.gauge(name.RESIDENT_BYTES, float(resident))
    reply = control_pb2.StatusReply(
        run_id=run_id,
        peer_id=me,
        run_name=manifest.name,
        version=__version__,
        stages=manifest.pipeline.stages,
        uptime_s=now - started_s,
        metrics_address=metrics_address,
        resident_nbytes=resident,
        counters=telemetry.counters(),
        trains_nothing=node is None,
    )
    if node is None:
        return reply
    place = node.presence.status.stage
    reply.state = node.state if place is not None else record_pb2.NODE_STATE_UNSPECIFIED
    reply.stage = feeder_place(manifest) if node.feeds_only else place or 0
    reply.samples_total = node.samples_total()
    reply.tokens_total = node.samples_total() * manifest.model.context
    reply.addresses.extend(f"{address}/p2p/{node.me}" for address in node.presence.status.addresses)
    served = node.stage_status()
    reply.round = served.round_index
    reply.inner_steps = served.inner_steps
    reply.tokens_per_second = served.tokens_per_second
    reply.loss_train = served.loss_train or 0.0
    reply.loss_validation = served.loss_validation or 0.0
    reply.loss_validation_samples = served.loss_validation_samples
    reply.loss_validation_first = served.loss_validation_first or 0.0
    for member in node.presence.peer_table.swarm().everyone():
        if member.peer == node.me:
            continue
        router = node.presence.routers[member.stage] if member.stage < manifest.pipeline.stages else None
        reply.peers.append(
            control_pb2.PeerStatus(
                peer_id=member.peer,
                stage=member.stage,
                state=member.state,
                samples_per_second=member.samples_per_second,
                queue=member.queue,
                round=member.round_index,
                latency_s=0.0 if router is None else router.expected_s(member.peer, 1) or 0.0,
                banned=router is not None and router.banned(member.peer, now),
            )
        )
    return reply
