"""A tied model's table at one end of the pipeline: after each round it takes the other end's part of it.

The part is a section of the other end's state (model/section.py), and comes as other state does (recovery/download.py).
A part that is late or missing stops nothing: the next one has all that it had.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from functools import partial

from swarmnode.errors import Unavailable
from swarmnode.gossip.exchange import Gossip
from swarmnode.ids import digest64
from swarmnode.membership.stage_view import rank
from swarmnode.membership.swarm import Member
from swarmnode.node.node_context import NodeContext
from swarmnode.ports import Priority, Replica, State
from swarmnode.recovery.donor_client import DownloadLimits
from swarmnode.recovery.download import download
from swarmnode.recovery.snapshot import StateSlice

TABLE_PART = StateSlice(("table",))
LIMITS = DownloadLimits(attempts_max=3, parallel=1, sources=1, pause_s=1.0, rest=1.0, busy_max_s=0.0, waited_for=False)
"""Half of one donor's line at most: microbatches and packets go first. Guess."""


class TiedEnds:
    """Keeps the table of the `replica` of an end equal to that of the `other` end's replicas, a stage."""

    def __init__(self, context: NodeContext, replica: Replica, gossip: Gossip, other: int) -> None:
        self._context, self._replica, self._gossip, self._other = context, replica, gossip, other

    async def run(self) -> None:
        """Take the other end's part after each round, until cancelled."""
        period_s = self._context.manifest.limits.announce_period_s
        while True:
            done = self._gossip.done
            while not self._donors(done) and self._gossip.done == done:
                with suppress(TimeoutError):
                    async with asyncio.timeout(period_s):
                        await self._gossip.beyond(done)
            with suppress(Unavailable):  # the download has said why
                await self._take(done)
            if self._gossip.done == done:
                await self._gossip.beyond(done)

    def _serving(self, done: int) -> list[Member]:
        """Replicas of the other end, in another order each round, so that no two replicas keep meeting."""
        salt = digest64("table", self._context.me, done)
        serving = self._context.presence.peer_table.swarm().serving(self._other)
        return sorted(serving, key=lambda member: rank(member.peer, salt))

    def _donors(self, done: int) -> list[Member]:
        """Those that have done what they can of rounds up to `done`."""
        return [m for m in self._serving(done) if m.round_index >= done - done % m.round_stride]

    async def _take(self, done: int) -> None:
        """Take the part of a replica that has come to round `done`, or after another round here of any."""
        context, donors = self._context, self._donors(done) or self._serving(done)
        await download(
            context.transport,
            lambda: [member.peer for member in donors],
            self._other,
            context.run_id,
            self._replica.sizes_of(self._other),
            LIMITS,
            context.telemetry,
            rounds_max=lambda: context.presence.run_progress.rounds_max,
            accept=self._accept,
            cut=TABLE_PART,
            round_min=min((member.round_index for member in donors), default=0),
        )

    async def _accept(self, part: State) -> None:
        gossip, run = self._gossip, partial(self._context.ports.compute.run, Priority.OUTER, 0)
        while not await run(partial(self._replica.take_table, part)):
            if gossip.idle.is_set():  # a node that leaves has marked a boundary
                await gossip.beyond(gossip.done)
            await gossip.idle.wait()
