"""A machine with room serves two stages in one process, beside one that serves one. Real processes and p2pd."""

import json
from dataclasses import replace
from pathlib import Path

from benchmarks.swarm.harness import resting
from swarmnode.app.local.child import Child, NodePlan
from swarmnode.app.local.swarm_view import headline
from swarmnode.base.ids import PeerId, machine_of, part_of
from swarmnode.run.manifest.recipe import PRESETS
from tests.support.processes import bootstrap, end, output_of, signed_run, until, worked


def meets(child: Child) -> bool:
    """Whether a replica of its averaged with another machine's."""
    pairs = {} if child.status is None else child.status.counters
    return any("exchanges" in metric and "paired" in metric and count for metric, count in pairs.items())


async def test_a_machine_serves_two_stages_and_averages_with_one_of_one(tmp_path: Path) -> None:
    tiny = PRESETS["tiny"]
    pipeline = replace(tiny.pipeline, stages=2, span_max=2)
    signed = signed_run(tmp_path / "run", replace(tiny, pipeline=pipeline))
    children = list[Child]()
    try:
        begin = await bootstrap(children, tmp_path / "boot", signed)
        plan = NodePlan("wide", tmp_path / "wide", signed, tmp_path / "cache", begin, stage=0)
        wide = await Child.start(plan, resting(plan))
        children.append(wide)
        await until(children, lambda: worked(wide), "it trains both stages alone")

        plan = NodePlan("narrow", tmp_path / "narrow", signed, tmp_path / "cache", begin, stage=1)
        narrow = await Child.start(plan, [*resting(plan), "--stages-max", "1"])
        children.append(narrow)
        await until(children, lambda: meets(wide), "both average the second stage")

        status = wide.status
        assert status is not None
        parts = [peer for peer in status.peers if machine_of(PeerId(peer.peer_id)) == status.peer_id]
        assert [part_of(PeerId(peer.peer_id)) for peer in parts] == [1]
        assert headline(status).startswith("stages 1-2 of 2")
        shown = json.loads(await output_of("status", "--json", "--home", str(tmp_path / "wide")))
        assert {peer["stage"] for peer in shown["peers"]} == {1}
    finally:
        await end([child for child in children if child.alive])
