"""The control API from another language, by the proto files alone: examples/control-client, a program for Node.js."""

import asyncio
import contextlib
import json
import pathlib
import shutil
import subprocess
from collections.abc import AsyncIterator
from typing import Any

import pytest

from swarmnode.app.control import socket_path
from swarmnode.app.control.service import ControlServer
from swarmnode.app.local.child import Child, NodePlan, node_command
from swarmnode.base.wire.record_pb2 import NODE_STATE_PAUSED, NODE_STATE_TRAINING
from swarmnode.base.wire.report_pb2 import LimitsReply, StatusReply
from tests.support.processes import end, signed_run, until

ROOT = pathlib.Path(__file__).resolve().parents[2]
INSTALL_S = 240.0
CALL_S = 120.0

pytestmark = pytest.mark.nightly  # packages of another registry, some ten seconds


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """The program, with the packages of its lock file."""
    npm = shutil.which("npm")
    if npm is None or shutil.which("node") is None:
        pytest.skip("node or npm is not here")
    folder = tmp_path_factory.mktemp("client")
    for name in ("client.mjs", "package.json", "package-lock.json"):
        shutil.copy(ROOT / "examples" / "control-client" / name, folder)
    command = [npm, "ci", "--no-audit", "--no-fund", "--ignore-scripts"]
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=INSTALL_S, check=False)
    except subprocess.TimeoutExpired:
        pytest.skip("npm's registry does not answer")
    if done.returncode:
        pytest.skip(f"npm cannot install: {done.stderr[-300:]}")
    return folder / "client.mjs"


class Daemon:
    def __init__(self) -> None:
        self.working = True
        self.reply = StatusReply(run_id="ab" * 32, stage=2, state=NODE_STATE_TRAINING, tokens_total=12_345)

    def status(self) -> StatusReply:
        return self.reply

    def pause(self, for_s: float, reason: str) -> LimitsReply:
        self.reply.state = NODE_STATE_PAUSED
        return LimitsReply(reason=reason, until_s=for_s)


@contextlib.asynccontextmanager
async def serving(home: pathlib.Path) -> AsyncIterator[Daemon]:
    daemon = Daemon()
    server = ControlServer(home, daemon, ready=lambda: daemon.working)
    await server.start()
    try:
        yield daemon
    finally:
        await server.stop()


async def call(client: pathlib.Path, *words: str) -> tuple[int, list[dict[str, Any]], str]:
    """(exit code, answers, stderr) of the program."""
    variables = {"PATH": "/usr/bin:/bin:/usr/local/bin", "SWARMNODE_PROTO": str(ROOT / "proto")}
    node = shutil.which("node")
    assert node is not None
    process = await asyncio.create_subprocess_exec(
        *(node, str(client), *words), stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=variables
    )
    out, err = await asyncio.wait_for(process.communicate(), CALL_S)
    assert process.returncode is not None
    return process.returncode, [json.loads(line) for line in out.decode().splitlines()], err.decode()


async def test_it_asks_watches_and_probes_over_the_unix_socket(client: pathlib.Path, tmp_path: pathlib.Path) -> None:
    async with serving(tmp_path) as daemon:
        address = f"unix:{tmp_path / socket_path.GRPC_SOCKET_NAME}"
        code, (status,), err = await call(client, address, "status")
        assert (code, err) == (0, "")
        assert status["run_id"] == "ab" * 32 and status["state"] == "NODE_STATE_TRAINING"
        assert status["tokens_total"] == 12_345
        code, statuses, err = await call(client, address, "watch", "3")
        assert (code, err, [one["stage"] for one in statuses]) == (0, "", [2, 2, 2])
        assert (await call(client, address, "health"))[1] == [{"status": "SERVING"}]
        daemon.working = False
        assert (await call(client, address, "health", "readiness"))[1] == [{"status": "NOT_SERVING"}]
        assert (await call(client, address, "health", "liveness"))[1] == [{"status": "SERVING"}]
        code, (limits,), _ = await call(client, address, "pause", "60")
        assert (code, limits["until_s"], daemon.reply.state) == (0, 60, NODE_STATE_PAUSED)
        code, answers, err = await call(client, address, "pause", "-1")
        assert (code, answers) == (1, []) and err.startswith("INVALID_ARGUMENT: for_s: at most a year")


@pytest.mark.live
async def test_a_real_daemon_answers_it_over_tcp_by_its_token(client: pathlib.Path, tmp_path: pathlib.Path) -> None:
    home = tmp_path / "meeting"
    children = list[Child]()
    plan = NodePlan("meeting", home, signed_run(tmp_path / "run"), tmp_path / "cache", bootstrap=True)
    try:
        daemon = await Child.start(plan, [*node_command(plan), "--control-listen", "0"])
        children.append(daemon)
        await until(children, lambda: daemon.ready is not None, "it is up")
        assert daemon.ready is not None
        address = daemon.ready.grpc
        socket = f"unix:{home / socket_path.GRPC_SOCKET_NAME}"
        code, answers, err = await call(client, address, "status")
        assert (code, answers) == (1, []) and err.startswith("UNAUTHENTICATED: ")
        for words in ((socket,), (address, "--token", str(home / socket_path.TOKEN_FILE))):
            code, answers, err = await call(client, words[0], "watch", "2", *words[1:])
            assert (code, err, [one["run_id"] for one in answers]) == (0, "", [daemon.ready.run_id] * 2)
            assert (await call(client, words[0], "health"))[1] == [{"status": "SERVING"}]
    finally:
        await end(children)
