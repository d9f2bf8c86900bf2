"""What of this machine a run may use: only what its user has said, whatever the manifest names."""

from __future__ import annotations

import click

from swarmnode.cli.options import NodeOptions
from swarmnode.errors import HardwareFault, NotPermitted, UsageError
from swarmnode.local.free_memory import free_memory
from swarmnode.manifest import Manifest
from swarmnode.node.able import Able, able
from swarmnode.node.limits import Limits, change


def checkpoints(options: NodeOptions, manifest: Manifest) -> str:
    """Where this node saves the run, "" for nowhere: a bucket of the manifest only with --use-bucket, since the keys
    are this user's. Raises UsageError when there is no such bucket."""
    named = manifest.checkpoint.url
    if options.use_bucket and not named:
        raise UsageError("--use-bucket: this run's manifest names no bucket (checkpoint.url); say --checkpoints URL")
    if named and not options.use_bucket and not options.checkpoints:
        click.echo(
            f"the run keeps checkpoints in {named}; this node does not write there without --use-bucket", err=True
        )
    return options.checkpoints or (named if options.use_bucket else "")


def unable_stages(options: NodeOptions, manifest: Manifest) -> frozenset[int]:
    """Stages of the run that this machine cannot serve, by its memory and by the files that it may read; found out by
    formula, before anything is allocated.

    Raises HardwareFault when none is left, or when the stage asked for does not fit; NotPermitted when that would have
    to read files and no --data-root is given.
    """
    free = free_memory(options.device, change(Limits(), options.limits).max_memory_nbytes)
    found = able(manifest, free.nbytes, has_data=options.data_root is not None)
    wanted = set(range(manifest.pipeline.stages)) if options.stage is None else {options.stage}
    if not wanted <= found.unable:
        if found.unable:
            click.echo(_says(found), err=True)
        return found.unable
    fitting = [stage for stage in wanted if found.needed[stage] <= free.nbytes]
    if fitting and found.no_files:
        files = ", ".join(manifest.data.paths) or manifest.data.tokenizer
        raise NotPermitted(
            f"stage 0 of this run reads files ({files[:100]}), and none of this machine's are open to it: say"
            " --data-root FOLDER, below which they lie, or serve another stage"
        )
    least = min(wanted, key=found.needed.__getitem__)
    raise HardwareFault(
        f"{'no stage of this run fits' if options.stage is None else f'stage {least} does not fit'} into memory: stage"
        f" {least} needs {_gigabytes(found.needed[least])} of memory ({found.needed[least]} bytes), and"
        f" {_gigabytes(free.nbytes)} ({free.nbytes} bytes) are free by {free.bound}"
    )


def _says(found: Able) -> str:
    small = [stage for stage in sorted(found.unable) if found.needed[stage] > found.free_nbytes]
    parts = ["it reads no files of the run (--data-root)"] if found.no_files else []
    if small:
        most = max(found.needed[stage] for stage in small)
        parts.append(f"{len(small)} stages need up to {_gigabytes(most)}, and {_gigabytes(found.free_nbytes)} are free")
    return (
        f"this machine serves {len(found.needed) - len(found.unable)} of {len(found.needed)} stages: {'; '.join(parts)}"
    )


def _gigabytes(nbytes: int) -> str:
    return f"{nbytes / 1e9:,.1f} GB"
