"""The parts by which a node checks the answers of others, and is checked itself."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from functools import partial
from typing import TypeVar

from swarmnode.errors import Unavailable
from swarmnode.ids import PeerId, seeded, short
from swarmnode.node.chunk_samples import ChunkSamples
from swarmnode.node.limits import NodeRole
from swarmnode.node.node_ports import NodeContext
from swarmnode.pipeline.feeder import Samples
from swarmnode.pipeline.stage_worker import StageAudits
from swarmnode.ports import Priority, Replica, WireTensor
from swarmnode.transfer.download import DonorClient, DownloadLimits
from swarmnode.trust import statement as statements
from swarmnode.trust.accusation import Accusations
from swarmnode.trust.audit import NEAR_STEPS, SNAPSHOT_AGE_S
from swarmnode.trust.auditor import Auditor, OwnWeights
from swarmnode.trust.input_check import InputAuditor
from swarmnode.trust.recompute import RecomputeService, Text, hop_again, sent_again
from swarmnode.trust.statement import HopAnswer, HopClaim, HopEvidence, StepsApart, StepsContradicted
from swarmnode.wire import call_pb2 as wire

T = TypeVar("T")

# Weights that took more inner steps since the answer cannot judge it. 16 steps apart, honest replicas have a cosine of
# .983 or more (measured on the demo's model); 120 apart, none at all (measured in a village of tests/node, where a tiny
# model takes a hundred steps a second and a download takes one).
STEPS_APART_MAX = 32
BUSY_MAX_S = 120.0  # guess: waited for an accused that says it is busy; others wait behind it
REPLAY_SPAN_S = 10.0  # guess: a run that stood still for so long stands
STEPS_FACTOR = 4.0  # guess: a replica is so much faster than all of them together were on average
RATE_AT_FIRST = 1000.0  # ... guess: samples a second, at most; a tiny model on two cores trains some hundred


def stage_audits(
    context: NodeContext, stage: int, replica: Replica, tasks: asyncio.TaskGroup, text: Text
) -> StageAudits:
    """The audit parts of a node that serves `stage` with `replica`; `text` reads samples where this node feeds."""
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
    if manifest.pipeline.audit_share == 0.0:
        return StageAudits(recompute)
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
        seeded("audit", ports.identity.seed.hex(), presence.incarnation, stage),
    )
    input_auditor = InputAuditor(auditor, referee.read)
    accusations = Accusations(auditor, stage, replica, ports.compute)
    return StageAudits(recompute, auditor, input_auditor, accusations)


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
        self._samples_total = context.presence.samples_total
        self._begun: tuple[float, int] | None = None  # loop time and the run's samples when this was first asked
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
        self._begun = self._begun or (asyncio.get_running_loop().time(), self._samples_total())
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
                # An older version's feeder says nothing of its weights.
                apart = abs(state.inner_steps - stated.inner_steps) if stage or stated.mark else 0
                if apart > STEPS_APART_MAX:
                    what = f"the weights of {short(peer)} are {apart} inner steps from those that answered"
                    if claim.came_s is not None and apart > STEPS_APART_MAX + self._steps_since(claim.came_s):
                        raise StepsContradicted(what)
                    raise StepsApart(what)

                def work() -> tuple[float, tuple[WireTensor, ...]]:
                    replica.load(state)
                    if stage == 0:
                        return 0.0, (sent_again(replica, claim.tokens),)
                    return hop_again(replica, claim.x, claim.tokens, claim.samples, got)

                loss_sum, tensors = await compute.run(Priority.BACKWARD, claim.samples, work)
                near = mark == stated.mark and apart <= NEAR_STEPS
                return replace(HopAnswer.of(tensors, loss_sum), apart=apart, near=near)

            yield OwnWeights(again, state.inner_steps, mark)

    def _steps_since(self, came_s: float) -> float:
        """Inner steps that one replica can have taken since `came_s`, by the rate of the whole run."""
        assert self._begun is not None
        begun_s, samples = self._begun
        now_s = asyncio.get_running_loop().time()
        rate = STEPS_FACTOR * (self._samples_total() - samples) / max(1.0, now_s - begun_s)
        if now_s - begun_s < REPLAY_SPAN_S:  # the first answers judged: nothing may have been trained in that time
            rate = max(rate, RATE_AT_FIRST)
        return rate * (now_s - came_s + SNAPSHOT_AGE_S) / self._manifest.inner.microbatch
