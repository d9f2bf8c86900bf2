"""The first hop on another machine: some replica of stage 0, which takes the feeder's signed tokens."""

from __future__ import annotations

from collections.abc import Collection

from swarmnode.identity import Identity
from swarmnode.ids import PeerId
from swarmnode.pipeline.feed_signature import sign_feed
from swarmnode.pipeline.hop import WorkSeen
from swarmnode.pipeline.next_hop import MicrobatchResult, NextHop
from swarmnode.ports import WireTensor
from swarmnode.wire import call_pb2 as wire


class RemoteFirstHop:
    """feeder.FirstHop by replicas of stage 0 on other machines. `worked` is told each that answered."""

    boundary_digest = b""  # each replica names its own

    def __init__(self, next_hop: NextHop, identity: Identity, worked: WorkSeen) -> None:
        self._next_hop = next_hop
        self._identity = identity
        self._worked = worked

    async def run_microbatch(
        self,
        process: wire.Process,
        x: WireTensor,
        tokens: WireTensor,
        deadline: float,
        but: Collection[PeerId] | None = None,
    ) -> MicrobatchResult:
        """See feeder.FirstHop. With `but`, those replicas are not asked, and it raises Unavailable once all others are
        busy, banned or were tried."""
        sign_feed(process, tokens, self._next_hop.run_id, self._identity)
        outcome = await self._next_hop.send(process, x, tokens, deadline, but)
        if process.purpose == wire.PURPOSE_TRAIN and outcome.peer is not None:
            self._worked(outcome.peer)
        return outcome
