"""The demo's containers without an engine: their scripts run as processes here, under a service manager's eyes."""

import os
import pathlib
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request

import pytest

from swarmnode.app.daemon import ready_file
from swarmnode.app.daemon.service_manager import BEAT_S, Supervisor

ROOT = pathlib.Path(__file__).resolve().parents[2]
COMPOSE = ROOT / "deploy" / "compose"
BOUND_S = 120.0


class Manager:
    """What systemd does: listens at NOTIFY_SOCKET, always, since the kernel keeps few datagrams for who does not."""

    def __init__(self, path: str) -> None:
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.socket.bind(path)
        self.heard: queue.Queue[dict[str, str]] = queue.Queue()
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        while True:
            lines = self.socket.recv(4096).decode().splitlines()
            self.heard.put(dict(line.partition("=")[::2] for line in lines))

    def until(self, word: str) -> dict[str, str]:
        while word not in (heard := self.heard.get(timeout=BOUND_S)):
            pass
        return heard


def test_a_supervisor_that_is_not_there_costs_nothing(tmp_path: pathlib.Path) -> None:
    assert not Supervisor({}).tell(READY="1")
    assert not Supervisor({"NOTIFY_SOCKET": "vsock:2:1234"}).tell(READY="1")
    assert not Supervisor({"NOTIFY_SOCKET": str(tmp_path / "nobody")}).tell(READY="1")


@pytest.mark.parametrize(
    ("environ", "watchdog_s", "beat_s"),
    [
        ({}, None, BEAT_S),
        ({"WATCHDOG_USEC": "4000000"}, 4.0, 2.0),
        ({"WATCHDOG_USEC": "4000000", "WATCHDOG_PID": "7"}, 4.0, 2.0),
        ({"WATCHDOG_USEC": "4000000", "WATCHDOG_PID": "8"}, None, BEAT_S),
        ({"WATCHDOG_USEC": "600000000"}, 600.0, BEAT_S),
        ({"WATCHDOG_USEC": "0"}, None, BEAT_S),
        ({"WATCHDOG_USEC": "soon"}, None, BEAT_S),
    ],
)
def test_the_watchdog_is_fed_twice_in_its_time(
    environ: dict[str, str], watchdog_s: float | None, beat_s: float
) -> None:
    supervisor = Supervisor(environ, pid=7)
    assert (supervisor.watchdog_s, supervisor.beat_s) == (watchdog_s, beat_s)


@pytest.mark.parametrize("abstract", [False, True])
def test_words_arrive_as_lines(tmp_path: pathlib.Path, abstract: bool) -> None:
    name = f"@swarmnode-test-{os.getpid()}" if abstract else str(tmp_path / "notify")
    manager = Manager("\0" + name[1:] if abstract else name)
    assert Supervisor({"NOTIFY_SOCKET": name}).tell(READY="1", STATUS="two\nlines")
    assert manager.until("READY") == {"READY": "1", "STATUS": "two"}


def script(name: str, folder: pathlib.Path, **environ: str) -> subprocess.Popen[bytes]:
    folder.mkdir(exist_ok=True)
    path = f"{pathlib.Path(sys.executable).parent}:{os.environ['PATH']}"
    more = {"PATH": path, "HOME_DIR": str(folder), "SHARE": str(folder.parent / "share"), "METRICS_HOST": "127.0.0.1"}
    more |= {"SWARMNODE_METRICS_PORT": "0", "LISTEN": "/ip4/127.0.0.1/tcp/0"}
    more |= {"BIND": "127.0.0.1", "PORT": "0"}
    with (folder / "stderr").open("wb") as errors:
        return subprocess.Popen(["sh", str(COMPOSE / name)], env={**os.environ, **more, **environ}, stderr=errors)


@pytest.mark.nightly
def test_the_demo_of_compose_comes_up_and_leaves(tmp_path: pathlib.Path) -> None:
    (tmp_path / "share").mkdir()
    manager = Manager(str(tmp_path / "notify"))
    started: list[subprocess.Popen[bytes]] = []
    try:
        notify = {"NOTIFY_SOCKET": str(tmp_path / "notify"), "WATCHDOG_USEC": "1000000"}
        started.append(script("bootstrap.sh", tmp_path / "bootstrap", **notify))
        assert manager.until("READY")["MAINPID"] == str(started[0].pid), "exec: no shell between"
        assert manager.until("WATCHDOG")["STATUS"] == "bootstrap"
        started.append(script("node.sh", tmp_path / "node", NOTIFY_SOCKET="", WATCHDOG_USEC=""))
        home = tmp_path / "node" / "node"
        wait(lambda: home.is_dir() and ready_file.read(home), started)
        found = ready_file.read(home)
        assert found is not None
        wait(lambda: get(f"http://{found.metrics_address}/readyz") == "training\n", started)
        port = found.metrics_address.rpartition(":")[2]
        healthy = [sys.executable, str(ROOT / "deploy" / "docker" / "healthy.py")]
        subprocess.run(healthy, env={"SWARMNODE_METRICS_PORT": port}, check=True, timeout=BOUND_S)
        for process in reversed(started):
            process.send_signal(signal.SIGTERM)
            assert process.wait(BOUND_S) == 0
        assert manager.until("STOPPING")
        sick = subprocess.run(
            healthy, env={"SWARMNODE_METRICS_PORT": port}, check=False, timeout=BOUND_S, capture_output=True
        )
        assert sick.returncode == 1 and sick.stderr.startswith(b"no answer")
    finally:
        for process in started:
            process.kill()
            process.wait()


def get(url: str) -> str:
    try:
        with urllib.request.urlopen(url, timeout=BOUND_S) as answer:
            return str(answer.read().decode())
    except urllib.error.HTTPError as error:
        return str(error.read().decode())


def wait(condition: object, processes: list[subprocess.Popen[bytes]]) -> None:
    assert callable(condition)
    end = time.monotonic() + BOUND_S
    while not condition():
        assert time.monotonic() < end, "not within the bound"
        assert all(process.poll() is None for process in processes), "one of them died"
        time.sleep(0.1)
