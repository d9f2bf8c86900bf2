"""`swarmnode up [RUN]`: run a whole swarm on this machine."""

from __future__ import annotations

import asyncio
import dataclasses
import datetime
import json
import socket
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from swarmnode.cli.option.param import DASHBOARD_PORT, DURATION, FOLDER, STAGES_MAX
from swarmnode.cli.output.console import paper
from swarmnode.errors import SwarmnodeError, UsageError
from swarmnode.ids import RunId
from swarmnode.user_folders import default_cache

if TYPE_CHECKING:
    from swarmnode.local.run_folder import RunFolder
    from swarmnode.local.session import Session
    from swarmnode.local.summary import Summary

EXIT_INTERRUPTED = 130
CHECKPOINTS = "checkpoints"
NODES_MAX = 256
COUNT = click.IntRange(min=1)


@click.command(short_help="start a whole swarm on this machine and train")
@click.argument("run", metavar="[RUN]", required=False, type=click.Path(exists=True, path_type=Path))
@click.option("--nodes", type=click.IntRange(1, NODES_MAX), default=6, show_default=True, help="Processes that train.")
@click.option("--stages", type=click.IntRange(1, STAGES_MAX), help="Stages of the model.  [default: the manifest's]")
@click.option("--for", "for_s", type=DURATION, help="Stop so long after all nodes are ready: 90s, 10m.")
@click.option("--rounds", type=COUNT, help="Stop when this round is reached.")
@click.option("--samples", type=COUNT, help="Stop when the run has trained so many samples.")
@click.option(
    "--kill",
    "kill_every_s",
    type=DURATION,
    metavar="EVERY",
    help="kill -9 a random node at this interval; a new one joins in its place. The last replica of a stage is spared.",
)
@click.option(
    "--dashboard/--no-dashboard",
    default=True,
    show_default=True,
    help="Show the run on a page at 127.0.0.1:7070, or at another free port if that is taken.",
)
@click.option(
    "--resume",
    metavar="URL",
    help="Resume from the newest checkpoint there: an earlier session's folder, a folder of checkpoints, s3://BUCKET/PREFIX."
    " Without RUN it is the same run; any --nodes and --stages will do.",
)
@click.option(
    "--checkpoints", default="", metavar="URL", help="Where to save checkpoints.  [default: in the session's folder]"
)
@click.option("--use-bucket", is_flag=True, help="Save in the manifest's bucket, with this user's keys.")
@click.option("--data-root", type=FOLDER, help="Folder of the manifest's paths.  [default: RUN, if that is a folder]")
@click.option("--out", type=FOLDER, help="Folder of the exported model.  [default: model, in the session's folder]")
@click.option("--cache", type=FOLDER, help="Folder of tokens.  [default: ~/.cache/swarmnode]")
@click.option("--json", "as_json", is_flag=True, help="End with one JSON object on stdout; progress goes to stderr.")
def command(
    run: Path | None,
    nodes: int,
    stages: int | None,
    for_s: float | None,
    rounds: int | None,
    samples: int | None,
    kill_every_s: float | None,
    dashboard: bool,
    resume: str | None,
    checkpoints: str,
    use_bucket: bool,
    data_root: Path | None,
    out: Path | None,
    cache: Path | None,
    as_json: bool,
) -> int:
    """Start a bootstrap and --nodes node processes of RUN on this machine, watch them train, stop, export the model.

    RUN is a folder made by `swarmnode init`, or a signed manifest; without it the demo's manifest is used in a new
    folder below runs/. Without --for, --rounds or --samples it trains until Ctrl-C, which ends everything in order; a
    second Ctrl-C kills everything at once.

    \b
    --json ends with: run, nodes, wall_s, samples, tokens, tokens_per_s, loss_validation_first,
    loss_validation_last, loss_train_last (nats per token), rounds, exchanges {paired, lone: outer steps
    of replicas, each partner counts its own}, microbatches {done, lost, retried, duplicate},
    staleness (gradients by how many inner steps old they were),
    samples_duplicate (of blocks two feeders finished), recoveries,
    bytes {pipeline, gossip, state, control: sent}, killed, stopped, exit_reasons by node, folder, model,
    failure, checkpoint (where it was saved last).
    """
    from rich.console import Console

    from swarmnode.local.child import node_command
    from swarmnode.local.fleet import FleetPlan
    from swarmnode.local.preflight import check_run
    from swarmnode.local.resumed_run import check_store
    from swarmnode.local.resumed_run import resume as resume_from
    from swarmnode.local.run_folder import prepare
    from swarmnode.local.session import Conditions, Session
    from swarmnode.local.spawn import several_devices
    from swarmnode.local.swarm_view import PlainScreen, screen_for

    stamp = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
    screen = PlainScreen(sys.stderr) if as_json else screen_for(Console(), sys.stdout)
    resumed = resume_from(resume, run, nodes, stages, stamp, screen.note, data_root) if resume else None
    if not resumed:  # before anything is signed
        check_run(run, stages, data_root, cache or default_cache(), checkpoints)
    prepared = resumed.prepared if resumed else prepare(run, nodes, stages, stamp, data_root)
    where = saved_in(checkpoints, use_bucket, prepared)
    check_store(where)
    plan = FleetPlan(
        folder=prepared.folder,
        manifest=prepared.signed,
        nodes=nodes,
        stages=prepared.manifest.pipeline.stages,
        cache=cache or default_cache(),
        seed=prepared.manifest.seed,
        command=node_command,
        dashboard_port=free_port() if dashboard else None,
        checkpoints=where,
        data_root=prepared.data_root.resolve() if prepared.data_root is not None else None,
        settings=prepared.manifest,
        resume=resumed.where if resumed else "",
        devices=several_devices(),
    )
    screen.note(f"run {prepared.run_id}")
    screen.note(f"folder {prepared.folder}: events.jsonl, stderr.log of every node")
    if resumed:
        checkpoint = resumed.resumption.checkpoint
        screen.note(f"resumes from {checkpoint.label}: {checkpoint.samples} samples, {checkpoint.nbytes / 1e6:.1f} MB")
    conditions = Conditions(for_s, rounds, samples)
    summary = run_session(Session(plan, conditions, screen, run=prepared.run_id, kill_every_s=kill_every_s))
    if summary is None:
        return EXIT_INTERRUPTED
    summary, code = _export(summary, prepared.folder, out)
    summary = dataclasses.replace(summary, checkpoint=_last_checkpoint(plan.checkpoints, prepared.run_id))
    _print(summary, as_json)
    return code


def saved_in(checkpoints: str, use_bucket: bool, prepared: RunFolder) -> str:
    """The place where the session saves the run. Raises UsageError if --use-bucket is given but the manifest names no
    bucket."""
    if use_bucket and not prepared.manifest.checkpoint.url:
        raise UsageError("--use-bucket: the manifest names no bucket (checkpoint.url); use --checkpoints URL")
    if checkpoints or use_bucket:
        return checkpoints or prepared.manifest.checkpoint.url
    return str((prepared.folder / CHECKPOINTS).resolve())


def free_port() -> int:
    """DASHBOARD_PORT if it is free on this machine, else 0 (any)."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", DASHBOARD_PORT))
        except OSError:
            return 0
    return DASHBOARD_PORT


def run_session(session: Session) -> Summary | None:
    """The summary of `session`; None if it was killed by a second signal."""
    try:
        return asyncio.run(session.run())
    except asyncio.CancelledError:
        return None


def _last_checkpoint(where: str, run_id: RunId) -> str | None:
    """The path of the session's newest checkpoint; None if there is none."""
    from swarmnode.machine.checkup import find_resumptions

    try:
        newest = asyncio.run(find_resumptions(where, run_id))[0]
    except SwarmnodeError:
        return None
    return newest.where


def _print(summary: Summary, as_json: bool) -> None:
    from swarmnode.local.swarm_view import conclusion

    if as_json:
        click.echo(json.dumps(summary.to_json()))
    else:
        paper().print(conclusion(summary))


def _export(summary: Summary, folder: Path, out: Path | None) -> tuple[Summary, int]:
    """`summary` with the path of the exported model or the reason why there is none, and the exit code."""
    from swarmnode.cli.export import export_run

    code = summary.exit_code
    if code:
        click.echo(f"swarmnode: {summary.failure}", err=True)
    if summary.totals.samples == 0 and out is None:
        return summary, code  # nothing was trained, so there is nothing to export
    try:
        return dataclasses.replace(summary, model=str(export_run(folder, out or folder / "model"))), code
    except SwarmnodeError as error:
        click.echo(f"swarmnode: no model was exported: {error}", err=True)
        failure = summary.failure or f"no model was exported: {error}"
        return dataclasses.replace(summary, failure=failure), code or error.exit_code
