"""A node's state as `swarmnode status` and `up` are told it."""

from __future__ import annotations

import asyncio

import psutil

from swarmnode import __version__
from swarmnode.ids import RunId
from swarmnode.manifest import Manifest
from swarmnode.metrics import name
from swarmnode.metrics.exporter import PrometheusTelemetry
from swarmnode.node.node import Node
from swarmnode.wire import control_pb2, record_pb2


def describe(
    node: Node | None,
    run_id: RunId,
    manifest: Manifest,
    telemetry: PrometheusTelemetry,
    metrics_address: str,
    started_s: float,
) -> control_pb2.StatusReply:
    """Everything the control API says; `node` None is a bootstrap, which serves no stage."""
    now = asyncio.get_running_loop().time()
    resident = psutil.Process().memory_info().rss
    telemetry.gauge(name.RESIDENT_BYTES, float(resident))
    reply = control_pb2.StatusReply(
        run_id=run_id,
        run_name=manifest.name,
        version=__version__,
        stages=manifest.pipeline.stages,
        uptime_s=now - started_s,
        metrics_address=metrics_address,
        resident_nbytes=resident,
        counters=telemetry.counters(),
    )
    if node is None:
        return reply
    reply.peer_id = node.me
    reply.state = node.state if node.stage is not None else record_pb2.NODE_STATE_UNSPECIFIED
    reply.stage = node.stage or 0
    reply.samples_total = node.samples_total()
    reply.tokens_total = node.samples_total() * manifest.model.context
    reply.addresses.extend(f"{address}/p2p/{node.me}" for address in node.presence.self.addresses)
    reply.loss_train = node.loss_train() or 0.0
    if node.gossip is not None:
        reply.round = node.gossip.done
    if node.hop is not None:
        reply.inner_steps = node.hop.inner_steps
    if (feeder := node.feeder) is not None:
        reply.tokens_per_second = feeder.tokens_per_second()
        if feeder.validation is not None:
            reply.loss_validation, reply.loss_validation_samples = feeder.validation
            reply.loss_validation_first = feeder.validation_first or 0.0
    for member in node.presence.book.swarm().members():
        if member.peer == node.me:
            continue
        router = node.presence.routers[member.stage]
        reply.peers.append(
            control_pb2.PeerStatus(
                peer_id=member.peer,
                stage=member.stage,
                state=member.state,
                samples_per_second=member.samples_per_second,
                queue=member.queue,
                round=member.round_index,
                latency_s=router.expected_s(member.peer, 1) or 0.0,
                banned=router.banned(member.peer, now),
            )
        )
    return reply
