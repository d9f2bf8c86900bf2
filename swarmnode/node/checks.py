"""What a node has to check the answers of others, and to be checked itself."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from swarmnode.ids import PeerId, RunId, seeded
from swarmnode.manifest import Manifest
from swarmnode.node.presence import Presence
from swarmnode.node.world import World
from swarmnode.pipeline.auditor import Answered, Auditor, Claim
from swarmnode.pipeline.feeder import Samples
from swarmnode.pipeline.redo import Redoing, Shown, Text, hop_again
from swarmnode.pipeline.upstream import Fed, Upstream
from swarmnode.ports import Priority, Replica, Transport, WireTensor
from swarmnode.recovery.asking import DownloadLimits
from swarmnode.recovery.download import download

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Checks:
    """`redoing` serves those who check our answers; `auditor` and `upstream` check the answers of others, and what
    feeders send. The latter are None where the manifest has all believed."""

    redoing: Redoing
    auditor: Auditor | None = None
    upstream: Upstream | None = None

    @classmethod
    def of(
        cls,
        manifest: Manifest,
        run_id: RunId,
        stage: int,
        replica: Replica,
        world: World,
        line: Transport,
        presence: Presence,
        tasks: asyncio.TaskGroup,
        text: Text,
    ) -> Checks:
        """Those of a node that serves `stage` with `replica`; `text` reads samples where this node is a feeder."""
        redoing = Redoing(manifest, stage, replica, world.compute, replica.boundary_digest(), world.telemetry, text)
        if manifest.pipeline.audit_share == 0.0:
            return cls(redoing)
        referee = Referee(manifest, run_id, world, line)
        auditor = Auditor(
            manifest,
            run_id,
            stage,
            world.identity,
            line,
            replica,
            world.compute,
            presence.book.swarm,
            tasks,
            world.telemetry,
            presence.exclude,
            referee.weigh,
            # From the private key: nobody else can tell which answers will be checked.
            seeded("audit", world.identity.seed.hex(), presence.incarnation, stage),
        )
        for router in presence.routers:
            router.confirmed = auditor.audits.in_row
        return cls(redoing, auditor, Upstream(auditor, referee.read, referee.weigh_feeder))


class Referee:
    """Does a hop of another stage on this machine, with weights that a replica of that stage gives. It takes the memory
    of such a replica meanwhile."""

    def __init__(self, manifest: Manifest, run_id: RunId, world: World, line: Transport) -> None:
        self._manifest = manifest
        self._run_id = run_id
        self._world = world
        self._line = line
        self._one = asyncio.Lock()  # one such replica at a time
        self._samples: Samples | None = None  # this machine's own copy of the text, once it was needed

    async def weigh(self, peer: PeerId, claim: Claim, shown: Shown | None) -> Answered:
        """The hop of `claim` with the weights of `peer`. Raises Unavailable, RemoteFault."""
        got = None if shown is None else shown.got

        def work(replica: Replica) -> tuple[float, tuple[WireTensor, ...]]:
            return hop_again(replica, claim.x, claim.tokens, claim.samples, got)

        loss_sum, tensors = await self._with_weights(peer, claim.statement.stage, claim.samples, work)
        return Answered(tensors[-1], None if shown is None else tensors[0], loss_sum)

    async def weigh_feeder(self, peer: PeerId, fed: Fed) -> WireTensor:
        """The activations of what was fed, with the weights of the feeder `peer`. Raises Unavailable, RemoteFault."""

        def work(replica: Replica) -> WireTensor:
            return replica.forward(fed.tokens, keep=True, graph=False, tokens=fed.tokens)[0]

        return await self._with_weights(peer, 0, fed.samples, work)

    async def read(self, indices: Sequence[int]) -> WireTensor:
        """Tokens of samples, from this machine's own copy of the text. Raises DataError, LocalFault."""
        async with self._one:
            compute = self._world.compute
            if self._samples is None:
                self._samples = await compute.run(Priority.BACKGROUND, 0, self._world.samples)
            return await compute.run(Priority.BACKGROUND, 0, partial(self._samples.train, indices))

    async def _with_weights(self, peer: PeerId, stage: int, samples: int, work: Callable[[Replica], T]) -> T:
        """`work` on a replica of `stage` with the weights that `peer` gives."""
        compute = self._world.compute
        async with self._one:
            replica = await compute.run(Priority.BACKGROUND, 0, partial(self._world.replica, stage))
            state, _ = await download(
                self._line,
                lambda: [peer],
                stage,
                self._run_id,
                replica.sizes_of(stage),
                DownloadLimits(),
                self._world.telemetry,
            )

            def loaded() -> T:
                replica.load(state)
                return work(replica)

            return await compute.run(Priority.BACKWARD, samples, loaded)
