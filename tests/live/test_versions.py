"""Two versions of this program train in one swarm: real processes of an earlier commit and of this tree."""

import json
import re
import site
import subprocess
import tarfile
import venv
from collections.abc import Sequence
from dataclasses import replace
from io import BytesIO
from pathlib import Path

import pytest

from benchmarks.swarm.harness import resting, trains
from swarmnode.app.local.child import NodePlan
from swarmnode.app.local.spawn import NODE
from swarmnode.app.local.summary import totals
from swarmnode.run.manifest.recipe import PRESETS
from tests.support.live_swarm import swarm_in
from tests.support.processes import output_of

EARLIER = "406400b"  # the last commit before versions were negotiated
EARLIER_NODE = ("-m", "swarmnode.cli.main")
ROOT = Path(__file__).parents[2]
ACCUSED = ("peer.excluded", "audit.failed")
LOOKED_AT = re.compile("|".join((*ACCUSED, "exchange.paired", "amendment.applied", "forged", "protocol version")))


@pytest.fixture
def earlier(tmp_path: Path) -> Path:
    """EARLIER, installed."""
    return installed(EARLIER, tmp_path / "earlier", "swarmnode")


def installed(commit: str, folder: Path, *packages: str) -> Path:
    """An environment in `folder` with the `packages` of `commit`, and all that they need from this one. Skips the test
    where git does not have them."""
    archive = subprocess.run(
        ["git", "archive", commit, *packages], cwd=ROOT, capture_output=True, check=False, timeout=60
    )
    if archive.returncode != 0:
        pytest.skip(
            f"commit {commit} is not here (no git, or a shallow clone): {archive.stderr.decode().strip()[:200]}"
        )
    with tarfile.open(fileobj=BytesIO(archive.stdout)) as files:
        files.extractall(folder, filter="data")
    venv.create(folder, symlinks=True)
    places = [folder, *map(Path, site.getsitepackages())]
    (site_packages,) = folder.glob("lib/python*/site-packages")
    (site_packages / "earlier.pth").write_text("".join(f"{place}\n" for place in places))
    return folder


def earlier_command(earlier: Path, command: Sequence[str]) -> list[str]:
    """The `command` of a node of this tree as one of the sources in `earlier`."""
    assert tuple(command[: len(NODE)]) == NODE, command
    return ["env", "-C", str(earlier), str(earlier / "bin" / "python"), *EARLIER_NODE, *command[len(NODE) :]]


async def test_nodes_of_two_versions_train_in_one_swarm_and_meet_in_rounds(tmp_path: Path, earlier: Path) -> None:
    old: set[str] = set()

    def command(plan: NodePlan) -> Sequence[str]:
        """One replica of each of the two stages is of the earlier version; the bootstrap is of this one."""
        if plan.bootstrap or len(old) + (plan.name not in old) > 2:
            return resting(plan)
        old.add(plan.name)
        counted = plan if plan.stage is None else replace(plan, stage=plan.stage - 1)  # it counts stages from 0
        return earlier_command(earlier, resting(counted))

    swarm = swarm_in(tmp_path, command=command)
    fleet = swarm.fleet
    async with swarm.running():
        # The control socket of the earlier version speaks gRPC: its status is not read, its events are.
        await swarm.until(lambda: all(trains(c) for c in fleet.nodes if c.name not in old), "all train")
        await swarm.progress(256, "together")

        def met(since: dict[str, int]) -> bool:
            """A replica of each version was paired with one of the other, in each stage, from the lines `since` on."""
            peers = {c.ready.peer_id: c.name in old for c in fleet.nodes if c.ready is not None}
            across = {
                (c.name in old, c.stage)
                for c in fleet.nodes
                for event in log(c.plan.home)[since.get(c.name, 0) :]
                if event["event"] == "exchange.paired"
                and peers.get(event["fields"]["peer"], c.name in old) != (c.name in old)
            }
            return len(across) == 4

        await swarm.until(lambda: met({}), "both versions of each stage meet in rounds")
        soon = str(swarm.samples() // PRESETS["tiny"].gossip.round_samples + 2)
        await output_of(
            "amend", str(tmp_path), "inner.clip_norm=0.5", "--from-round", soon
        )  # the earlier knows of none
        new = [c for c in fleet.nodes if c.name not in old]

        def applied() -> bool:
            return all(any(event["event"] == "amendment.applied" for event in log(c.plan.home)) for c in new)

        await swarm.until(applied, "this version takes up an amendment")
        since = {c.name: len(log(c.plan.home)) for c in fleet.nodes}
        await swarm.until(lambda: met(since), "both versions meet with the amendment in force")
        assert {c.name in old: c.stage for c in fleet.nodes}.keys() == {True, False}
        assert all(c.status is not None and c.status.inner_steps > 0 for c in fleet.nodes if c.name not in old)
        assert totals(fleet.facts()).samples >= 256
    said = [event for c in fleet.nodes for event in log(c.plan.home)]
    accused = [
        e for e in said if e["event"] in ACCUSED or "forged" in json.dumps(e) or "protocol version" in json.dumps(e)
    ]
    assert not accused, accused[:3]
    assert all(child.reason == "left" for child in fleet.nodes), {c.name: c.reason for c in fleet.nodes}


def log(home: Path) -> list[dict[str, dict[str, str]]]:
    """A node's events so far that are looked at; its last line may still be half written."""
    lines = (home / "events.jsonl").read_text().splitlines() if (home / "events.jsonl").exists() else []
    return [json.loads(line) for line in lines if line.endswith("}") and LOOKED_AT.search(line)]
