"""Every file that a node reads at start may be damaged: it is put aside and told, and the node starts."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from swarmnode.app.control import token_file
from swarmnode.app.control.socket_path import GRPC_SOCKET_NAME, LOCK_NAME, SOCKET_NAME, TOKEN_FILE, take_home
from swarmnode.app.daemon import ready_file
from swarmnode.app.daemon.process import PAUSE_FILE, read_pause, write_pause
from swarmnode.app.dashboard.board import Board, Changes
from swarmnode.app.dashboard.history import History, HistoryPoint, history_path
from swarmnode.app.machine import receipt_store
from swarmnode.app.machine.receipt_store import Receipts
from swarmnode.app.machine.sensors import USAGE_FILE, DailyTraffic
from swarmnode.base.damaged_file import ASIDE_MAX, put_aside
from swarmnode.base.errors import NotPermitted
from swarmnode.base.identity import Identity
from swarmnode.base.ids import RunId
from swarmnode.base.metrics.events import EventLog
from swarmnode.net.membership.receipt import WorkDone, sign_receipt
from swarmnode.net.transport import key_file
from swarmnode.net.transport.contact import Contacts
from swarmnode.run.manifest import Manifest
from swarmnode.train.node.limits import AskedPause
from tests.support.village import LoopClock

RUN = RunId("ab" * 32)
NOW_S = 1_800_000_000.0
NOTHING = Changes([], [], [], [], [], [], [])


def identity(number: int) -> Identity:
    return Identity.of_seed(number.to_bytes(32, "big"))


async def receipts(home: Path) -> None:
    kept = Receipts(home)
    for number in range(1, 4):
        client = identity(number)
        done = WorkDone(2, 8, 64, 32)
        await kept.keep(sign_receipt(client, RUN, identity(9).peer_id, done, 10, 20))


def contacts(home: Path) -> None:
    kept = Contacts()
    kept.hear(identity(1).peer_id, ["/ip4/10.0.0.1/tcp/4001"], NOW_S)
    kept.trained(RUN, 4000)
    kept.save(home / "contacts.json")


def point(at: int) -> HistoryPoint:
    return HistoryPoint(NOW_S + at, at, 1.0, 2.0, 3, 3, at, 0.0, 0.0)


def history(home: Path) -> None:
    kept = History.open(history_path(home, RUN), RUN, print)
    for at in range(300):
        kept.write(NOTHING, point(at))
    kept.close()


def load_history(home: Path) -> None:
    kept = History.open(history_path(home, RUN), RUN, print)
    board = Board(Manifest(), RUN)
    kept.restore(board)
    kept.write(NOTHING, point(1000))
    kept.close()


def log(home: Path) -> None:
    events = EventLog(home / "log.jsonl", LoopClock(), RUN, "n")
    events.write("node.failed", level="error", fields={"reason": "x"})
    events.close()


def usage(home: Path) -> DailyTraffic:
    return DailyTraffic(home, lambda: 7)


def lock(home: Path) -> None:
    os.close(take_home(home))


def save_usage(home: Path) -> None:
    counting = usage(home)
    counting.read(NOW_S, 0)
    counting.save()


Home = Callable[[Path], object]
FILES: dict[str, tuple[Home, Home]] = {
    "node.key": (
        lambda home: key_file.load_or_create(home / "node.key"),
        lambda home: key_file.load_or_create(home / "node.key"),
    ),
    "contacts.json": (contacts, lambda home: Contacts.load(home / "contacts.json", NOW_S)),
    USAGE_FILE: (save_usage, lambda home: usage(home).read(NOW_S, 0)),
    PAUSE_FILE: (
        lambda home: write_pause(home / PAUSE_FILE, AskedPause(NOW_S, "a person")),
        lambda home: read_pause(home / PAUSE_FILE),
    ),
    ready_file.FILE_NAME: (
        lambda home: ready_file.write(home, ready_file.Ready(1, RUN, "p", (), "", "")),
        ready_file.clear,
    ),
    f"history-{RUN[:16]}.sqlite": (history, load_history),
    TOKEN_FILE: (token_file.load_or_create, token_file.load_or_create),
    LOCK_NAME: (lock, lock),
    SOCKET_NAME: (lambda home: (home / SOCKET_NAME).touch(), lock),
    GRPC_SOCKET_NAME: (lambda home: (home / GRPC_SOCKET_NAME).touch(), lock),
    "log.jsonl": (log, log),
    receipt_store.FILE_NAME: (lambda home: None, Receipts),
}


def truncated(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: max(1, path.stat().st_size * 2 // 3)])


def flipped(path: Path) -> None:
    raw = bytearray(path.read_bytes())
    for at in range(0, len(raw), max(1, len(raw) // 40)):
        raw[at] ^= 0xFF
    path.write_bytes(bytes(raw))


def empty(path: Path) -> None:
    path.write_bytes(b"")


def huge(path: Path) -> None:
    path.write_bytes(b"[" * 40_000_000)


def odd(path: Path) -> None:
    path.write_bytes(b'[{"run": 3, "samples": Infinity, "nbytes": 1e999, "day": 1e999, "until_unix_s": NaN}, 7]')


def deep(path: Path) -> None:
    path.write_bytes(b"[" * 3000 + b"]" * 3000)


def folder(path: Path) -> None:
    path.unlink()
    path.mkdir()
    (path / "inside").write_bytes(b"x")


def unreadable(path: Path) -> None:
    path.chmod(0)


def pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path, 0o600)


def loop(path: Path) -> None:
    path.unlink()
    path.symlink_to(path)


def nowhere(path: Path) -> None:
    path.unlink()
    path.symlink_to(path.parent / "away" / "file")


def device(path: Path) -> None:
    path.unlink()
    path.symlink_to("/dev/zero")


def extended(path: Path) -> None:
    """Fields, or bytes, that this version does not know."""
    raw = path.read_bytes()
    try:
        tree = json.loads(raw)
    except ValueError:
        path.write_bytes(raw + b"\xff" * 2000)
        return
    more = {"unknown": ["x" * 2000]}
    path.write_text(json.dumps(tree | more if isinstance(tree, dict) else [tree, more]))


DAMAGES = (truncated, flipped, empty, huge, odd, deep, folder, unreadable, pipe, loop, nowhere, device, extended)


CASES = [(name, damage) for name in FILES for damage in DAMAGES]


@pytest.mark.parametrize(("name", "damage"), CASES, ids=lambda one: one if isinstance(one, str) else one.__name__)
async def test_a_damaged_file_ends_no_start(
    name: str, damage: Callable[[Path], None], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make, start = FILES[name]
    make(tmp_path)
    if name == receipt_store.FILE_NAME:
        await receipts(tmp_path)
    damage(tmp_path / name)
    start(tmp_path)
    start(tmp_path)  # and the next start finds what this one left
    told = capsys.readouterr().err
    if any(".damaged" in path.name for path in tmp_path.iterdir()):
        assert f"{name} is damaged (" in told and "put aside as" in told
    if damage is folder and name != ready_file.FILE_NAME:
        assert (tmp_path / f"{name}.damaged" / "inside").exists(), "what lay there is kept"


async def test_receipts_that_verify_survive_the_damage(tmp_path: Path) -> None:
    await receipts(tmp_path)
    path = tmp_path / receipt_store.FILE_NAME
    path.write_bytes(path.read_bytes() + b"\0\0\0\x09torn")
    assert Receipts(tmp_path).total(RUN).samples == 24
    await receipts(tmp_path)
    raw = bytearray(path.read_bytes())
    raw[-3] ^= 1  # in the last signature
    path.write_bytes(bytes(raw))
    assert Receipts(tmp_path).total(RUN).samples == 16


async def test_the_store_of_receipts_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(receipt_store, "RECEIPTS_MAX", 4)
    kept = Receipts(tmp_path)
    for number in range(1, 9):
        done = WorkDone(1, 100 - number, 64 * 100, 32)
        await kept.keep(sign_receipt(identity(number), RUN, identity(9).peer_id, done, 10, 20))
    assert len(list(receipt_store.read(tmp_path))) == 4
    assert kept.total(RUN) == Receipts(tmp_path).total(RUN)
    assert kept.total(RUN).samples == 99 + 98 + 97 + 92, "those of the most work stay, and the newest"
    assert len(kept.after(RUN, 0, 32)[1]) == 4


def test_a_key_that_is_whole_is_never_put_aside(tmp_path: Path) -> None:
    path = tmp_path / "node.key"
    key_file.load_or_create(path)
    path.chmod(0o644)
    with pytest.raises(NotPermitted, match="chmod 600"):
        key_file.load_or_create(path)
    assert path.exists()


def test_files_put_aside_are_bounded(tmp_path: Path) -> None:
    for number in range(ASIDE_MAX + 3):
        (tmp_path / "x").write_text(json.dumps(number))
        put_aside(tmp_path / "x", "a test")
    assert len(list(tmp_path.iterdir())) == ASIDE_MAX
    assert not (tmp_path / "x").exists()
