"""What a feeder does all the time: microbatches, and the held-out loss after each round."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from swarmnode.gossip.exchange import Gossip
from swarmnode.pipeline.feeder import Feeder


async def feeding(feeder: Feeder, gossip: Gossip, samples_total: Callable[[], int], done: int, resumed: bool) -> None:
    """Measure the held-out loss before anything is trained (or a checkpoint was `resumed`), then feed, and measure
    again after each round past `done`.

    Returns when the feeder is drained.
    """
    trained = samples_total()
    if (trained == 0 or resumed) and feeder.validates(0):
        await feeder.validate(trained)
    async with asyncio.TaskGroup() as tasks:
        validating = tasks.create_task(_validating(feeder, gossip, samples_total, done))
        await feeder.run()
        validating.cancel()


async def _validating(feeder: Feeder, gossip: Gossip, samples_total: Callable[[], int], validated: int) -> None:
    while True:
        gossip.finished.clear()
        if gossip.done > validated and feeder.validates(gossip.done):
            await feeder.validate(samples_total())
        validated = max(validated, gossip.done)
        if not gossip.finished.is_set():
            await gossip.finished.wait()
