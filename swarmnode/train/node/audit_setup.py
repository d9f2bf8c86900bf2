"""The parts by which a node checks the answers of others, and is checked itself."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from functools import partial
from typing import TypeVar

from swarmnode.base.errors import Unavailable
from swarmnode.base.ids import PeerId, seeded
from swarmnode.base.ports import Priority, Replica, WireTensor
from swarmnode.base.wire import call_pb2 as wire
from swarmnode.keep.transfer.download import DonorClient, DownloadLimits
from swarmnode.run.manifest.gossip_compat import averages_gradients
from swarmnode.train.node.chunk_samples import ChunkSamples
from swarmnode.train.node.limits import NodeRole
from swarmnode.train.node.node_ports import NodeContext
from swarmnode.train.pipeline.feeder import Samples
from swarmnode.trust import statement as statements
from swarmnode.trust.accusation import Accusations
from swarmnode.trust.auditor import Auditor, OwnWeights
from swarmnode.trust.input_check import InputAuditor
from swarmnode.trust.recompute import RecomputeService, Text, hop_again, sent_again
from swarmnode.trust.stage_judge import StageJudge
from swarmnode.trust.statement import HopAnswer, HopClaim, HopEvidence

T = TypeVar("T")

BUSY_MAX_S = 120.0  # guess: waited for an accused that says it is busy; others wait behind it


def stage_judge(context: NodeContext, stage: int, replica: Replica, tasks: asyncio.TaskGroup, text: Text) -> StageJudge:
    """The judge of a node that serves `stage` with `replica`; `text` reads samples where this node feeds."""
    manifest = context.manifest
    run_id = context.run_id
    ports = context.ports
    presence = context.presence

    def sign(statement: wire.Statement) -> None:
        statement.run_id = run_id
        statement.server = ports.identity.peer_id
        statements.sign(statement, ports.identity)

    recompute = RecomputeService(
        manifest, stage, replica, ports.compute, replica.boundary_digest(), ports.telemetry, text, sign
    )
    referee = HopReplayer(context)
    auditor = Auditor(
        manifest,
        run_id,
        stage,
        ports.identity,
        context.transport,
        replica,
        ports.compute,
        presence.peer_table.swarm,
        tasks,
        ports.telemetry,
        presence.exclude,
        referee.weights,
        # From the private key: nobody else can tell which answers will be checked.
        seeded("audit", ports.identity.seed.hex(), presence.own.incarnation, stage),
    )
    input_auditor = InputAuditor(auditor, referee.read)
    accusations = Accusations(auditor, stage, replica, ports.compute)
    return StageJudge(replica, recompute, auditor, input_auditor, accusations)


class HopReplayer:
    """Recomputes a hop of another stage on this machine, with weights that a replica of that stage gives. Meanwhile it
    takes the memory of such a replica."""

    def __init__(self, context: NodeContext) -> None:
        self._manifest = context.manifest
        self._run_id = context.run_id
        self._ports = context.ports
        self._transport = context.transport
        self._restorer = context.restorer
        self._one = asyncio.Lock()  # one such replica at a time
        self._samples: Samples | None = None  # this machine's own copy of the text, once it was needed

    async def read(self, indices: Sequence[int]) -> WireTensor:
        """Tokens of samples, from this machine's own copy of the text. Raises DataError, LocalFault, and Unavailable
        where it has none at hand."""
        async with self._one:
            compute = self._ports.compute
            own = self._ports.data
            if own is not None:
                data = own.set
                self._samples = self._samples or (ChunkSamples(data, self._manifest) if data.is_open else None)
            elif self._ports.no_files or self._ports.role is NodeRole.REPLICA:
                raise Unavailable("this machine reads no text")
            elif self._samples is None:
                self._samples = await compute.run(Priority.FORWARD, 0, self._ports.samples)
            tokens = await self._samples.again(indices) if self._samples is not None else None
            if tokens is None:
                raise Unavailable("this machine has no copy of that text")
            return tokens

    @contextlib.asynccontextmanager
    async def weights(self, peer: PeerId, stage: int) -> AsyncIterator[OwnWeights]:
        """The weights of `peer`, a replica of `stage`, on a replica of ours. Raises Unavailable, RemoteFault."""
        compute = self._ports.compute
        async with self._one:
            replica = await compute.run(Priority.FORWARD, 0, partial(self._ports.replica, self._manifest, stage))
            await self._restorer.freeze(replica, stage)
            here = self._transport, self._run_id, stage, replica.sizes_of(stage), self._ports.telemetry
            client = DonorClient(*here, limits=DownloadLimits(busy_max_s=BUSY_MAX_S))
            state, _ = await client.download(lambda: [peer])
            mark = await compute.run(Priority.BACKWARD, 0, partial(replica.mark, state))

            async def again(claim: HopClaim, shown: HopEvidence | None) -> HopAnswer:
                stated = claim.statement
                got = None if shown is None else shown.got
                # An older version's feeder says nothing of its weights. Others may have predicted the next step's.
                apart = abs(state.inner_steps - stated.inner_steps) if stage or stated.mark else 0
                if stage == 0 and self._manifest.pipeline.predicts_weights and not averages_gradients(self._manifest):
                    apart = max(apart, 1)

                def work() -> tuple[float, tuple[WireTensor, ...]]:
                    replica.load(state)
                    if stage == 0:
                        return 0.0, (sent_again(replica, claim.tokens),)
                    return hop_again(replica, claim.x, claim.tokens, claim.samples, got)

                loss_sum, tensors = await compute.run(Priority.BACKWARD, claim.samples, work)
                return replace(HopAnswer.of(tensors, loss_sum), apart=apart, marked=mark == stated.mark)

            yield OwnWeights(again)
