"""Real processes: all places that say what a machine gave, and how fast the run is, say the same of one masked run."""

import asyncio
import json
import re
import subprocess
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from swarmnode import connect
from swarmnode.app.local.child import Child, NodePlan
from swarmnode.app.local.spawn import NODE
from swarmnode.run.manifest.folder import SIGNED_FILE, sign_folder
from tests.support.processes import HERE, end, output_of, until

SETTINGS = (
    "pipeline.stages=2",
    "data.block_samples=32",
    "limits.announce_period_s=1.0",
    "limits.record_ttl_s=10.0",
    "pipeline.rebalance_period_s=2.0",
    "pipeline.validation_every_samples=100000",
)
STAGES = (0, 1, 0)
WITHIN = 0.02


def fetch(url: str, **headers: str) -> bytes:
    with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=60) as answer:
        found = answer.read()
    assert isinstance(found, bytes)
    return found


def metric(child: Child, name: str) -> float:
    assert child.ready is not None
    lines = fetch(f"http://{child.ready.metrics_address}/metrics").decode().splitlines()
    return sum(float(line.split()[-1]) for line in lines if re.match(rf"{name}(\{{| )", line))


class MaskedRun:
    """A coordinator and three machines that train conversations, of which a small part counts in the loss."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.run = folder / "run"
        self.children: list[Child] = []
        self.machines: list[Child] = []

    async def begin(self) -> None:
        asked = "tell me of the river and of the rain on the water " * 3
        rows = [
            {"messages": [{"role": "user", "content": f"{asked}{n}"}, {"role": "assistant", "content": f"rain {n}"}]}
            for n in range(400)
        ]
        text = self.folder / "talks.jsonl"
        text.write_text("".join(json.dumps(row) + "\n" for row in rows))
        await output_of("data", "make", str(self.folder / "set"), "--from", str(text))
        await output_of("init", str(self.run), "--preset", "tiny", "--data", str(self.folder / "set"))
        await output_of("manifest", "set", str(self.run), *SETTINGS)
        sign_folder(self.run)
        home = self.folder / "boot"
        plan = NodePlan("coordinator", home, self.run / SIGNED_FILE, self.folder / "cache", bootstrap=True)
        where = ["--home", str(home), "--metrics-port", "0", "--port", "0", *HERE]
        self.coordinator = await Child.start(plan, [*NODE, "coordinator", str(self.run), *where])
        self.children.append(self.coordinator)
        await until(self.children, lambda: self.coordinator.ready is not None, "the coordinator is up")
        invite = (await output_of("invite", str(self.run), "--home", str(home))).strip()
        for number, stage in enumerate(STAGES):
            place = self.folder / f"machine-{number}"
            own = NodePlan(f"machine-{number}", place / "home", place, self.folder / "cache")
            words = ["--home", str(own.home), "--cache", str(own.cache), "--notice", "none", "--stage", str(stage + 1)]
            words += ["--data-root", str(self.folder / "set"), *HERE]
            child = await Child.start(own, [*NODE, "join", invite, *words])
            self.children.append(child)
            self.machines.append(child)

    def page(self, path: str) -> Any:
        assert self.coordinator.ready is not None
        return json.loads(fetch(f"{self.coordinator.ready.dashboard}api/v1/{path}"))

    def tokens(self) -> int:
        return max((one.status.tokens_total for one in self.machines if one.status is not None), default=0)

    async def stand_still(self) -> None:
        """Feeders pause, and everybody shows that nothing is read any more."""
        for child, stage in zip(self.machines, STAGES, strict=True):
            if stage == 0:
                await output_of("pause", "--home", str(child.plan.home))

        def still() -> bool:
            said = [one.status for one in self.machines if one.status is not None]
            return all(one.run_tokens_per_second == 0.0 == one.given_tokens_per_second for one in said)

        await until(self.children, still, "a run that stands has no speed")


def node_page(child: Child, folder: Path) -> dict[str, Any]:
    """The status on the page of `swarmnode ui`."""
    with (folder / "ui.out").open("w") as out:
        process = subprocess.Popen([*NODE, "ui", "--home", str(child.plan.home)], stdout=out, stderr=subprocess.DEVNULL)
    try:
        while not (said := (folder / "ui.out").read_text()).endswith("\n"):
            assert process.poll() is None
        url, _, token = said.strip().partition("#")
        asked = urllib.request.Request(f"{url}v1/status", b"{}", {"Authorization": f"Bearer {token}"})
        with urllib.request.urlopen(asked, timeout=60) as answer:
            found = json.load(answer)
    finally:
        process.terminate()
        process.wait(60)
    assert isinstance(found, dict)
    return found


async def check_places(run: MaskedRun, child: Child) -> int:
    """The tokens that `child` gave, as every place says."""
    home = str(child.plan.home)
    status = child.status
    assert status is not None and status.given.tokens == status.tokens_given
    lines = (await output_of("receipts", "--json", "--home", home)).splitlines()
    receipts = [json.loads(line) for line in lines]
    for key in ("samples", "tokens", "targets"):
        assert sum(one[key] for one in receipts) == getattr(status.given, key), f"receipts: {key}"
        assert metric(child, f"swarmnode_given_{key}") == getattr(status.given, key), f"metrics: {key}"
    assert 0 < status.given.targets < 0.5 * status.given.tokens, "the mask leaves most tokens out"
    assert f"{status.given.tokens:,} tokens" in await output_of("status", "--home", home)
    own = await asyncio.to_thread(node_page, child, run.folder)
    assert int(own["tokens_given"]) == status.given.tokens == int(own["given"]["tokens"])
    assert own["speed"] == {"tokens_total": 0.0, "tokens_given": 0.0}
    return int(status.given.tokens)


@pytest.mark.nightly
async def test_all_places_say_what_each_machine_gave_and_how_fast_the_run_is(tmp_path: Path) -> None:
    run = MaskedRun(tmp_path)
    try:
        await run.begin()
        await until(run.children, lambda: run.tokens() > 60_000, "training goes on")
        await until(run.children, lambda: run.page("summary")["tokens_per_s"] > 0, "the page has seen it for a while")
        page = run.page("summary")["tokens_per_s"]
        said = [one.status for one in run.machines if one.status is not None]
        for status in said:
            assert status.run_tokens_per_second == pytest.approx(page, rel=0.6), "one definition, at other moments"
            assert status.given_tokens_per_second < 2.0 * status.run_tokens_per_second
        await run.stand_still()

        def on_the_page() -> dict[str, int]:
            rows = run.page("contributors")["contributors"]
            return {row["peer"]: row["receipts"]["tokens"] if row["receipts"] else 0 for row in rows}

        def settled() -> bool:
            said = [one.status for one in run.machines if one.status is not None]
            own = {one.peer_id: one.tokens_given for one in said}
            totals = {one.tokens_total for one in said} | {run.page("summary")["tokens"]}
            return len(totals) == 1 and own == {k: v for k, v in on_the_page().items() if v}

        await until(run.children, settled, "the page has the same receipts")
        total = run.tokens()
        assert run.page("summary")["tokens_per_s"] == 0.0
        gave = [await check_places(run, child) for child in run.machines]
        told = on_the_page()
        assert run.coordinator.ready is not None
        seen = await asyncio.to_thread(lambda: connect(run.coordinator.ready.dashboard).given())  # type: ignore[union-attr]
        assert {peer: work.tokens for peer, work in seen.items() if work.tokens} == {k: v for k, v in told.items() if v}
        for stage in (0, 1):
            of_stage = sum(tokens for tokens, place in zip(gave, STAGES, strict=True) if place == stage)
            assert of_stage == pytest.approx(total, rel=WITHIN), f"stage {stage}"
    finally:
        await end(run.children)
    for child, tokens in zip(run.machines, gave, strict=True):
        thanked = re.findall(r"thank you: ([\d,]+) tokens", (child.plan.home / "stderr.log").read_text())
        assert int(thanked[-1].replace(",", "")) == pytest.approx(tokens, rel=WITHIN), "what join says at its end"
