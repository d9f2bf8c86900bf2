"""The event log: one JSON object a line, bounded, and never a reason to fail."""

import json
import math
import os
import pathlib
import resource
import signal
import subprocess
import sys

import pytest

from swarmnode.base.metrics.events import EventLog, plain, timestamp
from tests.support.clock import ManualClock

DAY_S = 1_767_323_045.678


def make(path: pathlib.Path | None, nbytes_max: int = 1 << 20) -> EventLog:
    return EventLog(path, clock=ManualClock(DAY_S), run="run0", node="peer0", nbytes_max=nbytes_max)


def lines(path: pathlib.Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_line_says_when_what_and_who(tmp_path: pathlib.Path) -> None:
    log = make(tmp_path / "events.jsonl")
    log.stage = 2
    log.write("exchange.lone", level="warning", fields={"round": 7, "reason": "partner gone"})
    assert lines(tmp_path / "events.jsonl") == [
        {
            "ts": "2026-01-02T03:04:05.678Z",
            "level": "warning",
            "event": "exchange.lone",
            "run": "run0",
            "node": "peer0",
            "stage": 2,
            "fields": {"round": 7, "reason": "partner gone"},
        }
    ]
    assert timestamp(DAY_S) == "2026-01-02T03:04:05.678Z"


@pytest.mark.parametrize(
    ("value", "held"),
    [
        (math.nan, "nan"),
        (-math.inf, "-inf"),
        (b"\x00\xff", "00ff"),
        (pathlib.PurePosixPath("/a"), "/a"),
        ((1, {2: b"\x03"}), [1, {"2": "03"}]),
        ({"b", "a"}, ["a", "b"]),
        ("line\nbreak", "line break"),
        ("\x1b]0;owned\x07", " ]0;owned "),
    ],
)
def test_any_value_becomes_json(value: object, held: object) -> None:
    assert plain(value) == held
    assert json.loads(json.dumps(plain(value), allow_nan=False)) == held


def test_long_text_from_a_peer_is_cut(tmp_path: pathlib.Path) -> None:
    log = make(tmp_path / "events.jsonl")
    log.write("call.failed", fields={"reason": "x" * 100_000})
    assert (tmp_path / "events.jsonl").stat().st_size < 1000


def test_a_log_rotates_once_and_stays_within_twice_its_bound(tmp_path: pathlib.Path) -> None:
    log = make(tmp_path / "events.jsonl", nbytes_max=2000)
    for serial in range(100):
        log.write("data.block", fields={"serial": serial})
    current = lines(tmp_path / "events.jsonl")
    old = lines(tmp_path / "events.jsonl.1")
    serials = [line["fields"]["serial"] for line in old + current]  # type: ignore[index]
    assert serials == list(range(100 - len(serials), 100))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["events.jsonl", "events.jsonl.1"]
    assert all(path.stat().st_size <= 2000 for path in tmp_path.iterdir())
    assert log.dropped == 0


def test_a_log_goes_on_after_a_restart(tmp_path: pathlib.Path) -> None:
    for serial in range(2):
        log = make(tmp_path / "events.jsonl")
        log.write("node.started", fields={"serial": serial})
        log.close()
    assert [line["fields"] for line in lines(tmp_path / "events.jsonl")] == [{"serial": 0}, {"serial": 1}]


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_full_disk_costs_lines_and_one_complaint(capsys: pytest.CaptureFixture[str]) -> None:
    log = make(pathlib.Path("/dev/full"))
    for _ in range(5):
        log.write("node.ready")
    assert log.dropped == 5
    error = capsys.readouterr().err
    assert error.startswith("swarmnode: cannot write the log /dev/full: the disk is full: /dev/full finds ")
    assert error.endswith("; lines are dropped\n") and error.count("\n") == 1


TORN = """
import pathlib, sys
sys.path[:0] = sys.argv[2:]
from swarmnode.base.metrics.events import EventLog
class Fixed:
    def unix_s(self): return 0.0
log = EventLog(pathlib.Path(sys.argv[1]), clock=Fixed(), run="r", node="n")
for serial in range(100):
    log.write("data.block", fields={"serial": serial})
print(log.dropped)
"""


def test_a_disk_that_takes_half_a_line_leaves_whole_lines(tmp_path: pathlib.Path) -> None:
    """A file size limit makes the kernel write part of a line, as a disk that fills up does."""

    def limit() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))

    path = tmp_path / "events.jsonl"
    root = str(pathlib.Path(__file__).parents[2])
    command = [sys.executable, "-B", "-c", TORN, str(path), root]
    done = subprocess.run(command, capture_output=True, text=True, preexec_fn=limit, timeout=150, check=True)
    whole = lines(path)
    assert 0 < len(whole) < 100
    assert int(done.stdout) == 100 - len(whole)
    assert done.stderr.count("\n") == 1
