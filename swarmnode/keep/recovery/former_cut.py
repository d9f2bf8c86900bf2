"""States of the stages as they were cut before an amendment: members saved them, and give them to each other.

On the wire the stages of the earlier cut have the numbers from STAGES_MAX on.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from swarmnode.base.bounds import STAGES_MAX
from swarmnode.base.errors import DataError, LocalFault, RemoteFault, Unavailable
from swarmnode.base.ids import stage_name
from swarmnode.base.ports import Priority
from swarmnode.keep.recovery.restore_context import RestoreContext
from swarmnode.keep.recovery.resumption import Resumption
from swarmnode.keep.recovery.state_fetcher import StateFetcher
from swarmnode.keep.transfer.snapshot import WHOLE, Snapshot
from swarmnode.net.membership.swarm import Swarm
from swarmnode.run.manifest import Manifest


@dataclass(frozen=True, slots=True)
class FormerCut:
    """The saved stages of `manifest`, by which the stages were cut before, in this node's home and at members."""

    here: RestoreContext
    manifest: Manifest

    async def give(self, wired: int, known: Snapshot | None) -> Snapshot:
        """The newest saved state of the stage that has the number `wired`, packed; `known` if it is that. Raises
        Unavailable."""
        here = self.here
        stage = wired - STAGES_MAX
        run = partial(here.compute.run, Priority.OUTER, 0)
        if (piece := here.saved.recut([stage])) is None:
            raise Unavailable(f"no {stage_name(stage)} as it was before is saved here")
        if known is not None and known.round_index == piece.checkpoint.round:
            return known
        replica = await run(partial(here.make, self.manifest, stage))
        try:
            shapes = here.checkpoints.shapes(self.manifest, stage)
            await here.load(replica, await piece.load(shapes, here.telemetry, stage))
        except (DataError, LocalFault, RemoteFault) as error:
            raise Unavailable(str(error)) from error
        state = await run(partial(replica.snapshot, packed=True))
        return Snapshot.of(state, wired, piece.checkpoint.round, piece.progress().to_wire())

    async def gathered(self, fetcher: StateFetcher, swarm: Swarm, stage: int) -> Resumption:
        """The earlier stages that `stage` has layers of, fetched into this home where members have later ones. Raises
        Unavailable while one is nowhere to be had."""
        shapes = self.here.checkpoints.shapes
        mine = shapes(self.here.manifest, stage)["theta"].keys()
        before = self.manifest
        needed = [old for old in range(before.pipeline.stages) if mine & shapes(before, old)["theta"].keys()]
        for old in needed:
            await self._fetch(fetcher, swarm, old)
        if (pieces := self.here.saved.recut(needed)) is None:
            raise Unavailable("a stage as it was before that was saved here is gone")
        return pieces

    async def _fetch(self, fetcher: StateFetcher, swarm: Swarm, stage: int) -> None:
        """Have the newest state of the earlier `stage` in this home. Raises Unavailable."""
        here = self.here
        me = here.membership.me
        own = here.saved.recut([stage])
        wired = STAGES_MAX + stage
        run = partial(here.compute.run, Priority.OUTER, 0)
        members = [member.peer for member in swarm.members() if member.peer != me]
        offers = await fetcher.offers(wired, WHOLE, members)
        if own is not None and own.checkpoint.round >= max((offer.round for _, offer in offers), default=0):
            return
        if not offers:
            raise Unavailable(f"{stage_name(stage)} as it was before is saved at no member that is here yet")
        keepers = [peer for peer, _ in offers]
        judge = fetcher.judge(wired, keepers=lambda: keepers)
        compare = None if judge is None else judge.compare
        replica = await run(partial(here.make, self.manifest, stage))
        accept = partial(here.load, replica)
        _, offer = await fetcher.download(fetcher.client(wired), lambda: keepers, compare, accept)
        state = await run(replica.snapshot)
        shapes = here.checkpoints.shapes(self.manifest, stage)
        told = offer.progress
        await here.saved.save(state, shapes, stage=stage, round_index=offer.round, peer=me, progress=told, piece=True)
