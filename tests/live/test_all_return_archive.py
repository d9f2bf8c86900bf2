"""Real processes: a run comes back without one volunteer's home; its stage is taken from the coordinator's archive."""

import shutil
from pathlib import Path

from benchmarks.swarm.harness import SwarmHarness
from swarmnode.local.child import NodePlan, node_command
from tests.live import test_all_return as all_return


def archiving(plan: NodePlan) -> list[str]:
    """The command of a real node; the coordinator copies the run every few seconds."""
    command = node_command(plan)
    if plan.bootstrap:
        command[command.index("--no-archive")] = "--archive"
        command += ["--archive-every", "10"]
    return command


async def test_a_stage_whose_home_is_lost_comes_from_the_archive(tmp_path: Path) -> None:
    swarm: SwarmHarness = all_return.swarm_of(tmp_path, archiving)
    coordinator = tmp_path / "bootstrap"
    async with swarm.running():
        await swarm.progress(1000, "from the start")
        await swarm.until(lambda: len(all_return.told(coordinator, "archive.saved")) >= 2, "a copy in the archive")
        samples = await all_return.all_leave(swarm)
        lost = swarm.fleet.nodes[1]
        shutil.rmtree(lost.plan.home)
        await all_return.all_join(swarm)
        await swarm.until(lambda: len(swarm.training()) == all_return.STAGES, "everybody trains again")
        await swarm.until(lambda: swarm.samples() >= samples + 256, "more samples")
        done = [all_return.told(child.plan.home, "recovery.done")[-1] for child in swarm.fleet.nodes]
        print([(d["stage"], d["method"], d["behind"], d["reason"]) for d in done])
        assert sorted(str(row["method"]) for row in done) == ["archive", "disk", "disk"], done
        assert not all_return.told(lost.plan.home, "state.fresh")
