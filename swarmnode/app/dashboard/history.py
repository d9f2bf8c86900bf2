"""Stores the coordinator's state on disk, in one SQLite file a run, so that a restart restores the page.

Old curves are thinned and the timeline is cut. A failing disk loses history but does not stop the coordinator. A node's
counts and the position in its events are written in one transaction, so that nothing counts twice.
"""

from __future__ import annotations

import contextlib
import json
import sqlite3
from collections.abc import Callable, Iterable
from dataclasses import astuple, dataclass
from pathlib import Path

from swarmnode.app.dashboard.board import CURVE_POINTS, Board, Changes, Round
from swarmnode.app.dashboard.timeline import TimelineEntry
from swarmnode.app.dashboard.totals import CREDITED, Contribution
from swarmnode.base import bounds
from swarmnode.base.atomic_file import full_text
from swarmnode.base.damaged_file import UNREADABLE, put_aside, put_aside_unless_file
from swarmnode.base.errors import DiskFull, LocalFault, RemoteFault, cause_of
from swarmnode.base.identity import friendly_name
from swarmnode.base.ids import PeerId
from swarmnode.base.wire.call_pb2 import Receipt
from swarmnode.base.work import Work
from swarmnode.net.membership.receipt import work_of

POINTS_MAX = 4000
"""Points of the curves. Beyond this, every second point of the older half is dropped. Derived: 0.3 MB."""

ENTRIES_MAX = 20_000
MODELS_MAX = 200  # guess: steps of a slider; with 16 prompts of 48 tokens 0.6 MB
VALIDATIONS_MAX = 20_000
PRUNE_EVERY = 200

_SCHEMA = """
CREATE TABLE IF NOT EXISTS meta (key TEXT PRIMARY KEY, value TEXT);
CREATE TABLE IF NOT EXISTS point (
    t REAL PRIMARY KEY, samples INTEGER, tokens_per_s REAL, train REAL, nodes INTEGER, serving INTEGER, round INTEGER,
    sent REAL, gossip REAL);
CREATE TABLE IF NOT EXISTS validation (samples INTEGER PRIMARY KEY, t REAL, loss REAL);
CREATE TABLE IF NOT EXISTS entry (
    serial INTEGER PRIMARY KEY, t REAL, peer TEXT, name TEXT, stage INTEGER, kind TEXT, level TEXT, text TEXT);
CREATE TABLE IF NOT EXISTS round (
    number INTEGER PRIMARY KEY, t REAL, paired INTEGER, lone INTEGER, refused INTEGER, seconds REAL,
    single INTEGER DEFAULT 0);
CREATE TABLE IF NOT EXISTS model (label TEXT PRIMARY KEY, told TEXT);
CREATE TABLE IF NOT EXISTS day (peer TEXT, day INTEGER, samples INTEGER, PRIMARY KEY (peer, day)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS node (peer TEXT PRIMARY KEY, incarnation INTEGER, cursor INTEGER, addresses TEXT);
CREATE TABLE IF NOT EXISTS contribution (peer TEXT PRIMARY KEY, name TEXT, first REAL, last REAL, lives TEXT);
CREATE TABLE IF NOT EXISTS receipt (
    server TEXT, client TEXT, begun INTEGER, raw BLOB, PRIMARY KEY (server, client, begun)) WITHOUT ROWID;
"""


@dataclass(frozen=True, slots=True)
class HistoryPoint:
    """The run at one moment. `train` is in nats per token, `sent` and `gossip` are bytes so far."""

    unix_s: float
    samples: int
    tokens_per_s: float
    train: float | None
    nodes: int
    serving: int
    round: int
    sent: float
    gossip: float

    def to_json(self) -> list[object]:
        """[t, samples, tokens_per_s, train, nodes, serving, round, sent, gossip]"""
        train = None if self.train is None else round(self.train, 4)
        return [round(self.unix_s, 1), self.samples, round(self.tokens_per_s, 1), train, *astuple(self)[4:]]


class History:
    """Use `History.open(path, run_id)`; `restore` fills a board, `write` adds what is new, `close` ends it.

    `points` holds all points, oldest first. `told` is called once with the reason when the disk starts to fail.
    """

    def __init__(self, path: Path, database: sqlite3.Connection, told: Callable[[str], None]) -> None:
        self._path = path
        self._database = database
        self._told = told
        self._failed = False
        self._writes = 0
        self.points: list[HistoryPoint] = []
        self.models: dict[str, dict[str, object]] = {}
        """What was measured of each checkpoint of the archive, those deleted since, too, oldest first."""

    @classmethod
    def open(cls, path: Path, run_id: str, told: Callable[[str], None]) -> History:
        """Open or create the history at `path`; a damaged one is put aside. Raises LocalFault when that fails or it is
        another run's."""
        put_aside_unless_file(path)
        try:
            return cls._opened(path, run_id, told)
        except DamagedHistory as damaged:
            _put_aside(path, str(damaged))
            return cls._opened(path, run_id, told)

    @classmethod
    def _opened(cls, path: Path, run_id: str, told: Callable[[str], None]) -> History:
        try:
            database = sqlite3.connect(path, isolation_level=None)
            database.execute("PRAGMA journal_mode=WAL")
            database.execute("PRAGMA synchronous=NORMAL")
            database.executescript(_SCHEMA)
            if "single" not in {column[1] for column in database.execute("PRAGMA table_info(round)")}:
                database.execute("ALTER TABLE round ADD COLUMN single INTEGER DEFAULT 0")
            row = database.execute("SELECT value FROM meta WHERE key='run'").fetchone()
            if row is None:
                database.execute("INSERT INTO meta VALUES ('run', ?)", (run_id,))
        except sqlite3.Error as error:
            if "full" in str(error):
                raise DiskFull(full_text(path, None)) from None
            if isinstance(error, sqlite3.OperationalError):  # locked, read only: no fault of its content
                raise LocalFault(f"{path} cannot be opened: {cause_of(error)}; move it away to begin anew") from None
            raise DamagedHistory(cause_of(error)) from None
        if row is not None and row[0] != run_id:
            raise LocalFault(f"{path} is of run {row[0][:16]}; give another --home")
        return cls(path, database, told)

    def describe(self, name: str, context: int) -> None:
        """Keep the run's name, and the tokens of a sample, for who reads the file alone. A failing disk is reported."""
        try:
            rows = [("name", name), ("context", str(context))]
            self._database.executemany("INSERT OR REPLACE INTO meta VALUES (?, ?)", rows)
        except sqlite3.Error as error:
            self._told(cause_of(error))

    def restore(self, board: Board) -> None:
        """Load the stored state into `board`, which is new, and `points`. A damaged file is put aside, and the history
        begins anew; what was read of it before the damage is shown."""
        try:
            self._restore(board)
        except (sqlite3.Error, RemoteFault, *UNREADABLE) as error:
            run_id = board.run_id
            self.close()
            _put_aside(self._path, cause_of(error))
            self._database = History._opened(self._path, run_id, self._told)._database

    def _restore(self, board: Board) -> None:
        run = self._database.execute
        self.points = [HistoryPoint(*row) for row in run("SELECT * FROM point ORDER BY t")]
        if self.points:
            samples = self.points[-1].samples
            board.resume(samples, next(point.unix_s for point in self.points if point.samples >= samples))
        for samples, t, loss in run("SELECT * FROM validation ORDER BY t DESC LIMIT ?", (CURVE_POINTS,)):
            board.validations[samples] = (t, loss)
        for row in reversed(
            run("SELECT * FROM entry ORDER BY serial DESC LIMIT ?", (board.timeline.maxlen,)).fetchall()
        ):
            board.timeline.append(TimelineEntry(*row))
            board.entry_serial = row[0]
        for row in run("SELECT * FROM round ORDER BY number"):
            board.rounds[row[0]] = Round(*row)
        for peer, incarnation, cursor, _ in run("SELECT * FROM node"):
            board.cursors[PeerId(peer)] = (incarnation, cursor)
        for peer, name, first, last, lives in run("SELECT * FROM contribution"):
            kept = Contribution(name, first, last, {int(life): counts for life, counts in json.loads(lives).items()})
            board.contributions[PeerId(peer)] = kept
            for counts in kept.lives.values():
                board.totals.update(counts)
        self.models = {label: json.loads(told) for label, told in run("SELECT * FROM model ORDER BY label")}
        board.ledger.days.update({(PeerId(peer), day): samples for peer, day, samples in run("SELECT * FROM day")})
        for (raw,) in run("SELECT raw FROM receipt"):  # verified before they were written
            board.ledger.put(bounds.parse(Receipt, raw, "a receipt"))

    def write(self, changes: Changes, point: HistoryPoint | None) -> None:
        """Write the changes in one transaction. A failing disk is reported once."""
        if point is not None:
            self.points.append(point)
        dropped = self._thin()
        try:
            self._database.execute("BEGIN")
            self._write(changes, point, dropped)
            self._database.execute("COMMIT")
            self._failed = False
        except sqlite3.Error as error:
            with contextlib.suppress(sqlite3.Error):
                self._database.execute("ROLLBACK")
            if not self._failed:
                self._failed = True
                full = "full" in str(error)  # sqlite's words: "database or disk is full"
                self._told(full_text(self._path, None, advice="free space there") if full else cause_of(error))

    def _write(self, changes: Changes, point: HistoryPoint | None, dropped: list[float]) -> None:
        many = self._database.executemany
        if point is not None:
            many("INSERT OR REPLACE INTO point VALUES (?,?,?,?,?,?,?,?,?)", [astuple(point)])
        many("DELETE FROM point WHERE t=?", [(t,) for t in dropped])
        many("INSERT OR REPLACE INTO validation VALUES (?,?,?)", changes.validations)
        many("INSERT OR REPLACE INTO entry VALUES (?,?,?,?,?,?,?,?)", [astuple(entry) for entry in changes.entries])
        many("INSERT OR REPLACE INTO day VALUES (?,?,?)", changes.days)
        many("INSERT OR REPLACE INTO round VALUES (?,?,?,?,?,?,?)", [astuple(at) for at in changes.rounds])
        many(
            "INSERT OR REPLACE INTO node VALUES (?,?,?,?)",
            [(node.peer, node.incarnation, node.cursor, json.dumps(node.addresses)) for node in changes.nodes],
        )
        many(
            "INSERT OR REPLACE INTO contribution VALUES (?,?,?,?,?)",
            [
                (peer, told.name, told.first_unix_s, told.last_unix_s, json.dumps(told.lives))
                for peer, told in changes.contributions
            ],
        )
        many(
            "INSERT OR REPLACE INTO receipt VALUES (?,?,?,?)",
            [(one.server, one.client, one.from_unix_s, one.SerializeToString()) for one in changes.receipts],
        )
        self._writes += 1
        if self._writes % PRUNE_EVERY == 0:
            newest = "SELECT samples FROM validation ORDER BY t DESC LIMIT ?"
            self._database.execute(f"DELETE FROM validation WHERE samples NOT IN ({newest})", (VALIDATIONS_MAX,))
            self._database.execute(
                "DELETE FROM entry WHERE serial <= (SELECT MAX(serial) FROM entry) - ?", (ENTRIES_MAX,)
            )

    def keep_models(self, told: Iterable[dict[str, object]]) -> None:
        """Keep what is told of checkpoints, by their `label`; of more than MODELS_MAX the older half is thinned."""
        new = {str(one["label"]): one for one in told if self.models.get(str(one["label"])) != one}
        if not new:
            return
        self.models = dict(sorted({**self.models, **new}.items()))
        for old in list(self.models)[1 : MODELS_MAX // 2 : 2] if len(self.models) > MODELS_MAX else ():
            del self.models[old]
        with contextlib.suppress(sqlite3.Error):  # a failing disk is reported by `write`
            rows = [(label, json.dumps(self.models[label])) for label in new if label in self.models]
            self._database.executemany("INSERT OR REPLACE INTO model VALUES (?,?)", rows)
            gone = [
                (label,) for (label,) in self._database.execute("SELECT label FROM model") if label not in self.models
            ]
            self._database.executemany("DELETE FROM model WHERE label=?", gone)

    def entries_before(self, serial: int, most: int) -> list[TimelineEntry]:
        """Older lines of the timeline, newest first."""
        rows = self._database.execute(
            "SELECT * FROM entry WHERE serial < ? ORDER BY serial DESC LIMIT ?", (serial, most)
        )
        return [TimelineEntry(*row) for row in rows]

    def close(self) -> None:
        with contextlib.suppress(sqlite3.Error):
            self._database.close()

    def _thin(self) -> list[float]:
        """Drop every second point of the older half when there are too many. Returns the times of dropped points."""
        if len(self.points) <= POINTS_MAX:
            return []
        half = len(self.points) // 2
        dropped = [point.unix_s for point in self.points[1:half:2]]
        self.points = self.points[0:half:2] + self.points[half:]
        return dropped


class DamagedHistory(LocalFault):
    """The file holds no history."""


def _put_aside(path: Path, why: str) -> None:
    """Put the database away, with the files that SQLite keeps beside it."""
    put_aside(path, why)
    for beside in ("-wal", "-shm"):
        path.with_name(path.name + beside).unlink(missing_ok=True)


def history_path(home: Path, run_id: str) -> Path:
    """The file in a coordinator's home that holds the history of a run."""
    return home / f"history-{run_id[:16]}.sqlite"


def read_members(path: Path) -> list[dict[str, object]]:
    """(name, hours of work as it tells) of each who took part, the most first, as the history at `path` has them; none
    where there is none. The name is two words made of the key, unless the owner agreed, by `join --credit`, to be
    named."""
    try:
        with contextlib.closing(sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True)) as database:
            rows = database.execute("SELECT peer, name, lives FROM contribution").fetchall()
        works = []
        for peer, name, lives in rows:
            told = list(json.loads(lives).values())
            agreed = bool(name and told and told[-1].get(CREDITED))
            seconds = sum(life.get("worked_s", 0.0) for life in told)
            works.append((seconds, name if agreed else friendly_name(PeerId(peer))))
    except (sqlite3.Error, ValueError, TypeError, AttributeError):
        return []
    return [{"name": name, "hours": round(seconds / 3600, 2)} for seconds, name in sorted(works, reverse=True)]


def read_facts(path: Path) -> tuple[str | None, int | None]:
    """(the run's name, tokens of a sample) as the history at `path` keeps them; None of what it does not know."""
    try:
        with contextlib.closing(sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True)) as database:
            kept = dict(database.execute("SELECT key, value FROM meta"))
        return kept.get("name"), int(kept["context"]) if "context" in kept else None
    except (sqlite3.Error, ValueError, TypeError) as error:
        raise LocalFault(f"{path} cannot be read: {cause_of(error)}") from None


def read_curves(path: Path) -> tuple[str, list[list[object]], list[tuple[int, float, float]]]:
    """(run id, points as `HistoryPoint.to_json`, validations as (samples, Unix seconds, nats)) of the history at
    `path`, which a coordinator may be writing. Raises LocalFault."""
    try:
        with contextlib.closing(sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True)) as database:
            ((run_id,),) = database.execute("SELECT value FROM meta WHERE key='run'")
            points = [HistoryPoint(*row).to_json() for row in database.execute("SELECT * FROM point ORDER BY t")]
            return run_id, points, database.execute("SELECT samples, t, loss FROM validation ORDER BY t").fetchall()
    except (sqlite3.Error, ValueError, TypeError) as error:
        raise LocalFault(f"{path} cannot be read: {cause_of(error)}") from None


def read_given(path: Path) -> dict[str, Work]:
    """The work that each machine gave, by peer id, in the history at `path`: the sum of receipts that members signed
    for it. Raises LocalFault."""
    try:
        with contextlib.closing(sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True)) as database:
            members = {peer for (peer,) in database.execute("SELECT peer FROM contribution")}
            raws = database.execute("SELECT raw FROM receipt").fetchall()
        found: dict[str, Work] = {}
        for receipt in (bounds.parse(Receipt, raw, "a receipt") for (raw,) in raws):
            if receipt.client in members:
                found[receipt.server] = found.get(receipt.server, Work()) + work_of(receipt)
        return found
    except (sqlite3.Error, ValueError, TypeError, RemoteFault) as error:
        raise LocalFault(f"{path} cannot be read: {cause_of(error)}") from None
