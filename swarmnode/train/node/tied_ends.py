"""A tied model's table at one end of the pipeline: after each round it takes the other end's part of it
(model/tied_table.py).

A part that is late or missing stops nothing: the next one has all that it had.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from functools import partial

from swarmnode.base.errors import RemoteFault, Unavailable
from swarmnode.base.ids import PeerId, seeded
from swarmnode.base.ports import Answer, Call, Priority, WireTensor
from swarmnode.base.wire import call_pb2 as wire
from swarmnode.net.membership.liveness import TRIES
from swarmnode.net.membership.swarm import StageContext
from swarmnode.train.gossip.exchange import Gossip
from swarmnode.train.gossip.outgoing_packet import PACKETS_BYTES_PER_S, reply_bytes_max

GIVEN_MAX = 2  # times that one replica of the other end gets the part of a round: an answer may be lost
ITEMSIZE = 2  # f16


class TiedEnds:
    """Keeps the table of the replica of an end equal to that of the other end's replicas."""

    def __init__(self, here: StageContext, gossip: Gossip) -> None:
        model = here.manifest.model
        self._here = here
        self._gossip = gossip
        self._other = here.manifest.pipeline.stages - 1 - here.stage
        self._nbytes = ITEMSIZE * model.vocabulary * model.width
        self._part: tuple[int, WireTensor] | None = None  # the last one given, and its round
        self._given: Counter[PeerId] = Counter()  # of that round
        self._making = asyncio.Lock()

    async def run(self) -> None:
        """Take the other end's part after each round, until cancelled."""
        while True:
            done = self._gossip.done
            await self._take(done)
            if self._gossip.done == done:
                await self._gossip.beyond(done)

    async def _take(self, done: int) -> None:
        """Take the part of a replica of the other end, another one each round."""
        here = self._here
        limit_s = self._here.manifest.limits.exchange_timeout_s
        donors = [member.peer for member in here.swarm().serving(self._other)]
        seeded("table", here.run_id, here.me, done).shuffle(donors)
        for peer in donors[:TRIES]:
            call = Call(wire.Request(run_id=here.run_id, table=wire.TableRequest(round=done)))
            try:
                answer = await here.transport.call(
                    peer,
                    call,
                    timeout_s=2 * limit_s + self._nbytes / PACKETS_BYTES_PER_S,
                    reply_bytes_max=reply_bytes_max(self._nbytes),
                )
                if len(answer.tensors) != 1:
                    raise RemoteFault(f"a tied table in {len(answer.tensors)} tensors")
                await self._put(answer.tensors[0])
            except (RemoteFault, Unavailable) as error:
                here.telemetry.event("table.missed", peer=peer, round=done, reason=str(error))
            else:
                here.telemetry.event("table.taken", peer=peer, round=done, of_round=answer.header.table.round)
                return

    async def _put(self, part: WireTensor) -> None:
        """Put the part into the table, between two rounds."""
        gossip = self._gossip
        run = partial(self._here.compute.run, Priority.OUTER, 0)
        while not await run(partial(self._here.replica.take_table, part)):
            if gossip.idle.is_set():  # a node that leaves has marked a boundary
                await gossip.beyond(gossip.done)
            await gossip.idle.wait()

    async def serve(self, peer: PeerId, call: Call) -> Answer:
        """Handler of method "table": this end's part, once the round asked for is over here or has been waited for.
        Raises Unavailable where `peer` has it."""
        gossip = self._gossip
        due = call.header.table.round
        try:
            async with asyncio.timeout(self._here.manifest.limits.exchange_timeout_s):
                while gossip.done < due - due % gossip.stride:
                    await gossip.beyond(gossip.done)
        except TimeoutError:
            pass  # what it has is better than nothing
        async with self._making:
            if self._part is None or self._part[0] != gossip.done:
                part = await self._here.compute.run(Priority.OUTER, 0, self._here.replica.table_part)
                self._part = gossip.done, part
                self._given.clear()
        self._given[peer] += 1
        if self._given[peer] > GIVEN_MAX:
            raise Unavailable(f"the part of round {self._part[0]} was given already")
        return Answer(wire.Reply(table=wire.TablePart(round=self._part[0])), (self._part[1],))
