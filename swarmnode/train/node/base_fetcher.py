"""A stage's weights of the pretrained model that a run starts from go chunk by chunk into a replica.

Only the chunks of the node's own stage are read, from a folder of this machine, from members that hold them, or from
the web. Each is verified, converted and placed before the next ones are needed, so no second copy of the stage is made.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from functools import partial

from swarmnode.base.concurrency import gather_or_cancel
from swarmnode.base.errors import DataError, RemoteFault, Unavailable
from swarmnode.base.ids import PeerId, RunId
from swarmnode.base.metrics import name
from swarmnode.base.ports import Priority, Replica, Transport
from swarmnode.data.base_index import BaseIndex, WeightSpan
from swarmnode.keep.transfer.chunk_set import PREFETCH_CHUNKS, ChunkSources
from swarmnode.model.architecture import Shapes
from swarmnode.model.split import parameter_shapes, stages_of
from swarmnode.run.manifest import Manifest
from swarmnode.run.manifest.location import base_url
from swarmnode.train.node.node_ports import NodePorts
from swarmnode.train.node.presence import Presence

WAIT_S = 120.0  # guess: for a chunk; after it the node looks again for replicas that have a state


class BaseFetcher:
    """recovery.restore_context.BaseWeights of a node."""

    def __init__(
        self, manifest: Manifest, run_id: RunId, ports: NodePorts, transport: Transport, presence: Presence
    ) -> None:
        assert ports.base is not None
        self._manifest = manifest
        self._set = ports.base.set
        self._compute = ports.compute
        self._telemetry = ports.telemetry
        self._presence = presence
        urls = [str(base_url(one)) for one in manifest.base.locations]
        asked = transport, ports.telemetry, ports.base.meeting_points, self._holders
        self._set.fetch_from(ChunkSources(run_id, urls, ports.base.web, *asked, name.BASE_BYTES))

    async def load(self, replica: Replica, stage: int) -> int:
        """See recovery.restore_context.BaseWeights."""
        loop = asyncio.get_running_loop()
        begun_s = loop.time()
        await self._in_time(self._set.open, "the index")
        shapes = parameter_shapes(self._manifest.model, stages_of(self._manifest)[stage])
        spans = spans_of(self._set.index, shapes)
        order = list(spans)
        for numbers in (order[at : at + PREFETCH_CHUNKS] for at in range(0, len(order), PREFETCH_CHUNKS)):
            await gather_or_cancel([partial(self._fetch, number) for number in numbers])
            for number in numbers:
                await self._place(replica, number, spans[number])
        await self._compute.run(Priority.OUTER, 0, replica.weights_placed)
        assert self._set.store is not None
        self._set.store.forget()
        nbytes = sum(self._set.index.chunk(number).nbytes for number in spans)
        self._telemetry.event(
            "base.loaded", stage=stage, nbytes=nbytes, chunks=len(spans), seconds=round(loop.time() - begun_s, 3)
        )
        return nbytes

    async def _fetch(self, number: int) -> None:
        await self._in_time(partial(self._set.ensure, number), f"chunk {number}")

    async def _in_time(self, work: Callable[[], Awaitable[None]], what: str) -> None:
        """Run `work`. Raises Unavailable when it takes longer than WAIT_S."""
        try:
            async with asyncio.timeout(WAIT_S):
                await work()
        except TimeoutError:
            spoilt = 0 if self._set.store is None else self._set.store.spoilt
            also = f"; {spoilt} chunks in this machine's own folder are not the base model's" if spoilt else ""
            raise Unavailable(f"nobody gave {what} of the base model within {WAIT_S:.0f} s{also}") from None

    async def _place(self, replica: Replica, number: int, spans: Sequence[WeightSpan]) -> None:
        assert self._set.store is not None
        data = await asyncio.to_thread(self._set.store.read, number)
        if data is None:
            raise Unavailable(f"chunk {number} of the base model is no longer on this machine")
        try:
            await self._compute.run(Priority.OUTER, 0, partial(place, replica, data, spans))
        except RemoteFault as fault:  # the hash is right: the model itself is damaged
            raise DataError(f"the base model: {fault}") from None

    def _holders(self) -> list[PeerId]:
        """Members of this node's stage, which have read the same chunks."""
        stage = self._presence.status.stage
        me = self._presence.me
        return [m.peer for m in self._presence.peer_table.swarm().members() if m.stage == stage and m.peer != me]


def place(replica: Replica, data: bytes, spans: Sequence[WeightSpan]) -> None:
    """Write what one chunk holds into `replica`. Raises RemoteFault for numbers that are not finite."""
    for span in spans:
        replica.place_weights(span.name, span.first, span.values(data))


def spans_of(index: BaseIndex, shapes: Shapes) -> dict[int, list[WeightSpan]]:
    """The spans of a stage's parameters in each chunk. Raises DataError when the index lacks one, or has it in another
    shape."""
    spans = index.spans(shapes)
    for parameter, shape in shapes.items():
        if (stored := index.tensors[parameter].shape) != shape:
            raise DataError(
                f"base.index: {parameter} is {list(stored)}, in the manifest's model it is {list(shape)}: make the"
                " manifest with `swarmnode init --from`"
            )
    return spans
