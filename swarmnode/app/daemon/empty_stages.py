"""The stages that nobody serves, as a node's status tells: for its panel, its page, and its reasons to wait."""

from __future__ import annotations

import math

from swarmnode.app.machine.sensors import local_time
from swarmnode.base.ids import PeerId, short
from swarmnode.base.wire.record_pb2 import NODE_STATE_PAUSED, NODE_STATE_TRAINING
from swarmnode.base.wire.report_pb2 import PeerStatus, StatusReply


def empty_stages(status: StatusReply) -> list[int]:
    """The stages that no node serves now, as this one sees the swarm."""
    at_work = {peer.stage for peer in status.peers if peer.state == NODE_STATE_TRAINING and not peer.banned}
    if status.state == NODE_STATE_TRAINING:
        at_work.add(status.stage)
    return [stage for stage in range(status.stages) if stage not in at_work]


def sleepers(status: StatusReply) -> dict[int, str]:
    """The stages that nobody serves but a paused node holds, and until when each sleeps: "until 22:00 with 12D3…abcd".
    Of several nodes, the one that comes back first counts."""
    empty = set(empty_stages(status))
    first = dict[int, PeerStatus]()
    paused = [peer for peer in status.peers if peer.state == NODE_STATE_PAUSED and peer.stage in empty]
    for peer in sorted(paused, key=lambda one: (one.resumes_s or math.inf, one.peer_id)):
        first.setdefault(peer.stage, peer)
    return {
        stage: (f"until {local_time(peer.resumes_s)} " if peer.resumes_s else "")
        + f"with {short(PeerId(peer.peer_id))}"
        for stage, peer in sorted(first.items())
    }
