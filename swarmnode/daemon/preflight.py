"""Checks before anything is announced: a node that cannot work on this machine says so and stops."""

from __future__ import annotations

import asyncio
from pathlib import Path

from swarmnode.atomic_file import check_free, check_writable
from swarmnode.daemon.options import HOME_ADVICE, LOGS_NBYTES, NodeOptions
from swarmnode.daemon.resources import checkpoints
from swarmnode.data.base_folder import other_base
from swarmnode.data.corpus import Corpus, open_corpus
from swarmnode.errors import DataError
from swarmnode.machine.bucket_store import is_url, open_store
from swarmnode.machine.stage_fit import StageFit
from swarmnode.manifest import Manifest
from swarmnode.model.adapter import trained_count
from swarmnode.model.section import ITEMSIZE, section_sizes, state_nbytes
from swarmnode.model.split import stages_of
from swarmnode.node.limits import NodeRole

SAVE_ADVICE = "free space there, or save elsewhere (--checkpoints)"


async def check_can_work(options: NodeOptions, manifest: Manifest, found: StageFit) -> Corpus | None:
    """Open the text and the tokenizer of this machine where this node may feed from them, and see that its disk takes
    what it will write. Returns the text, so that feeding need not open it again.

    Raises DataError and NotPermitted for the data and the base model, DiskFull for too little space (path, bytes needed
    and free), LocalFault for a folder that cannot be written, UsageError for a place of checkpoints there is not.
    """
    able = [stage for stage in _stages(options, manifest) if stage not in found.unable]
    feeds = options.role is NodeRole.FEEDER or (0 in able and options.role is NodeRole.ANY and not found.no_files)
    await asyncio.to_thread(_check_disk, options, manifest, able, feeds)
    if where := checkpoints(options, manifest, tell=False):
        store = open_store(where)
        await store.names()  # of a bucket: its name, keys and endpoint
        if not is_url(where):
            await asyncio.to_thread(_check_saving, where, manifest, able)
    if options.base is not None and manifest.base.index:
        expected = bytes.fromhex(manifest.base.index)
        if (reason := await asyncio.to_thread(other_base, options.base, expected)) is not None:
            raise DataError(f"--base: {reason}")
    if not feeds or manifest.data.source == "index":  # that comes through the network, verified
        return None
    return await asyncio.to_thread(open_corpus, manifest, options.data_root, options.cache)


def _stages(options: NodeOptions, manifest: Manifest) -> list[int]:
    if options.role is NodeRole.FEEDER:
        return []
    return list(range(manifest.pipeline.stages)) if options.stage is None else [options.stage]


def _check_disk(options: NodeOptions, manifest: Manifest, able: list[int], feeds: bool) -> None:
    """The home takes the stage that is saved when leaving: weights, and their running mean."""
    parts = stages_of(manifest)
    largest = max((trained_count(manifest, parts[stage]) for stage in able), default=0)
    copies = 2 if manifest.inner.average_share else 1
    check_writable(options.home, HOME_ADVICE)
    check_free(options.home, ITEMSIZE * largest * copies + LOGS_NBYTES, "what this node keeps", HOME_ADVICE)
    if feeds:
        check_writable(options.cache, "free space there, or choose another --cache")


def _check_saving(where: str, manifest: Manifest, able: list[int]) -> None:
    """Check that a checkpoint of the largest stage fits beside the older ones, which are deleted after it."""
    parts = stages_of(manifest)
    largest = max((state_nbytes(section_sizes(manifest, parts[stage])) for stage in able), default=0)
    folder = Path(where).expanduser()
    check_writable(folder, SAVE_ADVICE)
    check_free(folder, largest, "a checkpoint", SAVE_ADVICE)
