"""A volunteer's verbs on a running daemon: real processes, the real command line, what peers see of it."""

import json
from pathlib import Path
from typing import Any

from benchmarks.swarm.harness import resting
from swarmnode.local.child import Child, NodePlan, node_command
from swarmnode.wire.record_pb2 import NODE_STATE_PAUSED, NODE_STATE_TRAINING
from tests.support.processes import BOUND_S, bootstrap, end, output_of, said, signed_run, until, worked


def used(home: Path) -> int:
    return int(json.loads((home / "usage.json").read_text())["nbytes"])


async def test_a_volunteer_rules_over_a_running_node(tmp_path: Path) -> None:
    signed, home, children = signed_run(tmp_path / "run"), tmp_path / "n2", list[Child]()
    at = ("--home", str(home))

    async def status() -> dict[str, Any]:
        found = json.loads(await output_of("status", "--json", *at))
        assert isinstance(found, dict)
        return found

    try:
        begin = await bootstrap(children, tmp_path / "boot", signed)
        for number in range(3):
            stage = min(number, 1)
            here = tmp_path / f"n{number}"
            plan = NodePlan(f"node-{number}", here, signed, tmp_path / "cache", begin, stage)
            flags = ["--max-up", "80Mbit", "--hours", "00:00-23:59,23:59-00:00"] if number == 2 else []
            children.append(await Child.start(plan, [*node_command(plan), *flags] if flags else resting(plan)))
        ours, other = children[3], children[1]
        await until(children, lambda: all(map(worked, children[1:])), "three nodes train")

        found = await status()
        assert found["limits"]["limits"]["max-up"] == "80Mbit" and found["limits"]["running"]
        assert "max-up" in await output_of("config", "show", "--origin", *at)
        config = json.loads(await output_of("config", "show", "--json", *at))
        assert config["max-up"] == {"value": "80Mbit", "origin": "flag"}
        assert config["pipeline.stages"]["origin"] == "manifest"
        assert "stage 1 of 2" in await output_of("top", "--times", "1", *at)
        assert "node.started" in await output_of("logs", "-n", "100000", *at)

        await output_of("pause", *at)
        await until(children, lambda: ours.status.state == NODE_STATE_PAUSED, "it pauses")  # type: ignore[union-attr]
        me = ours.status.peer_id  # type: ignore[union-attr]
        await until(
            children,
            lambda: any(p.peer_id == me and p.state == NODE_STATE_PAUSED for p in other.status.peers),  # type: ignore[union-attr]
            "its peers know",
        )
        assert (await status())["limits"]["reason"] == "asked to pause"
        await output_of("resume", *at)
        await until(children, lambda: ours.status.state == NODE_STATE_TRAINING, "it goes on")  # type: ignore[union-attr]
        steps = ours.status.inner_steps  # type: ignore[union-attr]
        await until(children, lambda: ours.status.inner_steps > steps, "and works")  # type: ignore[union-attr]

        shown = await output_of("limit", "--quota", "1MB", "--max-up", "none", *at)
        assert shown == "hours 00-23:59,23:59-00\nquota 1MB/day\n"
        await until(children, lambda: ours.status.state == NODE_STATE_PAUSED, "the quota is used up")  # type: ignore[union-attr]
        assert "quota" in (await status())["limits"]["reason"]
        await until(children, lambda: used(home) > 1_000_000, "the count is written down")
        await output_of("limit", "--quota", "none", *at)
        await until(children, lambda: ours.status.state == NODE_STATE_TRAINING, "it goes on again")  # type: ignore[union-attr]

        for wrong, code in ((("limit", "--max-up", "fast"), 2), (("snooze", "soon"), 2), (("pause",), 2)):
            where = at if wrong != ("pause",) else ("--home", str(tmp_path / "boot"))
            got, error = await said(*wrong, *where)
            assert got == code and error.count("\n") == 1, error
        await output_of("finish", *at)
        assert await ours.wait(BOUND_S), "it leaves when all is done"
        ours.bury()
        assert ours.reason == "left"
        assert list(home.glob("stage-*.safetensors"))
        assert (await said("status", *at))[0] == 69
        thanks = [json.loads(text) for text in (await output_of("receipts", "--json", *at)).splitlines()]
        assert sum(receipt["samples"] for receipt in thanks) > 0, "whom it worked for has signed for it"
    finally:
        await end([child for child in children if child.alive])
