"""Screenshots of the page, four sizes by five moods, of made-up swarms.

`python -m benchmarks.swarm.screenshots [FOLDER [png]] [MOOD ...]`; `png` takes whole pages, without it small JPEGs of
what a screen shows (the whole page on a desktop with three and with 300 nodes). The moods: empty (two of three stages
have nobody), three nodes, 300 nodes, stopped, and after a kill. Everything is real but the nodes' training, the history
of the days before, and the archive. `ui` is the page of `swarmnode ui`, of a made-up node that keeps real limits;
`terminal` what `join`, `top` and `up` show in four widths.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import importlib
import io
import math
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Collection
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from rich.console import Console, RenderableType
from rich.terminal_theme import MONOKAI

from benchmarks.swarm.dashboard import CHROMIUM, FLAGS, RUN, manifest_for, watched
from benchmarks.swarm.fake_fleet import FakeFleet, LoopClock
from swarmnode import __version__
from swarmnode.app.control.service import ControlServer
from swarmnode.app.daemon.clock import SystemClock
from swarmnode.app.dashboard.board import Changes, Round
from swarmnode.app.dashboard.history import History, HistoryPoint, history_path
from swarmnode.app.dashboard.start import Dashboard
from swarmnode.app.local.node_page import NodePage
from swarmnode.app.local.session import SessionView
from swarmnode.app.local.summary import NodeFacts, Totals
from swarmnode.app.local.swarm_view import NodeWatch, picture, render
from swarmnode.app.machine.receipt_store import Receipts
from swarmnode.app.machine.run_archive import Archive
from swarmnode.base.errors import UsageError
from swarmnode.base.identity import Identity
from swarmnode.base.ids import PeerId, seeded
from swarmnode.base.metrics import name
from swarmnode.base.metrics.events import EventLog
from swarmnode.base.wire.record_pb2 import NODE_STATE_TRAINING
from swarmnode.base.wire.report_pb2 import LimitsReply, PeerStatus, StatusReply
from swarmnode.keep.recovery.archive import ArchiveEntry, ArchiveNotes, Score, Scores
from swarmnode.keep.recovery.checkpoint import Checkpoint, CopyAgreement, Origin, StagePart
from swarmnode.net.membership.receipt import WorkDone, sign_receipt
from swarmnode.run.manifest import Manifest
from swarmnode.train.node.limits import NOT_ASKED, AskedPause, Limits, SensorReading, change, decide, show

SIZES = {"wide": (1920, 1200), "desktop": (1360, 900), "tablet": (820, 1180), "phone": (390, 844)}
MOODS = {"empty": 3, "three": 3, "crowd": 300, "stopped": 3, "killed": 18}
"""The nodes of each mood's swarm."""
OWN = "ui"
TERMINAL = "terminal"
STILL = (OWN, "empty", "stopped")  # nothing trains there
WHOLE = ("three", "crowd")  # also as a JPEG, on a desktop
WIDTHS = (60, 80, 100, 140)
TOKEN = "6f" * 16

HOURS = 60
SAMPLES_AN_HOUR = 60_000
PROMPTS = ("Once upon a time", "The capital of France")
WRITTEN = (
    (" tthe e  aon he te s o ad th", " e tis an  o he  rt e sne"),
    (" the was and the said he was the of", " is the and was of the in the"),
    (" there was a man and he said to the house of", " is the town of the king, and it was"),
    (", there was a girl who lived by the sea with her grandmother.", " is Paris, the largest town of the country."),
)


def now_s() -> float:
    """The fleet's time."""
    return LoopClock().unix_s()


def loss_at(samples: float) -> float:
    """Nats a token after so many samples: a curve like those of small models."""
    return 1.6 + 4.2 * math.exp(-samples / 20_000) + 2.2 * math.pow(1 + samples / 9_000, -0.6)


def write_past(home: Path, manifest: Manifest, hours: int) -> int:
    """The history of `hours` before now, with a night in which the coordinator was away. Returns the samples."""
    history = History.open(history_path(home, RUN), RUN, print)
    rng = seeded(0, "screenshots")
    empty = Changes([], [], [], [], [], [], [])
    steps = 12 * hours
    rate = SAMPLES_AN_HOUR / 3600 * manifest.model.context
    for step in range(steps + 1):
        if 0.55 < step / steps < 0.68:
            continue
        samples = 1 + step * SAMPLES_AN_HOUR // 12
        t = now_s() - 300 * (steps - step) - 30
        train = loss_at(samples) + rng.gauss(0.0, 0.03)
        told = [(samples, t, loss_at(samples) + 0.04)] if step % 8 == 0 else []
        point = HistoryPoint(t, samples, rate * rng.uniform(0.9, 1.1), train, 9, 9, step, 4e8 * step, 1e7 * step)
        rounds = [Round(step, t, 6, rng.randrange(2), 0, 3.0, 1)] if step % 4 == 0 else []
        history.write(dataclasses.replace(empty, validations=told, rounds=rounds), point)
    history.close()
    return 1 + HOURS * SAMPLES_AN_HOUR


def archive(manifest: Manifest, samples: int) -> Archive:
    """An archive of four checkpoints, with scores and texts, without files on disk."""
    entries = {}
    for index, texts in enumerate(WRITTEN, 1):
        at = samples * index**3 // len(WRITTEN) ** 3
        scores = (Score("stories", "nats/token", loss_at(at) + 0.1), Score("poems", "nats/token", loss_at(at) + 0.4))
        label = f"round-{at // 2048:09d}"
        parts = [
            StagePart(stage, at // 2048, "", 0, 0.0, 0, {}, 0, (), (), agreement=CopyAgreement(2))
            for stage in range(manifest.pipeline.stages)
        ]
        notes = ArchiveNotes(
            now_s() - 3600 * HOURS * (1 - index / len(WRITTEN)) - 400,
            loss_at(at) + 0.04,
            "archive",
            (("model.safetensors", 41_000_000, "ab" * 32), ("config.json", 700, "cd" * 32)),
            Scores((*scores, Score("word order", "acc", 0.5 + 0.1 * index)), tuple(zip(PROMPTS, texts, strict=True))),
        )
        checkpoint = Checkpoint(Origin.of(manifest, RUN), label, at // 2048, at, {}, tuple(parts))
        entries[label] = ArchiveEntry(checkpoint, notes)
    catalog = SimpleNamespace(entries=entries, best=entries[max(entries)], folder_of=lambda entry: Path())
    kept = SimpleNamespace(status="ready", catalog=catalog)
    return cast(Archive, kept)


def write_days(board: Dashboard, fleet: FakeFleet) -> None:
    """Members sign for each node, on most of the last days."""
    ledger = board.live.board.ledger
    rng = seeded(1, "screenshots")
    today = int(now_s() // 86_400)
    for node in fleet.nodes[:9]:
        for day in range(today - 20, today + 1):
            if rng.random() < 0.85:
                ledger.days[PeerId(node.identity.peer_id), day] = rng.randrange(200, 4000)
        friend = next(other for other in fleet.nodes if other.stage != node.stage)
        done = WorkDone(9000, rng.randrange(20_000, 60_000))
        who = node.identity.peer_id
        ledger.put(sign_receipt(friend.identity, RUN, who, done, int(now_s()) - 9000, int(now_s())))


@contextlib.asynccontextmanager
async def page_of(mood: str) -> AsyncIterator[tuple[str, str]]:
    """(address of the page in `mood`, path of a node's page) while the context is open."""
    manifest = manifest_for(MOODS[mood])
    with tempfile.TemporaryDirectory() as home:
        past = 0 if mood == "empty" else write_past(Path(home), manifest, HOURS)
        idle = mood in ("empty", "stopped")
        fleet = FakeFleet(manifest, RUN, MOODS[mood], samples=past, idle=idle, teams=("meadow", "harbour"))
        for absent in fleet.nodes[mood == "empty" :] if idle else ():
            fleet.network.nodes.pop(absent.identity.peer_id)
        async with watched(fleet, Path(home), archive=archive(manifest, past) if past else None) as board:
            if not idle:
                write_days(board, fleet)
            await asyncio.sleep(9.0 if mood in ("three", "killed") else 40.0 if mood == "crowd" else 18.0)
            if mood == "killed":
                for dead in fleet.nodes[2::3]:
                    fleet.network.nodes.pop(dead.identity.peer_id)
                await asyncio.sleep(16.0)
            yield board.url, f"node/{fleet.nodes[0].identity.peer_id}" if fleet.nodes else ""


class OwnNode:
    """The daemon of a volunteer's machine, as the control API asks it: made-up work, real limits."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.clock = SystemClock()
        self.limits = change(Limits(), {"hours": "mon-fri 22-07,sat-sun", "quota": "50GB/day"})
        self.asked = NOT_ASKED
        self.told: list[str] = []
        self.asked_times = 0
        self.identity = Identity.of_seed(b"o" * 32)
        self.friends = [Identity.of_seed(bytes([n]) * 32) for n in range(5)]

    async def write_past(self) -> None:
        """Receipts of four weeks, and a log."""
        rng = seeded(2, "screenshots")
        now = int(self.clock.unix_s())
        receipts = Receipts(self.home)
        for ago in range(27, -1, -1):
            for friend in self.friends[: rng.randrange(1, 5)]:
                until = now - 86_400 * ago - rng.randrange(9000) % (now % 86_400 + 1)  # of that day, also at night
                done = WorkDone(900, rng.randrange(2000, 9000))
                receipt = sign_receipt(friend, RUN, self.identity.peer_id, done, until - 9000, until)
                await receipts.keep(receipt)
        log = EventLog(self.home / "events.jsonl", clock=self.clock, run=RUN, node=self.identity.peer_id)
        for event, fields in (
            ("node.ready", {"serves": 1}),
            ("recovery.done", {"method": "replica", "seconds": 4.2, "nbytes": 81_000_000}),
            ("node.paused", {"reason": "steam runs", "held": 3}),
            ("node.resumed", {"reason": "within its limits"}),
            ("stage.moved", {"target": 2}),
        ):
            log.write(event, fields=fields)
        log.close()

    def status(self) -> StatusReply:
        self.asked_times += 1
        reply = StatusReply(
            run_id=RUN,
            run_name="meadow-110m",
            peer_id=self.identity.peer_id,
            version=__version__,
            stages=4,
            stage=2,
            state=NODE_STATE_TRAINING,
            round=412,
            uptime_s=9200.0,
            loss_train=3.412,
            run_tokens_per_second=9_100.0,
            given_tokens_per_second=2_600.0,
            tokens_given=9_400_000 + 2600 * self.asked_times,
            tokens_total=380_000_000 + 9100 * self.asked_times,
            peers=[
                PeerStatus(
                    peer_id=friend.peer_id,
                    stage=stage,
                    state=NODE_STATE_TRAINING,
                    samples_per_second=9.0 + stage,
                    queue=stage,
                    latency_s=0.08,
                )
                for stage, friend in zip((0, 1, 3), self.friends, strict=False)
            ],
            resident_nbytes=812 << 20,
            counters={
                name.series(name.LINK_BYTES, kind="pipeline", direction=way): 2e6 * self.asked_times
                for way in ("sent", "received")
            }
            | {name.COMPUTE_SECONDS: 0.7 * self.asked_times},
            page="http://192.0.2.7:7070/",
        )
        reply.limits.CopyFrom(self.limit({}))
        return reply

    def limit(self, changed: dict[str, str]) -> LimitsReply:
        try:
            self.limits = change(self.limits, changed)
        except ValueError as error:
            raise UsageError(str(error)) from None
        reading = SensorReading(self.clock.unix_s(), 0, used_nbytes=7_300_000_000, asked=self.asked)
        verdict = decide(dataclasses.replace(self.limits, hours=()), reading)
        until = 0.0 if verdict.until_unix_s is None else verdict.until_unix_s - self.clock.unix_s()
        return LimitsReply(
            limits=show(self.limits),
            running=verdict.running,
            reason=verdict.reason,
            until_s=until,
            quota_used_nbytes=reading.used_nbytes,
        )

    def pause(self, for_s: float, reason: str) -> LimitsReply:
        self.asked = AskedPause(self.clock.unix_s() + for_s if for_s else math.inf, reason)
        return self.limit({})

    def resume(self) -> LimitsReply:
        self.asked = NOT_ASKED
        return self.limit({})

    def finish(self, reason: str) -> None:
        self.told.append(f"finish: {reason}")


@contextlib.asynccontextmanager
async def own_page() -> AsyncIterator[tuple[str, OwnNode]]:
    """(address of the page of a made-up node on this machine, that node) while the context is open."""
    with tempfile.TemporaryDirectory() as folder:
        node = OwnNode(Path(folder))
        await node.write_past()
        control = ControlServer(node.home, node)
        page = NodePage(node.home, TOKEN, Path("~/.config/swarmnode/config.toml"))
        await control.start()
        try:
            yield f"{await page.start('127.0.0.1', 0)}#{TOKEN}", node
        finally:
            await page.close()
            await control.stop()


def swarm_of(node: OwnNode, nodes: int, dead: Collection[int] = ()) -> Callable[[int], RenderableType]:
    """The picture of a session of `nodes` like `node`, of which `dead` were killed."""
    facts = []
    for number in range(nodes):
        status = node.status()
        own = StatusReply(
            peer_id=f"peer{number:08}",
            stage=number % 3,
            stages=3,
            tokens_per_second=900.0 + number,
            inner_steps=400 + number,
            loss_validation=3.51,
        )
        status.MergeFrom(own)
        status.ClearField("peers")
        reason = "killed by SIGKILL" if number in dead else ""
        facts.append(NodeFacts(f"node-{number:02}", number % 3, status, reason))
    done = Totals(
        samples=26_000,
        tokens=3_328_000,
        round=412,
        loss_train=3.412,
        loss_validation=3.51,
        bytes={"pipeline": 8 * 10**8},
    )
    view = SessionView(92.0, 80.0, 1.1e4, tuple(facts), done, "http://127.0.0.1:7070/")
    return lambda width: render(view, width)


def terminals() -> dict[str, list[Callable[[int], RenderableType]]]:
    """The pictures of terminals by mood, as functions of the width."""
    node = OwnNode(Path())
    peers = list(node.status().peers)

    def panel_of(**changes: Any) -> Callable[[int], RenderableType]:
        watch = NodeWatch()
        for at in range(12):
            status = node.status()
            status.MergeFrom(StatusReply(loss_train=3.9 - at / 50))
            for key in changes:
                status.ClearField(key)
            status.MergeFrom(StatusReply(**changes))
            watch.add(float(at), status)
        return lambda width: picture(watch)

    empty = panel_of(peers=[], tokens_given=0, loss_train=0.0, tokens_total=0, round=0)
    node.pause(3600.0, "snoozed")
    paused = panel_of(peers=peers)
    node.resume()
    return {
        "empty": [empty],
        "three": [panel_of(peers=peers), swarm_of(node, 3)],
        "crowd": [panel_of(peers=peers[:2] * 8), swarm_of(node, 18)],
        "stopped": [paused],
        "killed": [panel_of(peers=peers[:2]), swarm_of(node, 6, (1, 4))],
    }


def shoot_terminals(folder: Path, kind: str) -> None:
    """A picture of each mood's terminals, in WIDTHS."""
    with importlib.import_module("playwright.sync_api").sync_playwright() as p:
        browser: Any = p.chromium.launch(executable_path=CHROMIUM, args=list(FLAGS))
        for mood, shown in terminals().items():
            parts = []
            for width in WIDTHS:
                console = Console(record=True, width=width, file=io.StringIO(), force_terminal=True)
                for one in shown:
                    console.print(one(width), "\n")
                text = console.export_html(inline_styles=True, code_format="<pre>{code}</pre>", theme=MONOKAI)
                parts.append(f"<section style='width:{width}ch'>{text}</section>")
            page = browser.new_context(viewport={"width": 1500, "height": 800}).new_page()
            page.set_content(
                "<style>body{background:#0c0c0c;color:#d9d9d9;font:13px/1.35 monospace;margin:16px;display:flex;"
                "flex-wrap:wrap;gap:16px}section{border:1px solid #444;padding:8px;overflow:hidden}"
                f"pre{{margin:0;font:inherit}}</style>{''.join(parts)}"
            )
            how = {"type": "png"} if kind == "png" else {"type": "jpeg", "quality": 60}
            page.screenshot(path=folder / f"terminal-{mood}.{kind}", full_page=True, **how)
        browser.close()


def shoot(url: str, node: str, mood: str, folder: Path, kind: str) -> list[str]:
    """Take the pictures of a page; returns what its console said."""
    said: list[str] = []
    how = {"type": "png"} if kind == "png" else {"type": "jpeg", "quality": 70}
    with importlib.import_module("playwright.sync_api").sync_playwright() as p:
        browser: Any = p.chromium.launch(executable_path=CHROMIUM, args=list(FLAGS))
        for size, (width, height) in SIZES.items():
            scheme = "dark" if size == "wide" else "light"
            viewport = {"width": width, "height": height}
            page = browser.new_context(viewport=viewport, color_scheme=scheme, reduced_motion="reduce").new_page()
            page.on("console", lambda message: said.append(message.text))
            page.on("pageerror", lambda error: said.append(str(error)))
            page.goto(url)
            for _ in range(300 if mood != OWN else 0):
                updates = page.evaluate("performance.getEntriesByName('swarmnode-update').length")
                if updates >= 4 and (mood in STILL or page.locator("#n-speed").inner_text() not in "0–"):
                    break
                page.wait_for_timeout(100)
            page.wait_for_timeout(5000 if mood == OWN else 600)
            whole = (kind == "png" and size != "wide") or (mood in WHOLE and size == "desktop")
            page.screenshot(path=folder / f"{mood}-{size}.{kind}", full_page=whole, **how)
            if mood == "killed" and size in ("desktop", "phone"):
                page.goto(url + node)
                page.wait_for_selector("#view-node h1 .pill")
                page.wait_for_timeout(600)
                page.screenshot(path=folder / f"node-{size}.{kind}", **how)
        browser.close()
    return said


async def main(folder: Path, kind: str, moods: list[str]) -> None:
    await asyncio.to_thread(folder.mkdir, parents=True, exist_ok=True)
    if OWN in moods:
        async with own_page() as (url, _):
            print(OWN, *await asyncio.to_thread(shoot, url, "", OWN, folder, kind))
    if TERMINAL in moods:
        await asyncio.to_thread(shoot_terminals, folder, kind)
    for mood in moods:
        if mood in (OWN, TERMINAL):
            continue
        async with page_of(mood) as (url, node):
            said = await asyncio.to_thread(shoot, url, node, mood, folder, kind)
        print(mood, *said)


if __name__ == "__main__":
    known = (OWN, TERMINAL, *MOODS)
    words = [word for word in sys.argv[1:] if word not in known]
    moods = [mood for mood in known if mood in sys.argv] or list(known)
    asyncio.run(main(Path(words[0] if words else "docs/screenshots"), "png" if "png" in words[1:] else "jpg", moods))
