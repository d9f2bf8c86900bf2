"""A run that was stopped and resumes keeps its id where nothing but time has passed: `up --resume`, `join --resume`."""

from dataclasses import replace
from pathlib import Path

from benchmarks.swarm.harness import resting
from swarmnode.app.local.child import Child, NodePlan
from swarmnode.run.manifest.recipe import PRESETS
from tests.live.test_checkpoint import events, up
from tests.support.processes import bootstrap, end, output_of, signed_run, until


async def test_a_run_that_resumes_keeps_its_id_and_its_amendments(tmp_path: Path) -> None:
    run = tmp_path / "run"
    gossip = replace(PRESETS["tiny"].gossip, round_samples=256, round_seconds_min=0.0)
    signed = signed_run(run, replace(PRESETS["tiny"], gossip=gossip))
    children = list[Child]()
    amended = await output_of("amend", str(run), "inner.clip_norm=0.5", "--from-round", "1")
    first = up(tmp_path, {}, str(run), "--nodes", "2", "--samples", "500")
    second = up(tmp_path, {}, "--resume", first["folder"], "--nodes", "2", "--samples", str(first["samples"] + 200))
    assert second["run"] == first["run"] and second["samples"] >= first["samples"] + 200
    loaded = events(tmp_path / second["folder"], "checkpoint.loaded")
    assert sorted(row["stage"] for row in loaded) == [0, 1]
    assert all(row["samples_total"] >= first["samples"] for row in loaded)
    kept = Path(tmp_path / second["folder"])
    assert await output_of("amend", str(kept), "--list") == amended, "the checkpoint carries the owner's amendments"

    try:
        begin = await bootstrap(children, tmp_path / "boot", signed)
        for stage in range(2):
            home = tmp_path / f"n{stage}"
            plan = NodePlan(home.name, home, signed, tmp_path / "cache", begin, stage)
            children.append(await Child.start(plan, [*resting(plan), "--resume", str(kept)]))
        await until(
            children,
            lambda: all(events(child.plan.home, "checkpoint.loaded") for child in children[1:]),
            "both join the run itself with its checkpoint",
        )
        for child in children[1:]:
            assert child.status is not None and child.status.run_id == first["run"]
            assert events(child.plan.home, "checkpoint.loaded")[0]["samples_total"] >= second["samples"]
    finally:
        await end(children)
