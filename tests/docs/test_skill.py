"""The skill for agents: its commands run in order on a real run, and nodes log the events that it names."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from swarmnode.app.local.child import Child
from tests.docs.test_commands import ROOT
from tests.support.processes import BOUND_S, bootstrap, end, output_of, signed_run, until

SKILL = ROOT / "examples" / "agent-skill" / "SKILL.md"
BLOCK = re.compile(r"```sh\n(.*?)```", re.DOTALL)
EVENT = re.compile(r"`([a-z]+\.[a-z_]+)`")


def test_its_events_are_logged_by_nodes() -> None:
    rows = [line.split("|")[1] for line in SKILL.read_text().splitlines() if line.startswith("| `")]
    named = {event for row in rows for event in EVENT.findall(row)}
    assert len(named) >= 9
    documented = (ROOT / "docs" / "metrics.md").read_text()
    assert not {event for event in named if f"| `{event}` |" not in documented}


@pytest.mark.nightly
async def test_its_commands_run_in_order(tmp_path: Path) -> None:
    children: list[Child] = []
    folder = tmp_path / "run"
    signed = signed_run(folder)
    try:
        await bootstrap(children, tmp_path / "bootstrap", signed)
        invite = await output_of("invite", str(folder), "--home", str(tmp_path / "bootstrap"))
        (tmp_path / "invite.txt").write_text(invite)
        environ = os.environ | {
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "HOME": str(tmp_path),
            "XDG_DATA_HOME": str(tmp_path / "share"),
            "XDG_CACHE_HOME": str(tmp_path / "cache"),
            "XDG_CONFIG_HOME": str(tmp_path / "config"),
        }
        check, start, watch, change = BLOCK.findall(SKILL.read_text())
        shell(check, tmp_path, environ)
        # On loopback, and with its process id, so that the test can end it.
        shell(
            start.replace("join ", "join --listen /ip4/127.0.0.1/tcp/0 ").rstrip() + " echo $! > pid\n",
            tmp_path,
            environ,
        )
        pid = int((tmp_path / "pid").read_text())
        try:
            await until(children, lambda: told(tmp_path, environ) is not None, "the node answers")
            shell(watch, tmp_path, environ)
            shell(change, tmp_path, environ)
            await until(children, lambda: not alive(pid), "the node has left")
        finally:
            if alive(pid):
                os.kill(pid, 9)
        assert "thank you" in (tmp_path / "join.log").read_text()
    finally:
        await end(children)


def shell(text: str, folder: Path, environ: dict[str, str]) -> None:
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", text],
        check=False,
        cwd=folder,
        env=environ,
        capture_output=True,
        text=True,
        timeout=BOUND_S,
    )
    assert done.returncode == 0, f"{text}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"


def told(folder: Path, environ: dict[str, str]) -> str | None:
    """What `status` prints; None while no node answers."""
    done = subprocess.run(
        ["swarmnode", "status"], check=False, cwd=folder, env=environ, capture_output=True, text=True, timeout=BOUND_S
    )
    return done.stdout if done.returncode == 0 else None


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"
