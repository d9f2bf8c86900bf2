"""The Coordinator service of the control API: the page's numbers, over a real socket."""

import asyncio
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from benchmarks.swarm.fake_fleet import FakeFleet
from swarmnode.app.control import client, socket_path
from swarmnode.app.control.service import ControlServer
from swarmnode.app.daemon.run_view import curves_reply, members_reply, run_reply
from swarmnode.app.dashboard import view
from swarmnode.app.dashboard.heartbeat import Heartbeat
from swarmnode.base.errors import UsageError
from swarmnode.base.wire import control_pb2, control_pb2_grpc
from swarmnode.base.wire.report_pb2 import StatusReply
from tests.support.watched import RUN, TINY, watched


class Coordinator:
    def __init__(self, live: Heartbeat) -> None:
        self._live = live

    def status(self) -> StatusReply:
        return StatusReply(run_id=RUN)

    def run(self) -> control_pb2.RunReply:
        return run_reply(self._live)

    def members(self) -> control_pb2.MembersReply:
        return members_reply(self._live)

    def curves(self, points: int) -> control_pb2.CurvesReply:
        return curves_reply(self._live, points)


async def test_it_tells_what_the_page_shows(tmp_path: Path) -> None:
    fleet = FakeFleet(TINY, RUN, 6)
    for _ in range(40):
        fleet.train(1.0)
    await fleet.announce()
    async with watched(fleet, tmp_path) as w:
        await w.everybody_answered()
        for _ in range(4):
            w.board.live.tick()
        live = w.board.live
        server = ControlServer(tmp_path / "home", Coordinator(live))
        await server.start()
        try:
            address = f"unix:{tmp_path / 'home' / socket_path.GRPC_SOCKET_NAME}"
            async with grpc.aio.insecure_channel(address) as channel:
                stub: Any = control_pb2_grpc.CoordinatorStub(channel)
                run = await stub.Run(control_pb2.RunRequest())
                members = (await stub.Members(control_pb2.MembersRequest())).members
                curves = await stub.Curves(control_pb2.CurvesRequest(points=2))
            summary = view.summary(live.board, live.now_s())
            assert (run.run_id, run.name, run.stages) == (RUN, TINY.name, TINY.pipeline.stages)
            assert run.nodes == summary["nodes"] == len(members) == 6
            assert list(run.replicas) == summary["replicas"] and run.samples > 0
            assert {member.peer for member in members} == set(live.board.nodes)
            assert {member.state for member in members} == {"training"} and all(member.steps for member in members)
            assert 1 <= len(curves.points) <= 3 and curves.points[-1].samples == live.history.points[-1].samples
            assert curves.points[-1].gossip_nbytes == live.history.points[-1].gossip
            assert [one.samples for one in curves.validations] == sorted(live.board.validations)
        finally:
            await server.stop()


async def test_json_has_the_same_and_refuses_what_is_no_number(tmp_path: Path) -> None:
    fleet = FakeFleet(TINY, RUN, 2)
    await fleet.announce()
    async with watched(fleet, tmp_path) as w:
        await w.everybody_answered()
        home = tmp_path / "home"
        server = ControlServer(home, Coordinator(w.board.live))
        await server.start()
        try:
            assert (await asyncio.to_thread(client.ask, home, "run"))["run_id"] == RUN
            assert len((await asyncio.to_thread(client.ask, home, "members"))["members"]) == 2
            for points in (-1, 2**32, 1.5, "2", True, None):
                with pytest.raises(UsageError, match="points: not a whole number from 0 on"):
                    await asyncio.to_thread(client.ask, home, "curves", points=points)
        finally:
            await server.stop()
