"""A replica that lies in a swarm of real processes is excluded by one that sends to it, and nobody else is."""

import json
import sys
from pathlib import Path

import pytest

from swarmnode.app.local.child import Child, NodePlan, node_command
from tests.support.live_swarm import swarm_in

LIAR = "node-03"  # one of two replicas of the last stage
BOUND_S = 400.0  # weights are fetched every ten seconds


def excluded(child: Child) -> set[str]:
    lines = (child.plan.home / "events.jsonl").read_text().splitlines()
    return {json.loads(line)["fields"]["peer"] for line in lines if '"event":"peer.excluded"' in line}


@pytest.mark.liar
async def test_a_liar_in_a_swarm_of_processes_is_excluded_and_nobody_else(tmp_path: Path) -> None:
    def command(plan: NodePlan) -> list[str]:
        usual = node_command(plan)
        if plan.name != LIAR:
            return usual
        lies = str(tmp_path / "lies")
        return [sys.executable, "-m", "benchmarks.attack.lying_node", "flip", "1", lies, *usual[3:]]

    swarm = swarm_in(tmp_path, command=command)
    swarm.bound_s = BOUND_S
    async with swarm.running():
        (liar,) = [child for child in swarm.fleet.nodes if child.name == LIAR]
        honest = [child for child in swarm.fleet.nodes if child is not liar]
        assert liar.ready is not None and liar.plan.stage == 1
        peer = liar.ready.peer_id
        callers = [child for child in honest if child.stage == 0]
        await swarm.until(lambda: any(peer in excluded(caller) for caller in callers), "it is found out")
        await swarm.progress(128, "without it")
    assert not any(excluded(child) - {peer} for child in honest)
