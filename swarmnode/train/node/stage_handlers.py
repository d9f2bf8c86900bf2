"""The calls that a served stage answers, and which it refuses while it cannot serve."""

from __future__ import annotations

from collections.abc import Awaitable, Mapping

from swarmnode.base.errors import Unavailable
from swarmnode.base.ids import PeerId
from swarmnode.base.ports import Answer, Call, Handler
from swarmnode.net.membership.swarm import GIVING
from swarmnode.train.node.held_replica import HeldReplica
from swarmnode.train.node.stage_parts import StageParts

METHODS: Mapping[str, bool] = {
    "process": True,
    "reserve": False,
    "opening": False,
    "accusation": True,
    "recompute": True,
    "exchange": True,
    "butterfly": True,
    "final_delta": True,
    "handover": False,
    "commit": False,
    "fallback": False,
    "packet_receipt": False,
    "step_end": False,
    "snapshot": False,
    "chunk": False,
    "table": False,
}
"""The methods that a served stage answers, and whether their calls carry tensors."""


def stage_handlers(parts: StageParts, held: HeldReplica) -> Mapping[str, Handler]:
    """A handler for each of METHODS."""
    gossip = parts.gossip
    judge = parts.judge
    return {
        "process": _in_service(parts, parts.hop.serve),
        "reserve": _in_service(parts, parts.hop.reserve),
        "opening": _in_service(parts, judge.serve_opening),
        "accusation": _in_service(parts, judge.serve_accusation),
        "recompute": _in_service(parts, judge.serve_recompute),
        "exchange": _of_our_line(parts, gossip.serve_exchange),
        "butterfly": _of_our_line(parts, gossip.butterfly.serve),
        "final_delta": _of_our_line(parts, gossip.final_deltas.serve, leaves=True),
        "handover": _inheriting(parts),
        "commit": gossip.exchanges.serve_commit,
        "fallback": _of_our_line(parts, gossip.fallback.serve),
        "packet_receipt": gossip.acceptance.serve_receipt,
        "step_end": gossip.serve_step_end,
        "snapshot": held.serve_snapshot,
        "chunk": held.serve_chunk,
        "table": _untied if parts.tied_ends is None else parts.tied_ends.serve,
    }


async def _untied(peer: PeerId, call: Call) -> Answer:
    """The handler of "table" where the ends share no table."""
    raise Unavailable("this stage has no table that both ends train")


def _in_service(parts: StageParts, handler: Handler) -> Handler:
    """`handler`, which refuses calls while this node does not serve microbatches."""

    def serve(peer: PeerId, call: Call) -> Awaitable[Answer]:
        if parts.context.presence.status.state not in GIVING:
            raise Unavailable("this node does not serve yet")
        return handler(peer, call)

    return serve


def _of_our_line(parts: StageParts, handler: Handler, leaves: bool = False) -> Handler:
    """`handler`, which refuses replicas whose state is of another line than ours. One that `leaves` gives what it
    learned at last, also to who took its place from a copy."""

    async def serve(peer: PeerId, call: Call) -> Answer:
        member = parts.context.presence.peer_table.member(peer)
        line = parts.gossip.line
        if member is not None and member.line != line and not (leaves and member.line.lost < line.lost):
            raise Unavailable("one of the two states lacks what the other has: they are not averaged")
        return await handler(peer, call)

    return serve


def _inheriting(parts: StageParts) -> Handler:
    """The handler of "handover", which announces what this node then keeps."""

    async def serve(peer: PeerId, call: Call) -> Answer:
        answer = await parts.backup.inherit(peer, call)
        parts.context.presence.own.announce_change()  # a node that brings the stage back must know at once who has it
        return answer

    return serve
