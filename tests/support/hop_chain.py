"""Replicas in a chain of real hops, transport in memory."""

from __future__ import annotations

import asyncio
import contextlib
import random
import threading
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

from benchmarks.memory_network import MemoryNetwork, MemoryTransport
from swarmnode.app.machine.compute import ThreadCompute
from swarmnode.app.machine.replica import TorchReplica
from swarmnode.base.identity import Identity
from swarmnode.base.ids import PeerId, microbatch_id
from swarmnode.base.ports import Answer, Call, Priority
from swarmnode.base.wire import call_pb2 as wire
from swarmnode.base.wire import record_pb2
from swarmnode.net.membership.judge import Trusting
from swarmnode.net.membership.swarm import Member
from swarmnode.net.membership.trust import PeerHistory
from swarmnode.run.manifest import Manifest
from swarmnode.train.node.membership_handlers import MembershipHandlers
from swarmnode.train.pipeline.backlog import Backlog
from swarmnode.train.pipeline.hop import Hop
from swarmnode.train.pipeline.next_hop import MicrobatchResult, NextHop
from swarmnode.train.pipeline.route import Router
from tests.support.fake_telemetry import Quiet
from tests.support.stage_context import stage_context
from tests.support.village import RUN, Numbers, manifest

STAGES = 3


class Served:
    """One replica with all that it answers microbatches with. `answering` is called before each answer leaves."""

    def __init__(
        self,
        transport: Any,
        stage: int,
        tasks: asyncio.TaskGroup,
        run: Manifest | None = None,
    ) -> None:
        self.run = run = run or manifest(STAGES)
        quiet = Quiet()
        self.stage = stage
        self.transport = transport
        self.replica = TorchReplica(run, stage)
        self.compute = ThreadCompute(quiet)
        self.routers = [Router(random.Random(n), epsilon=0.0) for n in range(STAGES)]
        self.backlog = Backlog(tasks, 4, quiet)
        self.next_hop = NextHop(RUN, self.transport, self.routers, quiet, run)
        self.samples_total = 0
        here = stage_context(
            run,
            stage,
            RUN,
            replica=self.replica,
            transport=transport,
            compute=self.compute,
            telemetry=quiet,
            identity=SimpleNamespace(peer_id=transport.peer_id),
            samples_total=lambda: self.samples_total,
        )
        self.hop = Hop(here, self.next_hop, self.backlog, PeerHistory(), Trusting())
        self.answering = lambda: None
        MembershipHandlers(record_pb2.SignedManifest()).serve(self.transport)
        self.transport.serve("process", self._serve, tensor_bytes_max=1 << 20)
        self.transport.serve("reserve", self.hop.reserve, tensor_bytes_max=0)

    async def _serve(self, peer: PeerId, call: Call) -> Answer:
        answer = await self.hop.serve(peer, call)
        self.answering()
        return answer

    def knows(self, *others: Served) -> None:
        for stage in range(STAGES):
            self.routers[stage].update(
                Member(
                    peer=other.transport.peer_id,
                    stage=stage,
                    state=record_pb2.NODE_STATE_TRAINING,
                    sequence=1,
                    expires_unix_s=1e12,
                    samples_per_second=1.0,
                    queue=0,
                    round_index=0,
                )
                for other in others
                if other.stage == stage
            )

    async def feed(self, deadline_s: float = 20.0, serial: int = 1) -> MicrobatchResult:
        """A microbatch of four samples from here, as the feeder begins it."""
        tokens = Numbers(self.run).train(range(4))
        process = wire.Process(
            microbatch_id=microbatch_id(self.transport.peer_id, 0, serial),
            feeder=self.transport.peer_id,
            samples=4,
            purpose=wire.PURPOSE_TRAIN,
            itinerary=range(STAGES),
        )
        return await self.hop.run_microbatch(process, tokens, tokens, asyncio.get_running_loop().time() + deadline_s)


@contextlib.asynccontextmanager
async def chain(*stages: int, run: Manifest | None = None) -> AsyncIterator[tuple[MemoryNetwork, list[Served]]]:
    """A replica for each of `stages`, all of which know each other; at the end nothing is held."""
    network = MemoryNetwork()
    async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
        identities = [Identity.of_seed(bytes([number + 1]) * 32) for number in range(len(stages))]
        transports = [MemoryTransport(network, identity.peer_id, RUN) for identity in identities]
        people = [Served(transport, stage, tasks, run) for transport, stage in zip(transports, stages, strict=True)]
        for person in people:
            person.knows(*people)
        try:
            yield network, people
            for person in people:
                await person.backlog.empty()
        finally:
            for person in people:
                person.compute.close()


@contextlib.asynccontextmanager
async def occupied(person: Served, pieces: int) -> AsyncIterator[None]:
    """Its device has so many pieces of work until the end of this."""
    held = threading.Event()
    works = [person.compute.run(Priority.OUTER, 0, lambda: held.wait(30.0)) for _ in range(pieces)]
    ongoing = [asyncio.ensure_future(work) for work in works]
    try:
        while person.compute.waiting < pieces:
            await asyncio.sleep(0.001)
        yield
    finally:
        held.set()
        await asyncio.gather(*ongoing)
