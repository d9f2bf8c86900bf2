"""The heartbeat: once a second it updates the board, stores the changes and sends them to every open page."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

from swarmnode.app.dashboard import view
from swarmnode.app.dashboard.alarm import Alarm, AlarmNews, alarms
from swarmnode.app.dashboard.board import CURVE_POINTS, Board, Changes
from swarmnode.app.dashboard.history import History, HistoryPoint
from swarmnode.app.dashboard.totals import SENT
from swarmnode.app.machine.run_archive import Archive
from swarmnode.base.ids import PeerId, short
from swarmnode.base.ports import Clock
from swarmnode.keep.recovery.archive import ArchiveEntry

TICK_S = 1.0
POINT_EVERY = 2  # ticks between two points of the curves
LINKS_EVERY = 5  # ticks between two pictures of the links
CONTRIBUTORS_SENT = 100  # the largest contributors; the API has all
WRITE_TIMEOUT_S = 20.0  # a page that reads nothing for this long is disconnected, and reconnects
QUEUE_MAX = round(WRITE_TIMEOUT_S / TICK_S)  # the messages of that time

Message = tuple[str, bytes]


Json = dict[str, object]


class ModelDownloads:
    """The archive as the page shows it. `download` False offers numbers only, for a public page of a private run."""

    def __init__(self, archive: Archive, *, download: bool) -> None:
        self._archive = archive
        self._download = download

    def summary(self) -> Json:
        """All checkpoints without their files, newest first."""
        return {"status": self._archive.status, "entries": [self._row(entry) for entry in self._entries()]}

    def told(self) -> Iterator[Json]:
        """The numbers, scores and continuations of each checkpoint, newest first."""
        return map(_measured, self._entries())

    def full(self) -> Json:
        """Like `summary`, with name, bytes, SHA-256 and path of each file."""
        rows = [{**self._row(entry), "files": self._files(entry)} for entry in self._entries()]
        return {"status": self._archive.status, "entries": rows}

    def names(self, label: str) -> list[str]:
        """Names of the files of `label` that may be downloaded."""
        entry = self._archive.catalog.entries.get(label)
        return list(entry.files) if entry is not None and self._download else []

    def file(self, label: str, name: str) -> Path | None:
        """The path of one file. None for a file that is not in the archive's own list."""
        entry = self._archive.catalog.entries.get(label)
        return (
            self._archive.catalog.folder_of(entry) / name if entry is not None and name in self.names(label) else None
        )

    def _entries(self) -> Iterator[ArchiveEntry]:
        return iter(sorted(self._archive.catalog.entries.values(), key=lambda entry: entry.label, reverse=True))

    def _row(self, entry: ArchiveEntry) -> Json:
        best = self._archive.catalog.best
        words = [part.agreement for part in entry.checkpoint.parts]
        return {
            **_measured(entry),
            "nbytes": entry.nbytes,
            "best": best is not None and best.label == entry.label,
            "agree": [word.agree for word in words],
            "liars": sorted({short(PeerId(liar)) for word in words for liar in word.liars}),
            "urls": f"/archive/{entry.label}/urls.txt" if self._download else None,
        }

    def _files(self, entry: ArchiveEntry) -> list[Json]:
        href = f"/archive/{entry.label}/" if self._download else None
        return [
            {"name": name, "nbytes": nbytes, "sha256": sha256, "href": None if href is None else href + name}
            for name, (nbytes, sha256) in entry.files.items()
        ]


def _measured(entry: ArchiveEntry) -> Json:
    checkpoint = entry.checkpoint
    notes = entry.notes
    row = {"label": entry.label, "round": checkpoint.round, "samples": checkpoint.samples, "t": round(notes.unix_s, 3)}
    return {**row, "loss": notes.loss, "measured": notes.measured, **notes.scores.to_json()}


class Heartbeat:
    """Ticks until cancelled. Pages subscribe; each gets the whole picture first, then the changes."""

    def __init__(self, board: Board, history: History, clock: Clock, offer: ModelDownloads | None = None) -> None:
        self.board = board
        self.offer = offer
        self.history = history
        self.alarms: list[Alarm] = []
        self._clock = clock
        self._pages: set[asyncio.Queue[bytes | None]] = set()
        self._ticks = 0
        self._made: dict[str, bytes] = {}
        self._alarm_news = AlarmNews()

    @property
    def pages(self) -> int:
        return len(self._pages)

    def now_s(self) -> float:
        return self._clock.unix_s()

    async def run(self) -> None:
        while True:
            self.tick()
            await asyncio.sleep(TICK_S)

    def tick(self) -> None:
        """One heartbeat."""
        self._made.clear()
        board = self.board
        now_s = self.now_s()
        board.settle(now_s)
        self._decide_alarms(now_s)
        point = self._point(now_s) if self._ticks % POINT_EVERY == 0 and (board.nodes or board.samples) else None
        changes = board.take_changes()
        self.history.write(changes, point)
        if self.offer is not None and self._ticks % LINKS_EVERY == 0:
            self.history.keep_models(self.offer.told())
        if self._pages:
            self._send("change", self._news(changes, point, now_s))
        self._ticks += 1

    def once_a_tick(self, key: str, make: Callable[[], bytes]) -> bytes:
        """Cache the result of `make` until the next heartbeat, so that many requests cost one computation."""
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]

    def subscribe(self) -> asyncio.Queue[bytes | None]:
        """A queue of encoded messages. The first is the whole picture. None ends the queue."""
        queue: asyncio.Queue[bytes | None] = asyncio.Queue(QUEUE_MAX)
        queue.put_nowait(self.once_a_tick("stream", lambda: encode("picture", self.picture())))
        self._pages.add(queue)
        return queue

    def unsubscribe(self, queue: asyncio.Queue[bytes | None]) -> None:
        self._pages.discard(queue)

    def close(self) -> None:
        """End every page's stream now, so that shutdown does not wait for them."""
        for queue in list(self._pages):
            self._end(queue)

    def picture(self) -> view.Json:
        """Everything the page shows."""
        board = self.board
        now_s = self.now_s()
        return {
            "summary": view.summary(board, now_s),
            "nodes": [view.node_row(node) for node in board.nodes.values()],
            "points": view.series(self.history.points, CURVE_POINTS),
            "validations": view.validation_series(board),
            "alarms": [asdict(alarm) for alarm in self.alarms],
            "rounds": view.recent_rounds(board),
            "entries": view.timeline(board),
            **self._slow(),
        }

    def _slow(self) -> view.Json:
        """The part sent every LINKS_EVERY ticks. `archive`: checkpoints without their files; None without one."""
        return {
            "links": view.links(self.board),
            "contributors": view.contributors(self.board)[:CONTRIBUTORS_SENT],
            "archive": None if self.offer is None else self.offer.summary(),
        }

    def _news(self, changes: Changes, point: HistoryPoint | None, now_s: float) -> view.Json:
        news: view.Json = {
            "summary": view.summary(self.board, now_s),
            "nodes": [view.node_row(node) for node in changes.nodes],
            "alarms": [asdict(alarm) for alarm in self.alarms],
        }
        if point is not None:
            news["point"] = point.to_json()
        if changes.forgotten:
            news["forgotten"] = list(changes.forgotten)
        if changes.validations:
            news["validations"] = [
                [samples, round(t, 1), view.rounded(loss)] for samples, t, loss in changes.validations
            ]
        if changes.rounds:
            news["rounds"] = [at.to_json() for at in changes.rounds]
        if changes.entries:
            news["entries"] = [entry.to_json() for entry in changes.entries]
        if self._ticks % LINKS_EVERY == 0:
            news |= self._slow()
        return news

    def _point(self, now_s: float) -> HistoryPoint:
        board = self.board
        living = board.living()
        return HistoryPoint(
            unix_s=now_s,
            samples=board.samples,
            tokens_per_s=board.samples_per_s() * board.manifest.model.context,
            train=board.loss_train(now_s),
            nodes=len(living),
            serving=sum(node.serving for node in living),
            round=board.round_last(),
            sent=sum(board.totals[key] for key in SENT),
            gossip=board.totals["sent_gossip"],
        )

    def _decide_alarms(self, now_s: float) -> None:
        """Update the alarms. Alarms that begin or end go to the timeline."""
        self.alarms = alarms(view.health(self.board, self.history.points, now_s))
        begun, ended = self._alarm_news.look(self.alarms, now_s)
        for alarm, times in begun:
            often = f" It came {times} times since it was told last." if times > 1 else ""
            text = f"{alarm.title}. {alarm.reason}{often}"
            self.board.tell(now_s, None, "alarm", alarm.level, text)
            if alarm.kind == "slow":
                sys.stderr.write(f"swarmnode: {text}\n")
        for alarm in ended:
            self.board.tell(now_s, None, "alarm", "info", f"Over: {alarm.title[:1].lower()}{alarm.title[1:]}")

    def _send(self, event: str, body: view.Json) -> None:
        message = encode(event, body)
        for queue in list(self._pages):
            if queue.full():
                self._end(queue)
            else:
                queue.put_nowait(message)

    def _end(self, queue: asyncio.Queue[bytes | None]) -> None:
        self._pages.discard(queue)
        while queue.full():
            queue.get_nowait()
        queue.put_nowait(None)


def encode(event: str, body: view.Json | Sequence[view.Json]) -> bytes:
    """One server-sent event."""
    return f"event: {event}\ndata: {json.dumps(body, separators=(',', ':'), allow_nan=False)}\n\n".encode()
