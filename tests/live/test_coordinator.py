"""The coordinator with real processes: it shows a run, dies, is not missed, comes back and remembers."""

import asyncio
import json
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp

from benchmarks.swarm.harness import SwarmHarness, fleet_in
from swarmnode.local.child import Child, node_command
from swarmnode.manifest import PRESETS

BOUND_S = 150.0


class Shown(SwarmHarness):
    """Two nodes, a stage each, and their coordinator's page."""

    def __init__(self, folder: Path) -> None:
        self.notes: list[str] = []
        super().__init__(
            fleet_in(folder, PRESETS["tiny"], 2, self.notes.append, cache=folder / "cache", dashboard_port=0), BOUND_S
        )

    async def picture(self, condition: Callable[[dict[str, Any]], bool], what: str) -> dict[str, Any]:
        """The page's picture, once `condition` holds."""
        found: dict[str, Any] = {}
        try:
            async with asyncio.timeout(BOUND_S), aiohttp.ClientSession(self.fleet.page) as session:
                while True:
                    async with session.get("/api/v1/picture") as answer:
                        found = await answer.json()
                    if condition(found):
                        return found
                    await asyncio.sleep(0.2)
        except TimeoutError:
            raise AssertionError(f"not within {BOUND_S:g} s: {what}; {json.dumps(found)[:2000]}") from None


async def test_training_never_needs_its_coordinator(tmp_path: Path) -> None:
    here = Shown(tmp_path)
    fleet = here.fleet
    async with here.running():
        assert fleet.page.startswith("http://127.0.0.1:") and f"dashboard {fleet.page}" in here.notes
        before = await here.picture(
            lambda seen: (
                seen["summary"]["samples"] > 128
                and seen["summary"]["serving"] == 2
                and len(seen["points"]) >= 3
                and any(link["kind"] == "direct" and link["latency_ms"] for link in seen["links"])
                and (seen["summary"]["loss_validation"] or 9) < (seen["summary"]["loss_validation_first"] or 0)
            ),
            "the page shows a run whose loss falls, and a measured link",
        )
        assert {row["name"] for row in before["nodes"]} == {"node-00", "node-01"}
        assert {"move", "arrival"} <= {entry["kind"] for entry in before["entries"]}
        assert [row for row in before["contributors"] if row["worked_s"] > 0 and row["steps"] > 0]

        old = fleet.bootstrap
        assert old is not None
        old.signal(signal.SIGKILL)
        await here.until(lambda: not old.alive, "the coordinator is gone")
        old.bury()
        trained = here.samples()
        await here.until(lambda: here.samples() >= trained + 256, "training goes on without it")

        fleet.bootstrap = await Child.start(old.plan, node_command(old.plan))
        again = fleet.bootstrap
        await here.until(lambda: again.ready is not None or not again.alive, "it is back")
        after = await here.picture(
            lambda seen: seen["summary"]["serving"] == 2 and seen["summary"]["samples"] >= trained + 256,
            "the picture is back, and current",
        )
        assert after["points"][0] == before["points"][0], "its history too"
        serials = {entry["serial"] for entry in after["entries"]}
        assert {entry["serial"] for entry in before["entries"]} <= serials
        work = {row["peer"]: row["worked_s"] for row in before["contributors"]}
        assert all(row["worked_s"] >= work[row["peer"]] for row in after["contributors"] if row["peer"] in work)

        async with aiohttp.ClientSession(fleet.page) as session, session.get("/api/v1/stream") as stream:
            await stream.content.readline()
            again.signal(signal.SIGTERM)
            await here.until(lambda: not again.alive, "it ends though a page is open")
        again.bury()
        assert again.reason == "left"
