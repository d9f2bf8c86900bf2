"""A run that its owner amends while it trains: real processes, the real command line."""

import json
import urllib.request
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.swarm.harness import resting
from swarmnode import manifest as manifests
from swarmnode.local.child import Child, NodePlan
from swarmnode.local.spawn import NODE
from swarmnode.manifest import MANIFEST_FILE, PRESETS, SIGNED_FILE
from tests.support.processes import HERE, end, output_of, said, until, worked

RATE = 0.00125


def rate(child: Child) -> float:
    """The learning rate of the node's last inner step, by its metrics."""
    assert child.status is not None
    with urllib.request.urlopen(f"http://{child.status.metrics_address}/metrics", timeout=30.0) as page:
        lines = page.read().decode().splitlines()
    return next((float(line.split()[-1]) for line in lines if line.startswith("swarmnode_learning_rate")), 0.0)


def on_page(coordinator: Child, key: str) -> Any:
    assert coordinator.ready is not None
    with urllib.request.urlopen(f"{coordinator.ready.dashboard.rstrip('/')}/api/v1/summary", timeout=30.0) as page:
        return json.load(page)[key]


def applied(child: Child) -> list[dict[str, object]]:
    lines = (child.plan.home / "events.jsonl").read_text().splitlines()
    return [json.loads(line)["fields"] for line in lines if '"amendment.applied"' in line]


async def test_an_amendment_reaches_members_and_a_joiner_with_an_old_invite(tmp_path: Path) -> None:
    folder, cache, boot = tmp_path / "run", tmp_path / "cache", tmp_path / "boot"
    tiny = PRESETS["tiny"]
    inner = replace(tiny.inner, decay="constant", replica_rate="same")
    gossip = replace(tiny.gossip, round_seconds_min=0.5)
    manifests.init(folder, replace(tiny, inner=inner, gossip=gossip))
    plan = NodePlan("coordinator", boot, folder / SIGNED_FILE, cache, bootstrap=True)
    command = [*NODE, "coordinator", str(folder), "--home", str(boot), "--port", "0", "--no-archive", *HERE]
    coordinator = await Child.start(plan, command)
    children = [coordinator]
    try:
        await until(children, lambda: coordinator.ready is not None, "the coordinator is up")
        assert coordinator.ready is not None
        run_id, begin = coordinator.ready.run_id, coordinator.ready.addresses
        for number in range(3):
            plan = NodePlan(
                f"node-{number}", tmp_path / f"n{number}", folder / SIGNED_FILE, cache, begin, min(number, 1)
            )
            children.append(await Child.start(plan, resting(plan)))
        await until(children, lambda: all(map(worked, children[1:])), "three nodes train")
        line = (await output_of("invite", str(folder), "--home", str(boot))).strip()

        path = folder / MANIFEST_FILE
        before = path.read_text()
        path.write_text(before.replace("clip_norm = 1.0", "clip_norm = 0.5"))
        code, error = await said("bootstrap", str(folder), "--home", str(tmp_path / "second"), *HERE)
        assert code == 78 and "inner.clip_norm: 1.0 -> 0.5" in error and "swarmnode amend" in error, error
        path.write_text(before)

        now = on_page(coordinator, "round")
        made = await output_of("amend", str(folder), f"inner.learning_rate={RATE}", "--from-round", str(now + 4))
        assert made.startswith("amendment 1 from round ") and f"inner.learning_rate 0.01 -> {RATE}" in made, made
        later = await output_of("amend", str(folder), "inner.clip_norm=0.5", "--from-round", str(now + 6))
        assert "inner.clip_norm 1.0 -> 0.5" in later, later
        assert await output_of("amend", str(folder), "--list") == made + later
        ahead = await output_of("amend", str(folder), "inner.clip_norm=0.7", "--from-round", "1000000")
        await until(children, lambda: f"{ahead.strip()} (pending)" in on_page(coordinator, "amendments"), "one pends")

        await until(children, lambda: all(applied(child) for child in children[1:]), "all nodes have taken it up")
        at = int(made.split(":")[0].split()[-1])
        for child in children[1:]:
            assert applied(child)[0]["amendment"] in (1, 2), "both at once where rounds are quick"
            assert int(str(applied(child)[0]["round"])) >= at
        await until(children, lambda: all(RATE <= rate(child) < 2 * RATE for child in children[1:]), "the new rate")

        home = tmp_path / "joiner"
        joiner = await Child.start(
            NodePlan("joiner", home, folder / SIGNED_FILE, cache), [*NODE, "join", line, "--home", str(home), *HERE]
        )
        children.append(joiner)
        await until(children, lambda: worked(joiner) and RATE <= rate(joiner) < 2 * RATE, "a joiner")
        assert joiner.status is not None and joiner.status.run_id == run_id
        in_force = [*(f"{line.strip()} (in force)" for line in (made, later)), f"{ahead.strip()} (pending)"]
        await until(
            children,
            lambda: joiner.status is not None and list(joiner.status.amendments) == in_force,
            "the joiner has done the round of the second",
        )
        shown = json.loads(await output_of("status", "--json", "--home", str(home)))
        texts = [line.partition(" (")[0] for line in shown["amendments"]]  # while a replica is renewed none is in force
        assert texts == [line.partition(" (")[0] for line in in_force], shown
        await until(children, lambda: on_page(coordinator, "amendments") == in_force, "the page says so, too")
        for child in children:
            assert child.status is not None and child.status.run_id == run_id
    finally:
        await end(children)
