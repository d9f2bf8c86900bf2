"""The model of a running swarm is had at once: the coordinator copies it when a command asks."""

import json
import re
import signal
from pathlib import Path

from swarmnode.manifest import SIGNED_FILE
from tests.live.test_archive import Owners, page, run_of
from tests.support.processes import ended

LINE = re.compile(r"round (\d+), ([\d,]+) samples, \d+ (second|minute)s? old, validation (\d+\.\d+)")


def said_model(error: str) -> tuple[int, int, float]:
    """(round, samples, validation) of the line that says which model was taken."""
    (line,) = LINE.finditer(error)
    return int(line[1]), int(line[2].replace(",", "")), float(line[4])


async def test_a_command_on_a_run_that_trains_takes_the_model_of_now(tmp_path: Path) -> None:
    owners, run = Owners(tmp_path), run_of()
    cache = ("--cache", str(tmp_path / "cache"))
    two_rounds = 2 * run.gossip.round_samples
    try:
        coordinator = await owners.start("coordinator", "coordinator", str(owners.run), "--port", "0")
        assert coordinator.ready is not None
        here = coordinator.ready.addresses[0]
        for index in range(2):
            volunteer = ("join", here, "--run", str(owners.run / SIGNED_FILE), *cache, "--notice", "none")
            await owners.start(f"volunteer-{index}", *volunteer, "--stage", str(index))
        volunteer_homes = owners.children[1:]

        def samples() -> int:
            return min(0 if child.status is None else child.status.samples_total for child in volunteer_homes)

        await owners.until(lambda: samples() >= 8 * run.gossip.round_samples, "it trains for some rounds")
        seen = samples()
        code, out, error = await ended("export", str(owners.run), "--out", str(tmp_path / "model"), "--json")
        assert code == 0, error
        found = json.loads(out)
        assert found["samples"] >= seen - two_rounds and found["round"] >= 6, (found, seen)
        assert said_model(error)[:2] == (found["round"], found["samples"])
        assert 0 <= found["age_s"] < 600.0 and 0 < found["validation"] < 6.0
        assert (await page(coordinator, "/api/v1/archive"))["entries"][0]["round"] >= found["round"]

        # `archive --once` beside the coordinator: it makes the copy.
        code, out, error = await ended("archive", str(owners.run), "--once")
        assert code == 0, error
        copy = Path(out.strip())
        assert copy.parent.parent == owners.run / "archive" and (copy / "archive.json").is_file()
        assert json.loads((copy / "archive.json").read_text())["samples"] >= found["samples"]

        # What was exported says where it comes from, and so does a stopped coordinator's folder.
        coordinator.signal(signal.SIGTERM)
        coordinator.told = "stopped by the test"
        await coordinator.wait(60.0)
        for source in (tmp_path / "model", owners.run):
            words = ("--prompt", "def ", "--tokens", "4", "--json", "--temperature", "0")
            code, out, error = await ended("generate", str(source), *words)
            assert code == 0, error
            made = json.loads(out)
            assert (made["round"], made["samples"], round(made["validation"], 3)) == said_model(error)
            assert made["samples"] >= found["samples"]
    finally:
        await owners.stop()
