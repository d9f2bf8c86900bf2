"""The model of a running swarm is had at once: the coordinator copies it when a command asks."""

import asyncio
import json
import re
import signal
import urllib.request
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.swarm.harness import LOAD
from swarmnode.app.local.child import Child, NodePlan
from swarmnode.app.local.spawn import NODE
from swarmnode.keep.recovery import checkpoint
from swarmnode.run.manifest.recipe import PRESETS
from tests.support.processes import BOUND_S, HERE, POLL_S, end, ended, signed_run, until

LINE = re.compile(r"round (\d+), ([\d,]+) samples, \d+ (second|minute)s? old(?:, validation (\d+\.\d+))?")


def said_model(error: str) -> tuple[int, int, float | None]:
    """(round, samples, validation, if it is measured by then) of the line that says which model was taken."""
    (line,) = LINE.finditer(error)
    return int(line[1]), int(line[2].replace(",", "")), None if line[4] is None else float(line[4])


def archived(coordinator: Child) -> Any:
    """What its page lists, the newest first."""
    assert coordinator.ready is not None
    address = f"{coordinator.ready.dashboard.rstrip('/')}/api/v1/archive"
    with urllib.request.urlopen(address, timeout=BOUND_S) as page:
        return json.load(page)["entries"]


def saved_round(home: Path) -> int:
    """The round of the stage that a node saved in its home as it left."""
    rounds = []
    for path in home.glob("saved/*/*/stage-*.json"):
        part = checkpoint.part_of(path.read_bytes(), str(path))
        rounds.append(part.round * part.left)
    return max(rounds)


async def page_shows(coordinator: Child, enough: Callable[[Any], bool]) -> Any:
    """The newest model on the coordinator's page, once it is `enough`."""
    async with asyncio.timeout(BOUND_S):
        while not enough(newest := (await asyncio.to_thread(archived, coordinator))[0]):
            await asyncio.sleep(POLL_S)
    return newest


async def test_a_command_on_a_run_that_trains_takes_the_model_of_now(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    children = list[Child]()
    tiny = PRESETS["tiny"]
    pipeline = replace(tiny.pipeline, validation_every_samples=256, rebalance_period_s=0.0)
    run = replace(tiny, pipeline=pipeline, gossip=replace(tiny.gossip, round_seconds_min=0.0))
    signed = signed_run(folder, run)
    two_rounds = 2 * run.gossip.round_samples

    async def start(name: str, *arguments: str) -> Child:
        plan = NodePlan(name, tmp_path / name, signed, tmp_path / "cache")
        child = await Child.start(plan, [*NODE, *arguments, "--home", str(plan.home), "--name", name, *HERE])
        children.append(child)
        await until(children, lambda: child.ready is not None, f"{name} is ready")
        return child

    try:
        coordinator = await start("coordinator", "coordinator", str(folder), "--port", "0")
        assert coordinator.ready is not None
        here = coordinator.ready.addresses[0]
        for index in range(2):
            volunteer = ("join", here, "--run", str(signed), "--cache", str(tmp_path / "cache"))
            more = ("--notice", "none", "--stage", str(index + 1), "--max-load", LOAD, "--metrics-port", "0")
            await start(f"volunteer-{index}", *volunteer, *more)

        def samples() -> int:
            return min(0 if child.status is None else child.status.samples_total for child in children[1:])

        await until(children, lambda: samples() >= 5 * run.gossip.round_samples, "it trains for some rounds")
        seen = samples()
        code, out, error = await ended("export", str(folder), "--out", str(tmp_path / "model"), "--json")
        assert code == 0, error
        found = json.loads(out)
        assert found["samples"] >= seen - two_rounds and found["round"] >= 3, (found, seen)
        assert said_model(error)[:2] == (found["round"], found["samples"])
        assert 0 <= found["age_s"] < 600.0 and (found["validation"] is None or 0 < found["validation"] < 6.0)
        assert (await asyncio.to_thread(archived, coordinator))[0]["round"] >= found["round"]

        # `archive --once` beside the coordinator: it makes the copy.
        code, out, error = await ended("archive", str(folder), "--once")
        assert code == 0, error
        copy = Path(out.strip())
        assert copy.parent.parent == folder / "archive" and (copy / "archive.json").is_file()
        assert json.loads((copy / "checkpoint.json").read_text())["samples"] >= found["samples"]

        # When both leave, the archive has the last round, whose loss follows.
        volunteers = children[1:]
        for child in volunteers:
            child.signal(signal.SIGINT)
        ended_at = [await child.wait(BOUND_S) for child in volunteers]
        assert all(ended_at)
        for child in volunteers:
            children.remove(child)
            child.bury()
        last = min(saved_round(child.plan.home) for child in volunteers)
        await page_shows(coordinator, lambda newest: newest["round"] >= last)
        newest = await page_shows(coordinator, lambda newest: newest["measured"] != "later")
        assert 0 < newest["loss"] < 6.0, newest

        # What was exported says where it comes from, and so does a stopped coordinator's folder.
        children.remove(coordinator)
        coordinator.signal(signal.SIGTERM)
        assert await coordinator.wait(BOUND_S)
        coordinator.bury()
        for source in (tmp_path / "model", folder):
            words = ("--prompt", "def ", "--tokens", "4", "--json", "--temperature", "0")
            code, out, error = await ended("generate", str(source), *words)
            assert code == 0, error
            made = json.loads(out)
            loss = None if made["validation"] is None else round(made["validation"], 3)
            assert (made["round"], made["samples"], loss) == said_model(error)
            assert made["samples"] >= found["samples"]
    finally:
        await end(children)
