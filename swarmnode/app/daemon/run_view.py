"""The whole run as a coordinator's daemon tells it: its page's numbers as messages of the control API."""

from __future__ import annotations

from typing import TypeVar

from google.protobuf import json_format
from google.protobuf.message import Message

from swarmnode import __version__
from swarmnode.app.dashboard import view
from swarmnode.app.dashboard.heartbeat import Heartbeat
from swarmnode.base.wire import control_pb2

POINTS = 600
POINTS_MAX = 4000
COLUMNS = tuple(field.name for field in control_pb2.CurvePoint.DESCRIPTOR.fields)
"""In the order of HistoryPoint.to_json."""

M = TypeVar("M", bound=Message)


def run_reply(live: Heartbeat) -> control_pb2.RunReply:
    """The run now."""
    board = live.board
    now_s = live.now_s()
    return _taken(control_pb2.RunReply(), view.run(board, board.run_id, (), __version__) | view.summary(board, now_s))


def members_reply(live: Heartbeat) -> control_pb2.MembersReply:
    """The machines of the run, also those that left lately."""
    rows = (view.node_row(node) for node in live.board.nodes.values())
    return control_pb2.MembersReply(members=[_taken(control_pb2.Member(), row) for row in rows])


def curves_reply(live: Heartbeat, points: int) -> control_pb2.CurvesReply:
    """About `points` points of its curves (0: POINTS), at most POINTS_MAX."""
    board = live.board
    rows = view.series(live.history.points, min(points or POINTS, POINTS_MAX))
    told = view.validation_series(board)
    return control_pb2.CurvesReply(
        run_id=board.run_id,
        name=board.manifest.name,
        context=board.manifest.model.context,
        points=[_taken(control_pb2.CurvePoint(), dict(zip(COLUMNS, row, strict=True))) for row in rows],
        validations=[
            _taken(control_pb2.Validation(), {"samples": samples, "time_s": time_s, "loss": loss})
            for samples, time_s, loss in told
        ],
    )


def _taken(message: M, shown: view.Json) -> M:
    """`message` with the values of the page that it has fields for; None is left out."""
    return json_format.ParseDict(shown, message, ignore_unknown_fields=True)
