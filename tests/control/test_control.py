"""The control API over a real unix socket, on the standard loop and on uvloop."""

import asyncio
import contextlib
import os
import pathlib
import socket
import stat
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
import uvloop

from swarmnode.app.cli.main import cli
from swarmnode.app.control import client, socket_path
from swarmnode.app.control.service import ControlServer
from swarmnode.app.control.verb import REASON_CHARACTERS_MAX
from swarmnode.base.errors import LocalFault, NoDaemon, Unavailable, UsageError
from swarmnode.base.wire.control_pb2 import DrainReply
from swarmnode.base.wire.report_pb2 import LimitsReply, StatusReply

LOOPS: list[Callable[[], asyncio.AbstractEventLoop]] = [asyncio.new_event_loop, uvloop.new_event_loop]


class Daemon:
    def __init__(self) -> None:
        self.reasons: list[str] = []
        self.reply = StatusReply(run_id="ab" * 32, stage=2, counters={"swarmnode_samples_total": 5.0})

    def status(self) -> StatusReply:
        return self.reply

    def server(self, home: pathlib.Path) -> ControlServer:
        return ControlServer(home, self)

    def leave(self, reason: str, checkpoint: str, stopping: bool) -> None:
        self.reasons.append(reason)

    async def drain(self, notice_s: float, reason: str) -> DrainReply:
        self.reasons.append(f"{reason} in {notice_s:g} s")
        return DrainReply(held=2, finished=1, cut=["finish: 1 of 2 microbatches"])

    def pause(self, for_s: float, reason: str) -> None:
        raise Unavailable("not while it starts")

    def limit(self, changed: dict[str, str]) -> LimitsReply:
        return LimitsReply(limits=changed)


@contextlib.asynccontextmanager
async def serving(home: pathlib.Path) -> AsyncIterator[tuple[Daemon, pathlib.Path]]:
    daemon = Daemon()
    server = daemon.server(home)
    path = await server.start()
    try:
        yield daemon, path
    finally:
        await server.stop()


@pytest.mark.parametrize("new_loop", LOOPS, ids=["asyncio", "uvloop"])
def test_status_and_leave(tmp_path: pathlib.Path, new_loop: Callable[[], asyncio.AbstractEventLoop]) -> None:
    async def scenario() -> None:
        async with serving(tmp_path) as (daemon, path):
            assert stat.S_IMODE(path.stat().st_mode) == 0o600
            assert (await asyncio.to_thread(client.status, tmp_path)) == daemon.reply
            await asyncio.to_thread(client.ask, tmp_path, "leave", reason="enough" * 100)
            assert daemon.reasons == [("enough" * 100)[:REASON_CHARACTERS_MAX]]
        assert not path.exists()

    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(scenario())


def test_no_daemon_is_one_clear_line_and_exit_69(tmp_path: pathlib.Path) -> None:
    with pytest.raises(NoDaemon, match=r"no node runs in .*: start one with `swarmnode join`") as caught:
        client.status(tmp_path)
    assert caught.value.exit_code == 69
    with socket.socket(socket.AF_UNIX) as killed:  # what `kill -9` leaves: a socket file and nobody behind it
        killed.bind(str(tmp_path / socket_path.SOCKET_NAME))
    for ask in (lambda: client.status(tmp_path), lambda: client.ask(tmp_path, "leave", reason="go")):
        with pytest.raises(NoDaemon, match="start one"):
            ask()


async def test_a_socket_left_by_a_killed_daemon_is_taken_over(tmp_path: pathlib.Path) -> None:
    with socket.socket(socket.AF_UNIX) as killed:
        killed.bind(str(tmp_path / socket_path.SOCKET_NAME))

    async with serving(tmp_path) as (daemon, _):
        assert (await asyncio.to_thread(client.status, tmp_path)) == daemon.reply


async def test_two_daemons_do_not_share_a_home(tmp_path: pathlib.Path) -> None:
    async with serving(tmp_path) as (daemon, _):
        with pytest.raises(UsageError, match=rf"another swarmnode \(pid {os.getpid()}\) uses .*--home"):
            await Daemon().server(tmp_path).start()
        with pytest.raises(UsageError, match="another swarmnode"):
            Daemon().server(tmp_path).hold()
        assert (await asyncio.to_thread(client.status, tmp_path)) == daemon.reply
    async with serving(tmp_path):
        pass


def test_a_frozen_daemon_is_unavailable_after_the_deadline(tmp_path: pathlib.Path) -> None:
    with socket.socket(socket.AF_UNIX) as frozen:
        frozen.bind(str(tmp_path / socket_path.SOCKET_NAME))
        frozen.listen()  # accepted by the kernel, answered by nobody
        with pytest.raises(Unavailable, match=r"did not answer within 0\.2 s"):
            client.status(tmp_path, timeout_s=0.2)


async def test_a_daemon_that_fails_says_so(tmp_path: pathlib.Path) -> None:
    def fail() -> StatusReply:
        raise RuntimeError("broken")

    daemon = Daemon()
    daemon.status = fail  # type: ignore[method-assign]
    server = daemon.server(tmp_path)
    await server.start()
    try:
        with pytest.raises(LocalFault, match="see its log"):
            await asyncio.to_thread(client.status, tmp_path)
    finally:
        await server.stop()


async def test_the_path_of_a_home_may_be_longer_than_that_of_a_socket(tmp_path: pathlib.Path) -> None:
    home = tmp_path / ("deep" * 30)
    async with serving(home) as (daemon, path):
        assert path == home / socket_path.SOCKET_NAME
        assert stat.S_ISSOCK(path.stat().st_mode)
        assert (await asyncio.to_thread(client.status, home)) == daemon.reply
    assert not path.exists()


@pytest.mark.skipif(os.getuid() != 0, reason="needs root to become somebody else")
async def test_another_user_is_refused() -> None:
    root = str(pathlib.Path(__file__).parents[2])
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        home = pathlib.Path(folder)
        home.chmod(0o755)
        ask = (
            f"import os, sys; sys.path.insert(0, {root!r}); from swarmnode.app.control import client\n"
            "os.setuid(65534)\n"
            f"from pathlib import Path\ntry: client.status(Path({folder!r}))\n"
            "except Exception as error: print(type(error).__name__, error.exit_code)"
        )

        async def scenario() -> None:
            async with serving(home):
                asked = await asyncio.create_subprocess_exec(
                    sys.executable, "-B", "-c", ask, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
                )
                output, _ = await asyncio.wait_for(asked.communicate(), 150)
                assert output.decode().strip() == "NotPermitted 77"

        await scenario()


async def test_limit_says_where_none_is_set(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    async with serving(tmp_path):
        words = ["limit", "--home", str(tmp_path)]
        await asyncio.to_thread(cli.main, args=words, prog_name="swarmnode", standalone_mode=False)
        assert capsys.readouterr().err.endswith("no limit is set\n")
        await asyncio.to_thread(cli.main, args=[*words, "--quota", "1GB"], prog_name="swarmnode", standalone_mode=False)
        said = capsys.readouterr()
        assert said.out == "quota 1GB\n" and "no limit is set" not in said.err


async def test_drain_waits_for_how_it_left(tmp_path: pathlib.Path) -> None:
    async with serving(tmp_path) as (daemon, _):
        reply = await asyncio.to_thread(client.drain, tmp_path, 12.0, "rehearsal")
        given = {"held": 2, "finished": 1, "cut": ["finish: 1 of 2 microbatches"]}
        assert reply == {**given, "unsent": 0, "sent": 0, "successor": "", "seconds": 0.0}
        assert daemon.reasons == ["rehearsal in 12 s"]


@pytest.mark.parametrize(
    ("verb", "values", "error", "says"),
    [
        ("pause", {"for_s": 1e12}, UsageError, "for_s: at most a year"),
        ("pause", {"for_s": "long"}, UsageError, "for_s"),
        ("pause", {"for_s": 60.0, "of_a_newer_version": 1}, Unavailable, "not while it starts"),
        ("pause", {"for_s": "60"}, UsageError, "for_s: at most a year"),
        ("pause", {"for_s": True}, UsageError, "for_s: at most a year"),
        ("pause", {"for_s": float("nan")}, UsageError, "for_s: at most a year"),
        ("pause", {"reason": None}, UsageError, "reason: not a text"),
        ("leave", {"stopping": 1}, UsageError, "stopping: not true or false"),
        ("limit", {"changed": {"quota": 5}}, UsageError, "changed: not an object of texts"),
        ("watch", {"every_s": 0.01}, UsageError, "every_s: from 0.1 to 3600 seconds"),
        ("dance", {}, LocalFault, "or has another version: restart it"),
    ],
)
async def test_errors_reach_the_caller(
    tmp_path: pathlib.Path, verb: str, values: dict[str, Any], error: type[Exception], says: str
) -> None:
    async with serving(tmp_path):
        with pytest.raises(error, match=says):
            await asyncio.to_thread(client.ask, tmp_path, verb, **values)
        reply = await asyncio.to_thread(client.ask, tmp_path, "limit", changed={"quota": "1GB"})
        assert reply["limits"] == {"quota": "1GB"} and reply["running"] is False
