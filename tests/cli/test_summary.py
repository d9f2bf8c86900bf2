"""The arithmetic of a summary, by literals."""

import io
import json

import pytest
from rich.console import Console

from swarmnode.app.local.session import Conditions, SessionView
from swarmnode.app.local.summary import NodeFacts, Summary, totals
from swarmnode.app.local.swarm_view import (
    LiveScreen,
    NodeWatch,
    PlainScreen,
    headline,
    picture,
    render,
    screen_for,
    thanks,
)
from swarmnode.base.ids import PeerId, short
from swarmnode.base.metrics import name
from swarmnode.base.wire.record_pb2 import NODE_STATE_JOINING, NODE_STATE_PAUSED, NODE_STATE_TRAINING
from swarmnode.base.wire.report_pb2 import PeerStatus, StatusReply

DONE = name.series(name.MICROBATCHES, outcome="done")
LOST = name.series(name.MICROBATCHES, outcome="lost")
SENT = name.series(name.LINK_BYTES, kind="gossip", direction="sent")
RECEIVED = name.series(name.LINK_BYTES, kind="gossip", direction="received")
LONE = name.series(name.EXCHANGES, outcome="lone")
COPIED = name.series(name.RECOVERIES, method="replica")
FRESH = name.series(name.RECOVERIES, method="fresh")

FEEDER = StatusReply(
    stage=0,
    state=NODE_STATE_TRAINING,
    samples_total=960,
    tokens_total=122_880,
    round=3,
    loss_train=2.0,
    loss_validation=2.5,
    loss_validation_first=5.5,
    loss_validation_samples=512,
    counters={DONE: 100, LOST: 1, SENT: 10, RECEIVED: 99, FRESH: 1},
    tokens_per_second=1000.0,
    resident_nbytes=400_000_000,
    peer_id="12D3KooWabcdefgh",
)
OTHER = StatusReply(
    stage=1,
    state=NODE_STATE_TRAINING,
    samples_total=1000,
    tokens_total=128_000,
    round=2,
    loss_train=3.0,
    loss_validation=2.25,
    loss_validation_first=5.4,
    loss_validation_samples=768,
    counters={SENT: 7, LONE: 2, COPIED: 1},
)
DEAD = StatusReply(stage=0, samples_total=500, loss_train=9.0, counters={DONE: 20, SENT: 3})

NODES = [
    NodeFacts("node-00", 0, FEEDER),
    NodeFacts("node-01", 1, OTHER),
    NodeFacts("node-02", 0, DEAD, "killed by --kill"),
    NodeFacts("node-03", None, None),
]


@pytest.mark.parametrize(
    ("conditions", "ready_s", "met"),
    [
        (Conditions(), 1e9, None),
        (Conditions(for_s=90), 89.9, None),
        (Conditions(for_s=90), 90.0, "90 s are over"),
        (Conditions(rounds=4), 0.0, None),
        (Conditions(rounds=3), 0.0, "round 3 is reached"),
        (Conditions(samples=1001), 0.0, None),
        (Conditions(samples=1000), 0.0, "1000 samples are trained"),
    ],
)
def test_when_to_stop(conditions: Conditions, ready_s: float, met: str | None) -> None:
    assert conditions.why_stop(ready_s, totals(NODES)) == met


def summary() -> Summary:
    ends = {"node-00": "left", "node-01": "left", "node-02": "killed by --kill"}
    return Summary("ab" * 32, 3, 100.4567, 1280.04, totals(NODES), 1, "100 s are over", "runs/x", ends, "runs/x/model")


def test_the_json_has_what_the_issue_asks_for() -> None:
    found = summary().to_json()
    assert found == json.loads(json.dumps(found, allow_nan=False))
    assert found == {
        "run": "ab" * 32,
        "nodes": 3,
        "wall_s": 100.457,
        "samples": 1000,
        "tokens": 128_000,
        "tokens_per_s": 1280.0,
        "loss_validation_first": 5.5,
        "loss_validation_last": 2.25,
        "loss_train_last": 2.5,
        "rounds": 3,
        "exchanges": {"paired": 0, "lone": 2},
        "microbatches": {"done": 120, "lost": 1, "retried": 0, "duplicate": 0},
        "staleness": {"0": 0, "1": 0, "2": 0, "3": 0, "4 or more": 0},
        "samples_duplicate": 0,
        "recoveries": 1,
        "bytes": {"pipeline": 0, "gossip": 20, "state": 0, "control": 0},
        "killed": 1,
        "stopped": "100 s are over",
        "exit_reasons": {"node-00": "left", "node-01": "left", "node-02": "killed by --kill"},
        "folder": "runs/x",
        "model": "runs/x/model",
        "checkpoint": None,
        "failure": None,
        "meets_every_steps": 0.0,
        "meets_every_steps_planned": 0.0,
    }


def test_a_terminal_gets_a_live_table_and_its_cursor_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    console = Console(file=io.StringIO(), force_terminal=True, width=140)
    screen = screen_for(console, io.StringIO())
    assert isinstance(screen, LiveScreen)
    screen.note("kill -9 node-02")
    screen.show(SessionView(60.0, 45.25, 1234.5, tuple(NODES), totals(NODES)))
    screen.close()
    assert isinstance(console.file, io.StringIO)
    shown = console.file.getvalue()
    assert "node-00" in shown and "kill -9 node-02" in shown
    assert shown.rindex("\x1b[?25h") > shown.rindex("\x1b[?25l")
    monkeypatch.setenv("TERM", "dumb")
    assert isinstance(screen_for(Console(file=io.StringIO(), force_terminal=True), io.StringIO()), PlainScreen)


def shown(status: StatusReply, width: int = 60) -> str:
    watch = NodeWatch()
    watch.add(0.0, status)
    console = Console(width=width, file=io.StringIO(), force_terminal=False)
    console.print(picture(watch))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_a_volunteer_sees_the_pipeline_who_is_missing_and_what_was_given() -> None:
    peers = [
        PeerStatus(peer_id="x" * 20, stage=0, state=NODE_STATE_TRAINING),
        PeerStatus(peer_id="y" * 20, stage=3, state=NODE_STATE_TRAINING, banned=True),
    ]
    status = StatusReply(
        stage=1,
        stages=5,
        state=NODE_STATE_TRAINING,
        peers=peers,
        uptime_s=3900,
        tokens_given=1_234_567,
        run_name="poem",
    )
    text = shown(status)
    assert " ■ [■] □  □  □ " in text and "banned" in text and max(map(len, text.splitlines())) <= 60
    assert headline(status) == "stage 2 of 5; waiting for three more machines"
    assert thanks(status) == "thank you: 1,234,567 tokens of poem trained here in 1 h 05 min"
    asleep = [
        PeerStatus(peer_id=one * 20, stage=2, state=NODE_STATE_PAUSED, resumes_s=s) for one, s in (("u", 0), ("z", 60))
    ]
    status.peers.extend(asleep)
    words = headline(status)
    assert words.startswith("stage 2 of 5; stage 3 sleeps until ") and words.endswith("; waiting for two more machines")
    assert f" with {short(PeerId('z' * 20))};" in words, "the first to wake"
    del status.peers[2:]
    status.tokens_given_before = 1_000_000
    assert thanks(status) == "thank you: 1,234,567 tokens of poem trained here, 234,567 of them in 1 h 05 min"
    status.state = NODE_STATE_JOINING
    assert headline(status).startswith("stage 2 of 5, fetching its weights; waiting for three")


@pytest.mark.parametrize("width", [60, 80, 120])
def test_the_table_of_a_swarm_is_whole_in_every_terminal(width: int) -> None:
    console = Console(width=width, file=io.StringIO())
    console.print(render(SessionView(60.0, 45.25, 1234.5, tuple(NODES), totals(NODES)), width))
    assert isinstance(console.file, io.StringIO)
    rows = [text.split() for text in console.file.getvalue().splitlines() if "node-" in text]
    assert len(rows) == len(NODES) and "…" not in console.file.getvalue()
    assert "2.000" in rows[0], "its loss is not cut off"


def test_a_bootstrap_shows_no_stage_that_it_does_not_serve() -> None:
    text = shown(StatusReply(stages=3, peer_id="x" * 20, trains_nothing=True))
    assert "trains nothing" in text and "stages" not in text
