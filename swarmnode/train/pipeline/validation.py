"""The held-out loss, which a feeder measures through random routes. Measuring trains nothing."""

from __future__ import annotations

import asyncio
from functools import partial

from swarmnode.base.concurrency import gather_or_cancel
from swarmnode.base.errors import RemoteFault, Unavailable
from swarmnode.base.ids import digest64
from swarmnode.base.metrics import name
from swarmnode.base.ports import WireTensor
from swarmnode.base.wire import call_pb2 as wire
from swarmnode.net.membership.swarm import JOINING
from swarmnode.train.pipeline.feeder import VALIDATORS, Feeder


def rows(tokens: WireTensor) -> list[WireTensor]:
    """Each sample of `tokens` [B, T+1] by itself."""
    count, width = tokens.shape
    size = tokens.nbytes // count
    data = bytes(memoryview(tokens.data))
    return [WireTensor(tokens.dtype, (1, width), data[at : at + size]) for at in range(0, count * size, size)]


class Validator:
    """Measures for one feeder. `last`: (nats per token, the run's samples at that time); `first`: nats per token."""

    def __init__(self, feeder: Feeder) -> None:
        self._feeder = feeder
        self.last: tuple[float, int] | None = None
        self.first: float | None = None

    def due(self, before: int, after: int) -> bool:
        """Whether the rounds from `before` to `after` complete another `validation_every_samples` of the run, and this
        feeder measures the loss then."""
        return self._index(after) > self._index(before) and self.validates(after)

    def validates(self, round_index: int) -> bool:
        """Whether this feeder validates after `round_index`: VALIDATORS feeders by hash, so that one may have died
        without its record having expired."""
        feeder = self._feeder
        feeders = {*feeder.swarm().feeders(), feeder.me}
        turn = self._index(round_index)
        if round_index == 0:  # all join at once: those that are about to feed take their turn, too
            feeders.update(member.peer for member in feeder.swarm().stages[0] if member.state == JOINING)
        order = sorted(feeders, key=lambda peer: digest64(feeder.manifest.seed, "validate", turn, peer))
        return feeder.me in order[:VALIDATORS]

    def _index(self, round_index: int) -> int:
        manifest = self._feeder.manifest
        return round_index * manifest.gossip.round_samples // manifest.pipeline.validation_every_samples

    async def validate(self, samples_total: int) -> None:
        """Measure after `samples_total` samples of the run; nothing is told if a microbatch finds no route."""
        feeder = self._feeder
        await feeder.samples.fetch_held_out()
        pieces = feeder.samples.held_out()
        if feeder.together:  # small ones: the step waits for the one in work
            pieces = [row for piece in pieces for row in rows(piece)]
        gate = asyncio.Semaphore(VALIDATORS)
        with feeder.sparing():
            try:
                results = await gather_or_cancel([partial(self._loss, gate, tokens) for tokens in pieces])
            except (Unavailable, RemoteFault) as failure:
                self._failed(str(failure))
                return
        counted = sum(tokens for _, tokens in results)
        if not counted:
            self._failed("no held-out token counts in the loss")
            return
        loss = sum(total for total, _ in results) / counted
        self.last = (loss, samples_total)
        if self.first is None:
            self.first = loss
        feeder.telemetry.gauge(name.LOSS, loss, split="validation")
        feeder.telemetry.event("validation.done", loss=loss, samples_total=samples_total)

    async def _loss(self, gate: asyncio.Semaphore, tokens: WireTensor) -> tuple[float, int]:
        """(sum of the loss, tokens that it counts) of one microbatch."""
        async with gate:
            outcome = await self._feeder.send(tokens, wire.PURPOSE_VALIDATE)
            self._feeder.telemetry.count(name.MICROBATCHES, outcome="validated")
            return outcome.loss_sum, outcome.tokens

    def _failed(self, reason: str) -> None:
        self._feeder.telemetry.event("validation.failed", level="warning", reason=reason)
