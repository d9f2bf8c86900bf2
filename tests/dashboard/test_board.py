"""The board's bookkeeping, and the history that brings it back: nothing lost, nothing counted twice."""

import contextlib
import json
import math
import sqlite3
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from benchmarks.swarm.fake_fleet import FakeFleet
from swarmnode.app.dashboard import view
from swarmnode.app.dashboard.alarm import alarms
from swarmnode.app.dashboard.board import CURVE_POINTS, NAME_CHARS_MAX, NEWS_S, Board, Changes, brief, named
from swarmnode.app.dashboard.heartbeat import Heartbeat
from swarmnode.app.dashboard.history import POINTS_MAX, History, HistoryPoint, read_members
from swarmnode.app.dashboard.timeline import KINDS, sentence
from swarmnode.app.dashboard.totals import LIVES_MAX, Contribution, counts_of
from swarmnode.base import bounds
from swarmnode.base.errors import LocalFault, RemoteFault
from swarmnode.base.identity import friendly_name
from swarmnode.base.ids import PeerId
from swarmnode.base.metrics import name
from swarmnode.base.metrics.event import EVENTS
from swarmnode.base.metrics.name import series
from swarmnode.base.wire import record_pb2, report_pb2
from swarmnode.net.membership.receipt import WorkDone, sign_receipt
from tests.support.messages import messages
from tests.support.watched import NOW, RUN, TINY, Fixture, fits, record, report


@pytest.fixture
def one() -> Fixture:
    return Fixture()


def test_a_node_comes_is_silent_and_goes(one: Fixture) -> None:
    board = one.board
    peer = one.peer
    assert view.state_of(board.nodes[peer]) == "training" and view.replicas(board) == [1, 0]
    for at in (1, 2, 3):
        assert view.state_of(board.nodes[peer]) == "training", "two unanswered questions are no silence"
        board.silent(peer, "x cannot be reached at /ip4/1.2.3.4/tcp/1: failed to dial: failed to dial p", NOW + at)
    assert view.state_of(board.nodes[peer]) == "silent" and view.replicas(board) == [0, 0]
    assert one.texts() == ["does not answer: x cannot be reached at its address"]
    board.reported(peer, report(), NOW + 3, 0.01)
    assert view.state_of(board.nodes[peer]) == "training" and board.nodes[peer].label == "ada"
    board.expire(NOW + 16)
    assert view.state_of(board.nodes[peer]) == "gone" and not board.living()
    assert "without a word" in one.texts()[-1]
    board.expire(NOW + 17 + NEWS_S)
    assert peer not in board.nodes and board.take_changes().forgotten == [peer]


def test_a_node_that_said_goodbye_is_not_missing(one: Fixture) -> None:
    said = record_pb2.Record(peer_id=one.peer, sequence=10**9, state=record_pb2.NODE_STATE_LEFT, stage=0)
    one.board.observe_record(said, NOW + 1)
    one.board.expire(NOW + 60)
    assert view.state_of(one.board.nodes[one.peer]) == "left" and one.texts() == []


def test_an_older_record_changes_nothing(one: Fixture) -> None:
    board = one.board
    board.take_changes()
    stale = record_pb2.Record(peer_id=one.peer, sequence=0, state=record_pb2.NODE_STATE_LEFT)
    board.observe_record(stale, NOW + 1)
    assert board.nodes[one.peer].living and not board.take_changes().nodes


def test_each_event_is_read_once(one: Fixture) -> None:
    board = one.board
    peer = one.peer
    for _ in range(3):
        board.reported(peer, report(7, "exchange.paired", round="4", seconds="0.5"), NOW, 0.0)
    board.reported(peer, report(8, "exchange.lone", round="4", seconds="0.1"), NOW, 0.0)
    board.reported(peer, report(9, "validation.done", loss="3.5", samples_total="512"), NOW, 0.0)
    assert board.rounds[4].to_json() == {
        "round": 4, "t": NOW, "paired": 1, "lone": 0, "refused": 0, "single": 1, "mean_s": 0.3,
    }  # fmt: skip
    assert board.validations.last() == (512, 3.5)
    again = report(1, "exchange.paired", round="5", seconds="0.5")
    again.incarnation = 2
    board.reported(peer, again, NOW, 0.0)
    assert board.rounds[5].paired == 1, "a new life counts its events from one again"


def test_claims_that_cannot_be_are_not_believed(one: Fixture) -> None:
    board = one.board
    peer = one.peer
    told = report()
    told.name = "e\u202evil\n<script>" * 20
    told.status.loss_train = math.nan
    told.status.samples_total = 2**63
    told.status.counters.update({name.INNER_STEPS: math.inf, name.SAMPLES: -5.0, "made up": 1.0})
    for serial, (event, fields) in enumerate(
        [
            ("exchange.paired", {"round": "nan"}),
            ("exchange.paired", {"round": "1e300"}),
            ("exchange.paired", {"round": "-3"}),
            ("validation.done", {"loss": "-1", "samples_total": "5"}),
            ("validation.done", {"loss": "inf", "samples_total": "5"}),
            ("no.such.event", {"reason": "x" * 9999}),
        ],
        1,
    ):
        told.events.append(report_pb2.EventReport(serial=serial, event=event, level="error", fields=fields))
    bounds.check(told)  # as the transport does
    board.reported(peer, told, NOW, 0.0)
    board.settle(NOW)
    node = board.nodes[peer]
    assert (len(node.name) <= NAME_CHARS_MAX and node.name.isprintable()) or "\u202e" not in node.name
    assert board.loss_train(NOW) is None and board.samples == 0
    assert not board.rounds and not board.validations
    assert board.totals["steps"] == 0 and board.totals["fed"] == 0
    assert all(len(text) <= 240 for text in one.texts())


def test_one_node_decides_neither_the_curve_nor_the_rounds(one: Fixture) -> None:
    """A node that reports a validation and rounds of the far future, and a loss that is too good to be true."""
    board = one.board
    everybody = [PeerId(f"node{number}") for number in range(5)]
    for peer in everybody:
        board.observe_record(record_pb2.Record(
            peer_id=peer, sequence=1, state=record_pb2.NODE_STATE_TRAINING, round=9, expires_unix_ms=10**15,
            progress=record_pb2.Progress(total=10_000),
        ), NOW)  # fmt: skip
    liar, *honest = everybody
    future = report(1, "validation.done", loss="0.0001", samples_total=str(2**53))
    for serial, index in enumerate(range(2**53 - 400, 2**53), 2):
        fields = {"round": str(index), "seconds": "1"}
        event = report_pb2.EventReport(serial=serial, event="exchange.lone", fields=fields)
        future.events.append(event)
    board.reported(liar, future, NOW, 0.0)
    assert not board.validations and not board.rounds
    for number, peer in enumerate(honest):
        board.reported(peer, report(1, "exchange.paired", round=str(9 + number % 2), seconds="0.5"), NOW, 0.0)
        told = report(2, "validation.done", loss=f"{3.1 - 0.01 * number}", samples_total=str(9900 + number))
        board.reported(peer, told, NOW, 0.0)
    board.reported(liar, report(500, "validation.done", loss="0.0001", samples_total="10001"), NOW, 0.0)
    assert {*board.rounds} == {9, 10}
    assert board.validations.last() == (10_001, 3.08) and board.validations.near(10_001) == 3.08


async def test_a_boast_moves_the_count_of_samples_nowhere() -> None:
    fleet = FakeFleet(TINY, RUN, 4)
    board = Board(TINY, RUN)
    for fake_node, total in zip(fleet.nodes, (0, 512, 10**12, 500), strict=True):
        told = record(fleet, fake_node, expires_unix_ms=int((NOW + 15) * 1000))
        told.progress.total = total
        told.progress.samples[:] = [total]
        board.observe_record(told, NOW)
    board.settle(NOW)
    assert board.samples == 512, "of the three that know a count"


async def test_a_run_whose_nodes_come_back_does_not_stand_still_at_once() -> None:
    fleet = FakeFleet(TINY, RUN, 4)
    board = Board(TINY, RUN)

    def heard(state: record_pb2.NodeState, at_s: float) -> list[str]:
        for node in fleet.nodes:
            told = record(fleet, node, expires_unix_ms=int((at_s + 15) * 1000), state=state)
            told.sequence += int(at_s - NOW) + 300
            board.observe_record(told, at_s)
        board.settle(at_s)
        return [alarm.kind for alarm in alarms(view.health(board, [], at_s))]

    assert heard(record_pb2.NODE_STATE_JOINING, NOW - 200) == [] and view.phase(board, NOW - 200) == "waiting"
    assert heard(record_pb2.NODE_STATE_JOINING, NOW - 1) == []
    assert heard(record_pb2.NODE_STATE_TRAINING, NOW) == [], "it was never whole before"
    board.resume(512, NOW - 9)
    assert view.phase(board, NOW) == "training"
    assert heard(record_pb2.NODE_STATE_LEFT, NOW + 5) == ["stopped"] and view.phase(board, NOW + 5) == "stopped"
    assert heard(record_pb2.NODE_STATE_JOINING, NOW + 100) == ["stage_empty"]
    assert view.phase(board, NOW + 100) == "broken"
    assert heard(record_pb2.NODE_STATE_TRAINING, NOW + 102) == [], "they have served for two seconds"
    assert heard(record_pb2.NODE_STATE_TRAINING, NOW + 230) == ["stalled"]


async def test_a_stage_whose_machines_are_paused_sleeps_and_says_until_when() -> None:
    fleet = FakeFleet(TINY, RUN, 4)
    board = Board(TINY, RUN)
    first = fleet.nodes[0]
    for node in fleet.nodes:
        asleep = node.stage == first.stage
        state = record_pb2.NODE_STATE_PAUSED if asleep else record_pb2.NODE_STATE_TRAINING
        told = record(fleet, node, expires_unix_ms=int((NOW + 15) * 1000), state=state)
        told.allowance.resumes_unix_s = int(NOW) + (3600 if node is first else 7200) if asleep else 0
        board.observe_record(told, NOW)
    board.resume(512, NOW - 9)
    board.settle(NOW)
    assert view.phase(board, NOW) == "asleep"
    summary = view.summary(board, NOW)
    name = board.nodes[first.identity.peer_id].label
    assert summary["asleep"] == [{"stage": first.stage, "name": name, "until": int(NOW) + 3600}]
    assert summary["nodes"] == 4, "who sleeps is here"
    told_of = {alarm.kind: alarm for alarm in alarms(view.health(board, [], NOW))}
    assert "stage_empty" not in told_of and told_of["stage_asleep"].level == "warning"
    assert told_of["stage_asleep"].title.startswith(f"Stage {first.stage + 1} sleeps until ")
    assert told_of["stage_asleep"].title.endswith(f"with {name}")


def test_only_a_target_that_somebody_chose_is_shown() -> None:
    assert view.target_of(TINY) is None, "the preset's"
    chosen = replace(TINY, inner=replace(TINY.inner, decay_samples=7000))
    board = Board(chosen, RUN)
    assert view.summary(board, NOW)["samples_target"] == 7000 and view.phase(board, NOW) == "looking"
    board.resume(7000, NOW - 99)
    board.settle(NOW)
    assert view.phase(board, NOW + 60) == "ended"
    assert view.target_of(replace(TINY, inner=replace(chosen.inner, decay="constant"))) is None


def test_the_same_complaint_is_shown_once_a_minute(one: Fixture) -> None:
    for serial in range(1, 50):
        one.board.reported(one.peer, report(serial, "peer.banned", "warning", peer=one.peer, reason="slow"), NOW, 0.0)
    assert one.texts() == ["sends ada no work for now: slow"]


@pytest.mark.parametrize("event", sorted(EVENTS))
def test_every_event_has_a_sentence_or_is_meant_to_have_none(event: str) -> None:
    for level in ("info", "warning", "error"):
        found = sentence(event, level, {})
        assert found is None or (found[0] in KINDS and found[1])


def test_a_flood_is_told_only_where_there_is_one() -> None:
    reasons = ("many connections: looking", "no flood of strangers", "a flood of 900 connections a second")
    told = [sentence("gate.changed", "warning", {"reason": reason}) for reason in reasons]
    assert told == [None, None, ("fault", "keeps strangers away: a flood of 900 connections a second")]


def test_texts_name_nodes_and_hide_addresses() -> None:
    peer = "12D3KooWDpJ7As7BWAwRMfu1VU2WCqNjvq387JEYKDBj4kx6nXTN"
    names = {peer[-8:]: "ada"}
    assert named(f"a call of {peer} and kx6nXTNN", lambda end: names.get(end[-8:])) == "a call of ada and kx6nXTNN"
    assert named(f"from {peer[-8:]}", lambda end: names.get(end[-8:])) == "from ada"
    assert brief("no /ip4/1.2.3.4/tcp/9/p2p/x, or /dns4/a.b/tcp/1") == "no its address or its address"


def test_contributions_add_up_over_lives() -> None:
    told = Contribution()
    counters = {name.INNER_STEPS: 5.0, series(name.EXCHANGES, outcome="paired"): 2.0}
    assert told.tell(1, counts_of(counters), 100)["dense"] == 1600.0
    assert told.tell(1, counts_of(counters), 100)["steps"] == 0.0
    told.tell(2, counts_of({name.INNER_STEPS: 3.0}), 100)
    told.tell(1, counts_of({name.INNER_STEPS: 1.0}), 100)
    assert told.total("steps") == 8.0 and told.to_json("p", None)["lives"] == 2


def test_a_restart_brings_everything_back(one: Fixture, tmp_path: Path) -> None:
    board = one.board
    peer = one.peer
    told = report(7, "exchange.paired", round="4", seconds="0.5")
    told.status.counters[name.INNER_STEPS] = 40.0
    board.reported(peer, told, NOW, 0.0)
    board.reported(peer, report(9, "validation.done", loss="3.5", samples_total="512"), NOW, 0.0)
    board.samples = 512
    board.tell(NOW, None, "alarm", "warning", "something")
    receipt = sign_receipt(one.fake_fleet.nodes[1].identity, RUN, peer, WorkDone(2, 8), int(NOW) - 9, int(NOW))
    board.contributions[PeerId(receipt.client)] = Contribution()
    board.ledger.take(peer, receipt.SerializeToString(), board.contributions, NOW)
    model = {"label": "round-1", "samples": 512, "scores": [], "continuations": [{"prompt": "a", "text": "b"}]}
    history = History.open(tmp_path / "h", RUN, print)
    history.keep_models([model])
    history.write(board.take_changes(), HistoryPoint(NOW, 512, 9.0, 4.0, 1, 1, 4, 10.0, 1.0))
    history.close()
    with sqlite3.connect(tmp_path / "h") as database:
        database.execute("ALTER TABLE round DROP COLUMN single")  # as an older coordinator left it

    again = Board(TINY, RUN)
    board = one.board
    history = History.open(tmp_path / "h", RUN, print)
    history.restore(again)
    assert again.samples == 512 and again.validations == board.validations and again.rounds == board.rounds
    assert list(again.timeline) == list(board.timeline) and again.entry_serial == board.entry_serial
    assert again.totals == board.totals and again.totals["steps"] == 40
    assert again.trained_s == NOW and history.models == {"round-1": model}
    assert view.standing(again, peer) == {"rank": None, "of": 0, "share": 0.0, "days": [[int(NOW // 86_400), 8]]}
    assert [point.samples for point in history.points] == [512]
    again.observe_record(_record(one), NOW + 1)
    again.reported(peer, told, NOW + 1, 0.0)
    assert again.rounds[4].paired == 1 and again.totals["steps"] == 40, "what was read before is not counted again"
    history.close()


def test_a_published_model_names_those_who_agreed(one: Fixture, tmp_path: Path) -> None:
    history = History.open(tmp_path / "h", RUN, print)
    for credited, expected in ((False, friendly_name(one.peer)), (True, "ada"), (False, friendly_name(one.peer))):
        told = report(7 + credited)
        told.name = "ada"
        told.credited = credited
        one.board.reported(one.peer, told, NOW, 0.0)
        history.write(one.board.take_changes(), None)
        assert [member["name"] for member in read_members(tmp_path / "h")] == [expected], (
            "who joins again may change it"
        )
    history.close()


def _record(one: Fixture) -> record_pb2.Record:
    return record_pb2.Record(
        peer_id=one.peer, sequence=10**9, state=record_pb2.NODE_STATE_TRAINING, expires_unix_ms=int((NOW + 30) * 1000)
    )


def test_another_run_and_a_damaged_file_are_told(tmp_path: Path) -> None:
    History.open(tmp_path / "h", RUN, print).close()
    with pytest.raises(LocalFault, match="is of run abab"):
        History.open(tmp_path / "h", "cd" * 32, print)
    (tmp_path / "bad").write_bytes(b"not a database" * 999)
    History.open(tmp_path / "bad", RUN, print).close()
    assert (tmp_path / "bad.damaged").read_bytes().startswith(b"not a database")
    history = History.open(tmp_path / "torn", RUN, print)
    history.close()
    with sqlite3.connect(tmp_path / "torn") as database:
        database.execute("INSERT INTO contribution VALUES ('p', 'n', 1, 2, 'no json')")
    history = History.open(tmp_path / "torn", RUN, print)
    history.restore(Board(TINY, RUN))
    history.close()
    assert (tmp_path / "torn.damaged").exists()
    History.open(tmp_path / "torn", RUN, print).restore(Board(TINY, RUN))


def test_a_disk_that_refuses_is_told_once_and_survived(tmp_path: Path) -> None:
    told: list[str] = []
    history = History.open(tmp_path / "h", RUN, told.append)
    history.close()  # every write from now on fails
    nothing = Changes([], [], [], [], [], [], [])
    for index in range(3):
        history.write(nothing, HistoryPoint(NOW + index, index, 0.0, None, 0, 0, 0, 0.0, 0.0))
    assert len(told) == 1 and len(history.points) == 3


def test_curves_are_thinned_as_they_age(tmp_path: Path) -> None:
    history = History.open(tmp_path / "h", RUN, print)
    nothing = Changes([], [], [], [], [], [], [])
    for index in range(POINTS_MAX + 5):
        history.write(nothing, HistoryPoint(NOW + index, index, 0.0, None, 0, 0, 0, 0.0, 0.0))
    assert len(history.points) <= POINTS_MAX
    kept = [point.samples for point in history.points]
    assert kept == sorted(kept) and kept[0] == 0 and kept[-1] == POINTS_MAX + 4
    history.close()
    again = History.open(tmp_path / "h", RUN, print)
    again.restore(Board(TINY))
    assert again.points == history.points
    assert len(view.series(again.points, 100)) <= 102
    again.close()


FIELDS = ["round", "reason", "peer", "nbytes", "seconds", "loss", "samples_total", "serves"]
HAPPENINGS = st.builds(
    report_pb2.EventReport,
    serial=st.integers(0, 2**53),
    event=st.sampled_from(sorted(EVENTS)),
    level=st.sampled_from(["info", "warning", "error", "made up"]),
    fields=st.dictionaries(
        st.text(max_size=20) | st.sampled_from(FIELDS), st.text(max_size=20) | st.floats().map(str), max_size=6
    ),
)


@settings(max_examples=60, phases=[Phase.explicit, Phase.reuse, Phase.generate])  # shrinking would outlast the test
@given(st.lists(st.tuples(messages(report_pb2.Report), st.lists(HAPPENINGS, max_size=4)), min_size=1, max_size=4))
def test_no_report_breaks_the_picture(
    reports: list[tuple[report_pb2.Report, list[report_pb2.EventReport]]],
) -> None:
    """Whatever nodes say: the board takes it, the page gets JSON that fits its document, the history stores it."""
    one = Fixture()
    refused = []
    history = History.open(Path(":memory:"), RUN, refused.append)
    live = Heartbeat(one.board, history, one.fake_fleet.clock)
    live.now_s = lambda: NOW + 1  # type: ignore[method-assign]
    for said, events in reports:
        said.events.extend(events)
        with contextlib.suppress(RemoteFault):  # a key of fields that is not printable
            bounds.check(said)  # as the transport does
            one.board.reported(one.peer, said, NOW, 0.01)
        live.tick()
    fits(json.loads(json.dumps(live.picture(), allow_nan=False)), {"$ref": "#/components/schemas/Picture"})
    detail = view.node_detail(one.board, one.board.nodes[one.peer], NOW, private=True)
    fits(json.loads(json.dumps(detail, allow_nan=False)), {"$ref": "#/components/schemas/NodeDetail"})
    assert refused == []
    history.close()


def test_a_node_that_invents_lives_and_measurements_costs_a_bounded_amount(one: Fixture) -> None:
    one.board.samples = 20 * 200
    for life in range(1, 200):
        told = report(1000, "stage.chosen", reason="x" * 100_000)
        told.links.append(report_pb2.LinkReport(peer_id="y" * 64))
        told.incarnation = life
        told.status.counters[name.INNER_STEPS] = 1.0
        for serial in range(1, 21):
            fields = {"loss": "3.5", "samples_total": str(20 * life + serial)}
            told.events.append(
                report_pb2.EventReport(serial=1000 + serial, event="validation.done", level="info", fields=fields)
            )
        bounds.check(told)
        one.board.reported(one.peer, told, NOW, 0.0)
    row = view.node_detail(one.board, one.board.nodes[one.peer], NOW, private=True)
    assert len(json.dumps(row)) < 100_000, "a hundred short entries of its timeline"
    (contribution,) = one.board.contributions.values()
    assert len(contribution.lives) == LIVES_MAX and contribution.total("steps") == 199.0, "nothing is lost by it"
    assert len(one.board.validations) <= CURVE_POINTS
    assert max(one.board.validations) == 20 * 199 + 20, "the newest is kept"
