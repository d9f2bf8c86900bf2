"""What a feeder does all the time: microbatches, and the held-out loss after each round."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence

from swarmnode.data.blocks import BlockLedger
from swarmnode.gossip.exchange import Gossip
from swarmnode.ids import PeerId
from swarmnode.manifest import Manifest
from swarmnode.node.presence import Presence
from swarmnode.node.world import World
from swarmnode.pipeline.feeder import Feeder
from swarmnode.pipeline.hop import Hop
from swarmnode.pipeline.microbatch import Sizing
from swarmnode.ports import Priority
from swarmnode.wire import record_pb2

# A model of 8 B on machines at home takes most of an hour for it; two feeders of five did, as who begins knows few
# others that could (simulated: thousand-8b).
BASELINE_S = 60.0  # guess
UNHEARD = PeerId("unheard")  # in whose name the blocks of feeders nobody heard of are remembered


def ledger_of(presence: Presence, manifest: Manifest) -> BlockLedger:
    """What a feeder begins with: all that was heard of finished blocks and can be so.

    When all feeders died and their records with them, nothing was: then as many blocks count as finished as the run's
    samples fill. Near that frontier some are drawn again or left out, but nothing begins from the start.
    """
    ledger = BlockLedger(presence.me, manifest.seed)
    faults = ledger.merge_all(presence.blocks_heard, presence.blocks_max)
    if len(faults) == len(presence.blocks_heard):
        below = presence.progress.total // manifest.data.block_samples
        ledger.merge(UNHEARD, record_pb2.Blocks(finished_below=below), below)
    return ledger


async def feeder_of(
    manifest: Manifest,
    presence: Presence,
    world: World,
    hop: Hop,
    incarnation: int,
    samples_total: Callable[[], int],
    counted: Callable[[int], None],
    lost: Callable[[], Sequence[int]],
) -> Feeder:
    """A feeder with its text open that knows what others have finished; `presence` tells it of them from now on."""
    samples = await world.compute.run(Priority.OUTER, 0, world.samples)
    ledger = ledger_of(presence, manifest)
    presence.self.blocks = ledger.record
    feeder = Feeder(
        manifest,
        presence.me,
        incarnation,
        hop,
        samples,
        Sizing(manifest, presence.me, presence.self.rates, presence.self.speed, world.host),
        ledger,
        presence.book.swarm,
        samples_total,
        counted,
        world.telemetry,
        lost,
    )
    presence.heard_blocks = feeder.heard
    return feeder


async def feeding(feeder: Feeder, gossip: Gossip, samples_total: Callable[[], int], done: int, resumed: bool) -> None:
    """Measure the held-out loss before anything is trained (or a checkpoint was `resumed`), then feed, and measure
    again after rounds past `done`, every `pipeline.validation_every_samples`.

    Nobody waits longer than BASELINE_S for the first measurement. Returns when the feeder is drained.
    """
    first = (samples_total() == 0 or resumed) and feeder.validates(0)
    measured = asyncio.Event()
    async with asyncio.TaskGroup() as tasks:
        validating = tasks.create_task(_validating(feeder, gossip, samples_total, done, first, measured))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(BASELINE_S):
                await measured.wait()
        await feeder.run()
        validating.cancel()


async def _validating(
    feeder: Feeder,
    gossip: Gossip,
    samples_total: Callable[[], int],
    validated: int,
    first: bool,
    measured: asyncio.Event,
) -> None:
    if first:
        await feeder.validate(samples_total())
    measured.set()
    while True:
        gossip.finished.clear()
        if feeder.validation_due(validated, gossip.done) and feeder.validates(gossip.done):
            await feeder.validate(samples_total())
        validated = max(validated, gossip.done)
        if not gossip.finished.is_set():
            await gossip.finished.wait()
