"""A joiner whose bootstrap is gone finds the run in its own network."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from swarmnode import manifest as manifests
from swarmnode.daemon import ready_file
from swarmnode.identity import Identity
from swarmnode.manifest import PRESETS

BOUND_S = 120.0


def test_a_joiner_finds_a_member_by_multicast(tmp_path: Path) -> None:
    manifests.init(tmp_path / "run", PRESETS["tiny"])
    started: list[subprocess.Popen[bytes]] = []

    def start(name: str, *words: str) -> ready_file.Ready:
        home = tmp_path / name
        home.mkdir()
        command = [sys.executable, "-m", "swarmnode.cli.main", *words, "--home", str(home), "--lan"]
        with (home / "stderr").open("wb") as errors:
            started.append(subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=errors))
        end = time.monotonic() + BOUND_S
        while (found := ready_file.read(home)) is None:
            said = (home / "stderr").read_text()
            if "no bootstrap gave the manifest" in said:
                pytest.skip("multicast does not come back on this machine")
            assert started[-1].poll() is None and time.monotonic() < end, said
            time.sleep(0.1)
        return found

    try:
        member = start("member", "bootstrap", str(tmp_path / "run"))
        gone = f"/ip4/127.0.0.1/tcp/1/p2p/{Identity.generate().peer_id}"
        start("joiner", "join", gone, "--run", member.run_id, "--cache", str(tmp_path / "cache"))
        for process in reversed(started):
            process.send_signal(signal.SIGTERM)
            process.wait(BOUND_S)
        kept = json.loads((tmp_path / "joiner" / "contacts.json").read_text())
        assert member.peer_id in [row["peer"] for row in kept], "and will find it again"
    finally:
        for process in started:
            process.kill()
            process.wait()
