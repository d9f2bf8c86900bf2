"""A real swarm: real processes, real DHT, real streams, real text; killed, joined, told to go, nothing left behind."""

import asyncio
import math
import os
import shutil
import signal
import subprocess
import tempfile
import urllib.request
from pathlib import Path

import pytest

from benchmarks.swarm.harness import trains
from swarmnode.app.local.child import Child
from swarmnode.app.local.evaluation import export_model
from swarmnode.app.local.summary import count, totals
from swarmnode.base.metrics import name
from tests.support.live_swarm import BOUND_S, swarm_in


def fetch(child: Child, path: str) -> str:
    assert child.ready is not None
    with urllib.request.urlopen(f"http://{child.ready.metrics_address}{path}", timeout=BOUND_S) as answer:
        return str(answer.read().decode())


def check_exposition(child: Child) -> None:
    """A real node's metrics are as Prometheus wants them, where promtool is there to say so, as in CI."""
    assert fetch(child, "/readyz") == "training\n"
    text = fetch(child, "/metrics")
    assert name.RUN_SAMPLES in text
    if shutil.which("promtool") is not None or os.environ.get("CI") == "true":
        checked = subprocess.run(
            ["promtool", "check", "metrics"], input=text, capture_output=True, text=True, timeout=BOUND_S, check=False
        )
        assert checked.returncode == 0, checked.stderr


async def test_a_swarm_survives_and_leaves_nothing(tmp_path: Path) -> None:
    swarm = swarm_in(tmp_path)
    fleet = swarm.fleet
    async with swarm.running():
        await swarm.progress(128, "from the start")

        for stage in (1, 0):
            await swarm.until(lambda stage=stage: len(swarm.training(stage)) == 2, f"two replicas of {stage}")
            victim = swarm.training(stage)[0]
            victim.signal(signal.SIGKILL)
            await swarm.until(lambda victim=victim: not victim.alive, "the killed node is gone")
            await swarm.progress(128, f"after the death of a replica of stage {stage}")
            await fleet.replace(victim)
            await swarm.until(lambda: trains(fleet.nodes[-1]), "the late joiner serves")

        joiners = fleet.nodes[4:]
        assert sorted(joiner.stage or 0 for joiner in joiners) == [0, 1], "each went where it was needed"
        await swarm.until(lambda: all(j.status and j.status.inner_steps > 0 for j in joiners), "both joiners train")
        for joiner in joiners:  # one that fell behind on a loaded machine takes a state again
            mine = [facts for facts in fleet.facts() if facts.name == joiner.name]
            assert count(mine, name.RECOVERIES, method="replica") >= 1, "both got their state from a replica"

        await asyncio.to_thread(check_exposition, joiners[0])
        met = totals(fleet.facts()).exchanges["paired"]
        await swarm.until(lambda: totals(fleet.facts()).exchanges["paired"] >= met + 4, "replicas meet in pairs")

        leaver = joiners[1]
        leaver.signal(signal.SIGTERM)
        await swarm.until(lambda: leaver.reason != "", "a node told by SIGTERM leaves")
        assert leaver.reason == "left", leaver.reason
        assert list(leaver.plan.home.glob("saved/*/*/mean-*.safetensors")), "and has saved its stage"
        await swarm.progress(128, "after a node left")

        assert fleet.bootstrap is not None
        fleet.bootstrap.signal(signal.SIGKILL)
        await swarm.until(lambda: not fleet.bootstrap.alive, "the bootstrap is gone")  # type: ignore[union-attr]
        await swarm.progress(128, "without the bootstrap")

        def learned() -> bool:
            """By those that live: who saw the first loss, near that of a guess among 256 bytes, may be dead."""
            loss = totals(fleet.facts()).loss_validation
            return loss is not None and loss < math.log(256) - 1.0

        await swarm.until(learned, "the held-out loss falls")
    killed = [child for child in fleet.nodes if child.reason.startswith("killed by SIGKILL")]
    assert len(killed) == 2 and all(child.reason == "left" for child in fleet.nodes if child not in killed), {
        child.name: child.reason for child in fleet.nodes
    }
    assert swarm.left_running() == []
    # What killed nodes could not remove themselves, the next node of this user sweeps.
    homes = {child.plan.home for child in [*killed, fleet.bootstrap] if child is not None}
    files = [path for kind in ("ready.json", "*.sock") for path in tmp_path.rglob(kind)]
    assert {path.parent for path in files} <= homes, "those that left removed their files"
    pids = {str(child.pid) for child in [*killed, fleet.bootstrap] if child is not None}
    ours = {str(pid) for pid in swarm.pids}
    left = [entry for entry in os.listdir(tempfile.gettempdir()) if entry.startswith("swarmnode-p2p-")]
    assert {entry.split("-")[2] for entry in left} & ours <= pids, "those that left removed their sockets"
    exported = str(export_model(str(tmp_path), tmp_path / "model")["model"])
    model = pytest.importorskip("transformers").AutoModelForCausalLM.from_pretrained(exported)
    assert sum(parameter.numel() for parameter in model.parameters()) > 10_000
