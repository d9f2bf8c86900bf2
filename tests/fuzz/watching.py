"""What nodes tell a coordinator, as functions of bytes: whatever comes, the page's JSON can be made and stays small."""

import functools
import json

from google.protobuf.message import DecodeError

from swarmnode.dashboard import view
from swarmnode.dashboard.board import Board
from swarmnode.dashboard.totals import Ledger
from swarmnode.errors import RemoteFault
from swarmnode.identity import Identity
from swarmnode.ids import RunId
from swarmnode.manifest import PRESETS
from swarmnode.membership.receipt import WorkDone, sign_receipt
from swarmnode.metrics import name
from swarmnode.metrics.name import series
from swarmnode.wire import record_pb2, report_pb2

RUN = RunId("ab" * 32)
NOW = 1.75e9
SERVER, CLIENT, OTHER = (Identity.of_seed(bytes([n]) * 32) for n in (7, 8, 9))
JSON_BYTES_MAX = 4 << 20


def receipts() -> tuple[bytes, ...]:
    return tuple(
        sign_receipt(client, RUN, SERVER.peer_id, WorkDone(n, 4 * n), 10, 20 + n).SerializeToString()
        for client in (CLIENT, OTHER)
        for n in (1, 300)
    )


def reports() -> tuple[bytes, ...]:
    status = report_pb2.StatusReply(
        stage=0, loss_train=2.5, samples_total=4096, inner_steps=12, resident_nbytes=1 << 28, uptime_s=3.5
    )
    status.counters[name.SAMPLES] = 77.0
    status.counters[series(name.MICROBATCHES, outcome="done")] = 12.0
    told = {
        "exchange.paired": {"round": "4", "seconds": "0.5"},
        "validation.done": {"loss": "3.5", "samples_total": "512"},
        "stage.chosen": {"serves": "1", "reason": "slow"},
    }
    events = [
        report_pb2.EventReport(serial=at, unix_ms=int(NOW * 1000), event=event, level="info", fields=fields)
        for at, (event, fields) in enumerate(told.items(), start=1)
    ]
    links = [
        report_pb2.LinkReport(peer_id=CLIENT.peer_id, sent_nbytes=5, received_nbytes=7, latency_s=0.02),
        report_pb2.LinkReport(peer_id=OTHER.peer_id, sent_nbytes=1 << 40, kind=report_pb2.LINK_KIND_RELAYED),
    ]
    whole = report_pb2.Report(
        incarnation=1,
        unix_ms=int(NOW * 1000),
        name="ada",
        status=status,
        links=links,
        events=events,
        receipts=receipts(),
        receipts_serial=4,
    )
    bare = report_pb2.Report(incarnation=2, name="bo")
    return whole.SerializeToString(), bare.SerializeToString()


@functools.cache
def _board() -> Board:
    board = Board(PRESETS["tiny"], RUN)
    for stage, who in enumerate((SERVER, CLIENT)):
        record = record_pb2.Record(peer_id=who.peer_id, sequence=1, stage=stage, state=record_pb2.NODE_STATE_TRAINING)
        record.expires_unix_ms = int(NOW + 60) * 1000
        board.observe_record(record, NOW)
    return board


def take_report(raw: bytes) -> bool:
    try:
        report = report_pb2.Report.FromString(raw)
    except DecodeError:
        return False
    board = _board()
    board.reported(SERVER.peer_id, report, NOW, 0.01)
    board.settle(NOW)
    board.take_changes()
    node = board.nodes[SERVER.peer_id]
    shown = [
        view.summary(board, NOW),
        view.node_detail(board, node, NOW, private=True),
        view.contributors(board),
        view.links(board),
        view.recent_rounds(board)[-5:],
        view.timeline(board),
        view.validation_series(board)[-5:],
    ]
    assert len(json.dumps(shown, allow_nan=False)) < JSON_BYTES_MAX
    return True


@functools.cache
def _ledger() -> Ledger:
    return Ledger(RUN)


def take_receipt(raw: bytes) -> bool:
    members, accepted = {CLIENT.peer_id, OTHER.peer_id}, True
    try:
        _ledger().take(SERVER.peer_id, raw, members, NOW)
    except RemoteFault as refusal:
        assert str(refusal)
        accepted = False
    total = _ledger().total(SERVER.peer_id, members)
    assert total is None or (total.samples <= 2400 and total.peers <= 2), "somebody forged a receipt"
    return accepted
