"""Runs a dashboard: assembles board, history, collector, heartbeat and server.

Collects the directory's records and each node's report at a bounded rate.

Training does not depend on it. A coordinator loads the swarm with one lookup a stage each announce period (less often
in large swarms) and at most REPORTS_PER_S small calls a second in all, for any size of swarm.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import html
import json
import subprocess
import sys
import urllib.request
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from swarmnode import __version__
from swarmnode.app.dashboard import view
from swarmnode.app.dashboard.board import Board, NodeView
from swarmnode.app.dashboard.heartbeat import Heartbeat, ModelDownloads
from swarmnode.app.dashboard.history import History, history_path
from swarmnode.app.dashboard.run_report import run_report, write_report
from swarmnode.app.dashboard.server import DashboardServer
from swarmnode.app.machine.run_archive import Archive
from swarmnode.base import plugin
from swarmnode.base.errors import Busy, RemoteFault, Unavailable, cause_of
from swarmnode.base.ids import PeerId, RunId, part_of
from swarmnode.base.ports import Call, Clock, Directory, Telemetry, Transport
from swarmnode.base.untrusted_text import chat_text
from swarmnode.base.wire import call_pb2 as wire
from swarmnode.base.wire import record_pb2, report_pb2
from swarmnode.net.membership.liveness import PING_TIMEOUT_S, SMALL_CALL_S
from swarmnode.net.membership.record import STRETCH_MAX, open_record
from swarmnode.run.manifest import Manifest

REPORTS_PER_S = 10.0  # derived: 2 % of a core at 2 ms a call; a thousand nodes are asked every 100 s
ASK_TIMEOUT_S = 2.0 * PING_TIMEOUT_S  # a report is larger than a ping
ASKING_MAX = 8  # calls at once
BACKOFF_MAX_S = 60.0
LOOK_S_PER_NODE = 0.01  # records, 0.2 ms each to verify (measured), then cost 2 % of a core
LOOK_PERIOD_MAX_S = 30.0
REPORT_BYTES_MAX = 256 << 10  # derived: six times the 40 kB of 64 links, 64 events and 200 counters
TICK_S = 0.25


NOTIFY_S = 2.0 * SMALL_CALL_S  # webhooks answer within a second
ALARM_S = 20.0  # guess: an alarm that stands for less is over before a person could look
TRACK_EVERY_S = 10.0  # derived: a tenth of what W&B's free plan takes
COLUMNS = ("loss_train", "loss_validation", "tokens", "tokens_per_s", "samples", "round")


def row(summary: view.Json) -> dict[str, Any]:
    """The logged part of `view.summary`: COLUMNS that are known, and `machines` with a valid record."""
    known = {key: summary[key] for key in COLUMNS if summary[key] is not None}
    return {**known, "machines": summary["nodes"]}


async def track(library: str, board: Board, facts: view.Json, clock: Clock, telemetry: Telemetry) -> None:
    """Log the run's numbers by `library` ("trackio", "wandb") at each step of samples, until cancelled. A coordinator
    that starts again goes on with the same run there. What the library cannot do is logged once, and ends this."""
    name = f"{facts['name']}-{str(facts['run_id'])[:8]}"
    settings = {key: value for key, value in facts.items() if key not in ("join", "stage_parameters")}
    given = {"id": str(facts["run_id"])[:16]} if library == "wandb" else {}

    def begin() -> Any:
        with contextlib.redirect_stdout(sys.stderr):  # ours has the addresses
            module = plugin.library(library, f"--track {library}")
            return module.init(project="swarmnode", name=name, config=settings, resume="allow", **given)

    try:
        run = await asyncio.to_thread(begin)
        try:
            at = -1
            while True:
                summary = view.summary(board, clock.unix_s())
                if board.samples > at:
                    at = board.samples
                    await asyncio.to_thread(functools.partial(run.log, row(summary), step=at))
                await asyncio.sleep(TRACK_EVERY_S)
        finally:
            run.finish()
    except Exception as error:  # noqa: BLE001  a library's own; training does not depend on it
        telemetry.event("dashboard.tracking_failed", level="error", library=library, reason=cause_of(error)[:300])


def notify(where: str, title: str, text: str) -> None:
    """Tell a person: by notify-send (macOS: osascript) where `where` is "desktop", else by a POST of JSON to that URL,
    as Slack and Mattermost (`text`) and Discord (`content`) read it. Raises OSError and SubprocessError."""
    if where == "desktop":
        script = ("on run argv", "display notification (item 2 of argv) with title (item 1 of argv)", "end run")
        mac = ["osascript", *(word for line in script for word in ("-e", line)), title, text]
        linux = ["notify-send", "--app-name=swarmnode", "--", title, html.escape(text)]
        command = mac if sys.platform == "darwin" else linux
        try:
            subprocess.run(command, check=True, capture_output=True, timeout=NOTIFY_S)
        except FileNotFoundError as error:
            raise OSError(error.errno, f"{command[0]} is not installed") from None
        return
    said = chat_text(f"{title}: {text}")
    body = json.dumps({"text": said, "content": said, "allowed_mentions": {"parse": []}}).encode()
    request = urllib.request.Request(where, body, {"Content-Type": "application/json"})
    urllib.request.urlopen(request, timeout=NOTIFY_S).close()


async def notify_of_alarms(where: str, live: Heartbeat, title: str, telemetry: Telemetry) -> None:
    """Tell of each alarm that stands for ALARM_S, and when it is over, until cancelled."""
    told = dict[tuple[str, str], str]()
    before = set[tuple[str, str]]()
    while True:
        await asyncio.sleep(ALARM_S)
        standing = {(alarm.kind, alarm.about): alarm for alarm in live.alarms}
        lasting = {key: alarm for key, alarm in standing.items() if key in before and key not in told}
        texts = [f"{alarm.title}. {alarm.reason}" for alarm in lasting.values()]
        texts += [f"over: {told.pop(key)}" for key in list(told) if key not in standing and key not in before]
        told |= {key: alarm.title for key, alarm in lasting.items()}
        before = set(standing)
        for text in texts:
            try:
                await asyncio.to_thread(notify, where, title, text)
            except (OSError, subprocess.SubprocessError) as error:
                telemetry.event("dashboard.notify_failed", level="warning", reason=cause_of(error)[:300])


def ask_period_s(node: NodeView, nodes: int, least_s: float) -> float:
    """Seconds between two calls to `node` in a swarm of `nodes`, at least `least_s`; more while it does not answer."""
    plain = max(least_s, nodes / REPORTS_PER_S)
    return min(max(plain, BACKOFF_MAX_S), plain * 2.0 ** max(0, node.failures - 1))


def due(
    nodes: Iterable[NodeView], asked: dict[PeerId, float], now_s: float, most: int, least_s: float
) -> list[NodeView]:
    """At most `most` living nodes that are due for a call, least recently asked first. `asked` holds loop times."""
    living = [node for node in nodes if node.living]
    never = float("-inf")
    turn = [node for node in living if now_s - asked.get(node.peer, never) >= ask_period_s(node, len(living), least_s)]
    turn.sort(key=lambda node: (asked.get(node.peer, never), node.peer))
    return turn[:most]


class Collector:
    """Updates `board` until cancelled."""

    def __init__(self, board: Board, run_id: RunId, transport: Transport, directory: Directory, clock: Clock) -> None:
        self._board = board
        self._run_id = run_id
        self._transport = transport
        self._directory = directory
        self._clock = clock
        self._asked: dict[PeerId, float] = {}
        self._asking: set[PeerId] = set()
        self.page_port = 0  # of the page, where everybody may open it

    async def run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._looking())
            tasks.create_task(self._in_turn(tasks))

    async def _looking(self) -> None:
        limits = self._board.manifest.limits
        while True:
            await self.look()
            longer_s = min(LOOK_PERIOD_MAX_S, LOOK_S_PER_NODE * len(self._board.nodes))
            await asyncio.sleep(max(limits.announce_period_s, longer_s))

    async def look(self) -> None:
        """Read the records of every stage once."""
        manifest = self._board.manifest
        listed = await self._directory.lookups(range(manifest.pipeline.stages))
        now_s = self._clock.unix_s()
        for signed in (signed for records in listed for signed in records):
            with contextlib.suppress(RemoteFault):  # it expired on the way
                ttl_max_s = STRETCH_MAX * manifest.limits.record_ttl_s
                record = open_record(signed, run_id=self._run_id, now_unix_s=now_s, ttl_max_s=ttl_max_s)
                self._board.observe_record(record, now_s)
        self._board.expire(now_s)

    async def _in_turn(self, tasks: asyncio.TaskGroup) -> None:
        loop = asyncio.get_running_loop()
        least_s = self._board.manifest.limits.announce_period_s
        allowed = float(ASKING_MAX)
        while True:
            allowed = min(float(ASKING_MAX), allowed + REPORTS_PER_S * TICK_S)
            free = min(int(allowed), ASKING_MAX - len(self._asking))
            machines = (node for node in self._board.nodes.values() if part_of(node.peer) is None)
            waiting = (node for node in machines if node.peer not in self._asking)
            for node in due(waiting, self._asked, loop.time(), free, least_s):
                allowed -= 1.0
                self._asking.add(node.peer)
                self._asked[node.peer] = loop.time()
                tasks.create_task(self._ask_once(node))
            if len(self._asked) > 2 * len(self._board.nodes) + 64:
                self._asked = {peer: at for peer, at in self._asked.items() if peer in self._board.nodes}
            await asyncio.sleep(TICK_S)

    async def _ask_once(self, node: NodeView) -> None:
        try:
            await self.ask(node)
        finally:
            self._asking.discard(node.peer)

    async def ask(self, node: NodeView) -> None:
        """Call `node` for a report and pass it, or the failure, to the board. `Busy` is ignored."""
        loop = asyncio.get_running_loop()
        asked = report_pb2.ReportRequest(
            incarnation=node.incarnation,
            events_after=node.cursor,
            receipts_after=node.receipts_after,
            page_port=self.page_port,
        )
        question = wire.Request(report=asked)
        begun = loop.time()
        try:
            try:
                answer = await self._call(node.peer, question)
            except RemoteFault as fault:
                if "cannot be reached" not in str(fault) or not node.addresses:
                    raise
                await self._transport.connect(node.peer, node.addresses)
                begun = loop.time()
                answer = await self._call(node.peer, question)
        except Busy:
            return
        except (RemoteFault, Unavailable) as error:
            self._board.silent(node.peer, cause_of(error), self._clock.unix_s())
            return
        self._board.reported(node.peer, answer, self._clock.unix_s(), loop.time() - begun)

    async def _call(self, peer: PeerId, question: wire.Request) -> report_pb2.Report:
        answer = await self._transport.call(peer, Call(question), timeout_s=ASK_TIMEOUT_S, reply_bytes_max=0)
        if answer.header.report.ByteSize() > REPORT_BYTES_MAX:
            raise RemoteFault(f"a report of {answer.header.report.ByteSize()} bytes; at most {REPORT_BYTES_MAX}")
        return answer.header.report


@dataclass(frozen=True, slots=True)
class PageAddress:
    """The address of the page and the join lines that it shows. `public` lets other machines read it."""

    host: str = "127.0.0.1"
    port: int = 0
    public: bool = False
    join: Sequence[str] = ()
    publish: bool = True  # the page offers the archive's model for download
    track: str = ""  # the library that the run's numbers are logged by, too
    notify: str = ""  # where alarms are told: "desktop", or a webhook's URL
    report: Path | None = None  # the folder that gets the run's report when the page ends


def _report(board: Board, history: History, run_id: RunId, folder: Path, now_s: float, telemetry: Telemetry) -> None:
    """Write the run's report to `folder`. A disk that fails is logged."""
    began_s = history.points[0].unix_s if history.points else board.began_s
    wall_s = max(0.0, board.trained_s - began_s) if began_s else None
    figures = {**view.summary(board, now_s), "wall_s": wall_s}
    tree = run_report(board.manifest, run_id, figures, view.contributors(board), str(folder), str(folder / "archive"))
    try:
        where = write_report(folder, tree)
    except OSError as error:
        telemetry.event("report.failed", level="error", reason=str(error))
    else:
        telemetry.event("report.written", path=str(where))


@dataclass(frozen=True, slots=True)
class Dashboard:
    """A running dashboard. `url` is the page's address."""

    url: str
    live: Heartbeat
    collector: Collector
    archive: Archive | None = None


def _history(board: Board, manifest: Manifest, run_id: RunId, home: Path, telemetry: Telemetry) -> History:
    """The run's history in `home`, which `board` shows from now on. Raises LocalFault."""

    def refused(reason: str) -> None:
        telemetry.event("dashboard.history_failed", level="warning", reason=reason)

    history = History.open(history_path(home, run_id), run_id, refused)
    try:
        history.restore(board)
        history.describe(manifest.name, manifest.model.context)
    except BaseException:
        history.close()
        raise
    return history


@contextlib.asynccontextmanager
async def dashboard(
    manifest: Manifest,
    run_id: RunId,
    signed: record_pb2.SignedManifest,
    home: Path,
    place: PageAddress,
    *,
    transport: Transport,
    directory: Directory,
    clock: Clock,
    telemetry: Telemetry,
    archive_of: Callable[[Callable[[int], float | None]], Archive | None] = lambda reported: None,
    amendments: Callable[[int], list[str]] = lambda round_index: [],
    swarm: RunId | None = None,
) -> AsyncIterator[Dashboard]:
    """Serve the page of a run, whose records carry `swarm` (None: its id), while the context is open. `archive_of`
    gets a function from a sample count to the nearest validation loss that the swarm reported; `amendments` the round
    that is done. Raises UsageError (port), LocalFault (history), and whatever `archive_of` raises."""

    board = Board(manifest, run_id, amendments=amendments)
    history = _history(board, manifest, run_id, home, telemetry)
    try:
        archive = archive_of(board.validations.near)
        offer = None if archive is None else ModelDownloads(archive, download=place.publish)
        live = Heartbeat(board, history, clock, offer)
        facts = view.run(board, run_id, place.join, __version__)
        server = DashboardServer(live, facts, signed, public=place.public)
        url = await server.start(place.host, place.port)
        collector = Collector(board, swarm or run_id, transport, directory, clock)
        if place.public:
            collector.page_port = int(url.rstrip("/").rpartition(":")[2])
        try:
            async with asyncio.TaskGroup() as tasks:
                works = [collector.run(), live.run()]
                if place.track:
                    works.append(track(place.track, board, facts, clock, telemetry))
                if place.notify:
                    works.append(notify_of_alarms(place.notify, live, manifest.name, telemetry))
                working = [tasks.create_task(work) for work in works]
                telemetry.event("dashboard.serving", url=url)
                yield Dashboard(url, live, collector, archive)
                await server.close()
                if place.report is not None and board.samples:
                    _report(board, history, run_id, place.report, clock.unix_s(), telemetry)
                for task in working:
                    task.cancel()
        finally:
            await server.close()
    finally:
        history.close()
