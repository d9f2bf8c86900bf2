"""The control API by gRPC, on the standard loop and on uvloop: verbs, Watch, health, reflection, bounds, silence."""

import asyncio
import contextlib
import inspect
import json
import pathlib
import socket
import stat
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from typing import Any, cast

import grpc
import grpc.aio
import pytest
import uvloop
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

from swarmnode.app.cli.option.param import check_address
from swarmnode.app.control import client, socket_path, watchers
from swarmnode.app.control.grpc_server import CONNECTIONS_MAX
from swarmnode.app.control.service import ControlServer
from swarmnode.app.control.verb import REASON_CHARACTERS_MAX, VERBS
from swarmnode.app.control.watch import watch, watch_here
from swarmnode.app.control.watchers import WATCHERS_MAX
from swarmnode.app.daemon.control_api import ControlApi
from swarmnode.app.local.spawn import PRELOADED
from swarmnode.base.errors import LocalFault, NoDaemon, NotPermitted, Unavailable, UsageError
from swarmnode.base.wire import control_pb2, control_pb2_grpc
from swarmnode.base.wire.record_pb2 import NODE_STATE_PAUSED, NODE_STATE_TRAINING
from swarmnode.base.wire.report_pb2 import LimitsReply, StatusReply

LOOPS: list[Callable[[], asyncio.AbstractEventLoop]] = [asyncio.new_event_loop, uvloop.new_event_loop]
BOUND_S = 60.0
REFLECTION = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"


class Daemon:
    def __init__(self) -> None:
        self.reasons: list[str] = []
        self.working = True
        self.reply = StatusReply(run_id="ab" * 32, stage=2, state=NODE_STATE_TRAINING, uptime_s=1.0)

    def status(self) -> StatusReply:
        self.reply.uptime_s += 1.0
        return self.reply

    def ready(self) -> bool:
        return self.working

    def leave(self, reason: str, checkpoint: str, stopping: bool) -> None:
        self.reasons.append(reason)

    def pause(self, for_s: float, reason: str) -> LimitsReply:
        raise Unavailable("not while it starts")

    def limit(self, changed: dict[str, str]) -> LimitsReply:
        return LimitsReply(limits=changed)

    def finish(self, reason: str) -> None:
        raise RuntimeError("broken")


@contextlib.asynccontextmanager
async def serving(home: pathlib.Path) -> AsyncIterator[tuple[Daemon, ControlServer]]:
    daemon = Daemon()
    server = ControlServer(home, daemon, ready=daemon.ready)
    await server.start()
    try:
        yield daemon, server
    finally:
        await server.stop()


@contextlib.asynccontextmanager
async def channel_to(home: pathlib.Path) -> AsyncIterator[Any]:
    with socket_path.short_folder(home) as folder:
        async with grpc.aio.insecure_channel(f"unix:{folder / socket_path.GRPC_SOCKET_NAME}") as channel:
            yield channel


async def code_of(call: Any) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await asyncio.wait_for(call, BOUND_S)
    return caught.value.code(), caught.value.details() or ""


async def next_of(statuses: Any) -> StatusReply:
    return await asyncio.wait_for(anext(statuses), BOUND_S)


def test_each_verb_has_a_method_of_the_daemon_with_its_arguments() -> None:
    for verb in VERBS.values():
        if not verb.streams:
            given = list(inspect.signature(getattr(ControlApi, verb.name)).parameters)[1:]
            assert given == [field.name for field in verb.request.DESCRIPTOR.fields], verb.name
    assert {name for name, verb in VERBS.items() if verb.streams} == {"watch"}


@pytest.mark.parametrize("new_loop", LOOPS, ids=["asyncio", "uvloop"])
def test_both_doors_take_and_tell_the_same(
    tmp_path: pathlib.Path, new_loop: Callable[[], asyncio.AbstractEventLoop], capfd: pytest.CaptureFixture[str]
) -> None:
    async def scenario() -> None:
        async with serving(tmp_path) as (daemon, _), channel_to(tmp_path) as channel:
            path = tmp_path / socket_path.GRPC_SOCKET_NAME
            assert stat.S_IMODE(path.stat().st_mode) == 0o600
            stub = control_pb2_grpc.ControlStub(channel)
            assert (await stub.Status(control_pb2.StatusRequest())).run_id == daemon.reply.run_id
            long = "enough" * 100
            await stub.Leave(control_pb2.LeaveRequest(reason=long))
            await asyncio.to_thread(client.ask, tmp_path, "leave", reason=long)
            assert daemon.reasons == [long[:REASON_CHARACTERS_MAX]] * 2
            limits = (await stub.Limit(control_pb2.LimitRequest(changed={"quota": "1GB"}))).limits
            assert (await asyncio.to_thread(client.ask, tmp_path, "limit", changed={"quota": "1GB"}))[
                "limits"
            ] == limits
            for seconds in (-1.0, 1e12, float("nan"), float("inf")):
                code, text = await code_of(stub.Pause(control_pb2.PauseRequest(for_s=seconds)))
                assert (code, text) == (grpc.StatusCode.INVALID_ARGUMENT, "for_s: at most a year, in seconds")
            code, text = await code_of(stub.Pause(control_pb2.PauseRequest(for_s=60.0)))
            assert (code, text) == (grpc.StatusCode.UNAVAILABLE, "not while it starts")
        assert not path.exists()

    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(scenario())
    assert capfd.readouterr().err == ""


async def test_a_call_that_no_daemon_understands_is_an_error_of_the_caller(
    tmp_path: pathlib.Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Wrong bytes, too many bytes, an unknown method, another protocol: one answer, silence, and it goes on."""
    async with serving(tmp_path) as (daemon, _), channel_to(tmp_path) as channel:
        for method, raw, wanted in (
            ("Pause", b"\xff\xff\xff", grpc.StatusCode.INVALID_ARGUMENT),
            ("Watch", b"\xff", grpc.StatusCode.INVALID_ARGUMENT),
            ("Limit", bytes(1 << 20), grpc.StatusCode.RESOURCE_EXHAUSTED),
            ("Dance", b"", grpc.StatusCode.UNIMPLEMENTED),
        ):
            name = f"/swarmnode.v1.Control/{method}"
            call = channel.unary_stream(name)(raw) if method == "Watch" else channel.unary_unary(name)(raw)
            assert (await code_of(call.read() if method == "Watch" else call))[0] is wanted, method
        health = channel.unary_unary("/grpc.health.v1.Health/Check")(b"\xff\xff")
        assert (await code_of(health))[0] in (grpc.StatusCode.UNKNOWN, grpc.StatusCode.INTERNAL)
        for noise in (b"GET / HTTP/1.1\r\n\r\n", b"\x00" * 5000, b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\xff" * 500):
            with socket.socket(socket.AF_UNIX) as stranger:
                stranger.connect(str(tmp_path / socket_path.GRPC_SOCKET_NAME))
                stranger.sendall(noise)
        reply = await control_pb2_grpc.ControlStub(channel).Status(control_pb2.StatusRequest())
        assert reply.run_id == daemon.reply.run_id
    assert capfd.readouterr().err == ""


async def test_a_fault_of_the_daemon_is_in_its_log(tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture) -> None:
    async with serving(tmp_path), channel_to(tmp_path) as channel:
        code, _ = await code_of(control_pb2_grpc.ControlStub(channel).Finish(control_pb2.FinishRequest()))
        assert code is grpc.StatusCode.UNKNOWN
    assert any("finish" in record.message and record.exc_info for record in caplog.records)


@pytest.mark.parametrize("new_loop", LOOPS, ids=["asyncio", "uvloop"])
def test_watch_tells_changes_at_once_and_numbers_at_the_interval(
    tmp_path: pathlib.Path, new_loop: Callable[[], asyncio.AbstractEventLoop]
) -> None:
    async def scenario() -> None:
        async with serving(tmp_path) as (daemon, server):
            often = watch(tmp_path, 0.0)
            seldom = watch(tmp_path, 1e9)
            first = await next_of(often)
            assert (await next_of(often)).uptime_s > first.uptime_s  # a number flows
            assert (await next_of(seldom)).state == NODE_STATE_TRAINING
            daemon.reply.state = NODE_STATE_PAUSED
            server.watchers.wake()
            assert (await next_of(seldom)).state == NODE_STATE_PAUSED  # long before the hour is over
            daemon.reply.stage = 1  # of what no event tells
            assert (await next_of(seldom)).stage == 1
            await often.aclose()
            ended = asyncio.ensure_future(next_of(seldom))
            await server.stop()
            with pytest.raises(NoDaemon, match="has ended"):
                await ended

    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(scenario())


async def test_watchers_are_bounded_and_leave_no_trace(tmp_path: pathlib.Path) -> None:
    async with serving(tmp_path) as (_, server):
        watching = [watch(tmp_path, 60.0) for _ in range(WATCHERS_MAX)]
        for one in watching:
            await next_of(one)
        late = watch(tmp_path, 60.0)
        with pytest.raises(Unavailable, match=f"{WATCHERS_MAX} watch this daemon already"):
            await next_of(late)
        assert await asyncio.to_thread(client.status, tmp_path)  # other calls go on
        for one in watching:
            await one.aclose()
        async with asyncio.timeout(BOUND_S):
            while server.watchers.count:
                await asyncio.sleep(0.01)
        assert await next_of(watch(tmp_path, 60.0))


async def test_a_watcher_that_reads_nothing_is_dropped(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watchers, "WRITE_S", 0.2)
    async with serving(tmp_path) as (daemon, server), channel_to(tmp_path) as channel:
        daemon.reply.run_name = "x" * 1_000_000  # more than a window of HTTP/2
        call = control_pb2_grpc.ControlStub(channel).Watch(control_pb2.WatchRequest(every_s=0.1))
        await asyncio.wait_for(call.read(), BOUND_S)
        async with asyncio.timeout(BOUND_S):
            while server.watchers.count:
                await asyncio.sleep(0.05)
        call.cancel()


async def test_curl_watches_lines_of_json(tmp_path: pathlib.Path) -> None:
    async with serving(tmp_path) as (daemon, server):
        reading, writing = await asyncio.open_unix_connection(str(tmp_path / socket_path.SOCKET_NAME))
        writing.write(b"POST /v1/watch HTTP/1.1\r\nHost: localhost\r\nContent-Length: 15\r\n\r\n" + b'{"every_s": 60}')
        assert b"x-ndjson" in await asyncio.wait_for(reading.readuntil(b"\r\n\r\n"), BOUND_S)
        told = await asyncio.wait_for(reading.readuntil(b"}\n"), BOUND_S)
        assert json.loads(told.partition(b"\r\n")[2])["state"] == "NODE_STATE_TRAINING"
        daemon.reply.state = NODE_STATE_PAUSED
        server.watchers.wake()
        assert b"NODE_STATE_PAUSED" in await asyncio.wait_for(reading.readuntil(b"}\n"), BOUND_S)
        await server.stop()  # ends the stream
        assert (await asyncio.wait_for(reading.read(), BOUND_S)).endswith(b"0\r\n\r\n")
        writing.close()


async def test_connections_are_bounded(tmp_path: pathlib.Path) -> None:
    """Whoever opens many keeps nobody out who is there already, and a place is free again when one is closed."""
    async with serving(tmp_path) as (_, server), channel_to(tmp_path) as channel:
        stub = control_pb2_grpc.ControlStub(channel)
        assert await stub.Status(control_pb2.StatusRequest())
        with contextlib.ExitStack() as stack:
            refused = 0
            for _ in range(CONNECTIONS_MAX + 8):
                silent = stack.enter_context(socket.socket(socket.AF_UNIX))
                silent.settimeout(BOUND_S)
                await asyncio.to_thread(silent.connect, str(tmp_path / socket_path.GRPC_SOCKET_NAME))
                refused += not await asyncio.to_thread(silent.recv, 1)  # else the first byte of SETTINGS
            assert refused >= 8
            assert await stub.Status(control_pb2.StatusRequest())
        assert server.watchers.count == 0
        assert await next_of(watch(tmp_path, 1.0))


async def test_a_frozen_daemon_is_unavailable(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("swarmnode.app.control.watch.TIMEOUT_S", 0.2)
    with socket.socket(socket.AF_UNIX) as frozen:
        frozen.bind(str(tmp_path / socket_path.GRPC_SOCKET_NAME))
        frozen.listen()  # accepted by the kernel, answered by nobody
        with pytest.raises(Unavailable, match="does not answer: frozen, or too busy"):
            await next_of(watch(tmp_path, 0.1))


async def test_an_interval_out_of_bounds_is_refused(tmp_path: pathlib.Path) -> None:
    async with serving(tmp_path), channel_to(tmp_path) as channel:
        for every_s in (0.01, watchers.EVERY_MAX_S + 1.0, -1.0, float("nan")):
            call = control_pb2_grpc.ControlStub(channel).Watch(control_pb2.WatchRequest(every_s=every_s))
            code, text = await code_of(call.read())
            assert code is grpc.StatusCode.INVALID_ARGUMENT and text.startswith("every_s: "), every_s


async def test_watch_without_an_event_loop(tmp_path: pathlib.Path) -> None:
    async with serving(tmp_path) as (daemon, _):
        statuses = watch_here(tmp_path, 0.1)
        for _ in range(2):
            assert (await asyncio.to_thread(next, statuses)).run_id == daemon.reply.run_id
        await asyncio.to_thread(statuses.close)


async def test_a_watch_without_a_daemon_is_one_clear_line(tmp_path: pathlib.Path) -> None:
    for statuses in (watch(tmp_path, 1.0), watch(tmp_path, 1.0)):
        with pytest.raises(NoDaemon, match="start one with `swarmnode join`"):
            await next_of(statuses)
        with socket.socket(socket.AF_UNIX) as killed:  # what `kill -9` leaves
            killed.bind(str(tmp_path / socket_path.GRPC_SOCKET_NAME))
        killed_home = watch_here(tmp_path, 1.0)
        with pytest.raises(NoDaemon, match="start one with `swarmnode join`"):
            await asyncio.to_thread(next, killed_home)
        (tmp_path / socket_path.GRPC_SOCKET_NAME).unlink()


async def test_a_daemon_from_before_this_socket_has_another_version(tmp_path: pathlib.Path) -> None:
    with socket.socket(socket.AF_UNIX) as old:
        old.bind(str(tmp_path / socket_path.SOCKET_NAME))
        old.listen()
        with pytest.raises(LocalFault, match="has another version: restart it"):
            await next_of(watch(tmp_path, 1.0))


async def test_a_socket_of_a_killed_daemon_is_replaced_and_a_path_may_be_long(tmp_path: pathlib.Path) -> None:
    home = tmp_path / ("deep" * 30)
    home.mkdir()
    with socket_path.short_folder(home) as folder, socket.socket(socket.AF_UNIX) as killed:
        killed.bind(str(folder / socket_path.GRPC_SOCKET_NAME))
    async with serving(home) as (daemon, _):
        assert (await next_of(watch(home, 1.0))).run_id == daemon.reply.run_id
    assert not (home / socket_path.GRPC_SOCKET_NAME).exists()


async def test_health_is_the_standard_one(tmp_path: pathlib.Path) -> None:
    """As kubelet, grpc-health-probe and load balancers ask."""
    serving_ = health_pb2.HealthCheckResponse.SERVING
    not_serving = health_pb2.HealthCheckResponse.NOT_SERVING
    async with serving(tmp_path) as (daemon, _), channel_to(tmp_path) as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        ask = {name: health_pb2.HealthCheckRequest(service=name) for name in ("", "readiness", "liveness", "tea")}
        changes = stub.Watch(ask["readiness"])
        assert (await changes.read()).status == serving_
        for working in (True, False):
            daemon.working = working
            said = serving_ if working else not_serving
            assert (await stub.Check(ask[""])).status == (await stub.Check(ask["readiness"])).status == said
            assert (await stub.Check(ask["liveness"])).status == serving_
        assert (await asyncio.wait_for(changes.read(), BOUND_S)).status == not_serving
        assert (await code_of(stub.Check(ask["tea"])))[0] is grpc.StatusCode.NOT_FOUND
        changes.cancel()


async def test_reflection_names_services_methods_and_types(tmp_path: pathlib.Path) -> None:
    """As grpcurl asks."""

    def look() -> tuple[list[str], list[str]]:
        with grpc.insecure_channel(f"unix:{tmp_path / socket_path.GRPC_SOCKET_NAME}") as channel:
            told = ProtoReflectionDescriptorDatabase(channel)
            described = told.FindFileContainingSymbol("swarmnode.v1.Control")
            return list(told.get_services()), [m.name for service in described.service for m in service.method]

    async with serving(tmp_path):
        services, methods = await asyncio.to_thread(look)
    assert {"swarmnode.v1.Control", "swarmnode.v1.Coordinator", "grpc.health.v1.Health"} < set(services)
    assert methods == [verb.method for verb in VERBS.values()]


def test_grpc_is_not_imported_where_processes_fork_or_ask_once() -> None:
    """A fork would copy gRPC's locks without its threads; a verb that asks once would wait for the import."""
    code = (
        f"import sys, {', '.join(PRELOADED)}\n"
        "import swarmnode.app.cli.tell, swarmnode.app.cli.look, swarmnode.app.control.client\n"
        "print(*[name for name in sys.modules if name.partition('.')[0] in ('grpc', 'grpc_health')])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=150, check=True)
    assert done.stdout.split() == []


async def test_tcp_answers_whoever_has_the_token_and_everybodys_probe(tmp_path: pathlib.Path) -> None:
    daemon = Daemon()
    server = ControlServer(tmp_path, daemon)
    await server.start(("127.0.0.1", 0))
    try:
        token = tmp_path / socket_path.TOKEN_FILE
        assert stat.S_IMODE(token.stat().st_mode) == 0o600 and len(token.read_text().strip()) == 64
        right = f"Bearer {token.read_text().strip()}"
        async with grpc.aio.insecure_channel(server.address) as opened:
            channel = cast(Any, opened)
            stub = control_pb2_grpc.ControlStub(channel)
            health = cast(Any, health_pb2_grpc.HealthStub(channel))
            for given in ((), (("authorization", "Bearer "),), (("authorization", right[:-1]),), (("other", right),)):
                for call in (
                    stub.Status(control_pb2.StatusRequest(), metadata=given),
                    stub.Watch(control_pb2.WatchRequest(), metadata=given).read(),
                    health.Watch(health_pb2.HealthCheckRequest(), metadata=given).read(),
                    channel.unary_unary("/swarmnode.v1.Control/Dance")(b"", metadata=given),
                    channel.stream_stream(REFLECTION)(metadata=given).read(),  # it never sends a message
                ):
                    assert (await code_of(call))[0] is grpc.StatusCode.UNAUTHENTICATED, given
            shown = (("authorization", right),)
            assert (await stub.Status(control_pb2.StatusRequest(), metadata=shown)).run_id == daemon.reply.run_id
            assert (await stub.Watch(control_pb2.WatchRequest(), metadata=shown).read()).run_id == daemon.reply.run_id
            reply = await health.Check(health_pb2.HealthCheckRequest())
            assert reply.status == health_pb2.HealthCheckResponse.SERVING
        other = ControlServer(tmp_path / "other", daemon)
        with pytest.raises(UsageError, match="--control-listen .* is in use"):
            await other.start(("127.0.0.1", int(server.address.rpartition(":")[2])))
    finally:
        await server.stop()
    kept = token.read_text()
    again = ControlServer(tmp_path, daemon)
    await again.start(("127.0.0.1", 0))
    await again.stop()
    assert token.read_text() == kept
    token.chmod(0o644)
    with pytest.raises(NotPermitted, match="can be read by others: chmod 600"):
        await ControlServer(tmp_path, daemon).start(("127.0.0.1", 0))


@pytest.mark.parametrize(
    ("text", "address"),
    [("9470", "127.0.0.1:9470"), ("0.0.0.0:0", "0.0.0.0:0"), ("[::1]:5", "[::1]:5"), ("::1:5", "[::1]:5"), ("", "")],
)
def test_an_address_to_listen_at(text: str, address: str) -> None:
    assert check_address(text) == address


@pytest.mark.parametrize("text", ["localhost:1", "1.2.3.4", "1.2.3.4:65536", ":", "127.0.0.1:-1", "a:b:c"])
def test_words_that_are_no_address_to_listen_at_are_refused(text: str) -> None:
    with pytest.raises(ValueError):
        check_address(text)
