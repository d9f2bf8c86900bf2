"""A run's archive on its real ports: the owner's warrant, the folder, and the evaluation of checkpoints."""

from __future__ import annotations

import asyncio
import base64
import binascii
import contextlib
import functools
import json
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import click

from swarmnode.app.daemon.admission import OWN_PASS_S
from swarmnode.app.daemon.control_api import DaemonContext
from swarmnode.app.daemon.options import ArchiveOptions
from swarmnode.app.machine.archive_sources import ArchiveSources
from swarmnode.app.machine.folder_store import FolderStore, hold, open_store
from swarmnode.app.machine.run_archive import RETRY_S, Archive, ArchivePlan, Evaluate, Measured, ModelFiles
from swarmnode.app.machine.stage_fit import free_memory
from swarmnode.base import bounds
from swarmnode.base.atomic_file import check_writable
from swarmnode.base.errors import (
    ManifestError,
    NotPermitted,
    RemoteFault,
    SwarmnodeError,
    Unavailable,
    UsageError,
    cause_of,
)
from swarmnode.base.ids import stage_name
from swarmnode.base.ports import Clock
from swarmnode.base.wire import access_pb2, record_pb2
from swarmnode.keep.recovery.archive import ONCE_S, Scores
from swarmnode.keep.recovery.checkpoint import Origin
from swarmnode.keep.recovery.checkpoint_io import load_stage
from swarmnode.keep.transfer.donor import LoadedDonor
from swarmnode.keep.transfer.snapshot import Snapshot
from swarmnode.model.section import section_shapes
from swarmnode.model.split import stages_of
from swarmnode.run import owner as owner_key
from swarmnode.run.admission.access import check_warrant, mark_of, sign_warrant
from swarmnode.run.manifest import Manifest
from swarmnode.train.node.notice import Notices

WARRANT_BYTES_MAX = 1024
EVALUATION_S = 3600.0  # guess: a large model on a small server; after that the swarm's own loss is used
MEMORY_TIMES = 3.0  # derived: `eval` holds the weights twice, and activations

Reported = Callable[[int], float | None]
"""The validation loss that the swarm reported nearest to a number of samples."""


def archive_of(process: DaemonContext, reported: Reported) -> Archive | None:
    """The archive of this daemon; None if none is configured, or if it was not requested explicitly and lacks
    permission. Raises as `make_archive`."""
    options = process.options.archive
    if options is None:
        return None
    try:
        return make_archive(process, options, reported, process.clock)
    except NotPermitted as error:
        if options.asked:
            raise
        click.echo(f"no archive is kept: {error}", err=True)
        return None


async def run_archive(archive: Archive, options: ArchiveOptions, notices: Notices) -> None:
    """Run the archive until cancelled; with --once until one checkpoint is made, which is printed, and measured."""
    if not options.once:
        await archive.run()
    folder = await archive_once(archive)
    if options.tells:
        click.echo(folder)
        await archive.measure()
    notices.leave("the checkpoint is made")


def make_archive(process: DaemonContext, options: ArchiveOptions, reported: Reported, clock: Clock) -> Archive:
    """The archive for `options`. Raises NotPermitted without the owner's permission, UsageError for a push URL or a
    folder used by another archive, DiskFull and LocalFault if the folder cannot be written."""
    manifest = process.manifest
    folder = options.folder
    shown = warrant_of(process, options, clock)
    check_writable(folder)
    hold(folder, process.options.home)
    sources = ArchiveSources(
        manifest,
        process.swarm,
        process.transport,
        process.directory,
        clock,
        process.telemetry,
        shown,
        folder / "scratch",
    )
    process.admission.renewals.append(lambda: _renew(sources, process, options, clock))
    signed = base64.b64encode(process.signed.SerializeToString(deterministic=True)).decode()
    push = open_store(options.push) if options.push else None
    return Archive(
        manifest,
        Origin.of(manifest, process.run_id, signed),
        ArchivePlan(folder, options.every_s, options.keep, push, hub=options.hub),
        sources,
        _evaluation(process, options, reported),
        _model_files(process, options),
        process.telemetry,
    )


def _renew(sources: ArchiveSources, process: DaemonContext, options: ArchiveOptions, clock: Clock) -> None:
    """Take up a warrant of the owner's newest key, where it or a new file is here."""
    with contextlib.suppress(NotPermitted, UsageError, ManifestError):
        sources.warrant = warrant_of(process, options, clock)


def warrant_of(process: DaemonContext, options: ArchiveOptions, clock: Clock) -> access_pb2.Warrant:
    """The warrant: from the file that the owner made for this machine, or signed here with the owner's key. Raises
    NotPermitted, UsageError."""
    me = process.transport.peer_id
    run_id = process.run_id
    keys = process.admission.rules.keys
    key_path = Path(process.options.run).parent / owner_key.FILE_NAME
    if options.warrant is not None:
        shown = read_warrant(options.warrant)
        owners = keys.of(shown.amendment, mark_of(shown))
        permit, reason = check_warrant(shown, owners=owners, run_id=run_id, machine=me, now_unix_s=clock.unix_s())
        if not permit:
            raise NotPermitted(f"{options.warrant}: {reason} (swarmnode archive RUN --allow {me})")
        return shown
    if key_path.is_file():
        key = owner_key.load_owner(key_path)
        if owner_key.public_bytes(key) in keys.now:
            return sign_warrant(key, run_id, me, int(clock.unix_s()) + OWN_PASS_S, len(keys.after) - 1)
    raise NotPermitted(
        f"only the run's owner archives it: {key_path} is not its key; where the key is, say: swarmnode archive RUN"
        f" --allow {me} > archive.warrant; here: --warrant archive.warrant"
    )


def read_warrant(path: Path) -> access_pb2.Warrant:
    """The warrant printed by `swarmnode archive --allow`. Raises UsageError."""
    try:
        with path.open("rb") as file:
            raw = base64.b64decode(file.read(WARRANT_BYTES_MAX).strip(), validate=True)
        return bounds.opened(access_pb2.Warrant, raw, "warrant")
    except OSError as error:
        raise UsageError(f"--warrant {path}: {cause_of(error)}") from None
    except (binascii.Error, RemoteFault):
        raise UsageError(
            f"--warrant {path}: not a warrant: `swarmnode archive RUN --allow PEER_ID` prints one"
        ) from None


def give_archive(process: DaemonContext, archive: Archive) -> None:
    """Serve the slow weights of any stage from the newest checkpoint of `archive`, to nodes that bring it back, and
    take those of stages whose last replica leaves."""
    process.transport.serve("handover", archive.serve_handover, tensor_bytes_max=0)
    load = functools.partial(_stage_of, process.manifest, archive)
    LoadedDonor(process.run_id, load, asyncio.to_thread, process.telemetry, lambda: archive.sources.warrant).serve(
        process.transport
    )


async def _stage_of(manifest: Manifest, archive: Archive, stage: int, known: Snapshot | None) -> Snapshot:
    """The newest copy of `stage`, however the stages were cut then; `known` if it is that. Raises Unavailable without
    a checkpoint, RemoteFault for a stage that does not exist."""
    if stage >= manifest.pipeline.stages:
        raise RemoteFault(f"{stage_name(stage)} asked of a run of {manifest.pipeline.stages}")
    entry = max(archive.catalog.entries.values(), key=lambda entry: entry.checkpoint.samples, default=None)
    if entry is None:
        raise Unavailable("the archive has no checkpoint yet")
    if known is not None and known.progress.total == entry.checkpoint.samples:
        return known
    store = FolderStore(archive.catalog.folder_of(entry))
    checkpoint = entry.checkpoint
    shapes = {"theta": section_shapes(manifest, stages_of(manifest)[stage])["phi"]}
    state = await load_stage(store, "", checkpoint, shapes)  # theta of an archive is read from its phi
    round_index = min(part.round for part in checkpoint.parts)
    state = replace(state, sections={"phi": state.sections["theta"]}, packed=True)
    return Snapshot.of(state, stage, round_index, record_pb2.Progress(total=entry.checkpoint.samples))


async def archive_once(archive: Archive) -> Path:
    """The folder of the newest checkpoint, made now. Raises Unavailable if the swarm gives none within ONCE_S; errors
    of the disk at once."""
    loop = asyncio.get_running_loop()
    until = loop.time() + ONCE_S
    last_error = ""
    while True:
        try:
            return archive.catalog.folder_of(await archive.once())
        except Unavailable as error:
            if str(error) != last_error:
                last_error = str(error)
                click.echo(f"waits: {last_error}", err=True)
            if loop.time() >= until:
                raise
            await asyncio.sleep(max(RETRY_S, min(error.retry_after_s, 60.0)))


def _evaluation(process: DaemonContext, options: ArchiveOptions, reported: Reported) -> Evaluate:
    """Evaluates in a separate process, which may use the memory and time it needs and reads the run's text itself. If
    that fails, the swarm's own loss is used."""
    manifest = process.manifest
    parts = stages_of(manifest)
    nbytes = 4 * sum(part.parameters for part in parts)
    command = ["--json", "--all", "--from", "checkpoint", "--cache", str(process.options.cache)]
    command += ["--data", str(options.data)] if options.data is not None else []

    async def evaluate(folder: Path, samples: int) -> Measured:
        if MEMORY_TIMES * nbytes <= free_memory().nbytes:
            scores, why = await _measure(["eval", str(folder), *command])
            if scores is not None:
                if why:
                    process.telemetry.event("archive.unmeasured", reason=why)
                return scores
        else:
            why = f"its {nbytes} bytes of weights do not fit into memory {MEMORY_TIMES:g} times"
        process.telemetry.event("archive.unmeasured", reason=why)
        loss = reported(samples)
        return Measured(loss, "" if loss is None else "swarm")

    return evaluate


async def _measure(arguments: list[str]) -> tuple[Measured | None, str]:
    """(the numbers that `swarmnode eval` prints, what it could not measure), or (None, the reason)."""
    command = ["nice", "-n", "10", sys.executable, "-m", "swarmnode.app.cli.main", *arguments]
    pipe = asyncio.subprocess.PIPE
    try:
        child = await asyncio.create_subprocess_exec(
            *command, env={**os.environ, "OMP_NUM_THREADS": "1"}, stdout=pipe, stderr=pipe
        )
    except OSError as error:
        return None, f"cannot start `swarmnode eval`: {cause_of(error)}"
    try:
        async with asyncio.timeout(EVALUATION_S):
            out, stderr = await child.communicate()
        if child.returncode != 0:
            return None, stderr.decode(errors="replace").strip()[-200:]
        tree = json.loads(out)
        lists = Scores.of_json(tree) if "scores" in tree else Scores()
        return Measured(float(tree["merged"]["loss"]), "archive", lists), "; ".join(lists.failed)
    except (TimeoutError, ValueError, KeyError, TypeError) as error:
        return None, f"`swarmnode eval`: {error or 'took too long'}"
    finally:
        if child.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                child.kill()
            await child.wait()


def _model_files(process: DaemonContext, options: ArchiveOptions) -> ModelFiles:
    from swarmnode.app.dashboard.history import history_path, read_members  # few nodes archive a run
    from swarmnode.data.tokenizer_file import carried_files, tokenizer_file
    from swarmnode.model.export import sharded_model_files

    manifest = process.manifest

    def files(where: Mapping[str, str], nbytes: int, about: Mapping[str, object]) -> Mapping[str, bytes]:
        tokenizer = None
        with contextlib.suppress(SwarmnodeError):  # the weights matter; `export --data` can add the tokenizer later
            tokenizer = tokenizer_file(options.data, manifest.data)
        carried = dict[str, bytes]()
        with contextlib.suppress(SwarmnodeError):  # nor does a link that leads out of the base model's folder
            carried = carried_files(process.options.base_folder, manifest.base.index, tokenizer)
        members = read_members(history_path(process.options.home, process.run_id))
        told = {**about, "members": members} if members else about
        return sharded_model_files(manifest, tokenizer, where, nbytes, told, carried)

    return files
