"""What a volunteer and an owner said holds over a node's end: a snooze, and the least version. Real processes."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.swarm.harness import resting
from swarmnode import __version__
from swarmnode.app.daemon.admission import ACCESS_FILE
from swarmnode.app.local.child import Child, NodePlan, node_command
from swarmnode.base.ids import RunId
from swarmnode.run import owner
from swarmnode.run.admission.access import UPDATE, AccessList, sign_access_list
from swarmnode.run.manifest.recipe import PRESETS
from tests.support.processes import BOUND_S, bootstrap, end, ended, output_of, said, signed_run, until, worked


async def test_a_snooze_outlives_the_process(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    home = tmp_path / "n1"
    children = list[Child]()
    tiny = PRESETS["tiny"]
    signed = signed_run(folder, replace(tiny, pipeline=replace(tiny.pipeline, stages=1)))
    at = ("--home", str(home))

    async def limits() -> dict[str, Any]:
        found = json.loads(await output_of("status", "--json", *at))["limits"]
        assert isinstance(found, dict)
        return found

    try:
        begin = await bootstrap(children, tmp_path / "boot", signed)
        plan = NodePlan("node", home, signed, tmp_path / "cache", begin)
        first = await Child.start(plan, resting(plan))
        children.append(first)
        await until(children, lambda: worked(first), "it trains")

        assert "paused: snoozed; until " in (await said("snooze", "2h", *at))[1]
        children.remove(first)
        first.kill()
        assert await first.wait(BOUND_S)
        first.bury()

        second = await Child.start(plan, resting(plan))
        children.append(second)
        await until(children, lambda: second.status is not None and second.status.home, "it answers")
        found = await limits()
        assert not found["running"] and found["reason"] == "snoozed" and 3600 < found["until_s"] <= 7200, found
        assert "paused: snoozed; until " in (home / "stderr.log").read_text(), "it says so where it starts"
        assert second.status is not None and second.status.inner_steps == 0

        await output_of("resume", *at)
        await until(children, lambda: worked(second), "it trains again")
        assert (await limits())["running"]

        await output_of("access", str(folder), "--least-version", __version__)
        await until(children, lambda: second.status.least_version == __version__, "the list has come")  # type: ignore[union-attr]

        code, error = await said("access", str(folder), "--least-version", "99.0")
        assert code == 2 and "update here first" in error, error

        # The owner asks for more than we are. A list in the run's folder is read at a start, before any connection.
        run_id = RunId(second.status.run_id)
        key = owner.load_owner(folder / owner.FILE_NAME)
        newer = sign_access_list(key, run_id, AccessList(9, least_version="99.0"))
        (folder / ACCESS_FILE).write_bytes(newer.SerializeToString(deterministic=True))
        line = f"the owner admits swarmnode 99.0 or newer, and it has {__version__}: update it ({UPDATE})"
        command = node_command(replace(plan, home=tmp_path / "old"))
        code, _, error = await ended(*command[command.index("join") :])
        assert code == 77 and line in error.splitlines()[-1] and "Traceback" not in error, error
        # Who was there before leaves, with the same line.
        assert await second.wait(BOUND_S), "a member that is too old leaves"
        second.bury()
        assert second.reason.startswith("exit 77") and line in second.reason, second.reason
    finally:
        await end([child for child in children if child.alive])
