"""`import swarmnode`: a swarm on this machine, runs elsewhere, estimates. The command line's verbs call the same
functions; `simulate` and `compare` are in swarmsim/api.py."""

from __future__ import annotations

import asyncio
import dataclasses
import datetime
import functools
import itertools
import json
import socket
import statistics
import sys
import tomllib
import urllib.request
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from swarmnode.app.daemon.options import DASHBOARD_PORT
from swarmnode.base.concurrency import beside_loop
from swarmnode.base.errors import RemoteFault, SwarmnodeError, Unavailable, UsageError, cause_of
from swarmnode.base.plugin import check_library, library
from swarmnode.base.text_file import decoded
from swarmnode.base.user_folders import default_cache, default_home
from swarmnode.base.work import Work
from swarmnode.run.manifest import Manifest, parse, read_signed, verify
from swarmnode.run.manifest.folder import SIGNED_FILE, manifest_at
from swarmnode.run.manifest.text import from_tree

if TYPE_CHECKING:
    from swarmnode.app.local.run_folder import RunFolder
    from swarmnode.app.local.session import Screen, Session
    from swarmnode.app.local.summary import Summary
    from swarmnode.app.planner.fleet import MachineKind
    from swarmnode.app.planner.plan import Plan
    from swarmnode.base.ids import RunId


CHECKPOINTS = "checkpoints"
PAGE_TIMEOUT_S = 10.0
WORK_KEYS = ("samples", "tokens", "targets")
CURVES_BYTES_MAX = 16 << 20  # 4000 points and 20,000 validations are 2 MB


COLUMNS = (
    "time_s",
    "samples",
    "tokens_per_s",
    "loss_train",
    "nodes",
    "serving",
    "round",
    "sent_nbytes",
    "gossip_nbytes",
)
"""Of a point (app/dashboard/history.py); `time_s` is a Unix time, or a simulated life's. Losses are nats per token."""


@dataclass(frozen=True, slots=True)
class RunHistory:
    """The curves of one run or of one simulated life. `points` have COLUMNS, `validations` are (samples, time, nats a
    token), both oldest first; `context` is the tokens of a sample, None if unknown."""

    name: str
    points: Sequence[Sequence[Any]] = field(repr=False)
    validations: Sequence[tuple[int, float, float]] = field(repr=False)
    context: int | None = None

    def rows(self) -> list[dict[str, Any]]:
        """A dictionary for each point and each validation, in the order of time: COLUMNS, `tokens` and
        `loss_validation`, None where a row does not have it. What no row has is left out."""
        empty: dict[str, Any] = dict.fromkeys((*COLUMNS, "loss_validation"))
        rows = [empty | dict(zip(COLUMNS, point, strict=True)) for point in self.points]
        for samples, time_s, loss in self.validations:
            rows.append(empty | {"time_s": time_s, "samples": samples, "loss_validation": loss})
        rows.sort(key=lambda row: (round(row["time_s"], 1), row["loss_validation"] is not None))  # a page has tenths
        rows = [row | {"tokens": row["samples"] * self.context if self.context else None} for row in rows]
        known = {key for row in rows for key, value in row.items() if value is not None}
        return [{key: value for key, value in row.items() if key in known} for row in rows]

    def to_pandas(self) -> Any:
        """`rows` as a pandas.DataFrame. Raises UsageError where pandas is not installed."""
        return library("pandas", "to_pandas()").DataFrame(self.rows())

    def loss_at(self, samples: float) -> float | None:
        """Held-out loss after `samples` of the run, interpolated between measurements; None outside of them."""
        points = sorted({(count, loss) for count, _, loss in self.validations})
        for (before, high), (after, low) in itertools.pairwise(points):
            if before <= samples <= after:
                return high + (low - high) * (samples - before) / max(1, after - before)
        return None

    def loss_towards(self, samples: float) -> float | None:
        """Mean of `loss_at` over the last tenth of the way to `samples`. A single measurement depends on the replicas
        of its routes and may be off by a hundredth."""
        points = [self.loss_at(round(samples * (1.0 - step / 100.0))) for step in range(11)]
        known = [loss for loss in points if loss is not None]
        return statistics.fmean(known) if len(known) == len(points) else None


@dataclass(frozen=True, slots=True)
class Run:
    """A run to look at. `page` is the URL of its page, or the file of its coordinator's history ("": neither), `home`
    the folder of a daemon of it that runs on this machine."""

    run_id: str
    page: str
    home: Path | None = None

    def history(self) -> RunHistory:
        """Its curves as they are now. Raises Unavailable if the page does not answer, RemoteFault if it answers with
        anything else, UsageError where nobody keeps them."""
        if not self.page:
            raise UsageError(f"{self.home} keeps no curves: a coordinator does (give its home, or its page's URL)")
        return _from_page(self.page)[1] if "://" in self.page else _from_file(Path(self.page))

    def watch(self, every_s: float = 1.0) -> Generator[dict[str, Any], None, None]:
        """Statuses of the daemon on this machine, as `status --json` prints them: now, whenever state, stage, round,
        limits or peers change, and every `every_s` (.1 s to an hour). The daemon pushes them.

        Raises UsageError without a daemon here, NoDaemon when it ends, NotPermitted, Unavailable."""
        from swarmnode.app.control.verb import to_json
        from swarmnode.app.control.watch import watch_here

        if self.home is None:
            raise UsageError("no daemon of this run is on this machine: connect() to its home, where it runs")
        yield from map(to_json, watch_here(self.home, every_s))

    def given(self) -> dict[str, Work]:
        """The work that each machine gave to the run, by peer id: the sum of its receipts. Raises as `history`."""
        if "://" not in self.page:
            from swarmnode.app.dashboard.history import read_given

            return read_given(Path(self.page))
        url = f"{self.page.rstrip('/')}/api/v1/contributors"
        try:
            rows = [(row["peer"], row["receipts"] or {}) for row in _told_by(url)["contributors"]]
            return {str(peer): Work(*(int(said.get(key, 0)) for key in WORK_KEYS)) for peer, said in rows}  # type: ignore[arg-type]
        except (TypeError, KeyError, ValueError, AttributeError) as error:
            raise RemoteFault(f"{url} is not the page of a run ({error!r:.100})") from None


def connect(source: str | Path) -> Run:
    """The run of `source`: the folder of a run, of a session of `up`, or of a daemon's home; the URL of a run's page;
    or an invite, whose meeting points must show their page to others (`coordinator --public`) at the usual port.

    Nothing is joined: the run's coordinator tells. Raises UsageError if nothing is found there, Unavailable."""
    from swarmnode.run.admission.invite import decode, looks_like_invite

    text = str(source)
    if text.startswith(("http://", "https://")):
        return Run(_from_page(text)[0], text)
    if Path(text).is_dir():
        return _in_folder(Path(text))
    if not looks_like_invite(text):
        raise UsageError(f"{text[:100]!r} is no folder, no URL and no invite")
    from swarmnode.app.daemon.ready_file import page_here

    invite = decode(text)
    hosts = dict.fromkeys(address.split("/")[2] for address in invite.bootstraps)
    pages = [page_here(invite.run_id), *(f"http://{host}:{DASHBOARD_PORT}/" for host in hosts if ":" not in host)]
    for page in filter(None, pages):
        try:
            if _from_page(page)[0] == invite.run_id:
                return Run(invite.run_id, page)
        except (Unavailable, RemoteFault):
            continue
    raise Unavailable(f"no page of run {invite.run_id[:16]} answers at {', '.join(filter(None, pages))}: give its URL")


def _in_folder(folder: Path) -> Run:
    """The run with the newest history below `folder`, or in this user's coordinator's home, or of the daemon there."""
    from swarmnode.app.daemon import ready_file
    from swarmnode.app.dashboard.history import history_path, read_curves

    files = list(folder.rglob("history-*.sqlite"))
    if (folder / SIGNED_FILE).is_file():
        files.append(history_path(default_home("coordinator"), verify(read_signed(folder / SIGNED_FILE)[0], None)[1]))
    files = sorted((file for file in files if file.is_file()), key=lambda file: file.stat().st_mtime)
    run_id = read_curves(files[-1])[0] if files else ""
    homes = [folder, *sorted(path for path in folder.iterdir() if path.is_dir()), *ready_file.meeting_homes()]
    for home, ready in ready_file.running(homes).items():
        if ready.run_id == run_id or home == folder:
            return Run(ready.run_id, str(files[-1]) if files else ready.dashboard, home)
    if not files:
        raise UsageError(f"{folder} holds no history: a coordinator writes it (`up` starts one; or give a page's URL)")
    return Run(run_id, str(files[-1]))


def _from_file(path: Path) -> RunHistory:
    from swarmnode.app.dashboard.history import read_curves, read_facts

    name, context = read_facts(path)
    signed = next((above / SIGNED_FILE for above in path.parents[:2] if (above / SIGNED_FILE).is_file()), None)
    manifest = None if signed is None else read_signed(signed)[1]
    _, points, validations = read_curves(path)
    if manifest is not None:  # of a history from before it kept these facts
        name = manifest.name
        context = manifest.model.context
    return RunHistory(name or path.stem, points, validations, context)


def _from_page(page: str) -> tuple[str, RunHistory]:
    """(run id, history) that the page at `page` tells."""
    url = f"{page.rstrip('/')}/api/v1/curves?points=4000"
    return _from_told(_told_by(url), url)


def _told_by(url: str) -> Any:
    """The JSON at `url`. Raises Unavailable, RemoteFault."""
    try:
        with urllib.request.urlopen(url, timeout=PAGE_TIMEOUT_S) as reply:
            raw = reply.read(CURVES_BYTES_MAX)
    except (OSError, ValueError) as error:
        raise Unavailable(f"{url}: {cause_of(error)}") from None
    try:
        return json.loads(raw)
    except ValueError:
        raise RemoteFault(f"{url} is not the page of a run") from None


def _from_told(told: Any, url: str) -> tuple[str, RunHistory]:
    try:
        points = [_numbers(point, len(COLUMNS)) for point in told["points"]]
        validations = [(int(samples), float(t), float(loss)) for samples, t, loss in told["validations"]]
        return str(told["run_id"]), RunHistory(str(told["name"]), points, validations, int(told["context"]))
    except (ValueError, TypeError, KeyError) as error:
        raise RemoteFault(f"{url} is not the page of a run ({error!r:.100})") from None


def _numbers(row: Sequence[object], length: int) -> tuple[Any, ...]:
    if len(row) != length or not all(value is None or isinstance(value, int | float) for value in row):
        raise ValueError(f"a row of {len(row)} values")
    return tuple(row)


def plan(
    run: str | Path | Manifest,
    fleet: str | Path | Sequence[MachineKind],
    tokens: float = 1e9,
    *,
    stages: int | None = None,
) -> Plan:
    """Estimate `run` (a folder, a manifest or its file, a scenario of `simulate`) on the machines of `fleet` (a CSV
    file or its rows), as `swarmnode plan`: stages, tokens per second, the days for `tokens`, egress, odds.

    Raises UsageError if no machine can serve any stage, ManifestError."""
    from swarmnode.app.planner.fleet import read_fleet
    from swarmnode.app.planner.plan import plan as estimate

    manifest = run if isinstance(run, Manifest) else manifest_or_scenario(Path(run))
    if stages is not None:
        manifest = dataclasses.replace(manifest, pipeline=dataclasses.replace(manifest.pipeline, stages=stages))
    return estimate(manifest, read_fleet(Path(fleet)) if isinstance(fleet, str | Path) else tuple(fleet), tokens)


def manifest_or_scenario(path: Path) -> Manifest:
    """The manifest in `path` (a file, signed or not, or a run's folder), or that of the scenario there."""
    if path.is_dir() or path.suffix != ".toml":
        return manifest_at(path)
    try:
        text = decoded(path.read_bytes())
        inner = tomllib.loads(text).get("manifest")
    except (OSError, UnicodeDecodeError):
        return manifest_at(path)  # it says what is wrong
    except tomllib.TOMLDecodeError:
        inner = None  # `parse` says what is wrong
    return from_tree(inner, f"{path}: manifest") if isinstance(inner, dict) else parse(text, str(path))


@beside_loop
def up(
    run: str | Path | None = None,
    *,
    nodes: int = 6,
    stages: int | None = None,
    for_s: float | None = None,
    rounds: int | None = None,
    samples: int | None = None,
    kill_every_s: float | None = None,
    dashboard: bool = True,
    listen: str = "",
    line_for_others: Callable[[Path, Path], str] | None = None,
    resume: str | None = None,
    checkpoints: str = "",
    use_bucket: bool = False,
    data_root: Path | None = None,
    out: Path | None = None,
    cache: Path | None = None,
    track: str | None = None,
    screen: Screen | None = None,
) -> Summary:
    """Run a whole swarm on this machine, as `swarmnode up` with options of these names, and export its model.

    `run` is a folder of `swarmnode init`, a signed manifest, or None for the demo's. Without `for_s`, `rounds` or
    `samples` it trains until Ctrl-C (in a notebook: interrupt). With `listen`, a multiaddr, other machines can join;
    `line_for_others` makes the line for them of the signed manifest and the bootstrap's home. Progress goes to
    `screen`, by default as lines on stderr. The summary tells what failed, too; a run that cannot begin raises
    SwarmnodeError, a second Ctrl-C KeyboardInterrupt.
    """
    from swarmnode.app.local import child, run_folder
    from swarmnode.app.local.fleet import FleetPlan
    from swarmnode.app.local.run_folder import check_run, prepare
    from swarmnode.app.local.session import Conditions, Session
    from swarmnode.app.local.spawn import several_devices
    from swarmnode.app.local.swarm_view import PlainScreen

    tracked = ["--track", track] if track else []
    if track and not dashboard:
        raise UsageError(f"--track {track} logs what the page shows: leave out --no-dashboard")
    if track:
        check_library(track, f"--track {track}")
    run = None if run is None else Path(run)
    cache = cache or default_cache()
    stamp = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")  # noqa: TID251  names a folder
    screen = screen or PlainScreen(sys.stderr)
    resumed = run_folder.resume(resume, run, nodes, stages, stamp, screen.note, data_root, samples) if resume else None
    if not resumed:  # before anything is signed
        check_run(run, stages, data_root, cache, checkpoints)
    prepared = resumed.prepared if resumed else prepare(run, nodes, stages, stamp, data_root)
    where = saved_in(checkpoints, use_bucket, prepared)
    run_folder.check_store(where)
    plan = FleetPlan(
        folder=prepared.folder,
        manifest=prepared.signed,
        nodes=nodes,
        stages=prepared.manifest.pipeline.stages,
        cache=cache,
        seed=prepared.manifest.seed,
        command=lambda plan: [*child.node_command(plan), *(tracked if plan.bootstrap else [])],
        dashboard_port=free_port() if dashboard else None,
        checkpoints=where,
        data_root=prepared.data_root.resolve() if prepared.data_root is not None else None,
        settings=prepared.manifest,
        resume=resumed.where if resumed else "",
        devices=several_devices(),
    )
    if listen:
        made = None if line_for_others is None else functools.partial(line_for_others, prepared.signed)
        plan = dataclasses.replace(plan, listen=listen, line_for_others=made)
    screen.note(f"run {prepared.run_id}")
    screen.note(f"folder {prepared.folder}: events.jsonl, stderr.log of every node")
    if resumed:
        checkpoint = resumed.resumption.checkpoint
        screen.note(f"resumes from {checkpoint.label}: {checkpoint.samples} samples, {checkpoint.nbytes / 1e6:.1f} MB")
    session = Session(plan, Conditions(for_s, rounds, samples), screen, run=prepared.run_id, kill_every_s=kill_every_s)
    summary = _exported(run_session(session), prepared.folder, out)
    _reported(summary, prepared, screen)
    return dataclasses.replace(summary, checkpoint=_last_checkpoint(where, prepared.run_id))


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


def run_session(session: Session) -> Summary:
    """The summary of `session`. Raises KeyboardInterrupt if it was killed by a second signal."""
    try:
        return asyncio.run(session.run())
    except asyncio.CancelledError:
        raise KeyboardInterrupt from None


def _last_checkpoint(where: str, run_id: RunId) -> str | None:
    """The path of the session's newest checkpoint; None if there is none."""
    from swarmnode.app.machine.checkup import find_resumptions

    try:
        return asyncio.run(find_resumptions(where, run_id))[0].where
    except SwarmnodeError:
        return None


def _reported(summary: Summary, prepared: RunFolder, screen: Screen) -> None:
    """Write the session's report to its folder, with the members that its page counted, and say where it is."""
    from swarmnode.app.daemon.clock import SystemClock
    from swarmnode.app.dashboard.run_report import read_report, run_report, write_report

    if summary.totals.samples == 0:
        return
    totals = summary.totals
    figures = {
        "t": round(SystemClock().unix_s(), 3),
        "wall_s": summary.wall_s,
        "samples": totals.samples,
        "tokens": totals.tokens,
        "round": totals.round,
        "loss_train": totals.loss_train,
        "loss_validation_first": totals.loss_validation_first,
        "loss_validation": totals.loss_validation,
    }
    kept = read_report(prepared.signed.parent, prepared.run_id) or {}
    tree = run_report(
        prepared.manifest, prepared.run_id, figures, [], str(prepared.folder), str(prepared.folder / CHECKPOINTS)
    )
    tree |= {key: kept[key] for key in ("members", "machine_hours") if key in kept}
    try:
        screen.note(f"report: {write_report(prepared.folder, tree)}")
    except OSError as error:
        screen.note(f"no report: {error}")


def _exported(summary: Summary, folder: Path, out: Path | None) -> Summary:
    """`summary` with the path of the exported model, or with the reason why there is none."""
    from swarmnode.app.local.evaluation import export_model

    if summary.totals.samples == 0 and out is None:
        return summary  # nothing was trained, so there is nothing to export
    try:
        return dataclasses.replace(summary, model=str(export_model(str(folder), out or folder / "model")["model"]))
    except SwarmnodeError as error:
        why = f"no model was exported: {error}"
        failure = f"{summary.failure}; {why}" if summary.failure else why
        return dataclasses.replace(summary, failure=failure, exit_code=summary.exit_code or error.exit_code)
