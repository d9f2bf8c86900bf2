"""Processes forked from a zygote: like those run as a command, to themselves and to whoever watches them."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from swarmnode.app.local import spawn
from swarmnode.app.local.spawn import NODE, ForkedProcess, Spawner

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="forks on Linux only")


def follows(folder: Path) -> list[str]:
    """A command that runs until it is told to end, and needs no swarm."""
    (folder / "events.jsonl").write_text(
        '{"ts": "2026-11-21T12:00:00.000Z", "level": "info", "event": "started", "fields": {}}\n'
    )
    return [*NODE, "logs", "--follow", "--home", str(folder)]


@pytest.fixture
def spawner(monkeypatch: pytest.MonkeyPatch) -> Iterator[Spawner]:
    monkeypatch.setattr(spawn, "PRELOADED", ("swarmnode.app.cli.main",))  # the others cost seconds
    monkeypatch.setattr(spawn, "ACCELERATORS", ())
    made = Spawner()
    yield made
    made.close()


async def start(spawner: Spawner, folder: Path, command: list[str], **more: str) -> spawn.ChildProcess:
    with (folder / "out").open("ab") as out, (folder / "error").open("ab") as error:
        return await spawner.start(command, {**os.environ, **more}, out, error)


def fork_server_of(process: spawn.ChildProcess) -> psutil.Process:
    found = psutil.Process(process.pid).parent()
    assert found is not None
    return found


async def plays(folder: Path) -> None:
    async with asyncio.timeout(150.0):
        while b"started" not in (folder / "out").read_bytes() + (folder / "error").read_bytes():
            await asyncio.sleep(0.05)


async def test_a_forked_process_is_its_own(spawner: Spawner, tmp_path: Path) -> None:
    process = await start(spawner, tmp_path, follows(tmp_path))
    await plays(tmp_path)
    assert isinstance(process, ForkedProcess) and process.returncode is None
    assert os.getsid(process.pid) == os.getpgid(process.pid) == process.pid, "a session of its own"
    assert fork_server_of(process).ppid() == os.getpid()
    assert psutil.Process(process.pid).name() == "swarmnode logs"
    theirs = {(file.path, file.fd) for file in psutil.Process(process.pid).open_files()}
    assert {(str(tmp_path / "out"), 1), (str(tmp_path / "error"), 2)} <= theirs
    process.send_signal(signal.SIGTERM)
    assert await process.wait() == process.returncode
    with pytest.raises(ProcessLookupError):
        os.kill(process.pid, 0)
    process.send_signal(signal.SIGTERM)  # nobody else gets it


async def test_words_exit_codes_and_environment_arrive(spawner: Spawner, tmp_path: Path) -> None:
    said = await start(spawner, tmp_path, [*NODE, "--version"])
    wrong = await start(spawner, tmp_path, [*NODE, "status", "--no-such-option"])
    asked = await start(spawner, tmp_path, [*NODE, "config", "show", "--origin"], SWARMNODE_MAX_UP="7Mbit")
    assert [await said.wait(), await wrong.wait(), await asked.wait()] == [0, 2, 0]
    printed = (tmp_path / "out").read_text()
    assert "swarmnode " in printed and "7Mbit" in printed
    assert "no-such-option" in (tmp_path / "error").read_text()


async def test_a_killed_node_is_told_and_others_go_on(spawner: Spawner, tmp_path: Path) -> None:
    one, other = [await start(spawner, tmp_path, follows(tmp_path)) for _ in range(2)]
    one.send_signal(signal.SIGKILL)
    assert await one.wait() == -signal.SIGKILL and other.returncode is None
    other.send_signal(signal.SIGKILL)
    assert await other.wait() == -signal.SIGKILL


async def test_all_end_with_the_fork_server_and_the_next_is_run_as_a_command(spawner: Spawner, tmp_path: Path) -> None:
    process = await start(spawner, tmp_path, follows(tmp_path))
    fork_server_of(process).kill()
    assert await process.wait() == -signal.SIGKILL
    _, left = await asyncio.to_thread(
        psutil.wait_procs, [psutil.Process(process.pid)] if psutil.pid_exists(process.pid) else [], 30
    )
    assert not left
    after = await start(spawner, tmp_path, [*NODE, "--version"])
    assert await after.wait() == 0 and not isinstance(after, ForkedProcess)


async def test_other_commands_than_nodes_are_run_as_processes(spawner: Spawner, tmp_path: Path) -> None:
    for command, more in (([sys.executable, "-c", "print(7)"], {}), ([*NODE, "--version"], {"OMP_NUM_THREADS": "2"})):
        await (await start(spawner, tmp_path, [*NODE, "--version"])).wait()
        process = await start(spawner, tmp_path, command, **more)
        assert not isinstance(process, ForkedProcess), command
        assert await process.wait() == 0


async def test_nothing_is_forked_beside_an_accelerator(
    spawner: Spawner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spawn, "ACCELERATORS", ("/dev/null",))

    process = await start(spawner, tmp_path, [*NODE, "--version"])
    assert not isinstance(process, ForkedProcess) and await process.wait() == 0


async def test_a_fork_server_that_cannot_be_is_done_without(
    spawner: Spawner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spawn, "PRELOADED", ("no_such_module",))

    process = await start(spawner, tmp_path, [*NODE, "--version"])
    assert not isinstance(process, ForkedProcess) and await process.wait() == 0


def test_a_process_with_threads_is_not_forked() -> None:
    code = (
        "import threading, time; from swarmnode.app.local.fork_server import alone; assert alone();"
        "threading.Thread(target=time.sleep, args=(60,), daemon=True).start(); assert not alone()"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=150)
