"""The loop of a feeder: microbatches all the time, and the held-out loss after rounds."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

from swarmnode.base.ids import PeerId
from swarmnode.base.wire import record_pb2
from swarmnode.data.blocks import BlockLedger
from swarmnode.keep.recovery.resumption import CheckpointOptions, SavedStages
from swarmnode.run.manifest import Manifest
from swarmnode.train.gossip.exchange import Gossip
from swarmnode.train.node.own_record import NO_STAGE, StageStatus
from swarmnode.train.node.presence import Presence
from swarmnode.train.pipeline.feeder import Feeder
from swarmnode.train.pipeline.validation import Validator

RESUMED = PeerId("checkpoint")  # the feeder name under which earlier finished blocks are remembered
UNHEARD = PeerId("unheard")  # the name under which blocks of unknown feeders are remembered


def announce_checkpoints(
    options: CheckpointOptions, saved: SavedStages, presence: Presence, manifest: Manifest
) -> None:
    """Tell `presence` what the checkpoint to resume and the stages saved here know of the run."""
    if options.resume is not None:
        presence.run_progress.trust(options.resume.progress())
        presence.blocks_heard[RESUMED] = options.resume.blocks(manifest)
    for serial, one in enumerate([*saved.found, *saved.pieces]):
        presence.run_progress.trust(one.progress())
        presence.blocks_heard[PeerId(f"saved {serial}")] = one.blocks(manifest)


def ledger_of(presence: Presence, manifest: Manifest, span: int = 1) -> BlockLedger:
    """The ledger that a feeder begins with: its own finished blocks and those of checkpoints, and as doubted ones those
    that feeders announce, which it has met none of: it draws them last, and does not pass them on.

    When all feeders died, their records have gone with them, or tell of an announce period ago. Then as many blocks
    count as finished as the run's samples fill. Near that frontier some blocks are drawn again or left out, but the run
    does not begin anew.
    """
    ledger = BlockLedger(presence.me, manifest.seed, span)
    known = {peer: blocks for peer, blocks in presence.blocks_heard.items() if not _of_others(presence, peer)}
    faults = ledger.merge_all(known, presence.blocks_max)
    told = {peer: blocks for peer, blocks in presence.blocks_heard.items() if peer not in known}
    faults += ledger.doubt_all(told, presence.blocks_max, presence.progress.total // manifest.data.block_samples)
    alone = all(peer == presence.me for peer in presence.peer_table.swarm().feeders())
    if alone or len(faults) == len(presence.blocks_heard):
        below = presence.progress.total // manifest.data.block_samples
        ledger.merge(UNHEARD, record_pb2.Blocks(finished_below=below), below)
    return ledger


def _of_others(presence: Presence, name: PeerId) -> bool:
    """Whether `name`, which finished blocks are told under, is another node, and no checkpoint."""
    return name != presence.me and presence.peer_table.member(name) is not None


def fed_status(feeder: Feeder | None, validator: Validator | None) -> StageStatus:
    """The part of a node's status that its `feeder` and `validator` know; neither where it feeds nothing."""
    if feeder is None or validator is None:
        return NO_STAGE
    loss, samples = validator.last or (None, 0)
    return StageStatus(
        loss_train=feeder.loss.value if feeder.loss.known else None,
        tokens_per_second=feeder.tokens_per_second(),
        loss_validation=loss,
        loss_validation_samples=samples,
        loss_validation_first=validator.first,
        blocks=feeder.ledger.record(),
    )


async def feeding(
    feeder: Feeder, validator: Validator, rounds: Gossip, samples_total: Callable[[], int], done: int, resumed: bool
) -> None:
    """Measure the held-out loss before anything is trained (or a checkpoint was `resumed`), then feed, and measure
    again after rounds past `done`, every `pipeline.validation_every_samples`.

    Feeding waits for the first measurement as long as for a microbatch, at most: that of an 8 B model on home machines
    takes most of an hour, and two feeders of five made it, because a feeder that begins knows few others (simulated:
    thousand-8b). Returns when the feeder is drained.
    """
    first = (samples_total() == 0 or resumed) and validator.validates(0)
    measured = asyncio.Event()
    async with asyncio.TaskGroup() as tasks:
        fetcher = tasks.create_task(feeder.prefetch())
        validating = tasks.create_task(_validating(validator, rounds, samples_total, done, first, measured))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(feeder.manifest.limits.microbatch_timeout_s):
                await measured.wait()
        await feeder.run()
        validating.cancel()
        fetcher.cancel()


async def _validating(
    validator: Validator,
    rounds: Gossip,
    samples_total: Callable[[], int],
    validated: int,
    first: bool,
    measured: asyncio.Event,
) -> None:
    if first:
        await validator.validate(samples_total())
    measured.set()
    while True:
        done = rounds.done
        if validator.due(validated, done):
            await validator.validate(samples_total())
        validated = max(validated, rounds.done)
        await rounds.beyond(done)
