"""The first hop of a feeder without a stage: some replica of stage 0, which takes its signed tokens."""

from __future__ import annotations

from swarmnode.identity import Identity
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
        self, process: wire.Process, x: WireTensor, tokens: WireTensor, deadline: float
    ) -> MicrobatchResult:
        """See feeder.FirstHop."""
        sign_feed(process, tokens, self._next_hop.run_id, self._identity)
        outcome = await self._next_hop.send(process, x, tokens, deadline)
        if process.purpose == wire.PURPOSE_TRAIN and outcome.peer is not None:
            self._worked(outcome.peer)
        return outcome
