"""A home is copied with its key and both are started: the later one ends and says what to do, the first one goes on."""

import shutil
from pathlib import Path

from swarmnode.app.local.child import Child, NodePlan, node_command
from swarmnode.run.manifest.recipe import PRESETS
from tests.live.test_checkpoint import events
from tests.support.processes import bootstrap, end, signed_run, until


async def test_the_later_of_two_homes_with_one_key_stands_aside(tmp_path: Path) -> None:
    signed = signed_run(tmp_path / "run", PRESETS["tiny"])
    children = list[Child]()
    try:
        begin = await bootstrap(children, tmp_path / "boot", signed)

        async def start(name: str, stage: int) -> Child:
            plan = NodePlan(name, tmp_path / name, signed, tmp_path / "cache", begin, stage)
            return await Child.start(plan, node_command(plan))

        for stage in range(2):
            children.append(await start(f"n{stage}", stage))
        await until(children, lambda: all(events(c.plan.home, "node.ready") for c in children[1:]), "both train")
        first = children[1]
        (tmp_path / "copy").mkdir()
        shutil.copy(first.plan.home / "node.key", tmp_path / "copy" / "node.key")
        twin = await start("copy", 0)
        try:
            assert await twin.wait(300.0), "it does not stand aside"
        finally:
            await end([twin])
        assert twin._process.returncode == 2
        assert "another process runs with this machine's key" in (tmp_path / "copy" / "stderr.log").read_text()
        trained = first.status.samples_total if first.status is not None else 0
        await until(
            children,
            lambda: first.status is not None and first.status.samples_total > trained + 64,
            "the first one goes on",
        )
    finally:
        await end(children)
