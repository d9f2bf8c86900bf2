"""Processes of a local swarm: real ones with real control sockets, standing in for nodes. Nothing may survive."""

import asyncio
import contextlib
import json
import os
import pathlib
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import psutil
import pytest

from swarmnode.app.local.child import Child, NodePlan, node_command
from swarmnode.app.local.fleet import Fleet, choose_victim
from swarmnode.app.local.session import Conditions, Session
from swarmnode.app.local.summary import NodeFacts
from swarmnode.app.local.swarm_view import PlainScreen
from swarmnode.base.wire.record_pb2 import NODE_STATE_JOINING, NODE_STATE_TRAINING
from swarmnode.base.wire.report_pb2 import StatusReply
from tests.support import drive

WAIT_S = 150.0


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("swarmnode.app.local.session.PERIOD_S", 0.1)


def until(condition: Callable[[], bool], what: str) -> None:
    """Wait for other processes to make `condition` true."""
    end = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < end, f"not within {WAIT_S:g} s: {what}"
        time.sleep(0.02)


def gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def started(folder: pathlib.Path) -> list[int]:
    """Pids of all nodes that said they are ready."""
    return [json.loads(path.read_text())["pid"] for path in sorted(folder.glob("*/ready.json"))]


def screen() -> PlainScreen:
    return PlainScreen(open(os.devnull, "w"))


@contextlib.contextmanager
def driven(folder: pathlib.Path, *arguments: str, **environment: str) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-B", drive.__file__, str(folder), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(pathlib.Path(__file__).parents[2]), **environment},
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


async def test_a_session_trains_sums_up_and_leaves_nothing(tmp_path: pathlib.Path) -> None:
    session = Session(drive.fake_plan(tmp_path, 4), Conditions(rounds=1), screen(), run="ab" * 32)
    summary = await session.run()
    found = summary.to_json()
    assert found["nodes"] == 4
    assert str(found["stopped"]).startswith("round ")
    assert found["exit_reasons"] == {f"node-{index:02d}": "left" for index in range(4)}
    assert found["microbatches"] == {"done": 16, "lost": 0, "retried": 0, "duplicate": 0}
    assert found["exchanges"] == {"paired": 4, "lone": 0}
    assert found["bytes"] == {"pipeline": 4000, "gossip": 0, "state": 0, "control": 0}
    assert found["loss_validation_first"] == 5.5
    assert found["failure"] is None
    assert all(gone(child.pid) for child in session.fleet.everybody)
    assert not list(tmp_path.glob("*/control.sock"))
    asked = [int((tmp_path / f"node-{index:02d}" / "asked").read_text()) for index in range(4)]
    left = [int((tmp_path / f"node-{index:02d}" / "left").read_text()) for index in range(4)]
    assert max(left[0], left[2]) < min(asked[1], asked[3])  # feeders first, while the next stage still serves
    assert max(left) < int((tmp_path / "bootstrap" / "asked").read_text())
    stages = [json.loads((tmp_path / f"node-{index:02d}" / "argv.json").read_text()) for index in range(4)]
    assert [argv[argv.index("--stage") + 1] for argv in stages] == ["1", "2", "1", "2"]
    assert all(argv[1].endswith("/p2p/12D3KooWbootstrapAAAAAAAAAAAA") for argv in stages)


async def test_kill_ends_a_node_and_a_fresh_one_joins_in_its_place(tmp_path: pathlib.Path) -> None:
    class UntilReplaced(PlainScreen):
        def note(self, text: str) -> None:
            super().note(text)
            if "joins in the place of" in text:
                session.stop("replaced")

    session = Session(
        drive.fake_plan(tmp_path, 4), Conditions(), UntilReplaced(sys.stderr), run="ab" * 32, kill_every_s=0.2
    )
    summary = await session.run()
    killed = [name for name, reason in summary.exit_reasons.items() if reason == "killed by --kill"]
    assert len(killed) == summary.killed >= 1
    assert len(summary.exit_reasons) >= 5
    assert summary.totals.microbatches["done"] >= 4 * 4  # what the dead one did counts
    joiner = next(child for child in session.fleet.nodes if child.name == "node-04")
    assert "--stage" not in node_command(joiner.plan)
    assert len(joiner.plan.bootstraps) == 3  # the bootstrap, and living nodes in case it is dead
    assert all(gone(child.pid) for child in session.fleet.everybody)


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGHUP, marks=pytest.mark.nightly)])
def test_one_signal_ends_everything_in_order(tmp_path: pathlib.Path, number: signal.Signals) -> None:
    with driven(tmp_path, "2", "0", "0") as process:
        until(lambda: len(started(tmp_path)) == 3, "all ready")
        pids = started(tmp_path)
        process.send_signal(number)
        output, errors = process.communicate(timeout=WAIT_S)
    assert process.returncode == 0, errors
    found = json.loads(output)
    assert found["exit_reasons"] == {"node-00": "left", "node-01": "left"}
    assert found["stopped"] == number.name
    assert all(gone(pid) for pid in pids)


def test_the_second_signal_kills_everything_at_once(tmp_path: pathlib.Path) -> None:
    with driven(tmp_path, "2", "0", "0", FAKE="deaf") as process:
        until(lambda: len(started(tmp_path)) == 3, "all ready")
        pids = started(tmp_path)
        process.send_signal(signal.SIGINT)
        assert process.stderr is not None
        for line in process.stderr:
            if "again to kill them at once" in line:
                break
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=WAIT_S)
    assert process.returncode == 130
    assert all(gone(pid) for pid in pids)


def test_nothing_survives_a_parent_that_is_killed(tmp_path: pathlib.Path) -> None:
    with driven(tmp_path, "2", "0", "0") as process:
        until(lambda: len(started(tmp_path)) == 3, "all ready")
        pids = started(tmp_path)
        assert not any(gone(pid) for pid in pids)
        process.kill()
        until(lambda: all(gone(pid) for pid in pids), "children gone after kill -9 of their parent")


async def test_a_deaf_node_is_killed_and_said_so(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE", "deaf")
    monkeypatch.setattr("swarmnode.app.local.fleet.TERM_TIMEOUT_S", 0.2)
    session = Session(drive.fake_plan(tmp_path, 2, leave_timeout_s=0.2), Conditions(rounds=1), screen(), run="ab" * 32)
    summary = await session.run()
    assert summary.exit_reasons["node-01"] == "did not leave when asked: killed"
    assert all(gone(child.pid) for child in session.fleet.everybody)


async def test_children_of_a_node_end_with_it(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE", "helper")
    session = Session(drive.fake_plan(tmp_path, 2), Conditions(rounds=1), screen(), run="ab" * 32)
    await session.run()
    helpers = [int(path.read_text()) for path in tmp_path.glob("*/helper.pid")]
    assert len(helpers) == 3
    until(lambda: all(gone(pid) for pid in helpers), "helpers gone")


async def test_nodes_are_spread_over_the_devices(tmp_path: pathlib.Path) -> None:
    given = list[str]()

    def command(plan: NodePlan) -> list[str]:
        real = node_command(plan)
        given.append(real[real.index("--device") + 1] if "--device" in real else "")
        return list(drive.fake_command(replace(plan, flags=())))

    plan = replace(drive.fake_plan(tmp_path, 3), command=command, devices=("cuda:0", "cuda:1"))
    fleet = Fleet(plan, lambda text: None)
    try:
        assert await fleet.start(asyncio.Event())
    finally:
        await fleet.stop("done")
        await fleet.reap()
    assert given == ["", "cuda:0", "cuda:1", "cuda:0"]  # the bootstrap computes nothing


async def test_a_node_that_dies_is_reported_and_not_replaced_without_kill(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE", "crash-later")
    session = Session(drive.fake_plan(tmp_path, 2), Conditions(rounds=3), screen(), run="ab" * 32)
    summary = await session.run()
    assert summary.exit_reasons == {"node-00": "left", "node-01": "exit 70: swarmnode: the disk of node-01 is full"}
    assert summary.totals.microbatches["done"] == 8


async def test_a_node_that_cannot_work_ends_the_session_with_its_message_and_code(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE", "unable-later")
    session = Session(drive.fake_plan(tmp_path, 2), Conditions(), screen(), run="ab" * 32)
    summary = await asyncio.wait_for(session.run(), WAIT_S)
    home = tmp_path / "node-01"
    assert summary.failure == f"node-01: data.paths: train.txt of node-01 is gone; see {home}"
    assert summary.exit_code == 78 and summary.stopped == "node-01 cannot work"
    assert summary.exit_reasons["node-00"] == "left"


async def test_a_session_without_nodes_ends_with_a_failure(tmp_path: pathlib.Path) -> None:
    session = Session(drive.fake_plan(tmp_path, 2), Conditions(), screen(), run="ab" * 32)

    async def murder() -> None:
        while len(session.fleet.nodes) < 2 or not all(child.status for child in session.fleet.nodes):
            await asyncio.sleep(0.02)
        for child in session.fleet.nodes:
            child.signal(signal.SIGKILL)

    async with asyncio.TaskGroup() as group:
        running = group.create_task(session.run())
        group.create_task(murder())
    summary = running.result()
    assert summary.failure is not None and "no node is left" in summary.failure
    assert set(summary.exit_reasons.values()) == {"killed by SIGKILL"}


async def test_a_command_that_cannot_be_run_says_so(tmp_path: pathlib.Path) -> None:
    child = await Child.start(plan(tmp_path), ["/no/such/program"])
    await child.wait(WAIT_S)
    child.bury()
    assert child.reason == "exit 127: swarmnode: cannot run /no/such/program: No such file or directory"


def plan(folder: pathlib.Path) -> NodePlan:
    return NodePlan("node-00", folder / "node-00", folder / "manifest.signed", folder / "cache")


def facts(name: str, stage: int, state: int = NODE_STATE_TRAINING, reason: str = "") -> NodeFacts:
    return NodeFacts(name, stage, StatusReply(stage=stage, state=state), reason)  # type: ignore[arg-type]


def test_the_last_replica_of_a_stage_is_spared() -> None:
    from swarmnode.base.ids import seeded

    nodes = [
        facts("a", 0),
        facts("b", 0),
        facts("c", 1),
        facts("d", 1, NODE_STATE_JOINING),
        facts("e", 2, reason="left"),
        facts("f", 2),
        NodeFacts("g", 2, None),
    ]
    chosen = {victim.name for seed in range(50) if (victim := choose_victim(nodes, seeded(seed))[0])}
    assert chosen == {"a", "b"}
    assert choose_victim(nodes[1:], seeded(0))[0] is None


async def test_start_can_be_given_up(tmp_path: pathlib.Path) -> None:
    stopping = asyncio.Event()
    stopping.set()
    fleet = Fleet(drive.fake_plan(tmp_path, 2), lambda text: None)
    assert not await fleet.start(stopping)
    await fleet.reap()
    assert all(gone(child.pid) for child in fleet.everybody)
