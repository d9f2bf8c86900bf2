"""The control API of a real process by gRPC: at work, killed, started again, and told to leave."""

import asyncio
from pathlib import Path
from typing import Any, cast

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from swarmnode.app.api import connect
from swarmnode.app.control import socket_path
from swarmnode.app.control.watch import watch
from swarmnode.app.local.child import Child, NodePlan, node_command
from swarmnode.base.errors import NoDaemon
from swarmnode.base.wire import control_pb2, control_pb2_grpc
from tests.support.processes import BOUND_S, end, signed_run, until


async def test_a_real_daemon_speaks_grpc_on_its_socket_and_on_tcp(tmp_path: Path) -> None:
    signed = signed_run(tmp_path / "run")
    children = list[Child]()
    home = tmp_path / "meeting"
    plan = NodePlan("meeting", home, signed, tmp_path / "cache", bootstrap=True)

    async def started() -> Child:
        child = await Child.start(plan, [*node_command(plan), "--control-listen", "0"])
        children.append(child)
        await until(children, lambda: child.ready is not None, "it is up")
        return child

    async def ask(address: str, token: str) -> str:
        async with grpc.aio.insecure_channel(address) as channel:
            shown = (("authorization", f"Bearer {token}"),) if token else ()
            stub = control_pb2_grpc.ControlStub(channel)
            reply = await stub.Status(control_pb2.StatusRequest(), metadata=shown, timeout=BOUND_S)
            health = cast(Any, health_pb2_grpc.HealthStub(channel))
            ready = await health.Check(health_pb2.HealthCheckRequest(service="readiness"), timeout=BOUND_S)
            assert ready.status == health_pb2.HealthCheckResponse.SERVING
            return str(reply.run_id)

    try:
        first = await started()
        assert first.ready is not None
        sockets = [home / socket_path.SOCKET_NAME, home / socket_path.GRPC_SOCKET_NAME]
        assert await ask(f"unix:{sockets[1]}", "") == first.ready.run_id
        token = (home / socket_path.TOKEN_FILE).read_text().strip()
        assert await ask(first.ready.grpc, token) == first.ready.run_id
        with pytest.raises(grpc.aio.AioRpcError, match="UNAUTHENTICATED"):
            await ask(first.ready.grpc, token[:-1])
        looks = connect(home).watch(every_s=0.1)
        assert [(await asyncio.to_thread(next, looks))["run_id"] for _ in range(2)] == [first.ready.run_id] * 2
        await asyncio.to_thread(looks.close)

        statuses = watch(home, 60.0)
        assert (await asyncio.wait_for(anext(statuses), BOUND_S)).run_id == first.ready.run_id
        first.kill("the test kills it")
        with pytest.raises(NoDaemon, match="has ended"):
            await asyncio.wait_for(anext(statuses), BOUND_S)
        assert await first.wait(BOUND_S)
        first.bury()
        children.clear()
        assert all(path.exists() for path in sockets), "a killed daemon leaves its sockets"

        second = await started()
        assert second.ready is not None
        assert await ask(second.ready.grpc, token) == second.ready.run_id, "the token is kept"
        async with grpc.aio.insecure_channel(f"unix:{sockets[1]}") as channel:
            stub = control_pb2_grpc.ControlStub(channel)
            await stub.Leave(control_pb2.LeaveRequest(reason="enough"), timeout=BOUND_S)
        assert await second.wait(BOUND_S)
        second.bury()
        children.clear()
        assert not any(path.exists() for path in sockets)
        assert "left: enough" in (home / "stderr.log").read_text()
    finally:
        await end(children)
