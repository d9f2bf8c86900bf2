"""What a node has to check the answers of others, and to be checked itself."""

from __future__ import annotations

import asyncio
from functools import partial

from swarmnode.ids import PeerId, RunId, seeded
from swarmnode.manifest import Manifest
from swarmnode.node.presence import Presence
from swarmnode.node.world import World
from swarmnode.pipeline.auditor import Answered, Auditor, Claim
from swarmnode.pipeline.redo import Redoing, Shown, hop_again
from swarmnode.ports import Priority, Replica, Transport, WireTensor
from swarmnode.recovery.asking import DownloadLimits
from swarmnode.recovery.download import download


def checks_of(
    manifest: Manifest,
    run_id: RunId,
    stage: int,
    replica: Replica,
    world: World,
    line: Transport,
    presence: Presence,
    tasks: asyncio.TaskGroup,
) -> tuple[Redoing, Auditor | None]:
    """What serves those who check the answers of a node that serves `stage` with `replica`, and what checks the answers
    of others; the latter None where the manifest has answers believed."""
    redoing = Redoing(manifest, stage, replica, world.compute, replica.boundary_digest(), world.telemetry)
    if manifest.pipeline.audit_share == 0.0:
        return redoing, None
    auditor = Auditor(
        manifest,
        run_id,
        world.identity,
        line,
        replica,
        world.compute,
        presence.book.swarm,
        tasks,
        world.telemetry,
        presence.exclude,
        Referee(manifest, run_id, world, line).weigh,
        # From the private key: nobody else can tell which answers will be checked.
        seeded("audit", world.identity.seed.hex(), presence.incarnation, stage),
    )
    return redoing, auditor


class Referee:
    """Does a hop of another stage on this machine, with weights that a replica of that stage gives. It takes the memory
    of such a replica meanwhile."""

    def __init__(self, manifest: Manifest, run_id: RunId, world: World, line: Transport) -> None:
        self._manifest = manifest
        self._run_id = run_id
        self._world = world
        self._line = line
        self._one = asyncio.Lock()  # one such replica at a time

    async def weigh(self, peer: PeerId, claim: Claim, shown: Shown | None) -> Answered:
        """The hop of `claim` with the weights of `peer`. Raises Unavailable, RemoteFault."""
        stage, compute = claim.statement.stage, self._world.compute
        async with self._one:
            replica = await compute.run(Priority.BACKGROUND, 0, partial(self._world.replica, stage))
            state, _ = await download(
                self._line,
                lambda: [peer],
                stage,
                self._run_id,
                replica.parameters,
                DownloadLimits(),
                self._world.telemetry,
            )

            def work() -> tuple[float, tuple[WireTensor, ...]]:
                replica.load(state)
                got = None if shown is None else shown.got
                return hop_again(replica, claim.x, claim.tokens, claim.samples, got)

            loss_sum, tensors = await compute.run(Priority.BACKWARD, claim.samples, work)
        return Answered(tensors[-1], None if shown is None else tensors[0], loss_sum)
