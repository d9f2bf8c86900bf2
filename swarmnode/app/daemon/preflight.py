"""Checks before anything is announced: a node that cannot work on this machine says so and stops."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from pathlib import Path

import click

from swarmnode.app.daemon.options import HOME_ADVICE, LOGS_NBYTES, NodeOptions
from swarmnode.app.machine.folder_store import is_url, open_store
from swarmnode.app.machine.stage_fit import Shortage, StageFit, best_fit, machine_memory, states_of
from swarmnode.base.atomic_file import check_free, check_writable
from swarmnode.base.errors import DataError, HardwareFault, NotPermitted, UsageError
from swarmnode.base.ids import stage_name, stages_name
from swarmnode.data.corpus import Corpus, open_corpus
from swarmnode.model.adapter import trained_count
from swarmnode.model.device import autocasts
from swarmnode.model.memory_budget import mode_of
from swarmnode.model.section import ITEMSIZE, section_sizes, state_nbytes
from swarmnode.model.split import stages_of
from swarmnode.run.manifest import Manifest
from swarmnode.train.node.limits import Limits, NodeRole, change

SAVE_ADVICE = "free space there, or save elsewhere (--checkpoints)"


def checkpoints(options: NodeOptions, manifest: Manifest, *, tell: bool = True) -> str:
    """The place where this node saves the run, "" for none. The manifest's bucket needs --use-bucket, since the keys
    are this user's. Raises UsageError if there is no such bucket."""
    named = manifest.checkpoint.url
    if options.use_bucket and not named:
        raise UsageError("--use-bucket: this run's manifest names no bucket (checkpoint.url); use --checkpoints URL")
    if tell and named and not options.use_bucket and not options.checkpoints:
        click.echo(
            f"the run keeps checkpoints in {named}; this node does not write there without --use-bucket", err=True
        )
    return options.checkpoints or (named if options.use_bucket else "")


def _fit(options: NodeOptions, manifest: Manifest) -> StageFit:
    memory = machine_memory(options.device, change(Limits(), options.limits).max_memory_nbytes)
    mode = mode_of(options.device, autocast=autocasts(options.device, options.precision))
    states = states_of(options.optimizer_state)
    has_data = options.data_root is not None
    return best_fit(manifest, memory, has_data=has_data, mode=mode, states=states, stage=options.stage)


def usable_stages(options: NodeOptions, manifest: Manifest) -> StageFit:
    """The stages of the run that this machine can serve, by formula, before any allocation.

    Raises UsageError if the run has no such stage as requested, or a machine that reads no text only the first one,
    HardwareFault if none is left or that one does not fit, NotPermitted if this machine is to feed with a tokenizer's
    file and no --data-root is given.
    """
    if options.stage is not None and options.stage >= manifest.pipeline.stages:
        raise UsageError(f"--stage {options.stage + 1}: this run has {stages_name(range(manifest.pipeline.stages))}")
    fit = _fit(options, manifest)
    wanted = set(range(manifest.pipeline.stages)) if options.stage is None else {options.stage}
    unread = options.role is NodeRole.REPLICA
    unfed = {0} if fit.no_files or unread else set[int]()
    if not wanted <= fit.unable | unfed:
        if fit.unable or (unfed and not unread):
            click.echo(_says(fit), err=True)
        return fit
    if not wanted <= fit.unable:
        if unread:
            raise UsageError(
                "--role replica: this machine reads no text, and the first stage feeds: let it serve another stage"
            )
        raise NotPermitted(f"{_files(manifest)}: give --data-root with its folder, or serve another stage")
    stage, short = _least(fit, wanted)
    raise HardwareFault(
        f"{'no stage of this run fits' if options.stage is None else f'{stage_name(stage)} does not fit'} into memory:"
        f" {stage_name(stage)} {short}"
    )


def _least(found: StageFit, wanted: Collection[int]) -> tuple[int, Shortage]:
    """The stage of `wanted` that lacks the fewest bytes, and what it lacks."""
    short = {stage: found.memory.shortage(found.needed[stage]) for stage in sorted(wanted)}
    lacking = [(one.needed - one.free.nbytes, stage) for stage, one in short.items() if one is not None]
    stage = min(lacking)[1]
    least = short[stage]
    assert least is not None
    return stage, least


def _files(manifest: Manifest) -> str:
    file = manifest.data.tokenizer[:100]
    return f"the first stage of this run reads {file}, and no folder of this machine is open to it"


def _says(found: StageFit) -> str:
    parts = ["it reads no file of the run (--data-root)"] if found.no_files else []
    if small := found.unable:
        most = max(small, key=lambda stage: (found.needed[stage].device, found.needed[stage].host))
        parts.append(
            f"{len(small)} do not fit into memory: {stage_name(most)} {found.memory.shortage(found.needed[most])}"
        )
    served = len(found.needed) - len(small | {0} if found.no_files else small)
    return f"this machine serves {served} of {len(found.needed)} stages: {'; '.join(parts)}"


async def check_can_work(options: NodeOptions, manifest: Manifest, found: StageFit) -> Corpus | None:
    """Open the text and the tokenizer of this machine where this node may feed from them, and see that its disk takes
    what it will write. Returns the text, so that feeding need not open it again.

    Raises DataError and NotPermitted for the data and the base model, DiskFull for too little space (path, bytes needed
    and free), LocalFault for a folder that cannot be written, UsageError for a place of checkpoints there is not.
    """
    able = [stage for stage in _stages(options, manifest) if stage not in found.unable]
    feeds = 0 in able and options.role is NodeRole.ANY and not found.no_files
    await asyncio.to_thread(_check_disk, options, manifest, able, feeds)
    if where := checkpoints(options, manifest, tell=False):
        store = open_store(where)
        await store.names()  # of a bucket: its name, keys and endpoint
        if not is_url(where):
            await asyncio.to_thread(_check_saving, where, manifest, able)
    if options.base is not None and manifest.base.index:
        from swarmnode.data.base_index import other_base

        expected = bytes.fromhex(manifest.base.index)
        if (reason := await asyncio.to_thread(other_base, options.base, expected)) is not None:
            raise DataError(f"--base: {reason}")
    if not feeds or manifest.data.source == "index":  # that comes through the network, verified
        return None
    return await asyncio.to_thread(open_corpus, manifest, options.data_root, options.cache)


def _stages(options: NodeOptions, manifest: Manifest) -> list[int]:
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
