"""A real swarm: real processes, real DHT, real streams, real text; killed, joined, told to go, nothing left behind."""

from __future__ import annotations

import asyncio
import math
import os
import shutil
import signal
import subprocess
import tempfile
import urllib.request
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from swarmnode import manifest as manifests
from swarmnode.local.child import Child, node_command
from swarmnode.local.fleet import Command, Fleet, FleetPlan
from swarmnode.local.summary import count, totals
from swarmnode.manifest import PRESETS, SIGNED_FILE
from swarmnode.metrics import name
from swarmnode.wire.record_pb2 import NODE_STATE_TRAINING

BOUND_S = 150.0  # for one condition, on a machine that others load


class Swarm:
    """Four nodes in two stages, and the bounds within which they must do what is waited for."""

    def __init__(self, folder: Path, nodes: int = 4, command: Command = node_command) -> None:
        preset = PRESETS["tiny"]
        manifests.init(folder, preset)
        manifests.sign_folder(folder)
        self.notes: list[str] = []
        self.fleet = Fleet(
            FleetPlan(
                folder,
                folder / SIGNED_FILE,
                nodes,
                preset.pipeline.stages,
                folder / "cache",
                preset.seed,
                command=command,
            ),
            self.notes.append,
        )
        self.started: list[psutil.Process] = []

    def samples(self) -> int:
        return count(self.fleet.facts(), name.SAMPLES)

    async def until(self, condition: Callable[[], bool], what: str) -> None:
        try:
            async with asyncio.timeout(BOUND_S):
                while not condition():
                    await self.fleet.poll()
                    self._remember()
                    await asyncio.sleep(0.1)
        except TimeoutError:
            said = [
                f"{child.name}: {child.reason or child.stage} {child.status}"[:600] for child in self.fleet.everybody
            ]
            raise AssertionError(f"not within {BOUND_S:g} s: {what}\n" + "\n".join(said)) from None

    async def progress(self, samples: int, what: str) -> None:
        await self.fleet.poll()
        before = self.samples()
        await self.until(lambda: self.samples() >= before + samples, f"{samples} more samples {what}")

    def _remember(self) -> None:
        """Every process of ours by id, p2pd included, to see at the end that none is left."""
        known = {process.pid for process in self.started}
        for child in self.fleet.everybody:
            if child.alive:
                try:
                    whole = [psutil.Process(child.pid), *psutil.Process(child.pid).children(recursive=True)]
                except psutil.NoSuchProcess:
                    continue
                self.started += [process for process in whole if process.pid not in known]

    def of_stage(self, stage: int) -> list[Child]:
        return [child for child in self.fleet.alive if child.stage == stage and trains(child)]


def trains(child: Child) -> bool:
    return child.status is not None and child.status.state == NODE_STATE_TRAINING


def fetch(child: Child, path: str) -> str:
    assert child.ready is not None
    with urllib.request.urlopen(f"http://{child.ready.metrics_address}{path}", timeout=BOUND_S) as answer:
        return str(answer.read().decode())


def check_exposition(child: Child) -> None:
    """A real node's metrics are as Prometheus wants them, where promtool is there to say so."""
    assert fetch(child, "/readyz") == "training\n"
    text = fetch(child, "/metrics")
    assert name.RUN_SAMPLES in text
    if shutil.which("promtool") is not None:
        checked = subprocess.run(
            ["promtool", "check", "metrics"], input=text, capture_output=True, text=True, timeout=BOUND_S, check=False
        )
        assert checked.returncode == 0, checked.stderr


def test_a_swarm_survives_and_leaves_nothing(tmp_path: Path) -> None:
    async def body() -> None:
        swarm = Swarm(tmp_path)
        fleet = swarm.fleet
        try:
            assert await fleet.start(asyncio.Event())
            await swarm.progress(256, "from the start")

            for stage in (1, 0):
                await swarm.until(lambda stage=stage: len(swarm.of_stage(stage)) == 2, f"two replicas of {stage}")
                victim = swarm.of_stage(stage)[0]
                victim.signal(signal.SIGKILL)
                await swarm.until(lambda victim=victim: not victim.alive, "the killed node is gone")
                await swarm.progress(128, f"after the death of a replica of stage {stage}")
                await fleet.replace(victim)
                await swarm.until(lambda: trains(fleet.nodes[-1]), "the late joiner serves")

            joiners = fleet.nodes[4:]
            assert sorted(joiner.stage or 0 for joiner in joiners) == [0, 1], "each went where it was needed"
            await swarm.until(lambda: all(j.status and j.status.inner_steps > 0 for j in joiners), "both joiners train")
            assert count(fleet.facts(), name.RECOVERIES, method="replica") == 2, "both got their state from a replica"

            await asyncio.to_thread(check_exposition, joiners[0])
            met = totals(fleet.facts()).exchanges["paired"]
            await swarm.until(lambda: totals(fleet.facts()).exchanges["paired"] >= met + 4, "replicas meet in pairs")

            leaver = joiners[1]
            leaver.signal(signal.SIGTERM)
            await swarm.until(lambda: leaver.reason != "", "a node told by SIGTERM leaves")
            assert leaver.reason == "left", leaver.reason
            assert list(leaver.plan.home.glob("stage-*.safetensors")), "and has saved its stage"
            await swarm.progress(128, "after a node left")

            assert fleet.bootstrap is not None
            fleet.bootstrap.signal(signal.SIGKILL)
            await swarm.until(lambda: not fleet.bootstrap.alive, "the bootstrap is gone")  # type: ignore[union-attr]
            await swarm.progress(256, "without the bootstrap")

            done = totals(fleet.facts())
            # Of those that live: who saw the first loss, near that of a guess among 256 bytes, may have been killed.
            assert done.loss_validation is not None and done.loss_validation < math.log(256) - 1.0
        finally:
            swarm._remember()
            await fleet.stop("the test is over")
            await fleet.reap()
        killed = [child for child in fleet.nodes if child.reason.startswith("killed by SIGKILL")]
        assert len(killed) == 2 and all(child.reason == "left" for child in fleet.nodes if child not in killed), {
            child.name: child.reason for child in fleet.nodes
        }
        _, alive = psutil.wait_procs(swarm.started, timeout=BOUND_S)
        assert not [process for process in alive if process.status() != psutil.STATUS_ZOMBIE], "processes left running"
        # What killed nodes could not remove themselves, the next node of this user sweeps.
        homes = {child.plan.home for child in [*killed, fleet.bootstrap] if child is not None}
        files = [path for kind in ("ready.json", "*.sock") for path in tmp_path.rglob(kind)]
        assert {path.parent for path in files} <= homes, "those that left removed their files"
        pids = {str(child.pid) for child in [*killed, fleet.bootstrap] if child is not None}
        ours = {str(process.pid) for process in swarm.started}
        left = [entry for entry in os.listdir(tempfile.gettempdir()) if entry.startswith("swarmnode-p2p-")]
        assert {entry.split("-")[2] for entry in left} & ours <= pids, "those that left removed their sockets"

    asyncio.run(body())
    model = pytest.importorskip("transformers").AutoModelForCausalLM.from_pretrained(export(tmp_path))
    assert sum(parameter.numel() for parameter in model.parameters()) > 10_000


def export(folder: Path) -> str:
    from swarmnode.cli.export import export_run

    return str(export_run(folder, folder / "model"))
